"""Environments of this kit: `pmaprl:PartialCartPole-v1`, which does not show velocities."""

from typing import Any

import jax
import numpy as np

from pmaprl.envs.environment import Step
from pmaprl.envs.spaces import Box, convert
from pmaprl.suites import gymnax
from pmaprl.suites.tools.shared import PARTIAL, WITHOUT_VELOCITIES


def ids() -> list[str]:
    return [PARTIAL + whole for whole in WITHOUT_VELOCITIES]


class SuiteEnv(gymnax.SuiteEnv):
    """One of gymnax's of which only some numbers are observed."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        whole = env_id.removeprefix(PARTIAL)
        self._seen = np.array(WITHOUT_VELOCITIES[whole])
        super().__init__(name, whole, env_params)
        whole_space = convert(self.inner.observation_space(self.params), "observation space")
        self.observation_space = Box(
            whole_space.low[self._seen], whole_space.high[self._seen], self._seen.shape
        )
        self.obs_names = tuple(self.obs_names[index] for index in self._seen)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = super().begin(key)
        return obs[self._seen], state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        reached = super().advance(key, state, action)
        return reached._replace(obs=reached.obs[self._seen])
