"""gymnasium's environments: `gymnasium:CartPole-v1`.

`gymnasium:module:id` names an environment that a module of the user registers.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pmaprl.cli.errors import FailedEnvError, UsageError
from pmaprl.envs import spaces
from pmaprl.envs.foreign_code import import_package, reason
from pmaprl.envs.host import HostOptions, HostStep
from pmaprl.envs.masks import MASK
from pmaprl.envs.numbers import cast
from pmaprl.envs.suite_params import obs_names_of
from pmaprl.suites.tools import processes
from pmaprl.suites.tools.checked import array_of, of_each, true_of_each
from pmaprl.suites.tools.conversion import Conversion
from pmaprl.suites.tools.observed import OBS_NAMES
from pmaprl.suites.tools.rendering import FRAMES, draw_without_display

REGISTERED_BY = {"ale_py": "ale_py", "pmaprl": "pmaprl.suites.tools.processes"}
"""Modules that register environments on import, by the package of an environment's entry point."""


def ids() -> list[str]:
    with suppress(UsageError):  # it is not installed
        import_package("ale_py")
    return list(gymnasium.registry)


class SuiteEnv:
    """Some of gymnasium's environments.

    They are in processes of their own ("async"), in this thread ("sync"), or vectorized by their
    suite ("vector").
    """

    def __init__(self, name: str, env_id: str, options: HostOptions):
        self._env_id = env_id
        if ":" not in env_id:
            entry_point = str(gymnasium.registry[env_id].entry_point)
            module = REGISTERED_BY.get(entry_point.partition(".")[0])
            if module:  # other processes have to import it too
                env_id = f"{module}:{env_id}"
        self._without_pictures = ""  # the reason why pictures are missing
        if options.frames:
            self._inner, self._without_pictures = _vectorized_with_frames(env_id, options)
        else:
            self._inner = _vectorized(env_id, options)
        self._conversion = Conversion(
            name, self._inner.single_observation_space, self._inner.single_action_space
        )
        self.spec = self._conversion.spec
        self.num_envs = options.num_envs
        mode = self._inner.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            raise UsageError(f"{name} does not reset by itself: take another --vectorization")
        self.resets_in_step = mode is AutoresetMode.SAME_STEP
        self._seed: int | None = options.seed
        # An environment that a suite vectorizes may write each step into the same arrays
        self._reuses_arrays = options.vectorization == "vector"
        observed = self.spec.observation_space
        is_observed = isinstance(observed, Mapping) and MASK in observed
        has_choices = bool(spaces.choices_of(self.spec.action_space))
        self._wants_mask = self._reuses_arrays and has_choices and not is_observed

    @property
    def obs_names(self) -> tuple[str, ...]:
        """Names of an observation's numbers; () for environments in processes of their own."""
        one_by_one = getattr(self._inner, "envs", None)
        drawn = one_by_one[0] if one_by_one else self._inner
        return obs_names_of(drawn.unwrapped) or OBS_NAMES.get(self._env_id, ())

    def reset(self) -> Any:
        self._over = np.zeros(self.num_envs, bool)
        seed = self._seed
        self._seed = None  # later resets go on with the environments' own randomness
        obs, infos = self._inner.reset(seed=seed)
        self._check_mask(infos)
        return self._conversion.observations(_copied(obs))

    def reseed(self, seed: int) -> bool:
        self._seed = seed
        # Environments that a suite vectorizes may take a seed only when they are made
        return not self._reuses_arrays

    def step(self, action: np.ndarray) -> HostStep:
        *outputs, infos = self._inner.step(self._conversion.actions(action))
        self._check_mask(infos)
        if self._reuses_arrays:
            outputs = _copied(tuple(outputs))
        obs, reward, *ends = outputs
        terminated = true_of_each(ends[0], self.num_envs, "terminated")
        truncated = true_of_each(ends[1], self.num_envs, "truncated")
        over = terminated | truncated
        valid = np.ones(self.num_envs, bool)
        final_obs = None
        if self.resets_in_step:
            final_obs = self._conversion.observations(self._with_final(obs, over, infos))
        else:
            valid = ~self._over
            self._over = over
        obs = self._conversion.observations(obs)
        reward = of_each(reward, self.num_envs, "rewards").astype(np.float32)
        return HostStep(
            obs=obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            final_obs=final_obs,
            info=infos,
        )

    def _check_mask(self, infos: Any) -> None:
        """Raise FailedEnvError if infos of a suite that vectorizes itself have a mask.

        Other environments observe it, see `CheckedEnv`.
        """
        masks = infos.get(MASK) if isinstance(infos, Mapping) else None
        if masks is None or not self._wants_mask:
            return
        raise FailedEnvError(
            f"the infos of {self._env_id} have an {MASK}, which --vectorization vector does not "
            f"look for: take --vectorization sync, or observe a dictionary with an {MASK}"
        )

    def _with_final(self, obs: Any, over: np.ndarray, infos: dict[str, Any]) -> Any:
        """Replace observations [N, ...] by the last of the old episode where a new one began."""
        if not over.any():
            return obs
        if "final_obs" not in infos:
            raise FailedEnvError(
                f"the infos of {self._env_id} have no final_obs at the end of an episode"
            )
        final_obs = _copied(obs)
        is_told = np.broadcast_to(infos.get("_final_obs", True), over.shape)
        if not is_told[over].all():
            raise FailedEnvError(f"the infos of {self._env_id} lack a final_obs of an episode")
        for index in np.flatnonzero(over):
            try:
                parts = list(
                    spaces.leaves(self._conversion.theirs, final_obs, infos["final_obs"][index])
                )
            except (KeyError, IndexError, TypeError) as error:
                told = f"a final_obs of {self._env_id} has not the parts of its space"
                raise FailedEnvError(told) from error
            for _, _, x, last in parts:
                x[index] = self._fitting(last, x)
        return final_obs

    def _fitting(self, last: Any, like: np.ndarray) -> np.ndarray:
        """Part of a last observation in the type of all, before NumPy would cast or broadcast it.

        Raises:
            FailedEnvError: it has another shape, or numbers that the type does not hold.
        """
        what = f"a final_obs of {self._env_id}"
        array = array_of(last, what)
        if array.shape != like.shape[1:]:
            raise FailedEnvError(f"{what} has shape {array.shape} instead of {like.shape[1:]}")
        try:
            return cast(array, like.dtype)
        except OverflowError as error:
            raise FailedEnvError(f"{what} has {error}") from None

    def frame(self) -> np.ndarray:
        if self._without_pictures:
            raise UsageError(self._without_pictures)
        one_by_one = getattr(self._inner, "envs", None)
        if one_by_one:  # the vector environment would draw them all
            return one_by_one[0].render()
        return self._inner.render()[0]

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._inner.closed = True  # otherwise it would be closed once more while it is deleted

    def kill(self) -> None:
        if isinstance(self._inner, processes.Processes):
            self._inner.kill()


