"""The definition itself, in plain PyTorch: runs on any device; every other backend equals it."""

from nvfp4.numerics.gemm import gemm, kernel
from nvfp4.numerics.quantize import quantize, transpose

__all__ = ["gemm", "kernel", "quantize", "transpose", "unsupported_reason"]


def unsupported_reason() -> str | None:
    """Why this backend cannot run here: never, it needs PyTorch only."""
    return None
