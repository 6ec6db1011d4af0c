"""Environments behind one interface: `make("CartPole-v1")`, `make("package.module:factory")`, `wrap(environment)`.

The underlying environment is gymnax-style: `step` returns (observation, state, reward, terminated, truncated, info),
resets by itself in the same step, and leaves the true next observation in `info["final_observation"]`.
"""

import difflib
import importlib
import json
import math
import os
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.cli.env_names import split_name, steps_on_host
from common.cli.errors import UsageError
from common.envs import spaces

DEFAULT_HORIZON = 1_000  # for environments without `max_steps_in_episode`
LONGEST_HORIZON = 27_000  # an evaluation has to end, whatever `max_steps_in_episode` says


class Step(NamedTuple):
    """What one step of one environment returns."""

    obs: jax.Array  # first observation of the next episode where this step ended one
    state: Any
    reward: jax.Array  # float32
    terminated: jax.Array  # bool: the episode is over, nothing follows
    truncated: jax.Array  # bool: a time limit, the episode would go on
    final_obs: jax.Array  # the true next observation, never that of a reset


class Env:
    """One environment: pure functions of a single instance, to be vmapped."""

    def __init__(self, name: str, inner: Any, params: Any):
        """Wrap a gymnax-style environment. Raises UsageError where it lacks a part of that interface."""
        self.name, self.inner, self.params = name, inner, params
        try:
            self.observation_space = spaces.convert(inner.observation_space(params), "observation space")
            self.action_space = spaces.convert(inner.action_space(params), "action space")
            obs, self.state_shape = jax.eval_shape(self.reset, jax.random.key(0))
            # Declared shapes and dtypes are sometimes wrong: the observation itself decides.
            self.obs_dtype = obs.dtype
            if isinstance(self.observation_space, spaces.Box) and self.observation_space.shape != obs.shape:
                bounds = (np.full(obs.shape, bound, np.float32) for bound in (-np.inf, np.inf))
                self.observation_space = spaces.Box(*bounds, obs.shape)
            if isinstance(self.action_space, spaces.Box) and not math.prod(self.action_space.shape):
                raise UsageError(
                    f"environment {name} has no action: its action space has shape {self.action_space.shape}"
                )
            action = jax.eval_shape(lambda key: spaces.sample(key, self.action_space), jax.random.key(0))
            self._check_step(jax.eval_shape(self.step, jax.random.key(0), self.state_shape, action), obs.shape)
        except UsageError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UsageError(f"environment {name} cannot be used as a gymnax environment: {reason}") from error
        declared = int(getattr(params, "max_steps_in_episode", 0))
        # Of an episode in an evaluation
        self.max_steps = min(declared if declared > 0 else DEFAULT_HORIZON, LONGEST_HORIZON)

    def _check_step(self, out: Step, obs_shape: tuple[int, ...]) -> None:
        wanted = {"reward": (), "terminated": (), "truncated": (), "obs": obs_shape, "final_obs": obs_shape}
        for name, shape in wanted.items():
            if (found := getattr(out, name).shape) != shape:
                raise UsageError(f"environment {self.name}: step returned {name} of shape {found} instead of {shape}")

    @property
    def spec(self) -> spaces.EnvSpec:
        return spaces.EnvSpec(self.name, self.observation_space, self.obs_dtype, self.action_space)

    def reset(self, key: jax.Array) -> tuple[jax.Array, Any]:
        """First observation and state of an episode."""
        # `astype` makes Python numbers in the state strongly typed, as they are after a step
        return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.result_type(x)), self.inner.reset(key, self.params))

    def reset_mid_episode(self, key: jax.Array) -> tuple[jax.Array, Any]:
        """Observation and state at a random phase of an episode: after up to one horizon of random actions."""
        reset_key, phase_key, walk_key = jax.random.split(key, 3)
        steps = jax.random.randint(phase_key, (), 0, self.max_steps)

        def walk(step, carry):
            action_key, step_key = jax.random.split(jax.random.fold_in(walk_key, step))
            out = self.step(step_key, carry[1], spaces.sample(action_key, self.action_space))
            return out.obs, out.state

        return jax.lax.fori_loop(0, steps, walk, self.reset(reset_key))

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        """One step, with the reset included where it ended the episode. Box actions may come flat, and are clipped."""
        outputs = self.inner.step(key, state, spaces.clip(action, self.action_space), self.params)
        if len(outputs) != 6:
            raise UsageError(
                f"environment {self.name}: step returned {len(outputs)} values instead of the 6 of gymnax >= 1.0 "
                "(observation, state, reward, terminated, truncated, info)"
            )
        obs, state, reward, terminated, truncated, info = outputs
        if "final_observation" not in info:
            raise UsageError(f'environment {self.name}: step left no "final_observation" in its info')
        return Step(
            obs=jnp.asarray(obs).astype(self.obs_dtype),
            state=jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), state, self.state_shape),
            reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(terminated, bool),
            truncated=jnp.asarray(truncated, bool),
            final_obs=jnp.asarray(info["final_observation"]).astype(self.obs_dtype),
        )


