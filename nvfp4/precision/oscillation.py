"""OsciReset: weights whose quantised value jumps to and fro are set to it (arXiv 2510.27527).

A weight near the border between two codes is pushed over it by every small update: its quantised
value Q(w) moves by a whole step while w hardly moves. Over a window of steps t

    r = sum_t |Q(w_t) - Q(w_t-1)| / sum_t |w_t - w_t-1|          0 where w has not moved       (1)

and where r reaches a threshold, w becomes Q(w), the middle of its code's interval. A policy says
when, in `osci_*`: every so many steps from a share of the run on, each time over the window before.
w is the FP32 master weight; Q the quantisation of fprop, of w rounded to the compute dtype, as in
linear.py. The published figures are a window of 50, every 200 steps (400 for the largest model), a
threshold of 8, over roughly the last 40 % of the run (0.59 to 0.69 is where it starts); taken here
are 200 and 0.6. There a window begins at each multiple of 200 steps and the reset follows it, here
it ends there. A run of fewer than 200 steps is never reset. The optimizer's moments stay.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvfp4 import backends
from nvfp4.precision.tables import Policy

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def quantised(weight: Tensor, policy: Policy) -> Tensor:
    """Q(w) as forward multiplies it: float32, shape of the weight (N, K)."""
    spec = policy.fprop.weight
    assert spec is not None  # Policy has made sure
    backend = backends.active()
    return backend.dequantize(backend.quantize(weight.to(_DTYPES[policy.compute_dtype]), spec))


def window_of(step: int, steps: int, policy: Policy) -> tuple[bool, bool]:
    """(whether this step counts in a window, whether the weights are reset after it).

    step: from 1; steps: of the whole run. Resets come after the multiples of osci_every that lie at
    or beyond the share osci_start of the run.
    """
    every = policy.osci_every
    reset = -(-step // every) * every
    due = policy.osci_start * steps <= reset <= steps
    return due and step > reset - policy.osci_window, due and step == reset


@dataclass(slots=True)
class Oscillation:
    """Sums of (1) for the linears of one model, by name; whole weights, not shards.

    sums: name -> float32 (2, N, K): of |dQ(w)| and of |dw|; empty outside of a window.
    """

    steps: int
    policies: Mapping[str, Policy]
    sums: dict[str, Tensor] = field(default_factory=dict)
    _before: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def begin(self, step: int, masters: Mapping[str, Tensor]) -> None:
        """Before a step: remember where the weights of an open window are."""
        for name, policy in self.policies.items():
            if window_of(step, self.steps, policy)[0]:
                weight = masters[name]
                self._before[name] = weight.clone(), quantised(weight, policy)

    @torch.no_grad()
    def end(self, step: int, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """After the optimizer's step: add up, and where a window ends set weights to Q(w).

        masters: float32 (N, K), changed in place. Returns name -> how many were set, int64 ().
        """
        counts = {}
        for name, (weight_before, quantised_before) in self._before.items():
            policy, weight = self.policies[name], masters[name]
            now = quantised(weight, policy)
            moved = torch.stack([(now - quantised_before).abs(), (weight - weight_before).abs()])
            self.sums[name] = self.sums[name] + moved if name in self.sums else moved
            if window_of(step, self.steps, policy)[1]:
                jumps, path = self.sums.pop(name)
                chosen = (path > 0) & (jumps >= policy.osci_threshold * path)
                weight.copy_(torch.where(chosen, now, weight))
                counts[name] = chosen.sum()
        self._before.clear()
        return counts

    def state_dict(self) -> dict[str, Tensor]:
        """`linear.oscillation` -> its sums; nothing outside of a window."""
        return {f"{name}.oscillation": value for name, value in self.sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state_dict; other entries are left alone."""
        found = {name: state.get(f"{name}.oscillation") for name in self.policies}
        self.sums = {name: value.clone() for name, value in found.items() if value is not None}
