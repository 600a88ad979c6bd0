"""`nvfp4 ablate`: what it trains and in which order, resuming, failures, statistics, the report."""

import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine_runs import overrides, small
from PIL import Image
from scipy import stats
from test_parity import write_run

from nvfp4.config import load_recipe
from nvfp4.engine.train import train
from nvfp4.errors import UserError
from nvfp4.lab import ablate_runs
from nvfp4.lab.ablate import ablate
from nvfp4.lab.ablate_plot import ablate_figure
from nvfp4.lab.ablate_progress import Progress
from nvfp4.lab.ablate_report import cells
from nvfp4.lab.ablate_runs import Outcome, Task, last_row, run_all, settled, start_training
from nvfp4.lab.ablate_table import Row, Table, one_seed_gap, paired_gap
from nvfp4.lab.compare import Settings
from nvfp4.lab.parity import parity_of
from nvfp4.lab.runs import load_run

SHORT = ["train.steps=20", "schedule.warmup_steps=2"]


# --- a trainer that invents runs -------------------------------------------------------------


class Fake:
    """Stands for training processes: writes run folders with invented losses.

    gaps: relative gap by variant; ends: how a variant ends, "finished" by default, "nan",
    "crash", or "cut" (stops half way, as after SIGTERM).
    """

    def __init__(self, gaps=None, ends=None):
        self.gaps, self.ends = gaps or {}, ends or {}
        self.started, self.running, self.most = [], 0, 0
        self.terminated = []

    def __call__(self, task):
        self.started.append(task.name)
        self.running += 1
        self.most = max(self.most, self.running)
        return FakeChild(self, task)


class FakeChild:
    def __init__(self, fake, task):
        self.fake, self.task, self.polls, self.code = fake, task, 0, None

    def poll(self):
        self.polls += 1
        if self.code is None and self.polls > 1:
            self.fake.running -= 1
            self.code = self.end()
        return self.code

    def terminate(self):
        self.fake.terminated.append(self.task.name)
        self.code = 0

    def kill(self):
        self.code = -9

    def end(self):
        variant, seed = self.task.name.rsplit("_s", 1)
        end = self.fake.ends.get(variant, "finished")
        recipe, folder = self.task.recipe, self.task.folder
        if end == "crash":
            self.task.log.parent.mkdir(parents=True, exist_ok=True)
            self.task.log.write_text(f"something\nnvfp4 train: no room for {seed}\n")
            return 1
        steps = recipe.steps // 2 if end in ("cut", "nan") else recipe.steps
        gap = self.fake.gaps.get(variant, 0.0) + 0.001 * int(seed) * (variant != "bf16")
        data = [
            {"step": step, "tokens": step * recipe.tokens_per_step, "loss": 3 * (1 + gap),
             "lr": 1e-3}
            for step in range(1, steps + 1)
        ]  # fmt: skip
        data[-1]["valid_loss"] = 2.0 * (1 + gap)
        if end == "nan":
            data[-1] = {**data[-1], "loss": math.nan}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        (folder / "recipe.yaml").write_text(recipe.to_yaml())
        (folder / "env.json").write_text(json.dumps({"data_hash": "abc"}))
        mean = {gemm: {"quantised": 0.1, "all": 0.05} for gemm in ("fprop", "dgrad", "wgrad")}
        (folder / "gemm_error.json").write_text(json.dumps({"mean": mean}))
        if end == "finished":
            (folder / "end").mkdir(exist_ok=True)
            (folder / "end" / "checkpoint.json").write_text(json.dumps({"step": steps}))
            (folder / "latest").write_text("end\n")
        return 1 if end == "nan" else 0


def run(tmp_path, fake, *, policies="nvfp4,fp8_block", seeds=2, changes=(), **given):
    lines = []
    try:
        code = ablate(
            "base", [*SHORT, "run.seed=1", *changes], policies=policies, seeds=seeds,
            out=tmp_path / "out", start=fake, echo=lines.append, **given,
        )  # fmt: skip
    finally:
        run.lines = lines
    return code, lines


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    """No waiting, and no drawing where the picture is not looked at."""
    if "report" not in request.node.name and "figure" not in request.node.name:
        monkeypatch.setattr("nvfp4.lab.plots.save_png", lambda figure, path: None)
        monkeypatch.setattr("nvfp4.lab.ablate_plot.ablate_figure", lambda table: None)
    monkeypatch.setattr(run_all, "__kwdefaults__", {**run_all.__kwdefaults__, "poll_seconds": 0.0})


