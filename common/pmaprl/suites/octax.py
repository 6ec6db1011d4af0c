"""octax's CHIP-8 games: `octax:brix`. Observations are the last four frames, one per channel."""

import pkgutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.envs.environment import Env, Step
from pmaprl.envs.foreign_code import import_package, quiet
from pmaprl.envs.spaces import Discrete, box
from pmaprl.envs.suite_params import changed_params, settable

# Arguments of a game that are no parameters of a run
NOT_OURS = "render_mode", "render_scale", "color_scheme", "startup_instructions", "disable_delay"


def ids() -> list[str]:
    """List the games, and the levels of games that have several, such as `cavern3`."""
    package = import_package("octax.environments")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    games = []
    for name in names:
        module = import_package(f"octax.environments.{name}")
        if hasattr(module, "rom_file"):
            games.append(name)
    folder = Path(package.get_rom_path(package.pong.rom_file)).parent
    stems = [file.stem for file in folder.glob("*[0-9].ch8")]
    levels = [stem for stem in stems if stem.rstrip("0123456789") in names]
    return sorted([*games, *levels])


class SuiteEnv(Env):
    """One of octax's games."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        known = settable(import_package("octax.env").OctaxEnv)
        for argument in NOT_OURS:
            known.pop(argument, None)
        params = changed_params(name, known, env_params)
        with quiet():
            inner, _ = import_package("octax.environments").create_environment(env_id, **params)
        width, height = inner.cached_reset_state.display.shape
        frames = box((height, width, inner.frame_skip), 0.0, 1.0)
        limit = inner.max_num_steps_per_episodes
        super().__init__(name, inner, frames, Discrete(inner.num_actions), limit)

    def begin(self, key: jax.Array) -> tuple[jax.Array, Any]:
        state, frames, _ = self.inner.reset(key)
        return _picture(frames), state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        # Its emulator causes the warning
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            state, frames, reward, terminated, truncated, _ = self.inner.step(state, action)
        return Step(
            obs=_picture(frames),
            state=state,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
        )

    def frame(self, state: Any) -> np.ndarray:
        pixels = 255 * np.asarray(state.display.T, np.uint8)
        return np.repeat(pixels[..., None], 3, axis=-1)


def _picture(frames: jax.Array) -> jax.Array:
    """Transpose frames [K, width, height] to [height, width, K]."""
    return jnp.transpose(frames, (2, 1, 0)).astype(bool)
