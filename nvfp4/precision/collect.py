"""How far each GEMM is from what it would be without quantisation, while training runs.

    with observing() as errors:
        train_step()
    errors.summary()

For every (linear, GEMM), with a and b the operands before quantisation (values of the compute
dtype) and y what the GEMM returned, summed over its calls (micro-batches):

    relative error   sqrt( sum ||y - a b^T||^2 / sum ||a b^T||^2 )     Frobenius norms
    SQNR             10 log10( sum ||x||^2 / sum ||x - dequantised x||^2 )     dB, one per operand

a b^T is computed in FP32. The error therefore holds everything: rounding of both operands, what
a rotation or a decomposition has saved of it, the accumulation, and the rounding of y to its dtype
(2^-9 per element for BF16, which is all that an unquantised GEMM shows). An operand has an SQNR
only if its codes stand for the original itself: rotated operands have none, since the rotation
belongs to both operands and its gain shows only in the GEMM, nor have those of which a split has
taken something off.

Sums are kept in FP64 on the device of the tensors; nothing waits for the device before summary().
Nothing is drawn and nothing is changed, so a run that is observed gives the same bits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nvfp4 import backends
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.precision.operands import GEMMS, Policy

SUMS = ("gemm error", "gemm exact")  # then two for each operand
ROLES = {gemm: tuple(Policy("").operands(gemm)) for gemm in GEMMS}  # of operands a and b


@dataclass(slots=True)
class Sums:
    """Squared norms of one GEMM of one linear, summed over `calls`.

    values: float64 (6,): error and exact product, then noise and signal of operand a, of b.
    quantised, apart: of operands a and b, in any call; apart: codes that stand for something else.
    """

    values: Tensor
    calls: int = 0
    quantised: tuple[bool, bool] = (False, False)
    apart: tuple[bool, bool] = (False, False)

    def add(self, other: "Sums") -> None:
        """The sums of other calls, such as those of another rank, on top."""
        self.values = self.values + other.values.to(self.values.device)
        self.calls += other.calls
        self.quantised = _either(self.quantised, other.quantised)
        self.apart = _either(self.apart, other.apart)


@dataclass(slots=True)
class GemmErrors:
    """Sums by (linear, GEMM), in the order of their first execution."""

    sums: dict[tuple[str, str], Sums] = field(default_factory=dict)

    def add(self, key: tuple[str, str], sums: Sums) -> None:
        """Sums of one call, or of all calls of another rank."""
        if key in self.sums:
            self.sums[key].add(sums)
        else:
            self.sums[key] = sums

    def summary(self) -> dict[str, Any]:
        """What gemm_error.json holds.

        linears: one entry per (linear, GEMM), the output layer included. mean: by GEMM, the mean
        relative error over the linears in which it has a quantised operand, and over all. None
        where there is none.
        """
        rows = [_row(name, gemm, sums) for (name, gemm), sums in self.sums.items()]
        mean = {}
        for gemm in GEMMS:
            those = [row for row in rows if row["gemm"] == gemm]
            quantised = [row for row in those if row["quantised"]]
            mean[gemm] = {"quantised": _mean(quantised), "all": _mean(those)}
        return {"mean": mean, "linears": rows}


_open: list[GemmErrors] = []


@contextmanager
def observing() -> Iterator[GemmErrors]:
    """Collect the error of every GEMM that runs inside."""
    errors = GemmErrors()
    _open.append(errors)
    try:
        yield errors
    finally:
        _open.remove(errors)


def active() -> bool:
    """Whether anybody observes; if not, observe has nothing to do."""
    return bool(_open)


@torch.no_grad()
def observe(
    name: str,
    gemm: str,
    *,
    operands: tuple[QuantizedTensor | Tensor, QuantizedTensor | Tensor],
    originals: tuple[Tensor, Tensor],
    y: Tensor,
    split: bool = False,
) -> None:
    """Called by a linear after a GEMM: y (M, N) of operands a (M, K) and b (N, K).

    originals: the same two before quantisation, in the same orientation, not rotated.
    split: the operands hold only a part of the originals, y has the rest too.
    """
    if not _open:
        return
    a, b = (tensor.float() for tensor in originals)
    exact = a @ b.t()
    parts = [_square(y.float() - exact), _square(exact)]
    quantised, apart = [False, False], [split, split]
    for index, (operand, original) in enumerate(zip(operands, (a, b), strict=True)):
        noise = torch.zeros_like(parts[0])
        if isinstance(operand, QuantizedTensor):
            quantised[index], apart[index] = True, split or bool(operand.spec.hadamard)
            if not apart[index]:
                noise = _square(backends.active().dequantize(operand) - original)
        parts += [noise, _square(original)]
    one = Sums(
        torch.stack(parts), 1, (quantised[0], quantised[1]), (apart[0], apart[1])
    )  # fmt: skip
    for errors in _open:
        errors.add((name, gemm), Sums(one.values, 1, one.quantised, one.apart))


def _square(x: Tensor) -> Tensor:
    """||x||^2, summed in FP64; float64 ()."""
    return x.double().square().sum()


def _either(a: tuple[bool, bool], b: tuple[bool, bool]) -> tuple[bool, bool]:
    return a[0] or b[0], a[1] or b[1]


def _row(name: str, gemm: str, sums: Sums) -> dict[str, Any]:
    error, exact, *operands = sums.values.tolist()
    sqnr = {
        role: _decibel(operands[2 * index + 1], operands[2 * index])
        for index, role in enumerate(ROLES[gemm])
        if sums.quantised[index] and not sums.apart[index]
    }
    return {
        "linear": name,
        "gemm": gemm,
        "calls": sums.calls,
        "quantised": any(sums.quantised),
        "relative_error": _finite(math.sqrt(error / exact)) if exact else None,
        "sqnr_db": sqnr,
    }


def _decibel(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise); None where one of them is zero or not finite."""
    if not (signal > 0 and noise > 0 and math.isfinite(signal) and math.isfinite(noise)):
        return None
    return 10.0 * math.log10(signal / noise)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean of the relative errors that are known."""
    known = [row["relative_error"] for row in rows if row["relative_error"] is not None]
    return sum(known) / len(known) if known else None
