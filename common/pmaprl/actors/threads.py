"""Threads that step environments and may hang, and all that they share with a learner."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, Generic, NamedTuple, NoReturn

import jax
import numpy as np

from pmaprl.cli.checks import flag_of
from pmaprl.cli.command import THREAD
from pmaprl.cli.errors import FailedEnvError
from pmaprl.cli.host_flags import ActorArgs, HostEnvArgs, HostRolloutArgs
from pmaprl.device.interface import ArrayT
from pmaprl.device.statistics import MetricSums
from pmaprl.envs.host import SteppedEnvs
from pmaprl.machine.devices import Device

ActorFlags = ActorArgs | HostRolloutArgs
"""Flags of a run whose environments step on the host."""

WAITING = ("wait_put", "wait_params", "ended")  # phases without a timeout
# Timeouts of phases in which environments are at work; other phases have the learner's
TIMEOUTS = {"make": "reset", "reset": "reset", "close": "reset", "env_step": "step"}
# Seconds that threads get to end, and environments to raise at a timeout by themselves
GRACE = 3.0
POLL_INTERVAL = 0.1  # seconds between two looks at whether to stop


_foreign = threading.local()  # `code` is True while a thread is in the code of an environment
_end_process = os._exit
_replace_program = os.execv
_replace_program_with = os.execve
_program = os.getpid()


def _exit_of_environments(code: int) -> None:
    """Replacement of `os._exit` that raises FailedEnvError if an environment calls it.

    Otherwise such an environment would end the whole program without a word. For everybody else,
    and in processes that environments have forked, it ends the process as usual.
    """
    _refuse_in_environments(f"os._exit({code})")
    _end_process(code)


def _exec_of_environments(path: Any, args: Any) -> NoReturn:
    """Replacement of `os.execv`, which all of `os.execl` to `os.execvp` call, for the same."""
    _refuse_in_environments(f"os.execv({path!r})")
    _replace_program(path, args)


def _exec_with_of_environments(path: Any, args: Any, env: Any) -> NoReturn:
    """Replacement of `os.execve`, which all of `os.execle` to `os.execvpe` call, for the same."""
    _refuse_in_environments(f"os.execve({path!r})")
    _replace_program_with(path, args, env)


def _refuse_in_environments(call: str) -> None:
    if os.getpid() == _program and getattr(_foreign, "code", False):
        raise FailedEnvError(f"an environment wanted to end the whole program ({call})")


os._exit = _exit_of_environments
os.execv = _exec_of_environments
os.execve = _exec_with_of_environments


class Stopped(Exception):
    """Signal to leave a loop, because the run ends."""


class Activity(NamedTuple):
    """Present phase of a worker; replaced as a whole, because others read it at any moment."""

    phase: str
    since: float  # of `time.monotonic`


class Worker:
    """A thread that steps environments, and its environments."""

    def __init__(self, name: str, phases: tuple[str, ...] = (), envs: SteppedEnvs | None = None):
        """Prepare a worker.

        Args:
            name: name in messages.
            phases: phases whose `seconds` are added up.
            envs: environments that the worker has from the beginning.
        """
        self.name = name
        self.seconds = dict.fromkeys(phases, 0.0)
        self.envs = envs
        self.ended = False  # set by others
        self.result = Future()  # result of its work
        self._note("start")  # `run` restarts the clock of this phase

    def run(self, work: Callable[[], Any]) -> None:
        """Do `work` in the thread; its value or error becomes the `result`."""
        self._note("start")

        def target():
            try:
                self.result.set_result(work())
            except BaseException as error:  # environments may also call sys.exit
                self.result.set_exception(error)
            self._note("ended")

        threading.Thread(target=target, name=THREAD, daemon=True).start()

    def _note(self, phase: str) -> float:
        """Begin a phase, and return its time."""
        self.activity = Activity(phase, time.monotonic())
        return self.activity.since

    @contextmanager
    def doing(self, phase: str):
        """Note a phase for those who watch, and add up its seconds for the metrics.

        An environment at work cannot end the program: see `_exit_of_environments`.
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
        """Close the environments; errors do not matter any more."""
        envs = self.envs
        self.envs = None
        if envs is not None:
            with suppress(Exception, SystemExit), self.doing("close"):
                envs.close()

    def stuck(self, args: HostEnvArgs) -> str | None:
        """The flag whose timeout this worker has passed; None if it has not."""
        phase, since = self.activity
        name = f"{TIMEOUTS.get(phase, 'learner')}_timeout"
        allowed = getattr(args, name)
        if phase in WAITING or time.monotonic() - since <= allowed + GRACE:
            return None
        return f"{flag_of(name)} {allowed:g}"

    def __str__(self) -> str:
        phase, since = self.activity
        return f"{self.name}: {phase} for {time.monotonic() - since:.1f} s"


def stop_workers(workers: Sequence[Worker]) -> list[Worker]:
    """Wait `GRACE` seconds for workers that were told to stop.

    After half of it, the processes of late workers' environments are killed.

    Returns:
        The workers that are still busy.
    """
    late = wait([worker.result for worker in workers], GRACE / 2).not_done
    for worker in workers:
        envs = worker.envs
        if worker.result in late and envs is not None:
            envs.kill()  # ends the thread's waiting for them too
    late = wait(late, GRACE / 2).not_done
    return [worker for worker in workers if worker.result in late]


