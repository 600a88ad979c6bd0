"""From the precision section of a recipe to one policy for every linear.

    default: nvfp4                      # policy of every linear that nothing below decides
    num_layers_at_start_in_bf16: 2      # the first blocks of the pattern; Megatron's names
    num_layers_at_end_in_bf16: 8
    rules:                              # in order, the first that matches decides
      - {use: bf16, kind: "attention.*"}
      - {use: mine, match: "*.mixer.out_proj", blocks: "4..9,-12.."}
    policies:                           # further policies: a preset and what differs from it
      mine: {base: nvfp4, dgrad: null}
    schedule:                           # changes during the run, see schedule.py
      - {at: 0.82, gemms: [fprop], to: bf16}

The first and last blocks are decided before any rule. A rule holds for a linear if all of its
selectors do. A rule that decides nothing is an error, never a silent no-op.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nvfp4.errors import UserError
from nvfp4.precision.operands import Policy, policy_from_dict, unknown
from nvfp4.precision.plan import LinearInfo, PlanRow, PrecisionPlan
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
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
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
    return known


def _check_counts(precision: PrecisionConfig, depth: int) -> None:
    """The BF16 blocks at both ends are whole numbers that leave at least one block between them."""
    keys = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    counts = [getattr(precision, key) for key in keys]
    for key, count in zip(keys, counts, strict=True):
        if count < 0:
            raise UserError(f"precision.{key} is {count}; it must be 0 or more")
    nothing_left = sum(counts) == depth and precision.default != "bf16"
    if any(counts) and (sum(counts) > depth or nothing_left):
        raise UserError(
            f"precision: {counts[0]} first and {counts[1]} last blocks in bf16 leave none of the "
            f"{depth} blocks for {precision.default!r}; lower precision.{keys[0]} or {keys[1]}"
        )


def check_shape(row: PlanRow, tensor_parallel: int) -> None:
    """Dimensions that blocks of 16 run along are multiples of 16 on each tensor-parallel rank."""
    sizes = {
        "out_features": (row.out_features, row.kind in SPLIT_OUT),
        "in_features": (row.in_features, row.kind in SPLIT_IN),
    }
    multiple = row.policy.token_multiple
    for key, (size, split) in sizes.items():
        parts = tensor_parallel if split else 1
        if size % (multiple * parts):
            ranks = f" on {parts} tensor-parallel ranks" if parts > 1 else ""
            raise UserError(
                f"{row.name}: {key} is {size}, which {row.policy.name} cannot cut into blocks of "
                f"{multiple}{ranks}; make it a multiple of {multiple * parts} or exclude it by "
                f"precision.rules=[{{use: bf16, match: {row.name}}}]"
            )


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
    _check_counts(precision, depth)
    if precision.default not in known:
        raise unknown("policy", precision.default, known, "precision.default")

    decided: dict[str, tuple[str, str]] = {}  # name -> policy name, reason
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
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
                f"{where} selects nothing; give match, kind or blocks, or set precision.default "
                f"for all"
            )
        selected = select(linears, rule, depth, where)
        new = selected - decided.keys()
        if not new:
            earlier = sorted({decided[name][1] for name in selected})
            raise UserError(
                f"{where} ({rule}) decides nothing: its {len(selected)} linears are already "
                f"decided by {', '.join(earlier)}"
            )
        decided.update(dict.fromkeys(new, (rule.use, f"rules[{index}] {rule}")))

    rows = []
    for one in linears:
        use, reason = decided.get(one.name, (precision.default, "default"))
        rows.append(PlanRow.of(one, known[use], reason))
        check_shape(rows[-1], tensor_model_parallel_size)
    return PrecisionPlan(tuple(rows))


__all__ = [
    "LinearInfo", "PlanRow", "Policy", "PrecisionConfig", "PrecisionPlan", "Rule", "Switch",
    "known_policies", "resolve", "select_blocks",
]  # fmt: skip
