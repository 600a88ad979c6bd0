"""Where a forward pass stands in a training run; it decides every random bit of the pass.

A linear that rounds stochastically does not draw bits, it computes them from an address: seed,
step, linear, call, GEMM, operand, sample, position, feature. The linear's own part it knows; the
rest is the StepContext of the forward pass, read once when the linear's forward runs and kept for
its backward. In plain PyTorch:

    with use_context(StepContext(seed=1234, step=step)):
        loss = loss_of(model(batch))
    loss.backward()

One `with` per forward pass. `call` counts how often a linear has run in the pass, so a layer used
twice gets two streams. Micro-batches are separate passes whose sample_offset moves on: the same
sample gets the same bits however the batch is cut.

Activation recompute runs forward a second time, during backward, and must see the same bits. Give
the checkpoint a bound function: `checkpoint(bind(block), x, use_reentrant=...)`. It repeats under
the context and the call numbers of its first run, wherever backward happens. An unbound recompute
is accepted where only one answer is possible (backward inside the `with`, every linear run once);
otherwise it is an error, never other bits.

The current pass is one variable of the process, on purpose: on CUDA autograd recomputes in threads
of its own, where a thread-local variable would be empty.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4.errors import UserError

MAX_CALLS = 256  # 8 bits of the random address
LAST_SAMPLE = 2**32 - 1
PADDED_ROWS = 128  # the most a pass can have: operands are padded to multiples of at most that


@dataclass(frozen=True, slots=True)
class StepContext:
    """Place of a forward pass in a run.

    seed: 32 bits, the run's; step: 32 bits, the optimizer step.
    sample_offset: index in the global batch of the first sample of this pass.
    position_offset: index in the whole sequence of the first token of each sample; a tuple if a
    rank holds several equal pieces of the sequence (context parallelism holds two).
    """

    seed: int
    step: int
    sample_offset: int = 0
    position_offset: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        for name in ("seed", "step", "sample_offset"):
            if not 0 <= getattr(self, name) < 2**32:
                value = getattr(self, name)
                raise UserError(f"StepContext.{name} is {value}; it must be 0 to 4294967295")


@dataclass(slots=True)
class _Pass:
    """A StepContext and how often each linear (by number) has run, and been recomputed, in it."""

    context: StepContext
    calls: Counter[int] = field(default_factory=Counter)
    recomputed: Counter[int] = field(default_factory=Counter)
    bound: bool = False  # inside bind: call numbers are right even during backward


_current: _Pass | None = None


@contextmanager
def _entered(step_pass: _Pass) -> Iterator[None]:
    """Make a pass the current one; the former comes back at the end."""
    global _current
    former, _current = _current, step_pass
    try:
        yield
    finally:
        _current = former


@contextmanager
def use_context(context: StepContext) -> Iterator[None]:
    """Open one forward pass: call numbers start at 0."""
    with _entered(_Pass(context)):
        yield


def current() -> StepContext | None:
    """Context of the running pass, None outside of any."""
    return None if _current is None else _current.context


def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for activation checkpointing: every run of it sees the bits of the first.

    Call it where the forward pass runs. The first run counts calls in the current pass as usual;
    any later run (the recompute) starts from the call numbers at which the first one started.
    """
    if _current is None:
        return function
    first, start = _current, Counter(_current.calls)
    ran = False

    def bound(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        if not ran:
            ran = True
            start.clear()
            start.update(first.calls)
            with _entered(first):
                return function(*args, **kwargs)
        with _entered(_Pass(first.context, Counter(start), bound=True)):
            return function(*args, **kwargs)

    return bound


def next_call(layer: int, name: str) -> tuple[StepContext, int] | None:
    """Context and call number of a linear's forward that runs now; None outside of any pass.

    Raises UserError if a recompute leaves the call number open, or the linear has run 256 times.
    """
    if _current is None:
        return None
    if torch._C._current_graph_task_id() != -1 and not _current.bound:
        _current.recomputed[layer] += 1
        if _current.calls[layer] != 1 or _current.recomputed[layer] != 1:
            raise UserError(
                f"linear {name!r} is recomputed in backward and ran {_current.calls[layer]} times "
                f"in this pass, so its random bits are ambiguous; checkpoint "
                f"nvfp4.precision.context.bind(function) instead of function"
            )
        return _current.context, 0
    call = _current.calls[layer]
    if call >= MAX_CALLS:
        raise UserError(
            f"linear {name!r} has run {MAX_CALLS} times in one pass, the most that can be "
            f"addressed; open a new use_context for each forward pass"
        )
    _current.calls[layer] += 1
    return _current.context, call


def token_addresses(
    context: StepContext, leading: tuple[int, ...], layout: str, rows: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sample in the global batch and position in the sequence of every row; (rows,) int64 each.

    leading: sizes that were flattened to rows. "sbh" with two sizes: position, sample; otherwise
    the first is the sample, the others the position. Rows beyond them are padding; they have
    addresses too, since rotation leaves values to round there. Padded row i of a pass has

        sample    2^32 - 1 - sample_offset              samples counted from the far end
        position  128 * (first position_offset) + i     i < 128

    which no other pass of the step has, nor a real row while a step has below 2^31 samples.
    Raises UserError if the sequence does not divide into the pieces of context.position_offset, or
    if that is 2^25 or more where rows are padded.
    """
    by_position = layout == "sbh" and len(leading) == 2
    inner = max(1, leading[1] if by_position else prod(leading[1:]))
    index = torch.arange(prod(leading), device=device)
    outer, inner_index = index // inner, index % inner
    sample, position = (inner_index, outer) if by_position else (outer, inner_index)
    if isinstance(context.position_offset, tuple):
        starts = torch.tensor(context.position_offset, device=device)
        length = leading[0] if by_position else inner
        if length % len(starts):
            raise UserError(f"{length} positions do not divide into {len(starts)} equal pieces")
        piece = length // len(starts)
        position = starts[position // piece] + position % piece
    else:
        position = position + context.position_offset
    sample = sample + context.sample_offset
    if padding := rows - len(index):
        offset = context.position_offset
        first = PADDED_ROWS * (offset[0] if isinstance(offset, tuple) else offset)
        if first >= 2**32:
            raise UserError(f"position_offset {offset} with padded rows; it must be below 33554432")
        sample = pad(sample, (0, padding), value=LAST_SAMPLE - context.sample_offset)
        position = torch.cat([position, torch.arange(first, first + padding, device=device)])
    return sample, position
