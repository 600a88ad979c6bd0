"""From the precision section of a recipe to one policy for every linear.

    default: nvfp4                      # policy of every linear that nothing below decides
    num_layers_at_start_in_bf16: 2      # the first blocks of the pattern; Megatron's names
    num_layers_at_end_in_bf16: 0.15     # the last 15 %, rounded up to whole blocks; or a number
    rules:                              # in order, the first that matches decides
      - {use: bf16, kind: "attention.*"}
      - {use: mine, match: "*.mixer.out_proj", blocks: "4..9,-12.."}
    policies:                           # further policies: a preset and what differs from it
      mine: {base: nvfp4, dgrad: mxfp8}
    schedule:                           # changes during the run, see schedule.py
      - {at: 0.82, gemms: [fprop], to: bf16}

The first and last blocks are decided before any rule. A rule holds for a linear if all of its
selectors do. A rule that decides nothing is an error, never a silent no-op. A policy that nothing
uses is a note below the plan, not an error: a set of policies to compare is written in one recipe.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar

from nvfp4.errors import UserError
from nvfp4.precision.operands import GEMMS, Policy, policy_from_dict, unknown
from nvfp4.precision.plan import LinearInfo, PlanRow, PrecisionPlan, describe
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.selectors import Rule, Switch, select, select_blocks

# Which features a tensor-parallel group splits; other kinds are not split.
SPLIT_OUT = ("mamba.in_proj", "attention.qkv", "mlp.up")
SPLIT_IN = ("mamba.out_proj", "attention.out", "mlp.down")


@dataclass(frozen=True)
class PrecisionConfig:
    """The precision section of a recipe; see the module docstring for what each key means."""

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    default: str = "bf16"
    num_layers_at_start_in_bf16: Any = 0  # a whole number or a fraction, see bf16_blocks
    num_layers_at_end_in_bf16: Any = 0
    rules: tuple[Rule, ...] = ()
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    schedule: tuple[Switch, ...] = ()


def known_policies(
    precision: PrecisionConfig, presets: Mapping[str, Policy] = PRESETS
) -> dict[str, Policy]:
    """The presets and the policies the recipe defines; a preset cannot be redefined."""
    known = dict(presets)
    for name, data in precision.policies.items():
        where = f"precision.policies.{name}"
        if name in presets:
            raise UserError(f"{where}: this is the name of a preset; choose another")
        known[name] = policy_from_dict(name, data, known, where)
        _check_gemms_by_name(known[name], data, known, where)
    return known


def _check_gemms_by_name(
    policy: Policy, data: Mapping[str, Any], known: Mapping[str, Policy], where: str
) -> None:
    """A GEMM written as the name of a policy is done exactly as that policy does it."""
    for gemm in GEMMS:
        name = data.get(gemm)
        if not isinstance(name, str):
            continue
        if known[name].by_kind:
            raise UserError(
                f"{where}.{gemm}: {name} stands for other policies by_kind; name one of them, or "
                f"use rules"
            )
        here, there = describe(policy, gemm), describe(known[name], gemm)
        if here != there:
            raise UserError(
                f"{where}.{gemm}: {name} does it as `{there}`, here it would be `{here}`; set what "
                f"differs (accumulate, split, history, weight_hook, ...) in this policy too"
            )


def bf16_blocks(precision: PrecisionConfig, depth: int) -> tuple[int, int]:
    """Number of first and of last BF16 blocks; they leave at least one block between them.

    A fraction of the depth is rounded up: 0.15 of 62 blocks are 10.
    """
    keys = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    counts = []
    for key in keys:
        value = getattr(precision, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"precision.{key} is {value!r}; a number of blocks is due here")
        whole = isinstance(value, int) or value == 0
        if not 0 <= value or (not isinstance(value, int) and value >= 1):
            raise UserError(
                f"precision.{key} is {value}; it must be a whole number of blocks, or a fraction "
                f"below 1"
            )
        counts.append(int(value) if whole else ceil(Fraction(str(value)) * depth))
    nothing_left = sum(counts) == depth and precision.default != "bf16"
    if any(counts) and (sum(counts) > depth or nothing_left):
        raise UserError(
            f"precision: {counts[0]} first and {counts[1]} last blocks in bf16 leave none of the "
            f"{depth} blocks for {precision.default!r}; lower precision.{keys[0]} or "
            f"precision.{keys[1]}"
        )
    return counts[0], counts[1]


def check_shape(row: PlanRow, tensor_parallel: int) -> None:
    """Dimensions are multiples of what the formats need, on each tensor-parallel rank."""
    sizes = {
        "out_features": (row.out_features, row.kind in SPLIT_OUT),
        "in_features": (row.in_features, row.kind in SPLIT_IN),
    }
    multiples = row.policy.multiples
    for key, (size, split) in sizes.items():
        parts, multiple = tensor_parallel if split else 1, multiples[key]
        if size % (multiple * parts):
            ranks = f" on {parts} tensor-parallel ranks" if parts > 1 else ""
            raise UserError(
                f"{row.name}: {key} is {size}, which {row.policy.name} cannot cut into blocks of "
                f"{multiple}{ranks}; make it a multiple of {multiple * parts} or exclude it by "
                f'precision.rules=[{{use: bf16, match: "{row.name}"}}]'
            )


def _default(precision: PrecisionConfig, known: Mapping[str, Policy]) -> str:
    """The default policy; UserError if it is unknown, or two at once."""
    if precision.default in known:
        return precision.default
    named = re.split(r"[,+/& ]+", precision.default)
    if len(named) > 1 and all(name in known for name in named):
        raise UserError(
            f"precision.default names {' and '.join(named)} for the same linears; write one of "
            f"them, and the other as precision.rules=[{{use: {named[1]}, match: ...}}]"
        )
    raise unknown("policy", precision.default, known, "precision.default")


def by_kind(
    use: str, linear: LinearInfo | PlanRow, known: Mapping[str, Policy], reason: str
) -> tuple[str, str]:
    """Policy and reason of a linear after the by_kind of the policy that was chosen for it."""
    for glob, other in known[use].by_kind:
        if other not in known:
            raise unknown("policy", other, known, f"precision.policies.{use}.by_kind")
        if known[other].by_kind:
            raise UserError(
                f"precision.policies.{use}.by_kind {glob}: {other} stands for other policies by "
                f"kind itself; name those"
            )
        if fnmatchcase(linear.kind, glob):
            return other, f"{reason}, {use} by_kind {glob}"
    return use, reason


def _made_of(name: str, precision: PrecisionConfig, known: Mapping[str, Policy]) -> list[str]:
    """Names of the policies that a policy of the recipe takes parts of, or hands linears to."""
    data = precision.policies.get(name, {})
    parts = [data[key] for key in ("base", *GEMMS) if isinstance(data.get(key), str)]
    return parts + [other for _, other in known[name].by_kind]


def _notes(
    precision: PrecisionConfig, known: Mapping[str, Policy], used: set[str], kinds: set[str]
) -> Iterator[str]:
    """What is written in the recipe, or in a policy in use, and has no effect."""
    reached = used | {switch.to for switch in precision.schedule if switch.to in known}
    while more := {one for name in reached for one in _made_of(name, precision, known)} - reached:
        reached |= more
    for name in precision.policies:
        if name not in reached:
            yield f"note: no linear uses precision.policies.{name}"
    for name in sorted(used):
        for glob, other in known[name].by_kind:
            if not any(fnmatchcase(kind, glob) for kind in kinds):
                yield f"note: {name} has {other} for {glob}, and this model has no such linear"


def _blocks(count: int) -> str:
    return "block" if count == 1 else f"{count} blocks"


def resolve(
    linears: Sequence[LinearInfo],
    precision: PrecisionConfig,
    *,
    presets: Mapping[str, Policy] = PRESETS,
    tensor_model_parallel_size: int = 1,
) -> PrecisionPlan:
    """Policy of every linear and the reason for it.

    linears: whole (unsharded) shapes, in order; block is the 0-based index in the pattern, or -1
    for a linear outside the blocks, which block rules never select.

    Raises UserError: unknown policy, kind or field; a rule that matches or decides nothing; first
    and last BF16 blocks that overlap; a dimension that does not divide into blocks.
    """
    if not linears:
        raise UserError("precision: the model has no linear to plan for")
    known = known_policies(precision, presets)
    depth = max(one.block for one in linears) + 1
    start, end = bf16_blocks(precision, depth)
    default = _default(precision, known)

    decided: dict[str, tuple[str, str]] = {}  # name -> policy name, reason
    for one in linears:
        if 0 <= one.block < start:
            decided[one.name] = "bf16", f"first {_blocks(start)}"
        elif depth - end <= one.block:
            decided[one.name] = "bf16", f"last {_blocks(end)}"
    for index, rule in enumerate(precision.rules):
        where = f"precision.rules[{index}]"
        if rule.use not in known:
            raise unknown("policy", rule.use, known, f"{where}.use")
        if rule.empty:
            raise UserError(
                f"{where} selects nothing; give match, kind or blocks, or change the default "
                f"for all"
            )
        selected = select(linears, rule, depth, where)
        new = selected - decided.keys()
        if not new:
            earlier = sorted({decided[name][1] for name in selected})
            others = sorted({decided[name][0] for name in selected} - {rule.use})
            instead = f", for {', '.join(others)} instead of {rule.use}" if others else ""
            raise UserError(
                f"{where} ({rule}) decides nothing: its {len(selected)} linears are already "
                f"decided by {', '.join(earlier)}{instead}; delete one of the two"
            )
        decided.update(dict.fromkeys(new, (rule.use, f"rules[{index}] {rule}")))

    rows, used = [], set()
    for one in linears:
        use, reason = decided.get(one.name, (default, "default"))
        used.add(use)
        use, reason = by_kind(use, one, known, reason)
        rows.append(PlanRow.of(one, known[use], reason))
        check_shape(rows[-1], tensor_model_parallel_size)
    used |= {row.policy.name for row in rows}
    notes = _notes(precision, known, used, {one.kind for one in linears})
    return PrecisionPlan(tuple(rows), notes=tuple(notes))


__all__ = [
    "LinearInfo", "PlanRow", "Policy", "PrecisionConfig", "PrecisionPlan", "Rule", "Switch",
    "known_policies", "resolve", "select_blocks",
]  # fmt: skip
