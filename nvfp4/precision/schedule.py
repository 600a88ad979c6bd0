"""Changes of precision during a run: from some step on, named GEMMs take another policy's operands.

    schedule:
      - {at: 0.82, gemms: [fprop], to: bf16}
      - {at: {tokens: 8.2e12}, gemms: [dgrad, wgrad], to: bf16, kind: "mlp.*"}

`at` is a fraction of the run's steps, a number of tokens, or the number of a step (as counted in
metrics.jsonl, from 1). The first step that begins at or after that point runs switched; a switch
happens between two steps, so a backward pass never meets another policy than its forward.

A switch replaces the operands of the named GEMMs, and nothing else, in every selected linear whose
policy quantises that GEMM; what is in BF16 stays so. Switches add up in order of their steps. Two
of them may begin together if they change different GEMMs. After backward has left FP4, weights can
go from 16x16 to 1x16, which the paper finds slightly better (arXiv 2509.25149, appendix D):

      - {at: 0.82, gemms: [dgrad, wgrad], to: bf16}
      - {at: 0.82, gemms: [fprop], to: nvfp4_1d}

A switch to a policy with by_kind takes the one for the kind of each linear. A linear keeps its
compute dtype. What policies say about all GEMMs at once (accumulation, splits, histories) is taken
along where the named GEMMs need it and no other GEMM changes by it; otherwise it is an error.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from nvfp4.errors import UserError
from nvfp4.precision.operands import GEMMS, Policy, unknown
from nvfp4.precision.plan import PlanRow, PrecisionPlan, describe
from nvfp4.precision.policy import PrecisionConfig, by_kind, check_shape, known_policies
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.selectors import Switch, select

__all__ = ["Switch", "Switched", "first_step", "resolve_schedule"]

POINTS = "one of: a fraction of the run such as 0.82, {tokens: N}, {step: N}"


@dataclass(frozen=True, slots=True)
class Switched:
    """What holds from `step` on: text says what changed, changed names the linears, plan is whole.

    tokens: what has been trained on when the step begins.
    """

    step: int
    tokens: int
    text: str
    changed: tuple[str, ...]
    plan: PrecisionPlan


def _whole(value: object, where: str) -> int:
    """A count that may be written as 8.2e12."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise UserError(f"{where} is {value!r}; it must be a whole number")
    if not 0 <= value < 2**63:
        raise UserError(f"{where} is {value!r}; it must be 0 or more and below 2**63")
    return int(value)


