"""From an algorithm, written for one agent on one device, to programs for several agents on all devices."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from common.cli.members import Members
from common.device.algorithm import OffPolicy, OnPolicy
from common.device.episodes import recent_metrics
from common.device.evaluation import Episodes, run_episodes
from common.device.memory import Agent
from common.device.off_policy import off_policy
from common.device.on_policy import on_policy
from common.device.seeds import over_seeds
from common.device.sharding import AXIS, GROUPS, TrainState, mesh_of_members
from common.device.update_loop import repeat
from common.envs.environment import Env


class Programs(NamedTuple):
    """What a run calls. All states are those of S agents, [S, ...], and under `pmap` of D devices, [D, S, ...]; see
    `common/device/sharding.py`.
    """

    init: Callable  # seeds [S], or Members [S] -> TrainState
    update: Callable  # TrainState, number of updates -> TrainState, metrics, first non-finite update of each metric
    evaluate: Callable  # TrainState, seed of the episodes -> greedy Episodes [S, E], each device its share


def for_seeds(
    algorithm: OnPolicy | OffPolicy, args: Any, env: Env, num_agents: int, evolve: Callable | None = None
) -> Programs:
    """The algorithm for several agents, on one device of `AXIS`.

    `evolve` takes the number of updates before a call and the state [S, ...] after it, and returns a state and metrics:
    what agents do to each other.
    """
    driver = (off_policy if isinstance(algorithm, OffPolicy) else on_policy)(algorithm, args, env)

    def update_one(state: TrainState, num_updates: jax.Array):
        state, metrics, broken = repeat(driver.update, state, num_updates)
        return state, metrics | recent_metrics(state.run.recent) | driver.gauges(state), broken

    def update(state: TrainState, num_updates: jax.Array):
        before = state.run.updates[0]
        state, metrics, broken = over_seeds(lambda state: update_one(state, num_updates), num_agents)(state)
        if evolve:
            state, more = evolve(before, state)
            metrics |= more
        return state, metrics, broken

    def evaluate_one(learner: Any, seed: jax.Array) -> Episodes:
        share = math.ceil(args.eval_episodes / jax.lax.axis_size(AXIS))
        episodes = run_episodes(env, Agent.of(algorithm).player(learner), share, seed)
        # A policy that is not finite may act all the same, and by chance earn something
        sound = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(learner.params)]).all()
        return episodes._replace(ret=jnp.where(sound, episodes.ret, jnp.nan))

    def evaluate(state: TrainState, seed: jax.Array) -> Episodes:
        return over_seeds(lambda learner: evaluate_one(learner, seed), num_agents)(state.learner)

    def init(members: Members | jax.Array) -> TrainState:
        members = members if isinstance(members, Members) else Members(members, {})
        return jax.lax.map(lambda x: driver.init(*x), members)  # vmapped orthogonal matrices can deadlock

    return Programs(init, update, evaluate)


def over_devices(programs: Programs, devices: list[jax.Device], sharding: str = "pmap") -> Programs:
    """The programs on all `devices`, which share the environments of each agent, or with `sharding` "members" the
    agents.

    What `update` returns beside the state is the same on every device that shares an agent, and comes back once; its
    state is donated.
    """
    if sharding == "members":
        return _over_members(programs, devices)
    pmap = partial(jax.pmap, axis_name=AXIS, devices=devices)
    return Programs(
        init=pmap(programs.init),
        update=pmap(programs.update, in_axes=(0, None), out_axes=(0, None, None), donate_argnums=0),
        evaluate=pmap(programs.evaluate, in_axes=(0, None)),
    )


def _over_members(programs: Programs, devices: list[jax.Device]) -> Programs:
    """The programs for each device's share of the agents: all arrays [1, S, ...] are split along S."""
    share = P(None, GROUPS)
    split = partial(jax.shard_map, mesh=mesh_of_members(devices), check_vma=False)
    where = jax.NamedSharding(mesh_of_members(devices), share)  # also of what a program does not use

    def init(members: Any) -> TrainState:
        return _with_axis(programs.init(_without_axis(members)))

    def update(state: TrainState, num_updates: jax.Array):
        state, *reports = programs.update(_without_axis(state), num_updates)
        return _with_axis(state), *reports

    def evaluate(state: TrainState, seed: jax.Array) -> Episodes:
        return _with_axis(programs.evaluate(_without_axis(state), seed))

    return Programs(
        init=jax.jit(split(init, in_specs=share, out_specs=share)),
        update=jax.jit(
            split(update, in_specs=(share, P()), out_specs=(share, P(GROUPS), P(GROUPS))),
            in_shardings=(where, None),
            donate_argnums=0,
        ),
        evaluate=jax.jit(split(evaluate, in_specs=(share, P()), out_specs=share), in_shardings=(where, None)),
    )


def _without_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _with_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
