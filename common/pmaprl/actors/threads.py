"""Threads that step environments and may hang, and the queue and parameters that they share with a
learner.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from pmaprl.cli.checks import flag_of
from pmaprl.cli.command import THREAD
from pmaprl.cli.errors import FailedEnvError
from pmaprl.cli.host_flags import HostEnvArgs
from pmaprl.device.statistics import MetricSums
from pmaprl.envs.host import HostEnvs

WAITING = ("wait_put", "wait_params", "ended")  # phases in which nothing is expected
# Of phases; else the learner's
TIMEOUTS = {"make": "reset", "reset": "reset", "close": "reset", "env_step": "step"}
# Seconds: for threads to end, and for environments that raise at a timeout by themselves
GRACE = 3.0
POLL_INTERVAL = 0.1  # seconds between two looks at whether to stop


_foreign = threading.local()  # with `code` where a thread is in code of an environment
_end_process = os._exit
_program = os.getpid()


def _exit_of_environments(code: int) -> None:
    """Stand in for `os._exit`: what environments in this process would end without a word raises
    FailedEnvError.

    It is the real one for everybody else, and in processes that environments have forked.
    """
    if os.getpid() == _program and getattr(_foreign, "code", False):
        raise FailedEnvError(f"an environment wanted to end the whole program (os._exit({code}))")
    _end_process(code)


os._exit = _exit_of_environments


class Stopped(Exception):
    """The run ends: leave the loop."""


class Activity(NamedTuple):
    """What a worker does. Replaced as a whole: others look at it at any moment."""

    phase: str
    since: float  # of `time.monotonic`


class Worker:
    """Something that steps environments in a thread of its own."""

    def __init__(self, name: str, phases: tuple[str, ...] = (), envs: HostEnvs | None = None):
        """How long it is in each of these `phases` is added up. It may have `envs` from the
        beginning.
        """
        self.name = name
        self.seconds = dict.fromkeys(phases, 0.0)
        self.envs = envs
        self.ended = False  # set by others
        self.result = Future()  # of what it does
        self._note("start")

    def run(self, work: Callable[[], Any]) -> None:
        """Do `work` in the thread; `result` gets what it returns or raises."""

        def target():
            try:
                self.result.set_result(work())
            except BaseException as error:  # environments may also call sys.exit
                self.result.set_exception(error)
            self._note("ended")

        threading.Thread(target=target, name=THREAD, daemon=True).start()

    def _note(self, phase: str) -> float:
        """Say what begins now; returns when that is."""
        self.activity = Activity(phase, time.monotonic())
        return self.activity.since

    @contextmanager
    def doing(self, phase: str):
        """Say what goes on, for the watch, and add up how long it takes, for the metrics.

        Where an environment is at work, it cannot end the program: see `_exit_of_environments`.
        """
        began = self._note(phase)
        _foreign.code = phase in TIMEOUTS
        try:
            yield
        finally:
            _foreign.code = False
            ended = self._note("between")
            if phase in self.seconds:
                self.seconds[phase] += ended - began

    def close(self) -> None:
        """Close the environments; what they raise then does not matter any more."""
        envs = self.envs
        self.envs = None
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
        return f"{flag_of(name)} {allowed:g}"

    def __str__(self) -> str:
        phase, since = self.activity
        return f"{self.name}: {phase} for {time.monotonic() - since:.1f} s"


def stop_workers(workers: list[Worker]) -> list[Worker]:
    """Wait `GRACE` seconds for workers told to stop, killing late ones' processes halfway; returns
    those still busy.
    """
    late = wait([worker.result for worker in workers], GRACE / 2).not_done
    for worker in workers:
        if worker.result in late and (envs := worker.envs) is not None:
            envs.kill()  # the thread's waiting for them ends too
    late = wait(late, GRACE / 2).not_done
    return [worker for worker in workers if worker.result in late]


class HostRollout(NamedTuple):
    """T steps of N environments, host arrays. The environments are the second axis of every one."""

    obs: Any  # [T + 1, N, ...] with the observation after the last step
    action: np.ndarray  # [T, N, ...]
    extras: Any  # [T, N, ...] what `explore` returned beside them, such as their log-probabilities
    reward: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N] False for steps in which an environment only reset itself
    version: np.ndarray  # [T, N] the version of the parameters that acted
    final_obs: Any  # [T, N, ...] true next observations, where `obs` does not have them
    first: np.ndarray  # [1, N] whether an episode begins with the first step
    memory: Any  # [1, N, ...] what a recurrent policy carried into that step; () without recurrence


class Collected(NamedTuple):
    """A rollout and what happened in it."""

    actor: int
    rollout: HostRollout
    episodes: list[tuple[float, int]]  # returns and lengths of those that ended in it
    info: MetricSums = MetricSums({}, {})  # what --log-info names, host numbers


class RolloutQueue:
    """What actors have collected and the learner has not taken yet, one rollout of each actor at
    most.

    At any time `produced == trained + discarded + waiting + held`.
    """

    def __init__(self):
        self._waiting: dict[int, Collected] = {}  # by actor, the oldest first
        self._changed = threading.Condition()
        self._counts = dict.fromkeys(("produced", "trained", "discarded", "held"), 0)

    @property
    def counts(self) -> dict[str, int]:
        """What became of all rollouts, at one moment."""
        with self._changed:
            return self._counts | {"waiting": len(self._waiting)}

    def put(self, collected: Collected, stopped: Callable[[], bool]) -> None:
        """Add a rollout once its actor has room for it; it is discarded where there is none before
        `stopped`.
        """
        with self._changed:
            while collected.actor in self._waiting and not stopped():
                self._changed.wait(POLL_INTERVAL)
            self._counts["produced"] += 1
            if stopped():
                self._counts["discarded"] += 1
            else:
                self._waiting[collected.actor] = collected
                self._changed.notify_all()

    def take(self, actor: int | None, timeout: float) -> Collected | None:
        """The oldest rollout of `actor`, or of any; it is `held` from then on. None where none
        comes in time.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._waiting if actor is None else actor in self._waiting, timeout
            ):
                return None
            self._counts["held"] += 1
            self._changed.notify_all()
            return self._waiting.pop(next(iter(self._waiting)) if actor is None else actor)

    def train(self, count: int) -> None:
        """Account for `count` rollouts that were held and are learned from now."""
        with self._changed:
            self._counts["held"] -= count
            self._counts["trained"] += count

    def discard(self) -> None:
        """Give up all that waits and is held, at the end of a run."""
        with self._changed:
            self._counts["discarded"] += len(self._waiting) + self._counts["held"]
            self._counts["held"] = 0
            self._waiting.clear()


