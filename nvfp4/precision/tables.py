"""Policy: what one linear does, as data; one table of operands for each of its three GEMMs.

    fprop  y  = x w^T    input (M, K), weight (N, K)             summed over K, the input features
    dgrad  dx = dy w     grad_output (M, N), weight^T (K, N)     summed over N, the output features
    wgrad  dw = dy^T x   grad_output^T (N, M), input^T (K, M)    summed over M, the tokens

An operand is a QuantSpec, or None: kept in the compute dtype. What specs cannot say has three
places and no more: `split` (a decomposition of an operand), the scale rule eden (a correction of
the scales, part of the spec), `weight_hook` (something done to a weight after a step).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf, lcm
from typing import Any, Literal

from nvfp4.errors import UserError
from nvfp4.numerics.spec import QuantSpec

COMPUTE_DTYPES = ("bf16", "fp32")
SOURCES = ("original", "forward")
CHOICES: dict[str, tuple[str, ...]] = {
    "compute_dtype": COMPUTE_DTYPES,
    "accumulate": ("fp32", "fp64", "sequential16", "blackwell", "split128"),
    "split": ("none", "mean", "hot_channels"),
    "amax_algorithm": ("max", "most_recent"),
    "weight_hook": ("none", "osci_reset"),
}


@dataclass(frozen=True, slots=True)
class Fprop:
    """Operands of y = x w^T, both with blocks along the input features."""

    input: QuantSpec | None = None
    weight: QuantSpec | None = None


@dataclass(frozen=True, slots=True)
class Dgrad:
    """Operands of dx = dy w, both with blocks along the output features.

    source: what the weight is made from: the original, or what fprop multiplied ("forward").
    """

    grad_output: QuantSpec | None = None
    weight: QuantSpec | None = None
    source: Literal["original", "forward"] = "original"


@dataclass(frozen=True, slots=True)
class Wgrad:
    """Operands of dw = dy^T x, both with blocks along the tokens.

    source: what the input is made from: the original, or what fprop multiplied ("forward").
    """

    grad_output: QuantSpec | None = None
    input: QuantSpec | None = None
    source: Literal["original", "forward"] = "original"


GEMMS: dict[str, type] = {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}

# What the rows of an operand are and what it is summed over, in the orientation of its GEMM.
SIDES: dict[str, dict[str, tuple[str, str]]] = {
    "fprop": {"input": ("tokens", "in_features"), "weight": ("out_features", "in_features")},
    "dgrad": {"grad_output": ("tokens", "out_features"), "weight": ("in_features", "out_features")},
    "wgrad": {"grad_output": ("out_features", "tokens"), "input": ("in_features", "tokens")},
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What one linear does.

    compute_dtype    dtype of unquantised operands and of the results y and dx ("bf16": rounded to
                     BF16 once per GEMM; "fp32": not rounded). dw is always FP32
    accumulate       how GEMMs of two quantised operands add up, see numerics.gemm; others: fp32
                     (fp64 holds for all)
    split            "mean": input and grad_output are split into token mean and rest;
                     "hot_channels": the residuals of the worst channels correct fprop; see split.py
    split_fraction   hot_channels: share of the input features that are corrected
    by_kind          (glob on the kind, policy): linears of such a kind use that policy instead
    amax_history     delayed scaling: how many steps the history of an amax has
    amax_algorithm   delayed scaling: the scale follows from the max of the history or from its
                     most_recent entry
    margin           delayed scaling: the scale is 2^margin times smaller
    weight_hook      osci_reset: weights whose quantised value oscillates are set to it, see
                     oscillation.py; osci_start is a share of the run, the others count steps

    Raises UserError, in one line, where fields contradict each other.
    """

    name: str
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    fprop: Fprop = Fprop()
    dgrad: Dgrad = Dgrad()
    wgrad: Wgrad = Wgrad()
    accumulate: Literal["fp32", "fp64", "sequential16", "blackwell", "split128"] = "fp32"
    split: Literal["none", "mean", "hot_channels"] = "none"
    split_fraction: float = 0.0
    by_kind: tuple[tuple[str, str], ...] = ()
    amax_history: int = 1024
    amax_algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0
    weight_hook: Literal["none", "osci_reset"] = "none"
    osci_start: float = 0.6
    osci_every: int = 200
    osci_window: int = 50
    osci_threshold: float = 8.0

    def __post_init__(self) -> None:
        for complaint in _contradictions(self):
            raise UserError(f"policy {self.name or '(unnamed)'}: {complaint}")

    def operands(self, gemm: str) -> dict[str, QuantSpec | None]:
        """role -> spec of one GEMM, in the order of the operand table above."""
        table = getattr(self, gemm)
        return {role: getattr(table, role) for role in SIDES[gemm]}

    def source(self, gemm: str) -> str:
        """What the operand that forward also had is made from in this GEMM."""
        return getattr(getattr(self, gemm), "source", "original")

    @property
    def specs(self) -> list[QuantSpec]:
        """Specs of all quantised operands; empty if nothing is quantised."""
        operands = [spec for gemm in GEMMS for spec in self.operands(gemm).values()]
        return [spec for spec in operands if spec is not None]

    def quantised(self, gemm: str) -> bool:
        """Whether any operand of a GEMM is quantised."""
        return any(spec is not None for spec in self.operands(gemm).values())

    def random(self, gemm: str) -> str:
        """What a GEMM needs random bits for, as a verb phrase; empty if it needs none."""
        for spec in self.operands(gemm).values():
            if spec is not None and spec.random == "elements":
                return "rounds stochastically"
            if spec is not None and spec.random == "scales":
                return "rounds its scales stochastically"
            if spec is not None and spec.hadamard and spec.signs in ("layer", "step"):
                return f"draws signs per {spec.signs}"
        return ""

    def delayed(self) -> tuple[str, ...]:
        """Roles of the operands whose scale follows from earlier steps."""
        roles = [
            role
            for gemm in GEMMS
            for role, spec in self.operands(gemm).items()
            if spec is not None and spec.scale_rule == "delayed"
        ]
        return tuple(dict.fromkeys(roles))

    def accumulation(self, gemm: str) -> str:
        """How this GEMM adds up."""
        both = all(spec is not None for spec in self.operands(gemm).values())
        return self.accumulate if both or self.accumulate == "fp64" else "fp32"

    @property
    def shares_weight(self) -> bool:
        """Whether dgrad takes the transpose of fprop's weight: same spec, square, not rotated."""
        spec = self.fprop.weight
        return spec is not None and spec.tiled and spec == self.dgrad.weight

    @property
    def multiples(self) -> dict[str, int]:
        """What tokens, out_features and in_features must be multiples of; tokens are padded."""
        least = {"tokens": 1, "out_features": 1, "in_features": 1}
        for gemm, roles in SIDES.items():
            for role, dimensions in roles.items():
                if spec := self.operands(gemm)[role]:
                    for dimension, multiple in zip(dimensions, spec.multiples, strict=True):
                        least[dimension] = lcm(least[dimension], multiple)
        return least

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionary of plain data: every field, operands as gemm -> role -> spec fields."""
        return {**asdict(self), "by_kind": dict(self.by_kind)}


def _contradictions(policy: Policy) -> Iterator[str]:
    """Sentences on what does not fit together, the most basic first."""
    for name, allowed in CHOICES.items():
        if getattr(policy, name) not in allowed:
            yield f"{name}: {getattr(policy, name)!r} is not one of {', '.join(allowed)}"
    for name, least, most in (("amax_history", 1, 2**20), ("margin", 0, 100)):
        value = getattr(policy, name)
        if type(value) is not int or not least <= value <= most:
            yield f"{name} is {value!r}; it must be a whole number from {least} to {most}"
    for gemm in GEMMS:
        yield from _gemm_contradictions(policy, gemm)
    yield from _split_contradictions(policy)
    yield from _hook_contradictions(policy)


def _gemm_contradictions(policy: Policy, gemm: str) -> Iterator[str]:
    operands = policy.operands(gemm)
    source = policy.source(gemm)
    if source not in SOURCES:
        yield f"{gemm}.source: {source!r} is not one of {', '.join(SOURCES)}"
    turns = {
        role: (spec.hadamard, spec.signs) if spec and spec.hadamard else (0, "no")
        for role, spec in operands.items()
    }
    if len(set(turns.values())) > 1:
        words = ", ".join(
            f"{role} has hadamard {n} with {s} signs" for role, (n, s) in turns.items()
        )
        yield (
            f"{gemm}: both operands must be rotated alike for the rotation to cancel, but {words}; "
            f"write the same hadamard and signs for both"
        )
    role = {"dgrad": "weight", "wgrad": "input"}.get(gemm, "")
    forward = policy.operands("fprop").get(role)
    if source == "forward" and forward and forward.hadamard:
        yield (
            f"{gemm}.source forward: the {role} of fprop is rotated along another dimension; "
            f"set fprop's hadamard to 0, or {gemm}.source to original"
        )
    for role, spec in operands.items():
        if spec and spec.scale_rule == "delayed" and spec.hadamard:
            yield f"{gemm}.{role}: the history of a delayed scale is that of unrotated values"
    if policy.accumulation(gemm) == "sequential16":
        for role, spec in operands.items():
            if spec and spec.second_level not in ("tensor", "row"):
                yield (
                    f"accumulate sequential16 is the order of NVFP4's reference; {gemm}.{role} is "
                    f"{spec.format} with second_level {spec.second_level}"
                )


def _split_contradictions(policy: Policy) -> Iterator[str]:
    if policy.split == "hot_channels":
        if not 0 < policy.split_fraction <= 0.5:
            yield (
                f"split_fraction is {policy.split_fraction!r}; hot_channels needs a share of the "
                f"input features above 0, at most 0.5"
            )
        for role, spec in policy.operands("fprop").items():
            if spec is None or spec.hadamard or spec.random or spec.scale_rule == "delayed":
                yield (
                    f"split hot_channels: fprop.{role} must be quantised, and not rotated, "
                    f"stochastic or delayed"
                )
    elif policy.split_fraction:
        yield f"split_fraction is {policy.split_fraction!r}, but split is {policy.split}"
    if policy.split == "mean" and policy.delayed():
        yield "split mean does not go with delayed scaling: mean and rest have no common history"


def _hook_contradictions(policy: Policy) -> Iterator[str]:
    weight = policy.fprop.weight
    if policy.weight_hook != "none" and (weight is None or weight.random or weight.hadamard):
        yield (
            f"weight_hook {policy.weight_hook}: fprop.weight must be quantised, and neither "
            "rotated nor stochastic"
        )
    for name in ("osci_every", "osci_window"):
        value = getattr(policy, name)
        if type(value) is not int or value < 1:
            yield f"{name} is {value!r}; it must be a whole number of 1 or more"
            return
    if policy.osci_window > policy.osci_every:
        yield f"osci_window {policy.osci_window} is longer than osci_every {policy.osci_every}"
    for name, least, below, text in (
        ("osci_start", 0, 1, "a share of the run, 0 to below 1"),
        ("osci_threshold", 2**-126, inf, "above 0"),
    ):
        value = getattr(policy, name)
        if type(value) not in (int, float) or not least <= value < below:
            yield f"{name} is {value!r}; it must be {text}"
