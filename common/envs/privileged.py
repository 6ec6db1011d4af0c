"""What critics see and policies do not: the entry `privileged_state` of observations that are dictionaries."""

from typing import Any

import jax.numpy as jnp

from common.envs.spaces import Dict, Space, batch_shape
from common.envs.spec import EnvSpec

PRIVILEGED = "privileged_state"


def has_privileged(space: Space) -> bool:
    return isinstance(space, Dict) and PRIVILEGED in space.parts


def without_privileged(space: Space) -> Space:
    """The part of an observation space that policies see."""
    if not has_privileged(space):
        return space
    return Dict(_without(space.parts))


def spec_for_policies(env: EnvSpec) -> EnvSpec:
    """The same with the part of observations that policies see."""
    if not has_privileged(env.observation_space):
        return env
    return env._replace(observation_space=without_privileged(env.observation_space), obs_dtype=_without(env.obs_dtype))


def completed(obs: Any, env: EnvSpec) -> Any:
    """Observations [N, ...] of `env` in which zeros stand for the privileged part, if that is missing.

    So a policy acts through functions that also know its critic.
    """
    if not has_privileged(env.observation_space) or PRIVILEGED in obs:
        return obs
    like = env.obs_like[PRIVILEGED]
    return obs | {PRIVILEGED: jnp.zeros((*batch_shape(obs), *like.shape), like.dtype)}


def _without(parts: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if name != PRIVILEGED}
