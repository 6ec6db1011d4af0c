"""Classic control with its velocities hidden: what a policy needs memory for."""

from typing import Any, NamedTuple

import jax
import numpy as np

from common.envs import gymnax_suite, spaces
from common.envs.environment import Env, Transition


class Partial(NamedTuple):
    """An environment of gymnax, and which numbers of its observations are left."""

    whole: str
    seen: tuple[int, ...]


PARTIAL = {
    "PartialCartPole-v1": Partial("CartPole-v1", (0, 2)),
    "PartialPendulum-v1": Partial("Pendulum-v1", (0, 1)),
}


class PartialEnv(Env):
    """Another environment of which only some numbers are observed."""

    def __init__(self, name: str, whole: Env, seen: tuple[int, ...]):
        self._whole, self._seen, self.params = whole, np.array(seen), whole.params
        box = whole.observation_space
        box = spaces.Box(box.low[self._seen], box.high[self._seen], (len(seen),))
        super().__init__(name, whole.inner, box, whole.action_space, whole.max_steps)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = self._whole.begin(key)
        return obs[self._seen], state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        out = self._whole.advance(key, state, action)
        return out._replace(obs=out.obs[self._seen])


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    whole, seen = PARTIAL[env_id]
    return PartialEnv(name, gymnax_suite.make(whole, whole, env_params), seen)
