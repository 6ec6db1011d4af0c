"""Batches for a learner from actors that get its parameters back: the wiring of threads, queues and devices."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np

from common.actors.actor import Actor
from common.actors.async_run import AsyncRun, Reports
from common.actors.crew import ActorsFailed, Crew, Schedule
from common.actors.meters import Meters
from common.actors.parameters import ParameterSlots
from common.actors.rollouts import COUNTED, Rollout, RolloutQueues
from common.actors.watching import Limits
from common.cli.host_flags import HostEnvArgs
from common.envs.host import HostEnvs, make_host
from common.envs.spaces import EnvSpec


class HostEnvKind(NamedTuple):
    """What is known of an environment before any actor has one."""

    name: str
    spec: EnvSpec
    resets_in_step: bool


def inspect(args: HostEnvArgs) -> HostEnvKind:
    """Make the environment once to see what it is. Raises UsageError where that does not work."""
    vectorization = "vector" if args.vectorization == "vector" else "sync"
    envs = make_host(args.env, 1, args.seed, args.env_params, vectorization)
    try:
        return HostEnvKind(args.env, envs.spec, envs.resets_in_step)
    finally:
        envs.close()


def env_maker(args: HostEnvArgs, num_envs: int) -> Callable[[int], HostEnvs]:
    """A function of a seed that makes `num_envs` environments."""
    more = args.env_params, args.vectorization, args.reset_timeout, args.step_timeout
    return lambda seed: make_host(args.env, num_envs, seed, *more)


def limits_of(args: HostEnvArgs) -> Limits:
    times = args.learner_timeout, args.reset_timeout, args.step_timeout
    return Limits(*times, args.max_restarts, args.restart_interval)


def example_batch(args: HostEnvArgs, env: HostEnvKind, action: Any, record: Any, memory: Any) -> Any:
    """Shapes of what `Feed.next_batch` returns on one device; `action` [N, ...] and so on are those of one step."""
    steps, count = args.num_steps, args.envs_per_actor

    def stacked(x, length=steps):
        return jax.ShapeDtypeStruct((length, *x.shape), x.dtype)

    obs = jax.ShapeDtypeStruct((count, *env.spec.observation_space.shape), env.spec.obs_dtype)
    number, flag = (jax.ShapeDtypeStruct((count,), dtype) for dtype in (np.float32, bool))
    rollout = Rollout(
        obs=stacked(obs, steps + 1),
        action=stacked(action),
        record=jax.tree.map(stacked, record),
        reward=stacked(number),
        terminated=stacked(flag),
        truncated=stacked(flag),
        valid=stacked(flag),
        version=jax.ShapeDtypeStruct((steps, count), np.int32),
        final_obs=stacked(obs) if env.resets_in_step else None,
        memory=jax.tree.map(lambda x: stacked(x, 1), memory),
    )
    return (rollout,) * args.batch_rollouts


def over_devices(batch: Any, count: int) -> Any:
    """Shapes or host arrays [T, N, ...] as `pmap` takes them over `count` devices: [D, T, N / D, ...]."""

    def split(x):
        steps, envs, *shape = x.shape
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((count, steps, envs // count, *shape), x.dtype)
        return np.moveaxis(x.reshape(steps, count, envs // count, *shape), 1, 0)

    return jax.tree.map(split, batch)


class Feed:
    """Actors at work; a context manager. `next_batch`, an update, and `publish` alternate."""

    def __init__(
        self,
        args: HostEnvArgs,
        run: AsyncRun,
        update: Any,
        updates_done: int,
        params: Any,
        act: Callable,
        devices: list[jax.Device],
        memory: Any = (),
    ):
        """Batches go where the compiled `update` wants them. Actors act on `devices`, at first with `params`; `act`
        and `memory` are as for an `Actor`.
        """
        self._run, self._batch_rollouts, self._interval = run, args.batch_rollouts, args.publish_interval
        self._num_learners, self._serial, self._sampler_only = len(run.devices), args.serial, args.sampler_only
        self._sharding = jax.tree.leaves(update.input_shardings[0][1])[0]
        self._version = self._first = updates_done = int(updates_done)
        self._slots = ParameterSlots(devices)
        self._slots.publish(updates_done, params)
        actors = [
            Actor(
                index=index,
                make_envs=env_maker(args, args.envs_per_actor),
                act=act,
                device=device,
                slots=self._slots,
                num_steps=args.num_steps,
                seed=(args.seed, updates_done),
                memory=memory,
            )
            for index, device in enumerate(device for device in devices for _ in range(args.actor_threads))
        ]
        counters = run.counters
        before = {name: counters[name] for name in COUNTED}
        queues = RolloutQueues(len(actors), args.queue_size, args.on_full, before)
        schedule = Schedule(len(actors), self._batch_rollouts, self._interval, updates_done)
        self.crew = Crew(
            actors,
            self._slots,
            queues,
            limits_of(args),
            run.console.warn,
            schedule=schedule if args.fixed_order else None,
            serial=args.serial,
            restarts=counters["restarts"],
        )
        self.meters = Meters(self.crew, args.envs_per_actor * args.num_steps, args.max_policy_lag)

    def __enter__(self) -> "Feed":
        self.crew.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.crew.__exit__(*error)
        if not self._serial and self.meters.shares:
            self._run.remarks.append(self.meters.bottleneck())
        self._run.measured = {"sampler_only": self._sampler_only, **self.meters.counts(), **self.meters.totals()}

    def next_batch(self) -> tuple[Rollout, ...] | None:
        """The rollouts of an update, on their way to the learner's devices; None once the run stops.

        Raises ActorsFailed, see `Crew.take`.
        """
        batch = []
        while len(batch) < self._batch_rollouts:
            with nullcontext() if self._serial else self.meters.timed("wait_get"):
                collected = self.crew.take(lambda: self._run.stopping)
            if collected is None:
                return None
            self.meters.take(collected, self._version)
            with self.meters.timed("transfer"):
                batch.append(jax.device_put(over_devices(collected.rollout, self._num_learners), self._sharding))
        self.crew.queues.train(self._batch_rollouts)
        return tuple(batch)

    def publish(self, params: Any) -> None:
        """Note an update; its parameters go to the actors at every `publish_interval`-th."""
        self._version += 1
        if (self._version - self._first) % self._interval == 0:
            with self.meters.timed("publish"):
                self._slots.publish(self._version, params)

    def row(self) -> dict[str, Any]:
        """The metrics of actors and queues since the last call."""
        counts = self.crew.queues.counts
        self._run.counters = {"restarts": self.crew.restarts} | {name: counts[name] for name in COUNTED}
        row = self.meters.row()
        if 0 < row.get("batch/valid", 0) <= row.get("batch/too_old", 0):
            self._run.console.warn("every step of late was older than --max-policy-lag: nothing was learned from them")
        return row


def train_chunk(args: HostEnvArgs, run: AsyncRun, feed: Feed, state: Any, update: Callable) -> Any:
    """Updates of `state` up to the next thing that is due; returns the new state.

    `update` returns the state, what to publish, and metrics. While it runs, the rollouts of the next update are awaited
    and copied to the devices. Raises ActorsFailed, with everything saved.
    """
    reports, failure = Reports(), None
    for _ in range(run.next_chunk()):
        try:
            batch = feed.next_batch()
        except ActorsFailed as error:
            failure = error
            break
        if batch is None or reports.broken:
            break
        metrics = {}
        if not args.sampler_only:
            with feed.meters.timed("update"):
                state, published, metrics = update(state, batch)
            feed.publish(published)
        run.log()
        with feed.meters.timed("update"):
            reports.add(metrics)
            if args.serial:
                jax.block_until_ready(metrics)
    reports.more = feed.row()
    run.advance(state, reports)
    if failure:
        run.rescue(state)
        raise failure
    return state
