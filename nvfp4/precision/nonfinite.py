"""NaN and Inf in the operands of quantised GEMMs: counted and located.

FP4 has neither: a NaN becomes +6 times a scale, an infinity the largest number, and the loss of the
step may look perfect. So the tensors are looked at before they are quantised:

    with watching() as seen:
        train_step()
    seen.lines()        # decoder.layers.3.mlp.linear_fc1 dgrad grad_output: 3 NaN, 1 Inf

Every tensor is counted once per pass, under the first GEMM with a quantised operand that reads it:
input and weight under fprop, grad_output under dgrad; under wgrad what these leave out. GEMMs
without quantised operands hand NaN and Inf on by themselves and are not looked at. Nothing waits
for the device before lines(); on a CPU, where nothing would, one look decides whether to count.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvfp4 import backends
from nvfp4.precision.tables import Policy

READERS = {  # role -> GEMMs that read it, in the order of execution
    "input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad"),
}  # fmt: skip


@dataclass(slots=True)
class Seen:
    """(linear, GEMM, role) -> number of NaN and of Inf, int64 (2,) on the device of the operand."""

    counts: dict[tuple[str, str, str], Tensor] = field(default_factory=dict)

    def add(self, key: tuple[str, str, str], counts: Tensor) -> None:
        """Counts of one more operand."""
        self.counts[key] = self.counts[key] + counts if key in self.counts else counts

    def lines(self) -> list[str]:
        """One line per operand that had any, in the order of execution; waits for the device."""
        lines = []
        for key, counts in self.counts.items():
            found = [(int(n), what) for n, what in zip(counts, ("NaN", "Inf"), strict=True)]
            if words := ", ".join(f"{n} {what}" for n, what in found if n):
                lines.append(f"{' '.join(key)}: {words}")
        return lines


_watching: list[Seen] = []


@contextmanager
def watching() -> Iterator[Seen]:
    """Count what is not finite in everything that runs inside."""
    seen = Seen()
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


def _counted_under(policy: Policy, gemm: str, role: str, runs: tuple[str, ...]) -> bool:
    """Whether this GEMM is the first with a quantised operand that reads the tensor."""
    readers = [one for one in READERS[role] if one in runs and policy.quantised(one)]
    return readers[:1] == [gemm]


@torch.no_grad()
def count(
    policy: Policy, name: str, gemm: str, role: str, tensor: Tensor, runs: tuple[str, ...]
) -> None:
    """Called by a linear with an operand before it is quantised.

    runs: GEMMs that run in this pass. When nobody watches, a RuntimeWarning says it at once, which
    waits for the device.
    """
    if not tensor.numel() or not _counted_under(policy, gemm, role, runs):
        return
    if not _watching:
        if not backends.active().finite(tensor):
            where = f"{name} {gemm} {role} holds NaN or infinity, which quantising makes numbers of"
            text = f"{where}; nvfp4.precision.nonfinite counts them"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return
    if tensor.device.type == "cpu" and backends.active().finite(tensor):
        return
    counts = torch.stack([tensor.isnan().sum(), tensor.isinf().sum()])
    for seen in _watching:
        seen.add((name, gemm, role), counts)