KEPT = 3  # versions: one in use, and two that the learner may have under way


class Slot(NamedTuple):
    """One version of the parameters on one device."""

    version: int  # updates behind it
    params: Any


class ParameterSlots:
    """The newest versions, on the device of every reader. Safe for any number of threads."""

    def __init__(self, devices: list[jax.Device]):
        self._devices = set(devices)
        self._versions: deque[dict[jax.Device, Slot]] = deque(maxlen=KEPT)  # the newest last
        self._changed = threading.Condition()

    def publish(self, version: int, params: Any) -> None:
        """Copy `params`, arrays that no update may donate, to every reader's device.

        They may still be under computation: readers get them once they are there.
        """
        local = jax.tree.map(
            lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, params
        )
        placed = {device: Slot(version, jax.device_put(local, device)) for device in self._devices}
        with self._changed:
            self._versions.append(placed)
            self._changed.notify_all()

    def latest(self, device: jax.Device) -> Slot:
        """The newest version that is computed, or the oldest. The first one has to be published by
        then.
        """
        with self._changed:
            *newer, oldest = [placed[device] for placed in reversed(self._versions)]
        ready = (slot for slot in newer if all(x.is_ready() for x in jax.tree.leaves(slot.params)))
        return next(ready, oldest)

    def wait_for(self, version: int, device: jax.Device, timeout: float) -> Slot | None:
        """Exactly this version, computed; None where it is not published within `timeout`
        seconds.
        """

        def published():
            return next(
                (placed[device] for placed in self._versions if placed[device].version == version),
                None,
            )

        with self._changed:
            slot = self._changed.wait_for(published, timeout)
        return slot and Slot(version, jax.block_until_ready(slot.params))
