"""Block scales of the MX formats: one power of two (E8M0) for 32 elements, no second level.

A scale is 2^e, stored as the byte e + 127; elements are encode(x * 2^-e), which is exact before the
element rounding. b is the largest magnitude of the block (NaN ignored), emax the exponent of the
largest element of the format and m its mantissa bits (E2M1: 2, 1; E4M3: 8, 3; E5M2: 15, 2).

    rceil       2^e = b * fl(1 / largest element), rounded up to a power of two: nothing clips
    floor       e = floor(log2 b) - emax           clips up to a quarter of a binade (OCP MX v1.0)
    floor_3_4   the same; elements are encode(x * 3/4 * 2^-e), which cannot clip either
    ceil        e = ceil(log2 b) - emax
    even        e = floor(log2 (b rounded half away from zero to m mantissa bits)) - emax

Bytes: b = 0 gives 0 (2^-127, the smallest scale), b = inf gives 254. A subnormal b counts as
2^-127, as in hardware that looks at the exponent field only; rceil rounds it up if it is larger.
Sources: OCP MX v1.0 section 6.3; Transformer Engine common/util/ptx.cuh (`cvt.rp.satfinite.ue8m0`);
torchao prototype/mx_formats (the names floor, ceil, even, rceil); arXiv 2502.20586 (3/4).
"""

import torch
from torch import Tensor

from nvfp4.numerics.formats import Format, decode_e8m0

_MANTISSA = 0x007FFFFF
_HALF_OF_SMALLEST_NORMAL = 0x00400000  # 2^-127


def _exponent(value: Tensor) -> Tensor:
    """The exponent field of a float32 >= 0, int32."""
    return value.view(torch.int32) >> 23


def round_up(value: Tensor) -> Tensor:
    """Byte of the smallest power of two that is not below value, at most 254. uint8.

    value: float32, >= 0 or inf.
    """
    pattern = value.contiguous().view(torch.int32)
    threshold = torch.where(pattern < 1 << 23, _HALF_OF_SMALLEST_NORMAL, 0)
    byte = (pattern >> 23) + ((pattern & _MANTISSA) > threshold).int()
    return byte.clamp_(max=254).to(torch.uint8)


def block_scale(block_amax: Tensor, fmt: Format, rule: str) -> Tensor:
    """E8M0 byte of every block by one of the rules of the module text.

    block_amax: (R, C) float32. Returns (R, C) uint8.
    """
    if rule == "rceil":
        inverse = torch.full_like(block_amax, 1.0 / fmt.max_value)
        return torch.where(block_amax.isinf(), 254, round_up(block_amax * inverse)).to(torch.uint8)
    emax = _exponent(torch.tensor(fmt.max_value)).item() - 127
    pattern = block_amax.contiguous().view(torch.int32)
    if rule == "ceil":
        field = (pattern >> 23) + ((pattern & _MANTISSA) > 0).int()
    elif rule == "even":
        field = (pattern + (1 << (22 - fmt.mantissa_bits))) >> 23
    else:
        field = pattern >> 23
    byte = (field - emax).clamp_(0, 254)
    return torch.where(block_amax.isinf(), 254, byte).to(torch.uint8)


def encode_scale(block_scale: Tensor, rule: str) -> Tensor:
    """What x is times: 2^-e, or 3/4 of it; exact. NaN scales stay NaN.

    block_scale: (R, C) uint8. Returns (R, C) float32.
    """
    scale = decode_e8m0(254 - block_scale)  # uint8 wraps: NaN, byte 255, stays 255
    return scale * 0.75 if rule == "floor_3_4" else scale


def operand_factor(rule: str) -> float:
    """What a product is times for each such operand: 4/3 undoes the 3/4, else 1."""
    return 4.0 / 3.0 if rule == "floor_3_4" else 1.0
