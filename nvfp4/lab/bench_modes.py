"""What quantising costs: every mode against a memory copy, and a linear against its FP32 twin."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nvfp4.backends import Backend
from nvfp4.lab.timing import Timing, in_turn
from nvfp4.numerics import hadamard
from nvfp4.numerics.philox import RandomBits
from nvfp4.numerics.spec import (
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    FP8_1x128,
    FP8_128x128,
    QuantSpec,
)
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.linear import linear
from nvfp4.precision.presets import PRESETS

NOISY = replace(NVFP4, rounding="stochastic")
ROTATED = replace(NVFP4, hadamard=16)
NOISY_ROTATED = replace(NVFP4, hadamard=16, rounding="stochastic")

# name -> spec, and whether the transpose is quantised, in blocks down the columns
MODES: dict[str, tuple[QuantSpec, bool]] = {
    "nvfp4 rows": (NVFP4, False),
    "nvfp4 rows, stochastic": (NOISY, False),
    "nvfp4 rows, rotated": (ROTATED, False),
    "nvfp4 rows, rotated, stochastic": (NOISY_ROTATED, False),
    "nvfp4 columns": (NVFP4, True),
    "nvfp4 columns, rotated, stochastic": (NOISY_ROTATED, True),
    "nvfp4 16x16": (NVFP4_2D, False),
    "nvfp4 row amax": (replace(NVFP4, second_level="row"), False),
    "nvfp4 ue5m3 scales": (replace(NVFP4, block_scale="ue5m3"), False),
    "mxfp4": (MXFP4, False),
    "mxfp8": (MXFP8, False),
    "fp8 1x128": (FP8_1x128, False),
    "fp8 128x128": (FP8_128x128, False),
    "fp8 tensor": (FP8_TENSOR, False),
}
SLOW_MODES: dict[str, tuple[QuantSpec, bool]] = {  # by the definition, on fewer values
    "nvfp4 four over six": (replace(NVFP4, scale_rule="four_over_six_mae", range=256), False),
    "nvfp4 ms-eden": (replace(NVFP4, scale_rule="eden", hadamard=128), False),
}


def numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Standard normal float32 numbers."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def mode(backend: Backend, x: Tensor, spec: QuantSpec, turned: bool) -> Callable[[], Tensor]:
    """Quantise and dequantise x once, with its random bits and signs as in training."""
    given: dict[str, Any] = {}
    if spec.random:
        tokens = torch.arange(x.shape[0])
        given["random_bits"] = RandomBits(
            seed=1, step=1, layer=0, call=0, gemm=1, operand=2, sample=torch.zeros_like(tokens),
            position=tokens, feature_offset=0, num_features=x.shape[1], turned=turned,
            scales=spec.random == "scales",
        )  # fmt: skip
    if spec.hadamard and spec.signs in ("layer", "step"):
        given["signs"] = hadamard.sign_vector(spec.hadamard, "fixed")
    source = x.t() if turned else x
    return lambda: backend.dequantize(backend.quantize(source, spec, **given))


def quantise(
    backend: Backend, size: int, turns: int, modes: dict[str, tuple[QuantSpec, bool]]
) -> list[Timing]:
    """A copy of a size x size float32 matrix, then quantise + dequantise of it in every mode."""
    x, y = numbers(size, size), torch.empty(size, size)
    jobs = {"copy": lambda: y.copy_(x)}
    jobs |= {name: mode(backend, x, *how) for name, how in modes.items()}
    if modes is MODES:
        jobs["nvfp4 rows, bf16 input"] = mode(backend, x.bfloat16(), NVFP4, False)
    return in_turn(jobs, turns=turns)


def two_threads(backend: Backend, size: int, turns: int) -> list[tuple[str, Timing, Timing]]:
    """(mode, with one thread, with two) of three modes."""
    x, before = numbers(size, size), torch.get_num_threads()
    found = []

    def with_threads(count: int, job: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(count)
            job()

        return run

    try:
        for name in ("nvfp4 rows", "nvfp4 rows, stochastic", "nvfp4 columns, rotated, stochastic"):
            job = mode(backend, x, *MODES[name])
            jobs = {str(count): with_threads(count, job) for count in (1, 2)}
            one, two = in_turn(jobs, turns=turns)
            found.append((name, one, two))
    finally:
        torch.set_num_threads(before)
    return found


def products(sizes: tuple[int, ...], turns: int) -> list[tuple[int, Timing]]:
    """Time of a float32 matrix product of each size, 2 size^3 operations."""
    found = []
    for size in sizes:
        a, b, y = numbers(size, size), numbers(size, size, 1), torch.empty(size, size)
        job = {f"{size}": lambda a=a, b=b, y=y: torch.mm(a, b.t(), out=y)}
        found.append((size, in_turn(job, turns=turns)[0]))
    return found


def linears(
    size: int, turns: int, policies: tuple[str, ...] = ("nvfp4", "fp8_block")
) -> list[Timing]:
    """Forward and backward of a size x size linear on `size` tokens: float32, then emulated.

    The emulated ones get BF16 activations, as in training, and quantise six operands.
    """
    x, dy = numbers(size, size), numbers(size, size, 1)
    weight = nn.Parameter(numbers(size, size, 2))

    def plain() -> None:
        weight.grad = None
        functional.linear(x.detach().requires_grad_(), weight).backward(dy)

    def emulated(name: str) -> Callable[[], None]:
        half, dy_half = x.bfloat16(), dy.bfloat16()

        def run() -> None:
            weight.grad = None
            leaf = half.detach().requires_grad_()
            with use_context(StepContext(1, 1)):
                linear(leaf, weight, policy=PRESETS[name], name="bench", layer=0).backward(dy_half)

        return run

    return in_turn({"fp32": plain} | {name: emulated(name) for name in policies}, turns=turns)
