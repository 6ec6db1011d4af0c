"""Metrics and episode statistics, reduced on the device over devices, gradient steps and updates.

A metric's name says how it is reduced: by the mean, unless it ends in `_sum`, `_max`, `_min` or
`_last`; see KINDS.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.flatten_util import ravel_pytree

from pmaprl.device.loops import unrolled_scan
from pmaprl.device.sharding import AXIS, flat_pmean, gathered, global_ids

Metrics = dict[str, jax.Array]


class Reduction(NamedTuple):
    """How numbers of a metric are put together."""

    # Collective on what each device has; None goes with the gradients' mean
    over_devices: Callable | None
    over_steps: Callable  # of numbers [K], of those alone `where` it is true
    # Likewise in a `MetricSums`, along an `axis`: of a mean the sum, which a count divides in the
    # end
    tallied: Callable
    # Numpy or jax.numpy, the value so far, a newer one -> that of both; None adds them
    newer: Callable | None = None


def _last(x: jax.Array, where: jax.Array | None) -> jax.Array:
    return x[-1 if where is None else jnp.sum(where) - 1]


_max = partial(jnp.max, initial=-jnp.inf)
_min = partial(jnp.min, initial=jnp.inf)
REDUCTIONS = {
    "sum": Reduction(jax.lax.psum, jnp.sum, jnp.sum),
    "max": Reduction(
        over_devices=jax.lax.pmax,
        over_steps=_max,
        tallied=_max,
        newer=lambda numpy, old, new: numpy.maximum(old, new),
    ),
    "min": Reduction(
        over_devices=jax.lax.pmin,
        over_steps=_min,
        tallied=_min,
        newer=lambda numpy, old, new: numpy.minimum(old, new),
    ),
    "last": Reduction(
        over_devices=None, over_steps=_last, tallied=jnp.sum, newer=lambda numpy, old, new: new
    ),
    "mean": Reduction(None, jnp.mean, jnp.sum),
}


def reduction_of(name: str) -> str:
    """Which of KINDS the metric of that name is."""
    return next((kind for kind in REDUCTIONS if name.endswith(f"_{kind}")), "mean")


def across_devices(grads: Any, metrics: Metrics) -> tuple[Any, Metrics]:
    """Gradients and metrics of all samples, from those of an equal share of them on each device."""
    collectives = {name: REDUCTIONS[reduction_of(name)].over_devices for name in metrics}
    others = {
        name: collective(metrics[name], AXIS)
        for name, collective in collectives.items()
        if collective
    }
    means = {name: x for name, x in metrics.items() if name not in others}
    grads, means = flat_pmean((grads, means))  # one collective for all of them
    return grads, means | others


def mean_metrics_over_devices(metrics: Metrics) -> Metrics:
    """Means over devices of an update's metrics, of which some may be of a device's own samples;
    sums stay.
    """
    others = {name: x for name, x in metrics.items() if reduction_of(name) != "sum"}
    return metrics | across_devices((), others)[1]


def over_steps(metrics: Metrics, counts: jax.Array | None = None) -> Metrics:
    """Metrics of all steps together, from those of each [K]; of the first ones only, where `counts`
    [K] is true.
    """
    return {
        name: REDUCTIONS[reduction_of(name)].over_steps(x, where=counts)
        for name, x in metrics.items()
    }


Layout = dict[str, list[str]]
"""Names of the metrics in each vector of a stacked `MetricSums`, whose name says their kind."""


class OptionalMetric(NamedTuple):
    """A metric that not every update reports."""

    value: jax.Array
    count: jax.Array  # 1, or 0 where it was not reported


class MetricSums(struct.PyTreeNode):
    """Metrics over however many updates reported them, added up on the device, or by NumPy where
    they are there.
    """

    value: Metrics  # the sum so far, of a mean too; or the largest, the smallest, the newest
    count: Metrics  # how many reports are in it; a value without any is 0

    @classmethod
    def of(cls, metrics: dict[str, jax.Array | OptionalMetric]) -> "MetricSums":
        """One report of each metric, or where it is a `OptionalMetric` what that says."""
        reports = {
            k: x if isinstance(x, OptionalMetric) else OptionalMetric(x, jnp.ones_like(x))
            for k, x in metrics.items()
        }
        return cls(
            {k: x.value for k, x in reports.items()}, {k: x.count for k, x in reports.items()}
        )

    @classmethod
    def of_each_step(cls, metrics: Metrics, found: dict[str, jax.Array]) -> "MetricSums":
        """Reports [T] of metrics [T, N], of every step those of its environments that are `found`
        [T, N].
        """
        value = {
            name: REDUCTIONS[reduction_of(name)].tallied(x, where=found[name], axis=1)
            for name, x in metrics.items()
        }
        return cls(
            value, {name: jnp.sum(x, axis=1, dtype=jnp.float32) for name, x in found.items()}
        )

    def of_all_steps(self) -> "MetricSums":
        """One report of each metric, from those [D, T] of all devices; of `_last` the mean over
        environments.
        """
        counts = jax.tree.map(partial(jnp.sum, axis=0), self.count)

        def of_metric(name: str, count: jax.Array) -> jax.Array:
            tallied = REDUCTIONS[kind := reduction_of(name)].tallied
            steps = tallied(self.value[name], axis=0)  # [T]
            newest = len(count) - 1 - jnp.argmax(count[::-1] > 0)
            last = steps[newest] / jnp.maximum(count[newest], 1)
            return jnp.where(jnp.any(count > 0), last if kind == "last" else tallied(steps), 0.0)

        return MetricSums(
            {name: of_metric(name, x) for name, x in counts.items()}, jax.tree.map(jnp.sum, counts)
        )

    def stacked(self) -> tuple["MetricSums", "Layout"]:
        """Put metrics [] of one kind into one vector, so that adding them up is one operation; also
        which ones.
        """
        names: Layout = {}
        for name, x in self.value.items():
            names.setdefault(f"{x.dtype}_{self.count[name].dtype}_{reduction_of(name)}", []).append(
                name
            )
        value = {
            key: jnp.stack([self.value[name] for name in group]) for key, group in names.items()
        }
        count = {
            key: jnp.stack([self.count[name] for name in group]) for key, group in names.items()
        }
        return MetricSums(value, count), names

    def __add__(self, newer: "MetricSums") -> "MetricSums":
        value = {name: self._with(newer, name) for name in self.value}
        return MetricSums(
            value, {name: count + newer.count[name] for name, count in self.count.items()}
        )

    def __or__(self, other: "MetricSums") -> "MetricSums":
        """The metrics of both."""
        return MetricSums(self.value | other.value, self.count | other.count)

    @np.errstate(invalid="ignore")  # NumPy's 0 / 0
    def metrics(self) -> Metrics:
        """What they come to; NaN for what was never reported."""
        return {
            name: x / self.count[name]
            if reduction_of(name) == "mean"
            else _numpy(x).where(self.count[name] > 0, x, jnp.nan)
            for name, x in self.value.items()
        }

    def _with(self, newer: "MetricSums", name: str) -> jax.Array:
        """The value of both reports of a metric."""
        old = self.value[name]
        new = newer.value[name]
        both = REDUCTIONS[reduction_of(name)].newer
        if both is None:
            return old + new
        none = [newer.count[name] == 0, self.count[name] == 0]
        numpy = _numpy(new)
        return numpy.select(none, [old, new], both(numpy, old, new))


def _numpy(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np


WINDOW = 100


class Episodes(NamedTuple):
    """Episodes that are over, or those of environments so far, [N]."""

    ret: jax.Array  # sum of raw rewards
    length: jax.Array  # steps; of one under way -inf where it began before anything was counted


class RecentEpisodes(struct.PyTreeNode):
    """The last `WINDOW` finished episodes, newest first."""

    ret: jax.Array  # [WINDOW]
    length: jax.Array  # [WINDOW]
    count: jax.Array  # [] how many entries are filled


def new_tracker(num_envs: int, under_way: bool = False) -> Episodes:
    """Of episodes that begin now, or of some that are `under_way`: what is left of those will not
    count as episodes.
    """
    return Episodes(
        jnp.zeros(num_envs), jnp.full(num_envs, -jnp.inf if under_way else 0.0, jnp.float32)
    )


def new_recent() -> RecentEpisodes:
    return RecentEpisodes(jnp.zeros(WINDOW), jnp.zeros(WINDOW), jnp.zeros((), jnp.int32))


def count_episodes(
    tracker: Episodes, recent: RecentEpisodes, steps: Any
) -> tuple[Episodes, RecentEpisodes, MetricSums]:
    """Account for a rollout on each device: the outcomes of a `Step`, [T, N] each, rewards as they
    are.

    The window and the tally are over all devices; the window's order is by step, then by global
    env.
    """

    def step(running: Episodes, inputs):
        earned, done = inputs
        finished = jax.tree.map(jnp.add, running, earned)
        return jax.tree.map(lambda x: jnp.where(done, 0.0, x), finished), finished

    done = steps.terminated | steps.truncated
    earned = Episodes(steps.reward, jnp.ones_like(steps.reward))
    tracker, finished = unrolled_scan(step, tracker, (earned, done))  # finished [T, N]
    done = done & (finished.length > 0)
    columns = {"return": finished.ret, "length": finished.length}
    episodes = {
        f"episode/{name}{end}": x for name, x in columns.items() for end in ("", "_min", "_max")
    }
    # What is not finite is none
    info = {f"env/{name}": x for name, x in (steps.info or {}).items()}
    tally = MetricSums.of_each_step(
        episodes | info, dict.fromkeys(episodes, done) | jax.tree.map(jnp.isfinite, info)
    )
    # The newest of each device and its reports are all that leaves it, in one collective: places as
    # if they were floats
    place, newest = _newest(done, finished)
    numbers, parts_of = ravel_pytree(
        (jax.lax.bitcast_convert_type(place, jnp.float32), newest, tally)
    )
    place, newest, tally = jax.vmap(parts_of)(gathered(numbers[None]))  # [D, K], [D, K], [D, T]
    place = jax.lax.bitcast_convert_type(place, jnp.int32)
    return tracker, _push(recent, *jax.tree.map(jnp.ravel, (place, newest))), tally.of_all_steps()


def recent_metrics(recent: RecentEpisodes) -> dict[str, jax.Array]:
    """Means over the last `WINDOW` episodes; NaN while none has finished."""
    filled = jnp.arange(WINDOW) < recent.count
    columns = {"return": recent.ret, "length": recent.length}
    return {
        f"episode/{name}_last{WINDOW}": jnp.mean(x, where=filled) for name, x in columns.items()
    }


def _newest(done: jax.Array, finished: Episodes) -> tuple[jax.Array, Episodes]:
    """The last episodes of this device that are `done` [T, N], `WINDOW` at most, the newest first;
    and their places.

    Places are in the order of all devices, by step, then by global env; -1 where there are fewer
    episodes.
    """
    steps, local = done.shape
    of_step = jnp.arange(steps)[:, None] * (local * jax.lax.axis_size(AXIS))
    place = jnp.where(done, of_step + global_ids(local), -1)
    (index,) = jnp.nonzero(done.ravel()[::-1], size=min(WINDOW, done.size))
    place, finished = jax.tree.map(lambda x: x.ravel()[::-1][index], (place, finished))
    return jnp.where(jnp.arange(len(index)) < jnp.sum(done), place, -1), finished


def _push(recent: RecentEpisodes, place: jax.Array, finished: Episodes) -> RecentEpisodes:
    """The window with those of the `finished` episodes, [D * K] each, that have the largest
    places.
    """
    # Counted, not sorted: the rank of an episode is how many are newer
    rank = jnp.sum(place[None, :] > place[:, None], axis=1)
    slot = jnp.where(place >= 0, rank, WINDOW)
    count = jnp.minimum(jnp.sum(place >= 0), WINDOW)

    def merge(old, values):
        return jnp.roll(old, count).at[slot].set(values, mode="drop")

    filled = jnp.minimum(recent.count + count, WINDOW).astype(jnp.int32)
    return RecentEpisodes(
        merge(recent.ret, finished.ret), merge(recent.length, finished.length), filled
    )
