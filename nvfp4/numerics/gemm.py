"""Block-scaled matrix products of quantised operands: y = a b^T, contraction last in both.

NVFP4:       y = alpha * sum over blocks of (s_a s_b * sum of 16 code products), alpha from the amax
FP8 blocks:  per 128 of the contraction a float32 partial p, then y = fma(p * s_a, s_b, y)
outer128:    per 128 of the contraction a float32 partial p, then y = y + p * fl(f_a f_b), f being
             A/range of the outer block, or 1 for an operand without outer blocks

Operands without what scales whole rows are exact (decode_operand). That is applied to the sum, in
this order: alpha (tensor amax of both, 1 where rows have their own), FP8 tensor scales and the 4/3
of floor_3_4 (their product first), amax of the rows of a, of b. Then an accumulator is added, and
the result rounded to the output dtype. Any two kinds of operands go together.
"""

import torch
from torch import Tensor

from nvfp4.errors import UserError
from nvfp4.numerics import accumulate as models
from nvfp4.numerics.accumulate import sequential16
from nvfp4.numerics.formats import FORMATS, decode
from nvfp4.numerics.mx import operand_factor
from nvfp4.numerics.quantize import QuantizedTensor, decode_operand
from nvfp4.numerics.scaling import TENSOR_RANGE, second_level_range

Operand = QuantizedTensor | Tensor


def kernel_alpha(amax_a: Tensor, amax_b: Tensor, limits: float = TENSOR_RANGE**2) -> Tensor:
    """fl(fl(A_a * A_b) * fl(1/2688^2)), as the device computes it. float32 ().

    limits: the product of both ranges where they are not 2688.
    Source: Transformer Engine common/recipe/nvfp4.cu, nvte_nvfp4_compute_per_tensor_scale.
    """
    return amax_a * amax_b * torch.full_like(amax_a, 1.0 / limits)


def reference_alpha(amax_a: Tensor, amax_b: Tensor, limits: float = TENSOR_RANGE**2) -> Tensor:
    """fl(fl(A_a * A_b) / 2688^2), as Transformer Engine's Python reference; often 1 ulp off."""
    return amax_a * amax_b / torch.full_like(amax_a, limits)


def one_sided_alpha(amax: Tensor, limit: float = TENSOR_RANGE) -> Tensor:
    """fl(A * fl(1/2688)): one operand has a tensor amax, the other none. float32 ()."""
    return amax * torch.full_like(amax, 1.0 / limit)


def _fma(p: Tensor, scale: Tensor, total: Tensor, exact_product: bool) -> Tensor:
    """fl(p * scale + total), one rounding; a product with a power of two is exact anyway."""
    if exact_product:
        return total + p * scale
    return (p.double() * scale.double() + total.double()).float()


