"""craftax's worlds: `craftax:Craftax-Classic-Symbolic-v1`. A world is dear to make; time limits are truncations."""

import contextlib
import copy
import io
from types import ModuleType
from typing import Any

import jax
import numpy as np

from common.envs.custom import numbers_of, replaced, with_fields
from common.envs.environment import Env, Transition
from common.envs.suite_tools import check_known, check_time_limit, import_package

LIMIT = "max_timesteps"  # the parameter
BLOCK = 16  # pixels of a block's side, one of the sizes that its textures have


def ids() -> list[str]:
    _package()
    return [world + seen for world in ("Craftax", "Craftax-Classic") for seen in ("-Symbolic-v1", "-Pixels-v1")]


trainable = ids


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    with _quiet():
        inner = _package("craftax_env").make_craftax_env_from_name(env_id, auto_reset=False)
    params = replaced(name, inner.default_params, env_params)
    check_time_limit(name, LIMIT, params.max_timesteps)
    return CraftaxEnv(name, inner, params)


class CraftaxEnv(Env):
    """One of craftax's."""

    def __init__(self, name: str, inner: Any, params: Any):
        self._limit, self._draw = params.max_timesteps, None
        self.params = params.replace(max_timesteps=self._limit + 1)  # where episodes never come to
        super().__init__(name, inner, inner.observation_space(params), inner.action_space(params), self._limit)

    def begin(self, key: jax.Array) -> tuple[jax.Array, Any]:
        return self.inner.reset_env(key, self.params)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        obs, state, reward, terminated, info = self.inner.step_env(key, state, action, self.params)
        return Transition(obs, state, reward, terminated, state.timestep >= self._limit, info=info)

    @property
    def numbers(self) -> dict[str, float]:
        return {name: x for name, x in numbers_of(self.params).items() if name != LIMIT}

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        other.params = with_fields(self.params, numbers)
        return other

    def frame(self, state: Any) -> np.ndarray:
        world = "craftax_classic" if "Classic" in self.name else "craftax"
        if self._draw is None:
            with _quiet():
                module = _package(f"{world}.renderer")
            self._draw = jax.jit(module.make_craftax_pixel_renderer(BLOCK))
        return np.asarray(self._draw(state), np.uint8)


def _quiet() -> contextlib.AbstractContextManager:
    """Where it would say which textures it loads."""
    return contextlib.redirect_stdout(io.StringIO())


def _package(module: str = "") -> ModuleType:
    """craftax, or one of its modules."""
    return import_package(f"craftax.{module}" if module else "craftax", extra="craftax")
