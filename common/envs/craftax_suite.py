"""craftax's worlds: `craftax:Craftax-Classic-Symbolic-v1`. A world is dear to make; time limits are truncations."""

from typing import Any

import jax
import numpy as np

from common.envs.custom import GymnaxStyleEnv, replaced
from common.envs.environment import Env, Step
from common.envs.suite_tools import check_known, import_package, quiet

LIMIT = "max_timesteps"  # the parameter
BLOCK = 16  # pixels of a block's side, one of the sizes that its textures have


def ids() -> list[str]:
    import_package("craftax", extra="craftax")
    return [world + seen for world in ("Craftax", "Craftax-Classic") for seen in ("-Symbolic-v1", "-Pixels-v1")]


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    with quiet():  # it says which textures it loads
        package = import_package("craftax.craftax_env", extra="craftax")
        inner = package.make_craftax_env_from_name(env_id, auto_reset=False)
    return CraftaxEnv(name, inner, replaced(name, inner.default_params, env_params))


class CraftaxEnv(GymnaxStyleEnv):
    """One of craftax's."""

    def __init__(self, name: str, inner: Any, params: Any):
        self._limit, self._draw = params.max_timesteps, None
        params = params.replace(max_timesteps=self._limit + 1)  # where episodes never come to
        super().__init__(name, inner, params, max_steps=self._limit)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        obs, state, reward, terminated, info = self.inner.step_env(key, state, action, self.params)
        return Step(obs, state, reward, terminated, state.timestep >= self._limit, info=info)

    @property
    def numbers(self) -> dict[str, float]:
        return {name: x for name, x in super().numbers.items() if name != LIMIT}

    def frame(self, state: Any) -> np.ndarray:
        world = "craftax_classic" if "Classic" in self.name else "craftax"
        if self._draw is None:
            renderer = import_package(f"craftax.{world}.renderer", extra="craftax")
            self._draw = jax.jit(renderer.make_craftax_pixel_renderer(BLOCK))
        return np.asarray(self._draw(state), np.uint8)
