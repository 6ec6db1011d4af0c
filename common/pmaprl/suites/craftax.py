"""craftax's worlds: `craftax:Craftax-Classic-Symbolic-v1`. A world is dear to make; time limits are
truncations.
"""

from typing import Any

import jax
import numpy as np

from pmaprl.envs.custom import GymnaxStyleEnv, replaced
from pmaprl.envs.environment import Step
from pmaprl.envs.suite_tools import import_package, quiet

BLOCK = 16  # pixels of a block's side, one of the sizes that its textures have


def ids() -> list[str]:
    import_package("craftax")
    return [
        world + seen
        for world in ("Craftax", "Craftax-Classic")
        for seen in ("-Symbolic-v1", "-Pixels-v1")
    ]


class SuiteEnv(GymnaxStyleEnv):
    """One of craftax's."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        with quiet():  # it says which textures it loads
            inner = import_package("craftax.craftax_env").make_craftax_env_from_name(
                env_id, auto_reset=False
            )
        params = replaced(name, inner.default_params, env_params)
        limit = params.max_timesteps
        self._draw = None
        # Where episodes never come to
        super().__init__(name, inner, params.replace(max_timesteps=limit + 1), limit)

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
        return {name: x for name, x in super().numbers.items() if name != "max_timesteps"}

    def frame(self, state: Any) -> np.ndarray:
        world = "craftax_classic" if "Classic" in self.name else "craftax"
        if self._draw is None:
            renderer = import_package(f"craftax.{world}.renderer")
            self._draw = jax.jit(renderer.make_craftax_pixel_renderer(BLOCK))
        return np.asarray(self._draw(state), np.uint8)
