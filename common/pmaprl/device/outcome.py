"""Numbers that updates report: one array on the devices, and named numbers on the host.

The host fetches a single array, because every fetch takes time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from pmaprl.device.statistics import REDUCTIONS, Layout, Metrics, reduction_of

Numbers = dict[str, np.ndarray]
"""Numbers [S] by name, one for each of S agents."""


class Outcome(NamedTuple):
    """Numbers of some updates on the host."""

    metrics: Numbers
    broken: Numbers
    """By metric, the first update in which it was not finite, or -1; empty if all were finite."""
    counts: Numbers
    """By metric, the number of reports in it, for metrics that several updates add up."""
    updates: int

    def followed_by(self, newer: "Outcome") -> "Outcome":
        """Combine the numbers of these updates and of those right after them."""
        metrics = dict(newer.metrics)
        counts = {}
        for name in newer.counts:
            metrics[name] = _together(self, newer, name)
        for name, count in self.counts.items():
            counts[name] = count + newer.counts[name]
        episodes = "episode/count"
        metrics[episodes] = self.metrics[episodes] + newer.metrics[episodes]

        broken = {}
        for name, first in newer.broken.items():
            broken[name] = np.where(first < 0, first, first + self.updates)
        for name, first in self.broken.items():
            broken[name] = np.where(first < 0, broken.get(name, first), first)
        return Outcome(
            metrics=metrics,
            broken=broken,
            counts=counts,
            updates=self.updates + newer.updates,
        )


def _together(
    older: Outcome,
    newer: Outcome,
    name: str,
) -> np.ndarray:
    """Combine both numbers of a metric, of which one may have no reports."""
    old = older.metrics[name]
    new = newer.metrics[name]
    old_count = older.counts[name].astype(float)
    new_count = newer.counts[name].astype(float)
    if reduction_of(name) == "mean":
        old_sum = np.where(old_count > 0, old, 0) * old_count
        new_sum = np.where(new_count > 0, new, 0) * new_count
        both = (old_sum + new_sum) / np.maximum(old_count + new_count, 1)
    else:
        combine = REDUCTIONS[reduction_of(name)].combine
        both = combine(np, old, new) if combine else old + new
    return np.select([new_count == 0, old_count == 0], [old, new], both).astype(old.dtype)


class Columns(struct.PyTreeNode):
    """The numbers of an `Outcome` on the devices, a vector for each kind of them."""

    vectors: tuple[Array, ...]  # 32-bit numbers [V] each, behind the axis of agents
    names: tuple[tuple[str, tuple[str, ...]], ...] = struct.field(pytree_node=False)
    """For each vector, the field of `Outcome` that its numbers belong to, and their names."""

    @classmethod
    def of(
        cls,
        field: str,
        vectors: dict[str, Array],
        layout: Layout,
    ) -> "Columns":
        """Take the vectors of a stacked `MetricSums`, for a field of `Outcome`.

        Numbers of other types than int32 become float32.
        """
        typed = [x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in vectors.values()]
        names = [(field, tuple(layout[key])) for key in vectors]
        return cls(vectors=tuple(typed), names=tuple(names))

    def __add__(self, more: "Columns") -> "Columns":
        """Append the numbers of other columns."""
        return Columns(vectors=self.vectors + more.vectors, names=self.names + more.names)

    def with_metrics(self, metrics: Metrics) -> "Columns":
        """Append metrics of each agent; a row over several calls keeps their newest values."""
        layout: Layout = {}
        for name, x in metrics.items():
            layout.setdefault(str(x.dtype), []).append(name)
        vectors = {}
        for key, names in layout.items():
            vectors[key] = jnp.stack([metrics[name] for name in names], axis=-1)
        return self + Columns.of("metrics", vectors, layout)

    def packed(self) -> "PackedOutcome":
        """Make one array of the vectors [S, V] of all agents."""
        bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in self.vectors]
        kinds = []
        for (field, names), x in zip(self.names, self.vectors, strict=True):
            kinds.append((field, names, x.dtype.name))
        return PackedOutcome(numbers=jnp.concatenate(bits, axis=-1), kinds=tuple(kinds))


class PackedOutcome(struct.PyTreeNode):
    """The numbers of an `Outcome` in one array, since the host pays for every array it fetches."""

    numbers: Array  # [S, V] bits of 32-bit numbers
    kinds: tuple[tuple[str, tuple[str, ...], str], ...] = struct.field(pytree_node=False)
    """Field, names and type of numbers that stand together."""

    def fetch(self, updates: int) -> Outcome:
        """Wait for the numbers of this many updates, and copy them to the host."""
        rows = np.ascontiguousarray(np.asarray(self.numbers).T)  # [V, S]
        fields: dict[str, Numbers] = {"metrics": {}, "broken": {}, "counts": {}}
        begin = 0
        for field, names, dtype in self.kinds:
            end = begin + len(names)
            part = rows[begin:end]
            if field != "broken" or (part >= 0).any():
                fields[field] |= zip(names, part.view(dtype), strict=True)
            begin = end
        counts = fields["counts"]
        metrics = fields["metrics"] | {"episode/count": counts["episode/return"]}
        return Outcome(
            metrics=metrics,
            broken=fields["broken"],
            counts=counts,
            updates=updates,
        )
