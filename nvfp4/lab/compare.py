"""Is the loss of a low-precision run still that of its reference? Alignment, gaps and the verdict.

The question is one of non-inferiority: is the relative gap at the end of training at most the
tolerance that the recipe named before the run?  With [low, high] the two-sided interval of the gap,

    PASS          high <= tolerance
    FAIL          low  >  tolerance
    INCONCLUSIVE  otherwise

so that a gap equal to the tolerance passes with probability (1 - confidence) / 2: an interval of
95 % is a one-sided test at 2.5 %, as in non-inferiority trials (ICH E9 section 3.3.2; Piaggio et
al., JAMA 308, 2012).

Judged is the *training* loss in the last window. At equal seed and data order both runs see the
same batches, so a pair of losses shares its batch noise; each batch is new to both models as long
as the data does not repeat; and a window has many pairs, over which the noise of the weights
averages out too. The final *validation* loss is one number per run, without a spread of its own: it
stands beside the verdict, and a note says so when it contradicts it, but it does not decide.

Pairs are taken at token counts that both runs logged. Nothing is interpolated: a loss between two
batches belongs to no batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nvfp4.errors import UserError
from nvfp4.lab.bootstrap import MIN_POINTS, Array, Interval, gap_interval, window_gap
from nvfp4.lab.comparable import recipe_notes, require_same_data
from nvfp4.lab.runs import Curve, Run

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
Outcome = tuple[Verdict, str]


@dataclass(frozen=True, slots=True)
class Settings:
    """What was decided before looking. window_tokens, if set, goes before window_fraction."""

    tolerance: float  # largest acceptable relative gap, 0.015 = 1.5 %
    tolerance_from: str = "argument"
    window_tokens: float | None = None
    window_fraction: float = 0.1  # of the tokens both runs have
    confidence: float = 0.95  # of the two-sided interval

    def __post_init__(self) -> None:
        allowed = (
            ("tolerance", math.isfinite(self.tolerance) and self.tolerance >= 0, "0 or more"),
            ("window_tokens", self.window_tokens is None or self.window_tokens > 0, "positive"),
            ("window_fraction", 0 < self.window_fraction <= 1, "in (0, 1]"),
            ("confidence", 0.5 <= self.confidence < 1, "in [0.5, 1)"),
        )
        for name, fine, rule in allowed:
            if not fine:
                raise UserError(f"parity.{name} is {getattr(self, name)}; it must be {rule}")

    def window(self, end: int) -> int:
        """Length in tokens of the last window of a comparison that ends at `end` tokens."""
        length = self.window_tokens
        return round(self.window_fraction * end if length is None else length)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two curves at the token counts that both have: tokens (n,), x and ref (n,) in nats."""

    tokens: NDArray[np.int64]
    x: Array
    ref: Array

    def __len__(self) -> int:
        return len(self.tokens)

    def between(self, start: float, end: float) -> "Pair":
        """The pairs in (start, end]: a row at T tokens is the batch that ends there."""
        inside = (self.tokens > start) & (self.tokens <= end)
        return Pair(self.tokens[inside], self.x[inside], self.ref[inside])

    @property
    def final(self) -> "Pair":
        """The last pair alone, or nothing where there is none."""
        return Pair(self.tokens[-1:], self.x[-1:], self.ref[-1:])

    @property
    def gap(self) -> float | None:
        """Relative gap of the means; None without points or with a NaN or Inf among them."""
        if len(self) == 0 or not (np.isfinite(self.x).all() and np.isfinite(self.ref).all()):
            return None
        return window_gap(self.x, self.ref)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """One run against the reference. `last` is the part of `train` in the last window."""

    run: Run
    train: Pair
    valid: Pair
    last: Pair
    window_start: int  # tokens, exclusive
    paired: bool  # equal seeds, hence the same batches in the same order
    interval: Interval | None
    stages: tuple[tuple[int, float | None], ...]  # (tokens, gap of the window that ends there)
    verdict: Verdict
    reason: str
    notes: tuple[str, ...]

    @property
    def end(self) -> int:
        return int(self.train.tokens[-1])

    @property
    def valid_gap(self) -> float | None:
        """Relative gap of the last validation loss that both runs have."""
        return self.valid.final.gap


@dataclass(frozen=True, slots=True, eq=False)
class Parity:
    """The reference and every comparison with it; `verdict` is the worst of them."""

    reference: Run
    comparisons: tuple[Comparison, ...]
    settings: Settings

    @property
    def verdict(self) -> Verdict:
        found = {c.verdict for c in self.comparisons}
        if "FAIL" in found:
            return "FAIL"
        return "INCONCLUSIVE" if "INCONCLUSIVE" in found else "PASS"


def compare(runs: Sequence[Run], settings: Settings) -> Parity:
    """Compare runs[1:] with runs[0]. UserError unless they read the same data in equal steps."""
    if len(runs) < 2:
        raise UserError("a comparison needs two runs or more; the first one is the reference")
    reference, *others = runs
    for run in others:
        require_same_data(reference, run)
    return Parity(reference, tuple(_compare(run, reference, settings) for run in others), settings)


def align(x: Curve, ref: Curve) -> Pair:
    """The values of both curves at common token counts; may be empty."""
    tokens, i, j = np.intersect1d(x.tokens, ref.tokens, assume_unique=True, return_indices=True)
    return Pair(tokens, x.values[i], ref.values[j])


