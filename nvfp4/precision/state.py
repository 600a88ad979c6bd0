"""What policies remember from step to step: the amax histories of delayed scaling.

    state = MethodState(plan)
    for step ...:
        with use_state(state):
            forward and backward of all micro-batches
        optimizer.step()
        state.update()

For every operand whose scale is delayed, by linear and role (Transformer Engine DelayedScaling):

    seen     the largest amax of this step so far, over all micro-batches and GEMMs of this rank
    history  those of the last steps, newest first; update() rolls `seen` into it
    amax     what the scale follows from: the max of the history, or its newest entry; a value that
             is 0 or not finite leaves the former one in place

    encode scale = (largest number of the format * 2^-margin) / amax                            (1)

All ranks have the entries of all linears, and `seen` becomes the maximum over ranks, so how a batch
is cut does not matter. Until an operand has an amax, its scale is that of current scaling.
Passes without gradients, such as an evaluation, read and never write.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4.errors import UserError
from nvfp4.precision.plan import PrecisionPlan


def needed(plan: PrecisionPlan) -> bool:
    """Whether any policy of a plan remembers something."""
    return any(policy.delayed() for policy in plan.policies.values())


class MethodState:
    """Histories of all delayed operands of a plan, as three float32 tensors with a row for each."""

    def __init__(self, plan: PrecisionPlan, device: torch.device | str = "cpu"):
        found = [
            (f"{row.name}.{role}", row.policy) for row in plan.rows for role in row.policy.delayed()
        ]
        self.rows = {key: index for index, (key, _) in enumerate(found)}
        lengths = [policy.amax_history for _, policy in found]
        newest = [policy.amax_algorithm == "most_recent" for _, policy in found]
        self.lengths = lengths
        self.history = torch.zeros(len(found), max(lengths, default=1), device=device)
        self.amax = torch.zeros(len(found), device=device)
        self.seen = torch.zeros(len(found), device=device)
        # Which entries count: the first `length` ones, or only the newest.
        counted = torch.tensor([1 if one else n for one, n in zip(newest, lengths, strict=True)])
        columns = torch.arange(self.history.shape[1])
        self.counted = (columns < counted[:, None]).to(device)

    def observe(self, name: str, role: str, amax: Tensor, training: bool) -> Tensor:
        """Note this tensor's amax, and return the amax its scale follows from; both float32 ().

        Raises UserError if the plan this state was made for does not have the operand.
        """
        row = self._row(name, role)
        if training:
            torch.maximum(self.seen[row], amax, out=self.seen[row])
        return torch.where(self.amax[row] > 0, self.amax[row], amax)

    @torch.no_grad()
    def update(self, group: dist.ProcessGroup | None = None) -> None:
        """End of an optimizer step: agree on `seen` over the ranks of a group (all), and roll."""
        if not self.rows:
            return
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.seen, dist.ReduceOp.MAX, group=group)
        self.history = self.history.roll(1, dims=1)
        self.history[:, 0] = self.seen
        new = torch.where(self.counted, self.history, 0.0).amax(1)
        self.amax = torch.where((new > 0) & new.isfinite(), new, self.amax)
        self.seen = torch.zeros_like(self.seen)

    def state_dict(self) -> dict[str, Tensor]:
        """`linear.role` -> float32 (1 + history length): amax, then its history, newest first."""
        return {
            key: torch.cat([self.amax[row : row + 1], self.history[row, : self.lengths[row]]])
            for key, row in self.rows.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state_dict; entries of operands that are not delayed here are left out.

        Raises UserError if an operand is missing or has another history length.
        """
        for key, row in self.rows.items():
            length = self.lengths[row]
            if key not in state or tuple(state[key].shape) != (1 + length,):
                was = f"has shape {tuple(state[key].shape)}" if key in state else "is missing"
                raise UserError(
                    f"method state: {key} {was}, the plan needs a history of {length} steps; "
                    f"resume with the policies of the run that was saved"
                )
            values = state[key].to(self.amax)
            self.amax[row], self.history[row, :length] = values[0], values[1:]

    def take(self, other: "MethodState") -> None:
        """Carry over what both have: after a switch of policies nothing that remains is lost."""
        mine, theirs = self.state_dict(), other.state_dict()
        same = {
            key: theirs[key]
            for key in mine.keys() & theirs.keys()
            if mine[key].shape == theirs[key].shape
        }
        self.load_state_dict({**mine, **same})

    def _row(self, name: str, role: str) -> int:
        row = self.rows.get(f"{name}.{role}")
        if row is None:
            raise UserError(
                f"linear {name!r}: the scale of {role} is delayed, but this MethodState was made "
                f"for a plan without that; make it of the plan that the model has now"
            )
        return row


_current: MethodState | None = None


@contextmanager
def use_state(state: MethodState | None) -> Iterator[None]:
    """Let the linears that run inside read and write a state; None for none.

    One variable of the process, as in context.py: CUDA's autograd recomputes in other threads.
    """
    global _current
    former, _current = _current, state
    try:
        yield
    finally:
        _current = former


def current_state() -> MethodState | None:
    """The state in use, None outside of use_state."""
    return _current