# --- orchestration ---------------------------------------------------------------------------


def test_one_seed_of_all_variants_before_the_next_and_two_at_a_time(tmp_path):
    fake = Fake(gaps={"nvfp4": 0.02})
    code, lines = run(tmp_path, fake)
    assert code == 0
    assert fake.started == [
        "bf16_s1", "nvfp4_s1", "fp8_block_s1", "bf16_s2", "nvfp4_s2", "fp8_block_s2",
    ]  # fmt: skip
    assert (
        fake.most == 2
        and run(tmp_path / "one", single := Fake(), jobs=1, policies="nvfp4", seeds=1)
        and single.most == 1
    )
    assert lines[0] == "6 runs, 120 steps"
    text = "\n".join(lines)
    assert "final validation loss against bf16, paired by seed; 95% Student t over 2 seeds" in text
    row = next(line for line in lines if line.startswith("nvfp4 "))
    assert row.split()[:3] == ["nvfp4", "2.0430", "+2.15%"] and row.endswith("10%")


def test_the_report_is_written_and_agrees_with_the_table(tmp_path):
    run(tmp_path, Fake(gaps={"nvfp4": 0.02}), seeds=3)
    out = tmp_path / "out"
    data = json.loads((out / "ablate.json").read_text())
    assert (data["reference"], data["seeds"], data["steps"]) == ("bf16", [1, 2, 3], 20)
    bf16, nvfp4, _ = data["variants"]
    assert bf16["gap"] is None and nvfp4["gemm_error"]["wgrad"] == pytest.approx(0.1)
    assert nvfp4["gap"]["by_seed"] == pytest.approx([0.021, 0.022, 0.023])
    assert nvfp4["gap"]["low"] < nvfp4["gap"]["relative"] == pytest.approx(0.022)
    pair = next(
        p for p in data["pairs"] if (p["variant"], p["against"]) == ("nvfp4", "fp8_block")
    )  # fmt: skip
    assert pair["relative"] == pytest.approx(0.02, rel=0.01)
    page = (out / "ablate.md").read_text()
    assert page.startswith("`nvfp4 ablate base --seeds 3 --policies nvfp4,fp8_block train.steps")
    assert "| nvfp4 | 2.0440 | +2.20% |" in page
    with Image.open(out / "ablate.png") as image:
        assert image.width == 1800


def test_what_is_finished_is_not_trained_again_and_the_rest_goes_on(tmp_path):
    with pytest.raises(UserError, match="2 of 4 runs did not finish: nvfp4 seed 1: stopped after"):
        run(tmp_path, Fake(ends={"nvfp4": "cut"}), policies="nvfp4")
    again = Fake()
    code, lines = run(tmp_path, again)
    assert code == 0
    assert again.started == ["nvfp4_s1", "fp8_block_s1", "nvfp4_s2", "fp8_block_s2"]
    assert lines[0] == "6 runs, 120 steps; there already: 2 ended runs, 60 steps"
    run(tmp_path, third := Fake(), seeds=1, reference="nvfp4", policies="fp8_block")
    assert third.started == []


def test_a_diverged_run_is_a_row_and_is_not_repeated(tmp_path):
    code, lines = run(tmp_path, Fake(ends={"nvfp4": "nan"}), policies="nvfp4")
    assert code == 0 and "nvfp4_s1 diverged at step 10" in lines
    row = next(line for line in lines if line.startswith("nvfp4 "))
    assert "diverged at step 10 (2 of 2 seeds)" in row
    run(tmp_path, again := Fake(), policies="nvfp4")
    assert again.started == []
    data = json.loads((tmp_path / "out" / "ablate.json").read_text())
    assert [one["outcome"] for one in data["variants"][1]["runs"]] == ["diverged"] * 2


def test_a_reference_that_diverged_leaves_no_gaps(tmp_path):
    code, lines = run(tmp_path, Fake(ends={"bf16": "nan"}), seeds=1, policies="nvfp4")
    assert code == 0
    assert next(line for line in lines if line.startswith("nvfp4 ")).split()[2] == "-"


