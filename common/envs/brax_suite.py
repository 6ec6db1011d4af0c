"""brax's environments: `brax:ant`. They know neither time limits nor resets."""

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from common.envs.environment import Env, Step
from common.envs.spaces import box
from common.envs.suite_tools import changed_params, check_known, import_package, mujoco_frame

EPISODE_LENGTH = 1_000  # steps, as brax trains its own agents
NOT_FOR_TRAINING = ("fast",)  # made for brax's own tests


def ids() -> list[str]:
    return [env_id for env_id in _registered() if env_id not in NOT_FOR_TRAINING]


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    arguments = inspect.signature(_registered()[env_id]).parameters.values()
    known = {argument.name: argument.default for argument in arguments if argument.default is not argument.empty}
    known["episode_length"] = EPISODE_LENGTH
    params = known | changed_params(name, known, env_params)
    limit = params.pop("episode_length")
    return BraxEnv(name, partial(_make_inner, env_id), limit, params)


class BraxEnv(Env):
    """One of brax's, with a time limit in steps."""

    def __init__(self, name: str, make_inner: Callable, limit: int, arguments: dict[str, Any]):
        """`make_inner` makes brax's own object from `arguments`."""
        self._limit, self._make_inner, self._arguments = limit, make_inner, arguments
        inner = make_inner(**arguments)
        spaces = box((inner.observation_size,)), box((inner.action_size,), -1.0, 1.0)
        super().__init__(name, inner, *spaces, max_steps=limit)

    def begin(self, key: jax.Array) -> tuple[jax.Array, Any]:
        state = self.inner.reset(key)
        return state.obs, (state, 0)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        physics, time = state
        physics, time = self.inner.step(physics, action), time + 1
        outcome = physics.reward, physics.done > 0, time >= self._limit
        return Step(physics.obs, (physics, time), *outcome, info=physics.metrics)

    @property
    def numbers(self) -> dict[str, float]:
        return {name: x for name, x in self._arguments.items() if isinstance(x, float)}

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        other.inner = self._make_inner(**self._arguments | numbers)
        return other

    def frame(self, state: Any) -> np.ndarray:
        physics = state[0].pipeline_state
        return mujoco_frame(self.inner.sys.mj_model, physics.q, physics.qd)


def _make_inner(env_id: str, **arguments: Any) -> Any:
    """brax's own object."""
    with warnings.catch_warnings(action="ignore"):  # brax is not maintained
        return import_package("brax.envs", extra="brax").get_environment(env_id, **arguments)


def _registered() -> dict[str, Any]:
    return import_package("brax.envs", extra="brax")._envs
