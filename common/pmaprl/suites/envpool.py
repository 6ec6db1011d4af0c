"""envpool's environments, stepped by C++ threads: `envpool:Pong-v5`."""

import math
from typing import Any

import jax
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs.foreign_code import import_package
from pmaprl.envs.host import HostOptions, HostStep
from pmaprl.envs.suite_params import changed_params, check_time_limit, refuse_params
from pmaprl.suites.tools.checked import of_each
from pmaprl.suites.tools.conversion import Conversion
from pmaprl.suites.tools.observed import OBS_NAMES
from pmaprl.suites.tools.rendering import FRAMES

MOVED = "-v2", "-v3"
"""Versions of MuJoCo's environments that gymnasium knows, but does not make any more."""
MOST_THREADS = 1024
MOST_FRAMES = 64  # most frames that are stacked
LARGEST_SIZE = 4096  # largest side of a picture, and of other sizes
SET_HERE = (
    "env_type",
    "batch_size",
    "gym_reset_return_info",
    "base_path",
    "env_seed",
    "max_num_players",
)
"""Parameters that this module sets, or that would change its arrays."""
SET_BY_ID = (
    "task",
    "task_name",
    "env_name",
    "hand_task",
    "adroit_task",
    "obs_dim",
    "goal_dim",
    "action_dim",
    "qpos_dim",
    "qvel_dim",
    "reset_dim",
    "constraint_obs_dim",
)
"""Parameters that follow from the id of an environment; other values would end the process."""
TAKEN = SET_HERE + SET_BY_ID


def ids() -> list[str]:
    return import_package("envpool").list_all_envs()


class SuiteEnv:
    """Some of envpool's environments.

    They reset in a step of their own; with `resets_in_step` they are reset at the end of the step.
    They cannot be killed.
    """

    def __init__(self, name: str, env_id: str, options: HostOptions):
        envpool = import_package("envpool")
        params = _checked_params(envpool, name, env_id, options.env_params)
        self._env_id = env_id
        package = envpool.registration.registry.specs[env_id][0]
        self._draws = options.frames and "mujoco" not in package
        if self._draws:
            params = params | FRAMES
        self.obs_names = OBS_NAMES.get(env_id, ())
        self._inner = envpool.make(
            env_id,
            env_type="gymnasium",
            num_envs=options.num_envs,
            seed=options.seed,
            **params,
        )
        self._conversion = Conversion(name, self._inner.observation_space, self._inner.action_space)
        self.spec = self._conversion.spec
        self.num_envs = options.num_envs
        self.resets_in_step = options.resets_in_step

    def reset(self) -> Any:
        self._over = np.zeros(self.num_envs, bool)
        obs, _ = self._inner.reset()
        return self._conversion.observations(obs)

    def reseed(self, seed: int) -> bool:
        return False

    def step(self, action: np.ndarray) -> HostStep:
        actions = self._conversion.actions(action)
        obs, reward, terminated, truncated, info = self._inner.step(actions)
        obs = self._conversion.observations(obs)
        over = terminated | truncated
        rewards = of_each(reward, self.num_envs, "rewards")
        if self.resets_in_step:
            valid = np.ones_like(over)
            final_obs = obs
            obs = self._with_first(obs, over)
        else:
            valid = ~self._over  # the step after an end only resets
            final_obs = None
            self._over = over
        return HostStep(
            obs=obs,
            reward=rewards.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            final_obs=final_obs,
            info=info,
        )

    def _with_first(self, obs: Any, over: np.ndarray) -> Any:
        """Replace observations [N, ...] by the first of the next episode where one is `over`."""
        if not over.any():
            return obs
        indices = np.flatnonzero(over).astype(np.int32)
        first, info = self._inner.reset(indices)
        first = self._conversion.observations(first)

        def replaced(current: np.ndarray, new: np.ndarray) -> np.ndarray:
            copied = np.array(current)
            copied[info["env_id"]] = new
            return copied

        return jax.tree.map(replaced, obs, first)

    def frame(self) -> np.ndarray:
        if not self._draws:
            raise UsageError(_without_display(self._env_id))
        first = np.zeros(1, np.int32)
        return self._inner.render(first)[0]

    def close(self) -> None:
        self._inner.close()

    def kill(self) -> None:
        pass


def _without_display(env_id: str) -> str:
    """The reason why envpool has no picture of MuJoCo, and the way to one if there is any."""
    from gymnasium import registry  # envpool needs gymnasium too

    why = "envpool would end the process where it draws MuJoCo without a display"
    if env_id not in registry or env_id.endswith(MOVED):
        return why
    return (
        f"{why}; python -m pmaprl.play RUN --env gymnasium:{env_id} --gif FILE has "
        "pictures of the same task"
    )


def _checked_params(
    envpool: Any, name: str, env_id: str, env_params: dict[str, Any]
) -> dict[str, Any]:
    """Convert parameters to envpool's types.

    envpool checks few of them, and C++ ends the process or goes on with a wrong value.

    Raises:
        UsageError: a parameter is unknown or out of range.
    """
    refuse_params(env_params, TAKEN)
    if not env_params:
        return {}
    config = envpool.make_spec(env_id).config
    known = dict(zip(config._fields, config, strict=True))
    taken = {*TAKEN, "num_envs", "seed"}
    free = {field: value for field, value in known.items() if field not in taken}
    params = changed_params(name, free, env_params)
    for field, value in params.items():
        if field == "max_episode_steps":
            check_time_limit(name, field, value)
            continue
        low, high = _range(field, known[field])
        if isinstance(value, int | float) and not low <= value <= high:
            raise UsageError(
                f"{name} parameter {field!r} must be at least {low} and at most {high}, got "
                f"{value!r}"
            )
        if isinstance(value, str) and value != known[field] and _is_path(value):
            raise UsageError(
                f"{name} parameter {field!r} must be a name, not a path, got {value!r}"
            )
    return params


def _is_path(text: str) -> bool:
    """True if envpool could read a file by this name."""
    return ".." in text or any(character in text for character in "/\\\0")


def _range(field: str, default: Any) -> tuple[float, float]:
    """The least and the largest value of a parameter with this default."""
    if field == "num_threads":
        return 0, MOST_THREADS
    if isinstance(default, float) and "prob" in field:
        return 0.0, 1.0
    if not isinstance(default, int) or isinstance(default, bool):
        return -math.inf, math.inf
    largest = MOST_FRAMES if "stack" in field else LARGEST_SIZE
    return min(default, 1), largest
