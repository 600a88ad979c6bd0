"""Precision as the run goes: the plan of each step on the model, what policies remember, and proof
that the plan was executed.

A switch of precision.schedule happens between two steps: the model's linears get the policies of
the new plan before the first pass of its step, so no backward meets another policy than its
forward. The plan of a step follows from the recipe alone, which makes a resume bit-equal wherever
it begins. Audited are the first step of a process and the first step after each switch.

NaN and Inf are never laundered. FP4 has neither, and quantising hides them: so what any GEMM with a
quantised operand reads is looked at before it is quantised, in every pass, and the first step or
evaluation in which something is not finite ends the run. The line says where; the gradients of
that step are not applied. GEMMs without quantised operands hand NaN and Inf on, to the loss or to
the norm of the gradient, which end the run likewise.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nvfp4.backends import Backend
from nvfp4.config import Recipe
from nvfp4.engine import parallel
from nvfp4.engine.runfolder import RunFolder
from nvfp4.errors import TrainingError
from nvfp4.precision import audit, nonfinite
from nvfp4.precision.oscillation import Oscillation
from nvfp4.precision.plan import PrecisionPlan
from nvfp4.precision.schedule import Switched
from nvfp4.precision.state import MethodState, needed, use_state


class Execution:
    """The precision side of one process of a run, from step `first` on."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        linears: frozenset[str],
        folder: RunFolder,
        backend: Backend,
        world: parallel.World,
        *,
        first: int,
        remembered: Mapping[str, Tensor],
    ):
        """model: in Megatron's wrappers, as built with recipe.plan; linears: those of this rank;
        remembered: method state of the checkpoint after step first - 1, empty without one."""
        self._recipe, self._linears, self._folder = recipe, linears, folder
        self._backend, self._world, self._first = backend.name, world, first
        self._calls = recipe.accumulation(world.size)
        self._model: Any = model
        while hasattr(self._model, "module"):
            self._model = self._model.module
        self._plan, self._step = recipe.plan, first
        self._method = self._restored(recipe.plan_at(first - 1), remembered)
        self._oscillation = self._oscillating(recipe.plan_at(first - 1), remembered)
        folder.drop_audits(first)

    def begin(self, step: int) -> str | None:
        """Give the model the plan of a step; the text of the switch that happens here, if one
        does."""
        plan, self._step = self._recipe.plan_at(step), step
        if plan is not self._plan:
            self._model.attach(plan)
            self._plan = plan
            self._oscillation = self._oscillating(plan, {})  # open windows end with a switch
        self._oscillation.begin(step, self._masters())
        switch = self._switch
        if switch is None:
            return None
        former, self._method = self._method, self._fresh(plan)
        if former and self._method:
            self._method.take(former)
        return switch.text

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Around the passes of a step or an evaluation: policies have their memory, which only a
        step writes.

        Raises TrainingError on every rank if an operand was not finite on one of them.
        """
        failed = None
        with nonfinite.watching() as seen, use_state(self._method):
            try:
                yield
            except TrainingError as error:  # such as a loss of NaN: say where it came from
                failed = error
        lines = parallel.of_any_rank(seen.lines(), self._world)
        if lines:
            more = f" (and {len(lines) - 1} more operands)" if len(lines) > 1 else ""
            row = failed.row if failed else {}
            raise TrainingError(f"step {self._step}: {lines[0]}{more}", **row) from failed
        if failed:
            raise failed

    def end(self) -> None:
        """After the optimizer's step: what was seen in it becomes part of the memory, and the
        weight hooks of the policies act."""
        if self._method:
            self._method.update()
        masters = self._masters()
        for name in self._oscillation.end(self._step, masters):
            self._weights[name].data.copy_(masters[name])

    @property
    def remembered(self) -> dict[str, Tensor]:
        """What a checkpoint must keep; the same on every rank."""
        state = self._method.state_dict() if self._method else {}
        state |= self._oscillation.state_dict()
        return {key: value.cpu() for key, value in state.items()}

    def _masters(self) -> dict[str, Tensor]:
        """FP32 master weights of the linears with a weight hook, by name."""
        return {name: getattr(w, "main_param", w).data for name, w in self._weights.items()}

    def _oscillating(self, plan: PrecisionPlan, state: Mapping[str, Tensor]) -> Oscillation:
        hooked = {row.name: row.policy for row in plan.rows if row.policy.weight_hook != "none"}
        self._weights = {n: one.weight for n, one in self._model.linears() if n in hooked}
        oscillation = Oscillation(self._recipe.steps, hooked)
        oscillation.load_state_dict(
            {key: value.to(self._world.device) for key, value in state.items()}
        )
        return oscillation

    def _fresh(self, plan: PrecisionPlan) -> MethodState | None:
        return MethodState(plan, self._world.device) if needed(plan) else None

    def _restored(
        self, plan: PrecisionPlan, remembered: Mapping[str, Tensor]
    ) -> MethodState | None:
        state = self._fresh(plan)
        if state and self._first > 1:
            if self._recipe.checkpoint.allow_changes:  # what another policy left is no history
                own = state.state_dict()
                fits = {k: v for k, v in remembered.items() if k in own and v.shape == own[k].shape}
                remembered = own | fits
            state.load_state_dict(remembered)
        return state

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
