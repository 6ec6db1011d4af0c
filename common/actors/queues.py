"""Between actors and a learner: rollouts in bounded queues that account for every one, and published parameters."""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from common.actors.watchdog import POLL_INTERVAL

FATES = ("produced", "trained", "dropped", "discarded")  # all were produced, each then met one of the others

OnFull = Literal["block", "drop-oldest"]


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
    memory: Any  # [1, N, ...] what a recurrent policy carried into the first step; () without recurrence


class Collected(NamedTuple):
    """A rollout and what happened in it."""

    actor: int
    rollout: HostRollout
    returns: list[float]  # of the episodes that ended in it
    lengths: list[int]
    info: Sequence[tuple[str, float, int]] = ()  # a step's metric of --log-info, as `Meters` adds it up


class RolloutQueues:
    """One queue per actor, each holding up to `size` rollouts.

    At any time `produced == trained + dropped + discarded + waiting + held`.
    """

    def __init__(
        self,
        num_actors: int,
        size: int,
        on_full: OnFull,
        before: dict[str, int] | None = None,
        ahead: float = math.inf,
    ):
        """Where a queue is full, `put` waits ("block") or makes room ("drop-oldest").

        Counting goes on from `before`, of which nothing is under way any more. There are `ahead` places, each for a
        rollout from before it is collected until an update with it is over.
        """
        self._queues: list[deque[tuple[int, Collected]]] = [deque() for _ in range(num_actors)]
        self._size, self._on_full = size, on_full
        self._changed = threading.Condition()
        self._counts = dict.fromkeys(FATES, 0) | (before or {})
        gone = sum(self._counts[name] for name in FATES if name != "produced")
        self._counts["discarded"] += self._counts["produced"] - gone
        self._held, self._places = 0, ahead

    @property
    def counts(self) -> dict[str, int]:
        """What became of all rollouts, at one moment."""
        with self._changed:
            return self._counts | {"waiting": self._waiting, "held": self._held}

    @property
    def _waiting(self) -> int:
        return sum(map(len, self._queues))

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Wait for a place for a rollout, and take it."""
        with self._changed:
            while self._places < 1 and not stopped():
                self._changed.wait(POLL_INTERVAL)
            self._places -= 1

    def leave(self, count: int) -> None:
        """Give back the places of rollouts that came to nothing, or from which updates have learned."""
        with self._changed:
            self._places += count
            self._changed.notify_all()

    def put(self, collected: Collected, stopped: Callable[[], bool]) -> None:
        """Add a rollout at its actor's end; it is discarded where there is no room before `stopped`."""
        queue = self._queues[collected.actor]
        with self._changed:
            while self._on_full == "block" and len(queue) >= self._size and not stopped():
                self._changed.wait(POLL_INTERVAL)
            self._counts["produced"] += 1
            if stopped():
                self._counts["discarded"] += 1
                return
            if len(queue) >= self._size:
                queue.popleft()
                self._counts["dropped"] += 1
                self._places += 1
            queue.append((self._counts["produced"], collected))
            self._changed.notify_all()

    def take(self, actor: int | None, timeout: float) -> Collected | None:
        """The oldest rollout of `actor`, or of any; it is `held` from then on. None where none comes in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._first(actor) is not None, timeout):
                return None
            _, collected = self._queues[self._first(actor)].popleft()
            self._held += 1
            self._changed.notify_all()
            return collected

    def train(self, count: int) -> None:
        """Account for `count` rollouts that were held and are learned from now."""
        with self._changed:
            self._held -= count
            self._counts["trained"] += count
            self._changed.notify_all()

    def discard(self) -> None:
        """Give up all that waits and is held, at the end of a run."""
        with self._changed:
            self._counts["discarded"] += self._waiting + self._held
            self._held = 0
            for queue in self._queues:
                queue.clear()

    def _first(self, actor: int | None) -> int | None:
        """Which queue to take from; None while that has nothing."""
        filled = [index for index in range(len(self._queues)) if self._queues[index] and actor in (None, index)]
        return min(filled, key=lambda index: self._queues[index][0][0], default=None)


KEPT = 3  # versions: one in use, and two that the learner may have under way


class Slot(NamedTuple):
    """One version of the parameters on one device."""

    version: int  # updates behind it
    params: Any


class ParameterSlots:
    """The newest versions, on the device of every reader. Safe for any number of threads."""

    def __init__(self, devices: list[jax.Device]):
        self._devices = list(dict.fromkeys(devices))
        self._slots: dict[int, dict[jax.Device, Any]] = {}
        self._changed = threading.Condition()

    def publish(self, version: int, params: Any) -> None:
        """Copy `params`, arrays that no update may donate, to every reader's device.

        They may still be under computation: readers get them once they are there.
        """
        local = jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, params)
        placed = {device: jax.device_put(local, device) for device in self._devices}
        with self._changed:
            self._slots[version] = placed
            for old in sorted(self._slots)[:-KEPT]:
                del self._slots[old]
            self._changed.notify_all()

    def latest(self, device: jax.Device) -> Slot:
        """The newest version that is computed. The first version has to be published by then."""
        with self._changed:
            newest_first = sorted(self._slots.items(), reverse=True)
        for version, placed in newest_first[:-1]:
            if all(x.is_ready() for x in jax.tree.leaves(placed[device])):
                return Slot(version, placed[device])
        version, placed = newest_first[-1]
        return Slot(version, placed[device])

    def settle(self, version: int) -> None:
        """Block until the newest of the versions up to this one is computed, so that `latest` returns no older one."""
        with self._changed:
            placed = self._slots[max(known for known in self._slots if known <= version)]
        jax.block_until_ready(list(placed.values()))  # as a dictionary it would have to be sorted by device

    def wait_for(self, version: int, device: jax.Device, timeout: float) -> Slot | None:
        """Exactly this version, computed; None where it is not published within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._slots, timeout):
                return None
            params = self._slots[version][device]
        return Slot(version, jax.block_until_ready(params))
