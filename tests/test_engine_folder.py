"""What surrounds the steps: log files, progress line, signals, the lock of a run folder."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from nvfp4.engine.metrics import Metrics, ProgressLine, truncate
from nvfp4.engine.runfolder import RunFolder
from nvfp4.engine.signals import StopRequest
from nvfp4.errors import UserError


def row(step: int, **more) -> dict:
    return {"step": step, "tokens": step * 8, "loss": 1 / 3, "grad_norm": 0.5, "lr": 1e-3, **more}


@pytest.mark.parametrize(
    "text, kept",
    [
        (b'{"step": 1}\n{"step": 2}\n{"step": 3}\n', 2),
        (b'{"step": 1}\n{"step": 2', 1),  # killed while writing
        (b'{"step": 1}\n{"step": 2}', 1),  # a whole row, but the next would stick to it
        (b'{"step": 1}\n\x00\x00\x00\x00\n{"step": 2}\n', 1),  # a block that never reached the disk
        (b'{"step": 5}\n', 0),
        (b"", 0),
    ],
)
def test_truncate_keeps_whole_lines_up_to_the_step(tmp_path, text, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text)
    truncate(path, 2)
    assert path.read_bytes() == b"".join(text.splitlines(keepends=True)[:kept])


def test_metrics_are_exact_flushed_and_apart_from_the_clock(tmp_path):
    with Metrics(
        tmp_path, step=0, total=2, every=1, tensorboard=False, stream=io.StringIO()
    ) as log:
        log.write(row(1), 0.25, 8)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close
        assert [json.loads(line) for line in lines] == [row(1)]
        assert json.loads(lines[0])["loss"].hex() == (1 / 3).hex()
        log.write(row(2, valid_loss=0.1), 0.25, 8)
    perf = [json.loads(line) for line in (tmp_path / "perf.jsonl").read_text().splitlines()]
    assert [p["step"] for p in perf] == [1, 2]
    assert perf[0]["step_time_s"] == 0.25 and perf[0]["tokens_per_s"] == 32
    with Metrics(tmp_path, step=1, total=2, every=1, tensorboard=False, stream=io.StringIO()):
        pass
    for name in ("metrics.jsonl", "perf.jsonl"):
        assert len((tmp_path / name).read_text().splitlines()) == 1


def test_tensorboard_hides_what_a_resume_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, steps in ((0, (1, 2, 3)), (1, (2,))):
        stream = io.StringIO()
        with Metrics(
            tmp_path, step=first, total=3, every=1, tensorboard=True, stream=stream
        ) as log:
            for step in steps:
                log.write(row(step, loss=10.0 * first + step, valid_loss=2.0), 1.0, 8)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 12.0)]
    assert {
        "train/grad_norm",
        "train/lr",
        "train/tokens",
        "valid/loss",
        "perf/tokens_per_s",
    } <= set(events.Tags()["scalars"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_is_a_plain_line_every_n_steps():
    stream = io.StringIO()
    line = ProgressLine(total=12, every=5, stream=stream)
    for step in range(1, 13):
        line.show(row(step, **({"valid_loss": 2.5} if step == 7 else {})), 0.5, 100)
    line.end()
    shown = stream.getvalue().splitlines()
    assert [int(text.split()[1].split("/")[0]) for text in shown] == [1, 5, 7, 10, 12]
    assert "\r" not in stream.getvalue()
    for part in (
        "5/12",
        "loss 0.3333",
        "grad norm 0.500",
        "lr 1.00e-03",
        "200 tokens/s",
        "ETA 0:00",
    ):
        assert part in shown[1]
    assert "valid 2.5000" in shown[2]


def test_progress_on_a_terminal_rewrites_one_line():
    stream = Terminal()
    line = ProgressLine(total=3, every=10, stream=stream)
    for step in (1, 2, 3):
        line.show(row(step, **({"valid_loss": 2.5} if step == 2 else {})), 0.5, 100)
    line.end()
    assert stream.getvalue().count("\r") == 3
    assert stream.getvalue().count("\n") == 2  # after the evaluation, which stays, and at the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_and_the_former_handler_comes_back(number):
    former = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # at once: torchrun passing on what the terminal sent
        assert stop.received == number.name
    assert signal.getsignal(number) is former


def test_a_second_interrupt_ends_the_process():
    code = (
        "import os, signal, time\n"
        "from nvfp4.engine.signals import StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(1.1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert "without saving" in done.stderr


def test_one_run_at_a_time_in_a_folder(tmp_path):
    code = (
        "import fcntl, sys, time\n"
        f"file = open({str(tmp_path / '.lock')!r}, 'a+')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "file.write('4711 on elsewhere'); file.flush()\n"
        "print('locked', flush=True); time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match=r"in use by another run \(process 4711 on elsewhere\)"):
            with RunFolder(tmp_path, main=True):
                pass
        with RunFolder(tmp_path, main=False):  # only rank 0 locks
            pass
    finally:
        other.kill()
        other.wait()
    deadline = time.monotonic() + 5
    while True:  # a killed run leaves no lock behind
        try:
            with RunFolder(tmp_path, main=True):
                break
        except UserError:
            assert time.monotonic() < deadline


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.dir .*file/run cannot be written"):
        with RunFolder(tmp_path / "file" / "run", main=True):
            pass
