"""All actors of a run: each in a thread of its own, watched, and restarted where it fails.

with ActorPool(actors, slots, queues, limits, ...) as actor_pool:
    collected = actor_pool.take(stopped)
"""

import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from common.actors.actor import Actor
from common.actors.queues import Collected, ParameterSlots, RolloutQueues, Slot
from common.actors.watchdog import POLL_INTERVAL, Limits, Stopped, Worker, describe, stop_workers
from common.cli.errors import FailedEnvError, TrainingError, UnusableEnvError
from common.device import multihost
from common.envs.suite_tools import reason


class ActorsFailed(TrainingError):
    """Actors can deliver no more. What the learner has learned so far is fine."""


class Schedule(NamedTuple):
    """With lockstep: which rollout is learned from when, and which parameters it is collected with."""

    num_actors: int
    rollouts_per_update: int
    publish_interval: int
    first: int  # updates done before
    lag: int  # updates between a rollout's policy and the one that learns from it

    def version(self, actor: int, index: int) -> int:
        """The version for an actor's rollout number `index`: the newest that exists while its update is prepared."""
        update = (index * self.num_actors + actor) // self.rollouts_per_update
        return self.first + max(update - self.lag, 0) // self.publish_interval * self.publish_interval


class ActorPool:
    """All actors: each in a thread of its own, or with `serial` all in the caller's, one rollout at a time."""

    def __init__(
        self,
        actors: list[Actor],
        slots: ParameterSlots,
        queues: RolloutQueues,
        limits: Limits,
        warn: Callable[[str], None],
        schedule: Schedule | None = None,
        serial: bool = False,
        restarts: int = 0,
    ):
        """With a `schedule` (lockstep) everything happens in its fixed order, else as soon as it can.

        `restarts` is how many there have been before.
        """
        self.actors, self.queues, self.limits = actors, queues, limits
        self.restarts = Restarts(limits, warn, restarts)
        self._slots, self._warn, self._schedule, self._serial = slots, warn, schedule, serial
        self._taken = 0
        self._stop = threading.Event()
        self._failure: ActorsFailed | None = None

    def __enter__(self) -> "ActorPool":
        for actor in () if self._serial else self.actors:
            actor.run(partial(self._run, actor))
        return self

    def __exit__(self, *error: Any) -> None:
        """End the threads and close all environments, see `watchdog.stop_workers`."""
        self._stop.set()
        stuck = stop_workers(self.actors)
        for actor in self.actors if self._serial else ():
            actor.close()
        self.queues.discard()
        if stuck:
            self._warn(f"actors that do not answer were left behind: {describe(stuck)}")

    def take(self, stopped: Callable[[], bool]) -> Collected | None:
        """The next rollout to learn from; None once `stopped`.

        Raises ActorsFailed where the actors have given up, are stuck, or deliver nothing for too long.
        """
        wanted = self._taken % len(self.actors) if self._schedule else None
        if self._serial:
            self._collect_now(self.actors[wanted], stopped)
        began = time.monotonic()
        while not stopped():
            self._raise_failures(time.monotonic() - began)
            collected = self.queues.take(wanted, POLL_INTERVAL)
            if collected is not None:
                self._taken += 1
                return collected
        return None

    def _raise_failures(self, waited: float) -> None:
        if self._failure:
            raise self._failure
        for actor in () if self._serial else self.actors:  # in one thread nobody can be late, but in a debugger
            flag = actor.stuck(self.limits)
            if flag:
                raise ActorsFailed(f"{actor.name} is stuck ({flag}); {describe(self.actors)}")
        if waited > self.limits.learner:
            flag = f"--learner-timeout {self.limits.learner:g}"
            raise ActorsFailed(f"the learner got no rollout for {waited:.0f} s ({flag}); {describe(self.actors)}")

    def _run(self, actor: Actor) -> None:
        """The thread of one actor."""
        try:
            while self._attempt(actor, lambda: self._deliver_for_ever(actor), self._stop.is_set):
                pass
            actor.close()
        except BaseException as error:  # a thread that ends without a word would leave the run waiting
            self._failure = ActorsFailed(f"the thread of {actor.name} ended: {type(error).__name__}: {error}")
        actor.note("ended")

    def _collect_now(self, actor: Actor, stopped: Callable[[], bool]) -> None:
        def once():
            if actor.envs is None:
                actor.start()
            self.queues.put(actor.collect(self._chooser(actor, stopped)), stopped)

        while self._attempt(actor, once, stopped) and not self.queues.counts["waiting"]:
            pass

    def _deliver_for_ever(self, actor: Actor) -> None:
        actor.start()
        while not self._stop.is_set():
            with actor.doing("put", "wait_put"):
                self.queues.begin(self._stop.is_set)
            try:
                collected = actor.collect(self._chooser(actor, self._stop.is_set))
            except BaseException:
                self.queues.leave(1)
                raise
            with actor.doing("put", "wait_put"):
                self.queues.put(collected, self._stop.is_set)

    def _chooser(self, actor: Actor, stopped: Callable[[], bool]) -> Callable[[Slot | None], Slot]:
        """Where the actor's next rollout gets its parameters from; raises Stopped once it is time."""
        version = self._schedule and self._schedule.version(actor.index, actor.rollouts)

        def newest(_: Slot | None) -> Slot:
            if stopped():
                raise Stopped
            return self._slots.latest(actor.device)

        def scheduled(slot: Slot | None) -> Slot:
            while not stopped():
                slot = slot or self._slots.wait_for(version, actor.device, POLL_INTERVAL)
                if slot:
                    return slot
            raise Stopped

        return newest if self._schedule is None else scheduled

    def _attempt(self, actor: Actor, work: Callable[[], None], stopped: Callable[[], bool]) -> bool:
        """Do `work`; where it raises, make the actor ready to begin anew. Returns whether to go on."""
        try:
            work()
        except Stopped:
            return False
        except BaseException as error:  # environments may also call sys.exit
            if stopped():
                return False
            actor.close()
            if multihost.has_lost(error):  # in its parameters: the learner finds out, too
                return False
            restarted = self.restarts.wait(actor, error, stopped)
            if not restarted and not stopped():
                self._failure = ActorsFailed(f"{actor.name} {self.restarts.given_up(error)}")
            return restarted
        return not stopped()


