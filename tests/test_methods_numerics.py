"""Formats and scale rules beside NVFP4's own: MX, UE5M3, row and outer levels, MS-EDEN, and the
accumulation models. Golden vectors cover 4-over-6, MX, FP8 per tensor and row scales bit by bit
(test_golden.py); here are second oracles, edges and properties."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from nvfp4.errors import UserError
from nvfp4.numerics import accumulate, eden, hadamard, mx, scaling
from nvfp4.numerics.formats import E2M1, E4M3, E5M2, UE5M3, decode, decode_e8m0, encode
from nvfp4.numerics.gemm import gemm
from nvfp4.numerics.quantize import decode_operand, dequantize, quantize, transpose
from nvfp4.numerics.spec import FP8_TENSOR, MXFP4, MXFP8, NVFP4, NVFP4_2D, FP8_1x128, QuantSpec

NAN, INF = float("nan"), float("inf")
MXFP8_RULE = ("e8m0", "rceil", "none")
ROW = QuantSpec(second_level="row")
OUTER = QuantSpec(second_level="outer128")
UE5M3_SPEC = QuantSpec(block_scale="ue5m3")
EDEN = QuantSpec(scale_rule="eden", hadamard=128, signs="step")
TSENG = QuantSpec("e2m1", "1x32", "e8m0", "floor_3_4", "none", rounding="stochastic")
TSENG_ROTATED = QuantSpec("e2m1", "1x32", "e8m0", "floor_3_4", "none", hadamard=64)


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


# ------------------------------------------------------------------------------------------- E8M0


def test_e8m0_codes_are_those_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    other = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(decode_e8m0(torch.from_numpy(codes)).numpy(), other)
    assert decode_e8m0(torch.tensor([0], dtype=torch.uint8)).item() == 2.0**-127
    assert decode_e8m0(torch.tensor([255], dtype=torch.uint8)).isnan()


def test_round_up_at_every_power_of_two_and_its_neighbours():
    powers = torch.ldexp(torch.ones(254, dtype=torch.float64), torch.arange(-126, 128)).float()
    up = torch.nextafter(powers, torch.tensor(INF))
    down = torch.nextafter(powers, torch.tensor(0.0))
    expected = torch.arange(1, 255, dtype=torch.uint8)
    assert torch.equal(mx.round_up(powers), expected)
    assert torch.equal(mx.round_up(up), (expected + 1).clamp(max=254))
    assert torch.equal(mx.round_up(down)[1:], expected[1:])
    tiny = torch.tensor([0.0, 1e-45, 2.0**-127, np.nextafter(2.0**-127, 1, dtype=np.float32)])
    assert mx.round_up(tiny).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
def test_mx_scale_rules_against_exact_arithmetic(fmt, rule):
    b = (normal(0, 4000).abs() * torch.exp2(normal(1, 4000) * 20)).clamp(2.0**-90, 2.0**90)
    b[:40] = torch.exp2(torch.arange(-20.0, 20.0))
    wide, largest = b.double(), fmt.max_value
    emax = int(np.floor(np.log2(largest)))
    mantissa, exponent = torch.frexp(wide)  # b = mantissa * 2^exponent, mantissa in [1/2, 1)
    floor = exponent - 1
    expected = {
        "rceil": torch.frexp(wide / largest)[1] - (torch.frexp(wide / largest)[0] == 0.5).int(),
        "floor": floor - emax,
        "ceil": floor - emax + (mantissa != 0.5).int(),
        "even": floor - emax + (mantissa * 2 >= 2 - 2.0 ** -(fmt.mantissa_bits + 1)).int(),
    }[rule]
    assert torch.equal(mx.block_scale(b[:, None], fmt, rule).int()[:, 0], expected + 127)


@pytest.mark.parametrize("spec", [MXFP4, MXFP8, QuantSpec("e5m2", "32x32", *MXFP8_RULE)])
def test_mx_edges(spec):
    x = torch.zeros(32, 32)
    assert quantize(x, spec).block_scale.unique().tolist() == [0]
    x[0, :3] = torch.tensor([NAN, 1.0, -0.0])
    q = quantize(x, spec)
    assert q.codes[0, 2] == 1 << (3 if spec.format == "e2m1" else 7)  # the sign of zero stays
    back = dequantize(q)
    assert back[0, 0] == 6 * back[0, 1] / 4 if spec.format == "e2m1" else back[0, 0].isnan()
    x[0, 0] = -INF
    q = quantize(x, spec)
    assert q.block_scale[0, 0] == 254 and dequantize(q)[0, 0] < -(2.0**127)


def test_encode_scale_of_every_byte():
    codes = torch.arange(256, dtype=torch.uint8)
    for rule, factor in (("rceil", 1.0), ("floor_3_4", 0.75)):
        found = mx.encode_scale(codes, rule)
        assert found[255].isnan() and found.dtype == torch.float32
        expected = factor * torch.exp2(127 - codes[:255].double())
        assert torch.equal(found[:255].double(), expected)


def test_rceil_never_clips_and_floor_clips_less_than_a_binade():
    x = normal(3, 64, 256)
    for spec, limit in ((MXFP8, 448.0), (QuantSpec("e2m1", "1x32", "e8m0", "rceil", "none"), 6.0)):
        scaled = x.view(64, -1, 32) * mx.encode_scale(quantize(x, spec).block_scale, "")[..., None]
        assert scaled.abs().max() <= limit
    q = quantize(x, MXFP4)
    scaled = x.view(64, -1, 32) * mx.encode_scale(q.block_scale, "floor")[..., None]
    assert 6 < scaled.abs().max() < 8
    q = quantize(x, TSENG, random_bits=bits(0, 64, 256))
    scaled = x.view(64, -1, 32) * mx.encode_scale(q.block_scale, "floor_3_4")[..., None]
    assert scaled.abs().max() < 6


# ------------------------------------------------------------------------------------------ UE5M3


def test_ue5m3_is_every_magnitude_of_five_and_three_bits():
    values = decode(torch.arange(256, dtype=torch.uint8), UE5M3)
    exponent, mantissa = divmod(np.arange(255), 8)
    exact = np.where(
        exponent == 0, mantissa / 8 * 2.0**-14, (1 + mantissa / 8) * 2.0 ** (exponent - 15)
    )
    np.testing.assert_array_equal(values[:255].numpy(), exact.astype(np.float32))
    assert values[255].isnan() and values[254] == UE5M3.max_value == 114688.0
    grid = values[:255].double()
    middle = ((grid[1:] + grid[:-1]) / 2).float()
    even = torch.where(torch.arange(254) % 2 == 0, torch.arange(254), torch.arange(1, 255))
    assert torch.equal(encode(middle, UE5M3).long(), even)
    assert torch.equal(
        encode(torch.nextafter(middle, torch.tensor(INF)), UE5M3).long(), torch.arange(1, 255)
    )
    assert torch.equal(
        encode(torch.nextafter(middle, torch.tensor(0.0)), UE5M3).long(), torch.arange(254)
    )


def test_ue5m3_scales_reach_blocks_that_e4m3_loses():
    x = normal(0, 16, 64) * torch.logspace(0, -7, 4).repeat_interleave(16)
    error = {
        s.block_scale: (dequantize(quantize(x, s)) - x)[:, 48:].norm() / x[:, 48:].norm()
        for s in (NVFP4, UE5M3_SPEC)
    }
    assert error["e4m3"] == 1.0 and error["ue5m3"] < 0.12


# ------------------------------------------------------------------------ second levels, headroom


def test_outer_blocks_are_tensors_of_their_own():
    x = normal(5, 32, 384) * torch.tensor([1.0, 1e-6, 1e6]).repeat_interleave(128)
    q = quantize(x, OUTER)
    assert q.amax.shape == (32, 3)
    for row, outer in itertools.product((0, 31), range(3)):
        part = x[row : row + 1, 128 * outer : 128 * outer + 128].expand(16, -1)
        alone = quantize(part, NVFP4)
        assert torch.equal(q.codes[row, 128 * outer : 128 * outer + 128], alone.codes[0])
        assert torch.equal(q.block_scale[row, 8 * outer : 8 * outer + 8], alone.block_scale[0])


@pytest.mark.parametrize("spec", [NVFP4, ROW, OUTER, MXFP4, MXFP8, UE5M3_SPEC, FP8_TENSOR])
@pytest.mark.parametrize("shape", [(0, 256), (32, 0)])
def test_empty_operands(spec, shape):
    q = quantize(torch.zeros(shape), spec)
    assert q.shape == shape == tuple(dequantize(q).shape)
    assert q.amax is None or not q.amax.any()


def test_headroom_leaves_nothing_to_clip():
    """Rounding the block scale down by up to 1/17 pushes a maximum above 6; 17/16 prevents it."""
    x = normal(6, 64, 4096)
    for rule, clipped in (("current", True), ("headroom", False)):
        spec = QuantSpec(scale_rule=rule)
        q = quantize(x, spec)
        limit = scaling.second_level_range(spec)
        enc = scaling.nvfp4_encode_scale(
            decode(q.block_scale, E4M3), scaling.tensor_encode_scale(q.amax, limit)
        )
        largest = (x.view(64, -1, 16) * enc[..., None]).abs().max()
        assert (largest > 6.0000005) == clipped


# -------------------------------------------------------------------------------------- MS-EDEN


def test_eden_correction_makes_the_group_length_right():
    """With the corrected scale before its rounding, <Q(z), z> = <z, z> in every group."""
    z = normal(8, 4, 256) * 2
    codes = encode(z, E2M1)
    factor = eden.correction(z, codes, 128).repeat_interleave(128, 1)
    q = decode(codes, E2M1).double() * factor
    for group in range(2):
        part = slice(128 * group, 128 * group + 128)
        torch.testing.assert_close(
            (q * z.double())[:, part].sum(1), (z.double() ** 2)[:, part].sum(1)
        )
    assert eden.correction(torch.zeros(1, 128), torch.zeros(1, 128, dtype=torch.uint8), 128) == 1


def test_eden_is_unbiased_and_has_half_the_error_of_stochastic_rounding():
    """Mean of 256 draws (fresh signs and bits) against x.

    The 2048 means have independent errors of variance e / 256, e the mean squared error of a draw:
    the norm of all of them exceeds 1.2 times its expectation with probability below 1e-9. Rounding
    to nearest without correction has a bias of 2 %, which would double it. For normal numbers
    arXiv 2601.22813 gives e = 9.8e-3 for MS-EDEN and 23.5e-3 for stochastic rounding with headroom.
    """
    x = normal(9, 16, 128)
    draws, total, squares, noise = 256, torch.zeros(16, 128, dtype=torch.float64), 0.0, 0.0
    for i in range(draws):
        signs = hadamard.sign_vector(128, "step", bits(1000 + i, 128))
        q = quantize(x, EDEN, random_bits=bits(5000 + i, 16, 8), signs=signs)
        turned = dequantize(q).double() @ hadamard.matrix(signs, size=128).t()
        total += turned
        squares += (turned - x).square().mean().item() / draws
        spec = QuantSpec(scale_rule="headroom", rounding="stochastic")
        s = quantize(x, spec, random_bits=bits(9000 + i, 16, 128))
        noise += (dequantize(s) - x).square().mean().item() / draws
    assert 0.009 < squares < 0.0105 and noise > 2 * squares
    assert (total / draws - x).square().mean() < 1.2**2 * squares / draws


# ---------------------------------------------------------------------------- accumulation models


def test_adding_towards_zero_against_exact_sums():
    x, y = normal(1, 20000), normal(2, 20000) * torch.exp2(normal(3, 20000) * 12)
    from fractions import Fraction

    got = accumulate.add_towards_zero(x, y)
    for a, b, s in zip(x.tolist(), y.tolist(), got.tolist(), strict=True):
        exact = Fraction(a) + Fraction(b)
        assert abs(Fraction(s)) <= abs(exact)
        further = np.nextafter(np.float32(s), np.float32(np.copysign(INF, float(exact))))
        assert abs(Fraction(float(further))) > abs(exact)


def test_adding_towards_zero_at_the_largest_numbers():
    """A sum that overflows is cut off at FLT_MAX; infinity and NaN stay what they are."""
    top = scaling.FLT_MAX
    ulp = 2.0**104
    x = torch.tensor([top, -top, top, top, -top, top, INF, -INF, INF, NAN, 2.0**127])
    y = torch.tensor([top, -top, ulp / 2, ulp / 4, -ulp, -1.0, 1.0, -top, -INF, 1.0, 2.0**127])
    got = accumulate.add_towards_zero(x, y)
    expected = torch.tensor([top, -top, top, top, -top, top - ulp, INF, -INF, NAN, NAN, top])
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_accumulation_models_on_one_example():
    """64 products of 1, then halves of one unit of 64: each model keeps or drops them its way."""
    a = torch.ones(1, 192)
    a[0, 64:] = 0
    a[0, 64], a[0, 128] = 3 * 2.0**-19, 3 * 2.0**-19  # 0.75 units of 64's last place, 2^-17
    b = torch.ones(1, 192)
    assert accumulate.fp64(a, b).item() == 64 + 6 * 2.0**-19
    assert accumulate.blackwell(a, b).item() == 64.0  # each is cut off
    assert accumulate.split128(a, b).item() == 64 + 2.0**-17 * 2  # each is rounded up
    assert accumulate.sequential16(a, b).item() == 64 + 2.0**-17 * 2


@pytest.mark.parametrize("model", ["fp32", "sequential16", "blackwell", "split128"])
def test_accumulation_models_stay_near_the_oracle(model):
    a, b = quantize(normal(1, 32, 512), NVFP4), quantize(normal(2, 48, 512), NVFP4_2D)
    oracle = gemm(a, b, accumulate="fp64")
    assert oracle.dtype == torch.float32
    torch.testing.assert_close(gemm(a, b, accumulate=model), oracle, rtol=1e-5, atol=1e-4)


KINDS = {
    "plain": None,
    "nvfp4": NVFP4,
    "nvfp4_2d": NVFP4_2D,
    "row": ROW,
    "outer128": OUTER,
    "ue5m3": UE5M3_SPEC,
    "headroom": QuantSpec(scale_rule="headroom"),
    "4over6": QuantSpec(scale_rule="four_over_six_mse", range=256),
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "tseng": QuantSpec("e2m1", "1x32", "e8m0", "floor_3_4", "none"),
    "fp8_tensor": FP8_TENSOR,
    "fp8_block": FP8_1x128,
}


@pytest.mark.parametrize(("first", "second"), itertools.product(KINDS, KINDS))
def test_any_two_kinds_of_operands_go_together(first, second):
    """y against the FP64 product of the dequantised operands, which shares no code with gemm."""
    operands = []
    for seed, kind in enumerate((first, second)):
        x = normal(seed, 32, 256) * (1 + seed)
        operands.append(x if KINDS[kind] is None else quantize(x, KINDS[kind]))
    exact = [
        x.double() if isinstance(x, torch.Tensor) else dequantize(x).double() for x in operands
    ]
    expected = exact[0] @ exact[1].t()
    for model in ("fp32", "fp64", "blackwell"):
        y = gemm(*operands, accumulate=model).double()
        assert (y - expected).abs().max() < 2e-6 * expected.abs().max()


def test_rotations_cancel_only_with_the_same_signs():
    x, y = normal(1, 16, 256).bfloat16().float(), normal(2, 16, 256).bfloat16().float()
    one, other = (hadamard.sign_vector(64, "step", bits(s, 64)) for s in (1, 2))
    spec = QuantSpec("e4m3", "1x32", "e8m0", "rceil", "none", hadamard=64, signs="step")
    a, b, c = (
        quantize(x, spec, signs=one),
        quantize(y, spec, signs=one),
        quantize(y, spec, signs=other),
    )
    assert (gemm(a, b) - x @ y.t()).norm() / (x @ y.t()).norm() < 0.05
    with pytest.raises(UserError, match="sign vectors of the rotations differ"):
        gemm(a, c)


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("signs", ["fixed", "none"])
def test_hadamard_of_every_size_is_orthogonal(size, signs):
    m = hadamard.matrix(signs, size=size)
    torch.testing.assert_close(m @ m.t(), torch.eye(size, dtype=torch.float64))
    assert torch.equal(hadamard.sign_vector(128, signs)[:size], hadamard.sign_vector(size, signs))
    if signs == "fixed" and size > 16:
        assert 0.2 < (hadamard.sign_vector(size, signs)[16:] < 0).double().mean() < 0.8


@pytest.mark.parametrize("spec", [QuantSpec("e4m3", "32x32", "e8m0", "rceil", "none"), FP8_TENSOR])
def test_square_blocks_transpose_exactly(spec):
    x = normal(4, 64, 96)
    q, t = transpose(quantize(x, spec)), quantize(x.t(), spec)
    assert torch.equal(q.codes, t.codes) and torch.equal(q.block_scale, t.block_scale)


def test_a_rotated_tile_has_no_transpose():
    x = normal(4, 32, 64).bfloat16()
    spec = QuantSpec(block="16x16", hadamard=16)
    q = quantize(x, spec)
    assert torch.equal(q.codes, quantize(hadamard.rotate(x), NVFP4_2D).codes)
    with pytest.raises(UserError, match="the rotation runs along one dimension"):
        transpose(q)


def test_delayed_scaling_uses_the_scale_it_is_given():
    spec = QuantSpec("e4m3", "tensor", "fp32", "delayed", "none")
    x = torch.tensor([[0.1, -1.0, 3.0, 100.0]])
    q = quantize(x, spec, scale=torch.tensor(8.0))
    assert dequantize(q)[0].tolist() == [0.1015625, -1.0, 3.0, 56.0]  # 448 / 8: saturated
    assert torch.equal(decode_operand(q) / 8, dequantize(q))
    with pytest.raises(UserError, match="delayed needs it"):
        quantize(x, spec)
    with pytest.raises(UserError, match="delayed needs it"):
        quantize(x, FP8_TENSOR, scale=torch.tensor(8.0))


@pytest.mark.parametrize(
    ("spec", "arguments", "text"),
    [
        (EDEN, {"random_bits": bits(0, 16, 8)}, "signs go with a rotation"),
        (EDEN, {"signs": torch.ones(128)}, "eden needs random_bits, one byte per block"),
        (NVFP4, {"signs": torch.ones(16)}, "signs go with a rotation"),
        (MXFP8, {"amax": torch.ones(())}, "no tensor scale"),
    ],
)
def test_missing_and_superfluous_arguments(spec, arguments, text):
    with pytest.raises(UserError, match=text):
        quantize(normal(0, 16, 128), spec, **arguments)


def test_a_last_mx_block_may_be_short():
    x = normal(2, 48, 80)
    for spec in (MXFP4, MXFP8, QuantSpec("e4m3", "32x32", *MXFP8_RULE)):
        q, whole = quantize(x, spec), quantize(torch.nn.functional.pad(x, (0, 16, 0, 16)), spec)
        assert torch.equal(q.codes, whole.codes[:48, :80])
        assert torch.equal(q.block_scale, whole.block_scale[: len(q.block_scale)])


def test_shapes_that_a_format_cannot_take():
    with pytest.raises(UserError, match="rows in multiples of 1 and columns of 64"):
        quantize(torch.zeros(16, 48), TSENG_ROTATED)
    with pytest.raises(UserError, match="columns of 128"):
        quantize(torch.zeros(16, 64), OUTER)
    with pytest.raises(UserError, match="columns of 128"):
        quantize(torch.zeros(16, 64), EDEN, random_bits=bits(0, 16, 4), signs=torch.ones(128))
