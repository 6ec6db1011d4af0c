"""Environments that step on the host, several together: `make_host("envpool:Pong-v5", num_envs=8, seed=0)`.

Suites reset their environments by themselves, in one of two ways. Some do it within the step that ended an episode:
what they return is the next episode's first observation, and the last of the old one comes extra. Others take one more
step for it, in which they ignore the action. Here every step says which it was.
"""

import contextlib
import difflib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from common.cli.env_names import HOST_SUITES, split_name
from common.cli.errors import UsageError
from common.envs import spaces
from common.envs.processes import Processes

Vectorization = Literal["async", "sync", "vector"]
TAKEN = ("num_envs", "seed", "env_type", "batch_size", "gym_reset_return_info")  # what flags of their own decide


class HostStep(NamedTuple):
    """What one step of N environments returns."""

    obs: np.ndarray  # [N, ...] what to act on next
    reward: np.ndarray  # [N] float32
    terminated: np.ndarray  # [N] bool: the episode is over, nothing follows
    truncated: np.ndarray  # [N] bool: a time limit, the episode would go on
    valid: np.ndarray  # [N] bool: False where the environment only reset itself and ignored the action
    final_obs: np.ndarray | None  # [N, ...] the true next observation; None where that is `obs`, as without resets


class HostEnvs(Protocol):
    """N environments of one kind."""

    spec: spaces.EnvSpec
    num_envs: int
    resets_in_step: bool  # an episode's end and the next one's start come in the same step, with `final_obs`

    def reset(self) -> np.ndarray:
        """Begin new episodes everywhere; returns the first observations [N, ...]."""

    def step(self, action: np.ndarray) -> HostStep:
        """Act everywhere, with actions [N, ...] as the policy gives them; those of a Box are clipped here."""

    def close(self) -> None:
        """End threads and processes, also those that hang."""


def make_host(
    name: str,
    num_envs: int,
    seed: int,
    env_params: str = "",
    vectorization: Vectorization = "async",
    reset_timeout: float | None = None,
    step_timeout: float | None = None,
) -> HostEnvs:
    """`num_envs` environments called `envpool:id` or `gymnasium:id`.

    `env_params` is a JSON object of arguments for envpool's or gymnasium's `make`. The rest matters to gymnasium only:
    whether each environment has a process of its own, all share this thread, or the suite has an implementation of its
    own for several; and after how many seconds processes that do not answer raise TimeoutError. Raises UsageError for
    an unknown name, for arguments that do not work, and for spaces that are not supported.
    """
    suite, env_id = split_name(name)
    if suite not in HOST_SUITES:
        raise UsageError(f"{name} does not step on the host: name one as envpool:CartPole-v1 or gymnasium:CartPole-v1")
    options = _options(env_params)
    if suite == "envpool":
        return EnvpoolEnvs(env_id, num_envs, seed, options)
    return GymnasiumEnvs(env_id, num_envs, seed, options, vectorization, reset_timeout, step_timeout)


class EnvpoolEnvs:
    """envpool's environments, stepped by C++ threads. They reset in a step of their own, and cannot be killed."""

    resets_in_step = False

    def __init__(self, env_id: str, num_envs: int, seed: int, options: dict[str, Any]):
        envpool = _import("envpool")
        _check_known(env_id, envpool.list_all_envs(), "envpool")
        with _as_usage_error(f"envpool:{env_id}"):
            self._inner = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=seed, **options)
            self.spec = _spec(f"envpool:{env_id}", self._inner.observation_space, self._inner.action_space)
        self.spec, self._turns = _channels_last(self.spec)
        self._action_dtype = self._inner.action_space.dtype
        self.num_envs = num_envs

    def reset(self) -> np.ndarray:
        self._over = np.zeros(self.num_envs, bool)
        return self._turns(self._inner.reset()[0])

    def step(self, action: np.ndarray) -> HostStep:
        action = _in_bounds(action, self.spec.action_space).astype(self._action_dtype)
        obs, reward, terminated, truncated, _ = self._inner.step(action)
        valid, self._over = ~self._over, terminated | truncated
        return HostStep(self._turns(obs), reward.astype(np.float32), terminated, truncated, valid, None)

    def close(self) -> None:
        self._inner.close()


