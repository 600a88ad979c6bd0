"""quantize and dequantize against a second implementation, and at the edges."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_oracle import fp8, nvfp4, rotate

from nvfp4.errors import UserError
from nvfp4.numerics.formats import E2M1, E4M3, decode, encode
from nvfp4.numerics.quantize import decode_operand, dequantize, quantize, transpose
from nvfp4.numerics.spec import MXFP8, NVFP4, NVFP4_2D, FP8_1x128, FP8_128x128, QuantSpec

STOCHASTIC = QuantSpec(rounding="stochastic")
ROTATED = QuantSpec(hadamard=16)
NAN, INF = float("nan"), float("inf")


def random_matrix(seed, shape, spread=0.0, scale=1.0):
    """Normal numbers times 2^(spread * normal) per block of 16, times scale."""
    generator = torch.Generator().manual_seed(seed)
    m, k = shape
    block = torch.exp2(spread * torch.randn(m, -(-k // 16), generator=generator))
    x = torch.randn(shape, generator=generator) * block.repeat_interleave(16, 1)[:, :k]
    return x * scale


def same(q, codes, scale, amax=None):
    np.testing.assert_array_equal(q.codes.numpy(), codes)
    np.testing.assert_array_equal(q.block_scale.numpy(), scale)
    if amax is not None:
        assert q.amax.item() == amax


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    columns=st.integers(1, 6),
    spread=st.sampled_from([0, 1, 4, 12]),
    scale=st.sampled_from([1e-42, 1e-37, 1e-30, 1e-8, 1.0, 300.0, 1e30]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    rule=st.sampled_from(["current", "before_2_14"]),
)
def test_nvfp4_equals_the_numpy_implementation(seed, rows, columns, spread, scale, dtype, rule):
    x = random_matrix(seed, (16 * rows, 16 * columns), spread, scale).to(dtype)
    values = x.float().numpy()
    same(quantize(x, QuantSpec(scale_rule=rule)), *nvfp4(values, rule=rule))
    same(quantize(x.t(), QuantSpec(scale_rule=rule)), *nvfp4(values.T, rule=rule))
    same(quantize(x, QuantSpec(block="16x16", scale_rule=rule)), *nvfp4(values, 16, rule))
    given_amax = torch.tensor(float(np.abs(values).max()) * 1.7 + 1e-30)
    same(quantize(x, NVFP4, amax=given_amax), *nvfp4(values, amax=given_amax.item()))


@pytest.mark.parametrize("spread", [0, 3])
def test_rotated_nvfp4_equals_the_numpy_implementation(spread):
    x = random_matrix(5, (48, 64), spread).bfloat16()
    for values in (x, x.t()):
        q = quantize(values, ROTATED)
        same(q, *nvfp4(rotate(values.float().numpy())))
        assert q.amax != values.abs().max()  # the amax of the rotated values


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    pow2=st.booleans(),
    scale=st.sampled_from([1e-39, 1e-12, 1.0, 1e30]),
)
def test_fp8_blocks_equal_the_numpy_implementation(seed, shape, pow2, scale):
    x = random_matrix(seed, shape, 2, scale)
    x[: shape[0] // 3] = 0
    for block, rows in (("1x128", 1), ("128x128", 128)):
        spec = QuantSpec("e4m3", block, "pow2" if pow2 else "fp32", second_level="none")
        same(quantize(x, spec), *fp8(x.numpy(), rows, pow2))


def test_transposing_tiles_equals_quantising_the_transpose():
    for seed, spec, shape in ((0, NVFP4_2D, (48, 80)), (1, FP8_128x128, (130, 257))):
        x = random_matrix(seed, shape, 2).bfloat16()
        turned, direct = transpose(quantize(x, spec)), quantize(x.t(), spec)
        same(turned, direct.codes.numpy(), direct.block_scale.numpy())
        assert torch.equal(dequantize(turned), dequantize(quantize(x, spec)).t())
    assert turned.codes.is_contiguous()


def test_rows_have_no_transpose():
    with pytest.raises(UserError, match="blocks of 1x16 run along one dimension"):
        transpose(quantize(torch.ones(16, 16), NVFP4))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), power=st.integers(-60, 60), spread=st.sampled_from([0, 2, 6]))
def test_scaling_by_a_power_of_two_changes_only_the_amax(seed, power, spread):
    x = random_matrix(seed, (32, 48), spread).bfloat16()
    for spec in (NVFP4, NVFP4_2D, ROTATED):
        a, b = quantize(x, spec), quantize(x * 2.0**power, spec)
        assert torch.equal(a.codes, b.codes) and torch.equal(a.block_scale, b.block_scale)
        assert b.amax == a.amax * 2.0**power


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0, 1, 2]))
def test_quantising_twice_changes_nothing(seed, spread):
    q = quantize(random_matrix(seed, (32, 64), spread), NVFP4)
    again = quantize(dequantize(q), NVFP4, amax=q.amax)
    same(again, q.codes.numpy(), q.block_scale.numpy())


def test_decoded_operands_are_exact_in_bf16_and_dequantise_follows_the_kernel():
    every = torch.cartesian_prod(torch.arange(16), torch.arange(127)).to(torch.uint8)
    products = decode(every[:, 0], E2M1) * decode(every[:, 1], E4M3)
    assert torch.equal(products.bfloat16().float(), products)
    assert torch.equal(products.half().float(), products)
    q = quantize(random_matrix(2, (32, 32), 3), NVFP4)
    scale = decode(q.block_scale, E4M3)
    assert torch.equal(decode_operand(q), decode(q.codes, E2M1) * scale.repeat_interleave(16, 1))
    assert q.amax is not None
    factor = (scale * q.amax) * torch.tensor(1 / 2688)
    expected = decode(q.codes, E2M1) * factor.repeat_interleave(16, 1)
    assert torch.equal(dequantize(q), expected)
    assert torch.equal(dequantize(q, torch.bfloat16), expected.bfloat16())


def test_dequantised_values_are_near_the_input():
    x = random_matrix(3, (64, 256))
    for spec, limit in ((NVFP4, 0.10), (NVFP4_2D, 0.13), (FP8_1x128, 0.03), (FP8_128x128, 0.03)):
        error = (dequantize(quantize(x, spec)) - x).norm() / x.norm()
        assert error < limit, spec.block


def test_zeros_stay_zeros_and_keep_their_sign():
    x = torch.zeros(16, 32)
    x[0, 0] = -0.0
    for spec in (NVFP4, NVFP4_2D):
        q = quantize(x, spec)
        assert q.amax == 0 and not q.block_scale.any()
        assert q.codes[0, 0] == 8 and q.codes.sum() == 8
        assert not dequantize(q).any()
    assert not dequantize(quantize(x, FP8_1x128)).any()


def test_a_block_too_small_for_its_scale_has_codes_of_six_but_decodes_to_zero():
    x = torch.full((16, 32), 1e-6)
    x[0, 0] = 1.0
    x[1, 1], x[1, 2], x[1, 3] = -1e-6, 0.0, 1e-30
    q = quantize(x, NVFP4)
    assert q.block_scale[1].tolist() == [0, 0]
    assert q.codes[1, :4].tolist() == [7, 15, 0, 7]
    assert not dequantize(q)[1].any()


def test_nan_is_ignored_in_amax_and_becomes_plus_six():
    x = random_matrix(4, (16, 32))
    clean = x.clone()
    clean[2, 5] = 0
    x[2, 5] = -NAN
    q, expected = quantize(x, NVFP4), quantize(clean, NVFP4)
    assert q.amax == expected.amax and torch.equal(q.block_scale, expected.block_scale)
    assert q.codes[2, 5] == 7
    q.codes[2, 5] = 0
    assert torch.equal(q.codes, expected.codes)
    assert quantize(x, FP8_1x128).codes[2, 5] == E4M3.nan_code


def test_infinity_leaves_the_tensor_unscaled():
    x = torch.full((16, 32), 3.0)
    x[0, 0], x[0, 1] = INF, -INF
    q = quantize(x, NVFP4)
    assert q.amax == INF
    assert q.block_scale[0].tolist() == [0x7E, encode(torch.tensor([0.5]), E4M3).item()]
    assert q.codes[0, :3].tolist() == [7, 15, 0] and (q.codes[1:] == 7).all()


def test_infinity_after_dequantisation():
    """Under an infinite amax everything is infinite or NaN; without one it stays by itself."""
    x = random_matrix(3, (16, 256))
    x[0, 0], x[0, 1] = INF, -INF
    back = dequantize(quantize(x, NVFP4))
    assert back[0, 0] == INF and back[0, 1] == -INF and not back.isfinite().any()
    back = dequantize(quantize(x, QuantSpec(second_level="row")))
    assert not back[0].isfinite().any() and back[1:].isfinite().all()
    back = dequantize(quantize(x, FP8_1x128))
    assert back[0, 0] == 448 and back[0, 1] == -448 and back.isfinite().all()
    back = dequantize(quantize(x, MXFP8))
    assert back[0, 0] == INF and not back[0, 2:32].any() and back[0, 32:].isfinite().all()


def test_random_bits_decide_and_scales_do_not_depend_on_them():
    x = random_matrix(6, (32, 48)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    nearest = quantize(x, NVFP4)
    runs = []
    noise = torch.zeros_like(x, dtype=torch.uint8)
    for _ in range(2):
        noise = torch.randint(0, 256, x.shape, generator=generator, dtype=torch.uint8)
        runs.append(quantize(x, STOCHASTIC, random_bits=noise))
        again = quantize(x, STOCHASTIC, random_bits=noise.clone())
        assert torch.equal(again.codes, runs[-1].codes)
        assert torch.equal(again.block_scale, nearest.block_scale)
    assert not torch.equal(runs[0].codes, runs[1].codes)
    # The bits follow their element into the transposed tensor.
    tiles = QuantSpec(block="16x16", rounding="stochastic")
    straight = quantize(x, tiles, random_bits=noise)
    assert torch.equal(quantize(x.t(), tiles, random_bits=noise.t()).codes, straight.codes.t())


def test_mean_of_stochastic_rounding_over_all_bytes_is_the_input():
    x = random_matrix(7, (16, 32)).bfloat16()
    total = torch.zeros(16, 32, dtype=torch.float64)
    for byte in range(256):
        noise = torch.full(x.shape, byte, dtype=torch.uint8)
        total += dequantize(quantize(x, STOCHASTIC, random_bits=noise)).double()
    q = quantize(x, NVFP4)
    assert q.amax is not None
    step = 2 * decode(q.block_scale, E4M3).repeat_interleave(16, 1) * q.amax / 2688
    # Less than 1/256 of the largest step towards zero, and above 6 the clipping of the block scale.
    inside = decode(q.codes, E2M1).abs() < 6
    assert ((total / 256 - x).abs() <= step / 256 * 1.01)[inside].all()


def test_empty_tensor():
    q = quantize(torch.zeros(0, 32), NVFP4)
    assert q.shape == (0, 32) and q.amax == 0 and dequantize(q).shape == (0, 32)


def test_input_and_result_are_left_alone():
    x = random_matrix(8, (16, 16))
    before = x.clone()
    q = quantize(x, NVFP4)
    codes = q.codes.clone()
    decode_operand(q).zero_()
    dequantize(q).zero_()
    assert torch.equal(x, before) and torch.equal(q.codes, codes)


@pytest.mark.parametrize(
    ("x", "spec", "arguments", "text"),
    [
        (torch.ones(16, 24), NVFP4, {}, r"multiples of 16, got \(16, 24\)"),
        (torch.ones(8, 16), NVFP4_2D, {}, r"multiples of 16, got \(8, 16\)"),
        (torch.ones(2, 16, 16), NVFP4, {}, r"matrix .*got \(2, 16, 16\)"),
        (torch.ones(16, 16, dtype=torch.float64), NVFP4, {}, "got torch.float64"),
        (torch.ones(16, 16), STOCHASTIC, {}, "stochastic needs random_bits"),
        (torch.ones(16, 16), NVFP4, {"random_bits": torch.ones(16, 16)}, "do not go with rounding"),
        (torch.ones(16, 16), STOCHASTIC, {"random_bits": torch.ones(16, 16)}, "must be uint8"),
        (torch.ones(4, 128), FP8_1x128, {"amax": torch.ones(())}, "amax does not go with block"),
    ],
)
def test_wrong_arguments_are_one_clear_line(x, spec, arguments, text):
    with pytest.raises(UserError, match=text) as error:
        quantize(x, spec, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"format": "e2m3"}, "format: 'e2m3' is not one of e2m1, e4m3, e5m2"),
        ({"block": "2x16"}, "block: '2x16' is not one of 1x16, 16x16, 1x32"),
        ({"block": "1x128"}, "block: '1x128' does not go with block_scale e4m3, which takes 1x16"),
        ({"format": "e4m3"}, "format: 'e4m3' does not go with block_scale e4m3, which takes e2m1"),
        ({"block_scale": "pow2"}, "format: 'e2m1' does not go with block_scale pow2"),
        ({"block_scale": "e8m0"}, "block: '1x16' does not go with block_scale e8m0"),
        ({"second_level": "none"}, "second_level: 'none' does not go with block_scale e4m3"),
        ({"scale_rule": "floor"}, "scale_rule: 'floor' does not go with block_scale e4m3"),
        ({"rounding": "up"}, "rounding: 'up' is not one of nearest, stochastic"),
        ({"hadamard": 12}, "hadamard: 12 is not one of 0, 4, 8, 16"),
        ({"hadamard": False}, "hadamard: False is not one of 0, 4"),
        ({"scale_rule": "four_over_six_mae", "hadamard": 16}, "goes neither with hadamard nor"),
        ({"scale_rule": "four_over_six_mse", "rounding": "stochastic"}, "goes neither with"),
        ({"scale_rule": "eden"}, "it needs block 1x16, hadamard 16 or more"),
        ({"scale_rule": "eden", "hadamard": 128, "rounding": "stochastic"}, "rounding: eden"),
        ({"second_level": "row", "block": "16x16"}, "second_level: row does not go with block"),
        ({"scale_rule": "eden", "hadamard": 128, "range": 256}, "range: 256 goes with"),
        ({"range": 300}, "range: 300 is not one of 448, 256"),
    ],
)
def test_spec_names_field_value_and_what_is_allowed(fields, text):
    with pytest.raises(UserError, match=text) as error:
        QuantSpec(**fields)
    assert "\n" not in str(error.value)


def test_spec_needs_no_torch():
    code = "import sys, nvfp4.numerics.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
