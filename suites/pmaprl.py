"""Environments of this kit: `pmaprl:PartialCartPole-v1`, which does not show velocities."""

from typing import Any

import jax
import numpy as np

from common.envs.environment import Step, Wrapper
from common.envs.spaces import Box
from suites import gymnax
from suites.tools.shared import PARTIAL, WITHOUT_VELOCITIES


def ids() -> list[str]:
    return [PARTIAL + whole for whole in WITHOUT_VELOCITIES]


class SuiteEnv(Wrapper):
    """One of gymnax's of which only some numbers are observed."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        of = env_id.removeprefix(PARTIAL)
        whole, self._seen = gymnax.SuiteEnv(of, of, env_params), np.array(WITHOUT_VELOCITIES[of])
        low, high = (bound[self._seen] for bound in whole.observation_space[:2])
        super().__init__(name, whole, Box(low, high, low.shape))

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = self.wrapped.begin(key)
        return obs[self._seen], state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        reached = self.wrapped.advance(key, state, action)
        return reached._replace(obs=reached.obs[self._seen])
