"""Threads that step environments and may hang: each says what it does and since when, and whoever waits looks."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from common.cli.command import THREAD
from common.cli.host_flags import HostEnvArgs
from common.envs.host import HostEnvs

WAITING = ("wait_put", "wait_params", "ended")  # phases in which nothing is expected
TIMEOUTS = {"make": "reset", "reset": "reset", "close": "reset", "env_step": "step"}  # of phases; else the learner's
GRACE = 3.0  # seconds: for threads to end, and for environments that raise at a timeout by themselves
POLL_INTERVAL = 0.1  # seconds between two looks at whether to stop


class Stopped(Exception):
    """The run ends: leave the loop."""


class Activity(NamedTuple):
    """What a worker does. Replaced as a whole: others look at it at any moment."""

    phase: str
    since: float  # of `time.monotonic`


class Worker:
    """Something that steps environments in a thread of its own."""

    def __init__(self, name: str, phases: tuple[str, ...] = ()):
        """How long it is in each of these `phases` is added up."""
        self.name = name
        self.seconds = dict.fromkeys(phases, 0.0)
        self.envs: HostEnvs | None = None
        self.ended = False  # set by others
        self._thread: threading.Thread | None = None
        self._note("start")

    def run(self, work: Callable[[], Any]) -> Future:
        """Do `work` in the thread; the future gets what it returns or raises."""
        result = Future()

        def target():
            try:
                result.set_result(work())
            except BaseException as error:  # environments may also call sys.exit
                result.set_exception(error)
            self._note("ended")

        self._thread = threading.Thread(target=target, name=THREAD, daemon=True)
        self._thread.start()
        return result

    def _note(self, phase: str) -> float:
        """Say what begins now; returns when that is."""
        self.activity = Activity(phase, time.monotonic())
        return self.activity.since

    @contextmanager
    def doing(self, phase: str):
        """Say what goes on, for the watch, and add up how long it takes, for the metrics."""
        began = self._note(phase)
        try:
            yield
        finally:
            ended = self._note("between")
            if phase in self.seconds:
                self.seconds[phase] += ended - began

    def close(self) -> None:
        """Close the environments; what they raise then does not matter any more."""
        envs, self.envs = self.envs, None
        if envs is not None:
            with suppress(Exception, SystemExit), self.doing("close"):
                envs.close()

    def stuck(self, args: HostEnvArgs) -> str | None:
        """The flag whose limit this worker is beyond, if any."""
        phase, since = self.activity
        name = f"{TIMEOUTS.get(phase, 'learner')}_timeout"
        allowed = getattr(args, name)
        if phase in WAITING or time.monotonic() - since <= allowed + GRACE:
            return None
        return f"--{name.replace('_', '-')} {allowed:g}"

    def join(self, until: float) -> bool:
        """Wait for the thread to end, no longer than `until`, of `time.monotonic`; returns whether it has."""
        if self._thread:
            self._thread.join(max(until - time.monotonic(), 0.0))
        return not (self._thread and self._thread.is_alive())

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
        if (envs := worker.envs) is not None:
            envs.kill()  # the thread's waiting for them ends too
    return [worker for worker in late if not worker.join(now + GRACE)]
