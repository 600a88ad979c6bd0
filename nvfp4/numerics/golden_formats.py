"""What each array of a golden case of FP8 or MX should be; golden_checks.py has NVFP4.

fp8 blocks      x -> q, s [_t of the transpose] and s*_gemm_layout
fp8 current     x -> q, amax, scale, scale_inv
fp8 delayed     amax_seq, fp8_max, margin -> history_after, scale_after, one row per step
mxfp4, mxfp8    x -> q | q_row and e8m0 | e8m0_row | scale_fp32; q_colT, e8m0_colT of x^T
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nvfp4.numerics import layout, scaling
from nvfp4.numerics.formats import decode_e8m0
from nvfp4.numerics.golden_case import Case, Check
from nvfp4.numerics.spec import QuantSpec


def known(case: Case, values: Mapping[str, Tensor | None]) -> Iterator[Check]:
    """A check of every value whose array the case has."""
    for name, value in values.items():
        if name in case.arrays and value is not None:
            yield case.check(name, value)


def _format(case: Case) -> str:
    if case.says("mxfp4 e2m1", "mxfp8 e4m3 e5m2"):
        return "e2m1"
    return "e5m2" if case.says("e5m2", "e4m3") else "e4m3"


def _stored(case: Case) -> str:
    return "pow2" if case.says("pow2", "f32 fp32scale") else "fp32"


def fp8_block_checks(case: Case) -> Iterator[Check]:
    """FP8 blocks: q, s of x; q_t, s_t of its transpose; s*_gemm_layout the scales a GEMM reads."""
    x = case.matrix("x")
    block = "128x128" if case.says("128x128", "1x128") else "1x128"
    spec = QuantSpec(_format(case), block, _stored(case), second_level="none")
    for suffix, values in (("", x), ("_t", x.t())):
        q = case.arithmetic.quantize(values, spec)
        gemm_scales = layout.fp8_gemm_scales(q.block_scale, spec.tiled)
        parts = {"q": q.codes, "s": q.block_scale}
        yield from known(case, {f"{name}{suffix}": value for name, value in parts.items()})
        yield from known(case, {f"s{suffix}_gemm_layout": gemm_scales})


def fp8_current_checks(case: Case) -> Iterator[Check]:
    """One scale for the tensor, from its own amax."""
    x = case.matrix("x")
    spec = QuantSpec(_format(case), "tensor", _stored(case), second_level="none")
    q = case.arithmetic.quantize(x, spec)
    largest = 57344.0 if q.spec.format == "e5m2" else 448.0
    amax = scaling.block_amax(x.float().reshape(1, x.shape[0], 1, x.shape[1]))
    scale = scaling.fp8_encode_scale(amax, largest, q.spec.block_scale == "pow2", scaling.FLT_MAX)
    parts = {"q": q.codes, "amax": amax, "scale": scale, "scale_inv": q.block_scale}
    yield from known(case, parts)


def fp8_delayed_checks(case: Case) -> Iterator[Check]:
    """History and scale after every amax of a sequence; both begin empty, with scale 1."""
    sequence, histories = case.tensor("amax_seq"), []
    largest, margin = case.tensor("fp8_max").item(), int(case.tensor("margin").item())
    algorithm = "most_recent" if case.says("recent", "max") else "max"
    history = torch.zeros(case.arrays["history_after"].shape[1])
    scales = [torch.ones(())]
    for amax in sequence:
        scales.append(scaling.delayed_scale(history, amax, scales[-1], largest, margin, algorithm))
        history = scaling.roll_history(history, amax)
        histories.append(history)
    after = {"history_after": torch.stack(histories), "scale_after": torch.stack(scales[1:])}
    yield from known(case, after)


def _mx_rule(case: Case) -> str:
    """The scale rule a name says; `ceil_log2(amax/6)` rounds the quotient up: rceil."""
    if "log2(amax" in case.name:
        return "rceil"
    rules = ("floor", "ceil", "even", "rceil")
    said = [rule for rule in rules if case.says(rule, " ".join(r for r in rules if r != rule))]
    return said[0] if said else "rceil"


def mx_checks(case: Case) -> Iterator[Check]:
    """Blocks of 32 (word 2d: 32x32, its bytes repeated over the rows) of x and of its transpose."""
    x = case.matrix("x")
    block = "32x32" if case.says("2d 32x32", "1d") else "1x32"
    spec = QuantSpec(_format(case), block, "e8m0", _mx_rule(case), "none")
    for suffixes, values in ((("", "_row"), x), (("_colT", "_col"), x.t())):
        if not any(f"q{suffix}" in case.arrays for suffix in suffixes):
            continue
        q = case.arithmetic.quantize(values, spec)
        codes = layout.pack(q.codes) if spec.format == "e2m1" else q.codes
        scale = q.block_scale.repeat_interleave(spec.block_shape[0], 0)
        for suffix in suffixes:
            parts = {"q": codes, "e8m0": scale, "scale_fp32": decode_e8m0(scale)}
            yield from known(case, {f"{name}{suffix}": value for name, value in parts.items()})


def format_checks(case: Case) -> Iterator[Check] | None:
    """The checks of an FP8 or MX case; None if it is neither."""
    have = case.arrays.keys()
    if {"amax_seq", "history_after"} <= have:
        return fp8_delayed_checks(case)
    if any(name.startswith(("e8m0", "scale_fp32")) for name in have):
        return mx_checks(case)
    if {"q", "scale_inv"} & have == {"q", "scale_inv"}:
        return fp8_current_checks(case)
    if {"q", "s"} <= have and case.arrays["s"].dtype.kind == "f":
        return fp8_block_checks(case)
    return None
