"""A user's own environment: an object, or `package.module:factory`, with gymnax's interface.

`reset(key, params)` returns (observation, state), and `step(key, state, action, params)` returns
(observation, state, reward, terminated, truncated, info), resets by itself in the same step, and
leaves the true next observation in `info["final_observation"]`. Subclasses of gymnax's
`Environment` give `reset_env` and `step_env` instead, and leave resets and time limits to it.
"""

import copy
import difflib
import importlib
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.env_flags import SUITES
from pmaprl.cli.errors import UsageError
from pmaprl.envs import spaces
from pmaprl.envs.environment import Env, Step, select
from pmaprl.envs.foreign_code import readable_errors, reason
from pmaprl.envs.suite_params import changed_params, obs_names_of, settable
from pmaprl.envs.variation import with_draws


class GymnaxStyleEnv(Env):
    """An environment with gymnax's interface.

    It steps in `step_env`, and leaves `step` to gymnax, or it `resets_itself`.
    """

    shows_numbers = True

    def __init__(
        self,
        name: str,
        inner: Any,
        params: Any,
        max_steps: int | None = None,
        resets_itself: bool = False,
    ):
        self.params = params
        self.resets_itself = resets_itself
        if max_steps is None:
            max_steps = _time_limit(name, getattr(params, "max_steps_in_episode", 0))
        super().__init__(
            name, inner, inner.observation_space(params), inner.action_space(params), max_steps
        )
        self.obs_names = obs_names_of(inner)

    def begin(self, key: jax.Array) -> tuple[jax.Array, Any]:
        return self.inner.reset(key, self.params)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        obs, state, reward, terminated, info = self.inner.step_env(key, state, action, self.params)
        return Step(
            obs=obs,
            state=state,
            reward=reward,
            terminated=terminated,
            truncated=self.inner.is_truncated(state, self.params),
            info=info,
        )

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        if not self.resets_itself:
            return super().step(key, state, action)
        clipped = spaces.clip(action, self.action_space)
        outputs = self.inner.step(key, state, clipped, self.params)
        if len(outputs) != 6:
            raise UsageError(
                f"environment {self.name}: step returned {len(outputs)} values instead of the 6 of "
                "gymnax >= 1.0 (observation, state, reward, terminated, truncated, info)"
            )
        obs, next_state, reward, terminated, truncated, info = outputs
        if not isinstance(info, Mapping):
            raise UsageError(
                f"environment {self.name}: step returned {info!r} as info, not a dictionary"
            )
        if "final_observation" not in info:
            raise UsageError(
                f'environment {self.name}: step left no "final_observation" in its info'
            )
        out = Step(
            obs=obs,
            state=next_state,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=info,
        )
        out = self.checked(out)
        final_obs = self.checked_obs("final_obs", info["final_observation"])
        # Only the environment itself knows the state in which an episode ended
        final_state = select(out.terminated | out.truncated, state, out.state)
        return out._replace(final_obs=final_obs, final_state=final_state)

    def frame(self, state: Any) -> Any:
        if callable(getattr(self.inner, "frame", None)):
            return self.inner.frame(state, self.params)
        # By name, as the registry loads suites, which import this room
        scenes = importlib.import_module("pmaprl.suites.tools.scenes")
        return scenes.frame(self.inner, self.params, state)

    @property
    def numbers(self) -> dict[str, float]:
        numbers = {}
        for name, value in _fields(self.params).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and self._keeps_actions(name, value + abs(value) + 1):
                numbers[name] = value
        return numbers

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        values = {}
        for name, value in numbers.items():
            if isinstance(getattr(self.params, name), int):
                value = jnp.round(value).astype(int)
            values[name] = value
        other.params = self.params.replace(**values)
        return other

    def _keeps_actions(self, name: str, value: float) -> bool:
        """True if the action space stays the same with another value of a parameter."""
        actions = self.inner.action_space(self.params.replace(**{name: value}))
        actions = spaces.convert(actions, "action space")
        return self.spec._replace(action_space=actions).to_json() == self.spec.to_json()


