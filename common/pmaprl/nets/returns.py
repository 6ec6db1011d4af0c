"""Distributions of returns; a Q function predicts the whole one, or its mean alone (Bellemare et
al. 2017).
"""

import jax
import jax.numpy as jnp
from flax import struct


class ValueDistribution(struct.PyTreeNode):
    """A categorical distribution over K returns; with K = 1 a number, whose distribution is not
    known.
    """

    atoms: jax.Array  # [..., K] returns
    logits: jax.Array | None  # [..., K]; None of a number
    # Predictions are of K equally spaced returns from `low` to `high`
    low: float = struct.field(pytree_node=False)
    high: float = struct.field(pytree_node=False)

    @classmethod
    def of(cls, outputs: jax.Array, low: float, high: float) -> "ValueDistribution":
        """What a network predicts by its outputs [..., K]."""
        if outputs.shape[-1] == 1:
            return cls(outputs, None, low, high)
        return cls(
            jnp.broadcast_to(jnp.linspace(low, high, outputs.shape[-1]), outputs.shape),
            outputs,
            low,
            high,
        )

    def mean(self) -> jax.Array:
        """[...]"""
        if self.logits is None:
            return self.atoms[..., 0]
        return jnp.sum(jax.nn.softmax(self.logits) * self.atoms, axis=-1)

    def smallest(self) -> "ValueDistribution":
        """Of several [C, ...] those with the smallest mean, [...]."""
        if self.logits is None:
            return self.replace(atoms=jnp.min(self.atoms, axis=0))
        index = jnp.argmin(self.mean(), axis=0)[None, ..., None]
        return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=0)[0], self)

    def of_actions(self, action: jax.Array) -> "ValueDistribution":
        """Of all discrete actions [..., B, n] those of the `action` [B] taken, [..., B]."""
        index = action.reshape(*[1] * (self.atoms.ndim - 3), len(action), 1, 1)
        return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=-2)[..., 0, :], self)

    def expected(self, probs: jax.Array) -> "ValueDistribution":
        """Those of an action drawn by `probs` [..., n], from those of all discrete actions [...,
        n].
        """
        if self.logits is None:
            return self.replace(atoms=jnp.sum(probs * self.atoms[..., 0], axis=-1, keepdims=True))
        # In logarithms, whose gradient is finite where a probability is 0 after rounding
        log_probs = jnp.log(jnp.maximum(probs, jnp.finfo(probs.dtype).tiny))[..., None]
        mixed = jax.nn.logsumexp(log_probs + jax.nn.log_softmax(self.logits), axis=-2)
        return self.replace(atoms=self.atoms[..., 0, :], logits=mixed)

    def outside(self) -> jax.Array:
        """Probability of returns below `low` or above `high`, which `project` moves to those,
        [...].
        """
        beyond = (self.atoms < self.low) | (self.atoms > self.high)
        return jnp.sum(jax.nn.softmax(self.logits), axis=-1, where=beyond)

    def error(self, target: "ValueDistribution") -> jax.Array:
        """Squared error of a number, else the cross entropy with the target's distribution over our
        atoms, [...].
        """
        if self.logits is None:
            return jnp.square(self.mean() - target.mean())
        probs = project(jax.nn.softmax(target.logits), target.atoms, self.low, self.high)
        return -jnp.sum(probs * jax.nn.log_softmax(self.logits), axis=-1)


# Of the returns; at first a network that knows nothing is outside with some of them
MOST_OUTSIDE = 0.2


def caution_of_support(flags: str) -> dict[str, tuple[float, str]]:
    """The `cautions` of an algorithm whose metric `q/outside` is the share of returns beyond what
    `flags` say.
    """
    return {
        "q/outside": (
            MOST_OUTSIDE,
            f"so much of the returns is beyond {flags} and counts as that; make it wider",
        )
    }


def project(probs: jax.Array, returns: jax.Array, low: float, high: float) -> jax.Array:
    """Probabilities [..., K] of K equally spaced atoms from `low` to `high`, in place of those of
    `returns` [..., K].

    Each return shares its probability between the two atoms around it (Bellemare et al. 2017, eq.
    7).
    """
    last = returns.shape[-1] - 1
    place = (jnp.clip(returns, low, high) - low) * (last / (high - low))
    share = jnp.maximum(1 - jnp.abs(place[..., None] - jnp.arange(last + 1)), 0.0)  # [..., K, K]
    # In whole float32, also where matrix products are not
    return jnp.sum(probs[..., None] * share, axis=-2)
