"""Runs of the small model in this process: what they leave, when they stop, how they resume."""

import json
import math

import pytest
import torch
from engine_runs import rows, small, started

from nvfp4 import backends
from nvfp4.config import load_recipe
from nvfp4.engine import step as step_module
from nvfp4.engine.train import train
from nvfp4.errors import UserError
from nvfp4.numerics.philox import RandomBits
from nvfp4.precision import call as call_module
from nvfp4.precision.presets import PRESETS

BF16, FP8, NVFP4 = (f"precision.default={name}" for name in ("bf16", "fp8_block", "nvfp4"))


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 12 steps with TensorBoard, checkpoints every 5 steps, two of them kept."""
    changes = [
        "train.steps=12",
        "checkpoint.every=5",
        "checkpoint.keep=2",
        "metrics.tensorboard=true",
    ]
    recipe = small(tmp_path_factory.mktemp("train") / "run", BF16, "optim.lr=0.01", *changes)
    assert train(recipe) == 0
    return recipe, tmp_path_factory.getbasetemp() / recipe.run.dir


def test_loss_falls_and_is_logged_every_step(finished):
    recipe, folder = finished
    log = rows(folder)
    assert [row["step"] for row in log] == list(range(1, 13))
    assert [row["tokens"] for row in log] == [step * 4 * 64 for step in range(1, 13)]
    assert [row["step"] for row in log if "valid_loss" in row] == [4, 8, 12]  # the last one always
    assert abs(log[0]["loss"] - math.log(320)) < 0.3  # untrained: uniform over the vocabulary
    assert log[-1]["valid_loss"] < log[0]["loss"] - 0.3
    assert log[-1]["lr"] == recipe.schedule.min_lr and log[1]["lr"] == 0.01
    assert all(row["grad_norm"] > 0 for row in log)


def test_run_folder_is_complete(finished):
    recipe, folder = finished
    assert load_recipe(folder / "recipe.yaml") == recipe
    env = json.loads((folder / "env.json").read_text())
    assert {"versions", "git", "device", "backend", "data_hash", "unigram_entropy", "recipe_hash",
            "parameters"} <= set(env)  # fmt: skip
    assert env["versions"]["torch"] == torch.__version__
    assert env["backend"]["name"] == backends.choose().name and env["backend"]["reasons"]
    assert len((folder / "plan.csv").read_text().splitlines()) == 1 + len(recipe.plan.rows)
    assert json.loads((folder / "audit.json").read_text())["differences"] == []
    assert list((folder / "tensorboard").glob("events*"))
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step_000010",
        "step_000012",
    ]
    assert (folder / "latest").read_text() == "checkpoints/step_000012\n"
    assert len((folder / "perf.jsonl").read_text().splitlines()) == 12


def test_a_finished_run_is_not_touched(finished, capsys):
    recipe, folder = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert train(recipe) == 0
    assert "all 12 steps are trained" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_resume_never_refuses_a_used_folder(finished):
    recipe, folder = finished
    never = small(folder, "checkpoint.resume=never", "train.steps=20")
    with pytest.raises(UserError, match="holds a run already and checkpoint.resume is never"):
        train(never)


@pytest.mark.parametrize("change, shown", [
    (NVFP4, "precision of decoder.layers.0.mixer.in_proj and 7 other linears: bf16 -> nvfp4"),
    ("model.ffn_hidden_size=192", "model.ffn_hidden_size: 128 -> 192"),
    ("data.valid_fraction=0.3", "data: "),
    ("run.seed=2", "run.seed: 1234 -> 2"),
])  # fmt: skip
def test_resume_as_another_run_is_refused(finished, change, shown):
    recipe, folder = finished
    with pytest.raises(UserError, match="was trained under another recipe") as caught:
        train(small(folder, "train.steps=20", change))
    assert shown in str(caught.value) and "\n" not in str(caught.value)
    assert load_recipe(folder / "recipe.yaml") == recipe  # nothing was written


@pytest.mark.parametrize("policy", [BF16, FP8, NVFP4, "fp32"])
def test_resume_is_bit_equal(tmp_path, policy):
    changes = [policy] if policy != "fp32" else ["precision.default=fp32", "train.dtype=fp32"]
    straight, stopped = (small(tmp_path / name, *changes) for name in ("straight", "stopped"))
    train(straight)
    train(stopped, stop_after=3)
    assert [row["step"] for row in rows(tmp_path / "stopped")] == [1, 2, 3]
    train(stopped)
    same = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("straight", "stopped")]
    assert same[0] == same[1]
    assert weights(tmp_path / "straight") == weights(tmp_path / "stopped")


def weights(folder) -> dict[str, bytes]:
    """Every tensor of the last checkpoint: parameters, masters, moments."""
    from megatron.core import dist_checkpointing

    with started(small(folder)):
        loaded = dist_checkpointing.load_plain_tensors(str(folder / "checkpoints" / "step_000006"))
    tensors = {name: value for name, value in loaded.items() if torch.is_tensor(value)}
    assert len(tensors) > 50
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


def test_changes_that_are_allowed_are_said(tmp_path, capsys):
    train(small(tmp_path, BF16), stop_after=1)
    assert "changed" not in capsys.readouterr().out
    train(small(tmp_path, BF16, "optim.lr=0.001"), stop_after=2)
    assert "the recipe has changed since: optim.lr: 0.003 -> 0.001\n" in capsys.readouterr().out
    assert rows(tmp_path)[-1]["lr"] == 0.001
    train(small(tmp_path, FP8, "checkpoint.allow_changes=true"), stop_after=3)
    assert "under another recipe, as allowed: precision of decoder" in capsys.readouterr().out


def test_an_incomplete_checkpoint_is_passed_over(tmp_path, capsys):
    recipe = small(tmp_path, "checkpoint.every=2")
    train(recipe, stop_after=4)
    straight = (tmp_path / "metrics.jsonl").read_bytes()
    shard = max((tmp_path / "checkpoints" / "step_000004").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:1000])
    (tmp_path / "checkpoints" / ".writing_step_000006").mkdir()
    capsys.readouterr()
    train(recipe, stop_after=4)
    out = capsys.readouterr().out
    assert f"step_000004 is incomplete ({shard.name} has 1000 bytes)" in out
    assert "step_000002, after step 2 of 6" in out
    assert (tmp_path / "metrics.jsonl").read_bytes() == straight
    assert not (tmp_path / "checkpoints" / ".writing_step_000006").exists()


def test_loss_does_not_depend_on_the_micro_batch(tmp_path):
    logs = []
    for size in (4, 2, 1):
        recipe = small(
            tmp_path / str(size), "train.dtype=fp32", "precision.default=fp32", "train.steps=3",
            f"train.micro_batch_size={size}", "optim.lr=1e-4", "schedule.warmup_steps=0",
        )  # fmt: skip
        train(recipe)
        logs.append(rows(tmp_path / str(size)))
    for row, *others in zip(*logs, strict=True):
        for other in others:
            for key in row:
                assert other[key] == pytest.approx(row[key], rel=1e-5), key


def test_loss_and_gradients_count_tokens_not_batches(tmp_path):
    """Unequal masks, one sample without any: four micro-batches of 1 equal one of 4."""
    recipe = small(tmp_path, "train.dtype=fp32", "precision.default=fp32")
    with started(recipe) as world:
        model, _ = step_module.build_model(recipe, world)
        tokens = torch.randint(320, (4, 65), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(64) < torch.tensor([64, 3, 0, 17])[:, None]).float()
        batch = {
            "tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(),
            "loss_mask": mask, "position_ids": torch.arange(64).expand(4, -1).contiguous(),
        }  # fmt: skip
        results = []
        for size in (4, 1):
            parts = [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, 4, size)]
            pieces = iter([(i * size, part) for i, part in enumerate(parts)])
            loss = step_module.forward_backward(recipe, model, pieces, len(parts), 1, world)
            results.append((loss, model.buffers[0].grad_data.clone()))
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        by_hand = (losses.detach().double() * mask).sum() / mask.sum()
        (loss4, gradient4), (loss1, gradient1) = results
        assert loss4 == pytest.approx(by_hand.item(), rel=1e-6)
        assert loss1 == pytest.approx(loss4, rel=1e-6)
        assert (gradient1 - gradient4).norm() < 1e-5 * gradient4.norm()
        with pytest.raises(UserError, match="no token of the batch counts"):
            empty = iter([(0, {**batch, "loss_mask": torch.zeros(4, 64)})])
            step_module.forward_backward(recipe, model, empty, 1, 1, world)


@pytest.fixture
def spoiled(monkeypatch):
    """Let a test change the model right after it is built."""
    build = step_module.build_model

    def arrange(spoil):
        def build_and_spoil(recipe, world):
            model, linears = build(recipe, world)
            spoil(model)
            return model, linears

        monkeypatch.setattr(step_module, "build_model", build_and_spoil)

    return arrange


def test_audit_stops_a_silently_bf16_linear(tmp_path, spoiled):
    def forget_precision(model):
        module = model.module.module.decoder.layers[2].mlp.linear_fc1
        assert module.policy.name == "nvfp4"
        module.policy = PRESETS["bf16"]

    spoiled(forget_precision)
    with pytest.raises(UserError, match=r"linear_fc1 fprop: input was bf16, the plan says e2m1"):
        train(small(tmp_path, NVFP4))
    assert json.loads((tmp_path / "audit.json").read_text())["differences"]
    assert rows(tmp_path) == [] and not (tmp_path / "latest").exists()


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, spoiled):
    recipe = small(tmp_path, "checkpoint.every=2")
    train(recipe, stop_after=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    spoiled(lambda model: poison_when_loaded(model))
    with pytest.raises(UserError, match="step 3: the loss is nan; stopped") as caught:
        train(recipe)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert (tmp_path / "latest").read_text() == "checkpoints/step_000002\n"
    # The failed step stays visible, so that parity fails a run that broke; a resume drops it.
    assert (tmp_path / "metrics.jsonl").read_bytes().removeprefix(before) == (
        b'{"step": 3, "tokens": 768, "loss": NaN, "error": "step 3: the loss is nan; stopped, '
        b'the last checkpoint is untouched"}\n'
    )
    spoiled(lambda model: None)
    train(recipe, stop_after=3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path))


def poison_when_loaded(model):
    """A norm that gives NaN, whatever the checkpoint says."""
    model.module.module.decoder.final_norm.register_forward_hook(lambda *args: args[-1] * math.nan)


def test_a_batch_that_does_not_divide_is_one_line(tmp_path, monkeypatch):
    recipe = small(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr("nvfp4.engine.parallel._SECONDS_FOR_RANK_0", 0.1)
    with pytest.raises(SystemExit) as caught:
        train(recipe)
    assert caught.value.code == 2


def test_no_two_elements_share_random_bits_whatever_the_micro_batch(tmp_path, monkeypatch):
    drawn: dict[tuple, bytes] = {}

    def noted(**fields):
        bits = RandomBits(**fields)
        rows = bits.tensor().t() if bits.turned else bits.tensor()
        where = (bits.seed, bits.step, bits.layer, bits.call, bits.gemm)
        tokens = zip(bits.sample.tolist(), bits.position.tolist(), strict=True)
        for token, row in zip(tokens, rows.numpy(), strict=True):
            assert (*where, *token) not in drawn  # one address, one use
            drawn[(*where, *token)] = row.tobytes()
        return bits

    monkeypatch.setattr(call_module, "RandomBits", noted)
    seen = []
    for size in (4, 2):
        drawn.clear()
        changes = [NVFP4, f"train.micro_batch_size={size}", "train.steps=3"]
        train(small(tmp_path / str(size), *changes), stop_after=2)
        seen.append(dict(drawn))
    assert seen[0] == seen[1]
    steps, layers, samples, positions = ({key[i] for key in seen[0]} for i in (1, 2, 5, 6))
    assert (steps, samples, positions) == ({1, 2}, set(range(4)), set(range(64)))
    assert len(layers) == 8  # M * - M: in_proj, out_proj; qkv, proj; fc1, fc2; in_proj, out_proj


def test_gradients_are_summed_in_fp32(tmp_path):
    recipe = small(tmp_path, BF16)
    with started(recipe) as world:
        from nvfp4.engine.step import build_model

        model, linears = build_model(recipe, world)
        assert {p.main_grad.dtype for p in model.parameters()} == {torch.float32}
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert linears == {row.name for row in recipe.plan.rows}