def _vectorized(env_id: str, options: HostOptions) -> Any:
    """Make gymnasium's vector environment, or one with its interface."""
    num_envs = options.num_envs
    if options.vectorization == "vector":
        return gymnasium.make_vec(env_id, num_envs, "vector_entry_point", **options.env_params)
    maker = partial(processes.make, MASK, env_id, **options.env_params)
    if options.vectorization == "async":
        return processes.Processes(maker, num_envs, options.reset_timeout, options.step_timeout)
    # A reset in the same step would hide an episode's last picture
    mode = AutoresetMode.NEXT_STEP if options.frames else AutoresetMode.SAME_STEP
    return SyncVectorEnv([maker] * options.num_envs, autoreset_mode=mode)


def _vectorized_with_frames(env_id: str, options: HostOptions) -> tuple[Any, str]:
    """Make environments in this process that draw themselves, if they can.

    Returns:
        The environments, and the reason why they cannot draw themselves, or "".
    """
    params = {name: value for name, value in options.env_params.items() if name not in FRAMES}
    plain = _vectorized(env_id, options._replace(env_params=params))
    metadata = plain.envs[0].metadata if hasattr(plain, "envs") else plain.metadata
    mode = FRAMES["render_mode"]
    if mode not in metadata.get("render_modes", ()):
        return plain, f"its metadata does not have the render mode {mode}"
    draw_without_display()
    try:
        drawn = _vectorized(env_id, options._replace(env_params=params | FRAMES))
    except Exception as error:  # it takes no render mode, or a package is missing here
        return plain, reason(error)
    plain.close()
    return drawn, ""


def _copied(tree: Any) -> Any:
    """Copy arrays, so that the environments do not write into them."""

    def is_array(x: Any) -> bool:
        return not isinstance(x, Mapping | tuple)

    return jax.tree.map(partial(np.array, subok=True), tree, is_leaf=is_array)
