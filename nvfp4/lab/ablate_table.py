"""What an ablation found: losses, gaps with intervals and GEMM errors of each variant.

With seeds s = 1..n, n >= 2, and L the final validation losses, a variant's relative gap is

    g_s = L_s / L_ref,s - 1      gap = mean(g)      interval = gap -+ t_{n-1} sd(g) / sqrt(n)

Pairing by seed takes out what the seed does to both runs (initial weights, order of the data); the
interval says how far another choice of seeds may move the gap (Student's t, assuming that the g_s
are normal; with two or three seeds it is wide, as it should be).

With a single seed there is no spread over seeds. The gap is then that of the training loss in the
last window, with the block bootstrap of nvfp4.lab.bootstrap, as `nvfp4 parity` judges it; it says
nothing about other seeds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nvfp4.errors import UserError
from nvfp4.lab.ablate_runs import Outcome
from nvfp4.lab.ablate_variants import Variant
from nvfp4.lab.bootstrap import Array, relative_gap
from nvfp4.lab.comparable import recipe_differences, require_same_data
from nvfp4.lab.compare import Settings, compare
from nvfp4.lab.runs import Run, load_run
from nvfp4.precision import operands

GEMMS = tuple(operands.GEMMS)  # fprop, dgrad, wgrad


@dataclass(frozen=True, slots=True)
class Gap:
    """A relative gap (0.01 = 1 %) with its interval; low and high are None where none is honest."""

    gap: float
    low: float | None
    high: float | None
    by_seed: tuple[float, ...] = ()
    reason: str = ""  # why there is no interval


@dataclass(frozen=True, slots=True)
class Row:
    """One variant. losses: final validation losses by seed, None where the run has none."""

    name: str
    outcomes: tuple[Outcome, ...]
    losses: tuple[float | None, ...]
    gap: Gap | None  # None for the reference, and where a run of the pair did not finish
    errors: Mapping[str, float]  # mean relative error by GEMM, over linears and seeds
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return all(outcome.kind == "finished" for outcome in self.outcomes)

    @property
    def loss(self) -> float | None:
        """Mean over the seeds, if all of them finished."""
        known = [loss for loss in self.losses if loss is not None]
        return float(np.mean(known)) if self.finished and known else None

    @property
    def trouble(self) -> str:
        """`diverged at step 31 (1 of 3 seeds)`, or an empty string."""
        bad = [outcome for outcome in self.outcomes if outcome.kind != "finished"]
        if not bad:
            return ""
        worst = min(bad, key=lambda o: (o.kind != "diverged", o.step))
        words = worst.words if worst.kind == "diverged" else "failed"
        many = len(self.outcomes)
        return words if many == 1 else f"{words} ({len(bad)} of {many} seeds)"


@dataclass(frozen=True, slots=True)
class Table:
    """All rows, the reference first. pairs: gap of the first to the second variant, by names."""

    recipe: str
    seeds: tuple[int, ...]
    steps: int
    tokens: int
    confidence: float
    window: int  # tokens that a single seed's gap looks at; 0 with several seeds
    rows: tuple[Row, ...]
    pairs: Mapping[tuple[str, str], Gap]


def paired_gap(x: Array, ref: Array, confidence: float) -> Gap:
    """Student's t on the relative gaps per seed. x, ref: (n,) losses by seed, n >= 2."""
    from scipy import stats

    gaps = relative_gap(np.asarray(x, float), np.asarray(ref, float))
    n, mean = len(gaps), float(gaps.mean())
    reach = float(stats.t.ppf(0.5 + confidence / 2.0, n - 1) * gaps.std(ddof=1) / math.sqrt(n))
    return Gap(mean, mean - reach, mean + reach, tuple(map(float, gaps)))


def one_seed_gap(ref: Run, run: Run, settings: Settings) -> Gap:
    """The gap of one seed, as `nvfp4 parity` sees it."""
    (comparison,) = compare([ref, run], settings).comparisons
    gap, interval = comparison.last.gap, comparison.interval
    if gap is None:
        return Gap(math.nan, None, None, reason=comparison.reason)
    if interval is None:
        return Gap(gap, None, None, (gap,), comparison.reason)
    return Gap(gap, interval.low, interval.high, (gap,))