class Restarts:
    """The restarts of several workers, counted together. Safe for any number of threads."""

    def __init__(self, limits: Limits, warn: Callable[[str], None], before: int = 0):
        """Counting goes on from `before`; the limit is for those to come."""
        self.count, self._before = before, before
        self._limits, self._warn = limits, warn
        self._lock = threading.Lock()

    def wait(self, worker: Worker, error: BaseException, stopped: Callable[[], bool]) -> bool:
        """Say that `worker` failed and wait until it may begin anew: at once, but not soon after its last restart.

        Returns False where it may not any more, where it would not help, or once `stopped`.
        """
        if isinstance(error, UnusableEnvError):
            return False
        why = _described(error)
        number = self._next()
        if not number:
            self._warn(f"{worker.name} failed: {why}")
            return False
        now = time.monotonic()
        until = max(worker.restarted + self._limits.restart_interval, now)
        when = f"in {until - now:.0f} s" if until > now else "now"
        self._warn(f"{worker.name} failed and restarts {when} ({number} of {self._limits.max_restarts}): {why}")
        with worker.doing("wait to restart"):
            while time.monotonic() < until and not stopped():
                time.sleep(POLL_INTERVAL)
        worker.restarts, worker.restarted = worker.restarts + 1, time.monotonic()
        return not stopped()

    def given_up(self, error: BaseException) -> str:
        """What to say of a worker that does not begin anew any more."""
        if isinstance(error, UnusableEnvError):
            return f"failed: {error}"
        return f"failed, after {self.count - self._before} restarts (--max-restarts): {reason(error)}"

    def _next(self) -> int:
        """The number of one more restart, or 0 where there may be none."""
        with self._lock:
            if self.count - self._before >= self._limits.max_restarts:
                return 0
            self.count += 1
            return self.count - self._before


def _described(error: BaseException) -> str:
    """What happened; where that was in somebody's code, with the way to it."""
    known = isinstance(error, FailedEnvError)
    return str(error) if known else "\n" + "".join(traceback.format_exception(error)).rstrip()