def verdict_of(low: float, high: float, tolerance: float) -> Verdict:
    """PASS if high <= tolerance, FAIL if low > tolerance, else INCONCLUSIVE."""
    if high <= tolerance:
        return "PASS"
    return "FAIL" if low > tolerance else "INCONCLUSIVE"


def _compare(run: Run, ref: Run, settings: Settings) -> Comparison:
    train, valid = align(run.train, ref.train), align(run.valid, ref.valid)
    if len(train) == 0:
        raise UserError(f"{ref.path} and {run.path} logged no common token count")
    end = int(train.tokens[-1])
    length = settings.window(end)
    last = train.between(end - length, end)
    interval, outcome = None, _broken(run, ref) or _too_short(last, length, end)
    if outcome is None:
        interval, lack = gap_interval(last.x, last.ref, settings.confidence)
        outcome = (
            _diverged(run, ref, last)
            or _unfinished(run, ref, end)
            or _judged(interval, lack, settings.tolerance)
        )
    verdict, reason = outcome
    return Comparison(
        run=run,
        train=train,
        valid=valid,
        last=last,
        window_start=max(end - length, 0),
        paired=run.setting("run.seed") == ref.setting("run.seed"),
        interval=interval,
        stages=tuple(_stages(train, int(ref.train.tokens[-1]), length)),
        verdict=verdict,
        reason=reason,
        notes=(*recipe_notes(ref, run), *_loss_notes(run, ref, train, valid, last, settings)),
    )


def _stages(train: Pair, end: int, length: int) -> Iterator[tuple[int, float | None]]:
    """After each quarter of the reference: the gap of a window of `length` that ends there."""
    for stop in (round(end * quarter / 4) for quarter in (1, 2, 3, 4)):
        reached = stop <= train.tokens[-1]
        yield stop, train.between(stop - length, stop).gap if reached else None


def _broken(run: Run, ref: Run) -> Outcome | None:
    """NaN or Inf anywhere. A broken reference is no fault of the run: nothing can be concluded."""
    fault: tuple[tuple[Run, Verdict], ...] = ((run, "FAIL"), (ref, "INCONCLUSIVE"))
    for part, verdict in fault:
        for what, curve in (("", part.train), ("validation ", part.valid)):
            bad = np.flatnonzero(~np.isfinite(curve.values))
            if len(bad):
                loss, at = curve.values[bad[0]], curve.tokens[bad[0]]
                return verdict, f"the {what}loss of {part.name} is {loss} at {at:,} tokens"
    return None


def _too_short(last: Pair, length: int, end: int) -> Outcome | None:
    if length > end:
        return "INCONCLUSIVE", (
            f"the window of {length:,.0f} tokens is longer than the {end:,} both runs have"
        )
    if len(last) < MIN_POINTS:
        return "INCONCLUSIVE", (
            f"only {len(last)} common steps in the last window, {MIN_POINTS} are needed: "
            "train longer or take a longer window"
        )
    return None


def _diverged(run: Run, ref: Run, last: Pair) -> Outcome | None:
    """The last window's median loss is not below the first loss; one spike is no divergence."""
    fault: tuple[tuple[Run, Verdict, Array], ...] = (
        (ref, "INCONCLUSIVE", last.ref),
        (run, "FAIL", last.x),
    )
    for part, verdict, losses in fault:
        first, final = part.train.values[0], np.median(losses)
        if final >= first:
            return verdict, f"{part.name} diverged: loss {first:.3f} at first, {final:.3f} at last"
    return None


def _unfinished(run: Run, ref: Run, end: int) -> Outcome | None:
    """The decay at the end of a schedule moves the gap: before it, no gap answers the question."""
    for part in (run, ref):
        if not part.finished:
            have, plan = part.train.tokens[-1], part.planned_tokens
            return "INCONCLUSIVE", (
                f"{part.name} is not finished ({have:,} of {plan:,.0f} tokens), "
                "and the gap may still change"
            )
    for part in (run, ref):
        if part.train.tokens[-1] != end:
            return "INCONCLUSIVE", (
                f"{part.name} ends at {part.train.tokens[-1]:,} tokens, the comparison at {end:,}: "
                "the learning-rate schedules are not at the same point"
            )
    return None


def _judged(interval: Interval | None, lack: str, tolerance: float) -> Outcome:
    if interval is None:
        return "INCONCLUSIVE", lack
    verdict = verdict_of(interval.low, interval.high, tolerance)
    relation = {
        "PASS": "the whole interval is within",
        "FAIL": "the whole interval is above",
        "INCONCLUSIVE": "the interval contains",
    }[verdict]
    return verdict, f"{relation} the tolerance of {tolerance:.2%}"


def _loss_notes(
    run: Run, ref: Run, train: Pair, valid: Pair, last: Pair, settings: Settings
) -> Iterator[str]:
    if len(train) > 1 and np.array_equal(train.x, train.ref):
        yield f"{run.name} equals {ref.name} to the last digit: was the precision really another?"
    a, b, tolerance = last.gap, valid.final.gap, settings.tolerance
    if a is not None and b is not None and (a <= tolerance) != (b <= tolerance):
        yield (
            f"training and validation of {run.name} disagree about the tolerance of "
            f"{tolerance:.2%}: gap {a:+.2%} and {b:+.2%}"
        )