def make(name: str, env_params: str = "") -> Env:
    """The environment called `name`: a gymnax id, `gymnax:id`, or `package.module:factory`.

    `env_params` is a JSON object of environment parameters to replace. A factory is called without arguments and
    returns an environment or a pair (environment, parameters). Raises UsageError for an unknown name or parameter.
    """
    suite, rest = split_name(name)
    if steps_on_host(name):
        raise UsageError(f"{name} steps on the host, not on the device: algos/appo_pmap.py trains on it")
    inner, params = _make_gymnax(rest) if suite else _make_custom(*rest.rsplit(":", 1))
    return Env(name, inner, _replace_params(name, params, env_params))


def wrap(environment: Any) -> Env:
    """An `Env` from an environment object, or from a pair (object, parameters)."""
    if isinstance(environment, Env):
        return environment
    inner, params = _with_params(environment)
    return Env(getattr(inner, "name", type(inner).__name__), inner, params)


def _make_gymnax(env_id: str) -> tuple[Any, Any]:
    gymnax = _import_gymnax()
    if env_id not in gymnax.registered_envs:
        lowered = {known.lower(): known for known in gymnax.registered_envs}
        near = [lowered[match] for match in difflib.get_close_matches(env_id.lower(), lowered, n=3, cutoff=0.4)]
        hint = f"did you mean {', '.join(near)}?" if near else f"known ids: {', '.join(gymnax.registered_envs)}"
        raise UsageError(f"unknown environment {env_id!r}: {hint}")
    try:
        return gymnax.make(env_id)
    except Exception as error:  # MNISTBandit downloads its images here
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"environment {env_id} cannot be made: {reason}") from error


def _make_custom(module: str, factory: str) -> tuple[Any, Any]:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return _with_params(getattr(importlib.import_module(module), factory)())
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(
            f"environment {module}:{factory} cannot be made ({reason}); a name with a colon is package.module:factory, "
            "importable from the working directory, and the factory takes no arguments"
        ) from error


class _OnFirstUse(types.ModuleType):
    """Stands in for a module and imports it when one of its attributes is used."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self.__name__), attribute)


def _import_gymnax() -> Any:
    """Import gymnax without the modules that it needs for pictures only: they take most of the time."""
    for name in {"seaborn", "matplotlib.pyplot"} - sys.modules.keys():
        sys.modules[name] = _OnFirstUse(name)
    try:
        return importlib.import_module("gymnax")
    finally:
        for name in [name for name, module in sys.modules.items() if isinstance(module, _OnFirstUse)]:
            del sys.modules[name]


def _with_params(made: Any) -> tuple[Any, Any]:
    inner, params = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(inner, type):
        raise UsageError(f"{inner.__name__} is a class, not an environment: return {inner.__name__}()")
    if not (
        hasattr(inner, "reset")
        and hasattr(inner, "step")
        and (isinstance(made, tuple) or hasattr(inner, "default_params"))
    ):
        raise UsageError(f"{made!r} is neither a gymnax-style environment nor a pair (environment, parameters)")
    return (inner, params) if isinstance(made, tuple) else (inner, inner.default_params)


def _replace_params(name: str, params: Any, env_params: str) -> Any:
    if not env_params:
        return params
    try:
        wanted = json.loads(env_params)
    except json.JSONDecodeError as error:
        raise UsageError(f"--env-params {env_params!r} is not JSON: {error}") from error
    if not isinstance(wanted, dict):
        raise UsageError(f"--env-params {env_params!r} must be a JSON object such as '{{\"name\": 1.0}}'")
    fields = vars(params) if hasattr(params, "replace") else {}
    known = {field: value for field, value in fields.items() if isinstance(value, (bool, int, float))}
    for field, value in wanted.items():
        if field not in known:
            raise UsageError(f"{name} has no parameter {field!r}; it has {', '.join(known) or 'none'}")
        number = isinstance(value, (bool, int, float)) and math.isfinite(value)
        if (
            not number
            or isinstance(value, bool) is not isinstance(known[field], bool)
            or type(known[field])(value) != value
        ):
            raise UsageError(f"{name} parameter {field!r} must be like {known[field]!r}, got {value!r}")
    return params.replace(**{field: type(known[field])(value) for field, value in wanted.items()})
