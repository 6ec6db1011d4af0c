"""Masks that gymnasium's environments give in their `info`, as a part of what they observe.

Processes of environments import this too, so it needs nothing that is slow.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


def make(mask: str, env_id: str, **arguments: Any) -> gymnasium.Env:
    """gymnasium's environment; where its info has a `mask` of legal actions, that is a part of what it observes."""
    env = gymnasium.make(env_id, **arguments)
    parts = env.observation_space.spaces if isinstance(env.observation_space, Dict) else {}
    if mask in parts or not isinstance(env.action_space, Discrete | MultiDiscrete):
        return env
    info = env.reset()[1]  # nothing else tells
    return MaskObserved(env, mask, np.shape(info[mask])) if mask in info else env


class MaskObserved(gymnasium.Wrapper):
    """Observes the mask beside the parts of a dictionary, or beside the whole observation, which is then called obs."""

    def __init__(self, env: gymnasium.Env, mask: str, shape: tuple[int, ...]):
        super().__init__(env)
        self._mask, self._has_parts = mask, isinstance(env.observation_space, Dict)
        parts = env.observation_space.spaces if self._has_parts else {"obs": env.observation_space}
        self._box = Box(0, 1, shape, np.int8)
        self.observation_space = Dict({mask: self._box, **parts})

    def reset(self, **options: Any) -> tuple[Any, dict]:
        obs, info = self.env.reset(**options)
        return self._observed(obs, info), info

    def step(self, action: Any) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._observed(obs, info), reward, terminated, truncated, info

    def _observed(self, obs: Any, info: dict) -> dict:
        if self._mask not in info:
            raise RuntimeError(f"its info has no {self._mask}, which it had after the first reset")
        legal = np.asarray(info[self._mask], self._box.dtype)
        return {self._mask: legal, **(obs if self._has_parts else {"obs": obs})}
