"""Every scale of NVFP4 and of FP8; one function, one formula. All in float32, RNE.

NVFP4 (A: amax of the tensor, its rows or outer blocks, b: amax of a block; 2688 = 6 * 448):

    S      = 2688 / A                              tensor_encode_scale
    scale  = E4M3(b * fl(S * fl(1/6)))             nvfp4_block_scale      (what is stored)
    enc    = 1 / (scale * fl(1 / S))               nvfp4_encode_scale     (what x is times)
    dec    = fl(scale * A) * fl(1 / 2688)          nvfp4_decode_scale     (what a code is times)

Other scale rules and other scale formats change 2688, `second_level_range`, and the target 6.
FP8:  enc = max / b, perhaps rounded down to a power of two;  stored scale = 1 / enc.
Four-over-six, MS-EDEN and the MX formats have files of their own.

Beware of `number / tensor` in PyTorch: it is computed as number * (1 / tensor), two roundings, and
on a GPU `tensor / number` multiplies by a rounded reciprocal. Every division here is tensor by
tensor. Source of all formulas: Transformer Engine 2.20, common/cast/nvfp4/core_nvfp4.cuh and
common/recipe/recipe_common.cuh.
"""

import torch
from torch import Tensor

from nvfp4.numerics.formats import E4M3, UE5M3, Format, encode
from nvfp4.numerics.spec import QuantSpec

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


# Rounding a scale to E4M3 lowers it by up to 1/17; with this target nothing is clipped by that.
# Source: the NVIDIA recipe as reproduced by the authors of arXiv 2601.22813.
HEADROOM_TARGET = 6.0 * 16.0 / 17.0


def block_target(spec: QuantSpec) -> float:
    """The element value that the largest magnitude of a block is scaled to."""
    return HEADROOM_TARGET if spec.scale_rule == "headroom" else 6.0


def second_level_range(spec: QuantSpec) -> float:
    """What amax is scaled to: target times largest block scale; S = range / A, 2688 for NVFP4."""
    if spec.scale_rule == "eden":
        from nvfp4.numerics.eden import RANGE  # eden.py builds on this file

        return RANGE
    largest = UE5M3.max_value if spec.block_scale == "ue5m3" else float(spec.range)
    return block_target(spec) * largest


def second_level_amax(block_amax: Tensor, level: str) -> Tensor:
    """A: () of the tensor, (M, 1) of each row, or (M, C/8) of each 8 blocks in a row (outer128)."""
    if level == "row":
        nothing = block_amax.new_zeros(block_amax.shape[0], 1)  # rows without elements have 0
        return torch.cat((block_amax, nothing), 1).amax(1, keepdim=True)
    if level == "outer128":
        return block_amax.unflatten(1, (-1, 8)).amax(2)
    return tensor_amax(block_amax)


def per_block(second_level: Tensor, level: str) -> Tensor:
    """A value of the second level, shaped to broadcast over the blocks (R, C)."""
    return second_level.repeat_interleave(8, 1) if level == "outer128" else second_level


def tensor_encode_scale(amax: Tensor, limit: float = TENSOR_RANGE) -> Tensor:
    """S = min(limit / A, FLT_MAX); 1 where A = 0 or the quotient is 0 (A = inf). Shape of amax."""
    scale = _divide(limit, amax).clamp_(max=FLT_MAX)
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


def block_scale_to(block_amax: Tensor, tensor_scale: Tensor, target: float, fmt: Format) -> Tensor:
    """fmt(min(b * fl(S * fl(1/target)), FLT_MAX)): the current rule for any target and format.

    block_amax: (R, C); tensor_scale: S, broadcastable to it. Returns (R, C) uint8.
    """
    inverse = torch.full_like(tensor_scale, 1.0 / target)
    return encode((block_amax * (tensor_scale * inverse)).clamp_(max=FLT_MAX), fmt)


def nvfp4_encode_scale(block_scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """enc = min(1 / (scale * fl(1/S)), FLT_MAX): three roundings, in this order.

    A zero block scale gives FLT_MAX, so that every non-zero element of the block becomes +-6
    although the block decodes to 0; that is what the kernels do.
    block_scale: decoded, (R, C) float32; tensor_scale: S, float32 (). Returns (R, C) float32.
    """
    return _divide(1.0, block_scale * _divide(1.0, tensor_scale)).clamp_(max=FLT_MAX)


def nvfp4_decode_scale(block_scale: Tensor, amax: Tensor, limit: float = TENSOR_RANGE) -> Tensor:
    """dec = fl(scale * A) * fl(1/limit), the dequantise kernel's order; others differ by 1 ulp.

    block_scale: decoded, (R, C) float32; amax: broadcastable to it. Returns (R, C) float32.
    Source: Transformer Engine common/cast/nvfp4/dequantize_nvfp4.cuh.
    """
    return block_scale * amax * torch.full_like(amax, 1.0 / limit)


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


def delayed_scale(
    history: Tensor, amax: Tensor, scale: Tensor, largest: float, margin: int, algorithm: str
) -> Tensor:
    """Encode scale after a step: fl(fl(largest * 2^-margin) / a).

    a is the largest amax of this step and the history (algorithm "max"; NaN is ignored) or this
    step's ("most_recent"). Where a is 0, infinite or NaN the old scale stays; an infinite quotient
    becomes FLT_MAX.
    history: (..., length), see roll_history; amax, scale: (...) float32. Returns (...).
    Source: Transformer Engine common/recipe/delayed_scaling.cu.
    """
    if algorithm == "max":
        window = torch.cat((amax[..., None], history[..., 1:]), -1)
        amax = window.nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)  # as CUDA's fmaxf
    new = _divide(largest * 2.0**-margin, amax)
    new = torch.where(new.isinf(), FLT_MAX, new)
    return torch.where((amax > 0) & amax.isfinite(), new, scale)


def roll_history(history: Tensor, amax: Tensor) -> Tensor:
    """History after a step: entry 0 is empty for the next amax, the newest is last, 1 the oldest.

    history: (..., length), amax: (...). Returns (..., length): 0, history[2:], amax.
    """
    if history.shape[-1] == 1:
        return torch.zeros_like(history)
    return torch.cat((torch.zeros_like(amax)[..., None], history[..., 2:], amax[..., None]), -1)
