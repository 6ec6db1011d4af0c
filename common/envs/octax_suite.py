"""octax's CHIP-8 games: `octax:brix`. Observations are the last four frames, as planes of a picture."""

import pkgutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.envs.environment import Env, Step
from common.envs.spaces import Discrete, box
from common.envs.suite_tools import changed_params, check_known, import_package, quiet, settable

NOT_OURS = ("render_mode", "render_scale", "color_scheme", "startup_instructions", "disable_delay")  # of the game


def ids() -> list[str]:
    """Games, and the levels of games that have several, such as `cavern3`."""
    package = import_package("octax.environments", extra="octax")
    names = [game.name for game in pkgutil.iter_modules(package.__path__)]
    modules = {name: import_package(f"octax.environments.{name}", extra="octax") for name in names}
    files = Path(package.get_rom_path(package.pong.rom_file)).parent.glob("*[0-9].ch8")
    levels = [file.stem for file in files if file.stem.rstrip("0123456789") in modules]
    return sorted([game for game, module in modules.items() if hasattr(module, "rom_file")] + levels)


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    arguments = settable(import_package("octax.env", extra="octax").OctaxEnv)
    known = {argument: value for argument, value in arguments.items() if argument not in NOT_OURS}
    params = changed_params(name, known, env_params)
    with quiet():
        inner, _ = import_package("octax.environments", extra="octax").create_environment(env_id, **params)
    return OctaxEnv(name, inner)


class OctaxEnv(Env):
    """One of octax's."""

    def __init__(self, name: str, inner: Any):
        width, height = inner.cached_reset_state.display.shape
        shape = height, width, inner.frame_skip
        limit = inner.max_num_steps_per_episodes
        super().__init__(name, inner, box(shape, 0.0, 1.0), Discrete(inner.num_actions), max_steps=limit)

    def begin(self, key: jax.Array) -> tuple[jax.Array, Any]:
        state, frames, _ = self.inner.reset(key)
        return _picture(frames), state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of its own emulator
            state, frames, reward, terminated, truncated, _ = self.inner.step(state, action)
        return Step(_picture(frames), state, reward, terminated, truncated)

    def frame(self, state: Any) -> np.ndarray:
        return np.repeat(255 * np.asarray(state.display.T, np.uint8)[..., None], 3, axis=-1)


def _picture(frames: jax.Array) -> jax.Array:
    """Frames [K, width, height] as [height, width, K]."""
    return jnp.transpose(frames, (2, 1, 0)).astype(bool)