def test_training_errors_that_leave_no_row_are_read_from_the_log(tmp_path):
    task = Task("a_s1", small(tmp_path / "a"), tmp_path)
    task.log.parent.mkdir()
    task.log.write_text("nvfp4 train: step 7: 3 NaN in decoder.layers.0; stopped, the last ...\n")
    reason = "step 7: 3 NaN in decoder.layers.0; stopped, the last ..."
    assert ablate_runs._failure(task, 1) == Outcome("diverged", 7, reason)
    assert ablate_runs._failure(task, -9).words == "failed: killed by SIGKILL"


def test_a_failed_run_is_reported_after_the_table(tmp_path):
    with pytest.raises(UserError) as caught:
        run(tmp_path, Fake(ends={"nvfp4": "crash"}))
    message = str(caught.value)
    assert message.startswith("2 of 6 runs did not finish: nvfp4 seed 1: no room for 1; nvfp4 seed")
    assert "\n" not in message and "the same command tries them again" in message
    assert any(line.startswith("fp8_block ") and "%" in line for line in run.lines)


def test_the_same_failure_at_the_start_stops_everything(tmp_path):
    fake = Fake(ends={"bf16": "crash", "nvfp4": "crash"})
    with pytest.raises(UserError, match="the first 2 runs failed alike: no room for 1"):
        run(tmp_path, fake)
    assert set(fake.terminated) <= {"fp8_block_s1"} and len(fake.started) <= 3


def test_another_recipe_in_the_same_folder_is_refused(tmp_path):
    run(tmp_path, Fake(), policies="nvfp4", seeds=1)
    fake = Fake()
    with pytest.raises(UserError, match=r"another recipe \(optim.lr: 0.003 -> 0.001\); choose ano"):
        run(tmp_path, fake, policies="nvfp4", seeds=1, changes=["optim.lr=1e-3"])
    assert fake.started == []
    run(tmp_path, fake, policies="nvfp4", seeds=1, changes=["checkpoint.every=7"])
    assert fake.started == []


def test_an_interrupt_stops_the_children_and_says_how_to_go_on(tmp_path):
    fake = Fake()

    class Interrupting(FakeChild):
        def poll(self):
            if self.code is None:
                raise KeyboardInterrupt
            return self.code

    def start(task):
        fake(task)
        return (Interrupting if task.name == "nvfp4_s1" else FakeChild)(fake, task)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, start)
    assert fake.terminated == ["bf16_s1", "nvfp4_s1"]
    assert run.lines[-1] == "stopped; the same command goes on from here"
    assert "stopping: 2 runs are saving" in run.lines[-2]


STUB = """#!/bin/bash
trap 'echo saved; kill $!; exit 0' TERM
echo "$@" threads $OMP_NUM_THREADS
sleep 20 &
wait
"""


