"""What an algorithm that learns from actors consists of."""

from collections.abc import Callable
from typing import NamedTuple


class ActorAlgorithm(NamedTuple):
    """An algorithm as pure functions of one agent, and what has to be known to feed it.

    The functions know of other devices by the axis name `AXIS` only.

    Its sibling for environments that step on the devices is `common.device.programs.Algorithm`.
    """

    init: Callable  # seed [] -> TrainState
    update: Callable  # TrainState, rollouts -> TrainState, what to publish, Tally
    publish: Callable  # Learner -> what an actor needs to act
    explore: Callable  # published, memory, key data, step, observations [N, ...] -> actions, notes of them, memory
    new_learner: Callable  # keys of the parameters and of everything random -> Learner
    act: Callable  # Learner, raw observations [B, ...], key or None for the best -> actions [B, ...]
    # With memory `act` is of Learner, Seen, memory and key -> actions, memory; this is of a number B -> memory at first
    initial_memory: Callable | None = None
    wants_reward: bool = False  # whether `act` then depends on the last reward
    carried_memory: Callable = lambda count: ()  # number of environments N -> memory of `explore` at first
    gauges: Callable = lambda state: {}  # TrainState -> metrics of how things stand after an update
    block: int = 1  # neighbouring environments of which all minibatches get equal parts
    max_policy_lag: int = 0  # it leaves out steps whose policy is more than this many updates old; 0 learns from all
