"""Wrappers of gymnasium's environments: action masks from `info` in the observation, and hidden velocities.

Registers `pmaprl/PartialCartPole-v1` and `pmaprl/PartialPendulum-v1`. Processes of environments import this too, so it
needs nothing that is slow; the mask's name comes as an argument.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space, Tuple
from gymnasium.utils import RecordConstructorArgs

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


class MaskObserved(gymnasium.Wrapper, RecordConstructorArgs):
    """Observes the mask beside the parts of a dictionary, or beside the whole observation, which is then called obs."""

    def __init__(self, env: gymnasium.Env, mask: str, legal: Any):
        """`legal` is a mask: an array, or a tuple of such."""
        RecordConstructorArgs.__init__(self, mask=mask, legal=legal)
        gymnasium.Wrapper.__init__(self, env)
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
        legal = _typed(self._space, legal) if legal is not None else _all_legal(self._space)
        return {self._mask: legal, **(obs if self._has_parts else {"obs": obs})}


def _space_of(legal: Any) -> Space:
    if isinstance(legal, tuple):
        return Tuple(map(_space_of, legal))
    return Box(0, 1, np.shape(legal), np.int8)


def _typed(space: Space, legal: Any) -> Any:
    if isinstance(space, Tuple):
        return tuple(map(_typed, space.spaces, legal))
    return np.asarray(legal, space.dtype)


def _all_legal(space: Space) -> Any:
    return tuple(map(_all_legal, space.spaces)) if isinstance(space, Tuple) else space.high


class Partial(gymnasium.ObservationWrapper, RecordConstructorArgs):
    """Observes only the numbers whose places are in `seen`."""

    def __init__(self, env: gymnasium.Env, seen: tuple[int, ...]):
        RecordConstructorArgs.__init__(self, seen=seen)
        gymnasium.ObservationWrapper.__init__(self, env)
        self._seen, box = list(seen), env.observation_space
        self.observation_space = Box(box.low[self._seen], box.high[self._seen], dtype=box.dtype)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self._seen]


def make_partial(whole: str, **arguments: Any) -> gymnasium.Env:
    """gymnasium's environment `whole`, of these arguments, without what is not seen, and without a time limit."""
    return Partial(gymnasium.make(whole, max_episode_steps=-1, **arguments), WITHOUT_VELOCITIES[whole])


for whole in WITHOUT_VELOCITIES:
    gymnasium.register(
        f"pmaprl/{PARTIAL}{whole}",
        f"{__name__}:make_partial",
        kwargs={"whole": whole},
        max_episode_steps=gymnasium.spec(whole).max_episode_steps,
        reward_threshold=gymnasium.spec(whole).reward_threshold,
    )
