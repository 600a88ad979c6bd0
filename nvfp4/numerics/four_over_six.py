"""Four Over Six: every block is quantised twice, its largest value to 6 and to 4; the better stays.

    base = fl(fl(b / 6) * S)             b: amax of the block, S: encode scale of the second level
    s6, s4 = E4M3(base), E4M3(1.5 base)
    e6, e4 = sum over the block of |dec(code) - x|   (mae)   or of its square   (mse)
    scale  = s4 if e4 < e6 else s6                   a tie stays with 6

    dec(code) - x      exact:  fl(fl(fl(code * s) * A) / (6 * range)) - x
                       fast:   code * s - fl(x * S), in units of the second level

Sums run in order over the 16 elements; for 16x16 tiles the 16 row sums are then added pairwise,
halves first (8, 4, 2, 1). With range 256 the larger s4 has room below 448.
Sources: arXiv 2512.02010; Transformer Engine common/cast/nvfp4/quantize_4over6_nvfp4.cuh.
"""

import torch
from torch import Tensor

from nvfp4.numerics.formats import E2M1, E4M3, decode, encode
from nvfp4.numerics.scaling import nvfp4_encode_scale


def candidates(block_amax: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes (s6, s4), each (R, C) uint8. tensor_scale: S, broadcastable to block_amax."""
    base = block_amax / torch.full_like(block_amax, E2M1.max_value) * tensor_scale
    return encode(base.clamp(max=E4M3.max_value), E4M3), encode(
        (base * 1.5).clamp_(max=E4M3.max_value), E4M3
    )


def _decoded(blocks: Tensor, scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """Element values that a candidate scale gives, in units of that scale. (R, r, C, c)."""
    enc = nvfp4_encode_scale(scale, tensor_scale)
    return decode(encode(blocks * enc[:, None, :, None], E2M1), E2M1)


def _sum_in_order(error: Tensor) -> Tensor:
    """(R, r, C, c) -> (R, C): along c in order, then the rows pairwise, halves first."""
    total = error.new_zeros(error.shape[:3])
    for index in range(error.shape[3]):
        total = total + error[..., index]
    rows = total.shape[1]
    while rows > 1:
        rows //= 2
        total = total[:, :rows] + total[:, rows:]
    return total[:, 0]


def block_error(
    blocks: Tensor, code: Tensor, tensor_scale: Tensor, amax: Tensor, limit: float, rule: str
) -> Tensor:
    """e4 or e6 of every block for one candidate; formulas in the module text.

    blocks: (R, r, C, c) float32; code: (R, C) E4M3; amax: A, broadcastable; limit: 6 * range.
    Returns (R, C) float32.
    """
    scale = decode(code, E4M3)
    value = _decoded(blocks, scale, tensor_scale) * scale[:, None, :, None]
    if rule.endswith("_fast"):
        difference = value - blocks * _per_element(tensor_scale, blocks)
    else:
        value = value * _per_element(amax, blocks)
        difference = value / torch.full_like(value, limit) - blocks
    return _sum_in_order(difference * difference if "_mse" in rule else difference.abs())


def _per_element(scale: Tensor, blocks: Tensor) -> Tensor:
    """() or (R, 1) or (R, C), shaped to broadcast over (R, r, C, c)."""
    return scale if scale.dim() == 0 else scale[:, None, :, None]


def block_scale(
    blocks: Tensor, block_amax: Tensor, tensor_scale: Tensor, amax: Tensor, limit: float, rule: str
) -> Tensor:
    """E4M3 codes of the better candidate of every block. Arguments as in block_error. (R, C)."""
    s6, s4 = candidates(block_amax, tensor_scale)
    e6, e4 = (block_error(blocks, s, tensor_scale, amax, limit, rule) for s in (s6, s4))
    return torch.where(e4 < e6, s4, s6)
