"""Element formats as data, and the one encoder and decoder that serve them all.

A code is sign | exponent | mantissa in the low bits of a byte. With m mantissa bits and smallest
normal exponent emin, the grid around |x| in [2^e, 2^(e+1)) has the step 2^(max(e, emin) - m), and

    code without sign = round(|x| / step) + (max(e, emin) - emin) * 2^m                        (1)

for normal and subnormal numbers alike; a carry into the next binade needs no special case.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nvfp4.numerics import rounding

_EXPONENT = 0x7F800000  # the exponent field of a float32; alone it is the float 2^e
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Format:
    """One element format. `max_value` is where encoding saturates, `nan_code` what NaN becomes."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    nan_code: int
    special: tuple[tuple[int, float], ...] = ()  # positive codes that are not numbers

    @property
    def bits(self) -> int:
        """Width of a code with its sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    def values(self) -> tuple[float, ...]:
        """Value of every code in order; the upper half has the sign bit set."""
        special = dict(self.special)
        positive = []
        for code in range(2 ** (self.bits - 1)):
            exponent, mantissa = divmod(code, 2**self.mantissa_bits)
            fraction = mantissa / 2**self.mantissa_bits + (exponent > 0)
            value = math.ldexp(fraction, max(exponent, 1) - self.bias)
            positive.append(special.get(code, value))
        return (*positive, *(-value for value in positive))


# NVFP4 has no NaN: Transformer Engine's conversion turns NaN into +6 (ptx.cuh).
E2M1 = Format("e2m1", 2, 1, 1, 6.0, 7)
# E4M3 "fn": no infinity, one NaN per sign (OCP OFP8 v1.0).
E4M3 = Format("e4m3", 4, 3, 7, 448.0, 0x7F, ((0x7F, math.nan),))
E5M2 = Format(
    "e5m2",
    5,
    2,
    15,
    57344.0,
    0x7F,
    ((0x7C, math.inf), *((c, math.nan) for c in (0x7D, 0x7E, 0x7F))),
)
FORMATS = {fmt.name: fmt for fmt in (E2M1, E4M3, E5M2)}

# Scales only, no sign: every code of a byte is a magnitude, the last one NaN; up to 114688.
UE5M3 = Format("ue5m3", 5, 3, 15, 114688.0, 0xFF, ((0xFF, math.nan),))


def _float_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


@lru_cache
def _bounds(fmt: Format) -> tuple[int, int]:
    """Bit patterns of the smallest normal and of the largest number, as float32."""
    return _float_bits(2.0**fmt.min_exponent), _float_bits(fmt.max_value)


def encode(x: Tensor, fmt: Format, random_bits: Tensor | None = None) -> Tensor:
    """Codes of x, equation (1): nearest-even, or stochastic where random bits are given.

    Saturates at +-max_value (infinity too); NaN becomes `nan_code`; the sign of zero is kept.
    Works on the bit pattern: magnitudes of floats are ordered like their patterns, and masking the
    mantissa away leaves 2^e. Multiplying by 2^(m-e) is exact.
    x: any shape, float32. random_bits: uint8 of the same shape. Returns uint8 of that shape.
    Source: OCP MX v1.0 section 5.3; PTX `cvt.rn.satfinite`.
    """
    smallest_normal, largest = _bounds(fmt)
    m = fmt.mantissa_bits
    pattern = x.contiguous().view(torch.int32)
    magnitude = pattern & _MAGNITUDE
    nan = torch.sub(_EXPONENT, magnitude).bitwise_right_shift_(31).to(torch.uint8)  # 255 or 0
    magnitude.clamp_(max=largest)
    power = magnitude.clamp(min=smallest_normal).bitwise_and_(_EXPONENT)  # 2^max(e, emin)
    inverse_step = torch.sub((254 + m) << 23, power).view(torch.float32)  # 2^(m - max(e, emin))
    steps = magnitude.view(torch.float32).mul_(inverse_step)
    code = (
        rounding.nearest(steps) if random_bits is None else rounding.stochastic(steps, random_bits)
    )
    code += power.bitwise_right_shift_(23 - m)  # (127 + max(e, emin)) * 2^m
    code -= (127 + fmt.min_exponent) << m
    sign_bit = 1 << (fmt.bits - 1)
    code |= (pattern >> (32 - fmt.bits)).bitwise_and_(sign_bit)
    return code.to(torch.uint8).bitwise_and_(~nan).bitwise_or_(nan & fmt.nan_code)


@lru_cache
def _table(fmt: Format, device: torch.device) -> Tensor:
    return torch.tensor(fmt.values(), dtype=torch.float32, device=device)


def decode_e8m0(codes: Tensor) -> Tensor:
    """2^(code - 127); code 0 is 2^-127, subnormal in FP32, and code 255 is NaN.

    codes: any shape, uint8. Returns float32 of that shape. Source: OCP MX v1.0 section 5.4.1.
    """
    wide = codes.to(torch.int32)
    pattern = torch.where(wide == 0, 1 << 22, wide << 23)
    return torch.where(wide == 255, torch.nan, pattern.view(torch.float32))


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Value of every code, exact. codes: any shape, uint8. Returns float32 of that shape."""
    table = _table(fmt, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
