"""All actors of a run, each in a thread of its own. They are watched, and get new environments
where they fail; their rollouts become batches for the learner, whose parameters they get.

with Batches(args, ...) as batches:
    while batch := batches.next(stopped, leaving):
        state, published, metrics = update(state, batch)
        batches.publish(published)
"""

import itertools
import math
import operator
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.actors.actor import Actor, HostEnvKind
from pmaprl.actors.host_drivers import HostDriver
from pmaprl.actors.threads import (
    POLL_INTERVAL,
    Collected,
    HostRollout,
    ParameterSlots,
    RolloutQueue,
    Slot,
    Stopped,
    Worker,
    stop_workers,
)
from pmaprl.cli.errors import FailedEnvError, TrainingError, UsageError
from pmaprl.cli.host_flags import HostEnvArgs
from pmaprl.device import multihost
from pmaprl.device.agents import at_start
from pmaprl.device.interface import RunState
from pmaprl.device.outcome import Outcome
from pmaprl.device.statistics import WINDOW, MetricSums, OptionalMetric
from pmaprl.envs.suite_tools import reason


class ActorsFailed(TrainingError):
    """Actors can deliver no more. What the learner has learned so far is fine."""


class Batch(NamedTuple):
    """What an update learns from; of several processes each has its own."""

    rollouts: tuple[HostRollout, ...]
    # [D] the same for each of this process's learner devices: whether it wants to stop; () if it is
    # alone
    wants_to_stop: Any


def example_batch(
    args: HostEnvArgs, env: HostEnvKind, driver: HostDriver, num_learners: int
) -> Batch:
    """Shapes of what `Batches.next` returns."""

    def rollout() -> HostRollout:
        key = jax.random.key(0)
        seen = at_start(env.spec.example_obs(args.envs_per_actor))
        published = driver.publish(*driver.begin(key, key))
        memory = driver.memory(args.envs_per_actor)
        *acted, memory = driver.act_on_host(
            published, memory, jax.random.key_data(key), jnp.uint32(0), seen
        )
        outcome = seen.reward, *[seen.first] * 3, jnp.zeros_like(seen.reward, jnp.int32)
        step = HostRollout((), *acted, *outcome, seen.obs if env.resets_in_step else None, (), ())
        at_first = {"first": seen.first[None], "memory": repeated(memory, 1)}
        steps = repeated(step, args.num_steps)._replace(
            obs=repeated(seen.obs, args.num_steps + 1), **at_first
        )
        return over_learners(steps, num_learners)

    def repeated(tree: Any, count: int) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), tree)

    wants_to_stop = jax.ShapeDtypeStruct((num_learners,), bool) if args.processes > 1 else ()
    return Batch((jax.eval_shape(rollout),) * args.own_rollouts, wants_to_stop)


