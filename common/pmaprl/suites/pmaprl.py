"""Environments of this kit: `pmaprl:PartialCartPole-v1`, which does not show velocities."""

from typing import Any

import jax
import numpy as np

from pmaprl.envs.environment import Step
from pmaprl.envs.spaces import Box, convert
from pmaprl.suites import gymnax
from pmaprl.suites.tools.observed import PARTIAL, WITHOUT_VELOCITIES


def ids() -> list[str]:
    return [PARTIAL + whole for whole in WITHOUT_VELOCITIES]


class SuiteEnv(gymnax.SuiteEnv):
    """One of gymnax's environments, which shows only some numbers of its observations."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        whole = env_id.removeprefix(PARTIAL)
        indices = np.array(WITHOUT_VELOCITIES[whole])
        self._indices = indices
        super().__init__(name, whole, env_params)
        whole_space = convert(self.inner.observation_space(self.params), "observation space")
        assert isinstance(whole_space, Box)  # of all WITHOUT_VELOCITIES
        low = whole_space.low[indices]
        high = whole_space.high[indices]
        self.observation_space = Box(low, high, indices.shape)
        self.obs_names = tuple(self.obs_names[index] for index in indices)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = super().begin(key)
        return obs[self._indices], state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        step = super().advance(key, state, action)
        return step._replace(obs=step.obs[self._indices])
