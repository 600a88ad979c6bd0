"""Exact resume at full size: the shipped recipes, processes of their own, real signals.

Every run is put in one queue at the start and two of them run side by side, one thread each, so
that two cores stay busy from the first to the last.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nvfp4.config import load_recipe

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
# The longest first: what comes last should be short, for one core has nothing to do then.
POLICIES = {
    "nvfp4": ["tiny_nvfp4"],
    "fp8_block": ["tiny_fp8"],
    "bf16": ["tiny_bf16"],
    "fp32": ["tiny_bf16", "precision.default=fp32", "train.dtype=fp32"],
}
STEPS = 40
# The shipped model on half the shipped batch, with short evaluations.
SHORT = [f"train.steps={STEPS}", "train.global_batch_size=4", "train.micro_batch_size=2",
         "checkpoint.every=10", "metrics.valid_every=15", "metrics.valid_batches=1"]  # fmt: skip


class Runs:
    """Starts `nvfp4 train` in folders under `root`; they share one cache of tokens."""

    def __init__(self, root: Path):
        self.root, self.alive = root, set()

    def start(self, name: str, recipe: str, *changes: str) -> subprocess.Popen:
        places = [f"run.dir={self.root / name}", f"data.cache_dir={self.root / 'cache'}"]
        with open(self.root / f"{name}.log", "a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "nvfp4", "train", recipe, *places, *changes],
                cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.alive.add(process)
        return process

    def finish(self, name: str, *recipe: str) -> None:
        process = self.start(name, *recipe)
        assert process.wait(timeout=1200) == 0, self.said(name)
        self.alive.discard(process)

    def stop(self, name: str, step: int, number: signal.Signals, *recipe: str) -> int:
        """Send a signal once `step` steps are logged; returns the exit status."""
        process = self.start(name, *recipe)
        deadline = time.monotonic() + 600
        while len(self.lines(name)) < step:
            assert process.poll() is None and time.monotonic() < deadline, self.said(name)
            time.sleep(0.02)
        process.send_signal(number)
        status = process.wait(timeout=120)
        self.alive.discard(process)
        return status

    def said(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()

    def lines(self, name: str, file: str = "metrics.jsonl") -> list[bytes]:
        path = self.root / name / file
        return path.read_bytes().splitlines() if path.exists() else []


def straight(runs: Runs, name: str, recipe: list[str]) -> None:
    """Without a checkpoint before the end: saving must not change a run either."""
    runs.finish(name, *recipe, f"checkpoint.every={STEPS}")


def terminated(runs: Runs, name: str, recipe: list[str]) -> None:
    """The signal comes at the end of step 19 or in step 20, which is finished."""
    assert runs.stop(name, 19, signal.SIGTERM, *recipe) == 0, runs.said(name)
    done = len(runs.lines(name))
    assert 19 <= done < 30
    assert f"stopped (SIGTERM) after step {done} of {STEPS}" in runs.said(name)
    assert (runs.root / name / "latest").read_text() == f"checkpoints/step_{done:06d}\n"
    runs.finish(name, *recipe)
    assert f"resuming from {runs.root / name}/checkpoints/step_{done:06d}" in runs.said(name)


def killed(runs: Runs, name: str, recipe: list[str]) -> None:
    """The signal comes in step 26; the run goes on from step 20."""
    assert runs.stop(name, 25, signal.SIGKILL, *recipe) == -signal.SIGKILL
    assert 25 <= len(runs.lines(name)) < 30
    assert (runs.root / name / "latest").read_text() == "checkpoints/step_000020\n"
    runs.finish(name, *recipe)
    assert f"resuming from {runs.root / name}/checkpoints/step_000020" in runs.said(name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, in the queue; `queued` holds what to wait for, by policy and name."""
    runs = Runs(tmp_path_factory.mktemp("long"))
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs.queued = {"tiny_bf16": pool.submit(runs.finish, "tiny_bf16", "tiny_bf16")}
        for policy, recipe in POLICIES.items():
            for part in (straight, terminated, killed):
                name = f"{policy}_{part.__name__}"
                runs.queued[name] = pool.submit(part, runs, name, [*recipe, *SHORT])
        yield runs
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(runs.alive):
            process.kill()


@pytest.mark.parametrize("broken", [terminated, killed])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_broken_run_equals_a_straight_one(runs, policy, broken):
    names = [f"{policy}_straight", f"{policy}_{broken.__name__}"]
    for name in names:
        runs.queued[name].result()
    one, other = (runs.root / name / "metrics.jsonl" for name in names)
    assert other.read_bytes() == one.read_bytes()
    rows = [json.loads(line) for line in runs.lines(names[1])]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len(runs.lines(names[1], "perf.jsonl")) == STEPS


def test_policies_are_different_runs(runs):
    """Equal files would mean little if the policy did not reach the GEMMs."""
    for policy in POLICIES:
        runs.queued[f"{policy}_straight"].result()
    assert len({runs.lines(f"{policy}_straight")[0] for policy in POLICIES}) == len(POLICIES)


def test_tiny_bf16_learns_more_than_the_frequency_of_tokens(runs):
    """As shipped: a nat below the entropy of single tokens is only reached by reading context."""
    runs.queued["tiny_bf16"].result()
    entropy = json.loads((runs.root / "tiny_bf16" / "env.json").read_text())["unigram_entropy"]
    assert 5 < entropy < 7.7  # nats; ln 2048 = 7.62
    last = json.loads(runs.lines("tiny_bf16")[-1])
    assert last["step"] == load_recipe("tiny_bf16").steps
    assert last["valid_loss"] < entropy - 1
