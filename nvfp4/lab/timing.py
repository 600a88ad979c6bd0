"""Times that can be compared: everything runs in turn, and ratios are taken within a turn.

On a shared machine the same code takes 1.0 and then 1.5 times as long. What is measured one after
the other in every turn shares that, so that the median of the ratios stands where times do not.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

# name -> what is timed
Jobs = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of every turn."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return _spread(self.seconds)

    def ratio(self, other: "Timing") -> tuple[float, float]:
        """Median of seconds / other's seconds of the same turn, and its relative spread."""
        ratios = [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]
        return median(ratios), _spread(ratios)


def _spread(values: tuple[float, ...] | list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def in_turn(jobs: Jobs, *, turns: int, echo: Callable[[str], None] | None = None) -> list[Timing]:
    """Time of each job in every turn, after one turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(turns + 1):
        for name, job in jobs.items():
            if echo is not None:
                echo(f"turn {turn} of {turns}: {name}")
            began = time.perf_counter()
            job()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return [Timing(name, tuple(values)) for name, values in seconds.items()]
