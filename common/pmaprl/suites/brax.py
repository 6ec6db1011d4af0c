"""brax's environments: `brax:ant`. Time limits and resets are added here."""

import copy
import warnings
from typing import Any

import jax
import numpy as np

from pmaprl.envs.environment import Env, Step
from pmaprl.envs.foreign_code import import_package
from pmaprl.envs.spaces import box
from pmaprl.envs.suite_params import changed_params, settable
from pmaprl.suites.tools.rendering import mujoco_frame

EPISODE_LENGTH = 1_000  # steps, as brax trains its own agents
NOT_FOR_TRAINING = ("fast",)  # made for brax's own tests


def ids() -> list[str]:
    registered = import_package("brax.envs")._envs
    return [env_id for env_id in registered if env_id not in NOT_FOR_TRAINING]


class SuiteEnv(Env):
    """One of brax's environments, with a time limit."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        known = settable(import_package("brax.envs")._envs[env_id])
        known["episode_length"] = EPISODE_LENGTH
        self._arguments = known | changed_params(name, known, env_params)
        self._env_id = env_id
        limit = self._arguments.pop("episode_length")
        inner = self._make_inner({})
        super().__init__(
            name,
            inner,
            box((inner.observation_size,)),
            box((inner.action_size,), -1.0, 1.0),
            limit,
        )

    def begin(self, key: jax.Array) -> tuple[jax.Array, Any]:
        state = self.inner.reset(key)
        return state.obs, (state, 0)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        physics, time = state
        physics = self.inner.step(physics, action)
        time = time + 1
        return Step(
            obs=physics.obs,
            state=(physics, time),
            reward=physics.reward,
            terminated=physics.done > 0,
            truncated=time >= self.declared_steps,
            info=physics.metrics,
        )

    @property
    def numbers(self) -> dict[str, float]:
        return {name: value for name, value in self._arguments.items() if isinstance(value, float)}

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        other.inner = self._make_inner(numbers)
        return other

    def frame(self, state: Any) -> np.ndarray:
        physics = state[0].pipeline_state
        return mujoco_frame(self.inner.sys.mj_model, physics.q, physics.qd)

    def _make_inner(self, numbers: dict[str, jax.Array]) -> Any:
        envs = import_package("brax.envs")
        with warnings.catch_warnings(action="ignore"):  # brax is not maintained
            return envs.get_environment(self._env_id, **self._arguments | numbers)