def gemm_errors(runs: Sequence[Run]) -> dict[str, float]:
    """Mean relative error by GEMM over the linears that quantise it, else over all; over seeds.

    UserError if gemm_error.json cannot be read.
    """
    found: dict[str, list[float]] = {gemm: [] for gemm in GEMMS}
    for run in runs:
        file = run.path / "gemm_error.json"
        try:
            mean = json.loads(file.read_text(encoding="utf-8"))["mean"]
            values = {gemm: mean[gemm]["quantised"] or mean[gemm]["all"] for gemm in GEMMS}
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{file}: missing or damaged; delete the run to train it again"
            ) from None
        for gemm, value in values.items():
            if value is not None:
                found[gemm].append(value)
    return {gemm: float(np.mean(values)) for gemm, values in found.items() if values}


def tabulate(variants: Sequence[Variant], outcomes: Mapping[str, Outcome], recipe: str) -> Table:
    """Reads the run folders of all variants; the first is the reference."""
    ends = [tuple(outcomes[r.run.name] for r in variant.recipes) for variant in variants]
    runs = [
        [
            load_run(r.run.dir) if outcome.kind == "finished" else None
            for r, outcome in zip(variant.recipes, end, strict=True)
        ]
        for variant, end in zip(variants, ends, strict=True)
    ]
    first = variants[0].recipes[0]
    parity = first.parity
    settings = Settings(
        parity.tolerance, window_tokens=parity.window_tokens,
        window_fraction=parity.window_fraction, confidence=parity.confidence,
    )  # fmt: skip
    rows = []
    for variant, end, mine in zip(variants, ends, runs, strict=True):
        gap = None if mine is runs[0] else _gap(runs[0], mine, settings)
        rows.append(
            Row(
                variant.name,
                end,
                tuple(_valid(run) for run in mine),
                gap,
                gemm_errors([run for run in mine if run]),
                () if mine is runs[0] else _notes(variants[0], variant, gap),
            )  # fmt: skip
        )
    pairs = {
        (a.name, b.name): gap
        for a, mine in zip(variants, runs, strict=True)
        for b, other in zip(variants, runs, strict=True)
        if a is not b and len(mine) > 1 and (gap := _gap(other, mine, settings))
    }
    tokens = first.steps * first.tokens_per_step
    seeds = tuple(r.run.seed for r in variants[0].recipes)
    return Table(
        recipe, seeds, first.steps, tokens, parity.confidence,
        settings.window(tokens) if len(seeds) == 1 else 0, tuple(rows), pairs,
    )  # fmt: skip


def _valid(run: Run | None) -> float | None:
    return float(run.valid.values[-1]) if run and len(run.valid) else None


def _gap(refs: Sequence[Run | None], runs: Sequence[Run | None], settings: Settings) -> Gap | None:
    """None unless every run of both finished: a mean over the survivors would flatter."""
    pairs = [(ref, run) for ref, run in zip(refs, runs, strict=True) if ref and run]
    if len(pairs) < len(runs):
        return None
    if len(pairs) == 1:
        return one_seed_gap(*pairs[0], settings)
    for ref, run in pairs:
        require_same_data(ref, run)
    x, y = (np.array([_valid(pair[side]) for pair in pairs], float) for side in (1, 0))
    return paired_gap(x, y, settings.confidence)


def _notes(reference: Variant, variant: Variant, gap: Gap | None) -> tuple[str, ...]:
    """What the reader of a row must know."""
    ref, own = (v.recipes[0].model_dump(mode="json") for v in (reference, variant))
    different = recipe_differences(ref, own)
    notes = []
    if different:
        shown = ", ".join(f"{key} ({a} / {b})" for key, a, b in different)
        notes.append(f"{variant.name} differs in more than precision: {shown}")
    if gap and gap.reason:
        notes.append(f"{variant.name} has no interval: {gap.reason}")
    return tuple(notes)