def over_learners(rollout: HostRollout, num_learners: int) -> HostRollout:
    """Arrays [T, N, ...] as `pmap` takes them over the learner's devices: [D, T, N / D, ...]."""

    def split(x):
        steps, envs, *shape = x.shape
        return x.reshape(steps, num_learners, envs // num_learners, *shape).swapaxes(0, 1)

    return jax.tree.map(split, rollout)


class Batches:
    """All actors at work, a context manager: see the module's text."""

    def __init__(
        self,
        args: HostEnvArgs,
        driver: HostDriver,
        learner: Any,
        started: RunState,
        devices: list[jax.Device],
        sharding: jax.sharding.Sharding,
        warn: Callable[[str], None],
    ):
        """Actors on `devices` act at first with `learner`, and batches go where `sharding` says."""
        self._args = args
        self._sharding = sharding
        self._warn = warn
        self._version = self._first_version = int(started.updates)
        devices = [device for device in devices for _ in range(args.actor_threads)]
        act = jax.jit(driver.act_on_host)
        memory = jax.device_get(driver.memory(args.envs_per_actor))
        shared = args, act, memory, self._version
        first = jax.process_index() * len(devices)
        self.actors = [
            Actor(number, device, *shared) for number, device in enumerate(devices, first)
        ]
        self._slots = ParameterSlots(devices)
        self._slots.publish(self._version, driver.publish(learner, started))
        self.queue = RolloutQueue()
        self._taken = 0
        self._stop = threading.Event()
        self._failures = itertools.count(1)  # of all actors; to take the next number is atomic
        self.learner = Worker("learner", ("wait_get", "transfer", "update", "publish"))
        self._tallies: list[MetricSums] = []  # of the rollouts since the last row, as the episodes
        self._episodes: list[tuple[float, int]] = []
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._unseen: set[str] = set()  # metrics of --log-info that a warning has named
        self.figures: dict[str, float] = {}  # counts and mean seconds of the whole run, at its end

    def __enter__(self) -> "Batches":
        for actor in self.actors:
            actor.run(partial(self._run, actor))
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """End the threads and close all environments, see `stop_workers`."""
        self._stop.set()
        stuck = stop_workers(self.actors)
        self.queue.discard()
        if stuck:
            self._warn(f"actors that do not answer were left behind: {'; '.join(map(str, stuck))}")
        self.figures |= self._figures(alone=True)
        if not kind:
            self.figures |= self._figures(alone=False)  # if the others, too, come here

    def next(self, stopped: Callable[[], bool], wants_to_stop: bool) -> Batch | None:
        """The rollouts of an update, on their way to the learner's devices; None once `stopped`.

        Others are told whether this process is `wants_to_stop`. Raises ActorsFailed where the
        actors have given up, are stuck, or deliver nothing for too long.
        """
        rollouts = []
        while len(rollouts) < self._args.own_rollouts:
            with self.learner.doing("wait_get"):
                collected = self._take(stopped)
            if collected is None:
                return None
            self._tallies.append(
                tally_of(collected, self._version, getattr(self._args, "max_policy_lag", 0))
            )
            self._episodes += collected.episodes
            with self.learner.doing("transfer"):
                share = over_learners(collected.rollout, self._sharding.num_devices)
                rollouts.append(jax.device_put(share, self._sharding))
        self.queue.train(self._args.own_rollouts)
        told = (
            np.full(self._sharding.num_devices, wants_to_stop) if self._args.processes > 1 else ()
        )
        return Batch(tuple(rollouts), told)

    def _take(self, stopped: Callable[[], bool]) -> Collected | None:
        wanted = self.actors[self._taken % len(self.actors)].number if self._args.lockstep else None
        began = time.monotonic()
        while not stopped():
            self._check_threads(time.monotonic() - began)
            if collected := self.queue.take(wanted, POLL_INTERVAL):
                self._taken += 1
                return collected
        return None

    def _check_threads(self, waited: float) -> None:
        doing = "; ".join(map(str, self.actors))
        for actor in self.actors:
            if actor.result.done():
                actor.result.result()  # raises what ended it
            if flag := actor.stuck(self._args):
                raise ActorsFailed(f"{actor.name} is stuck ({flag}); {doing}")
        if waited > self._args.learner_timeout:
            flag = f"--learner-timeout {self._args.learner_timeout:g}"
            raise ActorsFailed(f"the learner got no rollout for {waited:.0f} s ({flag}); {doing}")

    def publish(self, params: Any) -> None:
        """Note an update, and give its parameters to the actors."""
        self._version += 1
        with self.learner.doing("publish"):
            self._slots.publish(self._version, params)

    def _run(self, actor: Actor) -> None:
        """The thread of one actor: rollouts until the run ends, after an error from new
        environments.
        """
        try:
            while not self._stop.is_set():
                try:
                    self._deliver(actor)
                except BaseException as error:  # environments may also call sys.exit
                    actor.close()
                    # In its parameters: the learner learns of it
                    if self._stop.is_set() or multihost.has_lost(error):
                        return
                    self._allow_restart(actor, error)
        finally:
            actor.close()

    def _deliver(self, actor: Actor) -> None:
        if actor.envs is None:
            actor.start()
        collected = actor.collect(partial(self._parameters, actor))
        with actor.doing("wait_put"):
            self.queue.put(collected, self._stop.is_set)

    def _parameters(self, actor: Actor, slot: Slot | None) -> Slot:
        """Those for an actor's next step, after those of `slot`: the newest, or in a fixed order
        the same.
        """
        while not self._stop.is_set():
            if not self._args.lockstep:
                return self._slots.latest(actor.device)
            # The version of `lag` updates before the one that will learn from the rollout
            place = actor.rollouts * len(self.actors) + self.actors.index(actor)
            version = self._first_version + max(
                place // self._args.own_rollouts - self._args.lag, 0
            )
            if slot := slot or self._slots.wait_for(version, actor.device, POLL_INTERVAL):
                return slot
        raise Stopped

    def _allow_restart(self, actor: Actor, error: BaseException) -> None:
        """Say that an actor begins anew after an error. Raises ActorsFailed where it may not."""
        number = next(self._failures)
        most = self._args.max_restarts
        # What happened; where that was in somebody's code, with the way to it
        origin = error.__cause__ if isinstance(error, UsageError) and error.__cause__ else error
        known = isinstance(origin, FailedEnvError | UsageError)
        why = str(error) if known else "\n" + "".join(traceback.format_exception(origin)).rstrip()
        if number > most:
            self._warn(f"{actor.name} failed: {why}")
            text = f"{actor.name} failed, after {most} restarts (--max-restarts): {reason(error)}"
            raise ActorsFailed(text) from error
        self._warn(f"{actor.name} failed and restarts ({number} of {most}): {why}")
        actor.restarts += 1

    def row(self) -> dict[str, Any]:
        """The metrics of actors and queues since the last call, of all processes, which call at the
        same time.
        """
        tally = reduce(operator.add, self._tallies)
        parts = multihost.allgather((tally.value, tally.count, self._episodes))
        self._tallies = []
        self._episodes = []
        tally = reduce(
            operator.add, (MetricSums(*jax.tree.map(np.float64, part[:2])) for part in parts)
        )
        row = tally.metrics()
        count = tally.count["episode/return"]
        unseen = {
            name for name, reports in tally.count.items() if name.startswith("env/") and not reports
        }
        if count and unseen - self._unseen:
            self._warn(
                f"no environment has reported {', '.join(sorted(unseen))}, which --log-info names"
            )
            self._unseen |= unseen
        if multihost.is_first() and 0 < row["batch/valid"] <= row["batch/too_old"]:
            self._warn(
                "every step of late was older than --max-policy-lag: nothing was learned from them"
            )
        self._recent.extend(episode for *_, episodes in parts for episode in episodes)
        recent = np.array(self._recent or [(np.nan, np.nan)], float).mean(axis=0)
        newest = {
            f"episode/{name}_last{WINDOW}": x
            for name, x in zip(("return", "length"), recent, strict=True)
        }
        return row | {"episode/count": count} | newest | self._figures(alone=False)

    def _figures(self, alone: bool) -> dict[str, float]:
        """Counts, and mean seconds, so far: of this process `alone`, or of all, which call at the
        same time.
        """
        counts = {f"rollouts/{name}": count for name, count in self.queue.counts.items()}
        counts |= {"actors/restarts": sum(actor.restarts for actor in self.actors)}
        phases = [actor.seconds for actor in self.actors]
        seconds = {
            f"time/actor_{name}": float(np.mean([one[name] for one in phases]))
            for name in phases[0]
        }
        seconds |= {f"time/learner_{name}": value for name, value in self.learner.seconds.items()}
        parts = [(counts, seconds)] if alone else multihost.allgather((counts, seconds))
        total = {name: sum(part[name] for part, _ in parts) for name in counts}
        return total | {name: sum(part[name] for _, part in parts) / len(parts) for name in seconds}


def tally_of(collected: Collected, version: int, max_lag: int) -> MetricSums:
    """The metrics of a rollout that is learned from now, with `version` updates done; 0 is any
    lag.
    """
    valid = collected.rollout.valid
    lag = (version - collected.rollout.version[valid]).astype(float)
    too_old = np.sum(lag > max_lag) if max_lag else np.int64(0)
    reports = {
        "batch/valid": OptionalMetric(np.sum(valid), valid.size),
        "batch/too_old": OptionalMetric(too_old, valid.size),
    }
    returns, lengths = np.array(collected.episodes, float).reshape(-1, 2).T
    for name, values in {
        "policy/lag": lag,
        "episode/return": returns,
        "episode/length": lengths,
    }.items():
        reports[name] = OptionalMetric(np.sum(values), len(values))
        reports[f"{name}_min"] = OptionalMetric(np.min(values, initial=np.inf), len(values))
        reports[f"{name}_max"] = OptionalMetric(np.max(values, initial=-np.inf), len(values))
    return MetricSums.of(reports) | collected.info


class UpdateMetrics:
    """The metrics of a chunk's updates, each read when the update after it is under way."""

    def __init__(self):
        self.updates = 0
        # Whether a process wanted to stop when one of the updates began, all but the newest
        self.wants_to_stop = False
        # By metric, the index of the first update in which it was not finite
        self.broken: dict[str, np.ndarray] = {}
        self._tally: MetricSums | None = None
        self._gauges: dict[str, float] = {}  # of the newest update
        self._newest: tuple | None = None

    def add(
        self, tally: MetricSums, snapshot_metrics: dict[str, jax.Array], wants_to_stop: Any
    ) -> None:
        """Take the metrics of an update just dispatched, and its batch's `wants_to_stop`; waits for
        the update before it.
        """
        self._read_newest()
        self._newest = tally, snapshot_metrics, wants_to_stop
        self.updates += 1

    def read(self, more: dict[str, Any]) -> Outcome:
        """What the metrics of the updates come to, with `more` behind them."""
        self._read_newest()
        metrics = self._tally.metrics() | self._gauges | more
        return Outcome(metrics=metrics, broken=self.broken, counts={}, updates=self.updates)

    def _read_newest(self) -> None:
        if self._newest is None:
            return
        (tally, self._gauges, wants_to_stop), self._newest = jax.device_get(self._newest), None
        self._tally = self._tally + tally if self._tally else tally
        self.wants_to_stop |= bool(np.any(wants_to_stop))
        for name, value in tally.value.items():
            if not math.isfinite(value):
                self.broken.setdefault(name, np.array([self.updates - 1]))
