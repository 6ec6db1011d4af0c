"""Where the seconds of a run go."""

import time
from contextlib import contextmanager


class Clock:
    """Runs from its making on; training lasts from `begin` to `end`, compilation left out."""

    def __init__(self):
        self.seconds = dict.fromkeys(("compile", "eval", "checkpoint", "host"), 0.0)
        self._made = self._began = self._lap = time.perf_counter()
        self._ended: float | None = None

    def begin(self) -> None:
        self._began = self._lap = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    @property
    def wall(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._made

    @property
    def trained(self) -> float:
        """Seconds of training, with all that interrupts it."""
        return (self._ended or time.perf_counter()) - self._began

    def lap(self) -> float:
        """Seconds since the last call, or since training began."""
        before, self._lap = self._lap, time.perf_counter()
        return self._lap - before

    @contextmanager
    def timed(self, name: str):
        """Add the time inside to one of `seconds`."""
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began
