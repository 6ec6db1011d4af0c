"""All actors of a run: each in a thread of its own, watched, and with new environments where it fails.

with ActorPool(args, ...) as actor_pool:
    collected = actor_pool.take(stopped)
"""

import math
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax

from common.actors.actor import Actor, env_maker
from common.actors.queues import FATES, Collected, ParameterSlots, RolloutQueue, Slot
from common.actors.watchdog import POLL_INTERVAL, Stopped, stop_workers
from common.cli.errors import FailedEnvError, TrainingError, UnusableEnvError
from common.cli.host_flags import HostEnvArgs
from common.device import multihost
from common.envs.suite_tools import reason

UNLIMITED = 2**31


class ActorsFailed(TrainingError):
    """Actors can deliver no more. What the learner has learned so far is fine."""


class ActorPool:
    """All actors: each in a thread of its own, or with --serial all in the caller's, one rollout at a time."""

    def __init__(
        self,
        args: HostEnvArgs,
        act: Callable,
        memory: Any,
        params: Any,
        version: int,
        logged: dict[str, str],
        devices: list[jax.Device],
        counters: dict[str, int],
        warn: Callable[[str], None],
    ):
        """Actors on `devices` act with `act` and `memory`, see `Actor`, at first with `params`, behind which are
        `version` updates. `logged`: see `HostEnvKind`. Counting goes on from `counters`, which are of all processes.
        """
        counters = counters if multihost.is_first() else {}
        devices = [device for device in devices for _ in range(args.actor_threads)]
        make_envs, seed = env_maker(args, args.envs_per_actor, args.env_params), (args.seed, version)
        more = act, args.num_steps, seed, memory, jax.process_index() * len(devices), logged
        self.actors = [Actor(index, make_envs, device, *more) for index, device in enumerate(devices)]
        self.slots = ParameterSlots(devices)
        self.slots.publish(version, params)
        waiting = 1 if math.isinf(args.rollouts_ahead) else math.inf  # for the learner, of each actor
        self.queue = RolloutQueue(waiting, {name: counters.get(name, 0) for name in FATES})
        self.restarts = self._before = counters.get("restarts", 0)
        self._args, self._warn, self._first_version, self._taken = args, warn, version, 0
        self._places = threading.Semaphore(int(min(args.rollouts_ahead, UNLIMITED)))  # for rollouts under way
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads: list[Future] = []

    def __enter__(self) -> "ActorPool":
        self._threads = [actor.run(partial(self._run, actor)) for actor in self.actors if not self._args.serial]
        return self

    def __exit__(self, *error: Any) -> None:
        """End the threads and close all environments, see `watchdog.stop_workers`."""
        self._stop.set()
        stuck = stop_workers(self.actors)
        for actor in self.actors if self._args.serial else ():
            actor.close()
        self.queue.discard()
        if stuck:
            self._warn(f"actors that do not answer were left behind: {'; '.join(map(str, stuck))}")

    def take(self, stopped: Callable[[], bool]) -> Collected | None:
        """The next rollout to learn from; None once `stopped`.

        Raises ActorsFailed where the actors have given up, are stuck, or deliver nothing for too long.
        """
        wanted = self._taken % len(self.actors) if self._args.fixed_order else None
        began = time.monotonic()
        while not stopped():
            if self._args.serial:
                self._deliver(self.actors[wanted], stopped)
            else:
                self._check_threads(time.monotonic() - began)
            collected = self.queue.take(wanted, POLL_INTERVAL)
            if collected is not None:
                self._taken += 1
                return collected
        return None

    def leave_places(self, count: int) -> None:
        """Let actors begin `count` rollouts in place of those that came to nothing or whose updates are over."""
        if count:
            self._places.release(count)

    def _check_threads(self, waited: float) -> None:
        for thread in self._threads:
            if thread.done():
                thread.result()  # raises what ended it
        doing = "; ".join(map(str, self.actors))
        for actor in self.actors:
            if flag := actor.stuck(self._args):
                raise ActorsFailed(f"{actor.name} is stuck ({flag}); {doing}")
        if waited > self._args.learner_timeout:
            flag = f"--learner-timeout {self._args.learner_timeout:g}"
            raise ActorsFailed(f"the learner got no rollout for {waited:.0f} s ({flag}); {doing}")

    def _run(self, actor: Actor) -> None:
        """The thread of one actor."""
        try:
            while self._deliver(actor, self._stop.is_set):
                pass
        finally:
            actor.close()

    def _deliver(self, actor: Actor, stopped: Callable[[], bool]) -> bool:
        """Let an actor collect a rollout, with new environments where it has none. Returns whether to go on.

        Raises ActorsFailed where it fails and may not begin anew.
        """
        try:
            if actor.envs is None:
                actor.start()
            collected = self._collect(actor, stopped)
            with actor.doing("wait_put"):
                self.queue.put(collected, stopped)
        except Stopped:
            return False
        except BaseException as error:  # environments may also call sys.exit
            actor.close()
            if stopped() or multihost.has_lost(error):  # in its parameters: the learner finds out, too
                return False
            self._allow_restart(actor, error)
        return not stopped()

    def _collect(self, actor: Actor, stopped: Callable[[], bool]) -> Collected:
        """A rollout, once there is a place for one more under way."""
        with actor.doing("wait_put"):
            while not self._places.acquire(timeout=POLL_INTERVAL):
                if stopped():
                    raise Stopped
        try:
            return actor.collect(partial(self._parameters, actor, stopped))
        except BaseException:
            self.leave_places(1)
            raise

    def _parameters(self, actor: Actor, stopped: Callable[[], bool], slot: Slot | None) -> Slot:
        """Those for an actor's next step, after those of `slot`: the newest, or in a fixed order the same."""
        while not stopped():
            if not self._args.fixed_order:
                return self.slots.latest(actor.device)
            slot = slot or self.slots.wait_for(self._scheduled(actor), actor.device, POLL_INTERVAL)
            if slot:
                return slot
        raise Stopped

    def _scheduled(self, actor: Actor) -> int:
        """The version for an actor's next rollout: that of `lag` updates before the one that will learn from it."""
        update = (actor.rollouts * len(self.actors) + actor.index) // self._args.own_rollouts
        return self._first_version + max(update - self._args.lag, 0)

    def _allow_restart(self, actor: Actor, error: BaseException) -> None:
        """Say that an actor begins anew after an error. Raises ActorsFailed where it may not, or would fail again."""
        if isinstance(error, UnusableEnvError):
            raise ActorsFailed(f"{actor.name} failed: {error}") from error
        most = self._args.max_restarts
        with self._lock:
            number = self.restarts - self._before + 1
            allowed = number <= most
            self.restarts += allowed
        # What happened; where that was in somebody's code, with the way to it
        known = isinstance(error, FailedEnvError)
        why = str(error) if known else "\n" + "".join(traceback.format_exception(error)).rstrip()
        if not allowed:
            self._warn(f"{actor.name} failed: {why}")
            text = f"{actor.name} failed, after {most} restarts (--max-restarts): {reason(error)}"
            raise ActorsFailed(text) from error
        self._warn(f"{actor.name} failed and restarts ({number} of {most}): {why}")
        actor.restarts += 1
