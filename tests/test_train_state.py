"""What policies remember is saved and restored; operands that are not finite end a run."""

import json
import math
from typing import Any

import pytest
import torch
from engine_runs import rows, small

from nvfp4.engine import step as step_module
from nvfp4.engine.train import train
from nvfp4.errors import UserError
from nvfp4.precision.state import MethodState

TINY = ["model.pattern='*-'", "model.seq_length=32"]
DELAYED = [
    "precision.default=delayed",
    "precision.policies={delayed: {base: fp8_delayed, amax_history: 5}}",
    *TINY,
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def remembered(folder, step: int) -> dict[str, torch.Tensor]:
    """The method state of a checkpoint."""
    from megatron.core import dist_checkpointing

    path = folder / "checkpoints" / f"step_{step:06d}"
    return dist_checkpointing.load_common_state_dict(str(path))["method"]


def test_six_steps_and_six_more_are_twelve(tmp_path):
    """Histories are restored bit-equal, before and at the switch that ends some of them."""
    switch = "precision.schedule=[{at: {step: 9}, gemms: [dgrad, wgrad], to: bf16}]"
    changes = [*DELAYED, switch, "train.steps=12", "checkpoint.every=8", "checkpoint.keep=9"]
    straight, stopped = (small(tmp_path / name, *changes) for name in ("straight", "stopped"))
    train(straight)
    for stop in (6, 8, None):
        train(stopped, stop_after=stop)
    same = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("straight", "stopped")]
    assert same[0] == same[1]
    for step in (8, 12):
        saved = [remembered(tmp_path / name, step) for name in ("straight", "stopped")]
        assert saved[0].keys() == saved[1].keys()
        assert all(saved[0][key].equal(saved[1][key]) for key in saved[0])
        roles = {key.rpartition(".")[2] for key in saved[0]}
        assert roles == {"input", "weight", *(["grad_output"] if step < 9 else [])}
    history = saved[0]["decoder.layers.1.mlp.linear_fc1.input"]
    assert history.shape == (6,) and (history > 0).all()
    assert history[0] == history[1:].max()


def test_without_the_histories_a_resumed_run_is_another_one(tmp_path, monkeypatch):
    """So the test above would notice."""
    straight, stopped = (small(tmp_path / name, *DELAYED) for name in ("straight", "stopped"))
    train(straight, stop_after=3)
    train(stopped, stop_after=2)
    monkeypatch.setattr(MethodState, "load_state_dict", lambda self, state: None)
    train(stopped, stop_after=3)
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("straight", "stopped")]
    assert losses[0][:2] == losses[1][:2] and losses[0] != losses[1]


def test_evaluations_leave_no_trace_in_the_histories(tmp_path):
    for every in (1, 100):
        recipe = small(tmp_path / str(every), *DELAYED, f"metrics.valid_every={every}")
        train(recipe, stop_after=2)
    often, never = (remembered(tmp_path / name, 2) for name in ("1", "100"))
    assert all(often[key].equal(never[key]) for key in often)
    assert [row["loss"] for row in rows(tmp_path / "1")] == [
        row["loss"] for row in rows(tmp_path / "100")
    ]


def test_another_policy_may_take_over_if_that_is_allowed(tmp_path):
    allowed = "checkpoint.allow_changes=true"
    train(small(tmp_path, *DELAYED, "precision.default=bf16"), stop_after=1)
    train(small(tmp_path, *DELAYED, allowed), stop_after=2)
    train(small(tmp_path, *DELAYED, "precision.default=fp8_delayed", allowed), stop_after=3)
    history = remembered(tmp_path, 3)["decoder.layers.1.mlp.linear_fc1.input"]
    assert history.shape == (1025,)
    assert (history[1:] > 0).sum() == 1  # of another length: it begins again
    assert len(rows(tmp_path)) == 3


# --- not finite -------------------------------------------------------------------------------


@pytest.fixture
def fc1(monkeypatch):
    """Let a test hook linear_fc1 of block 1 of the next run."""
    build = step_module.build_model

    def hooked(hook):
        def build_and_hook(recipe, world):
            model, linears = build(recipe, world)
            inner: Any = model.module.module
            hook(inner.decoder.layers[1].mlp.linear_fc1)
            return model, linears

        monkeypatch.setattr(step_module, "build_model", build_and_hook)

    return hooked


def spoil(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """One element replaced."""
    spoilt = tensor.clone()
    spoilt.view(-1)[7] = value
    return spoilt


def spoil_input(module, value, when=lambda module: True):
    module.register_forward_pre_hook(
        lambda module, args: (spoil(args[0], value), *args[1:]) if when(module) else None
    )


def spoil_gradient(module, value):
    def watch(module, args, output):
        output[0].register_hook(lambda gradient: spoil(gradient, value))

    module.register_forward_hook(watch)


@pytest.mark.parametrize(
    ("policy", "hook", "line"),
    [
        ("nvfp4", lambda m: spoil_input(m, math.nan), "fprop input: 2 NaN"),
        ("fp8_delayed", lambda m: spoil_input(m, -math.inf), "fprop input: 2 Inf"),
        ("nvfp4", lambda m: spoil_gradient(m, math.inf), "dgrad grad_output: 2 Inf"),
    ],
    ids=["nan", "inf", "gradient"],
)
def test_an_operand_that_is_not_finite_ends_the_run(tmp_path, fc1, policy, hook, line):
    """Once in each of the two micro-batches. FP4 would turn it into an ordinary number."""
    fc1(hook)
    with pytest.raises(UserError) as caught:
        train(small(tmp_path, f"precision.default={policy}", *TINY))
    message = str(caught.value)
    assert message.startswith(f"step 1: decoder.layers.1.mlp.linear_fc1 {line}"), message
    assert message.endswith("stopped, the last checkpoint is untouched") and "\n" not in message
    assert caught.value.exit_code == 1
    (row,) = rows(tmp_path)
    assert row["step"] == 1 and row["tokens"] == 128 and "loss" in row and "grad_norm" not in row
    assert not (tmp_path / "latest").exists()


def test_an_evaluation_that_is_not_finite_ends_the_run(tmp_path, fc1):
    fc1(lambda module: spoil_input(module, math.inf, when=lambda one: not one.training))
    with pytest.raises(
        UserError, match=r"step 4: decoder.layers.1.mlp.linear_fc1 fprop input: 2 I"
    ):
        train(small(tmp_path, "precision.default=nvfp4", *TINY))
    log = rows(tmp_path)
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    assert all(math.isfinite(row["loss"]) for row in log)
    assert json.loads((tmp_path / "audit.json").read_text())["differences"] == []