def fp8_blocks(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """FP8 with promoted accumulation: per 128 of the contraction y = fma(p * s_a, s_b, y).

    Returns (M, N) float32.
    Source: Transformer Engine tests/pytorch/references/blockwise_fp8_gemm_reference.py.
    """
    (m, k), (n, _) = a.shape, b.shape
    codes_a, codes_b = (decode(q.codes, FORMATS[q.spec.format]) for q in (a, b))
    scale_a, scale_b = (
        q.block_scale.repeat_interleave(q.spec.block_shape[0], 0)[: q.shape[0]] for q in (a, b)
    )
    pow2 = a.spec.block_scale == b.spec.block_scale == "pow2"
    total = codes_a.new_zeros(m, n)
    for index, start in enumerate(range(0, k, 128)):
        p = codes_a[:, start : start + 128] @ codes_b[:, start : start + 128].t()
        total = _fma(p * scale_a[:, index, None], scale_b[:, index], total, pow2)
    return total


def _outer_factor(operand: Operand, chunk: int) -> Tensor | None:
    """A/range of the outer blocks in a chunk of 128, (rows, 1); None without outer blocks."""
    if isinstance(operand, Tensor) or operand.spec.second_level != "outer128":
        return None
    assert operand.amax is not None
    return one_sided_alpha(operand.amax[:, chunk, None], second_level_range(operand.spec))


def outer_blocks(a: Operand, b: Operand, accumulate: str) -> Tensor:
    """y = y + p * fl(f_a f_b) per 128 of the contraction, p by an accumulation model. (M, N)."""
    exact_a, exact_b = _exact(a), _exact(b)
    total = None
    for chunk, start in enumerate(range(0, a.shape[1], 128)):
        part = slice(start, start + 128)
        p = models.MODELS[accumulate](exact_a[:, part], exact_b[:, part])
        f_a, f_b = _outer_factor(a, chunk), _outer_factor(b, chunk)
        if f_a is not None and f_b is not None:
            p = p * (f_a * f_b.t())
        else:
            p = p * (f_a if f_a is not None else f_b.t())  # pyright: ignore[reportOptionalMemberAccess]
        total = p if total is None else total + p
    return exact_a.new_zeros(a.shape[0], b.shape[0]) if total is None else total


def _describe(operand: Operand) -> str:
    if isinstance(operand, Tensor):
        return f"plain {operand.dtype} {tuple(operand.shape)}"
    spec = operand.spec
    rotation = f" hadamard {spec.hadamard} signs {spec.signs}" if spec.hadamard else ""
    return f"{spec.format} {spec.block}{rotation} {operand.shape}"


def _rotation(operand: Operand) -> tuple[int, str]:
    if isinstance(operand, Tensor) or not operand.spec.hadamard:
        return 0, "none"
    return operand.spec.hadamard, operand.spec.signs


def _signs(operand: Operand) -> Tensor | None:
    return None if isinstance(operand, Tensor) else operand.signs


def check_operands(a: Operand, b: Operand, alpha: str, accumulate: str) -> None:
    """Whether `gemm` takes these arguments; UserError where it does not."""
    if alpha not in ("kernel", "reference"):
        raise UserError(f"gemm: alpha {alpha!r} is not one of kernel, reference")
    if accumulate not in models.MODELS:
        allowed = ", ".join(models.MODELS)
        raise UserError(f"gemm: accumulate {accumulate!r} is not one of {allowed}")
    pair = f"a is {_describe(a)}, b is {_describe(b)}"
    if a.shape[1] != b.shape[1]:
        raise UserError(f"gemm: the contraction (last dimension) differs: {pair}")
    if _rotation(a) != _rotation(b):
        raise UserError(f"gemm: both operands must be rotated alike, or the rotation stays: {pair}")
    signs = _signs(a), _signs(b)
    if signs[0] is not None and signs[1] is not None and not torch.equal(signs[0], signs[1]):
        raise UserError(f"gemm: the sign vectors of the rotations differ: {pair}")
    if accumulate == "sequential16" and not all(level(q) in ("tensor", "row") for q in (a, b)):
        raise UserError(f"gemm: accumulate sequential16 is defined for two NVFP4 operands: {pair}")


def level(operand: Operand) -> str:
    """Second level of an operand; none for a plain tensor."""
    return "none" if isinstance(operand, Tensor) else operand.spec.second_level


def _alpha(a: Operand, b: Operand, kind: str) -> Tensor | None:
    """alpha of the second levels that scale a whole tensor or its rows (those count as amax 1)."""
    amax, limits = [], []
    for q in (a, b):
        if isinstance(q, QuantizedTensor) and q.amax is not None and level(q) != "outer128":
            amax.append(q.amax if level(q) == "tensor" else q.amax.new_ones(()))
            limits.append(second_level_range(q.spec))
    if len(amax) == 2:
        alpha = kernel_alpha if kind == "kernel" else reference_alpha
        return alpha(amax[0], amax[1], limits[0] * limits[1])
    return one_sided_alpha(amax[0], limits[0]) if amax else None


def _tensor_scale(a: Operand, b: Operand) -> Tensor | None:
    """Product of FP8 tensor scales and of the 4/3 of floor_3_4; None where there is none."""
    factors = []
    for q in (a, b):
        if isinstance(q, QuantizedTensor) and q.spec.block == "tensor":
            if q.block_scale.numel():  # without elements there is no scale to apply
                factors.append(q.block_scale.reshape(()))
        elif isinstance(q, QuantizedTensor) and q.spec.scale_rule == "floor_3_4":
            factors.append(torch.tensor(operand_factor("floor_3_4"), device=q.codes.device))
    if len(factors) == 2:
        # 16/9 at once: 4/3 is not a float, its square would be rounded twice
        both = all(getattr(q, "spec", None) and q.spec.scale_rule == "floor_3_4" for q in (a, b))  # pyright: ignore
        return torch.full_like(factors[0], 16.0 / 9.0) if both else factors[0] * factors[1]
    return factors[0] if factors else None


def scalar_factors(a: Operand, b: Operand, alpha: str) -> list[Tensor]:
    """What the sums are times, one after the other: float32 () each."""
    factors = _alpha(a, b, alpha), _tensor_scale(a, b)
    return [factor for factor in factors if factor is not None]


def _exact(operand: Operand) -> Tensor:
    return operand.float() if isinstance(operand, Tensor) else decode_operand(operand)


def _fp8_blocks(operand: Operand) -> bool:
    return isinstance(operand, QuantizedTensor) and operand.spec.block in ("1x128", "128x128")


def kernel(a: Operand, b: Operand, accumulate: str = "fp32") -> str:
    """Which code of this file or of accumulate.py sums up the products of this pair, in words."""
    if "outer128" in (level(a), level(b)):
        return f"outer_blocks {accumulate}"
    both_fp8 = _fp8_blocks(a) and _fp8_blocks(b)
    return "fp8_blocks" if both_fp8 and accumulate == "fp32" else f"matmul {accumulate}"


def gemm(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype = torch.float32,
    alpha: str = "kernel",
    accumulate: str = "fp32",
    accumulator: Tensor | None = None,
) -> Tensor:
    """y = a b^T; scaled as the module text says, plus accumulator; one rounding to out_dtype.

    a: (M, K), b: (N, K), quantised or plain (a plain tensor is multiplied as it is, in FP32).
    alpha: kernel or reference, see the functions above; operands without amax have none.
    accumulate: a model of accumulate.py. fp32 for two operands in FP8 blocks is fp8_blocks;
    sequential16 takes two operands with a tensor or a row amax only.
    accumulator: (M, N) float32, e.g. a main gradient; not modified. Returns (M, N).
    Raises UserError for shapes that do not match and rotations that do not cancel.
    """
    check_operands(a, b, alpha, accumulate)
    path = kernel(a, b, accumulate)
    if path.startswith("outer_blocks"):
        y = outer_blocks(a, b, accumulate)
    elif path == "fp8_blocks":
        y = fp8_blocks(a, b)  # pyright: ignore[reportArgumentType]
    elif accumulate == "sequential16":
        y = sequential16(_exact(a), _exact(b))
    else:
        y = models.MODELS[accumulate](_exact(a), _exact(b))
    for factor in scalar_factors(a, b, alpha):
        y = y.mul_(factor)
    if level(a) == "row":
        y = y.mul_(a.amax)  # pyright: ignore
    if level(b) == "row":
        y = y.mul_(b.amax.t())  # pyright: ignore
    if accumulator is not None:
        y = y.add_(accumulator)
    return y.to(out_dtype)
