"""Trains the runs of an ablation side by side, each in a process of its own.

What was trained before is not trained again, what was begun goes on: each run is one
`nvfp4 train RECIPE`, whose folder knows where it stands. A run that ended with a loss or a gradient
that is not finite has diverged; it would do so again, so it is not repeated. Any other failure is
reported, and the next call tries again.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from nvfp4.config import Recipe
from nvfp4.errors import UserError
from nvfp4.lab.ablate_progress import Progress

POLL_SECONDS = 0.2
TAIL_BYTES = 1 << 14
TRAINING_ERROR = 1  # exit code of a step that could not be used, and what is said then
_TRAINING_ERROR = re.compile(r"nvfp4 train: step (\d+): ")
ALIKE = 2  # so many first runs that fail with the same words stop the rest


@dataclass(frozen=True, slots=True)
class Task:
    """One run: `name` is its folder inside `out`."""

    name: str
    recipe: Recipe
    out: Path

    @property
    def folder(self) -> Path:
        return Path(self.recipe.run.dir)

    @property
    def log(self) -> Path:
        """What the training process prints."""
        return self.out / "logs" / f"{self.name}.log"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. step: the last one in its metrics; reason: of a failure, in one line."""

    kind: Literal["finished", "diverged", "failed"]
    step: int
    reason: str = ""

    @property
    def words(self) -> str:
        if self.kind == "diverged":
            return f"diverged at step {self.step}"
        return f"failed: {self.reason}" if self.kind == "failed" else "finished"


class Child(Protocol):
    """A training process; subprocess.Popen is one."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Task], Child]


def start_training(task: Task) -> Child:
    """`nvfp4 train` with one thread; a session of its own, so that Ctrl-C comes through us only."""
    file = task.out / "recipes" / f"{task.name}.yaml"
    for folder in (file.parent, task.log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    file.write_text(task.recipe.to_yaml(), encoding="utf-8")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with open(task.log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nvfp4", "train", str(file)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, **threads}, start_new_session=True,
        )  # fmt: skip


def last_row(folder: Path) -> dict[str, Any]:
    """The last whole row of metrics.jsonl; {"step": 0} where there is none."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {"step": 0}
    for line in reversed(lines[:-1]):  # what follows the last newline is not whole
        try:
            row = json.loads(line)
            if isinstance(row["step"], int):
                return row
        except (ValueError, KeyError, TypeError):
            break
    return {"step": 0}


def settled(task: Task) -> Outcome | None:
    """How the run ended, from its folder alone; None if it is not at its end."""
    row = last_row(task.folder)
    try:
        latest = task.folder / (task.folder / "latest").read_text().strip()
        step = json.loads((latest / "checkpoint.json").read_text())["step"]
        if step >= task.recipe.steps:
            return Outcome("finished", step)
    except (OSError, ValueError, KeyError):
        pass
    if "error" in row:  # the step that could not be used, see engine/metrics.py
        return Outcome("diverged", row["step"], str(row["error"]))
    values = [value for value in row.values() if isinstance(value, float)]
    if not all(map(math.isfinite, values)):
        return Outcome("diverged", row["step"])
    return None


def refuse_changes(tasks: Sequence[Task], out: Path) -> None:
    """UserError if a run that is there already was trained under another recipe."""
    for task in tasks:
        if not (task.folder / "recipe.yaml").is_file():
            continue
        from nvfp4.engine.runfolder import recipe_changes

        kept = ("run.dir:", "checkpoint.", "data.cache_dir:", "data.num_workers:")
        changes = [c for c in recipe_changes(task.folder, task.recipe) if not c.startswith(kept)]
        if changes:
            more = f" and {len(changes) - 2} more" if len(changes) > 2 else ""
            raise UserError(
                f"{task.folder} was trained under another recipe ({'; '.join(changes[:2])}{more}); "
                f"choose another --out, or delete it"
            )


def run_all(
    tasks: Sequence[Task],
    *,
    jobs: int,
    progress: Progress,
    start: Start = start_training,
    poll_seconds: float = POLL_SECONDS,
) -> dict[str, Outcome]:
    """Outcome of every run by name, `jobs` side by side, in the order of `tasks`.

    KeyboardInterrupt (SIGTERM too): every process saves and ends, then it is raised again.
    UserError if the first runs all fail with the same words.
    """
    ended = {task.name: outcome for task in tasks if (outcome := settled(task))}
    totals = {task.name: task.recipe.steps for task in tasks}
    progress.begin(totals, {t.name: last_row(t.folder)["step"] for t in tasks}, ended)
    waiting = [task for task in tasks if task.name not in ended]
    running: dict[str, tuple[Task, Child]] = {}
    here: list[Outcome] = []
    with _signals_interrupt():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    task = waiting.pop(0)
                    running[task.name] = task, start(task)
                for name, (task, child) in list(running.items()):
                    code = child.poll()
                    if code is None:
                        continue
                    del running[name]
                    ended[name] = settled(task) or _failure(task, code)
                    here.append(ended[name])
                    progress.ended(name, ended[name].words)
                    _stop_if_hopeless(here)
                progress.show(
                    {name: last_row(t.folder)["step"] for name, (t, _) in running.items()}
                )
                if running:
                    time.sleep(poll_seconds)
        except KeyboardInterrupt:
            progress.say(
                f"stopping: {len(running)} runs are saving; Ctrl-C again ends them at once"
            )
            raise
        finally:
            _stop([child for _, child in running.values()], poll_seconds)
    return ended


def _failure(task: Task, code: int) -> Outcome:
    """The last line that the process printed, or its exit code."""
    step = last_row(task.folder)["step"]
    try:
        lines = task.log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    words = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if code == 0:
        return Outcome("failed", step, f"stopped after step {step} of {task.recipe.steps}")
    if code == TRAINING_ERROR and (found := _TRAINING_ERROR.match(words)):
        return Outcome("diverged", int(found[1]), words.removeprefix("nvfp4 train: "))
    if code < 0:
        return Outcome("failed", step, f"killed by {signal.Signals(-code).name}")
    return Outcome("failed", step, words.removeprefix("nvfp4 train: ") or f"exit code {code}")


def _stop_if_hopeless(outcomes: Sequence[Outcome]) -> None:
    """The same mistake in every run is one of the recipe or the machine."""
    reasons = {o.reason if o.kind == "failed" else "" for o in outcomes}
    if len(outcomes) == ALIKE and len(reasons) == 1 and "" not in reasons:
        raise UserError(f"the first {ALIKE} runs failed alike: {reasons.pop()}")


def _stop(children: Sequence[Child], poll_seconds: float) -> None:
    """SIGTERM, on which a run saves; a second Ctrl-C kills."""
    try:
        for child in children:
            child.terminate()
        while any(child.poll() is None for child in children):
            time.sleep(poll_seconds)
    except KeyboardInterrupt:
        for child in children:
            child.kill()
        raise


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a closed terminal, as KeyboardInterrupt: processes of other sessions
    would go on without us. What is ignored (nohup) stays so; other threads cannot have handlers."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    former = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                former[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
