"""All actors of a run, each in a thread of its own, and the batches that their rollouts become.

    with Batches(args, ...) as batches:
        while batch := batches.next(stopped, wants_to_stop):
            state, published, metrics = update(state, batch)
            batches.publish(published)

Actors are watched, and get new environments when they fail. They act with the parameters that the
learner publishes.
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
from jax import Array

from pmaprl.actors.actor import Actor, HostEnvKind
from pmaprl.actors.host_drivers import HostDriver
from pmaprl.actors.threads import (
    POLL_INTERVAL,
    ActorFlags,
    Collected,
    HostRollout,
    ParameterSlots,
    RolloutQueue,
    RolloutStep,
    Slot,
    Stopped,
    Worker,
    stop_workers,
)
from pmaprl.cli.errors import FailedEnvError, TrainingError, UsageError
from pmaprl.device.episodes import WINDOW
from pmaprl.device.interface import ArrayT, PolicyInput, RunState
from pmaprl.device.outcome import Outcome
from pmaprl.device.statistics import MetricSums, OptionalMetric
from pmaprl.envs.foreign_code import reason
from pmaprl.machine import multihost
from pmaprl.machine.devices import Device


class ActorsFailed(TrainingError):
    """Error of actors that can deliver no more; the learner's state is still fine."""


class Batch(NamedTuple):
    """Samples of one update; each process has its own."""

    rollouts: tuple[HostRollout[Array], ...]
    # [D] True if this process wants to stop, once per learner device of its own; () if it is alone
    wants_to_stop: Any


def example_batch(
    args: ActorFlags, env: HostEnvKind, driver: HostDriver, num_learners: int
) -> Batch:
    """Shapes of the batch that `Batches.next` returns."""

    def rollout() -> HostRollout[Array]:
        key = jax.random.key(0)
        seen = PolicyInput.at_start(env.spec.example_obs(args.envs_per_actor))
        published = driver.publish(*driver.begin(key, key))
        memory = driver.memory(args.envs_per_actor)
        action, extras, memory = driver.act_on_host(
            published, memory, jax.random.key_data(key), jnp.uint32(0), seen
        )
        step = RolloutStep(
            action=action,
            extras=extras,
            reward=seen.reward,
            terminated=seen.first,
            truncated=seen.first,
            valid=seen.first,
            version=jnp.zeros_like(seen.reward, jnp.int32),
            final_obs=seen.obs if env.resets_in_step else None,
        )
        steps = HostRollout.of(
            repeated(step, args.num_steps),
            obs=repeated(seen.obs, args.num_steps + 1),
            first=seen.first[None],
            memory=repeated(memory, 1),
        )
        return over_learners(steps, num_learners)

    def repeated(tree: Any, count: int) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), tree)

    wants_to_stop = jax.ShapeDtypeStruct((num_learners,), bool) if args.processes > 1 else ()
    return Batch((jax.eval_shape(rollout),) * args.own_rollouts, wants_to_stop)


