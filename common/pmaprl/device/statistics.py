"""Metrics, reduced on the device over devices, gradient steps and updates.

A metric's name says how it is reduced: by the mean, unless it ends in `_sum`, `_max`, `_min` or
`_last` (see REDUCTIONS).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from pmaprl.cli.errors import UsageError
from pmaprl.device.sharding import AXIS, flat_pmean

Metrics = dict[str, Array]


Number = Array | np.ndarray | float
"""A number [] or an array of them, on the device or by NumPy."""


class Reduction(NamedTuple):
    """Rules by which the numbers of a metric become one.

    Attributes:
        over_devices: collective over each device's number. None averages it with the gradients.
        over_steps: reduction of the numbers of steps; `where` selects some.
        tallied: reduction within `MetricSums` along `axis`; `where` selects some. A mean is kept as
            a sum, which a count divides in the end.
        combine: `combine(numpy, old, new)` combines the value so far with a newer one, by numpy or
            jax.numpy. None adds them.
    """

    over_devices: Callable | None
    over_steps: Callable
    tallied: Callable
    combine: Callable | None = None


def _last(x: Array, where: Array | None) -> Array:
    return x[-1 if where is None else jnp.sum(where) - 1]


_max = partial(jnp.max, initial=-jnp.inf)


_min = partial(jnp.min, initial=jnp.inf)


REDUCTIONS = {
    "sum": Reduction(
        over_devices=jax.lax.psum,
        over_steps=jnp.sum,
        tallied=jnp.sum,
    ),
    "max": Reduction(
        over_devices=jax.lax.pmax,
        over_steps=_max,
        tallied=_max,
        combine=lambda numpy, old, new: numpy.maximum(old, new),
    ),
    "min": Reduction(
        over_devices=jax.lax.pmin,
        over_steps=_min,
        tallied=_min,
        combine=lambda numpy, old, new: numpy.minimum(old, new),
    ),
    "last": Reduction(
        over_devices=None,
        over_steps=_last,
        tallied=jnp.sum,
        combine=lambda numpy, old, new: new,
    ),
    "mean": Reduction(
        over_devices=None,
        over_steps=jnp.mean,
        tallied=jnp.sum,
    ),
}


def reduction_of(name: str) -> str:
    """Name in REDUCTIONS of the reduction that a metric's name asks for."""
    return next((kind for kind in REDUCTIONS if name.endswith(f"_{kind}")), "mean")


def across_devices(grads: Any, metrics: Metrics) -> tuple[Any, Metrics]:
    """Reduce gradients and metrics over devices, each with an equal share of the samples."""
    reduced = {}
    means = {}
    for name, x in metrics.items():
        collective = REDUCTIONS[reduction_of(name)].over_devices
        if collective is None:
            means[name] = x
        else:
            reduced[name] = collective(x, AXIS)
    grads, means = flat_pmean((grads, means))  # one collective for all of them
    return grads, means | reduced


class OptionalMetric(NamedTuple):
    """A metric that not every update reports."""

    value: Number
    reports: Number  # 1, or 0 where it was not reported


Reports = Mapping[str, Array | OptionalMetric]
"""Metrics of an update, some of which it may not report."""


def check_metrics(metrics: Reports) -> None:
    """Raise UsageError unless each metric of an algorithm's update is one number []."""
    for name, x in metrics.items():
        value = x.value if isinstance(x, OptionalMetric) else x
        if jnp.shape(value):
            raise UsageError(
                f"the metric {name!r} of update has shape {list(jnp.shape(value))}, and a metric "
                "is one number: return its jnp.mean, for example"
            )


def reduce_over_devices(metrics: Metrics) -> Metrics:
    """Reduce an update's metrics over devices by their names, all but `_sum` metrics.

    `adam_step` and `gradient_step` have summed those already, and a second sum would count twice.
    """
    unreduced = {name: x for name, x in metrics.items() if reduction_of(name) != "sum"}
    return metrics | across_devices((), unreduced)[1]


def over_steps(metrics: Metrics, valid: Array | None = None) -> Metrics:
    """Reduce metrics over steps.

    Args:
        metrics: a number for each step, by name.
        valid: bool, True for steps that count, which come before all others; default: all count.

    Returns:
        Numbers [], by name.
    """
    reduced = {}
    for name, x in metrics.items():
        reduced[name] = REDUCTIONS[reduction_of(name)].over_steps(x, where=valid)
    return reduced


Layout = dict[str, list[str]]
"""Names of the metrics in each vector of a stacked `MetricSums`, by the name of the vector."""


