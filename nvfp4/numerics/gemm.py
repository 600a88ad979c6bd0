"""Block-scaled matrix products of quantised operands: y = a b^T, contraction last in both.

NVFP4:  y = alpha * sum over blocks of (s_a s_b * sum of 16 code products)      alpha from both amax
FP8:    per 128 of the contraction a float32 partial p, then y = fma(p * s_a, s_b, y)

Operands without the tensor scale are exact (decode_operand), so the only inexact steps are the FP32
accumulation, the product with alpha, the sum with an accumulator, and the output rounding.
"""

import torch
from torch import Tensor

from nvfp4.errors import UserError
from nvfp4.numerics.formats import FORMATS, decode
from nvfp4.numerics.quantize import QuantizedTensor, decode_operand
from nvfp4.numerics.scaling import TENSOR_RANGE

Operand = QuantizedTensor | Tensor


def kernel_alpha(amax_a: Tensor, amax_b: Tensor) -> Tensor:
    """fl(fl(A_a * A_b) * fl(1/2688^2)), as the device computes it. float32 ().

    Source: Transformer Engine common/recipe/nvfp4.cu, nvte_nvfp4_compute_per_tensor_scale.
    """
    return amax_a * amax_b * torch.full_like(amax_a, 1.0 / TENSOR_RANGE**2)


def reference_alpha(amax_a: Tensor, amax_b: Tensor) -> Tensor:
    """fl(fl(A_a * A_b) / 2688^2), as Transformer Engine's Python reference; often 1 ulp off."""
    return amax_a * amax_b / torch.full_like(amax_a, TENSOR_RANGE**2)


def one_sided_alpha(amax: Tensor) -> Tensor:
    """fl(A * fl(1/2688)): one operand is NVFP4, the other plain. float32 ()."""
    return amax * torch.full_like(amax, 1.0 / TENSOR_RANGE)


def sequential16(a: Tensor, b: Tensor) -> Tensor:
    """Dot products of 16 terms, each exact, added in order in FP32.

    With decoded NVFP4 operands a block's products are multiples of s_a s_b / 4 and their sum stays
    below 2^20 of them, so each dot product is exact whatever its order.
    a: (M, K), b: (N, K) float32, K % 16 == 0. Returns (M, N) float32.
    Source: Transformer Engine NVFP4QuantizerRef.qgemm.
    """
    total = a.new_zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], 16):
        total += a[:, start : start + 16] @ b[:, start : start + 16].t()
    return total


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


def _check(a: Operand, b: Operand, accumulate: str) -> None:
    pair = f"a is {_describe(a)}, b is {_describe(b)}"
    if a.shape[1] != b.shape[1]:
        raise UserError(f"gemm: the contraction (last dimension) differs: {pair}")
    if _rotation(a) != _rotation(b):
        raise UserError(f"gemm: both operands must be rotated alike, or the rotation stays: {pair}")
    nvfp4 = all(isinstance(q, QuantizedTensor) and q.amax is not None for q in (a, b))
    if accumulate == "sequential16" and not nvfp4:
        raise UserError(f"gemm: accumulate sequential16 is defined for two NVFP4 operands: {pair}")


def _alpha(a: Operand, b: Operand, kind: str) -> Tensor | None:
    amax = [q.amax for q in (a, b) if isinstance(q, QuantizedTensor) and q.amax is not None]
    if len(amax) == 2:
        return (kernel_alpha if kind == "kernel" else reference_alpha)(*amax)
    return one_sided_alpha(amax[0]) if amax else None


def _exact(operand: Operand) -> Tensor:
    return operand.float() if isinstance(operand, Tensor) else decode_operand(operand)


def gemm(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype = torch.float32,
    alpha: str = "kernel",
    accumulate: str = "fp32",
    accumulator: Tensor | None = None,
) -> Tensor:
    """y = a b^T; then times alpha, plus accumulator, each in FP32; then one rounding to out_dtype.

    a: (M, K), b: (N, K), quantised or plain (a plain tensor is multiplied as it is, in FP32).
    alpha: kernel or reference, see the functions above; FP8 and plain operands have none.
    accumulate: fp32 = the library's FP32 matmul, in its own order (FP8 blocks on both sides:
    fp8_blocks); sequential16 = Transformer Engine's reference order, NVFP4 only.
    accumulator: (M, N) float32, e.g. a main gradient; not modified. Returns (M, N).
    Raises UserError for shapes that do not match and rotations that do not cancel.
    """
    if alpha not in ("kernel", "reference"):
        raise UserError(f"gemm: alpha {alpha!r} is not one of kernel, reference")
    if accumulate not in ("fp32", "sequential16"):
        raise UserError(f"gemm: accumulate {accumulate!r} is not one of fp32, sequential16")
    _check(a, b, accumulate)
    if accumulate == "sequential16":
        y = sequential16(_exact(a), _exact(b))
    elif all(isinstance(q, QuantizedTensor) and q.amax is None for q in (a, b)):
        y = fp8_blocks(a, b)  # pyright: ignore[reportArgumentType]
    else:
        y = _exact(a) @ _exact(b).t()
    factor = _alpha(a, b, alpha)
    if factor is not None:
        y = y.mul_(factor)
    if accumulator is not None:
        y = y.add_(accumulator)
    return y.to(out_dtype)
