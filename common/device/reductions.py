"""How metrics are put together: over devices, over the gradient steps of an update, over the updates of an interval.

They are means, except where a name ends in `_sum`, `_max`, `_min` or `_last`: then they are that.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from common.device.sharding import AXIS, flat_pmean

Metrics = dict[str, jax.Array]


def kind_of(name: str) -> str:
    """What the metric of that name is: `sum`, `max`, `min`, `last` or `mean`."""
    return next((kind for kind in ("sum", "max", "min", "last") if name.endswith(f"_{kind}")), "mean")


def join(name: str, old: Any, new: Any, np: Any = jnp) -> Any:
    """The value of two reports of a metric, of a mean their sum; on the host with `np` as NumPy."""
    functions = {"mean": np.add, "sum": np.add, "max": np.maximum, "min": np.minimum, "last": lambda old, new: new}
    return functions[kind_of(name)](old, new)


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


class Tally(struct.PyTreeNode):
    """Metrics over however many updates reported them, added up on the device."""

    value: Metrics  # the sum so far, of a mean too; or the largest, the smallest, the newest
    count: Metrics  # how many reports are in it; a value without any is 0

    @classmethod
    def of(cls, metrics: Metrics) -> "Tally":
        """One report of each metric."""
        return cls(value=metrics, count=jax.tree.map(jnp.ones_like, metrics))

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
        return jnp.select(none, [old, new], join(name, old, new))
