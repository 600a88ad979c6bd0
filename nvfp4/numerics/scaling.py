"""Every scale of NVFP4 and of FP8 blocks; one function, one formula. All in float32, RNE.

NVFP4 (A: amax of the tensor, b: amax of a block; 2688 = 6 * 448):

    S      = 2688 / A                              tensor_encode_scale
    scale  = E4M3(b * fl(S * fl(1/6)))             nvfp4_block_scale      (what is stored)
    enc    = 1 / (scale * fl(1 / S))               nvfp4_encode_scale     (what x is times)
    dec    = fl(scale * A) * fl(1 / 2688)          nvfp4_decode_scale     (what a code is times)

FP8 blocks:  enc = max / b, perhaps rounded down to a power of two;  stored scale = 1 / enc.

Beware of `number / tensor` in PyTorch: it is computed as number * (1 / tensor), two roundings, and
on a GPU `tensor / number` multiplies by a rounded reciprocal. Every division here is tensor by
tensor. Source of all formulas: Transformer Engine 2.20, common/cast/nvfp4/core_nvfp4.cuh and
common/recipe/recipe_common.cuh.
"""

import torch
from torch import Tensor

from nvfp4.numerics.formats import E4M3, encode

FLT_MAX = 3.4028234663852886e38  # largest float32
BF16_MAX = 3.3895313892515355e38
TENSOR_RANGE = 6.0 * 448.0  # largest E2M1 value times largest E4M3 value

_NAN_OFFSET = (
    0x007FFFFF  # added to |x|'s bit pattern: inf becomes the largest int32, NaN wraps below 0
)


def _divide(numerator: float, denominator: Tensor) -> Tensor:
    return torch.full_like(denominator, numerator) / denominator


def block_amax(blocks: Tensor) -> Tensor:
    """b = max |x| over each block; NaN is ignored (CUDA fmaxf), an all-NaN block gives 0.

    blocks: (R, rows, C, columns) float32. Returns (R, C) float32.
    Compares bit patterns as integers: magnitudes are ordered like their patterns.
    """
    key = (blocks.view(torch.int32) & 0x7FFFFFFF).add_(_NAN_OFFSET)
    largest = key.amax(3).amax(1).clamp_(min=_NAN_OFFSET)
    return largest.sub_(_NAN_OFFSET).view(torch.float32)


def tensor_amax(block_amax: Tensor) -> Tensor:
    """A = max of the block maxima (NaN is ignored there); 0 for a tensor without elements."""
    return block_amax.max() if block_amax.numel() else block_amax.new_zeros(())


def tensor_encode_scale(amax: Tensor) -> Tensor:
    """S = min(2688 / A, FLT_MAX); 1 where A = 0 or the quotient is 0 (A = inf). float32 ()."""
    scale = _divide(TENSOR_RANGE, amax).clamp_(max=FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def nvfp4_block_scale(block_amax: Tensor, tensor_scale: Tensor, rule: str) -> Tensor:
    """E4M3 code of the block scale, saturating at 448; subnormals are kept, tiny blocks give 0.

        current:      E4M3(min(b * fl(S * fl(1/6)), FLT_MAX))      Transformer Engine 2.14 and later
        before_2_14:  E4M3(min(fl(b / 6) * S, FLT_MAX))            Transformer Engine 2.8 to 2.13

    block_amax: (R, C) float32; tensor_scale: S, float32 (). Returns (R, C) uint8.
    """
    if rule == "current":
        sixth = torch.full_like(tensor_scale, 1.0 / 6.0)
        exact = block_amax * (tensor_scale * sixth)
    else:
        exact = block_amax / torch.full_like(block_amax, 6.0) * tensor_scale
    return encode(exact.clamp_(max=FLT_MAX), E4M3)


def nvfp4_encode_scale(block_scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """enc = min(1 / (scale * fl(1/S)), FLT_MAX): three roundings, in this order.

    A zero block scale gives FLT_MAX, so that every non-zero element of the block becomes +-6
    although the block decodes to 0; that is what the kernels do.
    block_scale: decoded, (R, C) float32; tensor_scale: S, float32 (). Returns (R, C) float32.
    """
    return _divide(1.0, block_scale * _divide(1.0, tensor_scale)).clamp_(max=FLT_MAX)


def nvfp4_decode_scale(block_scale: Tensor, amax: Tensor) -> Tensor:
    """dec = fl(scale * A) * fl(1/2688), the dequantise kernel's order; others differ by 1 ulp.

    block_scale: decoded, (R, C) float32; amax: float32 (). Returns (R, C) float32.
    Source: Transformer Engine common/cast/nvfp4/dequantize_nvfp4.cuh.
    """
    return block_scale * amax * torch.full_like(amax, 1.0 / TENSOR_RANGE)


def fp8_encode_scale(block_amax: Tensor, largest: float, pow2: bool, overflow: float) -> Tensor:
    """enc = largest / b; 1 where b is 0 or infinite; `overflow` where the quotient is infinite.

    pow2: the mantissa is cleared, i.e. rounded down to a power of two, so nothing can overflow.
    block_amax: (R, C) float32. largest: 448 (E4M3) or 57344 (E5M2). overflow: largest number of the
    input's dtype. Returns (R, C) float32.
    """
    scale = _divide(largest, block_amax)
    scale = torch.where(scale.isinf(), overflow, scale)
    scale = torch.where((block_amax == 0) | block_amax.isinf(), 1.0, scale)
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32) if pow2 else scale


def fp8_decode_scale(encode_scale: Tensor) -> Tensor:
    """Stored FP8 block scale: 1 / enc, one rounding (none for powers of two)."""
    return _divide(1.0, encode_scale)