def over_learners(rollout: HostRollout[ArrayT], num_learners: int) -> HostRollout[ArrayT]:
    """Split arrays [T, N, ...] over the learner's devices: [D, T, N / D, ...], as for `pmap`."""

    def split(x):
        steps, envs, *shape = x.shape
        return x.reshape(steps, num_learners, envs // num_learners, *shape).swapaxes(0, 1)

    return jax.tree.map(split, rollout)


class Batches:
    """Context manager in which all actors work: see the text of the module."""

    def __init__(
        self,
        args: ActorFlags,
        driver: HostDriver,
        learner: Any,
        started: RunState,
        devices: list[Device],
        sharding: jax.sharding.Sharding,
        warn: Callable[[str], None],
    ):
        """Make the actors, which begin with the context.

        Args:
            args: the flags.
            driver: acts and publishes.
            learner: the learner whose parameters the actors get first.
            started: the state in which the run begins.
            devices: the devices that actors act on.
            sharding: places batches on the learner's devices.
            warn: shows a warning.
        """
        self._args = args
        self._sharding = sharding
        self._warn = warn
        self._first_version = int(started.updates)
        self._version = self._first_version
        devices = [device for device in devices for _ in range(args.actor_threads)]
        act = jax.jit(driver.act_on_host)
        memory = jax.device_get(driver.memory(args.envs_per_actor))
        first = jax.process_index() * len(devices)
        self.actors = [
            Actor(number, device, args, act, memory, self._version)
            for number, device in enumerate(devices, first)
        ]
        self._slots = ParameterSlots(devices)
        self._slots.publish(self._version, driver.publish(learner, started))
        self.queue = RolloutQueue()
        self._taken = 0
        self._stop = threading.Event()
        # Number of failures of all actors; taking the next number is atomic
        self._failures = itertools.count(1)
        self.learner = Worker("learner", ("wait_get", "transfer", "update", "publish"))
        self._rollout_metrics: list[MetricSums] = []  # of the rollouts since the last row
        self._episodes: list[tuple[float, int]] = []  # that ended since the last row
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._unseen: set[str] = set()  # metrics of --log-info that a warning has named
        # Counts and mean seconds of the whole run, at its end
        self.extra_results: dict[str, float] = {}

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
            activities = "; ".join(map(str, stuck))
            self._warn(f"actors that do not answer were left behind: {activities}")
        self.extra_results |= self._extra_results(alone=True)
        if not kind:  # after an error other processes may not come here
            self.extra_results |= self._extra_results(alone=False)

    def next(self, stopped: Callable[[], bool], wants_to_stop: bool) -> Batch | None:
        """Take the rollouts of an update and send them to the learner's devices.

        Args:
            stopped: tells whether to give up waiting.
            wants_to_stop: True if this process wants to stop, which the batch tells the others.

        Returns:
            The batch; None once `stopped`.

        Raises:
            ActorsFailed: the actors have given up, are stuck, or deliver nothing for too long.
        """
        rollouts = []
        while len(rollouts) < self._args.own_rollouts:
            with self.learner.doing("wait_get"):
                collected = self._take(stopped)
            if collected is None:
                return None
            max_lag = getattr(self._args, "max_policy_lag", 0)
            self._rollout_metrics.append(tally_of(collected, self._version, max_lag))
            self._episodes += collected.episodes
            with self.learner.doing("transfer"):
                share = over_learners(collected.rollout, self._sharding.num_devices)
                rollouts.append(jax.device_put(share, self._sharding))
        self.queue.train(self._args.own_rollouts)
        if self._args.processes == 1:
            return Batch(tuple(rollouts), ())
        votes = np.full(self._sharding.num_devices, wants_to_stop)
        return Batch(tuple(rollouts), votes)

    def _take(self, stopped: Callable[[], bool]) -> Collected | None:
        """Take one rollout: under --lockstep the next actor's, otherwise the oldest."""
        number = None
        if self._args.lockstep:
            number = self.actors[self._taken % len(self.actors)].number
        began = time.monotonic()
        while not stopped():
            self._check_threads(time.monotonic() - began)
            collected = self.queue.take(number, POLL_INTERVAL)
            if collected:
                self._taken += 1
                return collected
        return None

    def _check_threads(self, waited: float) -> None:
        """Raise the error of an actor that has ended, or ActorsFailed if one is stuck."""
        activities = "; ".join(map(str, self.actors))
        for actor in self.actors:
            if actor.result.done():
                actor.result.result()  # raises the error that ended it
            flag = actor.stuck(self._args)
            if flag:
                raise ActorsFailed(f"{actor.name} is stuck ({flag}); {activities}")
        if waited > self._args.learner_timeout:
            flag = f"--learner-timeout {self._args.learner_timeout:g}"
            raise ActorsFailed(
                f"the learner got no rollout for {waited:.0f} s ({flag}); {activities}"
            )

    def publish(self, params: Any) -> None:
        """Count an update, and give its parameters to the actors."""
        self._version += 1
        with self.learner.doing("publish"):
            self._slots.publish(self._version, params)

    def _run(self, actor: Actor) -> None:
        """Collect rollouts until the run ends; after an error, in new environments.

        This is the thread of one actor.
        """
        try:
            self._deliver_until_stopped(actor)
        finally:
            actor.close()

    def _deliver_until_stopped(self, actor: Actor) -> None:
        while not self._stop.is_set():
            try:
                self._deliver(actor)
            except BaseException as error:  # environments may also call sys.exit
                actor.close()
                # Parameters of a lost process fail here too, but the learner reports the loss
                if self._stop.is_set() or multihost.has_lost(error):
                    return
                self._allow_restart(actor, error)

    def _deliver(self, actor: Actor) -> None:
        if actor.envs is None:
            actor.start()
        collected = actor.collect(partial(self._parameters, actor))
        with actor.doing("wait_put"):
            self.queue.put(collected, self._stop.is_set)

    def _parameters(self, actor: Actor, slot: Slot | None) -> Slot:
        """Parameters for the next step of an actor.

        These are the newest ones, or under --lockstep `slot`, with which the rollout began.
        """
        while not self._stop.is_set():
            if not self._args.lockstep:
                return self._slots.latest(actor.device)
            if slot is None:
                # The update that learns from this rollout is `lag` updates later
                place = actor.rollouts * len(self.actors) + self.actors.index(actor)
                updates = max(place // self._args.own_rollouts - self._args.lag, 0)
                version = self._first_version + updates
                slot = self._slots.wait_for(version, actor.device, POLL_INTERVAL)
            if slot:
                return slot
        raise Stopped

    def _allow_restart(self, actor: Actor, error: BaseException) -> None:
        """Warn that an actor restarts after an error.

        Raises:
            ActorsFailed: the actors have restarted as often as --max-restarts allows.
        """
        number = next(self._failures)
        most = self._args.max_restarts
        origin = error
        if isinstance(error, UsageError) and error.__cause__:
            origin = error.__cause__
        if isinstance(origin, FailedEnvError | UsageError):
            why = str(error)
        else:  # an error in a user's code is shown with the way to it
            why = "\n" + "".join(traceback.format_exception(origin)).rstrip()
        if number > most:
            self._warn(f"{actor.name} failed: {why}")
            text = f"{actor.name} failed, after {most} restarts (--max-restarts): {reason(error)}"
            raise ActorsFailed(text) from error
        self._warn(f"{actor.name} failed and restarts ({number} of {most}): {why}")
        actor.restarts += 1

    def row(self) -> dict[str, Any]:
        """Metrics of actors and queues since the last call, over all processes.

        All processes have to call it at the same time.
        """
        local = reduce(operator.add, self._rollout_metrics)
        parts = multihost.allgather((local.value, local.count, self._episodes))
        self._rollout_metrics = []
        self._episodes = []
        sums = []
        for value, count, episodes in parts:
            value, count = jax.tree.map(np.float64, (value, count))
            sums.append(MetricSums(value, count))
            self._recent.extend(episodes)
        total = reduce(operator.add, sums)
        row = total.metrics()
        num_episodes = total.count["episode/return"]
        row["episode/count"] = num_episodes
        if num_episodes:
            self._warn_of_unseen(total)
        if multihost.is_first() and 0 < row["batch/valid"] <= row["batch/too_old"]:
            self._warn(
                "all steps since the last row were older than --max-policy-lag: nothing was "
                "learned from them"
            )
        recent = np.array(self._recent or [(np.nan, np.nan)], float).mean(axis=0)
        row[f"episode/return_last{WINDOW}"] = recent[0]
        row[f"episode/length_last{WINDOW}"] = recent[1]
        return row | self._extra_results(alone=False)

    def _warn_of_unseen(self, total: MetricSums) -> None:
        """Name metrics of --log-info that no environment has reported, once each."""
        unseen = {
            name for name, reports in total.count.items() if name.startswith("env/") and not reports
        }
        if unseen - self._unseen:
            names = ", ".join(sorted(unseen))
            self._warn(f"no environment has reported {names}, which --log-info names")
            self._unseen |= unseen

    def _extra_results(self, alone: bool) -> dict[str, float]:
        """Counts and mean seconds of the run so far.

        Args:
            alone: of this process only; otherwise all processes have to call it at the same time.
        """
        counts = {f"rollouts/{name}": count for name, count in self.queue.counts.items()}
        counts["actors/restarts"] = sum(actor.restarts for actor in self.actors)
        seconds = {}
        for phase in self.actors[0].seconds:
            mean = np.mean([actor.seconds[phase] for actor in self.actors])
            seconds[f"time/actor_{phase}"] = float(mean)
        for phase, value in self.learner.seconds.items():
            seconds[f"time/learner_{phase}"] = value
        parts = [(counts, seconds)] if alone else multihost.allgather((counts, seconds))
        extra_results = {}
        for name in counts:
            extra_results[name] = sum(part[name] for part, _ in parts)
        for name in seconds:
            extra_results[name] = sum(part[name] for _, part in parts) / len(parts)
        return extra_results


def tally_of(collected: Collected, version: int, max_lag: int) -> MetricSums:
    """Metrics of a rollout that is learned from now.

    Args:
        collected: the rollout.
        version: number of updates that have been made.
        max_lag: largest lag in updates of a step that is not too old; 0: no limit.
    """
    valid = collected.rollout.valid
    lag = (version - collected.rollout.version[valid]).astype(float)
    too_old = int(np.sum(lag > max_lag)) if max_lag else 0
    reports = {
        "batch/valid": OptionalMetric(np.sum(valid), valid.size),
        "batch/too_old": OptionalMetric(too_old, valid.size),
    }
    returns, lengths = np.array(collected.episodes, float).reshape(-1, 2).T
    samples = {
        "policy/lag": lag,
        "episode/return": returns,
        "episode/length": lengths,
    }
    for name, values in samples.items():
        count = len(values)
        lowest = np.min(values, initial=np.inf)
        highest = np.max(values, initial=-np.inf)
        reports[name] = OptionalMetric(np.sum(values), count)
        reports[f"{name}_min"] = OptionalMetric(lowest, count)
        reports[f"{name}_max"] = OptionalMetric(highest, count)
    return MetricSums.of(reports) | collected.info


class UpdateMetrics:
    """Metrics of a chunk's updates, each read while the next update is under way."""

    def __init__(self):
        self.updates = 0
        # True if a process wanted to stop when one of the updates began, the newest not counted
        self.wants_to_stop = False
        # Index of the first update in which a metric was not finite, by metric
        self.broken: dict[str, np.ndarray] = {}
        self._sums: MetricSums | None = None
        self._snapshot_metrics: dict[str, float] = {}  # of the newest update
        self._newest: tuple | None = None

    def add(
        self, tally: MetricSums, snapshot_metrics: dict[str, jax.Array], wants_to_stop: Any
    ) -> None:
        """Add the metrics of an update that was just dispatched; wait for the update before it.

        Args:
            tally: sums of the update's metrics.
            snapshot_metrics: metrics of the state after the update.
            wants_to_stop: `Batch.wants_to_stop` of the update's batch.
        """
        self._read_newest()
        self._newest = tally, snapshot_metrics, wants_to_stop
        self.updates += 1

    def read(self, more: dict[str, Any]) -> Outcome:
        """Sum up the metrics of the updates, and add `more` to them."""
        self._read_newest()
        summed = self._sums or MetricSums({}, {})
        metrics = summed.metrics() | self._snapshot_metrics | more
        numbers = {name: np.asarray(x) for name, x in metrics.items()}
        return Outcome(metrics=numbers, broken=self.broken, counts={}, updates=self.updates)

    def _read_newest(self) -> None:
        if self._newest is None:
            return
        sums, self._snapshot_metrics, wants_to_stop = jax.device_get(self._newest)
        self._newest = None
        self._sums = self._sums + sums if self._sums else sums
        self.wants_to_stop |= bool(np.any(wants_to_stop))
        for name, value in sums.value.items():
            if not math.isfinite(value):
                self.broken.setdefault(name, np.array([self.updates - 1]))
