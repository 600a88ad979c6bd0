"""The rotation of groups of d = 4 to 128 along the contraction: y = x D H / sqrt(d).

H[i][j] = (-1)^popcount(i & j) (Sylvester), D = diag(signs). D H / sqrt(d) is orthogonal, so it
cancels between the two operands of a GEMM that are both rotated along the contraction with the same
signs: (X^T D H)(D H)^T Y / d = X^T Y.
Source: arXiv 2509.25149 section 4.2 and appendix C; Transformer Engine common/hadamard_transform,
which has d = 16 and one fixed sign vector.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from nvfp4.errors import UserError
from nvfp4.numerics.philox import philox4x32_10

GROUP = 16
SIGN_MASK = 0xD7E8  # bit i set: sign i is -1. The same for every layer, rank and step.


@lru_cache
def _fixed_signs(size: int) -> tuple[float, ...]:
    """Transformer Engine's 16 signs; smaller sizes take the first, larger ones go on with the bits
    of Philox under the key (0xD7E8, 0), counter (0, 0, 0, 0), words in order, lowest bit first."""
    zero = torch.zeros((), dtype=torch.int64)
    words = philox4x32_10((zero, zero, zero, zero), (SIGN_MASK, 0))
    mask = SIGN_MASK
    for index, word in enumerate(words):
        mask |= int(word) << (GROUP + 32 * index)
    return tuple(-1.0 if mask >> i & 1 else 1.0 for i in range(size))


def sign_vector(size: int, kind: str, random_bits: Tensor | None = None) -> Tensor:
    """(size,) float64 of +-1. kind: fixed, none (all +1), or layer and step from random bits.

    random_bits: (size,) uint8; the lowest bit of each decides, 1 is -1.
    """
    if kind in ("fixed", "none"):
        values = _fixed_signs(size) if kind == "fixed" else (1.0,) * size
        return torch.tensor(values, dtype=torch.float64)
    if random_bits is None:
        raise UserError(f"signs: {kind} needs random bits")
    return 1.0 - 2.0 * (random_bits & 1).double()


@lru_cache
def _sylvester(size: int, device: torch.device | None) -> Tensor:
    """H / sqrt(size), float64; exact entries for sizes 4, 16 and 64."""
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64, device=device) / math.sqrt(size)


def matrix(
    signs: str | Tensor = "fixed", device: torch.device | None = None, size: int = GROUP
) -> Tensor:
    """D H / sqrt(size): row i is sign_i times row i of the Sylvester matrix. (size, size) float64.

    signs: fixed, none, or a vector (size,) of +-1.
    """
    vector = sign_vector(size, signs) if isinstance(signs, str) else signs.double()
    return vector.to(device)[:, None] * _sylvester(size, device)


def rotate(x: Tensor, signs: str | Tensor = "fixed", size: int = GROUP) -> Tensor:
    """x D H / sqrt(size) for every `size` consecutive elements of the last dimension, in BF16.

    FP64 sums, rounded to FP32 (the accumulator of the kernels), then to BF16. A sum of 16 BF16
    numbers is exact in FP64 unless their exponents differ by more than 41; FP32 sums would depend
    on their order from 12 on. For 8, 32 and 128 the factor 1/sqrt(size) is rounded to FP64 first.
    x: (M, K), K % size == 0 (UserError otherwise); BF16 values in any float dtype.
    Returns (M, K) bfloat16.
    """
    if x.shape[-1] % size:
        raise UserError(
            f"hadamard: the last dimension must be a multiple of {size}, got {tuple(x.shape)}"
        )
    rotated = x.reshape(-1, size).double() @ matrix(signs, x.device, size)
    return rotated.float().bfloat16().view(x.shape)
