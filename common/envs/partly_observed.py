"""Classic control with its velocities hidden: what a policy needs memory for."""

import copy
from typing import Any

import jax
import numpy as np

from common.envs import gymnax_suite, spaces
from common.envs.environment import Env, Transition
from common.envs.velocities import PREFIX, SEEN

IDS = [PREFIX + whole for whole in SEEN]


class PartialEnv(Env):
    """Another environment of which only some numbers are observed."""

    cheap_reset = True

    def __init__(self, name: str, whole: Env, seen: tuple[int, ...]):
        self._whole, self._seen, self.params = whole, np.array(seen), whole.params
        box = whole.observation_space
        box = spaces.Box(box.low[self._seen], box.high[self._seen], (len(seen),))
        super().__init__(name, whole.inner, box, whole.action_space, whole.max_steps)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = self._whole.begin(key)
        return obs[self._seen], state

    @property
    def numbers(self) -> dict[str, float]:
        return self._whole.numbers

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        other._whole = self._whole.with_numbers(numbers)
        return other

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        out = self._whole.advance(key, state, action)
        return out._replace(obs=out.obs[self._seen])


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    whole = env_id.removeprefix(PREFIX)
    return PartialEnv(name, gymnax_suite.make(whole, whole, env_params), SEEN[whole])
