"""A user's own environment: an object, or `package.module:factory`, written as gymnax's are.

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
from pmaprl.envs.suite_tools import changed_params, own_names, readable_errors, reason, settable
from pmaprl.envs.variation import with_draws


class GymnaxStyleEnv(Env):
    """An environment that steps in `step_env`, and leaves `step` to gymnax, or one that
    `resets_itself`.
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
        self.obs_names = own_names(inner)

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
        outputs = self.inner.step(key, state, spaces.clip(action, self.action_space), self.params)
        if len(outputs) != 6:
            what = (
                "the 6 of gymnax >= 1.0 (observation, state, reward, terminated, truncated, info)"
            )
            raise UsageError(
                f"environment {self.name}: step returned {len(outputs)} values instead of {what}"
            )
        if not isinstance(outputs[5], Mapping):
            raise UsageError(
                f"environment {self.name}: step returned {outputs[5]!r} as info, not a dictionary"
            )
        if "final_observation" not in outputs[5]:
            raise UsageError(
                f'environment {self.name}: step left no "final_observation" in its info'
            )
        out = self.checked(Step(*outputs))
        final_obs = self.checked_obs("final_obs", outputs[5]["final_observation"])
        # Nobody but the environment knows the state in which an episode ended
        final_state = select(out.terminated | out.truncated, state, out.state)
        return out._replace(final_obs=final_obs, final_state=final_state)

    def frame(self, state: Any) -> Any:
        if callable(getattr(self.inner, "frame", None)):
            return self.inner.frame(state, self.params)
        # By name, as the registry loads suites
        scenes = importlib.import_module("pmaprl.suites.tools.scenes")
        return scenes.frame(self.inner, self.params, state)

    @property
    def numbers(self) -> dict[str, float]:
        fields = _fields(self.params).items()
        numbers = {
            name: x for name, x in fields if isinstance(x, int | float) and not isinstance(x, bool)
        }
        return {name: x for name, x in numbers.items() if self._keeps_actions(name, x + abs(x) + 1)}

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        whole = {name for name in numbers if isinstance(getattr(self.params, name), int)}
        numbers = {
            name: jnp.round(x).astype(int) if name in whole else x for name, x in numbers.items()
        }
        other.params = self.params.replace(**numbers)
        return other

    def _keeps_actions(self, name: str, value: float) -> bool:
        """Whether the action space stays the same with another value of a parameter."""
        actions = self.inner.action_space(self.params.replace(**{name: value}))
        actions = spaces.convert(actions, "action space")
        return self.spec._replace(action_space=actions).to_json() == self.spec.to_json()


def _time_limit(name: str, limit: Any) -> int:
    """Steps of the longest episode, 0 without a limit. Raises UsageError where it is no number."""
    if not isinstance(limit, int | float | np.number) and not isinstance(limit, jax.Array):
        raise UsageError(f"environment {name}: max_steps_in_episode is {limit!r}, not a number")
    return math.ceil(limit) if math.isfinite(limit) else 0


class UserEnv(GymnaxStyleEnv):
    """An environment that nobody but its author has tried."""

    is_of_user = True


def has_own_step(inner: Any) -> bool:
    """Whether an environment does not leave `step`, and resets with it, to gymnax's
    `Environment`.
    """
    owner = next((kind for kind in type(inner).__mro__ if "step" in vars(kind)), None)
    return getattr(owner, "__module__", "") != "gymnax.environments.environment"


def replaced(name: str, params: Any, env_params: dict[str, Any]) -> Any:
    """`params` with what `env_params` change of it."""
    changes = changed_params(name, settable(_fields(params)), env_params)
    return params.replace(**changes) if changes else params


def _fields(params: Any) -> dict[str, Any]:
    return vars(params) if hasattr(params, "replace") else {}


def wrap(environment: Any, env_params: str = "") -> Env:
    """An `Env` from a gymnax-style environment, or from a pair (environment, parameters); an `Env`
    stays as it is.

    `env_params` is as for `make` of the registry. Raises UsageError where an `Env` would have to
    change by it, and where the environment lacks a part of the interface.
    """
    if not isinstance(environment, Env):
        return with_draws(partial(_adapt, environment, ""), env_params)
    if env_params:
        raise UsageError(
            f"--env-params {env_params} cannot change an object, {environment.name}: make it so"
        )
    return environment


def make(path: str, env_params: dict[str, Any]) -> Env:
    """What the factory called `path`, such as `package.module:factory`, returns."""
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
    """An `Env` called `name`, or as it calls itself, from an environment or a pair (environment,
    parameters).
    """
    inner, *params = made if isinstance(made, tuple) and len(made) == 2 else (made,)
    what = f"environment {name}: " if name else ""
    if isinstance(inner, type):
        raise UsageError(
            f"{what}{inner.__name__} is a class, not an environment: return {inner.__name__}()"
        )
    if not (
        hasattr(inner, "reset")
        and hasattr(inner, "step")
        and (params or hasattr(inner, "default_params"))
    ):
        raise UsageError(
            f"{what}{made!r} is neither a gymnax-style environment nor a pair (environment, "
            "parameters)"
        )
    name = name or getattr(inner, "name", type(inner).__name__)
    params = replaced(name, params[0] if params else inner.default_params, env_params)
    with readable_errors(f"environment {name} cannot be used as a gymnax environment"):
        return UserEnv(name, inner, params, resets_itself=has_own_step(inner))
