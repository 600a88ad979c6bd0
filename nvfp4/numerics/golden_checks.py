"""What each array of a golden case should be. Array names:

    inputs    x, w, dy; with _bf16 (bit patterns in uint16) or _fp16; flattened to matrices
    forms     [x_|w_|dy_] q|s|amax|codes _row|_col [_kernel | _v213 ...]   and rht_xt_bf16
    products  y | dx | dw [_accumulated] _fp32 | _out_bf16,   alpha_fprop | _dgrad | _wgrad

and those named in the docstrings below: layouts, rounding probabilities, Philox, sign vector, FP8.
Every function yields one Check per array it knows; the rest is reported as not compared.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nvfp4.numerics import hadamard, layout, scaling
from nvfp4.numerics.gemm import kernel_alpha, reference_alpha
from nvfp4.numerics.golden_case import Case, Check
from nvfp4.numerics.golden_formats import format_checks, known
from nvfp4.numerics.golden_random import (
    philox_checks,
    rotation_checks,
    scaled_by,
    signs_of,
    stochastic_checks,
)
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.numerics.spec import NVFP4, NVFP4_2D, QuantSpec

TRAINING_TOLERANCE = 1e-6  # of the largest value: FP32 in the library's order, the kernels' alpha
_FORM = re.compile(r"(q|s|amax|codes)_(row|col)(?:_(kernel|v\d{3,}))?")
_OUTPUT = re.compile(r"(y|dx|dw)(_accumulated)?_(?:out_)?(fp32|bf16|fp16)")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PRODUCTS = {  # product = first second^T, contraction last in both forms
    "y": ("x", "row", "w", "row"),
    "dx": ("dy", "row", "w", "col"),
    "dw": ("dy", "col", "x", "col"),
}
_ALPHAS = {"alpha_fprop": "y", "alpha_dgrad": "dx", "alpha_wgrad": "dw"}


def _rule(version: str | None) -> str:
    """Scale rule of an array suffix: v213 is Transformer Engine 2.13; none is the current rule."""
    if version is None or version == "kernel":
        return "current"
    return "before_2_14" if (int(version[1]), int(version[2:])) < (2, 14) else "current"


class _Forms:
    """Rowwise and columnwise quantisations of one input, made when first asked for."""

    def __init__(self, case: Case, prefix: str, x: Tensor, row: QuantSpec, col: QuantSpec) -> None:
        self.case, self.prefix, self.x = case, prefix, x
        self.specs = {"row": row, "col": col}
        self.made: dict[tuple[str, str], QuantizedTensor] = {}

    def get(self, form: str, rule: str = "current") -> QuantizedTensor:
        """The form under one scale rule; its amax is the case's where that is called external."""
        if (form, rule) not in self.made:
            x = self.x if form == "row" else self.x.t()
            external = self.case.says("external")
            amax = self.case.tensor(f"{self.prefix}amax_{form}") if external else None
            spec = self.specs[form]
            if rule != "current":
                spec = replace(spec, scale_rule=rule)
            self.made[form, rule] = self.case.arithmetic.quantize(x, spec, amax=amax)
        return self.made[form, rule]

    def amax(self, form: str) -> Tensor:
        """The tensor's amax of a form."""
        amax = self.get(form).amax
        assert amax is not None, "NVFP4 forms have one"
        return amax

    def checks(self) -> Iterator[Check]:
        """Every stored form of this input; `_kernel` arrays decide where there are some."""
        arrays = self.case.arrays
        kernels = any(name.endswith("_kernel") for name in arrays)
        for name in arrays:
            match = _FORM.fullmatch(name[len(self.prefix) :])
            if match is None or not name.startswith(self.prefix):
                continue
            part, form, version = match.groups()
            if f"{name}_kernel" in arrays:
                self.case.superseded.add(name)
                continue
            if part == "amax" and kernels and np.isnan(arrays[name]).all():
                continue  # the reference's NaN; the kernels ignore NaN in an amax
            q = self.get(form, _rule(version))
            rows = q.spec.block_shape[0]
            values = {
                "q": layout.pack(q.codes),
                "s": q.block_scale.repeat_interleave(rows, 0),
                "amax": self.amax(form).reshape(arrays[name].shape)
                if self.amax(form).numel() == arrays[name].size
                else self.amax(form),
                "codes": q.codes,
            }
            if name in self.case.used:
                continue  # an external amax: an input
            check = self.case.check(name, values[part])
            if part in ("q", "codes") and version != "kernel":
                codes = q.codes.masked_fill(self._scaled(q, form) == 0, 0)
                check.without_negative_zero = layout.pack(codes) if part == "q" else codes
            yield check

    def _scaled(self, q: QuantizedTensor, form: str) -> Tensor:
        x = self.x if form == "row" else self.x.t()
        return scaled_by(hadamard.rotate(x, q.spec.signs) if q.spec.hadamard else x, q)


