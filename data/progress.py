"""Progress of long data work: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

Echo = Callable[[str], None]
LINE_EVERY_SECONDS = 5.0


class Progress:
    """Counts work in bytes. `echo=None` is silent, and so is work that ends at once."""

    def __init__(self, title: str, total: int, echo: Echo | None) -> None:
        self.title, self.total, self.echo = title, max(total, 1), echo
        self.done = 0
        self._last = time.monotonic()
        self._bar = None

    def __enter__(self) -> Progress:
        if self.echo and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                "{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn(),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._bar.add_task(f"data: {self.title}", total=self.total)
            self._bar.start()
        return self

    def advance(self, amount: int) -> None:
        """Adds `amount` bytes of finished work."""
        self.done += amount
        if self._bar:
            self._bar.advance(self._bar.task_ids[0], amount)
        elif self.echo and time.monotonic() - self._last > LINE_EVERY_SECONDS:
            self._last = time.monotonic()
            share = min(self.done / self.total, 1.0)
            self.echo(f"data: {self.title}: {share:.0%} of {self.total / 1e6:.1f} MB")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
