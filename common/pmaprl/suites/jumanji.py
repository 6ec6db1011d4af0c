"""jumanji's environments: `jumanji:Snake-v1`. Time limits are ours: their own end episodes as if
nothing followed.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.envs.environment import Env, Step
from pmaprl.envs.masks import MASK
from pmaprl.envs.spaces import Box, Discrete, MultiDiscrete, Space, box
from pmaprl.envs.suite_tools import changed_params, import_package, quiet, readable_errors, settable

DOWNLOADED = ("Sokoban-v0",)  # its levels, when it is made
MOST_CODES = 64  # whole numbers of a larger range are amounts, not codes of what is there
# Of which no specification says how many there are
UNBOUNDED_CODES = {"Game2048-v1": {"board": 18}}
# Of a part of observations, and the function that makes it of jumanji's
Encoding = tuple[Space, Callable]


def ids() -> list[str]:
    return list(import_package("jumanji.registration")._REGISTRY)


class SuiteEnv(Env):
    """One of jumanji's. All agents act as one, for the sum of their rewards."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        jumanji = import_package("jumanji")
        where = (
            " (jumanji downloads its levels from huggingface.co)" if env_id in DOWNLOADED else ""
        )
        with quiet(), readable_errors(f"environment {name} cannot be made{where}"):
            inner = jumanji.make(env_id)
            limits = (
                {"time_limit": int(inner.time_limit)} if getattr(inner, "time_limit", None) else {}
            )
            params = limits | changed_params(name, settable(type(inner)) | limits, env_params)
            limit = params.get("time_limit", 0)
            if limit:
                params["time_limit"] += 1  # where episodes never come to
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
        (state, step), time = self.inner.step(state[0], self._chosen(action)), state[1] + 1
        outcome = jnp.sum(step.reward), step.last(), 0 < self.declared_steps <= time
        return Step(self._observed(step.observation), (state, time), *outcome)

    def frame(self, state: Any) -> np.ndarray:
        env = self.inner.unwrapped
        viewer = next(
            getattr(env, name)
            for name in ("_viewer", "_env_viewer", "viewer")
            if hasattr(env, name)
        )
        viewer.figure_size = (4, 4)
        viewer._display = viewer._display_rgb_array
        shown = state[0].grid if type(viewer).__name__ == "ConnectorViewer" else state[0]
        return np.array(viewer.render(shown))[..., :3]  # its canvas is drawn on again


def _encoding(spec: Any, codes: dict[str, int], nvec: tuple[int, ...] = ()) -> Encoding:
    """Observations as dictionaries of what networks can read: codes as such, amounts between 0 and
    1.

    `nvec` are the choices that a mask is for.
    """
    specs = getattr(spec, "_specs", {})
    if not specs:
        return _encoding_of_leaf(spec)
    parts = {name: _encoding(part, {}) for name, part in specs.items()}
    parts |= {name: _codes(specs[name].shape, count, least=0) for name, count in codes.items()}
    if MASK in specs:
        parts[MASK] = box((sum(nvec),), 0.0, 1.0), partial(_mask, nvec[0])

    def observed(obs):
        return {name: encode(getattr(obs, name)) for name, (_, encode) in parts.items()}

    return {name: space for name, (space, _) in parts.items()}, observed


def _mask(choices: int, mask: jax.Array) -> jax.Array:
    """A mask, flat. Where it leaves none of so many choices, as in Snake when it is trapped, all
    are possible.
    """
    mask = mask.reshape(-1, choices)
    return jnp.ravel(mask | ~jnp.any(mask, axis=-1, keepdims=True))


def _encoding_of_leaf(spec: Any) -> Encoding:
    """Arrays of whole numbers in a small range, and choices, as codes; amounts that have bounds
    between 0 and 1.
    """
    low = float(np.min(getattr(spec, "minimum", -np.inf)))
    high = float(np.max(getattr(spec, "maximum", np.inf)))
    if not np.issubdtype(spec.dtype, np.integer) or not np.isfinite(high - low):
        return box(spec.shape, low, high), lambda x: jnp.asarray(x, jnp.float32)
    if 1 < high - low < MOST_CODES and (spec.shape or hasattr(spec, "num_values")):
        return _codes(spec.shape, int(high - low) + 1, least=int(low))
    return box(
        spec.shape, 0.0, 1.0
    ), lambda x: (jnp.asarray(x, jnp.float32) - low) / max(high - low, 1.0)


def _codes(shape: tuple[int, ...], count: int, least: int) -> Encoding:
    """One of so many codes, from `least` on, or an array of such."""
    space = MultiDiscrete((count,) * int(np.prod(shape))) if shape else Discrete(count)
    return space, lambda x: jnp.clip(x.reshape(space.shape).astype(jnp.int32) - least, 0, count - 1)


def _actions(spec: Any, mask: Any) -> Encoding:
    """The action space, and the function that makes jumanji's actions of ours.

    Several choices with a mask of all of them together become one choice.
    """
    if not np.issubdtype(spec.dtype, np.integer):
        bounds = (
            np.broadcast_to(bound, spec.shape).astype(np.float32)
            for bound in (spec.minimum, spec.maximum)
        )
        return Box(*bounds, tuple(spec.shape)), lambda action: action.astype(spec.dtype)
    nvec = tuple(
        int(highest) + 1 for highest in np.ravel(np.broadcast_to(spec.maximum, spec.shape))
    )
    if not spec.shape:
        return Discrete(nvec[0]), lambda action: action
    if mask is not None and tuple(mask.shape) == nvec:
        together = Discrete(int(np.prod(nvec)))
        return together, lambda action: jnp.stack(jnp.unravel_index(action, nvec)).astype(
            spec.dtype
        )
    # Bounds are sometimes one too many
    nvec = nvec if mask is None else (mask.shape[1],) * mask.shape[0]
    return MultiDiscrete(nvec), lambda action: action.reshape(spec.shape).astype(spec.dtype)
