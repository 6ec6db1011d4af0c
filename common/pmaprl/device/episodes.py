"""Returns and lengths of episodes, counted while environments step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.flatten_util import ravel_pytree

from pmaprl.device.loops import unrolled_scan
from pmaprl.device.sharding import AXIS, gathered, global_ids
from pmaprl.device.statistics import MetricSums

WINDOW = 100


class Episodes(NamedTuple):
    """Episodes that are over, or the running episodes of environments, [N]."""

    ret: Array | np.ndarray  # sum of raw rewards
    # Steps; -inf: it began before counting did; NaN, inf: faults of an evaluation (`fault_of`)
    length: Array | np.ndarray


class RecentEpisodes(struct.PyTreeNode):
    """The last `WINDOW` finished episodes, newest first."""

    ret: Array  # [WINDOW]
    length: Array  # [WINDOW]
    count: Array  # [] how many entries are filled


def new_tracker(num_envs: int, under_way: bool = False) -> Episodes:
    """Begin to track the episodes of `num_envs` environments.

    Episodes that are `under_way` already are not counted.
    """
    length = -jnp.inf if under_way else 0.0
    return Episodes(jnp.zeros(num_envs), jnp.full(num_envs, length, jnp.float32))


def new_recent() -> RecentEpisodes:
    return RecentEpisodes(
        ret=jnp.zeros(WINDOW),
        length=jnp.zeros(WINDOW),
        count=jnp.zeros((), jnp.int32),
    )


def count_episodes(
    tracker: Episodes,
    recent: RecentEpisodes,
    steps: Any,
) -> tuple[Episodes, RecentEpisodes, MetricSums]:
    """Account for the episodes of a rollout on every device.

    Args:
        tracker: [N] running episodes of this device.
        recent: the last episodes of all devices, ordered by step, then by global environment.
        steps: a `Step` with rewards, ends and infos [T, N]; rewards are raw.

    Returns:
        The tracker and the recent episodes after the rollout, and the reports of all devices.
    """

    def step(running: Episodes, inputs):
        earned, done = inputs
        finished = jax.tree.map(jnp.add, running, earned)
        return jax.tree.map(lambda x: jnp.where(done, 0.0, x), finished), finished

    done = steps.terminated | steps.truncated
    earned = Episodes(steps.reward, jnp.ones_like(steps.reward))
    tracker, finished = unrolled_scan(step, tracker, (earned, done))  # finished [T, N]
    done = done & (finished.length > 0)
    episodes = {}
    for name, x in {"return": finished.ret, "length": finished.length}.items():
        for end in ("", "_min", "_max"):
            episodes[f"episode/{name}{end}"] = x
    info = {f"env/{name}": x for name, x in (steps.info or {}).items()}
    # A number that is not finite is no report
    is_reported = dict.fromkeys(episodes, done) | jax.tree.map(jnp.isfinite, info)
    tally = MetricSums.of_each_step(episodes | info, is_reported)

    # One collective gathers each device's newest episodes and reports; their order travels as the
    # bits of floats
    end_order, newest = _newest(done, finished)
    order_bits = jax.lax.bitcast_convert_type(end_order, jnp.float32)
    numbers, parts_of = ravel_pytree((order_bits, newest, tally))
    order_bits, newest, tally = jax.vmap(parts_of)(gathered(numbers[None]))  # [D, J] x 2, [D, T]
    end_order = jax.lax.bitcast_convert_type(order_bits, jnp.int32)
    end_order, newest = jax.tree.map(jnp.ravel, (end_order, newest))
    return tracker, _push(recent, end_order, newest), tally.of_all_steps()


def recent_metrics(recent: RecentEpisodes) -> dict[str, Array]:
    """Average the last `WINDOW` episodes; NaN while none has finished."""
    filled = jnp.arange(WINDOW) < recent.count
    metrics = {}
    for name, x in {"return": recent.ret, "length": recent.length}.items():
        metrics[f"episode/{name}_last{WINDOW}"] = jnp.mean(x, where=filled)
    return metrics


def _newest(done: Array, finished: Episodes) -> tuple[Array, Episodes]:
    """Select this device's last J episodes that are `done` [T, N], the newest first.

    J is `WINDOW` at most.

    Returns:
        Orders and episodes [J]. An order counts all devices, by step, then by global environment;
        it is -1 if there are fewer episodes.
    """
    steps, local = done.shape
    of_step = jnp.arange(steps)[:, None] * (local * jax.lax.axis_size(AXIS))
    end_order = jnp.where(done, of_step + global_ids(local), -1)
    (index,) = jnp.nonzero(done.ravel()[::-1], size=min(WINDOW, done.size))
    end_order, finished = jax.tree.map(lambda x: x.ravel()[::-1][index], (end_order, finished))
    return jnp.where(jnp.arange(len(index)) < jnp.sum(done), end_order, -1), finished


def _push(
    recent: RecentEpisodes,
    end_order: Array,
    finished: Episodes,
) -> RecentEpisodes:
    """Add the `finished` episodes [D * J] with the highest orders to the recent ones."""
    # Counting is cheaper than sorting: the rank of an episode is the number of newer ones
    rank = jnp.sum(end_order[None, :] > end_order[:, None], axis=1)
    slot = jnp.where(end_order >= 0, rank, WINDOW)
    count = jnp.minimum(jnp.sum(end_order >= 0), WINDOW)

    def merge(old, values):
        return jnp.roll(old, count).at[slot].set(values, mode="drop")

    filled = jnp.minimum(recent.count + count, WINDOW).astype(jnp.int32)
    return RecentEpisodes(
        ret=merge(recent.ret, finished.ret),
        length=merge(recent.length, finished.length),
        count=filled,
    )