class GymnasiumEnvs:
    """gymnasium's environments, in processes of their own ("async"), in this thread, or vectorised by their suite."""

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        seed: int,
        options: dict[str, Any],
        vectorization: Vectorization = "async",
        reset_timeout: float | None = None,
        step_timeout: float | None = None,
    ):
        gymnasium = _import("gymnasium")
        vector = importlib.import_module("gymnasium.vector")
        if ":" in env_id and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        if ":" not in env_id:
            _check_known(env_id, gymnasium.registry, "gymnasium")
        with _as_usage_error(f"gymnasium:{env_id}"):
            maker = partial(gymnasium.make, env_id, **options)
            if vectorization == "vector":
                self._inner = gymnasium.make_vec(env_id, num_envs, "vector_entry_point", **options)
            elif vectorization == "sync":
                self._inner = vector.SyncVectorEnv([maker] * num_envs, autoreset_mode=vector.AutoresetMode.SAME_STEP)
            else:
                self._inner = Processes(maker, num_envs, reset_timeout, step_timeout)
            single = self._inner.single_observation_space, self._inner.single_action_space
            self.spec, self._turns = _channels_last(_spec(f"gymnasium:{env_id}", *single))
        mode = self._inner.metadata.get("autoreset_mode")
        if mode not in (vector.AutoresetMode.SAME_STEP, vector.AutoresetMode.NEXT_STEP):
            raise UsageError(f"gymnasium:{env_id} does not reset by itself: take another --vectorization")
        self.resets_in_step = mode is vector.AutoresetMode.SAME_STEP
        self.num_envs = num_envs
        self._seed: int | None = seed
        self._reuses_arrays = vectorization == "vector"  # at least it may
        self._action_dtype = self._inner.single_action_space.dtype

    def reset(self) -> np.ndarray:
        self._over = np.zeros(self.num_envs, bool)
        seed, self._seed = self._seed, None  # once: later resets go on with the environments' own randomness
        return self._turns(np.array(self._inner.reset(seed=seed)[0]))

    def step(self, action: np.ndarray) -> HostStep:
        *outputs, infos = self._inner.step(_in_bounds(action, self.spec.action_space).astype(self._action_dtype))
        if self._reuses_arrays:
            outputs = map(np.array, outputs)
        obs, reward, terminated, truncated = outputs
        over = terminated | truncated
        valid, final_obs = np.ones(self.num_envs, bool), None
        if self.resets_in_step:
            final_obs = np.array(obs) if over.any() else obs
            for index in np.flatnonzero(over):
                final_obs[index] = infos["final_obs"][index]
            final_obs = self._turns(final_obs)
        else:
            valid, self._over = ~self._over, over
        obs = self._turns(obs)
        return HostStep(obs, reward.astype(np.float32), terminated, truncated, valid, final_obs)

    def close(self) -> None:
        self._inner.close()


def _options(env_params: str) -> dict[str, Any]:
    if not env_params:
        return {}
    try:
        options = json.loads(env_params)
    except json.JSONDecodeError as error:
        raise UsageError(f"--env-params {env_params!r} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise UsageError(f"--env-params {env_params!r} must be a JSON object such as '{{\"name\": 1.0}}'")
    for name in TAKEN:
        if name in options:
            raise UsageError(f"--env-params cannot set {name!r}: it follows from other flags")
    return options


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(f'{package} environments need {package}: pip install -e ".[host]" ({error})') from error


def _check_known(env_id: str, known: Iterable[str], suite: str) -> None:
    if env_id in known:
        return
    lowered = {other.lower(): other for other in known}
    near = [lowered[match] for match in difflib.get_close_matches(env_id.lower(), lowered, n=3, cutoff=0.4)]
    hint = f"did you mean {', '.join(f'{suite}:{other}' for other in near)}?" if near else f"see {suite}'s list of ids"
    raise UsageError(f"unknown environment {suite}:{env_id}: {hint}")


@contextlib.contextmanager
def _as_usage_error(name: str):
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*precision lowered by casting")  # of bounds that are not exact
            yield
    except UsageError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise UsageError(f"environment {name} cannot be made: {reason}") from error


def _spec(name: str, observation: Any, action: Any) -> spaces.EnvSpec:
    for space in (observation, action):
        if np.any(getattr(space, "start", 0)):
            raise UsageError(f"environment {name}: {space} does not start at 0, which is not supported")
    # JAX computes with 32 bits
    narrow = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.int64): np.dtype(np.int32)}
    dtype = narrow.get(np.dtype(observation.dtype), np.dtype(observation.dtype))
    observation = spaces.convert(observation, "observation space")
    if 0 in observation.shape:
        raise UsageError(f"environment {name} has no observation: its observation space has shape {observation.shape}")
    return spaces.EnvSpec(name, observation, dtype, spaces.convert(action, "action space"))


def _channels_last(spec: spaces.EnvSpec) -> tuple[spaces.EnvSpec, Callable[[np.ndarray], np.ndarray]]:
    """`spec` with images as [H, W, C], which networks take, and what turns observations [N, ...] so.

    Frames that are stacked in front, [C, H, W], are known by their few channels.
    """
    box = spec.observation_space
    if not spaces.is_image(box) or box.shape[0] >= min(box.shape[1:]):
        return spec, lambda obs: obs
    low, high = (np.moveaxis(bound, 0, -1) for bound in (box.low, box.high))
    return spec._replace(observation_space=spaces.Box(low, high, low.shape)), lambda obs: np.moveaxis(obs, 1, -1)


def _in_bounds(action: np.ndarray, space: spaces.Space) -> np.ndarray:
    if not isinstance(space, spaces.Box):
        return action
    return np.clip(action.reshape(len(action), *space.shape), space.low, space.high)
