"""Verdicts and notes of parity, on invented run folders."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nvfp4.lab.bootstrap import Interval
from nvfp4.lab.compare import verdict_of
from nvfp4.lab.parity import parity_of

HASH = "3f2a91c07be4d5"


def write_run(
    folder: Path,
    *,
    gap: float = 0.0,
    steps: int = 300,
    batch: int = 16,
    seq: int = 512,
    noise: float = 0.004,
    seed: int = 7,
    salt: int = 0,
    positions=None,
    data_hash: str | None = HASH,
    recipe: dict | None = None,
    edit=None,
) -> Path:
    """A run folder as the engine writes it, with an invented loss: a power law in steps, batch
    noise that equal `seed` shares, AR(1) noise of its own for each `salt`, and a relative `gap`.
    """
    t = np.arange(1, steps + 1)
    clean = (2.1 + 6.2 * (1 + t / 12) ** -0.55) * (1 + gap)
    batch_noise = 0.05 * np.random.default_rng(seed).standard_normal(steps)
    shocks = np.random.default_rng([seed, salt]).standard_normal(steps)
    own = np.zeros(steps)
    for i in range(steps if salt else 0):
        own[i] = 0.5 * own[i - 1] + 0.87 * shocks[i]
    loss = clean + (1 + gap) * batch_noise + noise * own
    rows = [
        {"step": int(step), "tokens": int(step) * batch * seq, "loss": float(loss[step - 1]),
         "grad_norm": 1.0, "lr": 1e-3}
        for step in (t if positions is None else positions)
    ]  # fmt: skip
    for row in rows:
        if row["step"] % 50 == 0 or row["step"] == steps:
            row["valid_loss"] = float(clean[row["step"] - 1] + 0.06)
    if edit:
        edit(rows)
    body = {
        "run": {"name": folder.name, "dir": str(folder), "seed": seed},
        "model": {"name": "tiny", "seq_length": seq},
        "data": {"train": [{"path": "stdlib", "weight": 1.0}]},
        "train": {"steps": steps, "global_batch_size": batch},
        "optim": {"lr": 1e-3},
        "precision": {"default": folder.name},
        "parity": {"tolerance": 0.015, "window_fraction": 0.1, "confidence": 0.95},
    }
    for section, values in (recipe or {}).items():
        body[section] = {**body.get(section, {}), **values}
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(body))
    (folder / "env.json").write_text(json.dumps({"data_hash": data_hash} if data_hash else {}))
    return folder


def judge(*paths, **kwargs):
    """The one comparison of two runs."""
    (comparison,) = parity_of(paths, **kwargs).comparisons
    return comparison


def interval_of(comparison) -> Interval:
    assert comparison.interval is not None
    return comparison.interval


def change(first: int, value):
    """An edit that sets (or maps) the loss of every row from `first` on."""

    def edit(rows):
        for row in rows[first:]:
            row["loss"] = value(row) if callable(value) else value

    return edit


# --- verdicts --------------------------------------------------------------------------------

finite = st.floats(-1, 1)


@given(finite, finite, finite)
def test_the_verdict_follows_the_interval(a, b, tolerance):
    low, high = min(a, b), max(a, b)
    verdict = verdict_of(low, high, tolerance)
    assert (verdict == "PASS") == (high <= tolerance)
    assert (verdict == "FAIL") == (low > tolerance)
    assert (verdict == "INCONCLUSIVE") == (low <= tolerance < high)


@given(finite, finite, finite, st.floats(0, 1))
def test_a_larger_tolerance_or_a_lower_interval_is_never_worse(a, b, tolerance, more):
    rank = ["FAIL", "INCONCLUSIVE", "PASS"].index
    low, high = min(a, b), max(a, b)
    verdict = rank(verdict_of(low, high, tolerance))
    assert rank(verdict_of(low, high, tolerance + more)) >= verdict
    assert rank(verdict_of(low - more, high - more, tolerance)) >= verdict


@pytest.mark.parametrize("gap, verdict", [(0.0, "PASS"), (0.0146, "INCONCLUSIVE"), (0.03, "FAIL")])
def test_known_gaps_get_their_verdict(tmp_path, gap, verdict):
    a = write_run(tmp_path / "a")
    comparison = judge(a, write_run(tmp_path / "b", gap=gap, salt=1))
    assert comparison.verdict == verdict
    assert interval_of(comparison).low < gap < interval_of(comparison).high
    assert "tolerance of 1.50%" in comparison.reason


def test_a_better_run_passes(tmp_path):
    comparison = judge(write_run(tmp_path / "a"), write_run(tmp_path / "b", gap=-0.02, salt=1))
    assert comparison.verdict == "PASS" and interval_of(comparison).high < 0


@pytest.mark.parametrize("value, word", [(math.nan, "nan"), (math.inf, "inf")])
def test_a_broken_loss_fails_and_a_broken_reference_concludes_nothing(tmp_path, value, word):
    good = write_run(tmp_path / "good")
    broken = write_run(tmp_path / "broken", edit=change(100, value))
    reason = f"the loss of broken is {word} at {101 * 8192:,} tokens"
    forward, backward = judge(good, broken), judge(broken, good)
    assert (forward.verdict, forward.reason) == ("FAIL", reason)
    assert (backward.verdict, backward.reason) == ("INCONCLUSIVE", reason)


def test_a_broken_validation_loss_fails(tmp_path):
    def edit(rows):
        rows[-1]["valid_loss"] = math.nan

    comparison = judge(write_run(tmp_path / "a"), write_run(tmp_path / "b", edit=edit))
    assert comparison.verdict == "FAIL" and "validation loss of b is nan" in comparison.reason


def test_divergence_fails_even_where_the_interval_is_too_wide_to_tell(tmp_path):
    wild = change(270, lambda row: 40.0 if row["step"] > 290 else 8.5)
    comparison = judge(write_run(tmp_path / "a"), write_run(tmp_path / "wild", edit=wild))
    assert comparison.verdict == "FAIL"
    assert comparison.reason.startswith("wild diverged: loss")


def test_too_few_points_conclude_nothing(tmp_path):
    comparison = judge(write_run(tmp_path / "a", steps=60), write_run(tmp_path / "b", steps=60))
    assert comparison.verdict == "INCONCLUSIVE" and comparison.interval is None
    assert "only 6 common steps in the last window, 20 are needed" in comparison.reason


def test_a_window_longer_than_the_runs_concludes_nothing(tmp_path):
    pair = write_run(tmp_path / "a", steps=60), write_run(tmp_path / "b", steps=60)
    comparison = judge(*pair, window_tokens=1e9)
    assert comparison.verdict == "INCONCLUSIVE"
    assert "longer than the 491,520 both runs have" in comparison.reason


def test_a_run_in_progress_is_not_judged(tmp_path):
    half = write_run(tmp_path / "half", positions=range(1, 251), salt=1)
    comparison = judge(write_run(tmp_path / "a"), half)
    assert comparison.verdict == "INCONCLUSIVE" and comparison.interval is not None
    assert "half is not finished (2,048,000 of 2,457,600 tokens)" in comparison.reason


def test_a_shorter_schedule_is_not_judged(tmp_path):
    comparison = judge(write_run(tmp_path / "long"), write_run(tmp_path / "short", steps=250))
    assert comparison.verdict == "INCONCLUSIVE"
    assert "long ends at 2,457,600 tokens, the comparison at 2,048,000" in comparison.reason


# --- notes -----------------------------------------------------------------------------------


def test_recipes_may_differ_in_precision_and_bookkeeping(tmp_path):
    a = write_run(tmp_path / "a", recipe={"metrics": {"every": 1}})
    b = write_run(
        tmp_path / "b", salt=1, recipe={"metrics": {"every": 5}, "parity": {"against": "a"}}
    )
    assert judge(a, b).notes == ()


def test_other_differences_are_listed(tmp_path):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", seed=8, salt=1, recipe={"optim": {"lr": 2e-3}})
    comparison = judge(a, b)
    assert not comparison.paired
    assert "in more than precision: optim.lr (0.001 / 0.002), run.seed (7 / 8)" in str(
        comparison.notes
    )
    assert "b has another seed than a" in str(comparison.notes)


def test_equal_losses_are_suspicious(tmp_path):
    comparison = judge(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert comparison.verdict == "PASS" and interval_of(comparison).gap == 0.0
    assert "equals a to the last digit" in comparison.notes[0]


def test_a_validation_gap_that_contradicts_is_said(tmp_path):
    def edit(rows):
        rows[-1]["valid_loss"] *= 1.1

    comparison = judge(write_run(tmp_path / "a"), write_run(tmp_path / "b", salt=1, edit=edit))
    assert comparison.verdict == "PASS"
    assert "training and validation of b disagree" in comparison.notes[0]
