"""From an algorithm, written for one agent on one device, to compiled programs for several agents
on all devices.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.run_flags import Members
from pmaprl.device import multihost
from pmaprl.device.agents import Player
from pmaprl.device.collectives import in_one_order
from pmaprl.device.drivers import off_policy, on_policy
from pmaprl.device.evaluation import Episodes, run_episodes
from pmaprl.device.interface import OffPolicy, OnPolicy
from pmaprl.device.loops import repeat
from pmaprl.device.optim import all_finite
from pmaprl.device.outcome import Columns
from pmaprl.device.population import evolve
from pmaprl.device.sharding import AXIS, GROUPS, TrainState, over_seeds, sharding_of_members
from pmaprl.device.statistics import Layout, MetricSums, recent_metrics
from pmaprl.envs.environment import Env


class Programs(NamedTuple):
    """What a run calls. States are of S agents, [S, ...], and under `pmap` of D devices, [D, S,
    ...].
    """

    init: Callable  # seeds [S], or Members [S] -> TrainState
    update: Callable  # TrainState, number of updates -> TrainState, PackedOutcome
    # TrainState, seed of the episodes -> greedy Episodes [S, E], each device its share
    evaluate: Callable


def for_seeds(algorithm: OnPolicy | OffPolicy, args: Any, env: Env) -> Programs:
    """The algorithm for several agents, on one device of `AXIS`."""
    driver = (off_policy if isinstance(algorithm, OffPolicy) else on_policy)(algorithm, args, env)

    def update_one(state: TrainState, num_updates: jax.Array):
        state, columns = repeat_updates(driver.update, state, num_updates)
        return state, columns.with_metrics(
            recent_metrics(state.run.recent) | driver.snapshot_metrics(state)
        )

    def update(state: TrainState, num_updates: jax.Array):
        before = state.run.updates[0]
        state, columns = over_seeds(lambda state: update_one(state, num_updates), state)
        if args.pbt:
            state, more = evolve(args, before, state, algorithm.limits)
            columns = columns.with_metrics(more)
        return state, columns.packed()

    def evaluate_one(learner: Any, seed: jax.Array) -> Episodes:
        share = math.ceil(args.eval_episodes / jax.lax.axis_size(AXIS))
        episodes = run_episodes(env, Player.greedy(algorithm, learner), share, seed)
        # A policy that is not finite, or that has no legal action, may act all the same, and by
        # chance earn something
        is_sound = all_finite(learner.params) & jnp.isfinite(episodes.length)
        return episodes._replace(ret=jnp.where(is_sound, episodes.ret, jnp.nan))

    def evaluate(state: TrainState, seed: jax.Array) -> Episodes:
        return over_seeds(lambda learner: evaluate_one(learner, seed), state.learner)

    def init(members: Members | jax.Array) -> TrainState:
        members = members if isinstance(members, Members) else Members(members, {})
        limits = {
            name: pair for name, pair in algorithm.limits.items() if name in members.member_values
        }
        members = members._replace(
            member_values=members.member_values
            | {n: jnp.clip(members.member_values[n], *x) for n, x in limits.items()}
        )
        # Vmapped orthogonal matrices can deadlock
        return jax.lax.map(lambda x: driver.init(*x), members)

    return Programs(init, update, evaluate)


def repeat_updates(
    update: Callable[[Any], tuple[Any, MetricSums, MetricSums]], state: Any, num_updates: jax.Array
) -> tuple[Any, Columns]:
    """`num_updates` [] times the `update` of a `Driver`: the state, and what an `Outcome` says of
    one agent.
    """

    layouts: list[Layout] = [{}, {}]

    def one(index, state):
        state, *tallies = update(state)
        (tally, layouts[0]), (episodes, layouts[1]) = (x.stacked() for x in tallies)
        broken = {key: jnp.where(jnp.isfinite(x), 0, index + 1) for key, x in tally.value.items()}
        return state, (tally, broken, episodes)

    def add(total, new):
        tally, broken, episodes = total
        broken = jax.tree.map(lambda first, now: jnp.where(first > 0, first, now), broken, new[1])
        return tally + new[0], broken, episodes + new[2]

    state, (tally, broken, episodes) = repeat(one, state, num_updates, add)
    columns = Columns.of("broken", {key: first - 1 for key, first in broken.items()}, layouts[0])
    for total, layout in zip((tally, episodes), layouts, strict=True):
        columns += Columns.of("metrics", total.metrics(), layout) + Columns.of(
            "counts", total.count, layout
        )
    return state, columns


def over_devices(programs: Programs, devices: list[jax.Device], sharding: str = "pmap") -> Programs:
    """The programs on all `devices`, which share each agent's environments, or with `sharding`
    "members" the agents.

    `update` donates its state. What else it returns is the same on all devices of an agent, and
    comes back once.
    """
    axis = GROUPS if sharding == "members" else AXIS
    programs = Programs(*(in_one_order(program, devices, axis) for program in programs))
    if sharding == "members":
        return _over_members(programs, devices)
    pmap = partial(jax.pmap, axis_name=AXIS, devices=devices)
    return Programs(
        init=pmap(programs.init),
        update=pmap(programs.update, in_axes=(0, None), out_axes=(0, None), donate_argnums=0),
        evaluate=pmap(programs.evaluate, in_axes=(0, None)),
    )


def _over_members(programs: Programs, devices: list[jax.Device]) -> Programs:
    """The programs for each device's share of the agents: all arrays [1, S, ...] are split along
    S.
    """
    where = sharding_of_members(devices)  # also of what a program does not use
    mesh = where.mesh
    share = where.spec
    without_axis = partial(jax.tree.map, lambda x: x[0])
    with_axis = partial(jax.tree.map, lambda x: x[None])

    def split(program: Callable, *numbers: Any, out_specs: Any = share, **more: Any) -> Callable:
        program = jax.shard_map(
            program, mesh=mesh, in_specs=(share, *numbers), out_specs=out_specs, check_vma=False
        )
        return jax.jit(program, in_shardings=(where, *[None] * len(numbers)), **more)

    def update(state: TrainState, num_updates: jax.Array):
        state, outcome = programs.update(without_axis(state), num_updates)
        return with_axis(state), outcome

    return Programs(
        init=split(lambda members: with_axis(programs.init(without_axis(members)))),
        update=split(update, jax.P(), out_specs=(share, jax.P(GROUPS)), donate_argnums=0),
        evaluate=split(
            lambda state, seed: with_axis(programs.evaluate(without_axis(state), seed)), jax.P()
        ),
    )


def cache_directory() -> Path:
    """Where compiled programs are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pmaprl"


