"""Means of metrics over however many updates reported them, added up on the device."""

import jax
import jax.numpy as jnp
from flax import struct


class Averages(struct.PyTreeNode):
    """Sums of metrics, and for each metric how many values its sum holds."""

    total: dict[str, jax.Array]
    count: dict[str, jax.Array]

    @classmethod
    def of(cls, metrics: dict[str, jax.Array]) -> "Averages":
        """One value of each metric."""
        return cls(total=metrics, count=jax.tree.map(jnp.ones_like, metrics))

    def __add__(self, other: "Averages") -> "Averages":
        return jax.tree.map(jnp.add, self, other)

    def __or__(self, other: "Averages") -> "Averages":
        """The metrics of both."""
        return Averages(self.total | other.total, self.count | other.count)

    def metrics(self) -> dict[str, jax.Array]:
        """The means; NaN for what was never reported."""
        return {name: total / self.count[name] for name, total in self.total.items()}


def zeros_of(function, *args):
    """Zeros shaped as what `function(*args)` returns: where a loop's sums begin."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))
