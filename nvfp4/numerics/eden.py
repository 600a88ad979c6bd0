"""MS-EDEN: nearest rounding of a rotated operand, made unbiased by correcting its block scales.

A rotated group g of d values is rounded to nearest; that shrinks it a little towards the grid. One
factor per group undoes the shrinkage along the group itself, and rounding the corrected scales
stochastically keeps the expectation (arXiv 2601.22813, section 4; figures as in its public code):

    v   = 6 / ((17/16) * 0.93)                  target of the largest value: clips a little
    S   = 255.99 v / A                          room above 256 for the correction
    b'  = E4M3(fl(b / v) * S), 1 where that is 0
    z   = x * enc(b'),   q = E2M1(z)            codes, to nearest
    c   = sum z^2 / sum z q  over the group     1 where the sum of products is 0
    b'' = E4M3 of b' c, rounded stochastically  8 random bits per block: P(up) = floor(256 f) / 256

Expectation over the signs of the rotation and the bits of b''. The published code redraws the signs
in every backward pass (signs "step"). Decoding: code * b'' * A / (255.99 v).
"""

import torch
from torch import Tensor

from nvfp4.numerics.formats import E2M1, E4M3, decode, encode

TARGET = 6.0 / (17.0 / 16.0 * 0.93)
LARGEST_SCALE = 255.99
RANGE = LARGEST_SCALE * TARGET


def block_scale(block_amax: Tensor, tensor_scale: Tensor) -> Tensor:
    """b' before correction: E4M3 codes (R, C) uint8, never 0. tensor_scale: S, float32 ()."""
    scaled = block_amax / torch.full_like(block_amax, TARGET) * tensor_scale
    code = encode(scaled.clamp_(max=E4M3.max_value), E4M3)
    one = encode(torch.ones_like(tensor_scale), E4M3)
    return torch.where(code == 0, one, code)


def correction(z: Tensor, codes: Tensor, group: int) -> Tensor:
    """c = sum z^2 / sum z q of every group, in FP64. z: (M, K) float32. Returns (M, K / group)."""
    z64 = z.double().unflatten(1, (-1, group))
    q64 = decode(codes, E2M1).double().unflatten(1, (-1, group))
    along = (z64 * q64).sum(2)
    factor = (z64 * z64).sum(2) / along
    return torch.where(along == 0, 1.0, factor)


def corrected_scale(scale: Tensor, factor: Tensor, random_bits: Tensor) -> Tensor:
    """b'' : E4M3 codes of b' c, stochastically rounded. All (M, K/16); scale decoded, bits uint8."""
    return encode((scale * factor.float()).contiguous(), E4M3, random_bits)
