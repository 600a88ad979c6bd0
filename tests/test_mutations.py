"""Every rule of the numerics, broken on purpose: some golden vector must notice.

That the same files are equal without a mutation is test_golden.py's business.
"""

from pathlib import Path

import pytest
import torch

from nvfp4.numerics import (
    four_over_six,
    gemm,
    golden_checks,
    hadamard,
    layout,
    mx,
    quantize,
    rounding,
    scaling,
)
from nvfp4.numerics.formats import E4M3, encode
from nvfp4.numerics.golden import check_file
from nvfp4.numerics.golden_case import Arithmetic

GOLDEN = Path(__file__).parent / "golden"
FLT_MAX = scaling.FLT_MAX


def full(like, value):
    return torch.full_like(like, value)


# Each mutation: (module, function, replacement), the original being `keep`.


def old_scale_rule(keep):
    return lambda b, s, rule: keep(b, s, "before_2_14")


def new_scale_rule_for_old(keep):
    return lambda b, s, rule: keep(b, s, "current")


def block_scale_448_b_over_a(keep):
    # (b * 448) / A with A = 2688 / S: the tensor scale left out of the order of roundings.
    def scale(b, s, rule):
        exact = b * full(b, 448.0) / (full(s, 2688.0) / s)
        return encode(exact.clamp(max=FLT_MAX), E4M3)

    return scale


def clamp_to_smallest_normal(keep):
    return lambda b, s, rule: keep(b, s, rule).clamp(min=8)


def clamp_to_smallest_subnormal(keep):
    return lambda b, s, rule: keep(b, s, rule).clamp(min=1)


def scale_not_saturated(keep):
    def scale(b, s, rule):
        exact = b * (s * full(s, 1 / 6))
        return torch.where(exact > 448, E4M3.nan_code, keep(b, s, rule))

    return scale


def encode_scale_s_over_scale(keep):
    return lambda scale, s: (s / scale).clamp(max=FLT_MAX)


def encode_scale_zero_for_zero(keep):
    return lambda scale, s: torch.where(scale == 0, 0.0, keep(scale, s))


def encode_scale_not_clamped(keep):
    return lambda scale, s: full(scale, 1.0) / (scale * (full(s, 1.0) / s))


def tensor_scale_not_clamped(keep):
    def scale(amax, limit):
        s = full(amax, limit) / amax
        return torch.where((amax == 0) | (s == 0), 1.0, s)

    return scale


def tensor_scale_by_reciprocal(keep):
    return lambda amax, limit: torch.where(
        amax == 0, 1.0, (limit * amax.reciprocal()).clamp(max=FLT_MAX)
    )


def tensor_scale_of_zero_is_infinite(keep):
    return lambda amax, limit: (full(amax, limit) / amax).clamp(max=FLT_MAX)


def dividing_by_the_decode_scale(keep):
    # enc = 1 / (scale * S_dec) is replaced by its inverse, and the product by a quotient.
    def apply(blocks, encode_scale):
        quotient = blocks / (full(encode_scale, 1.0) / encode_scale)[:, None, :, None]
        return torch.where(blocks == 0, blocks, quotient)

    return apply


def nan_in_amax(keep):
    return lambda blocks: blocks.abs().amax(3).amax(1)


def half_away_from_zero(keep):
    return lambda steps: torch.floor(steps + 0.5).to(torch.int32)


def swapped_nibbles(keep):
    return lambda codes: codes[..., 1::2] | codes[..., 0::2] << 4


def sign_of_zero_lost(keep):
    return lambda x, fmt, bits=None: keep(torch.where(x == 0, 0.0, x), fmt, bits)


def nan_as_zero(keep):
    return lambda x, fmt, bits=None: keep(x.nan_to_num(0.0), fmt, bits)


