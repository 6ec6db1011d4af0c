"""Metrics and episode statistics, reduced on the device over devices, gradient steps and updates.

They are means, except where a name ends in `_sum`, `_max`, `_min` or `_last`: then they are that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.flatten_util import ravel_pytree

from common.device.loops import light_scan
from common.device.sharding import AXIS, flat_pmean, gathered, global_ids
from common.envs.variation import REDUCTIONS

Metrics = dict[str, jax.Array]


def kind_of(name: str) -> str:
    """What the metric of that name is: `sum`, `max`, `min`, `last` or `mean`."""
    return next((kind for kind in REDUCTIONS if name.endswith(f"_{kind}")), "mean")


def across_devices(grads: Any, metrics: Metrics) -> tuple[Any, Metrics]:
    """Gradients and metrics of all samples, from those of an equal share of them on each device."""
    collectives = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
    others = {name: collectives[kind](x, AXIS) for name, x in metrics.items() if (kind := kind_of(name)) in collectives}
    means = {name: x for name, x in metrics.items() if name not in others}
    grads, means = flat_pmean((grads, means))  # one collective for all of them
    return grads, means | others


def same_everywhere(metrics: Metrics) -> Metrics:
    """Metrics of an update on every device, of which some may be those of a device's own samples: means over devices.

    What is the same everywhere stays so. Sums are left as they are.
    """
    others = {name: x for name, x in metrics.items() if kind_of(name) != "sum"}
    return metrics | across_devices((), others)[1]


REDUCE = {
    "mean": jnp.mean,
    "sum": jnp.sum,
    "max": partial(jnp.max, initial=-jnp.inf),
    "min": partial(jnp.min, initial=jnp.inf),
    "last": lambda x, where: x[-1 if where is None else jnp.sum(where) - 1],
}
"""What numbers [K] of each kind of metric come to, of those alone `where` it is true."""


def over_steps(metrics: Metrics, counts: jax.Array | None = None) -> Metrics:
    """Metrics of all steps together, from those of each [K]; of the first ones only, where `counts` [K] is true."""
    return {name: REDUCE[kind_of(name)](x, where=counts) for name, x in metrics.items()}


def _extreme_or_sum(name: str) -> Callable:
    """What a `Tally` makes of numbers of a metric: of a mean their sum, which their count divides in the end."""
    return REDUCE[kind] if (kind := kind_of(name)) in ("max", "min") else jnp.sum


class Report(NamedTuple):
    """A metric that not every update reports."""

    value: jax.Array
    count: jax.Array  # 1, or 0 where it was not reported


class Tally(struct.PyTreeNode):
    """Metrics over however many updates reported them, added up on the device, or by NumPy where they are there."""

    value: Metrics  # the sum so far, of a mean too; or the largest, the smallest, the newest
    count: Metrics  # how many reports are in it; a value without any is 0

    @classmethod
    def of(cls, metrics: dict[str, jax.Array | Report]) -> "Tally":
        """One report of each metric, or where it is a `Report` what that says."""
        reports = {k: x if isinstance(x, Report) else Report(x, jnp.ones_like(x)) for k, x in metrics.items()}
        return cls({k: x.value for k, x in reports.items()}, {k: x.count for k, x in reports.items()})

    @classmethod
    def of_each_step(cls, metrics: Metrics, found: dict[str, jax.Array]) -> "Tally":
        """Reports [T] of metrics [T, N], of every step those of its environments that are `found` [T, N]."""
        value = {name: _extreme_or_sum(name)(x, where=found[name], axis=1) for name, x in metrics.items()}
        return cls(value, {name: jnp.sum(x, axis=1, dtype=jnp.float32) for name, x in found.items()})

    def of_all_steps(self) -> "Tally":
        """One report of each metric, from those [D, T] of all devices; of `_last` the mean over environments."""
        counts = jax.tree.map(partial(jnp.sum, axis=0), self.count)
        value = {name: _extreme_or_sum(name)(x, axis=0) for name, x in self.value.items()}  # [T]
        for name, count in counts.items():
            newest = len(count) - 1 - jnp.argmax(count[::-1] > 0)
            last = value[name][newest] / jnp.maximum(count[newest], 1)
            whole = last if kind_of(name) == "last" else _extreme_or_sum(name)(value[name])
            value[name] = jnp.where(jnp.any(count > 0), whole, 0.0)
        return Tally(value, jax.tree.map(jnp.sum, counts))

    def __add__(self, newer: "Tally") -> "Tally":
        value = {name: self._with(newer, name) for name in self.value}
        return Tally(value, {name: count + newer.count[name] for name, count in self.count.items()})

    def __or__(self, other: "Tally") -> "Tally":
        """The metrics of both."""
        return Tally(self.value | other.value, self.count | other.count)

    def metrics(self) -> Metrics:
        """What they come to; NaN for what was never reported."""
        return {
            name: x / self.count[name] if kind_of(name) == "mean" else _numpy(x).where(self.count[name] > 0, x, jnp.nan)
            for name, x in self.value.items()
        }

    def _with(self, newer: "Tally", name: str) -> jax.Array:
        """The value of both reports of a metric."""
        old, new, numpy = self.value[name], newer.value[name], _numpy(newer.value[name])
        kinds = {"max": numpy.maximum, "min": numpy.minimum, "last": lambda old, new: new}
        if (kind := kind_of(name)) not in kinds:
            return old + new
        none = [newer.count[name] == 0, self.count[name] == 0]
        return numpy.select(none, [old, new], kinds[kind](old, new))


def _numpy(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np


WINDOW = 100


class EpisodeTracker(struct.PyTreeNode):
    """The running episode of every environment."""

    ret: jax.Array  # [N] raw reward so far
    length: jax.Array  # [N] steps so far; -inf where it had begun before anything was counted


class RecentEpisodes(struct.PyTreeNode):
    """The last `WINDOW` finished episodes, newest first."""

    ret: jax.Array  # [WINDOW]
    length: jax.Array  # [WINDOW]
    count: jax.Array  # [] how many entries are filled


def new_tracker(num_envs: int, under_way: bool = False) -> EpisodeTracker:
    """Of episodes that begin now, or of some that are `under_way`: what is left of those will not count as episodes."""
    return EpisodeTracker(jnp.zeros(num_envs), jnp.full(num_envs, -jnp.inf if under_way else 0.0, jnp.float32))


def new_recent() -> RecentEpisodes:
    return RecentEpisodes(jnp.zeros(WINDOW), jnp.zeros(WINDOW), jnp.zeros((), jnp.int32))


def count_episodes(
    tracker: EpisodeTracker, recent: RecentEpisodes, steps: Any
) -> tuple[EpisodeTracker, RecentEpisodes, Tally]:
    """Account for a rollout on each device.

    `steps` has the raw `reward`, `terminated`, `truncated` and `info` of a `Step`, [T, N] each.
    The window and the tally are over all devices; the window's order is by step, then by global env.
    """

    def step(running: EpisodeTracker, inputs):
        earned, done = inputs
        finished = jax.tree.map(jnp.add, running, earned)
        return jax.tree.map(lambda x: jnp.where(done, 0.0, x), finished), finished

    done, earned = steps.terminated | steps.truncated, EpisodeTracker(steps.reward, jnp.ones_like(steps.reward))
    tracker, finished = light_scan(step, tracker, (earned, done))  # finished [T, N]
    done = done & (finished.length > 0)
    columns = {"return": finished.ret, "length": finished.length}
    episodes = {f"episode/{name}{end}": x for name, x in columns.items() for end in ("", "_min", "_max")}
    info = {f"env/{name}": x for name, x in (steps.info or {}).items()}  # what is not finite is none
    tally = Tally.of_each_step(episodes | info, dict.fromkeys(episodes, done) | jax.tree.map(jnp.isfinite, info))
    # The newest of each device and its reports are all that leaves it, in one collective: places as if they were floats
    place, newest = _newest(done, finished)
    own = jax.lax.bitcast_convert_type(place, jnp.float32), newest, tally
    numbers, parts_of = ravel_pytree(own)
    place, newest, tally = jax.vmap(parts_of)(gathered(numbers[None]))  # [D, K], [D, K], [D, T]
    place = jax.lax.bitcast_convert_type(place, jnp.int32)
    return tracker, _push(recent, *jax.tree.map(jnp.ravel, (place, newest))), tally.of_all_steps()


def episode_metrics(episodes: Tally) -> Metrics:
    """What the episodes of an interval, and what its steps had to log, come to; NaN where there are none."""
    return episodes.metrics() | {"episode/count": episodes.count["episode/return"]}


def recent_metrics(recent: RecentEpisodes) -> dict[str, jax.Array]:
    """Means over the last `WINDOW` episodes; NaN while none has finished."""
    filled = jnp.arange(WINDOW) < recent.count
    return {
        f"episode/{name}_last{WINDOW}": jnp.mean(values, where=filled)
        for name, values in (("return", recent.ret), ("length", recent.length))
    }


def _newest(done: jax.Array, finished: EpisodeTracker) -> tuple[jax.Array, EpisodeTracker]:
    """The last episodes of this device that are `done` [T, N], `WINDOW` at most, the newest first; and their places.

    Places are in the order of all devices, by step, then by global env; -1 where there are fewer episodes.
    """
    steps, local = done.shape
    of_step = jnp.arange(steps)[:, None] * (local * jax.lax.axis_size(AXIS))
    place = jnp.where(done, of_step + global_ids(local), -1)
    (index,) = jnp.nonzero(done.ravel()[::-1], size=min(WINDOW, done.size))
    place, finished = jax.tree.map(lambda x: x.ravel()[::-1][index], (place, finished))
    return jnp.where(jnp.arange(len(index)) < jnp.sum(done), place, -1), finished


def _push(recent: RecentEpisodes, place: jax.Array, finished: EpisodeTracker) -> RecentEpisodes:
    """The window with those of the `finished` episodes, [D * K] each, that have the largest places."""
    # Counted, not sorted: beside a sort, XLA's runtime for CPUs mixes up who takes part in collectives (jaxlib 0.10.2)
    rank = jnp.sum(place[None, :] > place[:, None], axis=1)
    slot = jnp.where(place >= 0, rank, WINDOW)
    count = jnp.minimum(jnp.sum(place >= 0), WINDOW)

    def merge(values, old):
        return jnp.roll(old, count).at[slot].set(values, mode="drop")

    window = EpisodeTracker(recent.ret, recent.length)
    window, filled = jax.tree.map(merge, finished, window), jnp.minimum(recent.count + count, WINDOW)
    return RecentEpisodes(window.ret, window.length, filled.astype(jnp.int32))
