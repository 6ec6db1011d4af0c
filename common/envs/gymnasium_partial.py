"""Registers `pmaprl/PartialCartPole-v1` and `pmaprl/PartialPendulum-v1` with gymnasium: its own without velocities.

Processes of environments import this too, so it needs nothing that is slow.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.utils import RecordConstructorArgs

from common.envs.velocities import PREFIX, SEEN


class Partial(gymnasium.ObservationWrapper, RecordConstructorArgs):
    """Observes only the numbers whose places are in `seen`."""

    def __init__(self, env: gymnasium.Env, seen: tuple[int, ...]):
        RecordConstructorArgs.__init__(self, seen=seen)
        gymnasium.ObservationWrapper.__init__(self, env)
        self._seen, box = list(seen), env.observation_space
        self.observation_space = Box(box.low[self._seen], box.high[self._seen], dtype=box.dtype)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self._seen]


def make(whole: str, **arguments: Any) -> gymnasium.Env:
    """gymnasium's environment `whole`, of these arguments, without what is not seen, and without a time limit."""
    return Partial(gymnasium.make(whole, max_episode_steps=-1, **arguments), SEEN[whole])


for whole in SEEN:
    gymnasium.register(
        f"pmaprl/{PREFIX}{whole}",
        f"{__name__}:make",
        kwargs={"whole": whole},
        max_episode_steps=gymnasium.spec(whole).max_episode_steps,
        reward_threshold=gymnasium.spec(whole).reward_threshold,
    )
