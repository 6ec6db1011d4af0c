"""Action masks and privileged state in observations, and the units in which policies act.

`action_mask` marks the legal actions. Only critics see `privileged_state`. Policies act in -1 .. 1
within a bounded Box.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import FailedEnvError, UsageError
from pmaprl.envs import spaces
from pmaprl.envs.spaces import (
    MASK,
    PRIVILEGED,
    Box,
    EnvSpec,
    HasSpaces,
    Space,
    batch_shape,
    choices_of,
    excess,
    has_privileged,
    leaves,
    without_privileged,
)


def policy_spec(env: EnvSpec) -> EnvSpec:
    """The spec of an environment with only the part of observations that policies see."""
    return env._replace(
        observation_space=without_privileged(env.observation_space),
        obs_dtype=without_privileged(env.obs_dtype),
    )


def completed(obs: Any, env: EnvSpec) -> Any:
    """Add zeros to observations [N, ...] for a missing privileged part.

    A policy acts without its critic, so the values do not matter.
    """
    if not has_privileged(env.observation_space) or PRIVILEGED in obs:
        return obs
    zeros = env.example_obs(*batch_shape(obs))
    return obs | {PRIVILEGED: zeros[PRIVILEGED]}


NO_LEGAL_ACTION = "has a state without any legal action: look at its action_mask"


def is_mask(name: str) -> bool:
    """True if the leaf called `name` belongs to the mask, which networks do not see."""
    return name.split("/")[0] == MASK


def legal_actions(obs: Any, numpy: Any = jnp) -> jax.Array | None:
    """Mark the legal choices of an action by the mask of observations.

    A mask may have parts, one for each component of a MultiDiscrete action, or for each part of an
    action with choices.

    Returns:
        Bools [..., sum(nvec)]; None if observations have no mask.
    """
    if not isinstance(obs, Mapping) or MASK not in obs:
        return None
    parts = [part.astype(bool) for part in jax.tree.leaves(obs[MASK])]
    return numpy.concatenate(parts, axis=-1)


def with_a_choice(legal: jax.Array, nvec: Sequence[int]) -> jax.Array:
    """Mark all choices of a component as legal if none of them is.

    Many environments clear the mask when an episode ends. No action is taken there, but at a time
    limit the value of that observation is learned from, and an empty mask says nothing. Where an
    action is taken, `check_legal` and `legal_metrics` end the run.

    Args:
        legal: [..., sum(nvec)] marks the legal choices.
        nvec: numbers of choices of the components.
    """
    components = []
    for part in jnp.split(legal, np.cumsum(nvec)[:-1], axis=-1):
        has_none = ~jnp.any(part, axis=-1, keepdims=True)
        components.append(part | has_none)
    return jnp.concatenate(components, axis=-1)


def largest_entropy(legal: jax.Array) -> jax.Array:
    """Largest entropy [...] of a choice, in nats, when the choices `legal` [..., n] are legal."""
    return jnp.log(jnp.maximum(jnp.sum(legal, axis=-1), 1))


def check_parts(env: HasSpaces) -> None:
    """Raise UsageError if spaces have an empty part or too many, or a mask that fits no action."""
    for kind, space in (("observation", env.observation_space), ("action", env.action_space)):
        too_large = excess(space, acting=kind == "action")
        if too_large:
            raise UsageError(f"environment {env.name}: its {kind} space has {too_large}")
        for name, leaf in leaves(space):
            if 0 in leaf.shape:
                part = f" {name}" if name else ""
                raise UsageError(
                    f"environment {env.name}: its {kind}{part} of shape {leaf.shape} has no numbers"
                )
    _check_mask(env)


def _check_mask(env: HasSpaces) -> None:
    space = env.observation_space
    choices = choices_of(env.action_space)
    for name, _ in leaves(space):
        if MASK in name.split("/")[1:] and not is_mask(name):
            raise UsageError(
                f"environment {env.name} has a mask at {name}: it must be a part of the "
                "whole observation"
            )
    if not isinstance(space, Mapping) or MASK not in space:
        return
    if not without_privileged(space).keys() - {MASK}:
        raise UsageError(
            f"environment {env.name} observes nothing but {', '.join(space)}: policies need more"
        )
    mask = space[MASK]
    actions = env.action_space
    actions_have_names = isinstance(actions, Mapping) and len(choices) > 1
    if actions_have_names or isinstance(mask, Mapping):
        _check_names_of_masks(env, mask)
    shapes = [leaf.shape for _, leaf in leaves(mask)]
    expected = [(count,) for count in choices]
    if len(shapes) == 1:
        expected = [(sum(choices),)]
    if not choices or shapes != expected:
        raise UsageError(
            f"environment {env.name} has a mask {mask} for {sum(choices)} choices of {actions}"
        )


def _check_names_of_masks(env: HasSpaces, mask: Space) -> None:
    """Raise UsageError unless each part of a mask has the name of the choices that it is for."""
    wanted = []
    for name, leaf in leaves(env.action_space):
        count = len(choices_of(leaf))
        wanted += [name] if count == 1 else [f"{name}/{index}" for index in range(count)]
    mask_names = [name for name, _ in leaves(mask)]
    if mask_names != wanted:
        problem = f"environment {env.name} has masks of {', '.join(map(repr, mask_names))}"
        raise UsageError(
            f"{problem} for the choices {', '.join(map(repr, wanted))}: name them alike"
        )


def legal_metrics(obs: Any, space: Space, axis_name: str) -> dict[str, jax.Array]:
    """Count the fewest legal choices of any action component, over all devices.

    Args:
        obs: observations [..., *obs] at which actions were taken.
        space: the action space.
        axis_name: the axis of devices.

    Returns:
        A metric []; NaN if a component had no legal choice. The run ends with a NaN, see
        `pmaprl.runs.recorder`. Nothing if observations have no mask.
    """
    legal = legal_actions(obs)
    if legal is None:
        return {}
    fewest = jax.lax.pmin(jnp.min(_fewest(legal, space, jnp)), axis_name)
    return {"policy/legal_actions_min": jnp.where(fewest > 0, fewest, jnp.nan)}


def check_legal(obs: Any, acting: np.ndarray, spec: EnvSpec) -> None:
    """Raise FailedEnvError if an environment that is `acting` [N] has no legal action.

    Args:
        obs: observations [N, ...], host arrays.
        acting: [N] marks the environments in which the next action counts.
        spec: the spec of the environments.
    """
    if np.any(acting & nothing_legal(obs, spec.action_space, np)):
        raise FailedEnvError(f"{spec.name} {NO_LEGAL_ACTION}")


def nothing_legal(obs: Any, space: Space, numpy: Any = jnp) -> jax.Array | np.ndarray | bool:
    """Mark observations whose mask leaves some component of an action without a legal choice.

    Args:
        obs: observations [..., *obs].
        space: the action space.
        numpy: NumPy, or JAX's version of it.

    Returns:
        Bools [...]; False if observations have no mask.
    """
    legal = legal_actions(obs, numpy)
    if legal is None:
        return False
    return _fewest(legal, space, numpy) == 0


def _fewest(legal: Any, space: Space, numpy: Any) -> Any:
    """The fewest legal choices of any component of an action, [...]."""
    components = numpy.split(legal, np.cumsum(choices_of(space))[:-1], axis=-1)
    return numpy.stack([part.sum(axis=-1) for part in components]).min(axis=0)


def action_scale(space: Box) -> tuple[np.ndarray, np.ndarray]:
    """Factor and offset [A] from -1 .. 1 to the bounds of a Box; 1 and 0 for unbounded numbers."""
    low = np.ravel(space.low)
    high = np.ravel(space.high)
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = np.isfinite(high - low) & (low < high)
        scale = (high - low) / 2
        offset = high / 2 + low / 2
    scale = np.where(bounded, scale, 1)
    offset = np.where(bounded, offset, 0)
    return scale.astype(np.float32), offset.astype(np.float32)


def to_units(
    action: jax.Array, scale: np.ndarray | Sequence[float], offset: np.ndarray | Sequence[float]
) -> jax.Array:
    """Rescale Box actions [..., A] from environment units to -1 .. 1, by `action_scale`."""
    return (action - jnp.asarray(offset)) / jnp.asarray(scale)


def to_env(action: jax.Array, space: Space) -> jax.Array:
    """Rescale actions [..., A] of a policy to environment units; choices stay as they are."""
    if not isinstance(space, Box):
        return action
    scale, offset = action_scale(space)
    return action * scale + offset


def uniform_action(key: jax.Array, space: Space, legal: jax.Array | None = None) -> jax.Array:
    """A uniformly random action in a policy's units, among the `legal` [n] ones if known."""
    if isinstance(space, Box):
        space = spaces.box((math.prod(space.shape),), -1.0, 1.0)
    return spaces.sample(key, space, legal)


def empty_action(space: Space) -> jax.Array:
    """An action of zeros in a policy's units."""
    return jnp.zeros_like(uniform_action(jax.random.key(0), space))