def butterfly_in_bf16(keep):
    def rotate(x, signs="fixed", size=16):
        t = (x.float().reshape(-1, 16) * hadamard.matrix(signs)[:, 0].sign().float()).bfloat16()
        for half in (1, 2, 4, 8):
            t = t.view(-1, 8 // half, 2, half)
            t = torch.stack((t[:, :, 0] + t[:, :, 1], t[:, :, 0] - t[:, :, 1]), 2)
        return (t.float() * 0.25).bfloat16().reshape(x.shape)

    return rotate


def signs_after_the_transform(keep):
    def rotate(x, signs="fixed", size=16):
        groups = x.reshape(-1, 16).double() @ hadamard.matrix(signs).t()
        return groups.float().bfloat16().view(x.shape)

    return rotate


def no_signs(keep):
    return lambda x, signs="fixed", size=16: keep(x, "none", size)


def no_bf16_after_rotation(keep):
    return lambda x, signs="fixed", size=16: (
        (x.reshape(-1, 16).double() @ hadamard.matrix(signs)).float().view(x.shape)
    )


def decode_by_dividing(keep):
    return lambda scale, amax, limit: scale * amax / full(amax, limit)


def decode_scale_first(keep):
    return lambda scale, amax, limit: scale * (amax * full(amax, 1 / limit))


def alpha_by_dividing(keep):
    return lambda *a: gemm.reference_alpha(*a)


def tile_order_of_rows(keep):
    return lambda s: s.reshape(-1)


def pow2_rounded_up(keep):
    def scale(b, largest, pow2, overflow):
        s = keep(b, largest, pow2, overflow)
        return torch.where((b > 0) & (s * b * 2 < largest * 1.5), s * 2, s) if pow2 else s

    return scale


def decode_scale_b_over_448(keep):
    return lambda encode_scale: (
        (full(encode_scale, 448.0) / encode_scale) / full(encode_scale, 448.0)
    )


def sum_of_512ths(keep):
    return lambda steps, bits: torch.floor(steps + (bits + 0.5) / 256).to(torch.int32)


def no_carry_bits(keep):
    return lambda steps, bits: torch.floor(steps + bits / 128).to(torch.int32)


def mx_rounded_down(keep):
    return lambda value: (value.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def mx_rounded_up_by_log2(keep):
    # ceil(log2 b) loses what lies less than a rounding of the logarithm above a power of two
    return lambda value: (torch.log2(value.double() * (1 - 1e-6)).ceil() + 127).clamp(0, 254).byte()


def mx_rule_replaced(wrong):
    def mutation(keep):
        return lambda b, fmt, rule: keep(b, fmt, wrong if rule == "even" else rule)

    mutation.__name__ = f"mx_even_as_{wrong}"
    return mutation


def mx_scale_multiplied(keep):
    return lambda code, rule: 1.0 / keep(code, rule)


def six_or_four_from_the_product(keep):
    # base = b * fl(S / 6), the order of the other rules
    def candidates(b, s):
        base = b * (s * full(s, 1 / 6))
        return tuple(encode((base * k).clamp(max=448.0), E4M3) for k in (1.0, 1.5))

    return candidates


def ties_pick_four(keep):
    def block_scale(blocks, b, s, amax, limit, rule):
        s6, s4 = four_over_six.candidates(b, s)
        e6, e4 = (four_over_six.block_error(blocks, c, s, amax, limit, rule) for c in (s6, s4))
        return torch.where(e4 <= e6, s4, s6)

    return block_scale


def rows_added_in_order(keep):
    return lambda error: error.flatten(2).sum(2) if error.shape[1] == 1 else error.sum((1, 3))


def other_error(keep):
    swap = {"mae": "mse", "mse": "mae"}
    return lambda *a: keep(*a[:-1], a[-1].replace(a[-1][14:17], swap[a[-1][14:17]]))


def fast_error_for_exact(keep):
    return lambda *a: keep(*a[:-1], a[-1].removesuffix("_fast") + "_fast")


def one_amax_for_all_rows(keep):
    return lambda b, level: keep(b, "tensor").expand(b.shape[0], 1)


def history_forgets_the_oldest_too_early(keep):
    def roll(history, amax):
        rolled = keep(history, amax)
        rolled[1] = 0
        return rolled

    return roll


def nan_counts_in_the_history(keep):
    def scale(history, amax, old, largest, margin, algorithm):
        if history.isnan().any():
            return old
        return keep(history, amax, old, largest, margin, algorithm)

    return scale


def margin_forgotten(keep):
    return lambda history, amax, old, largest, margin, algorithm: keep(
        history, amax, old, largest, 0, algorithm
    )


def bf16_overflow_for_a_tensor_scale(keep):
    return lambda b, largest, pow2, overflow: keep(b, largest, pow2, scaling.BF16_MAX)


MUTATIONS = [
    (scaling, "nvfp4_block_scale", old_scale_rule, "nvfp4_legacy_scale_rule"),
    (scaling, "nvfp4_block_scale", new_scale_rule_for_old, "nvfp4_legacy_scale_rule"),
    (scaling, "nvfp4_block_scale", block_scale_448_b_over_a, "nvfp4_legacy_scale_rule"),
    (scaling, "nvfp4_block_scale", clamp_to_smallest_normal, "nvfp4_edge"),
    (scaling, "nvfp4_block_scale", clamp_to_smallest_subnormal, "nvfp4_edge"),
    (scaling, "nvfp4_block_scale", scale_not_saturated, "nvfp4_edge"),
    (scaling, "nvfp4_encode_scale", encode_scale_s_over_scale, "nvfp4_1d"),
    (scaling, "nvfp4_encode_scale", encode_scale_zero_for_zero, "nvfp4_edge"),
    (scaling, "nvfp4_encode_scale", encode_scale_not_clamped, "nvfp4_edge"),
    (scaling, "tensor_encode_scale", tensor_scale_not_clamped, "nvfp4_edge"),
    (scaling, "tensor_encode_scale", tensor_scale_by_reciprocal, "nvfp4_1d"),
    (scaling, "tensor_encode_scale", tensor_scale_of_zero_is_infinite, "nvfp4_edge"),
    (scaling, "block_amax", nan_in_amax, "nvfp4_edge"),
    (scaling, "nvfp4_decode_scale", decode_by_dividing, "nvfp4_layout_dequant"),
    (scaling, "nvfp4_decode_scale", decode_scale_first, "nvfp4_layout_dequant"),
    (scaling, "fp8_encode_scale", pow2_rounded_up, "fp8_block_scaling"),
    (scaling, "fp8_decode_scale", decode_scale_b_over_448, "fp8_block_scaling"),
    (quantize, "apply_encode_scale", dividing_by_the_decode_scale, "nvfp4_1d"),
    (quantize, "encode", sign_of_zero_lost, "nvfp4_edge"),
    (quantize, "encode", nan_as_zero, "nvfp4_edge"),
    (rounding, "nearest", half_away_from_zero, "nvfp4_edge"),
    (rounding, "stochastic", sum_of_512ths, "nvfp4_stochastic_rounding"),
    (rounding, "stochastic", no_carry_bits, "nvfp4_stochastic_rounding"),
    (layout, "pack", swapped_nibbles, "nvfp4_1d"),
    (layout, "swizzle", tile_order_of_rows, "nvfp4_layout_dequant"),
    (hadamard, "rotate", butterfly_in_bf16, "nvfp4_rht"),
    (hadamard, "rotate", signs_after_the_transform, "nvfp4_rht"),
    (hadamard, "rotate", no_signs, "nvfp4_rht"),
    (hadamard, "rotate", no_bf16_after_rotation, "nvfp4_rht"),
    (golden_checks, "kernel_alpha", alpha_by_dividing, "nvfp4_gemm"),
    (mx, "round_up", mx_rounded_down, "mxfp8"),
    (mx, "round_up", mx_rounded_down, "mxfp4"),
    (mx, "block_scale", mx_rule_replaced("floor"), "mxfp4"),
    (mx, "block_scale", mx_rule_replaced("ceil"), "mxfp4"),
    (mx, "encode_scale", mx_scale_multiplied, "mxfp8"),
    (four_over_six, "candidates", six_or_four_from_the_product, "nvfp4_4over6"),
    (four_over_six, "_sum_in_order", rows_added_in_order, "nvfp4_4over6"),
    (four_over_six, "block_error", other_error, "nvfp4_4over6"),
    (four_over_six, "block_error", fast_error_for_exact, "nvfp4_4over6"),
    (scaling, "second_level_amax", one_amax_for_all_rows, "nvfp4_rowscaled"),
    (scaling, "roll_history", history_forgets_the_oldest_too_early, "fp8_delayed_scaling"),
    (scaling, "delayed_scale", nan_counts_in_the_history, "fp8_delayed_scaling"),
    (scaling, "delayed_scale", margin_forgotten, "fp8_delayed_scaling"),
    (scaling, "fp8_encode_scale", bf16_overflow_for_a_tensor_scale, "fp8_current_scaling"),
    (four_over_six, "block_scale", ties_pick_four, "nvfp4_4over6"),
]


@pytest.mark.parametrize(
    ("module", "function", "mutation", "file"),
    MUTATIONS,
    ids=[mutation.__name__ for _, _, mutation, _ in MUTATIONS],
)
def test_golden_vectors_notice(monkeypatch, module, function, mutation, file):
    monkeypatch.setattr(module, function, mutation(getattr(module, function)))
    report = check_file(GOLDEN / f"{file}.npz")
    assert not report.ok and "argument" not in report.difference


def test_golden_vectors_notice_two_step_scaling(monkeypatch):
    # (x * S) / scale: needs S and the scale where the product is made, so quantize is traced.
    seen = {}
    keep = scaling.nvfp4_encode_scale

    def remember(scale, tensor_scale):
        seen.update(scale=scale, tensor_scale=tensor_scale)
        return keep(scale, tensor_scale)

    def apply(blocks, encode_scale):
        exact = blocks * encode_scale[:, None, :, None]
        scale = seen["scale"][:, None, :, None]
        return torch.where(scale == 0, exact, blocks * seen["tensor_scale"] / scale)

    monkeypatch.setattr(scaling, "nvfp4_encode_scale", remember)
    monkeypatch.setattr(quantize, "apply_encode_scale", apply)
    report = check_file(GOLDEN / "nvfp4_1d.npz")
    assert report.equal < report.compared and "/q_" in report.difference


def test_golden_vectors_notice_a_wrong_philox(monkeypatch):
    monkeypatch.setattr("nvfp4.numerics.philox.ROUNDS", 7)
    assert "table" in check_file(GOLDEN / "nvfp4_stochastic_rounding.npz").difference


def test_golden_vectors_notice_products_of_dequantised_operands():
    # The tensor scales folded into the operands: they are no longer exact.
    def product(a, b, accumulator=None, **options):
        y = quantize.dequantize(a) @ quantize.dequantize(b).t()
        return y if accumulator is None else y + accumulator

    wrong = Arithmetic(gemm=product)
    assert "_fp32 [" in check_file(GOLDEN / "nvfp4_gemm.npz", wrong).difference


def test_golden_vectors_notice_alpha_in_the_reference_product(monkeypatch):
    monkeypatch.setattr(gemm, "reference_alpha", gemm.kernel_alpha)
    assert "_fp32 [" in check_file(GOLDEN / "nvfp4_gemm.npz").difference


def test_golden_vectors_notice_a_training_product_outside_its_tolerance(monkeypatch):
    keep = gemm.kernel_alpha
    monkeypatch.setattr(gemm, "kernel_alpha", lambda *a: keep(*a) * 1.000002)
    assert "_fp32 [" in check_file(GOLDEN / "nvfp4_gemm.npz").difference