def test_processes_get_one_thread_a_log_and_sigterm(tmp_path, monkeypatch):
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setattr(ablate_runs.sys, "executable", str(stub))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    task = Task("a_s1", small(tmp_path / "a_s1"), tmp_path)

    def interrupt():
        deadline = time.monotonic() + 10
        while not (task.log.exists() and task.log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        run_all([task], jobs=1, progress=Progress(lambda line: None), start=start_training,
                poll_seconds=0.01)  # fmt: skip
    sender.join()
    first, *_, last = task.log.read_text().splitlines()
    file = tmp_path / "recipes" / "a_s1.yaml"
    assert first == f"-m nvfp4 train {file} threads 1" and last == "saved"
    assert load_recipe(file) == task.recipe


def test_runs_stand_where_their_files_say(tmp_path):
    assert last_row(tmp_path) == {"step": 0}
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    assert last_row(tmp_path)["step"] == 3
    assert settled(Task("x", small(tmp_path), tmp_path)) is None


def test_progress_in_a_log(capsys):
    now = [0.0]
    lines = []
    progress = Progress(lines.append, clock=lambda: now[0])
    progress.begin({"a": 100, "b": 100, "c": 100}, {"a": 40, "b": 0, "c": 50}, {"a"})
    assert lines == ["3 runs, 300 steps; there already: 1 ended runs, 150 steps"]
    now[0] = 31.0
    progress.show({"b": 62})
    assert lines[-1] == "1 of 3 runs  212 of 300 steps  ETA 0:00:44"
    progress.show({"b": 70})
    assert len(lines) == 2
    progress.ended("b", "diverged at step 71")
    progress.show({})
    assert lines[-2:] == ["b diverged at step 71", "2 of 3 runs  250 of 300 steps  ETA 0:00:16"]


# --- statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_interval_over_seeds_is_students(n, confidence):
    random = np.random.default_rng(n)
    ref = 3 + 0.1 * random.standard_normal(n)
    x = ref * (1 + 0.01 * random.standard_normal(n))
    found = paired_gap(x, ref, confidence)
    expected = stats.ttest_1samp(x / ref - 1, 0.0).confidence_interval(confidence)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.gap == pytest.approx(np.mean(x / ref - 1))


def test_one_seed_is_judged_as_parity_judges_it(tmp_path):
    paths = write_run(tmp_path / "a"), write_run(tmp_path / "b", gap=0.01, salt=1)
    found = one_seed_gap(*map(load_run, paths), Settings(0.015))
    (comparison,) = parity_of(paths).comparisons
    interval = comparison.interval
    assert interval and (found.gap, found.low, found.high) == (
        interval.gap, interval.low, interval.high,
    )  # fmt: skip


def test_a_single_seed_without_interval_says_why(tmp_path):
    code, lines = run(tmp_path, Fake(gaps={"nvfp4": 0.02}), seeds=1, policies="nvfp4")
    assert code == 0
    assert any("block bootstrap of one seed, another seed may move it further" in x for x in lines)
    assert any(x.startswith("note: nvfp4 has no interval: only 2 common steps") for x in lines)


def test_a_missing_error_file_is_named(tmp_path):
    run(tmp_path, Fake(), policies="nvfp4", seeds=1)
    (tmp_path / "out" / "nvfp4_s1" / "gemm_error.json").write_text("{}")
    with pytest.raises(UserError, match="nvfp4_s1/gemm_error.json: missing or damaged; delete"):
        run(tmp_path, Fake(), policies="nvfp4", seeds=1)


def test_runs_on_other_data_are_not_compared(tmp_path):
    run(tmp_path, Fake(), policies="nvfp4")
    (tmp_path / "out" / "nvfp4_s2" / "env.json").write_text('{"data_hash": "other"}')
    with pytest.raises(UserError, match="trained on different data"):
        run(tmp_path, Fake(), policies="nvfp4")


def test_the_figure_takes_rows_of_every_sort():
    good, bad = Outcome("finished", 9), Outcome("diverged", 4)
    gap = paired_gap(np.array([2.1, 2.0]), np.array([2.0, 2.0]), 0.95)
    rows = (
        Row("bf16", (good, good), (2.0, 2.0), None, {}),
        Row("x", (good, good), (2.1, 2.0), gap, {"fprop": 0.1, "dgrad": 0.0}),
        Row("y", (bad, good), (None, 2.0), None, {"fprop": 0.2}),
    )
    table = Table("r", (1, 2), 9, 900, 0.95, 0, rows, {})
    left, right = ablate_figure(table).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["bf16", "x", "y"]
    assert "diverged at step 4 (1 of 2 seeds)" in [text.get_text() for text in left.texts]
    assert right.get_xscale() == "log"
    assert cells(table)[3][1:4] == ["-", "diverged at step 4 (1 of 2 seeds)", "-"]


# --- the real thing --------------------------------------------------------------------------


class InProcess:
    """A training process that has trained already when it is asked."""

    def __init__(self, task):
        self.code = train(task.recipe)

    def poll(self):
        return self.code

    terminate = kill = lambda self: None


def test_end_to_end(tmp_path):
    words = overrides(tmp_path / "unused", "train.steps=2", "schedule.warmup_steps=1")
    lines = []
    code = ablate("base", words, policies="nvfp4", out=tmp_path / "out", start=InProcess,
                  echo=lines.append)  # fmt: skip
    assert code == 0
    data = json.loads((tmp_path / "out" / "ablate.json").read_text())
    bf16, nvfp4 = data["variants"]
    assert 4 < bf16["valid_loss"] < 6 and bf16["valid_loss"] != nvfp4["valid_loss"]
    assert bf16["gemm_error"]["fprop"] < 0.01 < nvfp4["gemm_error"]["fprop"] < 0.3
    first = [json.loads(path.read_text().splitlines()[0]) for path in
             sorted((tmp_path / "out").glob("*/metrics.jsonl"))]  # fmt: skip
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=2e-3)  # the same start
    assert Path(tmp_path / "out" / "nvfp4_s1234" / "gemm_error.json").exists()