def _kind(case: Case) -> QuantSpec:
    """What the words of a case say of an operand, rotation aside."""
    spec = NVFP4_2D if case.says("2d", "1d") else NVFP4
    if case.says("rowscaled") or case.arrays.get("amax_row", np.empty(1)).size > 1:
        spec = replace(spec, second_level="row")
    if case.says("4over6"):
        error = "mse" if case.says("mse", "mae") else "mae"
        fast = "_fast" if case.says("fast", "exact") else ""
        limit = 256 if case.says("256", "448") else 448
        spec = replace(spec, scale_rule=f"four_over_six_{error}{fast}", range=limit)
    return spec


def quantize_checks(case: Case) -> Iterator[Check]:
    """x -> both forms. Word 2d: 16x16 blocks. Word rht, or array rht_xt_bf16: rotated columns.

    Word 4over6: the scale rule, with mae | mse, fast | exact, 256 | 448. Word rowscaled: an amax
    for every row.
    """
    x = case.matrix(case.shared_input or "x")
    row = col = _kind(case)
    if "rht_xt_bf16" in case.arrays or case.says("rht", "norht"):
        col = replace(row, hadamard=16, signs=signs_of(case))
    forms = _Forms(case, "", x, row, col)
    yield from forms.checks()
    if "rht_xt_bf16" in case.arrays:
        yield case.check("rht_xt_bf16", hadamard.rotate(x.t(), col.signs))
    if "amax" in case.arrays:
        yield case.check("amax", forms.amax("row"))


def gemm_checks(case: Case) -> Iterator[Check]:
    """Operands, [reference alpha, kernel alpha], and y = x w^T, dx = dy w, dw = dy^T x.

    w has 16x16 blocks (word 1dw: 1x16); the columns of x and dy are rotated (word norht: not).
    Products must equal the reference model (alpha reference, accumulate sequential16) bit by bit,
    and float32 ones be within TRAINING_TOLERANCE of the training model.
    """
    weight = NVFP4 if case.says("1dw w1d 1d", "2dw w2d 2d") else NVFP4_2D
    rotated = replace(NVFP4, hadamard=16, signs=signs_of(case))
    columns = NVFP4 if case.says("norht", "rht") else rotated
    input_ = replace(NVFP4, second_level="row") if case.says("rowscaled") else NVFP4
    forms = {
        name: _Forms(case, f"{name}_", case.matrix(name), row, col)
        for name, row, col in (
            ("x", input_, columns),
            ("w", weight, weight),
            ("dy", NVFP4, columns),
        )
        if case.find(name)
    }
    for form in forms.values():
        yield from form.checks()
    for name in case.arrays:
        if name in _ALPHAS:
            (a, a_form), (b, b_form) = _operands(forms, _ALPHAS[name])
            pair = a.amax(a_form), b.amax(b_form)
            yield case.check(name, torch.stack((reference_alpha(*pair), kernel_alpha(*pair))))
        elif match := _OUTPUT.fullmatch(name):
            yield from _product_checks(case, forms, name, *match.groups())


