"""Workers that can get stuck: each says what it does and since when, and whoever waits for them looks."""

import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from common.cli.host_flags import HostEnvArgs

WAITING = ("put", "wait for parameters", "wait to restart", "ended")  # phases in which nothing is expected
GRACE = 3.0  # seconds: for threads to end, and for environments that raise at a timeout by themselves
LOOK_INTERVAL = 0.1  # seconds between two looks at whether to stop
THREAD = "pmaprl worker"  # the name of threads that may hang


class Stopped(Exception):
    """The run ends: leave the loop."""


class Limits(NamedTuple):
    """How long things may take, in seconds, and how often they may fail."""

    learner: float  # without a rollout
    reset: float
    step: float
    max_restarts: int  # of all actors together
    restart_interval: float  # between two restarts of the same actor

    @classmethod
    def of(cls, args: HostEnvArgs) -> "Limits":
        times = args.learner_timeout, args.reset_timeout, args.step_timeout
        return cls(*times, args.max_restarts, args.restart_interval)


class Activity(NamedTuple):
    """What a worker does. Replaced as a whole: others look at it at any moment."""

    phase: str
    since: float  # of `time.monotonic`


class Worker:
    """Something that runs in a thread of its own."""

    def __init__(self, name: str, accounts: tuple[str, ...] = ()):
        self.name = name
        self.seconds = dict.fromkeys(accounts, 0.0)
        self.ended = False  # set by others
        self.note("start")

    def note(self, phase: str) -> float:
        """Say what begins now; returns when that is."""
        self.activity = Activity(phase, time.monotonic())
        return self.activity.since

    @contextmanager
    def doing(self, phase: str, account: str | None = None):
        """Say what goes on, for the watch, and add up how long it takes, for the metrics."""
        began = self.note(phase)
        try:
            yield
        finally:
            ended = self.note("between")
            if account:
                self.seconds[account] += ended - began

    def stuck(self, limits: Limits) -> str | None:
        """The flag whose limit this worker is beyond, if any."""
        phase, since = self.activity
        if phase in WAITING:
            return None
        name, allowed = {"reset": ("reset", limits.reset), "step": ("step", limits.step)}.get(
            phase, ("learner", limits.learner)
        )
        if time.monotonic() - since <= allowed + GRACE:
            return None
        return f"--{name}-timeout {allowed:g}"

    def __str__(self) -> str:
        phase, since = self.activity
        return f"{self.name}: {phase} for {time.monotonic() - since:.1f} s"


def leave(code: int) -> NoReturn:
    """End the process; at once where a thread hangs in foreign code, which Python's own shutdown could crash."""
    if any(thread.name == THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def describe(workers: list[Worker]) -> str:
    """What each does, and since when."""
    return "; ".join(map(str, workers))
