"""Learners that act: players of episodes, and the part of a learner that acting needs."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from pmaprl.device.contract import AnyAlgorithm, as_recurrent
from pmaprl.device.interface import PolicyInput


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
    def greedy(
        cls,
        algorithm: AnyAlgorithm,
        learner: Any,
        compiled_act: Callable | None = None,
    ) -> "Player":
        """Play the best actions that a `learner` of this algorithm knows.

        Args:
            algorithm: the learner's algorithm.
            learner: the learner of one agent.
            compiled_act: `act` of the recurrent form of the algorithm, compiled. None: it is
                compiled with the program that plays.
        """
        recurrent = as_recurrent(algorithm)
        act_of_learner = compiled_act or recurrent.act

        def act(
            seen: PolicyInput,
            memory: Any,
            keys: Array,
        ) -> tuple[Any, Any]:
            return act_of_learner(learner, seen, memory)

        return cls(initial_memory=recurrent.initial_memory, act=act)

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
