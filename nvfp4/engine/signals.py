"""SIGTERM and SIGINT ask the run to stop: the step in hand is finished and saved, and the process
ends with 0.

A second SIGINT ends it at once, with exit code 130. torchrun passes an interrupt on to workers that
the terminal has interrupted already, so only a SIGINT at least a second after the first counts as
the second.
"""

import os
import signal
import sys
import time
from typing import Any

_IMPATIENT_AFTER_S = 1.0
_STOP = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """``with StopRequest() as stop: ... if stop.received: ...``; the former handlers come back at
    the end."""

    def __init__(self):
        self.received: str | None = None  # name of the first signal
        self._time = 0.0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._former = {number: signal.signal(number, self._note) for number in _STOP}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._time = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._time >= _IMPATIENT_AFTER_S:
            sys.stderr.write("\ninterrupted twice: stopped without saving\n")
            sys.stderr.flush()
            os._exit(130)
