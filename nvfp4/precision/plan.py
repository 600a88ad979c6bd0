"""The plan: which policy every linear has, and why. Printed, saved with the run, audited."""

import csv
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

from nvfp4.errors import UserError
from nvfp4.precision.operands import GEMMS, Policy, facts, label


@dataclass(frozen=True, slots=True)
class LinearInfo:
    """One linear: module name, kind, 0-based block (-1: outside the blocks), weight (out, in).

    Shapes are those of the whole tensor, before tensor parallelism.
    """

    name: str
    kind: str
    block: int
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A LinearInfo with its policy and what decided on it."""

    name: str
    kind: str
    block: int
    out_features: int
    in_features: int
    policy: Policy
    reason: str

    @classmethod
    def of(cls, linear: LinearInfo, policy: Policy, reason: str) -> "PlanRow":
        """Row of a linear."""
        values = {field.name: getattr(linear, field.name) for field in fields(linear)}
        return cls(**values, policy=policy, reason=reason)

    @property
    def flops(self) -> int:
        """FLOPs per token: 2 N K in each of the three GEMMs."""
        return 6 * self.out_features * self.in_features


def describe(policy: Policy, gemm: str) -> str:
    """One GEMM of a policy in words: `input e2m1 1x16 nearest; weight e2m1 16x16 nearest`.

    Everything that changes its numbers is in there, so that two policies differ if their words do.
    """
    words = [
        f"{role} {label(facts(spec, policy.compute_dtype))}"
        for role, spec in policy.operands(gemm).items()
    ]
    if policy.source(gemm) != "original":
        words[1] += f" from {policy.source(gemm)}"
    if policy.accumulation(gemm) != "fp32":
        words.append(f"accumulate {policy.accumulation(gemm)}")
    if policy.split == "mean" and policy.quantised(gemm):
        words.append("split mean")
    if policy.split == "hot_channels" and gemm == "fprop":
        words.append(f"split hot_channels {policy.split_fraction:g}")
    if any(spec and spec.scale_rule == "delayed" for spec in policy.operands(gemm).values()):
        words.append(
            f"history {policy.amax_history} {policy.amax_algorithm} margin {policy.margin}"
        )
    if policy.weight_hook != "none" and gemm == "fprop":
        words.append(
            f"{policy.weight_hook} from {policy.osci_start:g} every {policy.osci_every} window "
            f"{policy.osci_window} threshold {policy.osci_threshold:g}"
        )
    return "; ".join(words)


def formats(policy: Policy, gemm: str) -> str:
    """Formats that a GEMM multiplies: `e2m1`, `bf16`, or `e4m3 x e5m2` where the sides differ."""
    names = [facts(spec, policy.compute_dtype)["format"] for spec in policy.operands(gemm).values()]
    return " x ".join(dict.fromkeys(names))


def _columns(lines: list[list[str]]) -> str:
    """Left-aligned text columns, two blanks apart."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """Policies of all linears in model order.

    untouched: lines about what was left alone on purpose (by apply_precision), printed below.
    notes: lines about what has no effect, printed below too.
    """

    rows: tuple[PlanRow, ...]
    untouched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def policy_of(self, name: str) -> Policy:
        """Policy of the linear with this module name; UserError if the plan does not have it."""
        for row in self.rows:
            if row.name == name:
                return row.policy
        raise UserError(f"the precision plan has no linear {name!r} among its {len(self.rows)}")

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies in use, by name, in order of appearance."""
        return {row.policy.name: row.policy for row in self.rows}

    def flops_shares(self) -> dict[str, float]:
        """Policy name -> its share of the GEMM FLOPs of all linears in the plan, 0 to 1."""
        flops: Counter[str] = Counter()
        for row in self.rows:
            flops[row.policy.name] += row.flops
        total = sum(flops.values())
        return {name: flops[name] / total for name in self.policies}

    def format_shares(self) -> dict[str, float]:
        """Formats -> share of the GEMM FLOPs done in them, each GEMM of a policy by itself."""
        flops: Counter[str] = Counter()
        for row in self.rows:
            for gemm in GEMMS:
                flops[formats(row.policy, gemm)] += row.flops // len(GEMMS)
        total = sum(flops.values())
        return {name: count / total for name, count in flops.most_common()}

    def summary(self) -> str:
        """One line per policy: number of linears, share of GEMM FLOPs; then what each GEMM does.

        Then the share of GEMM FLOPs by format: policies that mix directions count in several.
        """
        counts = Counter(row.policy.name for row in self.rows)
        lines = []
        for name, share in self.flops_shares().items():
            lines.append(f"{name}: {counts[name]} of {len(self.rows)} linears, "
                         f"{100 * share:.1f} % of their GEMM FLOPs")  # fmt: skip
            lines += [f"  {gemm}  {describe(self.policies[name], gemm)}" for gemm in GEMMS]
        shares = [f"{name} {100 * share:.1f} %" for name, share in self.format_shares().items()]
        lines.append(f"GEMM FLOPs by format: {', '.join(shares)}")
        return "\n".join([*lines, *self.untouched, *self.notes])

    def table(self) -> str:
        """Every linear with block, kind, weight shape, policy and reason, then the summary."""
        lines = [["block", "linear", "kind", "out x in", "policy", "because of"]]
        for row in self.rows:
            shape = f"{row.out_features} x {row.in_features}"
            block = str(row.block) if row.block >= 0 else "-"
            lines.append([block, row.name, row.kind, shape, row.policy.name, row.reason])
        return f"{_columns(lines)}\n\n{self.summary()}"

    def write_csv(self, path: str | Path) -> None:
        """plan.csv: one row per linear, with the operands of each GEMM in words."""
        head = ["name", "kind", "block", "out_features", "in_features", "policy", *GEMMS, "reason"]
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(head)
            for row in self.rows:
                gemms = [describe(row.policy, gemm) for gemm in GEMMS]
                shape = [row.block, row.out_features, row.in_features]
                writer.writerow([row.name, row.kind, *shape, row.policy.name, *gemms, row.reason])
