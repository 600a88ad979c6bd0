"""OsciReset: which weights are set to their quantised value, when, and that a resume agrees."""

from dataclasses import replace

import pytest
import torch
from engine_runs import rows, small

from nvfp4.config import load_recipe
from nvfp4.engine.train import train
from nvfp4.errors import UserError
from nvfp4.precision.oscillation import Oscillation, quantised, window_of
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.tables import Policy

HOOK = replace(
    PRESETS["nvfp4"], name="hook", compute_dtype="fp32", weight_hook="osci_reset",
    osci_start=0.5, osci_every=4, osci_window=3,
)  # fmt: skip
PLAIN = "{base: tetrajet2, weight_hook: none}"
FAST = "{base: tetrajet2, osci_start: 0.4, osci_every: 3, osci_window: 2, osci_threshold: 1.5}"


def test_windows_end_at_multiples_in_the_last_part_of_the_run():
    seen = {step: window_of(step, 14, HOOK) for step in range(1, 15)}
    assert [step for step, (_, reset) in seen.items() if reset] == [8, 12]
    assert [step for step, (counts, _) in seen.items() if counts] == [6, 7, 8, 10, 11, 12]


def test_a_weight_that_jumps_is_set_and_one_that_drifts_is_not():
    """6 fixes the scale at 1: 2.49 and 2.51 have the values 2 and 3, fifty times their distance."""
    weight = torch.zeros(16, 16)
    weight[0, 0] = 6.0
    paths = {(1, 1): [2.49, 2.51, 2.49, 2.51], (2, 2): [2.1, 2.4, 2.7, 3.0], (3, 3): [1, 1, 1, 1]}
    state = Oscillation(8, {"w": HOOK})
    for step in (5, 6, 7, 8):
        state.begin(step, {"w": weight})
        for place, values in paths.items():
            weight[place] = values[step - 5]
        counts = state.end(step, {"w": weight})
        if step == 7:
            jumps, path = state.state_dict()["w.oscillation"]
            assert jumps[1, 1] == 2.0 and path[1, 1].item() == pytest.approx(0.04, rel=1e-5)
            assert jumps[2, 2] == 1.0 and path[2, 2].item() == pytest.approx(0.6, rel=1e-5)
    assert counts["w"] == 1 and weight[1, 1] == 3.0 == quantised(weight, HOOK)[1, 1]
    assert weight[2, 2] == 3.0 and weight[3, 3] == 1.0 and state.state_dict() == {}


def test_sums_are_taken_up_again():
    weight, state = torch.randn(16, 16), Oscillation(8, {"w": HOOK})
    state.begin(6, {"w": weight})
    state.end(6, {"w": weight + 0.1})
    again = Oscillation(8, {"w": HOOK})
    again.load_state_dict({**state.state_dict(), "other.oscillation": torch.ones(1)})
    assert again.sums.keys() == {"w"} and torch.equal(again.sums["w"], state.sums["w"])


def test_a_resumed_run_resets_the_same_weights(tmp_path):
    """12 steps = 5 (inside a window) + 7; and the hook does change the run."""
    changes = [
        "precision.default=hook", f"precision.policies={{hook: {FAST}}}", "model.hidden_size=128",
        "model.ffn_hidden_size=128", "model.kv_channels=32", "model.pattern='*-'",
        "model.seq_length=64", "train.steps=12",
    ]  # fmt: skip
    straight, stopped = (small(tmp_path / name, *changes) for name in ("straight", "stopped"))
    train(straight)
    train(stopped, stop_after=5)
    train(stopped)
    without = small(
        tmp_path / "without",
        *changes,
        f"precision.policies.plain={PLAIN}",
        "precision.default=plain",
    )
    train(without)
    assert rows(tmp_path / "straight") == rows(tmp_path / "stopped")
    same = [
        one == other
        for one, other in zip(rows(tmp_path / "straight"), rows(tmp_path / "without"), strict=True)
    ]
    # The first reset comes after step 6; the weights of step 7 still have the same codes.
    assert same == [True] * 7 + [False] * 5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fprop": PRESETS["bf16"].fprop}, "fprop.weight must be quantised"),
        ({"osci_window": 0}, "osci_window is 0; it must be a whole number of 1 or more"),
        ({"osci_window": 9}, "osci_window 9 is longer than osci_every 4"),
        ({"osci_start": 1.0}, "osci_start is 1.0; it must be a share of the run"),
        ({"osci_start": "x"}, "osci_start is 'x'; it must be a share of the run"),
        ({"osci_threshold": "high"}, "osci_threshold is 'high'; it must be above 0"),
        ({"osci_threshold": 0.0}, "osci_threshold is 0.0; it must be above 0"),
        ({"weight_hook": "reset"}, "weight_hook: 'reset' is not one of none, osci_reset"),
    ],
)
def test_wrong_policies(changes, text):
    with pytest.raises(UserError, match=text):
        replace(HOOK, **changes)


@pytest.mark.parametrize(
    "change", ["parallel.distributed_optimizer=true", "parallel.pipeline_model_parallel_size=2"]
)
def test_shards_are_refused(change):
    with pytest.raises(UserError, match="osci_reset of policy tetrajet2 needs whole weights"):
        load_recipe("tiny_ablation", ["precision.default=tetrajet2", change])


def test_every_policy_has_the_hook_of_its_data():
    assert {p.name for p in PRESETS.values() if p.weight_hook != "none"} == {"tetrajet2"}
    assert Policy("plain").weight_hook == "none"
