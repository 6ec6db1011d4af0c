"""Observation and action spaces, as small records shared by every environment suite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Discrete(NamedTuple):
    """Integers 0 .. n-1, shape []."""

    n: int

    @property
    def nvec(self) -> tuple[int, ...]:
        return (self.n,)

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


class MultiDiscrete(NamedTuple):
    """A vector of integers, component i in 0 .. nvec[i]-1."""

    nvec: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)


class Box(NamedTuple):
    """Arrays between `low` and `high` (arrays of `shape`, possibly infinite)."""

    low: np.ndarray
    high: np.ndarray
    shape: tuple[int, ...]


Space = Discrete | MultiDiscrete | Box


def convert(space: Any, what: str) -> Space:
    """Our record of a gymnax or gymnasium space, recognised by its attributes.

    Raises ValueError, naming `what` the space is for, where it is none of Discrete, MultiDiscrete (or a Tuple of
    Discrete) and Box.
    """
    if hasattr(space, "nvec"):
        return MultiDiscrete(tuple(int(n) for n in np.ravel(space.nvec)))
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    if hasattr(space, "low"):
        shape = tuple(space.shape)
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), shape) for bound in (space.low, space.high))
        return Box(low, high, shape)
    parts = getattr(space, "spaces", ())
    if isinstance(parts, (tuple, list)) and parts and all(hasattr(part, "n") for part in parts):
        return MultiDiscrete(tuple(int(part.n) for part in parts))
    raise ValueError(f"{what} {space!r} is not supported: it must be Discrete, MultiDiscrete or Box")


def sample(key: jax.Array, space: Space) -> jax.Array:
    """A uniformly random element; an unbounded Box dimension is standard normal."""
    if isinstance(space, Discrete):
        return jax.random.randint(key, (), 0, space.n)
    if isinstance(space, MultiDiscrete):
        return jax.random.randint(key, space.shape, 0, jnp.asarray(space.nvec))
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, 0), np.where(bounded, space.high, 1)
    uniform = jax.random.uniform(key, space.shape, minval=low, maxval=high)
    return jnp.where(bounded, uniform, jax.random.normal(key, space.shape))


def encode(observation: jax.Array, space: Space) -> jax.Array:
    """A batch of raw observations as network input, float32: [..., *shape] or, one-hot, [..., sum(nvec)].

    Bytes become 0..1. Arrays that are not images [H, W, C] are flattened.
    """
    if not isinstance(space, Box):
        components = observation[..., None] if isinstance(space, Discrete) else observation
        parts = [jax.nn.one_hot(components[..., i], n) for i, n in enumerate(space.nvec)]
        return jnp.concatenate(parts, axis=-1)
    scale = 255.0 if observation.dtype == jnp.uint8 else 1.0
    batch = observation.shape[: observation.ndim - len(space.shape)]
    shape = space.shape if is_image(space) else (-1,)
    return observation.astype(jnp.float32).reshape(*batch, *shape) / scale


def is_image(space: Space) -> bool:
    return isinstance(space, Box) and len(space.shape) == 3
