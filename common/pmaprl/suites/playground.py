"""MuJoCo Playground's environments: `playground:CheetahRun`.

Time limits are added here. The models of robots are downloaded.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs import spaces
from pmaprl.envs.environment import Env, Step, select
from pmaprl.envs.foreign_code import import_package
from pmaprl.envs.suite_params import changed_params, settable
from pmaprl.suites.tools.rendering import mujoco_frame

REGISTRY = "mujoco_playground._src.registry"


def ids() -> list[str]:
    return list(import_package(REGISTRY).ALL_ENVS)


class SuiteEnv(Env):
    """One of playground's environments, with a time limit.

    A step is `action_repeat` of its own steps; the limit counts its own steps.
    """

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        registry = import_package(REGISTRY)
        known = settable(dict(registry.get_default_config(env_id)))
        if "impl" in known:
            known["impl"] = "jax"  # warp has some state that all environments share
        params = known | changed_params(name, known, env_params)
        if params.get("impl", "jax") != "jax":
            raise UsageError(f"{name} parameter 'impl' must be jax, got {params['impl']!r}")
        inner = registry.load(env_id, config_overrides=params)  # may download a robot's model
        self._repeat = params.get("action_repeat", 1)
        first = jax.eval_shape(inner.reset, jax.random.key(0))
        observations = jax.tree.map(lambda x: spaces.box(x.shape), spaces.plain(first.obs))
        actions = spaces.box((inner.action_size,), -1.0, 1.0)
        limit = math.ceil(params["episode_length"] / self._repeat)
        super().__init__(name, inner, observations, actions, limit)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        state = self.inner.reset(key)
        return state.obs, (state, 0)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        def once(carry, _):
            before, reward = carry
            is_over = before.done > 0
            after = self.inner.step(before, action)
            reward = reward + jnp.where(is_over, 0.0, after.reward)
            return (select(is_over, before, after), reward), None

        before, time = state
        time = time + 1
        (after, reward), _ = jax.lax.scan(once, (before, jnp.float32(0)), length=self._repeat)
        return Step(
            obs=after.obs,
            state=(after, time),
            reward=reward,
            terminated=after.done > 0,
            truncated=time >= self.declared_steps,
            info=after.metrics,
        )

    def frame(self, state: Any) -> np.ndarray:
        data = state[0].data
        return mujoco_frame(self.inner.mj_model, data.qpos, data.qvel)
