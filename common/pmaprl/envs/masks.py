"""Special entries of observations, action masks and privileged state, and the units in which
policies act.

`action_mask` says which actions are legal, critics alone see `privileged_state`, and a Box is -1 ..
1 for a policy.
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
    Discrete,
    EnvSpec,
    Space,
    batch_shape,
    choices_of,
    leaves,
)


def has_privileged(space: Space) -> bool:
    return isinstance(space, Mapping) and PRIVILEGED in space


def without_privileged(tree: Any) -> Any:
    """The part that policies see of an observation space, or of another tree like it."""
    return (
        {name: part for name, part in tree.items() if name != PRIVILEGED}
        if has_privileged(tree)
        else tree
    )


def policy_spec(env: EnvSpec) -> EnvSpec:
    """The same with the part of observations that policies see."""
    space = without_privileged(env.observation_space)
    dtype = without_privileged(env.obs_dtype)
    return env._replace(observation_space=space, obs_dtype=dtype)


def completed(obs: Any, env: EnvSpec) -> Any:
    """Observations [N, ...] with zeros for a missing privileged part: a policy acts without its
    critic.
    """
    if not has_privileged(env.observation_space) or PRIVILEGED in obs:
        return obs
    return obs | {PRIVILEGED: env.example_obs(*batch_shape(obs))[PRIVILEGED]}


NO_LEGAL_ACTION = "has a state without any legal action: look at its action_mask"


def is_mask(name: str) -> bool:
    """Whether the leaf called `name` is of the mask, and so nothing that networks see."""
    return name.split("/")[0] == MASK


def legal_actions(obs: Any, numpy: Any = jnp) -> jax.Array | None:
    """For each choice of an action whether it is legal, [..., sum(nvec)]; None where observations
    say nothing of it.

    A mask may have parts, one for each component of a MultiDiscrete action, or for each part of an
    action with choices.
    """
    if not isinstance(obs, Mapping) or MASK not in obs:
        return None
    return numpy.concatenate([part.astype(bool) for part in jax.tree.leaves(obs[MASK])], axis=-1)


def with_a_choice(legal: jax.Array, nvec: Sequence[int]) -> jax.Array:
    """`legal` [..., sum(nvec)], with all choices of a component of which none is legal.

    Many environments clear the mask when an episode ends. Nobody acts there, but at a time limit
    the value of that observation is learned from, and a mask that leaves nothing says nothing of
    it. Where somebody acts, `check_legal` and `legal_metrics` end the run.
    """
    parts = jnp.split(legal, np.cumsum(nvec)[:-1], axis=-1)
    return jnp.concatenate(
        [part | ~jnp.any(part, axis=-1, keepdims=True) for part in parts], axis=-1
    )


def largest_entropy(legal: jax.Array) -> jax.Array:
    """In nats, of a choice among those that are `legal` [..., n]."""
    return jnp.log(jnp.maximum(jnp.sum(legal, axis=-1), 1))


def check_parts(env: Any) -> None:
    """Raise UsageError where an Env or EnvSpec has a part without numbers, or a mask that does not
    fit its actions.
    """
    for what, space in (("observation", env.observation_space), ("action", env.action_space)):
        for name, leaf in leaves(space):
            if 0 in leaf.shape:
                part = f" {name}" if name else ""
                raise UsageError(
                    f"environment {env.name}: its {what}{part} of shape {leaf.shape} has no numbers"
                )
    _check_mask(env)


def _check_mask(env: Any) -> None:
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
    shapes = [leaf.shape for _, leaf in leaves(space[MASK])]
    actions = env.action_space
    actions_have_names = isinstance(actions, Mapping) and len(choices) > 1
    if actions_have_names or isinstance(space[MASK], Mapping):
        _check_names_of_masks(env)
    if not choices or shapes != (
        [(sum(choices),)] if len(shapes) == 1 else [(count,) for count in choices]
    ):
        raise UsageError(
            f"environment {env.name} has a mask {space[MASK]} for {sum(choices)} choices of "
            f"{actions}"
        )


def _check_names_of_masks(env: Any) -> None:
    """Raise UsageError unless each part of a mask has the name of the choices that it is for."""
    wanted = []
    for name, leaf in leaves(env.action_space):
        count = len(choices_of(leaf))
        wanted += [name] if count == 1 else [f"{name}/{index}" for index in range(count)]
    given = [name for name, _ in leaves(env.observation_space[MASK])]
    if given != wanted:
        told = f"environment {env.name} has masks of {', '.join(map(repr, given))}"
        raise UsageError(f"{told} for the choices {', '.join(map(repr, wanted))}: name them alike")


def legal_metrics(obs: Any, space: Space, axis_name: str) -> dict[str, jax.Array]:
    """The fewest legal choices of any component of the actions that were taken at `obs`, on all
    devices.

    NaN where there was none: the run ends with that, see `pmaprl.runs.recorder`.
    """
    legal = legal_actions(obs)
    if legal is None:
        return {}
    fewest = jax.lax.pmin(jnp.min(_fewest(legal, space, jnp)), axis_name)
    return {"policy/legal_actions_min": jnp.where(fewest > 0, fewest, jnp.nan)}


def check_legal(obs: Any, acting: np.ndarray, spec: EnvSpec) -> None:
    """Raise FailedEnvError where an environment [N] of these `obs`, host arrays, is `acting` and
    may do nothing.
    """
    if np.any(acting & nothing_legal(obs, spec.action_space, np)):
        raise FailedEnvError(f"{spec.name} {NO_LEGAL_ACTION}")


def nothing_legal(obs: Any, space: Space, numpy: Any = jnp) -> jax.Array | np.ndarray | bool:
    """Mark where the masks of `obs` [..., *obs] leave a component of an action no choice, [...];
    False without any.
    """
    legal = legal_actions(obs, numpy)
    return False if legal is None else _fewest(legal, space, numpy) == 0


def _fewest(legal: Any, space: Space, numpy: Any) -> Any:
    """The fewest legal choices of any component of an action, [...]."""
    components = numpy.split(legal, np.cumsum(choices_of(space))[:-1], axis=-1)
    return numpy.stack([part.sum(axis=-1) for part in components]).min(axis=0)


def action_scale(space: Box) -> tuple[np.ndarray, np.ndarray]:
    """Factor and offset [A] that bring -1 .. 1 to the bounds of a Box; 1 and 0 in dimensions that
    are not bounded.
    """
    low = np.ravel(space.low)
    high = np.ravel(space.high)
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = np.isfinite(high - low) & (low < high)
        scale = (high - low) / 2
        offset = high / 2 + low / 2
    return np.where(bounded, scale, 1).astype(np.float32), np.where(bounded, offset, 0).astype(
        np.float32
    )


def to_units(action: jax.Array, scale: Sequence[float], offset: Sequence[float]) -> jax.Array:
    """Actions [..., A] of a Box, of whose bounds `action_scale` says this, in their units."""
    return (action - jnp.asarray(offset)) / jnp.asarray(scale)


def to_env(action: jax.Array, space: Space) -> jax.Array:
    """Actions [..., A] as the environment takes them."""
    if isinstance(space, Discrete):
        return action
    scale, offset = action_scale(space)
    return action * scale + offset


def uniform_action(key: jax.Array, space: Space, legal: jax.Array | None = None) -> jax.Array:
    """A uniformly random action, as it is kept; one that is `legal` [n] where that is known."""
    kept = (
        space if isinstance(space, Discrete) else spaces.box((math.prod(space.shape),), -1.0, 1.0)
    )
    return spaces.sample(key, kept, legal)


def empty_action(space: Space) -> jax.Array:
    """An action of zeros, which has its shape and type."""
    return jnp.zeros_like(uniform_action(jax.random.key(0), space))
