"""Compiled programs for several agents on all devices.

They come from an algorithm, which is written for one agent on one device.
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
from jax import Array

from pmaprl.cli.run_flags import Members
from pmaprl.device.agents import Player
from pmaprl.device.collectives import in_one_order
from pmaprl.device.contract import AnyAlgorithm
from pmaprl.device.drivers import driver_of
from pmaprl.device.episodes import recent_metrics
from pmaprl.device.evaluation import Episodes, run_episodes
from pmaprl.device.loops import repeat
from pmaprl.device.optim import all_finite
from pmaprl.device.outcome import Columns
from pmaprl.device.population import evolve
from pmaprl.device.sharding import AXIS, GROUPS, over_seeds, sharding_of_members
from pmaprl.device.state import TrainState
from pmaprl.device.statistics import Layout, MetricSums
from pmaprl.envs.environment import Env
from pmaprl.machine import multihost
from pmaprl.machine.devices import Device


class Programs(NamedTuple):
    """Programs of a run.

    Their states are of S agents, [S, ...], and under `pmap` of D devices, [D, S, ...].

    Attributes:
        init: `init(members)` returns the `TrainState` for seeds [S] or `Members` [S].
        update: `update(state, updates)` runs `updates` updates, and returns the state and a
            `PackedOutcome`.
        evaluate: `evaluate(state, seed)` plays greedy episodes, and returns `Episodes` [S, J] of
            each device's share. Where a `HostEvaluation` plays instead, it is a function that
            refuses to.
    """

    init: Callable
    update: Callable
    evaluate: Callable


def for_seeds(
    algorithm: AnyAlgorithm,
    args: Any,
    env: Env,
) -> Programs:
    """Programs of several agents on one device of `AXIS`."""
    driver = driver_of(algorithm, args, env)

    def update_one(state: TrainState, num_updates: Array):
        state, columns = repeat_updates(driver.update, state, num_updates)
        metrics = recent_metrics(state.run.recent) | driver.snapshot_metrics(state)
        return state, columns.with_metrics(metrics)

    def update(state: TrainState, num_updates: Array):
        before = state.run.updates[0]
        state, columns = over_seeds(lambda state: update_one(state, num_updates), state)
        if args.pbt:
            state, metrics = evolve(args, before, state, algorithm.limits)
            columns = columns.with_metrics(metrics)
        return state, columns.packed()

    def evaluate_one(learner: Any, seed: Array) -> Episodes:
        share = math.ceil(args.eval_episodes / jax.lax.axis_size(AXIS))
        episodes = run_episodes(env, Player.greedy(algorithm, learner), share, seed)
        # A policy that is not finite, or that has no legal action, may act all the same, and by
        # chance earn something
        is_sound = all_finite(learner.params) & jnp.isfinite(episodes.length)
        return episodes._replace(ret=jnp.where(is_sound, episodes.ret, jnp.nan))

    def evaluate(state: TrainState, seed: Array) -> Episodes:
        return over_seeds(lambda learner: evaluate_one(learner, seed), state.learner)

    def init(members: Members | Array) -> TrainState:
        if not isinstance(members, Members):
            members = Members(members, {})
        values = dict(members.member_values)
        for name, (low, high) in algorithm.limits.items():
            if name in values:
                values[name] = jnp.clip(values[name], low, high)
        members = members._replace(member_values=values)
        # Several orthogonal matrices under `vmap` can deadlock
        return jax.lax.map(lambda member: driver.init(*member), members)

    return Programs(
        init=init,
        update=update,
        evaluate=evaluate,
    )


def repeat_updates(
    update: Callable[[Any], tuple[Any, MetricSums, MetricSums]],
    state: Any,
    num_updates: Array,
) -> tuple[Any, Columns]:
    """Run the `update` of a `Driver` `num_updates` times.

    Args:
        update: the driver's update.
        state: the state of one agent.
        num_updates: [] number of updates.

    Returns:
        The state, and the numbers of an `Outcome`.
    """
    layouts: list[Layout] = [{}, {}]  # set while `one` is traced, the same each time

    def one(index, state):
        state, tally, episodes = update(state)
        tally, layouts[0] = tally.stacked()
        episodes, layouts[1] = episodes.stacked()
        broken = {}
        for key, x in tally.value.items():
            # 0: finite, as sums begin with zeros; else the number of the update, from 1
            broken[key] = jnp.where(jnp.isfinite(x), 0, index + 1)
        return state, (tally, broken, episodes)

    def add(total, new):
        tally, broken, episodes = total
        new_tally, new_broken, new_episodes = new
        first = jax.tree.map(lambda old, x: jnp.where(old > 0, old, x), broken, new_broken)
        return tally + new_tally, first, episodes + new_episodes

    state, (tally, broken, episodes) = repeat(one, state, num_updates, add)
    first = {key: x - 1 for key, x in broken.items()}
    columns = Columns.of("broken", first, layouts[0])
    for total, layout in zip((tally, episodes), layouts, strict=True):
        columns += Columns.of("metrics", total.metrics(), layout)
        columns += Columns.of("counts", total.count, layout)
    return state, columns


def over_devices(
    programs: Programs,
    devices: list[Device],
    sharding: str = "pmap",
) -> Programs:
    """Run programs on all devices.

    `update` donates its state. Its other results are the same on all devices of an agent, and come
    back once.

    Args:
        programs: programs for one device.
        devices: all devices of the run.
        sharding: "pmap": every device has all agents, and its part of each one's environments.
            "members": every device has its part of the agents, with all of their environments.
    """
    axis = GROUPS if sharding == "members" else AXIS
    programs = Programs(
        init=in_one_order(programs.init, devices, axis),
        update=in_one_order(programs.update, devices, axis),
        evaluate=in_one_order(programs.evaluate, devices, axis),
    )
    if sharding == "members":
        return _over_members(programs, devices)
    pmap = partial(jax.pmap, axis_name=AXIS, devices=devices)
    return Programs(
        init=pmap(programs.init),
        update=pmap(programs.update, in_axes=(0, None), out_axes=(0, None), donate_argnums=0),
        evaluate=pmap(programs.evaluate, in_axes=(0, None)),
    )


def _over_members(programs: Programs, devices: list[Device]) -> Programs:
    """Run programs for each device's share of the agents: arrays [1, S, ...] are split along S."""
    sharding = sharding_of_members(devices)
    mesh = sharding.mesh
    share = sharding.spec
    without_axis = partial(jax.tree.map, lambda x: x[0])
    with_axis = partial(jax.tree.map, lambda x: x[None])

    def split(
        program: Callable,
        *numbers: Any,
        out_specs: Any = share,
        **options: Any,
    ) -> Callable:
        in_specs = (share, *numbers)
        # The sharding is named for arguments that the program does not use, too
        in_shardings = (sharding, *[None] * len(numbers))
        program = jax.shard_map(
            program,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        return jax.jit(program, in_shardings=in_shardings, **options)

    def init(members: Members):
        return with_axis(programs.init(without_axis(members)))

    def update(state: TrainState, num_updates: Array):
        state, outcome = programs.update(without_axis(state), num_updates)
        return with_axis(state), outcome

    def evaluate(state: TrainState, seed: Array):
        return with_axis(programs.evaluate(without_axis(state), seed))

    return Programs(
        init=split(init),
        update=split(update, jax.P(), out_specs=(share, jax.P(GROUPS)), donate_argnums=0),
        evaluate=split(evaluate, jax.P()),
    )


def cache_directory() -> Path:
    """Directory that keeps compiled programs between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pmaprl"


def set_up_cache() -> None:
    """Keep every program that takes over a tenth of a second to compile.

    A cache that the user has configured stays as it is.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def compile_together(
    programs: Programs,
    members: Any,
    state: Any,
    example: Any,
) -> Programs:
    """Compile the programs in parallel, from shapes.

    Several processes compile `update` by a call, with zeros and a state of its own, since `pmap`
    joins the arrays of processes only in a call.

    Args:
        programs: the programs. An `evaluate` that is no program stays as it is.
        members: the agents' seeds and values, as `init` takes them.
        state: shapes of the state.
        example: shape of the second argument of `update`: the number of updates, or a batch of
            rollouts.

    Returns:
        The programs, compiled.
    """
    if multihost.count() > 1:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype)[()], example)
        jax.block_until_ready(programs.update(programs.init(members), zeros))
        return programs
    # The longest compilation comes first: tracing the others overlaps with it
    jobs = {
        "update": ((state, example), 1),
        "init": ((members,), 0),
        "evaluate": ((state, np.int32(0)), 1),
    }
    with ThreadPoolExecutor(len(jobs)) as pool:
        compiled = {}
        for name, (inputs, level) in jobs.items():
            program = getattr(programs, name)
            if hasattr(program, "lower"):
                compile_program = program.lower(*inputs).compile
                compiled[name] = pool.submit(compile_program, _options(level))
        return programs._replace(**{name: job.result() for name, job in compiled.items()})


def _options(level: int) -> dict[str, int]:
    """Compiler options with LLVM's optimization level on a CPU, unless XLA_FLAGS name one.

    Level 1 runs as fast as the default, and compiles a quarter sooner.
    """
    flag = "xla_backend_optimization_level"
    is_named = flag in os.environ.get("XLA_FLAGS", "")
    if is_named or jax.default_backend() != "cpu":
        return {}
    return {flag: level}
