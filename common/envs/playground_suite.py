"""MuJoCo Playground's environments: `playground:CheetahRun`. They know no time limits; robots are downloaded."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.cli.errors import UsageError
from common.envs import spaces
from common.envs.environment import Env, Step, select
from common.envs.suite_tools import changed_params, check_known, import_package, mujoco_frame

LIMIT, REPEAT = "episode_length", "action_repeat"  # parameters


def ids() -> list[str]:
    return list(_module("registry").ALL_ENVS)


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    registry = _module("registry")
    config = dict(registry.get_default_config(env_id))
    known = {field: value for field, value in config.items() if isinstance(value, bool | int | float | str)}
    if "impl" in known:
        known["impl"] = "jax"  # warp keeps some of its state for all environments together
    params = known | changed_params(name, known, env_params)
    if params.get("impl", "jax") != "jax":
        raise UsageError(f"{name} parameter 'impl' must be jax, got {params['impl']!r}")
    inner = registry.load(env_id, config_overrides=params)  # whose robots it downloads
    return PlaygroundEnv(name, inner, params[LIMIT], params.get(REPEAT, 1))


class PlaygroundEnv(Env):
    """One of playground's, with a time limit in steps of its own, of which each of ours makes `repeat`."""

    def __init__(self, name: str, inner: Any, limit: int, repeat: int):
        self._limit, self._repeat = limit, repeat
        obs = spaces.plain(jax.eval_shape(inner.reset, jax.random.key(0)).obs)
        parts = {part: spaces.box(x.shape) for part, x in obs.items()} if isinstance(obs, dict) else {}
        observations = parts or spaces.box(obs.shape)
        actions = spaces.box((inner.action_size,), -1.0, 1.0)
        super().__init__(name, inner, observations, actions, max_steps=-(-limit // repeat))

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        state = self.inner.reset(key)
        return state.obs, (state, 0)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        def once(carry, _):
            before, reward = carry
            over, after = before.done > 0, self.inner.step(before, action)
            return (select(over, before, after), reward + jnp.where(over, 0.0, after.reward)), None

        (before, time), zero = state, jnp.float32(0)
        (state, reward), _ = jax.lax.scan(once, (before, zero), length=self._repeat)
        time += self._repeat
        outcome = reward, state.done > 0, time >= self._limit
        return Step(state.obs, (state, time), *outcome, info=state.metrics)

    def frame(self, state: Any) -> np.ndarray:
        data = state[0].data
        return mujoco_frame(self.inner.mj_model, data.qpos, data.qvel)


def _module(name: str) -> ModuleType:
    return import_package(f"mujoco_playground._src.{name}", extra="playground")
