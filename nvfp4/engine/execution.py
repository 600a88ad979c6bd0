"""Precision as the run goes: the plan of each step on the model, and proof that it was executed.

A switch of precision.schedule happens between two steps: the model's linears get the policies of
the new plan before the first pass of its step, so no backward meets another policy than its
forward. The plan of a step follows from the recipe alone, which makes a resume bit-equal wherever
it begins. Audited are the first step of a process and the first step after each switch.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from nvfp4.backends import Backend
from nvfp4.config import Recipe
from nvfp4.engine.runfolder import RunFolder
from nvfp4.precision import audit
from nvfp4.precision.schedule import Switched


class Execution:
    """The precision side of one process of a run; `first` is the first step it will train."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        linears: frozenset[str],
        folder: RunFolder,
        backend: Backend,
        *,
        calls: int,
        first: int,
    ):
        """model: in Megatron's wrappers, as built with recipe.plan; linears: those of this rank;
        calls: micro-batches per step."""
        self._recipe, self._linears, self._folder = recipe, linears, folder
        self._backend, self._calls, self._first = backend.name, calls, first
        self._model: Any = model
        while hasattr(self._model, "module"):
            self._model = self._model.module
        self._plan, self._step = recipe.plan, first
        folder.drop_audits(first)

    def begin(self, step: int) -> str | None:
        """Give the model the plan of a step; the text of the switch that happens here, if one
        does."""
        plan, self._step = self._recipe.plan_at(step), step
        if plan is not self._plan:
            self._model.attach(plan)
            self._plan = plan
        switch = self._switch
        return switch.text if switch else None

    @property
    def _switch(self) -> Switched | None:
        """The switch with which the current step begins."""
        return next((one for one in self._recipe.switches if one.step == self._step), None)

    @contextlib.contextmanager
    def audited(self) -> Iterator[None]:
        """Around the passes of a step: hold what each GEMM executed against the plan.

        Raises AuditError if they differ: a run whose linears are silently BF16 would show perfect
        parity. audit.json keeps what was seen, either way.
        """
        switch = self._switch
        if self._step != self._first and switch is None:
            yield
            return
        with audit.recording() as log:
            yield
        lines = audit.compare(
            log, self._plan, self._calls, names=self._linears, backend=self._backend
        )
        self._folder.write_audit(self._step, log, lines, switch.text if switch else None)
        audit.complain(lines)


def write_plans(recipe: Recipe, folder: Path) -> None:
    """plan.csv, the plan of the first step, and plan_step_N.csv for each switch."""
    for old in folder.glob("plan_step_*.csv"):
        old.unlink()
    recipe.plan.write_csv(folder / "plan.csv")
    for switch in recipe.switches:
        switch.plan.write_csv(folder / f"plan_step_{switch.step:06d}.csv")
