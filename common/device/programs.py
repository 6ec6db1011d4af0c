"""From an algorithm, written for one agent on one device, to programs for several agents on all devices."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from common.cli.members import Members
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

    init: Callable  # seed [], flags of its own {name: []} -> TrainState
    update: Callable  # TrainState -> TrainState, Tally, EpisodeTotals
    new_learner: Callable  # keys of the parameters and of everything random, flags of its own -> Learner
    act: Callable  # Learner, raw observations [B, ...], key or None for the best -> actions [B, ...]
    gauges: Callable = lambda state: {}  # TrainState -> metrics of how things stand at the end of an interval
    # With memory `act` is of Learner, Seen, memory and key -> actions, memory; this is of a number B -> memory at first
    initial_memory: Callable | None = None
    wants_reward: bool = False  # whether `act` then depends on the last reward


class Programs(NamedTuple):
    """What a run calls. All states are those of S agents, [S, ...], and under `pmap` of D devices, [D, S, ...]."""

    init: Callable  # seeds [S], or Members [S] -> TrainState
    update: Callable  # TrainState, number of updates -> TrainState, metrics, first non-finite update of each metric
    evaluate: Callable  # TrainState, seed of the episodes -> greedy Episodes [S, E], each device its share


def for_seeds(
    algorithm: Algorithm, env: Env, num_agents: int, eval_episodes: int, evolve: Callable | None = None
) -> Programs:
    """The algorithm for several agents, on one device of `AXIS`.

    `evolve` takes the number of updates before a call and the learners [S, ...] after it, and returns learners and
    metrics: what agents do to each other.
    """

    def update_one(state: TrainState, num_updates: jax.Array):
        state, metrics, broken = repeat(algorithm.update, state, num_updates)
        return state, metrics | recent_metrics(state.learner.recent) | algorithm.gauges(state), broken

    def update(state: TrainState, num_updates: jax.Array):
        before = state.learner.updates[0]
        state, metrics, broken = over_seeds(lambda state: update_one(state, num_updates), num_agents)(state)
        if evolve:
            learner, more = evolve(before, state.learner)
            state, metrics = state.replace(learner=learner), metrics | more
        return state, metrics, broken

    def evaluate_one(learner: Any, seed: jax.Array) -> Episodes:
        share = math.ceil(eval_episodes / jax.lax.axis_size(AXIS))
        episodes = run_episodes(env, Agent.of(algorithm).player(learner), share, seed)
        # A policy that is not finite may act all the same, and by chance earn something
        sound = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(learner.params)]).all()
        return episodes._replace(ret=jnp.where(sound, episodes.ret, jnp.nan))

    def evaluate(state: TrainState, seed: jax.Array) -> Episodes:
        return over_seeds(lambda learner: evaluate_one(learner, seed), num_agents)(state.learner)

    def init(members: Members | jax.Array) -> TrainState:
        members = members if isinstance(members, Members) else Members(members, {})
        return jax.lax.map(lambda x: algorithm.init(*x), members)  # vmapped orthogonal matrices can deadlock

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
