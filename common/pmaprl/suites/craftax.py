"""craftax's worlds: `craftax:Craftax-Classic-Symbolic-v1`.

A world takes long to make. Time limits are truncations.
"""

from typing import Any

import jax
import numpy as np

from pmaprl.envs.custom import GymnaxStyleEnv, replaced
from pmaprl.envs.environment import Step
from pmaprl.envs.foreign_code import import_package, quiet

BLOCK = 16  # pixels of a block's side, one of the sizes that its textures have


def ids() -> list[str]:
    import_package("craftax")
    return [
        "Craftax-Symbolic-v1",
        "Craftax-Pixels-v1",
        "Craftax-Classic-Symbolic-v1",
        "Craftax-Classic-Pixels-v1",
    ]


class SuiteEnv(GymnaxStyleEnv):
    """One of craftax's worlds."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        make = import_package("craftax.craftax_env").make_craftax_env_from_name
        with quiet():  # it prints the textures that it loads
            inner = make(env_id, auto_reset=False)
        params = replaced(name, inner.default_params, env_params)
        limit = params.max_timesteps
        self._draw = None
        # Their limit, which would end an episode as if nothing followed, is never reached
        params = params.replace(max_timesteps=limit + 1)
        super().__init__(name, inner, params, limit)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        obs, state, reward, terminated, info = self.inner.step_env(key, state, action, self.params)
        return Step(
            obs=obs,
            state=state,
            reward=reward,
            terminated=terminated,
            truncated=state.timestep >= self.declared_steps,
            info=info,
        )

    @property
    def numbers(self) -> dict[str, float]:
        numbers = super().numbers
        return {name: value for name, value in numbers.items() if name != "max_timesteps"}

    def frame(self, state: Any) -> np.ndarray:
        world = "craftax_classic" if "Classic" in self.name else "craftax"
        if self._draw is None:
            renderer = import_package(f"craftax.{world}.renderer")
            self._draw = jax.jit(renderer.make_craftax_pixel_renderer(BLOCK))
        return np.asarray(self._draw(state), np.uint8)
