"""Units of the actions of a Box, -1 .. 1 between its bounds: policies act in them, replay buffers keep them."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from common.envs.masks import sample_legal
from common.envs.spaces import Box, Discrete, Space


def action_scale(space: Box) -> tuple[np.ndarray, np.ndarray]:
    """Factor and offset [A] that bring -1 .. 1 to the bounds of a Box; 1 and 0 in dimensions that are not bounded."""
    low, high = np.ravel(space.low), np.ravel(space.high)
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = np.isfinite(high - low) & (low < high)
        scale, offset = (high - low) / 2, (high + low) / 2
    return np.where(bounded, scale, 1).astype(np.float32), np.where(bounded, offset, 0).astype(np.float32)


def to_units(action: jax.Array, scale: Sequence[float], offset: Sequence[float]) -> jax.Array:
    """Actions [..., A] of a Box, of whose bounds `action_scale` says this, in their units."""
    return (action - jnp.asarray(offset)) / jnp.asarray(scale)


def to_env(action: jax.Array, space: Space) -> jax.Array:
    """Actions [..., A] as the environment takes them."""
    if isinstance(space, Discrete):
        return action
    scale, offset = action_scale(space)
    return action * scale + offset


def uniform_action(key: jax.Array, space: Space, legal: jax.Array | None = None) -> jax.Array:
    """A uniformly random action, as it is kept; one that is `legal` [n] where that is known."""
    if legal is not None:
        return sample_legal(key, space, legal)
    if isinstance(space, Discrete):
        return jax.random.randint(key, (), 0, space.n)
    return jax.random.uniform(key, (math.prod(space.shape),), minval=-1.0, maxval=1.0)


def empty_action(space: Space) -> jax.Array:
    """An action of zeros, which has its shape and type."""
    return jnp.zeros_like(uniform_action(jax.random.key(0), space))
