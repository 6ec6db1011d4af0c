"""Workers that can get stuck: each says what it does and since when, and whoever waits for them looks."""

import time
from contextlib import contextmanager
from typing import NamedTuple

GRACE = 3.0  # seconds: for threads to end, and for environments that raise at a timeout by themselves


class Limits(NamedTuple):
    """How long things may take, in seconds, and how often they may fail."""

    learner: float  # without a rollout
    reset: float
    step: float
    max_restarts: int  # of all actors together
    restart_interval: float  # between two restarts of the same actor


class Worker:
    """Something that runs in a thread of its own."""

    def __init__(self, name: str, accounts: tuple[str, ...] = ()):
        self.name = name
        self.seconds = dict.fromkeys(accounts, 0.0)
        self.phase, self.beat = "start", time.monotonic()

    @contextmanager
    def doing(self, phase: str, account: str | None = None):
        """Say what goes on, for the watch, and add up how long it takes, for the metrics."""
        self.phase, self.beat = phase, time.monotonic()
        yield
        now = time.monotonic()
        if account:
            self.seconds[account] += now - self.beat
        self.phase, self.beat = "between", now

    def stuck(self, limits: Limits) -> str | None:
        """The flag whose limit this worker is beyond, if any."""
        allowed = {"reset": limits.reset, "step": limits.step}.get(self.phase)
        if allowed is None or time.monotonic() - self.beat <= allowed + GRACE:
            return None
        return f"--{self.phase}-timeout {allowed:g}"

    def __str__(self) -> str:
        return f"{self.name}: {self.phase} for {time.monotonic() - self.beat:.1f} s"


def describe(workers: list[Worker]) -> str:
    """What each does, and since when."""
    return "; ".join(map(str, workers))
