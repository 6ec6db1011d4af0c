"""navix's MiniGrid worlds: `navix:Navix-DoorKey-6x6-v0`. Its `step` resets one step late, the one inside does not."""

import warnings
from types import ModuleType
from typing import Any

import jax
import numpy as np

from common.cli.errors import UsageError
from common.envs.environment import Env, Transition
from common.envs.spaces import Discrete, box, planes, space_of_planes
from common.envs.suite_tools import changed_params, check_known, check_time_limit, import_package

COUNTS = 11, 6, 4  # of things, colours, and states: directions of the player, and doors open, closed and locked
SYMBOLS = "symbolic", "symbolic_first_person"  # observations that are codes [H, W, 3]
PICTURES = "rgb", "rgb_first_person"


def ids() -> list[str]:
    return list(_package().registry())


trainable = ids


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    known = {"max_steps": int(_package().make(env_id).max_steps), "observation": SYMBOLS[0]}
    params = known | changed_params(name, known, env_params)
    check_time_limit(name, "max_steps", params["max_steps"])
    seen = params.pop("observation")
    if seen not in SYMBOLS + PICTURES:
        raise UsageError(f"{name} parameter 'observation' must be one of {', '.join(SYMBOLS + PICTURES)}, got {seen!r}")
    inner = _package().make(env_id, observation_fn=getattr(_package().observations, seen), **params)
    return NavixEnv(name, inner, codes=seen in SYMBOLS)


class NavixEnv(Env):
    """One of navix's, whose states are its time steps. `codes` says that observations are such, not pictures."""

    def __init__(self, name: str, inner: Any, codes: bool):
        self._codes, self._draw = codes, jax.jit(_package().observations.rgb)
        shape = jax.eval_shape(inner.reset, jax.random.key(0)).observation.shape
        observations = space_of_planes(shape, COUNTS) if codes else box(shape, 0.0, 255.0)
        super().__init__(name, inner, observations, Discrete(int(inner.action_space.n)), max_steps=inner.max_steps)

    def begin(self, key: jax.Array) -> tuple[jax.Array, Any]:
        step = self.inner.reset(key)
        return self._observed(step), step

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        step = self.inner._step(state, action)
        return Transition(self._observed(step), step, step.reward, step.is_termination(), step.is_truncation())

    def frame(self, state: Any) -> np.ndarray:
        return np.asarray(self._draw(state.state))

    def _observed(self, step: Any) -> jax.Array:
        return planes(step.observation, COUNTS) if self._codes else step.observation


def _package() -> ModuleType:
    with warnings.catch_warnings(action="ignore"):
        return import_package("navix", extra="navix")