def _time_limit(name: str, limit: Any) -> int:
    """Steps of the longest episode, 0 without a limit. Raises UsageError where it is no number."""
    if not isinstance(limit, int | float | np.number) and not isinstance(limit, jax.Array):
        raise UsageError(f"environment {name}: max_steps_in_episode is {limit!r}, not a number")
    return math.ceil(limit) if math.isfinite(limit) else 0


class UserEnv(GymnaxStyleEnv):
    """A user's environment, which is checked more strictly than those of suites."""

    is_of_user = True


def has_own_step(inner: Any) -> bool:
    """True if an environment has a `step` of its own, instead of that of gymnax's `Environment`."""
    owner = next((kind for kind in type(inner).__mro__ if "step" in vars(kind)), None)
    return getattr(owner, "__module__", "") != "gymnax.environments.environment"


def replaced(name: str, params: Any, env_params: dict[str, Any]) -> Any:
    """Replace some values of `params` by those of `env_params`."""
    changes = changed_params(name, settable(_fields(params)), env_params)
    return params.replace(**changes) if changes else params


def _fields(params: Any) -> dict[str, Any]:
    return vars(params) if hasattr(params, "replace") else {}


def wrap(environment: Any, env_params: str = "") -> Env:
    """Make an `Env` from a user's environment.

    Args:
        environment: a gymnax-style environment, or a pair (environment, parameters); an `Env` stays
            as it is.
        env_params: a JSON object of parameters to replace, as for `make` of the registry.

    Raises:
        UsageError: the environment lacks a part of the interface, or `env_params` would have to
            change an `Env`.
    """
    if not isinstance(environment, Env):
        return with_draws(partial(_adapt, environment, ""), env_params)
    if env_params:
        raise UsageError(
            f"--env-params {env_params} cannot change an object, {environment.name}: make it so"
        )
    return environment


def make(path: str, env_params: dict[str, Any]) -> Env:
    """Make the environment of a factory called `path`, such as `package.module:factory`.

    Raises:
        UsageError: the factory cannot be imported, or what it returns cannot be used.
    """
    module, factory = path.rsplit(":", 1)
    try:
        made = getattr(importlib.import_module(module), factory)()
    except (Exception, SystemExit) as error:
        suite = path.partition(":")[0]
        near = difflib.get_close_matches(suite, SUITES, n=1)
        if near and isinstance(error, ModuleNotFoundError):
            raise UsageError(f"there is no suite {suite}; did you mean {near[0]}:?") from error
        why = (
            f"{reason(error)}; it should be package.module:factory, importable from here, "
            "without arguments"
        )
        raise UsageError(f"environment {path} cannot be made: {why}") from error
    return _adapt(made, path, env_params)


def _adapt(made: Any, name: str, env_params: dict[str, Any]) -> Env:
    """Make an `Env` from an environment, or from a pair (environment, parameters).

    Args:
        made: the environment or pair.
        name: its name; "": as it calls itself.
        env_params: parameters to replace.
    """
    is_pair = isinstance(made, tuple) and len(made) == 2
    inner: Any = made[0] if is_pair else made
    prefix = f"environment {name}: " if name else ""
    if isinstance(inner, type):
        raise UsageError(
            f"{prefix}{inner.__name__} is a class, not an environment: return {inner.__name__}()"
        )
    has_methods = hasattr(inner, "reset") and hasattr(inner, "step")
    has_params = is_pair or hasattr(inner, "default_params")
    if not has_methods or not has_params:
        raise UsageError(
            f"{prefix}{made!r} is neither a gymnax-style environment nor a pair (environment, "
            "parameters)"
        )
    name = name or getattr(inner, "name", type(inner).__name__)
    params = made[1] if is_pair else inner.default_params
    params = replaced(name, params, env_params)
    with readable_errors(f"environment {name} cannot be used as a gymnax environment"):
        return UserEnv(name, inner, params, resets_itself=has_own_step(inner))
