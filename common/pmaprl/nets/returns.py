"""Distributions of returns (Bellemare et al. 2017).

A Q function predicts the whole distribution, or its mean alone.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


class ValueDistribution(struct.PyTreeNode):
    """A categorical distribution over Z returns.

    With Z = 1 it is a number, whose distribution is not known.
    """

    atoms: Array  # [..., Z] returns
    logits: Array | None  # [..., Z]; None for a number
    # A prediction is over Z equally spaced returns from `low` to `high`
    low: float = struct.field(pytree_node=False)
    high: float = struct.field(pytree_node=False)

    @classmethod
    def of(
        cls,
        outputs: Array,
        low: float,
        high: float,
    ) -> "ValueDistribution":
        """Make the distribution from a network's outputs [..., Z]."""
        count = outputs.shape[-1]
        if count == 1:
            return cls(
                atoms=outputs,
                logits=None,
                low=low,
                high=high,
            )
        atoms = jnp.broadcast_to(jnp.linspace(low, high, count), outputs.shape)
        return cls(
            atoms=atoms,
            logits=outputs,
            low=low,
            high=high,
        )

    @property
    def probs(self) -> Array:
        """Probabilities [..., Z] of the returns; 1 for a number."""
        if self.logits is None:
            return jnp.ones_like(self.atoms)
        return jax.nn.softmax(self.logits)

    def mean(self) -> Array:
        """Mean return [...]."""
        if self.logits is None:
            return self.atoms[..., 0]
        return jnp.sum(self.probs * self.atoms, axis=-1)

    def smallest(self) -> "ValueDistribution":
        """Select the distribution with the smallest mean, [...], from Q of them, [Q, ...]."""
        if self.logits is None:
            return self.replace(atoms=jnp.min(self.atoms, axis=0))
        index = jnp.argmin(self.mean(), axis=0)[None, ..., None]
        return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=0)[0], self)

    def of_actions(self, action: Array) -> "ValueDistribution":
        """Select the distributions of `action` [B] from those of all n actions, [..., B, n]."""
        index = action.reshape(*[1] * (self.atoms.ndim - 3), len(action), 1, 1)

        def taken(x: Array) -> Array:
            return jnp.take_along_axis(x, index, axis=-2)[..., 0, :]

        return jax.tree.map(taken, self)

    def expected(self, probs: Array) -> "ValueDistribution":
        """Mix the distributions of all discrete actions, [..., n], with probabilities `probs`."""
        if self.logits is None:
            means = jnp.sum(probs * self.atoms[..., 0], axis=-1, keepdims=True)
            return self.replace(atoms=means)
        # Logarithms have a finite gradient where a probability is 0 after rounding
        smallest = jnp.finfo(probs.dtype).tiny
        log_probs = jnp.log(jnp.maximum(probs, smallest))[..., None]
        mixed = jax.nn.logsumexp(log_probs + jax.nn.log_softmax(self.logits), axis=-2)
        return self.replace(atoms=self.atoms[..., 0, :], logits=mixed)

    def outside(self) -> Array:
        """Probability [...] of returns below `low` or above `high`, which `project` clips."""
        beyond = (self.atoms < self.low) | (self.atoms > self.high)
        return jnp.sum(self.probs, axis=-1, where=beyond)

    def error(self, target: "ValueDistribution") -> Array:
        """Error [...] of the prediction.

        It is the squared error of a number, or the cross entropy with the target's distribution
        after projecting that to the atoms of the prediction.
        """
        if self.logits is None:
            return jnp.square(self.mean() - target.mean())
        probs = project(target.probs, target.atoms, self.low, self.high)
        return -jnp.sum(probs * jax.nn.log_softmax(self.logits), axis=-1)


# Share of returns outside above which a run warns; a new network has some returns outside too
MOST_OUTSIDE = 0.2


def caution_of_support(flags: str) -> dict[str, tuple[float, str]]:
    """Caution for the metric `q/outside`, the share of returns beyond the support.

    Args:
        flags: the flags that set the support, with their values.

    Returns:
        An entry of the `cautions` of an algorithm.
    """
    warning = f"this share of the returns is beyond {flags} and is clipped; widen the range"
    return {"q/outside": (MOST_OUTSIDE, warning)}


def project(
    probs: Array,
    returns: Array,
    low: float,
    high: float,
) -> Array:
    """Project a distribution to equally spaced atoms (Bellemare et al. 2017, eq. 7).

    Each return shares its probability between the two atoms around it.

    Args:
        probs: [..., Z] probabilities of the returns.
        returns: [..., Z].
        low: first atom.
        high: last atom.

    Returns:
        [..., Z] probabilities of the atoms.
    """
    last = returns.shape[-1] - 1
    place = (jnp.clip(returns, low, high) - low) * (last / (high - low))
    distance = jnp.abs(place[..., None] - jnp.arange(last + 1))
    share = jnp.maximum(1 - distance, 0.0)  # [..., Z, Z]
    # A sum of products stays in float32 where matrix products do not
    return jnp.sum(probs[..., None] * share, axis=-2)
