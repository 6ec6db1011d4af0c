"""How metrics are put together: over devices, over the gradient steps of an update, over the updates of an interval.

They are means, except where a name ends in `_sum`, `_max`, `_min` or `_last`: then they are that.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from common.device.sharding import AXIS, flat_pmean
from common.envs.varied import REDUCTIONS

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


def over_steps(metrics: Metrics, counts: jax.Array | None = None) -> Metrics:
    """Metrics of all steps together, from those of each [K]; of the first ones only, where `counts` [K] is true."""
    functions = {
        "mean": jnp.mean,
        "sum": jnp.sum,
        "max": partial(jnp.max, initial=-jnp.inf),
        "min": partial(jnp.min, initial=jnp.inf),
        "last": lambda x, where: x[-1 if where is None else jnp.sum(where) - 1],
    }
    return {name: functions[kind_of(name)](x, where=counts) for name, x in metrics.items()}


def _together(name: str) -> Any:
    """The function that puts numbers of a metric together, of a mean their sum."""
    ends = {"max": partial(jnp.max, initial=-jnp.inf), "min": partial(jnp.min, initial=jnp.inf)}
    return ends.get(kind_of(name), jnp.sum)


class Report(NamedTuple):
    """A metric that not every update reports."""

    value: jax.Array
    count: jax.Array  # 1, or 0 where it was not reported


class Tally(struct.PyTreeNode):
    """Metrics over however many updates reported them, added up on the device."""

    value: Metrics  # the sum so far, of a mean too; or the largest, the smallest, the newest
    count: Metrics  # how many reports are in it; a value without any is 0

    @classmethod
    def of(cls, metrics: dict[str, jax.Array | Report]) -> "Tally":
        """One report of each metric, or where it is a `Report` what that says."""
        reports = {k: x if isinstance(x, Report) else Report(x, jnp.ones_like(x)) for k, x in metrics.items()}
        return cls({k: x.value for k, x in reports.items()}, {k: x.count for k, x in reports.items()})

    @classmethod
    def of_each_step(cls, metrics: Metrics) -> "Tally":
        """Reports [T] of metrics [T, N], of every step those of its environments; what is not finite is none."""
        found = jax.tree.map(jnp.isfinite, metrics)
        value = {name: _together(name)(x, where=found[name], axis=1) for name, x in metrics.items()}
        return cls(value, jax.tree.map(partial(jnp.sum, axis=1, dtype=jnp.float32), found))

    def of_all_steps(self) -> "Tally":
        """One report of each metric, from those [D, T] of all devices; of `_last` the mean over environments."""
        counts = jax.tree.map(partial(jnp.sum, axis=0), self.count)
        value = {name: _together(name)(x, axis=0) for name, x in self.value.items()}  # [T]
        for name, count in counts.items():
            newest = len(count) - 1 - jnp.argmax(count[::-1] > 0)
            last = value[name][newest] / jnp.maximum(count[newest], 1)
            whole = last if kind_of(name) == "last" else _together(name)(value[name])
            value[name] = jnp.where(jnp.any(count > 0), whole, 0.0)
        return Tally(value, jax.tree.map(jnp.sum, counts))

    def __add__(self, newer: "Tally") -> "Tally":
        value = {name: self._with(newer, name) for name in self.value}
        return Tally(value, jax.tree.map(jnp.add, self.count, newer.count))

    def __or__(self, other: "Tally") -> "Tally":
        """The metrics of both."""
        return Tally(self.value | other.value, self.count | other.count)

    def metrics(self) -> Metrics:
        """What they come to; NaN for what was never reported."""
        return {
            name: x / self.count[name] if kind_of(name) == "mean" else jnp.where(self.count[name] > 0, x, jnp.nan)
            for name, x in self.value.items()
        }

    def _with(self, newer: "Tally", name: str) -> jax.Array:
        """The value of both reports of a metric."""
        old, new = self.value[name], newer.value[name]
        none = [newer.count[name] == 0, self.count[name] == 0]
        kinds = {"max": jnp.maximum, "min": jnp.minimum, "last": lambda old, new: new}
        return jnp.select(none, [old, new], kinds.get(kind_of(name), jnp.add)(old, new))
