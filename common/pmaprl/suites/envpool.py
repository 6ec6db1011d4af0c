"""envpool's environments, stepped by C++ threads: `envpool:Pong-v5`."""

import math
from typing import Any

import jax
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs.host import HostOptions, HostStep
from pmaprl.envs.suite_tools import changed_params, check_time_limit, import_package, refuse_params
from pmaprl.suites.tools.checked import of_each
from pmaprl.suites.tools.conversion import Conversion
from pmaprl.suites.tools.shared import FRAMES, OBS_NAMES

MOVED = "-v2", "-v3"
"""Versions of MuJoCo's environments that gymnasium knows, but does not make any more."""
MOST_THREADS = 1024
MOST_FRAMES = 64  # stacked in front of a picture, whose sides are longer
LARGEST_SIZE = 4096  # of a picture and the like
TAKEN = (
    "env_type",
    "batch_size",
    "gym_reset_return_info",
    "base_path",
    "env_seed",
    "max_num_players",
)
"""Parameters that this file sets, or that would give it other arrays."""
TAKEN += (
    "task",
    "task_name",
    "env_name",
    "hand_task",
    "adroit_task",
    "obs_dim",
    "goal_dim",
    "action_dim",
)
TAKEN += ("qpos_dim", "qvel_dim", "reset_dim", "constraint_obs_dim")
"""Parameters that the id of an environment says; others would end the process."""


def ids() -> list[str]:
    return import_package("envpool").list_all_envs()


class SuiteEnv:
    """They reset in a step of their own, or with `resets_in_step` where they are told to; they
    cannot be killed.
    """

    def __init__(self, name: str, env_id: str, options: HostOptions):
        envpool = import_package("envpool")
        params = _checked_params(envpool, name, env_id, options.env_params)
        self._env_id = env_id
        self._draws = (
            options.frames and "mujoco" not in envpool.registration.registry.specs[env_id][0]
        )
        if self._draws:
            params = params | FRAMES
        params = params | {"num_envs": options.num_envs, "seed": options.seed}
        self.obs_names = OBS_NAMES.get(env_id, ())
        self._inner = envpool.make(env_id, env_type="gymnasium", **params)
        self._conversion = Conversion(name, self._inner.observation_space, self._inner.action_space)
        self.spec = self._conversion.spec
        self.num_envs = options.num_envs
        self.resets_in_step = options.resets_in_step

    def reset(self) -> Any:
        self._over = np.zeros(self.num_envs, bool)
        return self._conversion.observations(self._inner.reset()[0])

    def reseed(self, seed: int) -> bool:
        return False

    def step(self, action: np.ndarray) -> HostStep:
        obs, reward, terminated, truncated, info = self._inner.step(
            self._conversion.actions(action)
        )
        obs = self._conversion.observations(obs)
        over = terminated | truncated
        outcome = (
            of_each(reward, self.num_envs, "rewards").astype(np.float32),
            terminated,
            truncated,
        )
        if self.resets_in_step:
            return HostStep(self._with_first(obs, over), *outcome, np.ones_like(over), obs, info)
        valid = ~self._over
        self._over = over
        return HostStep(obs, *outcome, valid, None, info)

    def _with_first(self, obs: Any, over: np.ndarray) -> Any:
        """Observations [N, ...] with the first of the next episode where one is `over`."""
        if not over.any():
            return obs
        first, info = self._inner.reset(np.flatnonzero(over).astype(np.int32))
        obs = jax.tree.map(np.array, obs)
        first = self._conversion.observations(first)
        jax.tree.map(lambda all_obs, some: all_obs.__setitem__(info["env_id"], some), obs, first)
        return obs

    def frame(self) -> np.ndarray:
        if not self._draws:
            raise UsageError(_without_display(self._env_id))
        return self._inner.render(np.zeros(1, np.int32))[0]

    def close(self) -> None:
        self._inner.close()

    def kill(self) -> None:
        pass


def _without_display(env_id: str) -> str:
    """The reason why there is no picture of MuJoCo, and where there is one."""
    from gymnasium import registry  # which envpool needs itself

    why = "envpool would end the process where it draws MuJoCo without a display"
    if env_id not in registry or env_id.endswith(MOVED):
        return why
    return (
        f"{why}; python -m pmaprl.play RUN --env gymnasium:{env_id} --gif FILE has "
        "pictures of the same task"
    )


def _checked_params(envpool: Any, name: str, env_id: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters that are `given`, in envpool's types.

    Raises UsageError where one is unknown or out of range: envpool checks few, and C++ ends the
    process or goes on.
    """
    refuse_params(given, TAKEN)
    if not given:
        return {}
    config = envpool.make_spec(env_id).config
    known = dict(zip(config._fields, config, strict=True))
    open_to_all = {
        field: value for field, value in known.items() if field not in (*TAKEN, "num_envs", "seed")
    }
    params = changed_params(name, open_to_all, given)
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
        if (
            isinstance(value, str)
            and value != known[field]
            and (set(value) & set("/\\\0") or ".." in value)
        ):
            raise UsageError(
                f"{name} parameter {field!r} must be a name, not a path, got {value!r}"
            )
    return params


def _range(field: str, default: Any) -> tuple[float, float]:
    """The least and the largest value of a parameter with this default."""
    if field == "num_threads":
        return 0, MOST_THREADS
    if isinstance(default, float):
        return (0.0, 1.0) if "prob" in field else (-math.inf, math.inf)
    if not isinstance(default, int) or isinstance(default, bool):
        return -math.inf, math.inf
    return min(default, 1), MOST_FRAMES if "stack" in field else LARGEST_SIZE
