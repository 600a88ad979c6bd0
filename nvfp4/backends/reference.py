"""The definition itself, in plain PyTorch: runs on any device; every other backend equals it."""

from typing import Any

import torch
from torch import Tensor

from nvfp4.numerics import quantize as definition
from nvfp4.numerics.gemm import gemm, kernel
from nvfp4.numerics.quantize import QuantizedTensor, dequantize, transpose
from nvfp4.numerics.spec import QuantSpec

__all__ = [
    "dequantize", "description", "finite", "gemm", "kernel", "quantize", "transpose",
    "unsupported_reason",
]  # fmt: skip


def unsupported_reason() -> str | None:
    """Why this backend cannot run here: never, it needs PyTorch only."""
    return None


def description() -> str:
    """Which code that is here."""
    return "PyTorch operations"


def finite(x: Tensor) -> bool:
    """Whether x, not empty, holds neither NaN nor infinity: extremes hand NaN on."""
    return bool(torch.isfinite(torch.stack(x.aminmax())).all())


def quantize(x: Tensor, spec: QuantSpec, **given: Any) -> QuantizedTensor:
    """numerics.quantize; one copy of a transpose is cheaper than strided reads in every step."""
    return definition.quantize(x.contiguous(), spec, **given)