class RolloutStep(NamedTuple, Generic[ArrayT]):
    """A step of N environments, [N, ...], or T of them, [T, N, ...]."""

    action: ArrayT
    extras: Any  # further results of `explore`, such as log-probabilities
    reward: ArrayT
    terminated: ArrayT
    truncated: ArrayT
    valid: ArrayT  # False for steps in which an environment only reset itself
    version: ArrayT  # the version of the parameters that acted
    final_obs: Any  # true next observations; None if the next step has them


class HostRollout(NamedTuple, Generic[ArrayT]):
    """T steps of N environments on the host, as arrays of NumPy or of JAX.

    The environments are the second axis of every array.
    """

    obs: Any  # [T + 1, N, ...] with the observation after the last step
    action: ArrayT  # [T, N, ...]
    extras: Any  # [T, N, ...] further results of `explore`, such as log-probabilities
    reward: ArrayT  # [T, N]
    terminated: ArrayT  # [T, N]
    truncated: ArrayT  # [T, N]
    valid: ArrayT  # [T, N] False for steps in which an environment only reset itself
    version: ArrayT  # [T, N] the version of the parameters that acted
    final_obs: Any  # [T, N, ...] true next observations; None if `obs` has them
    first: ArrayT  # [1, N] True if an episode begins with the first step
    memory: Any  # [1, N, ...] memory that a recurrent policy had before that step; () without

    @classmethod
    def of(
        cls, steps: RolloutStep[ArrayT], obs: Any, first: ArrayT, memory: Any
    ) -> "HostRollout[ArrayT]":
        """Make a rollout of steps [T, N, ...], with the arrays that have another length."""
        return cls(**steps._asdict(), obs=obs, first=first, memory=memory)


class Collected(NamedTuple):
    """A rollout, and the episodes that ended in it."""

    actor: int
    rollout: HostRollout[np.ndarray]
    episodes: list[tuple[float, int]]  # their returns and lengths
    info: MetricSums = MetricSums({}, {})  # metrics of --log-info, host numbers


class RolloutQueue:
    """Rollouts that the learner has not taken yet, at most one of each actor.

    At any time `produced == trained + discarded + waiting + held`.
    """

    def __init__(self):
        self._waiting: dict[int, Collected] = {}  # by actor, the oldest first
        self._changed = threading.Condition()
        self._counts = dict.fromkeys(("produced", "trained", "discarded", "held"), 0)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of all rollouts by their fate, at one moment."""
        with self._changed:
            return self._counts | {"waiting": len(self._waiting)}

    def put(self, collected: Collected, stopped: Callable[[], bool]) -> None:
        """Add a rollout once the actor's last one is taken; discard it once `stopped`."""
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
        """Take the oldest rollout, which is `held` from then on.

        Args:
            actor: take this actor's rollout; None: any.
            timeout: seconds to wait.

        Returns:
            The rollout; None if there is none in time.
        """

        def is_available() -> bool:
            if actor is None:
                return bool(self._waiting)
            return actor in self._waiting

        with self._changed:
            if not self._changed.wait_for(is_available, timeout):
                return None
            self._counts["held"] += 1
            self._changed.notify_all()
            oldest = next(iter(self._waiting))
            return self._waiting.pop(oldest if actor is None else actor)

    def train(self, count: int) -> None:
        """Count `count` rollouts that were held as trained on."""
        with self._changed:
            self._counts["held"] -= count
            self._counts["trained"] += count

    def discard(self) -> None:
        """Discard all rollouts that wait or are held, at the end of a run."""
        with self._changed:
            self._counts["discarded"] += len(self._waiting) + self._counts["held"]
            self._counts["held"] = 0
            self._waiting.clear()


KEPT = 3  # versions of the parameters: one in use, and two that the learner may have under way


class Slot(NamedTuple):
    """One version of the parameters on one device."""

    version: int  # number of updates that made them
    params: Any


class ParameterSlots:
    """The newest versions of the parameters on the device of every reader; safe for threads."""

    def __init__(self, devices: Sequence[Device]):
        self._devices = set(devices)
        self._versions: deque[dict[Device, Slot]] = deque(maxlen=KEPT)  # the newest last
        self._changed = threading.Condition()

    def publish(self, version: int, params: Any) -> None:
        """Copy `params` to every reader's device.

        They may still be under computation: readers get them once they are ready. No update may
        donate their arrays.
        """
        local = jax.tree.map(_first_shard, params)
        placed = {}
        for device in self._devices:
            placed[device] = Slot(version, jax.device_put(local, device))
        with self._changed:
            self._versions.append(placed)
            self._changed.notify_all()

    def latest(self, device: Device) -> Slot:
        """The newest version that is computed, or else the oldest.

        The first version must have been published.
        """
        with self._changed:
            slots = [placed[device] for placed in self._versions]
        oldest, *newer = slots
        for slot in reversed(newer):
            if all(x.is_ready() for x in jax.tree.leaves(slot.params)):
                return slot
        return oldest

    def wait_for(self, version: int, device: Device, timeout: float) -> Slot | None:
        """Wait for this version to be published and computed.

        Returns:
            The parameters; None if they are not published within `timeout` seconds.
        """

        def published() -> Slot | None:
            for placed in self._versions:
                if placed[device].version == version:
                    return placed[device]
            return None

        with self._changed:
            slot = self._changed.wait_for(published, timeout)
        if slot is None:
            return None
        return Slot(version, jax.block_until_ready(slot.params))


def _first_shard(x: Any) -> Any:
    """This process's first copy of a replicated array; other values as they are."""
    return x.addressable_data(0) if isinstance(x, jax.Array) else x
