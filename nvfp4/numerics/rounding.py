"""The two roundings, on magnitudes counted in steps of the element format.

A magnitude lies between two neighbours n and n+1 of its grid: steps = n + f with 0 <= f < 1.
`steps` is exact (a power of two times the value), so each function below has no rounding but its
own. The random bits are an argument; nothing in this floor draws them.
"""

import torch
from torch import Tensor

_PATTERN_OF_2_23 = 0x4B000000


def nearest(steps: Tensor) -> Tensor:
    """Nearest integer, ties to even.

    Adding 2^23 makes the unit of the last place 1, so that the FP32 addition itself rounds, and the
    integer is left in the low bits of the sum's pattern.
    steps: any shape, float32, 0 <= steps < 2^23. Returns int32 of that shape.
    Source: IEEE 754 roundTiesToEven; PTX `cvt.rn`.
    """
    return (steps + 2.0**23).view(torch.int32).sub_(_PATTERN_OF_2_23)


def stochastic(steps: Tensor, random_bits: Tensor) -> Tensor:
    """floor(steps + k/256) with k one random byte, exactly: up iff k >= 256 - floor(256 f).

    So P(up) = floor(256 f)/256 for uniform k; grid points (f = 0) never move. 256 * steps is
    truncated to an integer before k is added: in FP32 the sum `steps + k/256` could round up to the
    next integer when 256 f lies just below one.
    steps: float32, >= 0, < 2^23. random_bits: uint8, same shape. Returns int32.
    Source: Transformer Engine common/util/ptx.cuh (software `cvt.rs` with 8 bits per element).
    """
    return (steps * 256.0).to(torch.int32).add_(random_bits).bitwise_right_shift_(8)
