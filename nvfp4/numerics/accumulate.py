"""Models of how a GEMM adds up its products: y = a b^T with operands that are already exact.

    fp32          the library's FP32 matmul, in its own order (training)
    fp64          the library's FP64 matmul: an oracle, next to no rounding
    sequential16  dot products of 16 terms, added in order in FP32 (Transformer Engine's reference)
    blackwell     exact sums of 64 products, rounded to FP32, added in order towards zero
    split128      FP32 matmuls of 128 terms, added in order in FP32 (FP8 block promotion)

All take a: (M, K), b: (N, K) float32 and return (M, N) float32, fp64 float64. A last group may be
short. Sources: Transformer Engine NVFP4QuantizerRef.qgemm; arXiv 2609.02846 (blackwell, fitted to
the output of a B200); arXiv 2412.19437 section 3.3 (split128).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def _groups(a: Tensor, b: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, a.shape[1], size):
        yield a[:, start : start + size], b[:, start : start + size].t()


def fp32(a: Tensor, b: Tensor) -> Tensor:
    """The library's matmul."""
    return a @ b.t()


def fp64(a: Tensor, b: Tensor) -> Tensor:
    """The library's matmul in double precision; returns float64."""
    return a.double() @ b.double().t()


def sequential16(a: Tensor, b: Tensor) -> Tensor:
    """Dot products of 16 terms, each exact, added in order in FP32.

    With decoded NVFP4 operands a block's products are multiples of s_a s_b / 4 and their sum stays
    below 2^20 of them, so each dot product is exact whatever its order.
    """
    total = a.new_zeros(a.shape[0], b.shape[0])
    for part_a, part_b in _groups(a, b, 16):
        total += part_a @ part_b
    return total


def split128(a: Tensor, b: Tensor) -> Tensor:
    """FP32 matmuls of 128 terms, added in order in FP32."""
    total = a.new_zeros(a.shape[0], b.shape[0])
    for part_a, part_b in _groups(a, b, 128):
        total += part_a @ part_b
    return total


def add_towards_zero(x: Tensor, y: Tensor) -> Tensor:
    """x + y in FP32, rounded towards zero: the nearest sum, one step back if that went too far.

    What the nearest sum left out is exact in FP32 (Knuth's two-sum); it has the other sign than the
    sum exactly if the sum was rounded away from zero. A sum of finite numbers that overflows is
    +-FLT_MAX; infinity comes of infinity only. float32, any shape.
    """
    total = x + y
    part = total - x
    rest = (x - (total - part)) + (y - part)
    too_far = (rest != 0) & (torch.signbit(rest) != torch.signbit(total)) & total.isfinite()
    too_far |= total.isinf() & x.isfinite() & y.isfinite()  # rest is NaN there
    return torch.where(too_far, torch.nextafter(total, torch.zeros_like(total)), total)


def blackwell(a: Tensor, b: Tensor) -> Tensor:
    """Sums of 64 products in FP64, rounded to FP32 to nearest, added in order towards zero.

    FP64 holds such a sum of decoded FP4 operands exactly unless block scales in it differ by more
    than 2^20.
    """
    total = a.new_zeros(a.shape[0], b.shape[0])
    for part_a, part_b in _groups(a.double(), b.double(), 64):
        total = add_towards_zero(total, (part_a @ part_b).float())
    return total


MODELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    model.__name__: model for model in (fp32, fp64, sequential16, blackwell, split128)
}
