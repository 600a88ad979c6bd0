"""QuantizedTensor, and the way there and back.

The contraction of the GEMM is always the last dimension. The columnwise copy of x is therefore
quantize(x.t(), spec).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4.errors import UserError
from nvfp4.numerics import hadamard, scaling
from nvfp4.numerics.formats import E4M3, FORMATS, decode, encode
from nvfp4.numerics.spec import QuantSpec

_INPUT_MAX = {  # largest number of each input dtype
    torch.float32: scaling.FLT_MAX,
    torch.bfloat16: scaling.BF16_MAX,
    torch.float16: 65504.0,
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A quantised matrix (M, K) as plain tensors. Blocks of (r, c) elements share a scale.

    codes        (M, K) uint8, one element code per byte
    block_scale  (ceil(M/r), ceil(K/c)): E4M3 codes (uint8) for NVFP4, float32 decode scales for FP8
    amax         float32 (): the tensor's amax for NVFP4 (its scale is 2688/amax); None for FP8
    spec         how it was made; a rotated tensor (spec.hadamard) holds rotated values

    Invariants: codes were computed from exactly the stored scales; no code of an FP4 tensor
    exceeds 15.
    """

    codes: Tensor
    block_scale: Tensor
    amax: Tensor | None
    spec: QuantSpec

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        rows, columns = self.codes.shape
        return rows, columns


def _check(x: Tensor, spec: QuantSpec, amax: Tensor | None, random_bits: Tensor | None) -> None:
    if x.dim() != 2:
        raise UserError(
            f"quantize needs a matrix (flatten the leading dimensions), got {tuple(x.shape)}"
        )
    if x.dtype not in _INPUT_MAX:
        raise UserError(f"quantize needs float32, bfloat16 or float16, got {x.dtype}")
    if spec.format == "e2m1" and (x.shape[0] % 16 or x.shape[1] % 16):
        raise UserError(f"NVFP4 needs both dimensions to be multiples of 16, got {tuple(x.shape)}")
    if amax is not None and spec.second_level == "none":
        raise UserError(
            f"quantize: amax does not go with block {spec.block}, it has no tensor scale"
        )
    if spec.rounding == "nearest" and random_bits is not None:
        raise UserError("quantize: random_bits do not go with rounding nearest")
    if spec.rounding == "stochastic":
        if random_bits is None:
            raise UserError("quantize: rounding stochastic needs random_bits, one byte per element")
        if random_bits.shape != x.shape or random_bits.dtype != torch.uint8:
            raise UserError(
                f"quantize: random_bits must be uint8 {tuple(x.shape)}, "
                f"got {random_bits.dtype} {tuple(random_bits.shape)}"
            )


def _blocks(x: Tensor, spec: QuantSpec) -> Tensor:
    """(M, K) as (R, r, C, c), zero padded to whole blocks."""
    rows, columns = spec.block_shape
    m, k = x.shape
    if m % rows or k % columns:
        x = F.pad(x, (0, -k % columns, 0, -m % rows))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _matrix(blocks: Tensor, m: int, k: int) -> Tensor:
    """Inverse of `_blocks`: (R, r, C, c) as (M, K), the padding cut away."""
    return blocks.flatten(2).flatten(0, 1)[:m, :k]


def _per_element(scale: Tensor) -> Tensor:
    """(R, C) scales, shaped to broadcast over (R, r, C, c)."""
    return scale[:, None, :, None]


def apply_encode_scale(blocks: Tensor, encode_scale: Tensor) -> Tensor:
    """fl(x * enc): one multiplication, one rounding. blocks (R, r, C, c), encode_scale (R, C)."""
    return blocks * _per_element(encode_scale)


def quantize(
    x: Tensor, spec: QuantSpec, *, amax: Tensor | None = None, random_bits: Tensor | None = None
) -> QuantizedTensor:
    """x as element codes and block scales along its last dimension; scaling.py has the formulas.

    x: (M, K) float32, bfloat16 or float16. With spec.hadamard it is rotated first.
    amax: float32, one element; replaces the tensor's own amax (which may be a maximum over ranks).
    random_bits: (M, K) uint8, required by and only allowed for rounding stochastic.
    NaN is ignored in every amax and becomes +6 (FP4) or NaN (FP8). UserError: wrong shape or dtype.
    Source: Transformer Engine 2.20 quantize_transpose_nvfp4.cuh; blockwise FP8: recipe_common.cuh.
    """
    _check(x, spec, amax, random_bits)
    fmt = FORMATS[spec.format]
    values = hadamard.rotate(x, spec.signs) if spec.hadamard else x
    blocks = _blocks(values.float(), spec)
    block_amax = scaling.block_amax(blocks)
    if spec.second_level == "tensor":
        amax = scaling.tensor_amax(block_amax) if amax is None else amax.float().reshape(())
        tensor_scale = scaling.tensor_encode_scale(amax)
        block_scale = scaling.nvfp4_block_scale(block_amax, tensor_scale, spec.scale_rule)
        encode_scale = scaling.nvfp4_encode_scale(decode(block_scale, E4M3), tensor_scale)
    else:
        encode_scale = scaling.fp8_encode_scale(
            block_amax, fmt.max_value, spec.block_scale == "pow2", _INPUT_MAX[x.dtype]
        )
        block_scale = scaling.fp8_decode_scale(encode_scale)
    bits = None if random_bits is None else _blocks(random_bits, spec)
    codes = encode(apply_encode_scale(blocks, encode_scale), fmt, bits)
    return QuantizedTensor(_matrix(codes, *x.shape), block_scale, amax, spec)


def decode_operand(q: QuantizedTensor) -> Tensor:
    """code * block scale, without the tensor scale: what a GEMM multiplies. (M, K) float32.

    For NVFP4 every value is exact, in BF16 too (6 significant bits, 2^-10 to 2688); for FP8 with
    float32 scales it is rounded once.
    """
    scale = q.block_scale if q.spec.second_level == "none" else decode(q.block_scale, E4M3)
    return _scaled_codes(q, scale)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * decode scale in float32, then one rounding to dtype. Returns (M, K).

    NVFP4 in the order of the dequantise kernel: code * (fl(scale * A) * fl(1/2688)).
    A rotated tensor stays rotated.
    """
    scale = q.block_scale
    if q.amax is not None:
        scale = scaling.nvfp4_decode_scale(decode(scale, E4M3), q.amax)
    return _scaled_codes(q, scale).to(dtype)


def _scaled_codes(q: QuantizedTensor, scale: Tensor) -> Tensor:
    blocks = _blocks(decode(q.codes, FORMATS[q.spec.format]), q.spec)
    return _matrix(blocks.mul_(_per_element(scale)), *q.shape)


def transpose(q: QuantizedTensor) -> QuantizedTensor:
    """The quantised transpose, exactly; only square blocks have one (UserError otherwise)."""
    if not q.spec.tiled:
        raise UserError(
            f"transpose: blocks of {q.spec.block} run along one dimension; quantize the transposed "
            "tensor instead, or use 16x16 or 128x128"
        )
    return QuantizedTensor(q.codes.t().contiguous(), q.block_scale.t().contiguous(), q.amax, q.spec)
