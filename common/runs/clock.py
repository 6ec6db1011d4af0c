"""Where the seconds of a run go."""

import time
from contextlib import contextmanager


class Clock:
    """Runs from its making on; training begins and ends when it is told so."""

    def __init__(self):
        self.seconds = dict.fromkeys(("compile", "eval", "checkpoint", "host"), 0.0)
        self._made = self._began = time.perf_counter()
        self._lap = 0.0  # seconds of training at the last one
        self._ended: float | None = None  # seconds of training in the end

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._ended = self.trained

    @property
    def wall(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._made

    def moment(self) -> dict[str, float]:
        """Now, for a row of metrics."""
        return {"time/wall": self.wall, "time/compile": self.seconds["compile"]}

    @property
    def since_begin(self) -> float:
        """Seconds since training began, with all that interrupts it."""
        return time.perf_counter() - self._began

    @property
    def trained(self) -> float:
        """Seconds of training, without evaluation and saving."""
        if self._ended is not None:
            return self._ended
        return self.since_begin - self.seconds["eval"] - self.seconds["checkpoint"]

    def lap(self) -> float:
        """Seconds of training since the last call, or since it began."""
        before, self._lap = self._lap, self.trained
        return self._lap - before

    @contextmanager
    def timed(self, name: str):
        """Add the time inside to one of `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began
