"""Observation and action spaces, as small records shared by every environment suite, and as JSON."""

import math
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

    def __repr__(self) -> str:
        return f"Box{list(self.shape)}"


Space = Discrete | MultiDiscrete | Box


class EnvSpec(NamedTuple):
    """What a policy has to know of its environment; an `Env` has the same attributes."""

    name: str
    observation_space: Space
    obs_dtype: np.dtype
    action_space: Space

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "observation_space": _to_json(self.observation_space),
            "obs_dtype": str(self.obs_dtype),
            "action_space": _to_json(self.action_space),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "EnvSpec":
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError where `stored` is something else."""
        observation, action = (_from_json(stored[name]) for name in ("observation_space", "action_space"))
        dtype = jnp.dtype(stored["obs_dtype"])
        if not (jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b"):
            raise ValueError(f"{dtype} observations")
        return cls(str(stored["name"]), observation, dtype, action)


def convert(space: Any, what: str) -> Space:
    """Our record of a gymnax or gymnasium space, recognised by its attributes; ours stay as they are.

    Raises ValueError, naming `what` the space is for, where it is none of Discrete, MultiDiscrete (or a Tuple of
    Discrete) and Box.
    """
    if isinstance(space, (Discrete, MultiDiscrete)):
        return space
    if hasattr(space, "nvec"):
        return MultiDiscrete(tuple(int(n) for n in np.ravel(space.nvec)))
    if hasattr(space, "n") and not getattr(space, "shape", ()):  # MultiBinary has both
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


def clip(action: jax.Array, space: Space, batch: tuple[int, ...] = ()) -> jax.Array:
    """Actions [*batch, A] or [*batch, *shape] as an environment takes them: those of a Box in shape and in bounds."""
    if not isinstance(space, Box):
        return action
    return jnp.clip(action.reshape(*batch, *space.shape), space.low, space.high)


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
    shape = space.shape if is_image(space) else (math.prod(space.shape),)
    return observation.astype(jnp.float32).reshape(*batch, *shape) / scale


def flat_size(space: Space) -> int:
    """How many numbers an element is, encoded."""
    return math.prod(space.shape) if isinstance(space, Box) else sum(space.nvec)


def is_image(space: Space) -> bool:
    return isinstance(space, Box) and len(space.shape) == 3


def _to_json(space: Space) -> dict[str, Any]:
    if isinstance(space, Discrete):
        return {"type": "Discrete", "shape": [], "n": space.n}
    if isinstance(space, MultiDiscrete):
        return {"type": "MultiDiscrete", "shape": list(space.shape), "nvec": list(space.nvec)}
    bounds = {name: _bound_to_json(getattr(space, name)) for name in ("low", "high")}
    return {"type": "Box", "shape": list(space.shape), **bounds}


def _bound_to_json(bound: np.ndarray) -> Any:
    """One number where all are the same, else all of them in order; None is unbounded."""
    numbers = [float(x) if np.isfinite(x) else None for x in np.ravel(bound)]
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _from_json(stored: dict[str, Any]) -> Space:
    if stored["type"] == "Discrete":
        return Discrete(int(stored["n"]))
    if stored["type"] == "MultiDiscrete":
        return MultiDiscrete(tuple(int(n) for n in stored["nvec"]))
    if stored["type"] != "Box":
        raise ValueError(f"unknown space {stored['type']!r}")
    shape = tuple(int(size) for size in stored["shape"])
    bounds = {}
    for name, unbounded in (("low", -np.inf), ("high", np.inf)):
        numbers = np.array(stored[name], object)
        numbers = np.where(numbers == None, unbounded, numbers).astype(np.float32)  # noqa: E711  (element by element)
        bounds[name] = np.broadcast_to(numbers.reshape(shape if numbers.ndim else ()), shape)
    return Box(shape=shape, **bounds)
