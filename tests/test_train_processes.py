"""Training in processes of its own: killed, asked to stop, and data parallel under torchrun."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import overrides, rows, small
from megatron.core.dist_checkpointing import load_common_state_dict

from nvfp4.cli import main
from nvfp4.engine.train import train

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
}  # fmt: skip


def steps_logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


@contextlib.contextmanager
def sigterm_at(folder: Path, step: int) -> Iterator[None]:
    """Send this process a SIGTERM once the run in `folder` has logged `step` steps."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.01):
            if steps_logged(folder) >= step:
                return os.kill(os.getpid(), signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, lambda *_: None)  # should the run be over already
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, former)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_killed_then_stopped_by_sigterm_then_finished_equals_straight(tmp_path, capsys):
    """test_train_long.py does the same to the full-size model, and to a process at SIGTERM too."""
    changes = (
        "precision.default=nvfp4",
        "train.steps=16",
        "checkpoint.every=4",
        "metrics.valid_every=7",
        "train.micro_batch_size=4",
    )
    train(small(tmp_path / "straight", *changes))
    folder = tmp_path / "broken"
    command = ["train", "base", *overrides(folder, *changes)]

    with subprocess.Popen(
        [sys.executable, "-m", "nvfp4", *command],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while steps_logged(folder) < 5:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    killed = steps_logged(folder)
    assert killed < 14
    capsys.readouterr()

    with sigterm_at(folder, killed + 1):
        assert main(command) == 0
    done, out = steps_logged(folder), capsys.readouterr().out
    assert killed < done < 16 and f"stopped (SIGTERM) after step {done} of 16" in out
    assert f"resuming from {folder}/checkpoints/step_" in out
    assert (folder / "latest").read_text() == f"checkpoints/step_{done:06d}\n"

    train(small(folder, *changes))
    straight = (tmp_path / "straight" / "metrics.jsonl").read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() == straight
    assert len((folder / "perf.jsonl").read_text().splitlines()) == 16


# The runs of two processes, of four steps each. What rank 0 takes away is as if it was never saved.
PARALLEL = """
import shutil, sys
import torch.distributed as dist
from nvfp4.config import load_recipe
from nvfp4.engine.train import train

folder = sys.argv[1]

def recipe(name, *more):
    return load_recipe("base", [*sys.argv[2:], f"run.dir={folder}/{name}", *more])

dist.init_process_group("gloo")
sharded = "parallel.distributed_optimizer=true"
nvfp4, bf16 = "precision.default=nvfp4", "precision.default=bf16"
train(recipe("nvfp4", nvfp4, sharded, "checkpoint.every=2"))
if dist.get_rank() == 0:
    shutil.copytree(f"{folder}/nvfp4", f"{folder}/nvfp4_resumed")
    shutil.rmtree(f"{folder}/nvfp4_resumed/checkpoints/step_000004")
    shutil.copytree(f"{folder}/nvfp4_resumed", f"{folder}/nvfp4_alone")
dist.barrier()
train(recipe("nvfp4_resumed", nvfp4, sharded, "checkpoint.every=2"))
train(recipe("sharded", bf16, sharded))
train(recipe("plain", bf16, "train.micro_batch_size=1"))
train(recipe("delayed", "precision.default=fp8_delayed"), stop_after=1)
print("all trained", flush=True)
train(recipe("nvfp4", bf16, sharded))
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Runs of two data-parallel processes, and what torchrun said."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "job.py").write_text(PARALLEL)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(folder / "job.py"), str(folder),
         *overrides(folder, "train.steps=4")],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "all trained" in done.stdout, done.stderr
    return folder, done


def test_two_processes_resume_bit_equal(two_processes):
    folder, done = two_processes
    straight = (folder / "nvfp4" / "metrics.jsonl").read_bytes()
    assert (folder / "nvfp4_resumed" / "metrics.jsonl").read_bytes() == straight
    assert "nvfp4_resumed/checkpoints/step_000002, after step 2 of 4" in done.stdout


def test_two_processes_equal_one(two_processes, tmp_path):
    """BF16 runs part slowly: partial sums over ranks are added in another order."""
    folder, _ = two_processes
    train(small(tmp_path, "precision.default=bf16", "train.steps=4"))
    for name in ("sharded", "plain"):
        for row, other in zip(rows(tmp_path), rows(folder / name), strict=True):
            assert row.keys() == other.keys() and row["lr"] == other["lr"]
            assert other["loss"] == pytest.approx(row["loss"], rel=2e-4)
            assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-2)


def test_one_process_continues_what_two_began(two_processes, capsys):
    """The first step it trains is that of the two: no random bit depends on who rounds."""
    folder, _ = two_processes
    whole, run = rows(folder / "nvfp4"), folder / "nvfp4_alone"
    sharded = "parallel.distributed_optimizer=true"
    train(small(run, "precision.default=nvfp4", "train.steps=4", sharded))
    assert f"resuming from {run}/checkpoints/step_000002" in capsys.readouterr().out
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert rows(run)[:2] == whole[:2]
    for key in ("loss", "grad_norm"):
        assert rows(run)[2][key] == pytest.approx(whole[2][key], rel=1e-5)


def test_histories_of_two_processes_are_those_of_one(two_processes, tmp_path):
    """The first step's, to the bit: every rank has the largest amax of all ranks."""
    folder, _ = two_processes
    train(small(tmp_path, "precision.default=fp8_delayed", "train.steps=4"), stop_after=1)
    one, two = (
        load_common_state_dict(str(run / "checkpoints" / "step_000001"))["method"]
        for run in (tmp_path, folder / "delayed")
    )
    assert len(one) == 8 * 3 and all(one[key].equal(two[key]) for key in one | two)
    assert all(values[0] == values[1] > 0 for values in one.values())


def test_errors_are_printed_once_and_end_every_process(two_processes):
    _, done = two_processes
    assert done.returncode != 0
    lines = [
        line for line in done.stderr.splitlines() if "was trained under another recipe" in line
    ]
    assert len(lines) == 1 and lines[0].startswith("nvfp4 train: ")
    assert "exitcode  : 2" in done.stderr