class MetricSums(struct.PyTreeNode):
    """Metrics added up over the updates that reported them, on the device or by NumPy."""

    # Sum so far for sums and means, else the largest, smallest or newest number; 0 without reports
    value: dict[str, Number]
    count: dict[str, Number]  # number of reports

    @classmethod
    def of(cls, metrics: Reports) -> "MetricSums":
        """Take one report of each metric, or none of an `OptionalMetric` without a report."""
        value = {}
        count = {}
        for name, x in metrics.items():
            report = x if isinstance(x, OptionalMetric) else OptionalMetric(x, jnp.ones_like(x))
            value[name] = report.value
            count[name] = report.reports
        return cls(value=value, count=count)

    @classmethod
    def of_each_step(cls, metrics: Metrics, is_reported: dict[str, Array]) -> "MetricSums":
        """Take a report of each step from metrics [T, N] of its environments.

        Args:
            metrics: numbers [T, N], by name.
            is_reported: bool [T, N] by name, True where the environment reports a number.

        Returns:
            Reports with values and counts [T].
        """
        value = {}
        count = {}
        for name, x in metrics.items():
            tallied = REDUCTIONS[reduction_of(name)].tallied
            value[name] = tallied(x, where=is_reported[name], axis=1)
        for name, x in is_reported.items():
            count[name] = jnp.sum(x, axis=1, dtype=jnp.float32)
        return cls(value=value, count=count)

    def of_all_steps(self) -> "MetricSums":
        """Reduce the reports [D, T] of all devices and steps to one.

        A `_last` metric becomes the mean over the environments that report in the last step.
        """
        counts = jax.tree.map(partial(jnp.sum, axis=0), self.count)

        def of_metric(name: str, count: Array) -> Array:
            kind = reduction_of(name)
            tallied = REDUCTIONS[kind].tallied
            steps = tallied(self.value[name], axis=0)  # [T]
            newest = len(count) - 1 - jnp.argmax(count[::-1] > 0)
            last = steps[newest] / jnp.maximum(count[newest], 1)
            is_reported = jnp.any(count > 0)
            total = last if kind == "last" else tallied(steps)
            return jnp.where(is_reported, total, 0.0)

        return MetricSums(
            value={name: of_metric(name, x) for name, x in counts.items()},
            count=jax.tree.map(jnp.sum, counts),
        )

    def stacked(self) -> tuple["MetricSums", "Layout"]:
        """Stack metrics [] of one kind into one vector, so that adding them up is one operation.

        Returns:
            The vectors, and the names of the metrics in each.
        """
        layout: Layout = {}
        for name, x in self.value.items():
            dtypes = f"{jnp.result_type(x)}_{jnp.result_type(self.count[name])}"
            key = f"{dtypes}_{reduction_of(name)}"
            layout.setdefault(key, []).append(name)
        value: dict[str, Number] = {}
        count: dict[str, Number] = {}
        for key, names in layout.items():
            value[key] = jnp.stack([self.value[name] for name in names])
        for key, names in layout.items():
            count[key] = jnp.stack([self.count[name] for name in names])
        return MetricSums(value=value, count=count), layout

    def __add__(self, newer: "MetricSums") -> "MetricSums":
        value = {name: self._with(newer, name) for name in self.value}
        count: dict[str, Number] = {}
        for name, reports in self.count.items():
            count[name] = reports + newer.count[name]
        return MetricSums(value=value, count=count)

    def __or__(self, other: "MetricSums") -> "MetricSums":
        """Join the metrics of both."""
        return MetricSums(value=self.value | other.value, count=self.count | other.count)

    @np.errstate(invalid="ignore")  # NumPy's 0 / 0
    def metrics(self) -> dict[str, Number]:
        """Numbers of all metrics: sums divided by counts for means; NaN for one never reported."""
        metrics = {}
        for name, x in self.value.items():
            count = self.count[name]
            if reduction_of(name) == "mean":
                metrics[name] = x / count
            else:
                metrics[name] = _numpy(x).where(count > 0, x, jnp.nan)
        return metrics

    def _with(self, newer: "MetricSums", name: str) -> Number:
        """Combine the values of both reports of a metric."""
        old = self.value[name]
        new = newer.value[name]
        both = REDUCTIONS[reduction_of(name)].combine
        if both is None:
            return old + new
        none = [newer.count[name] == 0, self.count[name] == 0]
        numpy = _numpy(new)
        return numpy.select(none, [old, new], both(numpy, old, new))


def _numpy(x: Any) -> Any:
    return jnp if isinstance(x, Array) else np
