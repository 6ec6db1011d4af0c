"""The kit's environments in gymnax for peers that are written for gymnax 0.0.9, whose games differ a little."""

from typing import Any

import gymnax
import jax.numpy as jnp


class OldGymnax:
    """An environment of today's gymnax whose `step` returns `done`, as it did before."""

    def __init__(self, env: Any):
        self._env = env

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # asked for by `copy`, before there is one
            raise AttributeError(name)
        return getattr(self._env, name)

    def step(self, key, state, action, params=None):
        """Observation, state, reward, whether the episode is over for whatever reason, and no further information."""
        obs, state, reward, terminated, truncated, _ = self._env.step(key, state, action, params)
        return obs, state, reward, jnp.logical_or(terminated, truncated), {}


def make(name: str, **params: Any) -> tuple[OldGymnax, Any]:
    """What `gymnax.make` returned."""
    env, env_params = gymnax.make(name, **params)
    return OldGymnax(env), env_params