def set_up_cache() -> None:
    """Keep every program that takes over a tenth of a second, unless the user has configured JAX's
    cache otherwise.
    """
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def compile_together(programs: Programs, members: Any, state: Any, example: Any) -> Programs:
    """`programs`, compiled in parallel from the shapes of their `state` and of what `update` takes
    beside it.

    An `evaluate` that is no program stays as it is. Several processes compile `update` by a call,
    with zeros and a state of its own: only there `pmap` joins arrays.
    """
    if multihost.count() > 1:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype)[()], example)
        jax.block_until_ready(programs.update(programs.init(members), zeros))
        return programs
    # The longest compilation first: tracing the others overlaps with it.
    jobs = {
        "update": ((state, example), 1),
        "init": ((members,), 0),
        "evaluate": ((state, np.int32(0)), 1),
    }
    jobs = {name: job for name, job in jobs.items() if hasattr(getattr(programs, name), "lower")}
    with ThreadPoolExecutor(len(jobs)) as pool:
        compiled = {
            name: pool.submit(getattr(programs, name).lower(*inputs).compile, _options(level))
            for name, (inputs, level) in jobs.items()
        }
        return programs._replace(**{name: program.result() for name, program in compiled.items()})


def _options(level: int) -> dict[str, int]:
    """LLVM's optimization level on a CPU, unless XLA_FLAGS name one: 1 runs as fast, and compiles a
    quarter sooner.
    """
    flag = "xla_backend_optimization_level"
    named = flag in os.environ.get("XLA_FLAGS", "")
    return {flag: level} if jax.default_backend() == "cpu" and not named else {}
