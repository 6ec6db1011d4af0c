"""Batches for a learner from actors that get its parameters back: the wiring of threads, queues and devices.

with Batches(args, ...) as batches:
    while batch := batches.next(state, stopped, leaving):
        state, published, metrics = update(state, batch)
        batches.publish(published)
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.actors.actor import Actor, HostEnvKind, env_maker
from common.actors.host_drivers import HostDriver
from common.actors.meters import Meters
from common.actors.pool import ActorPool, Schedule
from common.actors.queues import FATES, HostRollout, ParameterSlots, RolloutQueues
from common.actors.watchdog import Limits
from common.cli.host_flags import HostEnvArgs
from common.device import multihost


class Batch(NamedTuple):
    """What an update learns from; of several processes each has its own."""

    rollouts: tuple[HostRollout, ...]
    leaving: Any  # [D] the same for each of this process's learner devices: whether it wants to stop; () if it is alone


def example_batch(args: HostEnvArgs, env: HostEnvKind, driver: HostDriver, num_learners: int) -> Batch:
    """Shapes of what `Batches.next` returns."""
    steps, count = args.num_steps, args.envs_per_actor

    def act(obs):
        key, memory = jax.random.key(0), driver.memory(count)
        published = driver.publish(*driver.begin(key, key))
        return driver.act(published, memory, jax.random.key_data(key), jnp.uint32(0), obs)

    def stacked(x, length=steps):
        return jax.ShapeDtypeStruct((length, *x.shape), x.dtype)

    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), env.spec.obs_like)
    number, flag = (jax.ShapeDtypeStruct((count,), dtype) for dtype in (np.float32, bool))
    action, extras, memory = jax.eval_shape(act, obs)
    rollout = HostRollout(
        obs=jax.tree.map(lambda x: stacked(x, steps + 1), obs),
        action=jax.tree.map(stacked, action),
        extras=jax.tree.map(stacked, extras),
        reward=stacked(number),
        terminated=stacked(flag),
        truncated=stacked(flag),
        valid=stacked(flag),
        version=jax.ShapeDtypeStruct((steps, count), np.int32),
        final_obs=jax.tree.map(stacked, obs) if env.resets_in_step else None,
        memory=jax.tree.map(lambda x: stacked(x, 1), memory),
    )
    leaving = jax.ShapeDtypeStruct((num_learners,), bool) if args.processes > 1 else ()
    return Batch((over_learners(rollout, num_learners),) * args.own_rollouts, leaving)


def over_learners(rollout: HostRollout, num_learners: int) -> HostRollout:
    """Shapes or host arrays [T, N, ...] as `pmap` takes them over the learner's devices: [D, T, N / D, ...]."""

    def split(x):
        steps, envs, *shape = x.shape
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((num_learners, steps, envs // num_learners, *shape), x.dtype)
        return np.moveaxis(x.reshape(steps, num_learners, envs // num_learners, *shape), 1, 0)

    return jax.tree.map(split, rollout)


class Batches:
    """Actors at work: a context manager, and the run's `HostWorkers`. `next`, an update, and `publish` alternate."""

    def __init__(
        self,
        args: HostEnvArgs,
        act: Callable,
        memory: Any,
        params: Any,
        version: int,
        logged: dict[str, str],
        actor_devices: list[jax.Device],
        sharding: jax.sharding.Sharding,
        counters: dict[str, int],
        warn: Callable[[str], None],
    ):
        """Actors act on `actor_devices` with `act` and `memory`, see `Actor`, at first with `params`, behind which are
        `version` updates. Batches go where `sharding` says. `logged`: see `HostEnvKind`. Counting goes on from
        `counters`.
        """
        self._args, self._sharding, self._warn = args, sharding, warn
        self._figures: dict[str, float] | None = None  # in the end
        self._version = self._first = self._over = version
        self._slots = ParameterSlots(actor_devices)
        self._slots.publish(version, params)
        actors = [
            Actor(
                index=index,
                make_envs=env_maker(args, args.envs_per_actor, args.env_params),
                act=act,
                device=device,
                slots=self._slots,
                num_steps=args.num_steps,
                seed=(args.seed, version),
                memory=memory,
                first=jax.process_index() * len(actor_devices) * args.actor_threads,
                logged=logged,
            )
            for index, device in enumerate(device for device in actor_devices for _ in range(args.actor_threads))
        ]
        counters = counters if multihost.is_first() else {}  # which are those of all processes
        before = {name: counters.get(name, 0) for name in FATES}
        schedule = Schedule(len(actors), args.own_rollouts, args.publish_interval, version, args.lag)
        self.actor_pool = ActorPool(
            actors,
            self._slots,
            RolloutQueues(len(actors), args.queue_rollouts, args.on_full, before, args.rollouts_ahead),
            Limits.of(args),
            warn,
            schedule=schedule if args.fixed_order else None,
            serial=args.serial,
            restarts=counters.get("restarts", 0),
        )
        lag, steps = getattr(args, "max_policy_lag", 0), args.envs_per_actor * args.num_steps
        self.meters = Meters(self.actor_pool, steps, lag, args.envs_flag)

    def __enter__(self) -> "Batches":
        self.actor_pool.__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.actor_pool.__exit__(kind, *error)
        self._figures = self.meters.figures(alone=bool(kind))

    def next(self, newest: Any, stopped: Callable[[], bool], leaving: bool) -> Batch | None:
        """The rollouts of an update, on their way to the learner's devices; None once `stopped`.

        `newest` is what the newest update returns; the one before it is over. Others are told whether this process is
        `leaving`. Raises ActorsFailed, see `ActorPool.take`.
        """
        self._make_room(newest)
        rollouts = []
        while len(rollouts) < self._args.own_rollouts:
            with nullcontext() if self._args.serial else self.meters.timed("wait_get"):
                collected = self.actor_pool.take(stopped)
            if collected is None:
                return None
            self.meters.take(collected, self._version)
            with self.meters.timed("transfer"):
                share = over_learners(collected.rollout, self._sharding.num_devices)
                rollouts.append(jax.device_put(share, self._sharding))
        self.actor_pool.queues.train(self._args.own_rollouts)
        told = np.full(self._sharding.num_devices, leaving) if self._args.processes > 1 else ()
        return Batch(tuple(rollouts), told)

    def _make_room(self, newest: Any) -> None:
        """Let actors begin other rollouts in the place of those from which updates have learned."""
        if math.isinf(self._args.rollouts_ahead):
            return
        over = max(self._version - 1, self._over)
        if self.actor_pool.queues.counts["waiting"] < self._args.own_rollouts:  # some may have to begin first
            with self.meters.timed("update"):
                jax.block_until_ready(newest)
            over = self._version
        self._slots.settle(over)  # who begins now acts with what that update made
        self.actor_pool.queues.leave((over - self._over) * self._args.own_rollouts)
        self._over = over

    def publish(self, params: Any) -> None:
        """Note an update; its parameters go to the actors at every `publish_interval`-th."""
        self._version += 1
        if (self._version - self._first) % self._args.publish_interval == 0:
            with self.meters.timed("publish"):
                self._slots.publish(self._version, params)

    def row(self) -> dict[str, Any]:
        """The metrics of actors and queues since the last call, of all processes, which call at the same time."""
        row = self.meters.row()
        if multihost.is_first() and 0 < row.get("batch/valid", 0) <= row.get("batch/too_old", 0):
            self._warn("every step of late was older than --max-policy-lag: nothing was learned from them")
        return row

    def counters(self) -> dict[str, int]:
        """What became of all rollouts, and how often actors had to be restarted; all processes call at once."""
        counts = self.actor_pool.queues.counts | {"restarts": self.actor_pool.restarts.count}
        of_all = multihost.allgather(counts)
        return {name: sum(counts[name] for counts in of_all) for name in ("restarts", *FATES)}

    def figures(self) -> dict[str, Any]:
        """Counts and seconds of the whole run, of all processes unless it has failed."""
        return {"sampler_only": self._args.sampler_only, **(self._figures or self.meters.figures(alone=True))}

    def remarks(self) -> list[str]:
        """What limits the speed."""
        return [] if self._args.serial or not self.meters.shares else [self.meters.bottleneck()]
