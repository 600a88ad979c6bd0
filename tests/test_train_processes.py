"""Training in processes of its own: killed, asked to stop, and data parallel under torchrun."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_runs import overrides, rows, small

from nvfp4.engine.train import train

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
}  # fmt: skip


def start(folder: Path, *changes: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "nvfp4", "train", "base", *overrides(folder, *changes)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(rows_so_far(folder)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rows_so_far(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_stopped_by_sigterm_then_killed_then_finished_equals_straight(tmp_path):
    changes = (
        "precision.default=nvfp4",
        "train.steps=24",
        "checkpoint.every=6",
        "metrics.valid_every=7",
        "train.micro_batch_size=4",
    )
    train(small(tmp_path / "straight", *changes))
    folder = tmp_path / "broken"

    process = start(folder, *changes)
    wait_for_step(folder, 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    done = len(rows_so_far(folder))
    assert 3 <= done < 24 and f"stopped (SIGTERM) after step {done} of 24" in out
    assert (folder / "latest").read_text() == f"checkpoints/step_{done:06d}\n"

    process = start(folder, *changes)
    wait_for_step(folder, max(15, done + 1), process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    killed = len(rows_so_far(folder))
    assert killed < 24

    train(small(folder, *changes))
    straight = (tmp_path / "straight" / "metrics.jsonl").read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() == straight
    assert len((folder / "perf.jsonl").read_text().splitlines()) == 24


PARALLEL = """
import sys
import torch.distributed as dist
from pathlib import Path
from nvfp4.config import load_recipe
from nvfp4.engine.train import train

def recipe(name, *more):
    return load_recipe("base", [*sys.argv[2:], f"run.dir={sys.argv[1]}/{name}", *more])

dist.init_process_group("gloo")
sharded = "parallel.distributed_optimizer=true"
nvfp4, bf16 = "precision.default=nvfp4", "precision.default=bf16"
train(recipe("nvfp4", nvfp4, sharded))
train(recipe("nvfp4_stopped", nvfp4, sharded), stop_after=3)
train(recipe("nvfp4_stopped", nvfp4, sharded))
train(recipe("sharded", bf16, sharded))
train(recipe("plain", bf16, "train.micro_batch_size=1"))
print("all trained", flush=True)
train(recipe("nvfp4", bf16, sharded))
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Runs of two data-parallel processes, and what torchrun said."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "job.py").write_text(PARALLEL)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, str(folder / "job.py"), str(folder), *overrides(folder)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "all trained" in done.stdout, done.stderr
    return folder, done


def test_two_processes_resume_bit_equal(two_processes):
    folder, _ = two_processes
    straight = (folder / "nvfp4" / "metrics.jsonl").read_bytes()
    assert (folder / "nvfp4_stopped" / "metrics.jsonl").read_bytes() == straight


def test_two_processes_equal_one(two_processes, tmp_path):
    """BF16 runs part slowly: partial sums over ranks are added in another order."""
    folder, _ = two_processes
    train(small(tmp_path, "precision.default=bf16"))
    for name in ("sharded", "plain"):
        for row, other in zip(rows(tmp_path), rows(folder / name), strict=True):
            assert row.keys() == other.keys() and row["lr"] == other["lr"]
            assert other["loss"] == pytest.approx(row["loss"], rel=2e-4)
            assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-2)


def test_one_process_continues_what_two_began(two_processes):
    folder, _ = two_processes
    whole = rows(folder / "nvfp4")
    run = folder / "nvfp4_stopped"
    shutil.rmtree(run / "checkpoints" / "step_000006")
    train(small(run, "precision.default=nvfp4", "parallel.distributed_optimizer=true"))
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert rows(run)[3]["loss"] == pytest.approx(whole[3]["loss"], rel=2e-3)
    assert rows(run)[:3] == whole[:3]


def test_errors_are_printed_once_and_end_every_process(two_processes):
    _, done = two_processes
    assert done.returncode != 0
    lines = [
        line for line in done.stderr.splitlines() if "was trained under another recipe" in line
    ]
    assert len(lines) == 1 and lines[0].startswith("nvfp4 train: ")
    assert "exitcode  : 2" in done.stderr
