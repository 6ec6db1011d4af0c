"""What a policy remembers from one step of its environments to the next, and how those without memory fit in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from common.envs.spaces import batch_shape


class Seen(NamedTuple):
    """What a policy gets to see of N environments before they step, [N, ...]."""

    obs: Any  # raw
    first: jax.Array  # bool: an episode begins here, and what was before does not count
    reward: jax.Array  # of the step before, raw


class Agent(NamedTuple):
    """How an algorithm acts. One without memory has () in its place."""

    initial_memory: Callable  # number of environments N -> memory [N, ...]
    act: Callable  # learner, Seen, memory, key or None for the best -> actions [N, ...], memory
    wants_reward: bool = False  # whether actions depend on the last reward

    @classmethod
    def of(cls, algorithm: Any) -> "Agent":
        """From an algorithm, whose `act` takes observations alone where it has no `initial_memory`."""
        if algorithm.initial_memory is not None:
            return cls(algorithm.initial_memory, algorithm.act, algorithm.wants_reward)

        def act(learner, seen, memory, key=None):
            return algorithm.act(learner, seen.obs, key), memory

        return cls(lambda count: (), act)

    def player(self, learner: Any) -> "Player":
        """The best actions of `learner`."""
        return Player(self.initial_memory, lambda seen, memory, keys: self.act(learner, seen, memory))


class Player(NamedTuple):
    """Who plays in N environments."""

    initial_memory: Callable  # N -> memory [N, ...]
    act: Callable  # Seen, memory, fresh keys [N] -> actions [N, ...], memory

    @classmethod
    def of(cls, policy: Any) -> "Player":
        """A player stays as it is, a policy plays greedily, another function takes observations and returns actions."""
        if isinstance(policy, Player):
            return policy
        if hasattr(policy, "player"):
            return policy.player()
        return cls(lambda count: (), lambda seen, memory, keys: (policy(seen.obs), memory))


def at_start(obs: Any) -> Seen:
    """The first observations [N, ...] of episodes."""
    count = batch_shape(obs)
    return Seen(obs, jnp.ones(count, bool), jnp.zeros(count))
