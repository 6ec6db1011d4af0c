"""MuJoCo Playground's environments: `playground:CheetahRun`. They know no time limits; robots are
downloaded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs import spaces
from pmaprl.envs.environment import Env, Step, select
from pmaprl.envs.suite_tools import changed_params, import_package, settable
from pmaprl.suites.tools.shared import mujoco_frame

REGISTRY = "mujoco_playground._src.registry"


def ids() -> list[str]:
    return list(import_package(REGISTRY).ALL_ENVS)


class SuiteEnv(Env):
    """One of playground's, with a time limit. A step is `action_repeat` of its own, in which the
    limit counts.
    """

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        registry = import_package(REGISTRY)
        known = settable(dict(registry.get_default_config(env_id)))
        if "impl" in known:
            known["impl"] = "jax"  # warp keeps some of its state for all environments together
        params = known | changed_params(name, known, env_params)
        if params.get("impl", "jax") != "jax":
            raise UsageError(f"{name} parameter 'impl' must be jax, got {params['impl']!r}")
        inner = registry.load(env_id, config_overrides=params)  # whose robots it downloads
        self._repeat = params.get("action_repeat", 1)
        obs = spaces.plain(jax.eval_shape(inner.reset, jax.random.key(0)).obs)
        seen = jax.tree.map(lambda x: spaces.box(x.shape), obs)
        actions = spaces.box((inner.action_size,), -1.0, 1.0)
        super().__init__(
            name, inner, seen, actions, max_steps=-(-params["episode_length"] // self._repeat)
        )

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        state = self.inner.reset(key)
        return state.obs, (state, 0)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        def once(carry, _):
            before, reward = carry
            over = before.done > 0
            after = self.inner.step(before, action)
            return (select(over, before, after), reward + jnp.where(over, 0.0, after.reward)), None

        (before, time), zero = state, jnp.float32(0)
        (state, reward), _ = jax.lax.scan(once, (before, zero), length=self._repeat)
        outcome = reward, state.done > 0, time + 1 >= self.declared_steps
        return Step(state.obs, (state, time + 1), *outcome, info=state.metrics)

    def frame(self, state: Any) -> np.ndarray:
        data = state[0].data
        return mujoco_frame(self.inner.mj_model, data.qpos, data.qvel)
