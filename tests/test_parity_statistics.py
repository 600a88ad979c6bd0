"""The interval and the verdict against simulated pairs whose gap is known.

Seeds are fixed, so nothing here is flaky; the failure probabilities in the comments are those of
a correct implementation under a fresh seed.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import lfilter

from nvfp4.lab import bootstrap
from nvfp4.lab.bootstrap import Interval, gap_interval
from nvfp4.lab.compare import verdict_of
from nvfp4.lab.plots import running_mean, smoothing_span, spread_apart

GAP = 0.01


def ar1(rng: np.random.Generator, n: int, phi: float) -> np.ndarray:
    """Stationary noise of variance 1 with correlation phi^k at lag k; (n,)."""
    shocks = rng.standard_normal(n + 300) * math.sqrt(1 - phi * phi)
    return np.asarray(lfilter([1.0], [1.0, -phi], shocks))[300:]


def simulated_pair(rng: np.random.Generator, n: int, phi: float) -> tuple[np.ndarray, np.ndarray]:
    """(x, ref): a falling loss with batch noise that both share, and own noise of x. Gap: GAP."""
    ref = 3.0 + np.linspace(0.2, 0.0, n) + 0.1 * rng.standard_normal(n)
    return ref * (1 + GAP) + 0.02 * ar1(rng, n, phi), ref


def interval_of(x, ref, confidence=0.95, **kwargs) -> Interval:
    interval, reason = gap_interval(x, ref, confidence, **kwargs)
    assert interval is not None, reason
    return interval


def intervals(seed: int, n: int, phi: float, confidence: float, count: int):
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        interval, _ = gap_interval(*simulated_pair(rng, n, phi), confidence, replicates=400)
        if interval is not None:
            found.append(interval)
    return found


@pytest.mark.parametrize(
    "n, phi, confidence, expected",
    [(30, 0.0, 0.95, 0.97), (60, 0.5, 0.95, 0.94), (200, 0.5, 0.95, 0.95), (300, 0.0, 0.8, 0.81),
     (1000, 0.9, 0.95, 0.92)],
)  # fmt: skip
def test_intervals_cover_at_about_their_stated_rate(n, phi, confidence, expected):
    # `expected` is what 2000 pairs gave (the table in bootstrap.py). 500 pairs must lie in the
    # central 99.9 % of a binomial around it: at most 1 in 1000 seeds fails for each case.
    covered = sum(i.low <= GAP <= i.high for i in intervals(5, n, phi, confidence, 500))
    low, high = stats.binom.interval(0.999, 500, expected)
    assert low <= covered <= high


def test_intervals_that_ignore_correlation_would_be_caught(monkeypatch):
    # With single pairs resampled, coverage at phi = 0.5 falls to about 0.74; P(460 or more of 500)
    # is then below 1e-20.
    monkeypatch.setattr(bootstrap, "block_length", lambda e: 1)
    covered = sum(i.low <= GAP <= i.high for i in intervals(5, 200, 0.5, 0.95, 500))
    assert covered < 460


def test_false_verdicts_at_the_margin_are_rare():
    # The true gap equals the tolerance. Each one-sided error has a nominal 2.5 %; at most 5 % are
    # accepted, which a true rate of 3 % exceeds in 500 pairs with probability 0.6 %.
    verdicts = [verdict_of(i.low, i.high, GAP) for i in intervals(11, 200, 0.5, 0.95, 500)]
    assert verdicts.count("PASS") <= 25 and verdicts.count("FAIL") <= 25


def test_a_gap_well_inside_or_outside_is_decided():
    # The standard error is sqrt(3 / 200) * 0.02 / 3.1 = 0.0008, the tolerances are 0.007 away.
    for tolerance, verdict in ((0.003, "FAIL"), (0.017, "PASS")):
        verdicts = [verdict_of(i.low, i.high, tolerance) for i in intervals(3, 200, 0.5, 0.95, 50)]
        assert verdicts == [verdict] * 50


def test_pairing_takes_the_batch_noise_out():
    rng = np.random.default_rng(0)
    x, ref = simulated_pair(rng, 200, 0.3)
    paired = interval_of(x, ref)
    mixed = interval_of(x, ref[rng.permutation(200)])
    assert paired.gap == pytest.approx(mixed.gap, abs=1e-12)
    assert paired.high - paired.low < 0.5 * (mixed.high - mixed.low)


def test_block_length_follows_the_correlation():
    rng = np.random.default_rng(1)
    lengths = {
        phi: np.mean([bootstrap.politis_white(ar1(rng, 2000, phi)) for _ in range(20)])
        for phi in (0.0, 0.5, 0.9)
    }
    # Theory for AR(1), from the formula with exact autocovariances: (2 G^2 / D)^(1/3) n^(1/3) with
    # G / g = 2 phi / (1 - phi^2).
    for phi in (0.5, 0.9):
        exact = (1.5 * (2 * phi / (1 - phi**2)) ** 2 * 2000) ** (1 / 3)
        assert lengths[phi] == pytest.approx(exact, rel=0.25)
    assert lengths[0.0] < lengths[0.5] < lengths[0.9]


def test_short_blocks_are_never_used():
    e = np.random.default_rng(2).standard_normal(400)
    assert bootstrap.block_length(e) >= 20
    assert bootstrap.politis_white(np.zeros(50)) == 1.0


def test_autocovariance_is_the_textbook_sum():
    e = np.array([1.0, 4.0, -2.0, 0.5])
    c = e - e.mean()
    expected = [c @ c / 4, (c[0] * c[1] + c[1] * c[2] + c[2] * c[3]) / 4]
    assert bootstrap.autocovariance(e, 1) == pytest.approx(expected)


def test_noise_as_long_as_the_window_gives_no_interval():
    slow = np.cos(np.arange(40) / 3)
    interval, reason = gap_interval(3.0 + slow, np.full(40, 3.0), 0.95)
    assert interval is None
    assert (
        reason == "the noise is correlated over about 33 of the 40 steps in the window: "
        "take a longer window"
    )


def test_19_points_are_too_few_and_20_are_enough():
    x, ref = simulated_pair(np.random.default_rng(4), 20, 0.0)
    assert gap_interval(x, ref, 0.95)[0] is not None
    interval, reason = gap_interval(x[:19], ref[:19], 0.95)
    assert interval is None and "19 common points" in reason


def test_the_interval_is_the_same_every_time_and_widens_with_confidence():
    x, ref = simulated_pair(np.random.default_rng(6), 100, 0.5)
    a, b, narrow = interval_of(x, ref), interval_of(x, ref), interval_of(x, ref, 0.8)
    assert a == b
    assert a.low < narrow.low < narrow.gap < narrow.high < a.high


@given(st.floats(0.5, 20.0), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_units_do_not_matter(scale, seed):
    x, ref = simulated_pair(np.random.default_rng(seed), 300, 0.3)
    one = interval_of(x, ref, replicates=50)
    other = interval_of(scale * x, scale * ref, replicates=50)
    assert (other.gap, other.low, other.high) == pytest.approx((one.gap, one.low, one.high))


def test_many_steps_do_not_need_much_memory():
    x, ref = simulated_pair(np.random.default_rng(8), 40_000, 0.0)
    interval = interval_of(x, ref)
    assert interval.points == 40_000 and interval.low < GAP < interval.high


# --- what the figure computes ----------------------------------------------------------------


@given(st.integers(1, 200), st.integers(0, 20))
def test_running_mean_leaves_straight_lines_alone(n, half):
    line = 2.0 - 0.01 * np.arange(n)
    assert running_mean(line, 2 * half + 1) == pytest.approx(line)


def test_running_mean_is_a_mean():
    values = np.random.default_rng(0).standard_normal(50)
    assert running_mean(values, 7)[20] == pytest.approx(values[17:24].mean())
    assert running_mean(values, 7)[1] == pytest.approx(values[:3].mean())


@given(st.integers(0, 100_000))
def test_smoothing_spans_are_odd(n):
    assert smoothing_span(n) % 2 == 1 and smoothing_span(n) <= max(1, n / 15)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=6))
def test_labels_are_spread_apart_in_order(heights):
    moved = spread_apart(heights, 0.1)
    assert all(b - a >= 0.1 - 1e-12 for a, b in zip(sorted(moved), sorted(moved)[1:], strict=False))
    assert min(moved) == min(heights)
