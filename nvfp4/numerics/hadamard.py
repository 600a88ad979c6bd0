"""The rotation of groups of 16 along the contraction: y = x D H / 4.

H[i][j] = (-1)^popcount(i & j) (Sylvester), D = diag(signs). D H / 4 is orthogonal, so it cancels
between the two operands of a GEMM that are both rotated along the contraction:
(X^T D H/4)(D H/4)^T Y = X^T Y.  Source: arXiv 2509.25149 section 4.2; Transformer Engine
common/hadamard_transform.
"""

from functools import lru_cache

import torch
from torch import Tensor

from nvfp4.errors import UserError

GROUP = 16
SIGN_MASK = 0xD7E8  # bit i set: sign i is -1. The same for every layer, rank and step.


@lru_cache
def matrix(signs: str = "fixed", device: torch.device | None = None) -> Tensor:
    """D H / 4: row i is sign_i times row i of the Sylvester matrix times 0.25.

    signs: fixed (0xD7E8) or none (all +1). Returns (16, 16) float64; every entry is +-0.25.
    """
    mask = SIGN_MASK if signs == "fixed" else 0
    rows = [
        [(-1) ** ((i & j).bit_count() + (mask >> i & 1)) * 0.25 for j in range(GROUP)]
        for i in range(GROUP)
    ]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def rotate(x: Tensor, signs: str = "fixed") -> Tensor:
    """x D H / 4 for every 16 consecutive elements of the last dimension, rounded to BF16.

    FP64 sums, rounded to FP32 (the accumulator of the kernels), then to BF16. A sum of 16 BF16
    numbers is exact in FP64 unless their exponents differ by more than 41; FP32 sums would depend
    on their order from 12 on.
    x: (M, K), K % 16 == 0 (UserError otherwise); BF16 values in any float dtype.
    Returns (M, K) bfloat16.
    """
    if x.shape[-1] % GROUP:
        raise UserError(
            f"hadamard: the last dimension must be a multiple of {GROUP}, got {tuple(x.shape)}"
        )
    groups = x.reshape(-1, GROUP).double()
    rotated = groups @ matrix(signs, x.device)
    return rotated.float().bfloat16().view(x.shape)
