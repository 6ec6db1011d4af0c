"""From an algorithm, written for one agent on one device, to programs for several agents on all devices."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from common.cli.members import Members
from common.device.episodes import recent_metrics
from common.device.evaluation import Episodes, run_episodes
from common.device.memory import Agent
from common.device.seeds import over_seeds
from common.device.sharding import AXIS, layout_of
from common.device.update_loop import repeat
from common.envs.environment import Env


class TrainState(struct.PyTreeNode):
    """Everything that training changes."""

    learner: Any  # identical on devices that share agents; where environments step, it has the RecentEpisodes `recent`
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
    """What a run calls. All states are those of S agents, [S, ...], and under `pmap` of D devices, [D, S, ...]; see
    `common/device/sharding.py`.
    """

    init: Callable  # seeds [S], or Members [S] -> TrainState
    update: Callable  # TrainState, number of updates -> TrainState, metrics, first non-finite update of each metric
    evaluate: Callable  # TrainState, seed of the episodes -> greedy Episodes [S, E], each device its share


def for_seeds(
    algorithm: Algorithm, env: Env, num_agents: int, eval_episodes: int, evolve: Callable | None = None
) -> Programs:
    """The algorithm for several agents, on one device of `AXIS`.

    `evolve` takes the number of updates before a call and the state [S, ...] after it, and returns a state and metrics:
    what agents do to each other.
    """

    def update_one(state: TrainState, num_updates: jax.Array):
        state, metrics, broken = repeat(algorithm.update, state, num_updates)
        return state, metrics | recent_metrics(state.learner.recent) | algorithm.gauges(state), broken

    def update(state: TrainState, num_updates: jax.Array):
        before = state.learner.updates[0]
        state, metrics, broken = over_seeds(lambda state: update_one(state, num_updates), num_agents)(state)
        if evolve:
            state, more = evolve(before, state)
            metrics |= more
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


def shard_mapped(
    programs: Programs, devices: list[jax.Device], check: bool = True, sharding: str = "shard_map"
) -> Programs:
    """Like `pmapped`, with global arrays, of the learner one for all devices, [1, S, ...].

    With `check` JAX proves that the learner and what `update` returns beside the state are the same on every device.
    With `sharding` "members" nothing is: the programs are those for each device's share of the agents.
    """
    layout = layout_of(devices, sharding)
    over_devices = partial(jax.shard_map, mesh=layout.mesh, check_vma=check)
    parts = TrainState(layout.learner, layout.shard)
    where = jax.tree.map(partial(NamedSharding, layout.mesh), parts)  # also of what a program does not use

    def init(members: Any) -> TrainState:
        return _with_axis(programs.init(_without_axis(members)))

    def update(state: TrainState, num_updates: jax.Array):
        state, *reports = programs.update(_without_axis(state), num_updates)
        return _with_axis(state), *reports

    def evaluate(state: TrainState, seed: jax.Array) -> Episodes:
        return _with_axis(programs.evaluate(_without_axis(state), seed))

    return Programs(
        init=jax.jit(over_devices(init, in_specs=layout.learner, out_specs=parts)),
        update=jax.jit(
            over_devices(update, in_specs=(parts, P()), out_specs=(parts, layout.reports, layout.reports)),
            in_shardings=(where, None),
            donate_argnums=0,
        ),
        evaluate=jax.jit(
            over_devices(evaluate, in_specs=(parts, P()), out_specs=layout.shard), in_shardings=(where, None)
        ),
    )


def over_devices(
    programs: Programs, devices: list[jax.Device], sharding: str, members: Any
) -> tuple[Programs, dict[str, str]]:
    """The programs on all `devices`, by `pmap` or by `shard_map`, there with JAX's checks where they pass; and what the
    header says of those.

    Loops of environments from other packages may not pass: they begin with constants, which become what differs between
    devices. Where devices have agents of their own everything does, and there is nothing to check.
    """
    if sharding == "pmap":
        return pmapped(programs, devices), {}
    if sharding == "members":
        each = jax.tree.leaves(members)[0].shape[1] // len(devices)
        own = f"each device trains {each:,} agent{'s' * (each > 1)} of its own"
        about = {"sharding": own if len(devices) > 1 else f"one device trains all {each:,} agents"}
        return shard_mapped(programs, devices, check=False, sharding=sharding), about
    checked = shard_mapped(programs, devices)
    try:
        state = jax.eval_shape(checked.init, members)
        for program in (checked.evaluate, checked.update):
            jax.eval_shape(program, state, np.int32(0))
    except TypeError:
        off = {"sharding": "shard_map without JAX's checks, which a loop of this environment does not pass"}
        return shard_mapped(programs, devices, check=False), off
    return checked, {"sharding": "shard_map, with JAX's checks"}


def _without_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _with_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
