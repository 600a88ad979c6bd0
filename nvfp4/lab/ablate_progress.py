"""Progress over all runs of an ablation: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Mapping

Echo = Callable[[str], object]
LINE_EVERY_SECONDS = 30.0


class Progress:
    """Counts optimizer steps over all runs; the steps of earlier calls count as done."""

    def __init__(self, echo: Echo = print, *, clock: Callable[[], float] = time.monotonic):
        self.echo, self.clock = echo, clock
        self._bar = None

    def begin(
        self, totals: Mapping[str, int], at: Mapping[str, int], ended: Collection[str]
    ) -> None:
        """Before the first run starts: planned and trained steps by run, and the runs at their end.

        A run that is at its end counts in full, wherever it ended.
        """
        self._totals, self._ended = dict(totals), set(ended)
        self._at = {name: at[name] for name in totals}
        self._before = self.done
        self._began = self._last = self.clock()
        what = f"{len(totals)} runs, {self.total:,} steps"
        if self.done:
            what += f"; there already: {len(ended)} ended runs, {self.done:,} steps"
        self.echo(what)
        if sys.stdout.isatty() and len(ended) < len(totals):
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(),
                TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps"),
                TimeRemainingColumn(), speed_estimate_period=120, transient=True,
            )  # fmt: skip
            self._bar.add_task(self._runs(), total=self.total, completed=self.done)
            self._bar.start()

    @property
    def total(self) -> int:
        return sum(self._totals.values())

    @property
    def done(self) -> int:
        return sum(
            self._totals[name] if name in self._ended else step for name, step in self._at.items()
        )

    def ended(self, name: str, words: str) -> None:
        """A run is at its end, good or bad."""
        self._ended.add(name)
        self.say(f"{name} {words}")
        self._last = -math.inf  # the next show prints where all stand

    def show(self, running: Mapping[str, int]) -> None:
        """Trained steps of the runs that are training now, by name."""
        self._at |= running
        if self._bar:
            bar = self._bar.task_ids[0]
            self._bar.update(bar, completed=self.done, description=self._runs())
        elif self.clock() - self._last >= LINE_EVERY_SECONDS:
            self._last = self.clock()
            self.echo(f"{self._runs()}  {self.done:,} of {self.total:,} steps  ETA {self.eta()}")

    def eta(self) -> str:
        """h:mm:ss from the speed of this call; runs of different cost make it a rough one."""
        trained = self.done - self._before
        if trained <= 0:
            return "unknown"
        left = round((self.total - self.done) * (self.clock() - self._began) / trained)
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self.echo(text)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _runs(self) -> str:
        return f"{len(self._ended)} of {len(self._totals)} runs"