def _operands(
    forms: dict[str, _Forms], product: str
) -> tuple[tuple[_Forms, str], tuple[_Forms, str]]:
    first, first_form, second, second_form = _PRODUCTS[product]
    for name in (first, second):
        if name not in forms:
            raise ValueError(f"input {name} is missing")
    return (forms[first], first_form), (forms[second], second_form)


def _product_checks(
    case: Case, forms: dict[str, _Forms], name: str, product: str, accumulated: str, dtype: str
) -> Iterator[Check]:
    a, b = (form.get(direction) for form, direction in _operands(forms, product))
    added = case.tensor("main_grad_in") if accumulated else None
    gemm = case.arithmetic.gemm
    y = gemm(a, b, alpha="reference", accumulate="sequential16", accumulator=added)
    yield case.check(name, y.to(_DTYPES[dtype]))
    if dtype == "fp32":
        yield case.check(name, gemm(a, b, accumulator=added), _training_tolerance(a, b))


def _training_tolerance(a: QuantizedTensor, b: QuantizedTensor) -> float:
    """TRAINING_TOLERANCE; more where alpha is subnormal, so that its last digit is a larger part.

    The kernels' alpha and the reference's are one unit of the last place, 2^-149, apart.
    """
    assert a.amax is not None and b.amax is not None, "NVFP4 has one"
    alpha = kernel_alpha(a.amax.max(), b.amax.max()).item()
    return max(TRAINING_TOLERANCE, 2.0**-148 / alpha) if alpha else 1.0


def layout_checks(case: Case) -> Iterator[Check]:
    """q, s_compact, amax -> codes, s_padded, s_swizzled, dequant_fp32 | _bf16bits."""
    codes = layout.unpack(case.tensor("q"))
    scale, amax = case.tensor("s_compact"), case.tensor("amax").reshape(())
    padded = layout.pad_scales(scale)
    q = QuantizedTensor(codes, scale, amax, NVFP4)
    values = {"codes": codes, "s_padded": padded, "s_swizzled": layout.swizzle(padded)}
    for name in case.arrays:
        if match := re.fullmatch(r"dequant_(fp32|bf16|fp16)(?:bits)?", name):
            values[name] = case.arithmetic.dequantize(q, _DTYPES[match[1]])
    yield from known(case, values)


def pair_checks(case: Case) -> Iterator[Check]:
    """e4m3 [_v213 ...]: the block scale of every pair (global_amax, block_amax)."""
    block = case.tensor("block_amax")
    tensor_scale = scaling.tensor_encode_scale(case.tensor("global_amax"))
    for name in case.arrays:
        if match := re.fullmatch(r"e4m3(?:_(v\d{3,}))?", name):
            yield case.check(name, scaling.nvfp4_block_scale(block, tensor_scale, _rule(match[1])))


def checks_of(case: Case) -> Iterator[Check]:
    """The checks of a case, chosen by the arrays it holds; none for an unknown structure."""
    have = case.arrays.keys()
    if "table" in have and case.arrays["table"].shape[1:] == (8,):
        return philox_checks(case)
    if {"H", "sign", "mask"} & have:
        return rotation_checks(case)
    if {"global_amax", "block_amax"} <= have:
        return pair_checks(case)
    if "code_lo" in have:
        return stochastic_checks(case)
    if {"q", "s_compact", "amax"} <= have:
        return layout_checks(case)
    if {"w", "w_bf16", "w_fp16", "w_fp32", "dy", "dy_bf16", "dy_fp16", "dy_fp32"} & have:
        return gemm_checks(case)
    if (checks := format_checks(case)) is not None:
        return checks
    return quantize_checks(case) if case.find("x") or case.shared_input else iter(())
