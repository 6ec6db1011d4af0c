"""From an algorithm, written for one agent on one device, to programs for several agents on all devices."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import struct

from common.device.episodes import recent_metrics
from common.device.evaluation import Episodes, run_episodes
from common.device.memory import Agent
from common.device.seeds import over_seeds
from common.device.sharding import AXIS
from common.device.update_loop import repeat
from common.envs.environment import Env


class TrainState(struct.PyTreeNode):
    """Everything that training changes."""

    learner: Any  # identical on every device; where environments step there too, it has the RecentEpisodes `recent`
    shard: Any  # this device's share of the environments, and of what belongs to them; () where they are elsewhere


class Algorithm(NamedTuple):
    """An algorithm as pure functions of one agent. They know of other devices by the axis name `AXIS` only."""

    init: Callable  # seed [] -> TrainState
    update: Callable  # TrainState -> TrainState, Tally, EpisodeTotals
    new_learner: Callable  # keys of the parameters and of everything random -> Learner
    act: Callable  # Learner, raw observations [B, ...], key or None for the best -> actions [B, ...]
    gauges: Callable = lambda state: {}  # TrainState -> metrics of how things stand at the end of an interval
    # With memory `act` is of Learner, Seen, memory and key -> actions, memory; this is of a number B -> memory at first
    initial_memory: Callable | None = None
    wants_reward: bool = False  # whether `act` then depends on the last reward


class Programs(NamedTuple):
    """What a run calls. All states are those of S agents, [S, ...], and under `pmap` of D devices, [D, S, ...]."""

    init: Callable  # seeds [S] -> TrainState
    update: Callable  # TrainState, number of updates -> TrainState, metrics, first non-finite update of each metric
    evaluate: Callable  # TrainState, seed of the episodes -> greedy Episodes [S, E], each device its share


def for_seeds(algorithm: Algorithm, env: Env, num_seeds: int, eval_episodes: int) -> Programs:
    """The algorithm for several agents, on one device of `AXIS`."""

    def update_one(state: TrainState, num_updates: jax.Array):
        state, metrics, broken = repeat(algorithm.update, state, num_updates)
        return state, metrics | recent_metrics(state.learner.recent) | algorithm.gauges(state), broken

    def update(state: TrainState, num_updates: jax.Array):
        return over_seeds(lambda state: update_one(state, num_updates), num_seeds)(state)

    def evaluate_one(learner: Any, seed: jax.Array) -> Episodes:
        share = math.ceil(eval_episodes / jax.lax.axis_size(AXIS))
        return run_episodes(env, Agent.of(algorithm).player(learner), share, seed)

    def evaluate(state: TrainState, seed: jax.Array) -> Episodes:
        return over_seeds(lambda learner: evaluate_one(learner, seed), num_seeds)(state.learner)

    init = partial(jax.lax.map, algorithm.init)  # not vmapped: batched orthogonal matrices can deadlock
    return Programs(init, update, evaluate)


def pmapped(programs: Programs, devices: list[jax.Device]) -> Programs:
    """The programs on all `devices`. What `update` returns beside the state is the same on every device and comes back
    once; its state is donated.
    """
    over_devices = partial(jax.pmap, axis_name=AXIS, devices=devices)
    return Programs(
        init=over_devices(programs.init),
        update=over_devices(programs.update, in_axes=(0, None), out_axes=(0, None, None), donate_argnums=0),
        evaluate=over_devices(programs.evaluate, in_axes=(0, None)),
    )
