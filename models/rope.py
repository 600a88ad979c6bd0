"""Rotary position embedding (RoPE): queries and keys are turned by an angle that grows with place.

For head width c and pair i < c / 2, at position p:

    angle(p, i) = p theta^(-2 i / c)
    y_i         = x_i         cos(angle) - x_(i + c/2) sin(angle)
    y_(i + c/2) = x_(i + c/2) cos(angle) + x_i         sin(angle)

so that the product of a query at p and a key at s depends on p - s alone. Halves of the head are
paired (Megatron's and Llama's layout), not neighbours. Source: arXiv 2104.09864, section 3.4.2.
"""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, width: int, theta: float) -> Tensor:
    """angle(p, i) as FP32 (length, width / 2), in the order of operations of Megatron and Llama."""
    exponents = torch.arange(0, width, 2, device=positions.device).float() / width
    return positions.float()[:, None] * (1.0 / theta**exponents)


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """x (length, batch, heads, c) turned by angles (length, c / 2), in the dtype of x.

    Computed in FP32 and rounded to the dtype of x once; so is its gradient.
    """
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)
