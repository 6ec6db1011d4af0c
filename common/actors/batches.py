"""Batches for a learner from actors that get its parameters back, and the way of both over the devices.

with Batches(args, actor_pool, ...) as batches:
    while batch := batches.next(state, stopped, leaving):
        state, published, metrics = update(state, batch)
        batches.publish(published)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.actors.actor import HostEnvKind
from common.actors.host_drivers import HostDriver
from common.actors.meters import Meters
from common.actors.pool import ActorPool
from common.actors.queues import FATES, HostRollout
from common.actors.watchdog import Worker
from common.cli.host_flags import HostEnvArgs
from common.device import multihost


class Batch(NamedTuple):
    """What an update learns from; of several processes each has its own."""

    rollouts: tuple[HostRollout, ...]
    leaving: Any  # [D] the same for each of this process's learner devices: whether it wants to stop; () if it is alone


def example_batch(args: HostEnvArgs, env: HostEnvKind, driver: HostDriver, num_learners: int) -> Batch:
    """Shapes of what `Batches.next` returns."""
    count = args.envs_per_actor

    def batch():
        key, obs, flags = jax.random.key(0), env.spec.example_obs(count), jnp.zeros(count, bool)
        published = driver.publish(*driver.begin(key, key))
        acting = published, driver.memory(count), jax.random.key_data(key), jnp.uint32(0), obs
        action, extras, memory = driver.act(*acting)
        outcome, final_obs = (jnp.zeros(count), flags, flags, flags), obs if env.resets_in_step else None
        step = HostRollout(obs, action, extras, *outcome, jnp.zeros(count, jnp.int32), final_obs, memory=())
        rollout = _repeated(step, args.num_steps)
        rollout = rollout._replace(obs=_repeated(obs, args.num_steps + 1), memory=_repeated(memory, 1))
        leaving = jnp.zeros(num_learners, bool) if args.processes > 1 else ()
        return Batch((over_learners(rollout, num_learners),) * args.own_rollouts, leaving)

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(batch))


def _repeated(tree: Any, length: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), tree)


def over_learners(rollout: HostRollout, num_learners: int) -> HostRollout:
    """Arrays [T, N, ...] as `pmap` takes them over the learner's devices: [D, T, N / D, ...]."""

    def split(x):
        steps, envs, *shape = x.shape
        return x.reshape(steps, num_learners, envs // num_learners, *shape).swapaxes(0, 1)

    return jax.tree.map(split, rollout)


class Batches:
    """Actors at work: a context manager, and the run's `HostWorkers`. `next`, an update, and `publish` alternate."""

    def __init__(
        self, args: HostEnvArgs, actors: ActorPool, version: int, sharding: jax.sharding.Sharding, warn: Callable
    ):
        """There have been `version` updates before. Batches go where `sharding` says."""
        self._args, self._actors, self._sharding, self._warn = args, actors, sharding, warn
        self._version = self._over = version
        self.learner = Worker("learner", ("wait_get", "transfer", "update", "publish"))
        self._meters = Meters(actors, self.learner, getattr(args, "max_policy_lag", 0))
        self._at_end: tuple[dict[str, float], str] = {}, ""  # figures, and what limits the speed

    def __enter__(self) -> "Batches":
        self._actors.__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        remark = self._meters.bottleneck()
        self._actors.__exit__(kind, *error)
        self._at_end = self._meters.figures(alone=bool(kind)), remark

    def next(self, newest: Any, stopped: Callable[[], bool], leaving: bool) -> Batch | None:
        """The rollouts of an update, on their way to the learner's devices; None once `stopped`.

        `newest` is what the newest update returns; the one before it is over. Others are told whether this process is
        `leaving`. Raises ActorsFailed, see `ActorPool.take`.
        """
        self._make_room(newest)
        rollouts = []
        while len(rollouts) < self._args.own_rollouts:
            with self.learner.doing("wait_get"):
                collected = self._actors.take(stopped)
            if collected is None:
                return None
            self._meters.take(collected, self._version)
            with self.learner.doing("transfer"):
                share = over_learners(collected.rollout, self._sharding.num_devices)
                rollouts.append(jax.device_put(share, self._sharding))
        self._actors.queue.train(self._args.own_rollouts)
        told = np.full(self._sharding.num_devices, leaving) if self._args.processes > 1 else ()
        return Batch(tuple(rollouts), told)

    def _make_room(self, newest: Any) -> None:
        """Let actors begin other rollouts in the place of those from which updates have learned."""
        if math.isinf(self._args.rollouts_ahead):
            return
        over = max(self._version - 1, self._over)
        if self._actors.queue.counts["waiting"] < self._args.own_rollouts:  # some may have to begin first
            with self.learner.doing("update"):
                jax.block_until_ready(newest)
            over = self._version
        self._actors.slots.settle(over)  # who begins now acts with what that update made
        self._actors.leave_places((over - self._over) * self._args.own_rollouts)
        self._over = over

    def publish(self, params: Any) -> None:
        """Note an update, and give its parameters to the actors."""
        self._version += 1
        with self.learner.doing("publish"):
            self._actors.slots.publish(self._version, params)

    def row(self) -> dict[str, Any]:
        """The metrics of actors and queues since the last call, of all processes, which call at the same time."""
        row = self._meters.row()
        if multihost.is_first() and 0 < row.get("batch/valid", 0) <= row.get("batch/too_old", 0):
            self._warn("every step of late was older than --max-policy-lag: nothing was learned from them")
        return row

    def counters(self) -> dict[str, int]:
        """What became of all rollouts, and how often actors had to be restarted; all processes call at once."""
        counts = self._actors.queue.counts | {"restarts": self._actors.restarts}
        of_all = multihost.allgather(counts)
        return {name: sum(counts[name] for counts in of_all) for name in ("restarts", *FATES)}

    def figures(self) -> dict[str, Any]:
        """Counts and seconds of the whole run, of all processes unless it has failed."""
        return self._at_end[0] or self._meters.figures(alone=True)

    def remarks(self) -> list[str]:
        """What limits the speed."""
        return [self._at_end[1]] if self._at_end[1] and not self._args.serial else []