def first_step(at: object, where: str, *, steps: int, tokens_per_step: int) -> int:
    """The first step (2 to steps) that begins at or after a point of the run.

    Step s begins after s - 1 steps, so a fraction f gives ceil(f steps) + 1, f taken as the decimal
    that was written. Raises UserError: no such point; a step outside of the run.
    """
    if isinstance(at, Mapping) and len(at) == 1 and (key := next(iter(at))) in ("step", "tokens"):
        count = _whole(at[key], f"{where}.{key}")
        step = count if key == "step" else -(-count // tokens_per_step) + 1
    elif isinstance(at, float) and 0 < at < 1:
        step = math.ceil(Fraction(repr(at)) * steps) + 1
    else:
        raise UserError(f"{where} is {at!r}; write {POINTS}")
    if step < 2:
        raise UserError(
            f"{where} is {at!r}, the start of the run; choose step 2 to {steps}, or say it with "
            f"precision.default= and precision.rules="
        )
    if step > steps:
        raise UserError(
            f"{where} is {at!r}: the first step to begin then is {step}, but the run has {steps} "
            f"steps ({steps * tokens_per_step:,} tokens); choose step 2 to {steps}"
        )
    return step


# Fields of a policy that are about all of its GEMMs; each group comes whole from one policy.
SHARED = (
    ("accumulate",),
    ("split", "split_fraction"),
    ("amax_history", "amax_algorithm", "margin"),
    ("weight_hook", "osci_start", "osci_every", "osci_window", "osci_threshold"),
)


def switched_policy(policy: Policy, gemms: Collection[str], target: Policy) -> Policy:
    """The policy with those of `gemms` that it quantises done as in `target`; itself if none of
    them differs.

    Of the fields in SHARED the policy's are kept where its words for every GEMM (plan.describe)
    come out right, else the target's are taken. UserError if no choice gives exactly the named
    GEMMs of the target beside the others of the policy.
    """
    changed = [
        gemm
        for gemm in GEMMS
        if gemm in gemms
        and policy.quantised(gemm)
        and describe(policy, gemm) != describe(target, gemm)
    ]
    if not changed:
        return policy
    name = f"{policy.name}+{','.join(changed)}:{target.name}"
    tables = {gemm: getattr(target, gemm) for gemm in changed}
    wanted = {gemm: describe(target if gemm in changed else policy, gemm) for gemm in GEMMS}
    refusal = "their other fields cannot be had at once"
    for owners in product((policy, target), repeat=len(SHARED)):
        shared = {
            key: getattr(owner, key)
            for owner, keys in zip(owners, SHARED, strict=True)
            for key in keys
        }
        try:
            new = replace(policy, name=name, by_kind=(), **tables, **shared)
        except UserError as error:
            refusal = str(error)
            continue
        if all(describe(new, gemm) == words for gemm, words in wanted.items()):
            return new
    kept = [gemm for gemm in GEMMS if gemm not in changed]
    raise UserError(
        f"{policy.name} with {', '.join(changed)} of {target.name} and its own "
        f"{', '.join(kept)} is no policy ({refusal}); switch all three gemms, or define a policy "
        f"that has what both need"
    )


def _selected(
    switch: Switch, where: str, plan: PrecisionPlan, known: Mapping[str, Policy]
) -> list[PlanRow]:
    """The linears that a switch selects; UserError at unknown names."""
    if not switch.gemms:
        raise UserError(f"{where}.gemms is empty; name some of {', '.join(GEMMS)}")
    for gemm in switch.gemms:
        if gemm not in GEMMS:
            raise unknown("gemm", gemm, GEMMS, f"{where}.gemms")
    if len(set(switch.gemms)) < len(switch.gemms):
        raise UserError(f"{where}.gemms names a gemm twice: {', '.join(switch.gemms)}")
    if switch.to not in known:
        raise unknown("policy", switch.to, known, f"{where}.to")
    depth = max(row.block for row in plan.rows) + 1
    names = select(plan.rows, switch, depth, where)
    return [row for row in plan.rows if row.name in names]


def _changes(
    switch: Switch, where: str, rows: Sequence[PlanRow], known: Mapping[str, Policy]
) -> dict[str, Policy]:
    """Name -> new policy of those linears that change; UserError if none does."""
    changed = {}
    for row in rows:
        target = known[by_kind(switch.to, row, known, "")[0]]
        if any(row.policy.quantised(gemm) for gemm in switch.gemms):
            _check_dtype(row, target, where)
        try:
            new = switched_policy(row.policy, switch.gemms, target)
        except UserError as error:
            raise UserError(f"{where}: {row.name}: {error}") from None
        if new is not row.policy:
            changed[row.name] = new
    if not changed:
        have = ", ".join(dict.fromkeys(row.policy.name for row in rows))
        raise UserError(
            f"{where} changes nothing: none of its {len(rows)} linears ({have}) has a quantised "
            f"{' or '.join(switch.gemms)} that differs from {switch.to!r}; change gemms=, to= or "
            f"the selectors, or leave the switch out"
        )
    return changed


def _check_dtype(row: PlanRow, target: Policy, where: str) -> None:
    if target.compute_dtype != row.policy.compute_dtype:
        raise UserError(
            f"{where}.to is {target.name!r}, which computes in {target.compute_dtype}, but "
            f"{row.name} has {row.policy.name}, which computes in {row.policy.compute_dtype}; "
            f"use {row.policy.compute_dtype!r}"
        )


def resolve_schedule(
    plan: PrecisionPlan,
    precision: PrecisionConfig,
    *,
    steps: int,
    tokens_per_step: int,
    presets: Mapping[str, Policy] = PRESETS,
    tensor_model_parallel_size: int = 1,
) -> tuple[Switched, ...]:
    """The plans that follow `plan`, in order of their steps; switches of one step are one of them.

    Raises UserError in one line that begins with the key: precision.schedule[i].
    """
    known = known_policies(precision, presets)
    begins = []
    for index, switch in enumerate(precision.schedule):
        where = f"precision.schedule[{index}]"
        step = first_step(switch.at, f"{where}.at", steps=steps, tokens_per_step=tokens_per_step)
        begins.append((step, index))
    found: dict[int, Switched] = {}
    by: dict[tuple[int, str, str], int] = {}  # (step, linear, gemm) -> the switch that changed it
    for step, index in sorted(begins):
        switch, where = precision.schedule[index], f"precision.schedule[{index}]"
        selected = _selected(switch, where, plan, known)
        for name, gemm in product([row.name for row in selected], switch.gemms):
            if (step, name, gemm) in by:
                raise UserError(
                    f"{where}: {gemm} of {name} is switched twice at step {step}, before by entry "
                    f"{by[step, name, gemm]}; let one of the two begin at another point, or select "
                    f"other linears"
                )
        changed = _changes(switch, where, selected, known)
        rows = []
        for row in plan.rows:
            if row.name in changed:
                new = changed[row.name]
                differ = [g for g in GEMMS if describe(new, g) != describe(row.policy, g)]
                by |= {(step, row.name, gemm): index for gemm in differ}
                reason = f"{row.reason}; schedule[{index}] from step {step}"
                row = replace(row, policy=new, reason=reason)
                check_shape(row, tensor_model_parallel_size)
            rows.append(row)
        plan = replace(plan, rows=tuple(rows))
        before = found.get(step)
        text = _text(switch, changed, len(rows))
        names = (*before.changed, *changed) if before else tuple(changed)
        found[step] = Switched(
            step,
            (step - 1) * tokens_per_step,
            f"{before.text}; {text}" if before else text,
            tuple(dict.fromkeys(names)),
            plan,
        )
    return tuple(found.values())


def _text(switch: Switch, changed: Mapping[str, Policy], linears: int) -> str:
    """`fprop to bf16 in 6 of 8 linears`: for logs and figures."""
    gemms = ", ".join(gemm for gemm in GEMMS if gemm in switch.gemms)
    return f"{gemms} to {switch.to} in {len(changed)} of {linears} linears"
