"""jumanji's environments: `jumanji:Snake-v1`.

Time limits are added here, because theirs end episodes as if nothing followed.
"""

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.envs.environment import Env, Step
from pmaprl.envs.foreign_code import import_package, quiet, readable_errors
from pmaprl.envs.masks import MASK
from pmaprl.envs.spaces import Box, Discrete, MultiDiscrete, Space, box
from pmaprl.envs.suite_params import changed_params, settable

DOWNLOADED = ("Sokoban-v0",)  # environments that download their levels when they are made
MOST_CODES = 64  # whole numbers of a larger range are amounts, not codes of things
# Numbers of codes that no specification tells, by environment and part of its observations
UNBOUNDED_CODES = {"Game2048-v1": {"board": 18}}
VIEWERS = "_viewer", "_env_viewer", "viewer"  # names under which environments have their viewer
# A space of ours, and the function that converts values to it (or actions from it)
Encoding = tuple[Space, Callable]


def ids() -> list[str]:
    return list(import_package("jumanji.registration")._REGISTRY)


class SuiteEnv(Env):
    """One of jumanji's environments. All agents act as one, for the sum of their rewards."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        jumanji = import_package("jumanji")
        failure = f"environment {name} cannot be made"
        if env_id in DOWNLOADED:
            failure += " (jumanji downloads its levels from huggingface.co)"
        with quiet(), readable_errors(failure):
            inner = jumanji.make(env_id)
            defaults = {}
            if getattr(inner, "time_limit", None):
                defaults["time_limit"] = int(inner.time_limit)
            known = settable(type(inner)) | defaults
            params = defaults | changed_params(name, known, env_params)
            limit = params.get("time_limit", 0)
            if limit:
                params["time_limit"] += 1  # their limit is never reached
            inner = jumanji.make(env_id, **params)
        reward_of = getattr(inner.unwrapped, "_reward_fn", None)
        if reward_of and "time_limit" in signature(reward_of).parameters:
            inner.unwrapped._reward_fn = lambda found, step, _: reward_of(found, step, limit)
        mask = getattr(inner.observation_spec, "_specs", {}).get(MASK)
        actions, self._chosen = _actions(inner.action_spec, mask)
        codes = UNBOUNDED_CODES.get(env_id, {})
        nvec = getattr(actions, "nvec", ())
        observations, self._observed = _encoding(inner.observation_spec, codes, nvec)
        super().__init__(name, inner, observations, actions, limit)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        state, step = self.inner.reset(key)
        return self._observed(step.observation), (state, 0)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        state, time = state
        time = time + 1
        state, step = self.inner.step(state, self._chosen(action))
        return Step(
            obs=self._observed(step.observation),
            state=(state, time),
            reward=jnp.sum(step.reward),
            terminated=step.last(),
            truncated=jnp.asarray(0 < self.declared_steps <= time),
        )

    def frame(self, state: Any) -> np.ndarray:
        env = self.inner.unwrapped
        viewers = [getattr(env, name) for name in VIEWERS if hasattr(env, name)]
        viewer = viewers[0]
        viewer.figure_size = (4, 4)
        viewer._display = viewer._display_rgb_array
        shown = state[0]
        if type(viewer).__name__ == "ConnectorViewer":
            shown = shown.grid
        pixels = np.array(viewer.render(shown))  # copied, because its canvas is drawn on again
        return pixels[..., :3]


def _encoding(spec: Any, codes: dict[str, int], nvec: tuple[int, ...] = ()) -> Encoding:
    """Encode observations for networks: codes as such, amounts between 0 and 1.

    Args:
        spec: jumanji's specification.
        codes: numbers of codes that the specification does not tell, by part.
        nvec: the choices that a mask is for.
    """
    specs = getattr(spec, "_specs", {})
    if not specs:
        return _encoding_of_leaf(spec)
    parts = {name: _encoding(part, {}) for name, part in specs.items()}
    for name, count in codes.items():
        parts[name] = _codes(specs[name].shape, count, least=0)
    if MASK in specs:
        parts[MASK] = box((sum(nvec),), 0.0, 1.0), partial(_mask, nvec[0])

    def observed(obs):
        return {name: encode(getattr(obs, name)) for name, (_, encode) in parts.items()}

    return {name: space for name, (space, _) in parts.items()}, observed


def _mask(choices: int, mask: jax.Array) -> jax.Array:
    """Flatten a mask; if it leaves none of the choices, as in Snake when trapped, all are legal."""
    mask = mask.reshape(-1, choices)
    has_none = ~jnp.any(mask, axis=-1, keepdims=True)
    return jnp.ravel(mask | has_none)


def _encoding_of_leaf(spec: Any) -> Encoding:
    """Encode whole numbers in a small range as codes, and others between 0 and 1 if bounded."""
    low = float(np.min(getattr(spec, "minimum", -np.inf)))
    high = float(np.max(getattr(spec, "maximum", np.inf)))
    spread = high - low
    if not np.issubdtype(spec.dtype, np.integer) or not np.isfinite(spread):
        return box(spec.shape, low, high), lambda x: jnp.asarray(x, jnp.float32)
    if 1 < spread < MOST_CODES and (spec.shape or hasattr(spec, "num_values")):
        return _codes(spec.shape, int(spread) + 1, least=int(low))

    def scaled(amounts: jax.Array) -> jax.Array:
        return (jnp.asarray(amounts, jnp.float32) - low) / max(spread, 1.0)

    return box(spec.shape, 0.0, 1.0), scaled


def _codes(shape: tuple[int, ...], count: int, least: int) -> Encoding:
    """Encode one of so many codes, from `least` on, or an array of codes."""
    space = MultiDiscrete((count,) * math.prod(shape)) if shape else Discrete(count)

    def shifted(codes: jax.Array) -> jax.Array:
        numbers = codes.reshape(space.shape).astype(jnp.int32)
        return jnp.clip(numbers - least, 0, count - 1)

    return space, shifted


def _actions(spec: Any, mask: Any) -> Encoding:
    """The action space, and the function that converts actions to jumanji's.

    Several choices with a mask over all combinations become one choice.
    """
    if not np.issubdtype(spec.dtype, np.integer):
        low = np.broadcast_to(spec.minimum, spec.shape).astype(np.float32)
        high = np.broadcast_to(spec.maximum, spec.shape).astype(np.float32)
        return Box(low, high, tuple(spec.shape)), lambda action: action.astype(spec.dtype)
    highest = np.ravel(np.broadcast_to(spec.maximum, spec.shape))
    nvec = tuple(int(number) + 1 for number in highest)
    if not spec.shape:
        return Discrete(nvec[0]), lambda action: action
    if mask is not None and tuple(mask.shape) == nvec:

        def separated(action: jax.Array) -> jax.Array:
            parts = jnp.unravel_index(action, nvec)
            return jnp.stack(parts).astype(spec.dtype)

        return Discrete(math.prod(nvec)), separated
    if mask is not None:  # the bounds are sometimes one too large
        nvec = (mask.shape[1],) * mask.shape[0]
    return MultiDiscrete(nvec), lambda action: action.reshape(spec.shape).astype(spec.dtype)
