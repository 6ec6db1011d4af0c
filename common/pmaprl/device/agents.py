"""Learners that act, with or without memory: inputs of policies, players, and the acting part."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from pmaprl.envs.spaces import batch_shape

ArrayT = TypeVar("ArrayT", Array, np.ndarray)  # on the device or on the host


class PolicyInput(NamedTuple, Generic[ArrayT]):
    """Input of a policy with memory for N environments, before they step.

    Attributes:
        obs: raw observations [N, ...].
        first: bool [N], True where an episode begins. Everything before that does not count.
        reward: raw rewards [N] of the step before.
    """

    obs: Any
    first: ArrayT
    reward: ArrayT

    @classmethod
    def at_start(cls, obs: Any) -> "PolicyInput[Array]":
        """Input where episodes begin, from their first observations [N, ...]."""
        count = batch_shape(obs)
        return PolicyInput(obs=obs, first=jnp.ones(count, bool), reward=jnp.zeros(count))


def with_memory(algorithm: Any) -> Any:
    """Give an algorithm without memory the functions of a recurrent one; its memory is ().

    Use only `act` of an `OffPolicy` after this.
    """
    if algorithm.initial_memory is not None:
        return algorithm

    def explore(learner, seen, memory, noise):
        return *algorithm.explore(learner, seen.obs, noise), memory

    def act(learner, seen, memory, key=None):
        return algorithm.act(learner, seen.obs, key), memory

    return algorithm._replace(
        explore=explore,
        act=act,
        initial_memory=lambda count: (),
    )


class Player(NamedTuple):
    """A player of episodes in N environments.

    Attributes:
        initial_memory: `initial_memory(count)` returns the memory [N, ...] where episodes begin.
        act: `act(seen, memory, keys)` returns actions [N, ...] and the memory after the step, for
            a `PolicyInput` and keys [N] of this step.
    """

    initial_memory: Callable
    act: Callable

    @classmethod
    def greedy(cls, algorithm: Any, learner: Any) -> "Player":
        """Play the best actions that a `learner` of this algorithm knows."""
        algorithm = with_memory(algorithm)

        def act(
            seen: PolicyInput,
            memory: Any,
            keys: Array,
        ) -> tuple[Any, Any]:
            return algorithm.act(learner, seen, memory)

        return cls(initial_memory=algorithm.initial_memory, act=act)

    @classmethod
    def of(cls, policy: Any) -> "Player":
        """Make a player of a policy, which plays greedily, or of a function.

        The function takes observations and returns actions. A player stays as it is.
        """
        if isinstance(policy, Player):
            return policy
        if hasattr(policy, "player"):
            return policy.player()

        def act(
            seen: PolicyInput,
            memory: Any,
            keys: Array,
        ) -> tuple[Any, Any]:
            return policy(seen.obs), memory

        return cls(initial_memory=lambda count: (), act=act)


# Fields that acting reads beside `params`, if a learner has them
ACTING = "obs_stats", "epsilon"


def acting_part(learner: Any) -> tuple[Any, ...]:
    """Part of a learner that acting needs.

    Returns:
        The parameters (those called `actor`, if there are any), then the fields ACTING.
    """
    params = getattr(learner.params, "actor", learner.params)
    others = [getattr(learner, name) for name in ACTING if hasattr(learner, name)]
    return params, *others


def with_acting_part(learner: Any, part: tuple[Any, ...]) -> Any:
    """Replace the part of a `learner` that acting needs by that of another one."""
    params, *others = part
    if hasattr(learner.params, "actor"):
        params = learner.params._replace(actor=params)
    names = [name for name in ACTING if hasattr(learner, name)]
    return learner.replace(params=params, **dict(zip(names, others, strict=True)))
