"""Numbers that come of updates: one array on the devices, so that the host fetches one, and named
numbers there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from pmaprl.device.statistics import REDUCTIONS, Layout, Metrics, reduction_of

Numbers = dict[str, np.ndarray]
"""By name, one for each of S agents, [S]."""


class Outcome(NamedTuple):
    """Numbers of some updates on the host."""

    metrics: Numbers
    broken: Numbers
    """By metric the first update in which an agent's was not finite, or -1; empty where all were
    finite.
    """
    counts: Numbers
    """By metric how many reports are in it, for those of which several updates make one number."""
    updates: int

    def followed_by(self, newer: "Outcome") -> "Outcome":
        """Put together what came of these updates and of those right after them."""
        metrics = newer.metrics | {name: _together(self, newer, name) for name in newer.counts}
        metrics["episode/count"] = self.metrics["episode/count"] + newer.metrics["episode/count"]
        later = {name: np.where(x < 0, x, x + self.updates) for name, x in newer.broken.items()}
        first = {name: np.where(x < 0, later.get(name, x), x) for name, x in self.broken.items()}
        return Outcome(
            metrics=metrics,
            broken=later | first,
            counts={name: count + newer.counts[name] for name, count in self.counts.items()},
            updates=self.updates + newer.updates,
        )


def _together(older: Outcome, newer: Outcome, name: str) -> np.ndarray:
    """Put both numbers of a metric together, of which one may have no reports."""
    old = older.metrics[name]
    new = newer.metrics[name]
    count, more = (outcome.counts[name].astype(float) for outcome in (older, newer))
    if reduction_of(name) == "mean":
        both = (
            np.where(count > 0, old, 0) * count + np.where(more > 0, new, 0) * more
        ) / np.maximum(count + more, 1)
    else:
        combine = REDUCTIONS[reduction_of(name)].newer
        both = combine(np, old, new) if combine else old + new
    return np.select([more == 0, count == 0], [old, new], both).astype(old.dtype)


class Columns(struct.PyTreeNode):
    """The same numbers on the devices, in a vector for each kind of them."""

    vectors: tuple[jax.Array, ...]  # [K] each, behind the axis of agents, of 32-bit numbers
    names: tuple[tuple[str, tuple[str, ...]], ...] = struct.field(pytree_node=False)
    """Of each vector the field of `Outcome` that its numbers belong to, and what they are
    called.
    """

    @classmethod
    def of(cls, field: str, vectors: dict[str, jax.Array], layout: Layout) -> "Columns":
        """Take the vectors of a stacked `MetricSums`, for a field of `Outcome`; whatever is no
        int32 becomes float32.
        """
        typed = (x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in vectors.values())
        return cls(tuple(typed), tuple((field, tuple(layout[key])) for key in vectors))

    def __add__(self, more: "Columns") -> "Columns":
        """All numbers of both."""
        return Columns(self.vectors + more.vectors, self.names + more.names)

    def with_metrics(self, metrics: Metrics) -> "Columns":
        """Numbers of each agent beside them, of which the newest count where several calls make a
        row.
        """
        layout: Layout = {}
        for name, x in metrics.items():
            layout.setdefault(str(x.dtype), []).append(name)
        vectors = {
            key: jnp.stack([metrics[name] for name in names], axis=-1)
            for key, names in layout.items()
        }
        return self + Columns.of("metrics", vectors, layout)

    def packed(self) -> "PackedOutcome":
        """Make one array of the vectors [S, K] of all agents."""
        bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in self.vectors]
        kinds = [(*names, x.dtype.name) for names, x in zip(self.names, self.vectors, strict=True)]
        return PackedOutcome(jnp.concatenate(bits, axis=-1), tuple(kinds))


class PackedOutcome(struct.PyTreeNode):
    """The same in one array, as each array that the host fetches takes it its time."""

    numbers: jax.Array  # [S, K] bits of 32-bit numbers
    kinds: tuple[tuple[str, tuple[str, ...], str], ...] = struct.field(pytree_node=False)
    """Field, names and type of neighbours."""

    def fetch(self, updates: int) -> Outcome:
        """Wait for the `updates` that it is of, and copy it to the host."""
        rows = np.ascontiguousarray(np.asarray(self.numbers).T)  # [K, S]
        fields: dict[str, Numbers] = {"metrics": {}, "broken": {}, "counts": {}}
        begin = 0
        for field, names, dtype in self.kinds:
            end = begin + len(names)
            if field != "broken" or (rows[begin:end] >= 0).any():
                fields[field] |= zip(names, rows[begin:end].view(dtype), strict=True)
            begin = end
        fields["metrics"]["episode/count"] = fields["counts"]["episode/return"]
        return Outcome(**fields, updates=updates)
