"""What a policy has to know of its environment, also as JSON."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from common.envs.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple, like, map_leaves, zeros


class EnvSpec(NamedTuple):
    """What a policy has to know of its environment; an `Env` has the same attributes."""

    name: str
    observation_space: Space
    obs_dtype: Any  # NumPy's type of an observation, a tree of types where it has parts
    action_space: Space
    is_judged: bool = False  # whether episodes have an objective beside their returns

    @property
    def obs_like(self) -> Any:
        """Shape and type of an observation."""
        return like(self.observation_space, self.obs_dtype)

    def example_obs(self, *batch: int) -> Any:
        """A batch of observations, all zeros."""
        return zeros(self, *batch)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "observation_space": _to_json(self.observation_space),
            "obs_dtype": map_leaves(lambda leaf, dtype: str(dtype), self.observation_space, self.obs_dtype),
            "action_space": _to_json(self.action_space),
        } | ({"is_judged": True} if self.is_judged else {})

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "EnvSpec":
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError where `stored` is something else."""
        try:
            observation, action = (_from_json(stored[name]) for name in ("observation_space", "action_space"))
            dtype = map_leaves(lambda leaf, name: _dtype_from_json(name), observation, stored["obs_dtype"])
        except (AttributeError, IndexError) as error:  # parts of another kind, or fewer
            raise ValueError(str(error)) from error
        return cls(str(stored["name"]), observation, dtype, action, bool(stored.get("is_judged")))


def _to_json(space: Space) -> dict[str, Any]:
    if isinstance(space, Dict):
        return {"type": "Dict", "parts": {name: _to_json(part) for name, part in space.parts.items()}}
    if isinstance(space, Tuple):
        return {"type": "Tuple", "parts": [_to_json(part) for part in space.parts]}
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


def _dtype_from_json(name: Any) -> np.dtype:
    dtype = jnp.dtype(name)
    if not (jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b"):
        raise ValueError(f"{dtype} observations")
    return dtype


def _from_json(stored: dict[str, Any]) -> Space:
    if stored["type"] == "Dict":
        return Dict({str(name): _from_json(part) for name, part in sorted(stored["parts"].items())})
    if stored["type"] == "Tuple":
        return Tuple(tuple(map(_from_json, stored["parts"])))
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
