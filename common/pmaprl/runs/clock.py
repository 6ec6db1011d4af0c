"""Clock of a run."""

import time
from contextlib import contextmanager

from pmaprl.runs.metrics import Log, is_number


class Clock:
    """Wall clock and training clock; the latter excludes evaluation and saving."""

    def __init__(self):
        self.seconds: dict[str, float] = {
            "compile": 0.0,
            "eval": 0.0,
            "checkpoint": 0.0,
            "host": 0.0,
        }
        self._made = time.perf_counter()
        self._began = self._made
        self.wall_before = 0.0  # seconds of earlier invocations
        self.trained_before = 0.0  # seconds of training in earlier invocations
        self._last_lap = 0.0  # seconds of training at the last lap

    def begin(self) -> None:
        """Begin to train."""
        self._began = time.perf_counter()

    def add_earlier(self, log: Log) -> None:
        """Add the seconds of earlier invocations of the run, which they have logged."""
        if is_number(log.wall_seconds) and is_number(log.trained_seconds):
            self.wall_before = log.wall_seconds
            self.trained_before = log.trained_seconds

    @property
    def wall(self) -> float:
        """Seconds since the clock was made, and those of earlier invocations."""
        return self.wall_before + time.perf_counter() - self._made

    @property
    def since_begin(self) -> float:
        """Seconds since training began, with evaluation and saving."""
        return time.perf_counter() - self._began

    @property
    def trained(self) -> float:
        """Seconds of training, without evaluation and saving."""
        return self.since_begin - self.seconds["eval"] - self.seconds["checkpoint"]

    def lap(self) -> float:
        """Seconds of training since the last call, or since training began."""
        before = self._last_lap
        self._last_lap = self.trained
        return self._last_lap - before

    @contextmanager
    def timed(self, name: str):
        """Add the time inside to one of `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began
