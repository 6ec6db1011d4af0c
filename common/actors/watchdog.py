"""Workers that may hang: each says what it does and since when, and whoever waits for them looks."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from common.cli.command import THREAD
from common.cli.host_flags import HostEnvArgs
from common.envs.host import HostEnvs

WAITING = ("put", "wait for parameters", "wait for another", "wait to restart", "ended")  # nothing is expected there
GRACE = 3.0  # seconds: for threads to end, and for environments that raise at a timeout by themselves
POLL_INTERVAL = 0.1  # seconds between two looks at whether to stop


class Stopped(Exception):
    """The run ends: leave the loop."""


class Limits(NamedTuple):
    """How long things may take, in seconds, and how often they may fail."""

    learner: float  # without a rollout
    reset: float
    step: float
    max_restarts: int  # of all actors together, or of an evaluation
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
    """Something that steps environments in a thread of its own."""

    def __init__(self, name: str, accounts: tuple[str, ...] = ()):
        self.name = name
        self.seconds = dict.fromkeys(accounts, 0.0)
        self.envs: HostEnvs | None = None
        self.steps = 0  # of an evaluation, since it began, the last time
        self.ended = False  # set by others
        self.restarts, self.restarted = 0, -math.inf  # how often, and when for the last time
        self._thread: threading.Thread | None = None
        self.note("start")

    def run(self, work: Callable[[], Any]) -> Future:
        """Do `work` in the thread; the future gets what it returns or raises."""
        result = Future()

        def target():
            try:
                result.set_result(work())
            except BaseException as error:  # environments may also call sys.exit
                result.set_exception(error)

        self._thread = threading.Thread(target=target, name=THREAD, daemon=True)
        self._thread.start()
        return result

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

    def close(self) -> None:
        """Close the environments; what they raise then does not matter any more."""
        envs, self.envs = self.envs, None
        if envs is not None:
            with suppress(Exception, SystemExit), self.doing("close"):
                envs.close()

    def stuck(self, limits: Limits) -> str | None:
        """The flag whose limit this worker is beyond, if any."""
        phase, since = self.activity
        if phase in WAITING:
            return None
        name, allowed = {
            "make": ("reset", limits.reset),
            "reset": ("reset", limits.reset),
            "close": ("reset", limits.reset),
            "step": ("step", limits.step),
        }.get(phase, ("learner", limits.learner))
        if time.monotonic() - since <= allowed + GRACE:
            return None
        return f"--{name}-timeout {allowed:g}"

    def join(self, until: float) -> bool:
        """Wait for the thread to end, no longer than `until`, of `time.monotonic`; returns whether it has."""
        if self._thread:
            self._thread.join(max(until - time.monotonic(), 0.0))
        return not (self._thread and self._thread.is_alive())

    def kill(self) -> None:
        """End the environments' processes, if they have any, from another thread: its waiting for them ends too."""
        envs = self.envs
        if envs is not None:
            envs.kill()

    def __str__(self) -> str:
        phase, since = self.activity
        return f"{self.name}: {phase} for {time.monotonic() - since:.1f} s"


def stop_workers(workers: list[Worker]) -> list[Worker]:
    """Wait for workers that were told to stop, at most `GRACE` seconds; returns those that do not answer.

    Half of that time is theirs. Then the processes are killed of those that are not done.
    """
    now = time.monotonic()
    late = [worker for worker in workers if not worker.join(now + GRACE / 2)]
    for worker in late:
        worker.kill()
    return [worker for worker in late if not worker.join(now + GRACE)]


def describe(workers: list[Worker]) -> str:
    """What each does, and since when."""
    return "; ".join(map(str, workers))
