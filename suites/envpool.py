"""envpool's environments, stepped by C++ threads: `envpool:Pong-v5`."""

from typing import Any

import jax
import numpy as np

from common.cli.errors import UsageError
from common.envs.host import HostOptions, HostStep
from common.envs.suite_tools import check_time_limit, import_package, refuse_params
from suites.tools.checked import of_each
from suites.tools.conversion import Conversion
from suites.tools.shared import FRAMES

MOST_THREADS = 1024


def ids() -> list[str]:
    return import_package("envpool").list_all_envs()


class SuiteEnv:
    """They reset in a step of their own, or with `resets_in_step` where they are told to; they cannot be killed."""

    def __init__(self, name: str, env_id: str, options: HostOptions):
        params, envpool = options.env_params, import_package("envpool")
        refuse_params(params, ("env_type", "batch_size", "gym_reset_return_info", "base_path"))
        threads = params.get("num_threads", 0)
        if not isinstance(threads, int) or not 0 <= threads <= MOST_THREADS:  # envpool would end the process
            raise UsageError(f"{name} parameter 'num_threads' must be 0 (all cores) to {MOST_THREADS}, got {threads!r}")
        check_time_limit(name, "max_episode_steps", params.get("max_episode_steps", 1))
        if options.frames and "mujoco" not in envpool.registration.registry.specs[env_id][0]:
            params = params | FRAMES  # MuJoCo would end the process where there is no display
        params = params | {"num_envs": options.num_envs, "seed": options.seed}
        self._inner = envpool.make(env_id, env_type="gymnasium", **params)
        self._conversion = Conversion(name, self._inner.observation_space, self._inner.action_space)
        self.spec, self.num_envs, self.resets_in_step = self._conversion.spec, options.num_envs, options.resets_in_step

    def reset(self) -> Any:
        self._over = np.zeros(self.num_envs, bool)
        return self._conversion.observations(self._inner.reset()[0])

    def step(self, action: np.ndarray) -> HostStep:
        obs, reward, terminated, truncated, info = self._inner.step(self._conversion.actions(action))
        obs, over = self._conversion.observations(obs), terminated | truncated
        outcome = of_each(reward, self.num_envs, "rewards").astype(np.float32), terminated, truncated
        if self.resets_in_step:
            return HostStep(self._with_first(obs, over), *outcome, np.ones_like(over), obs, info)
        valid, self._over = ~self._over, over
        return HostStep(obs, *outcome, valid, None, info)

    def _with_first(self, obs: Any, over: np.ndarray) -> Any:
        """Observations [N, ...] with the first of the next episode where one is `over`."""
        if not over.any():
            return obs
        first, info = self._inner.reset(np.flatnonzero(over).astype(np.int32))
        obs, first = jax.tree.map(np.array, obs), self._conversion.observations(first)
        jax.tree.map(lambda all_obs, some: all_obs.__setitem__(info["env_id"], some), obs, first)
        return obs

    def frame(self) -> np.ndarray:
        return self._inner.render(np.zeros(1, np.int32))[0]

    def close(self) -> None:
        self._inner.close()

    def kill(self) -> None:
        pass
