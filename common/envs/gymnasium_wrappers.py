"""Wrappers of gymnasium's environments: action masks from `info` in the observation, and hidden velocities.

Registers `pmaprl/PartialCartPole-v1` and `pmaprl/PartialPendulum-v1`. Processes of environments import this too, so it
needs nothing that is slow; the mask's name comes as an argument.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space, Tuple
from gymnasium.wrappers import TransformObservation

from common.cli.errors import UnusableEnvError
from common.envs.suite_tools import PARTIAL, WITHOUT_VELOCITIES


def make(mask: str, env_id: str, **arguments: Any) -> gymnasium.Env:
    """gymnasium's environment; where its info has a `mask` of legal actions, that is a part of what it observes."""
    env = gymnasium.make(env_id, **arguments)
    parts = env.observation_space.spaces if isinstance(env.observation_space, Dict) else {}
    if mask in parts or isinstance(env.action_space, Box):
        return env
    legal = env.reset()[1].get(mask)  # nothing else tells
    return env if legal is None else MaskObserved(env, mask, legal)


class MaskObserved(gymnasium.Wrapper):
    """Observes the mask beside the parts of a dictionary, or beside the whole observation, which is then called obs."""

    def __init__(self, env: gymnasium.Env, mask: str, legal: Any):
        """`legal` is a mask: an array, or a tuple of such."""
        super().__init__(env)
        self._mask, self._space, self._has_parts = mask, _space_of(legal), isinstance(env.observation_space, Dict)
        parts = env.observation_space.spaces if self._has_parts else {"obs": env.observation_space}
        self.observation_space = Dict({mask: self._space, **parts})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._observed(obs, info, over=False), info

    def step(self, action: Any) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._observed(obs, info, terminated or truncated), reward, terminated, truncated, info

    def _observed(self, obs: Any, info: dict, over: bool) -> dict:
        legal = info.get(self._mask)
        if legal is None and not over:  # at the end nobody acts
            raise UnusableEnvError(
                f"the info of {self.env.spec.id} has no {self._mask} after a step, which it had after the first reset"
            )
        return {self._mask: _typed(self._space, legal), **(obs if self._has_parts else {"obs": obs})}


def _space_of(legal: Any) -> Space:
    return Tuple(map(_space_of, legal)) if isinstance(legal, tuple) else Box(0, 1, np.shape(legal), np.int8)


def _typed(space: Space, legal: Any) -> Any:
    """A mask in the types of its space; None is everything."""
    if isinstance(space, Tuple):
        return tuple(map(_typed, space.spaces, [None] * len(space) if legal is None else legal))
    return space.high if legal is None else np.asarray(legal, space.dtype)


def make_partial(whole: str, **arguments: Any) -> gymnasium.Env:
    """gymnasium's environment `whole`, of these arguments, without what is not seen, and without a time limit."""
    env, seen = gymnasium.make(whole, max_episode_steps=-1, **arguments), list(WITHOUT_VELOCITIES[whole])
    low, high = env.observation_space.low[seen], env.observation_space.high[seen]
    return TransformObservation(env, lambda obs: obs[seen], Box(low, high, dtype=env.observation_space.dtype))


for whole in WITHOUT_VELOCITIES:
    gymnasium.register(
        f"pmaprl/{PARTIAL}{whole}",
        f"{__name__}:make_partial",
        kwargs={"whole": whole},
        max_episode_steps=gymnasium.spec(whole).max_episode_steps,
        reward_threshold=gymnasium.spec(whole).reward_threshold,
    )
