"""What a run says: metrics.jsonl (reproducible), perf.jsonl (wall clock), TensorBoard events, a
progress line.

metrics.jsonl holds only values that the recipe determines, as the shortest decimals that read back
to the same float64, one flushed line per step. Two runs of one recipe on one machine give the same
bytes, interrupted or not.
"""

import json
import os
import time
from collections import deque
from pathlib import Path

_WINDOW = 20  # steps over which speed and ETA are averaged


class Metrics:
    """The open logs of a run; a run resumed at ``step`` first drops every later line."""

    def __init__(
        self, folder: Path, *, step: int, total: int, every: int, tensorboard: bool, stream
    ):
        self._files = []
        for name in ("metrics.jsonl", "perf.jsonl"):
            truncate(folder / name, step)
            self._files.append(open(folder / name, "a"))
        self._tensorboard = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # a second of imports

            # Viewers hide events of later steps that an interrupted run left behind.
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._line = ProgressLine(total=total, every=every, stream=stream)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def write(self, row: dict, seconds: float, tokens: int) -> None:
        """Log one step: ``row`` as in metrics.jsonl, its duration in seconds and its tokens."""
        perf = {
            "step": row["step"],
            "step_time_s": seconds,
            "tokens_per_s": tokens / seconds,
            "wall_time": time.time(),
        }
        for file, content in zip(self._files, (row, perf), strict=True):
            file.write(json.dumps(content, allow_nan=False) + "\n")
            file.flush()
        if self._tensorboard is not None:
            for tag, value in _scalars(row, perf):
                self._tensorboard.add_scalar(tag, value, row["step"])
        self._line.show(row, seconds, tokens)

    def note(self, step: int, text: str) -> None:
        """Say that something happens in a step, here and on the TensorBoard page."""
        self._line.note(text)
        if self._tensorboard is not None:
            self._tensorboard.add_text("precision/switch", text, step)

    def write_failure(self, row: dict) -> None:
        """The step that could not be used, NaN and all: analysis sees that the run broke, a resume
        drops the line."""
        self._files[0].write(json.dumps(row) + "\n")
        self._files[0].flush()

    def sync(self) -> None:
        """Put every line on the disk; called before a checkpoint, which promises the lines up to
        its step."""
        for file in self._files:
            os.fsync(file.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        self._line.end()
        for file in self._files:
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _scalars(row: dict, perf: dict) -> list[tuple[str, float]]:
    """(tag, value) pairs of the TensorBoard page."""
    tags = {
        "train/loss": row["loss"],
        "train/grad_norm": row["grad_norm"],
        "train/lr": row["lr"],
        "train/tokens": row["tokens"],
        "valid/loss": row.get("valid_loss"),
        "perf/step_time_s": perf["step_time_s"],
        "perf/tokens_per_s": perf["tokens_per_s"],
    }
    return [(tag, value) for tag, value in tags.items() if value is not None]


def truncate(path: Path, step: int) -> None:
    """Cut a .jsonl file after the last whole line whose "step" is at most ``step``; make it if
    absent."""
    path.touch()
    kept = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                wanted = line.endswith(b"\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                wanted = False
            if not wanted:
                break
            kept += len(line)
    os.truncate(path, kept)


class ProgressLine:
    """One rewritten line on a terminal; in a log, a plain line for the first step, every N steps
    and evaluations."""

    def __init__(self, *, total: int, every: int, stream):
        self.total, self.every, self.stream = total, max(1, every), stream
        self.in_place = stream.isatty()
        self._recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._last = time.monotonic()
        self._laps: deque[float] = deque(maxlen=_WINDOW)
        self._first = True

    def show(self, row: dict, seconds: float, tokens: int) -> None:
        now = time.monotonic()
        self._recent.append((seconds, tokens))
        self._laps.append(now - self._last)  # with evaluation and saving, for the ETA
        self._last = now
        step = row["step"]
        worth_keeping = (
            self._first or step % self.every == 0 or step == self.total or "valid_loss" in row
        )
        if self.in_place:
            self.stream.write("\r\x1b[K" + self._text(row) + ("\n" if "valid_loss" in row else ""))
            self.stream.flush()
        elif worth_keeping:
            print(self._text(row), file=self.stream, flush=True)
        self._first = False

    def note(self, text: str) -> None:
        """A line of its own, which stays."""
        self.stream.write(f"\r\x1b[K{text}\n" if self.in_place else f"{text}\n")
        self.stream.flush()

    def end(self) -> None:
        """Leave the terminal's cursor on a fresh line."""
        if self.in_place and not self._first:
            self.stream.write("\n")
            self.stream.flush()

    def _text(self, row: dict) -> str:
        seconds, tokens = (sum(column) for column in zip(*self._recent, strict=True))
        left = int((self.total - row["step"]) * sum(self._laps) / len(self._laps))
        eta = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        valid = f"  valid {row['valid_loss']:.4f}" if "valid_loss" in row else ""
        place = f"{row['step']:>{len(str(self.total))}}/{self.total}"
        return (
            f"step {place}  loss {row['loss']:.4f}{valid}  grad norm {row['grad_norm']:.3f}  "
            f"lr {row['lr']:.2e}  {tokens / seconds:,.0f} tokens/s  ETA {eta}"
        )
