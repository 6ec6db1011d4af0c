"""Environments of this kit: `pmaprl:PartialCartPole-v1`, which does not show velocities."""

from typing import Any

import jax
import numpy as np

from common.envs import gymnax_suite
from common.envs.environment import Env, Step, Wrapper
from common.envs.spaces import Box
from common.envs.suite_tools import PARTIAL, WITHOUT_VELOCITIES, check_known


def ids() -> list[str]:
    return [PARTIAL + whole for whole in WITHOUT_VELOCITIES]


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    whole = env_id.removeprefix(PARTIAL)
    return PartialEnv(name, gymnax_suite.make(whole, whole, env_params), WITHOUT_VELOCITIES[whole])


class PartialEnv(Wrapper):
    """Another environment of which only some numbers are observed."""

    def __init__(self, name: str, whole: Env, seen: tuple[int, ...]):
        self._seen, space = np.array(seen), whole.observation_space
        super().__init__(name, whole, Box(space.low[self._seen], space.high[self._seen], (len(seen),)))

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = self.wrapped.begin(key)
        return obs[self._seen], state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        reached = self.wrapped.advance(key, state, action)
        return reached._replace(obs=reached.obs[self._seen])
