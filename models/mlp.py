"""The activation of the MLP block; the block itself is Megatron's MLP with our linears."""

from torch import Tensor
from torch.nn import functional as F


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, elementwise, rounded once to the dtype of x (Primer, arXiv 2109.08668).

    Megatron's own is wrapped in torch.compile, which on a CPU needs a C++ compiler and 20 s at the
    first call.
    """
    return F.relu(x).square()
