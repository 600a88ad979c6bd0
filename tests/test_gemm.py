"""Products of quantised operands against sums written out in NumPy and an FP64 oracle."""

import numpy as np
import pytest
import torch

from nvfp4.errors import UserError
from nvfp4.numerics.formats import E4M3, decode
from nvfp4.numerics.gemm import gemm, kernel_alpha, reference_alpha, sequential16
from nvfp4.numerics.quantize import QuantizedTensor, decode_operand, dequantize, quantize
from nvfp4.numerics.spec import NVFP4, NVFP4_2D, FP8_1x128, QuantSpec

f32 = np.float32


def random_matrix(seed, shape, spread=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(spread * torch.randn(shape, generator=generator))).bfloat16()


def pair(m=32, n=48, k=128, spread=2.0, spec_b=NVFP4_2D):
    a, b = random_matrix(1, (m, k), spread), random_matrix(2, (n, k), spread)
    return quantize(a, NVFP4), quantize(b, spec_b)


def test_sequential16_is_block_dots_added_in_order():
    # Any codes with any finite scales: a spread in which the FP32 sum depends on its order.
    generator = torch.Generator().manual_seed(0)

    def operand(rows):
        codes = torch.randint(0, 16, (rows, 512), generator=generator, dtype=torch.uint8)
        scale = torch.randint(0, 127, (rows, 32), generator=generator, dtype=torch.uint8)
        return decode_operand(QuantizedTensor(codes, scale, torch.ones(()), NVFP4))

    a, b = operand(32), operand(48)
    total = np.zeros((32, 48), f32)
    for k in range(0, 512, 16):
        dots = a[:, k : k + 16].double() @ b[:, k : k + 16].double().t()
        np.testing.assert_array_equal(dots, dots.float())  # exact in FP32
        total = total + dots.numpy().astype(f32)
    np.testing.assert_array_equal(sequential16(a, b).numpy(), total)
    assert not torch.equal(sequential16(a.flip(1), b.flip(1)), sequential16(a, b))


def test_alphas_are_their_formulas_and_differ_in_some_cases():
    amax = torch.rand(2, 4096, generator=torch.Generator().manual_seed(0)) * 10
    a, b = amax.numpy()
    np.testing.assert_array_equal(kernel_alpha(*amax), a * b * f32(1 / 7225344))
    np.testing.assert_array_equal(reference_alpha(*amax), a * b / f32(7225344))
    share = (kernel_alpha(*amax) != reference_alpha(*amax)).float().mean()
    assert 0.05 < share < 0.4


@pytest.mark.parametrize("accumulate", ["fp32", "sequential16"])
@pytest.mark.parametrize("alpha", ["kernel", "reference"])
def test_product_equals_fp64_on_dequantised_operands(alpha, accumulate):
    a, b = pair()
    y = gemm(a, b, alpha=alpha, accumulate=accumulate)
    exact = dequantize(a).double() @ dequantize(b).double().t()
    size = dequantize(a).double().abs() @ dequantize(b).double().abs().t()
    assert ((y - exact).abs() <= 4e-7 * size).all()


def test_output_is_rounded_once_after_the_accumulator():
    a, b = pair()
    y = gemm(a, b)
    main_grad = random_matrix(5, (32, 48)).float()
    before = main_grad.clone()
    assert torch.equal(gemm(a, b, accumulator=main_grad), y + main_grad)
    assert torch.equal(main_grad, before)
    expected = (y + main_grad).bfloat16()
    assert torch.equal(gemm(a, b, out_dtype=torch.bfloat16, accumulator=main_grad), expected)


def test_plain_operands_are_multiplied_as_they_are():
    x, w = random_matrix(1, (32, 64)), random_matrix(2, (16, 64))
    assert torch.equal(gemm(x, w), x.float() @ w.float().t())
    q = quantize(w, NVFP4)
    mixed = gemm(x, q)
    exact = x.double() @ dequantize(q).double().t()
    assert (mixed - exact).abs().max() <= 1e-6 * exact.abs().max()
    turned = gemm(q, x)
    assert (turned.t() - mixed).abs().max() <= 1e-6 * exact.abs().max()
    fp8 = quantize(w, FP8_1x128)
    assert torch.equal(gemm(x, fp8), x.float() @ dequantize(fp8).t())


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("k", [128, 320])
def test_fp8_partials_of_128_are_scaled_and_added_with_one_rounding(scale, k):
    spec_a = QuantSpec("e4m3", "1x128", scale, second_level="none")
    spec_b = QuantSpec("e4m3", "128x128", scale, second_level="none")
    a = quantize(random_matrix(1, (40, k), 1), spec_a)
    b = quantize(random_matrix(2, (144, k), 1), spec_b)
    total = np.zeros((40, 144), f32)
    for index, start in enumerate(range(0, k, 128)):
        codes = [decode(q.codes[:, start : start + 128], E4M3) for q in (a, b)]
        p = (codes[0] @ codes[1].t()).numpy()
        scale_a = a.block_scale[:, index, None].numpy()
        scale_b = b.block_scale[:, index].numpy().repeat(128)[:144]
        total = ((p * scale_a).astype(np.float64) * scale_b + total).astype(f32)
    np.testing.assert_array_equal(gemm(a, b).numpy(), total)
    exact = dequantize(a).double() @ dequantize(b).double().t()
    assert (gemm(a, b) - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert torch.equal(gemm(a, b, out_dtype=torch.bfloat16), gemm(a, b).bfloat16())


@pytest.mark.parametrize(
    ("a", "b", "arguments", "text"),
    [
        (
            torch.ones(16, 32),
            torch.ones(16, 48),
            {},
            r"contraction .*differs.*\(16, 32\).*\(16, 48\)",
        ),
        (torch.ones(16, 32), torch.ones(16, 32), {"alpha": "exact"}, "alpha 'exact' is not one of"),
        (torch.ones(16, 32), torch.ones(16, 32), {"accumulate": "fp16"}, "'fp16' is not one of"),
        (
            torch.ones(16, 32),
            torch.ones(16, 32),
            {"accumulate": "sequential16"},
            "defined for two NVFP4 operands",
        ),
        (
            quantize(torch.ones(16, 32), QuantSpec(hadamard=16)),
            quantize(torch.ones(16, 32), NVFP4),
            {},
            "both operands must be rotated alike",
        ),
        (
            quantize(torch.ones(16, 32), QuantSpec(hadamard=16)),
            quantize(torch.ones(16, 32), QuantSpec(hadamard=16, signs="none")),
            {},
            "signs fixed .*signs none",
        ),
    ],
)
def test_operands_that_do_not_fit_are_one_clear_line(a, b, arguments, text):
    with pytest.raises(UserError, match=text) as error:
        gemm(a, b, **arguments)
    assert "\n" not in str(error.value)
