"""What `train` of every algorithm does: a run on devices, or a run whose learner gets its batches
from actors.

It raises UsageError for what cannot be done, TrainingError where training had to stop,
KeyboardInterrupt after SIGINT.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pmaprl.actors.actor import inspect_env
from pmaprl.actors.batches import ActorsFailed, Batches, UpdateMetrics, example_batch
from pmaprl.actors.host_drivers import HostDriver, host_driver
from pmaprl.actors.host_evaluation import HostEvaluation
from pmaprl.cli.env_flags import HOST_SUITES, SUITES
from pmaprl.cli.errors import UsageError, printable_lines
from pmaprl.cli.host_flags import FlagsByPlace, HostEnvArgs
from pmaprl.device import multihost
from pmaprl.device.agents import Policy
from pmaprl.device.collectives import in_one_order
from pmaprl.device.devices import check_fits, choose_devices, choose_roles, describe
from pmaprl.device.population import rate_members
from pmaprl.device.programs import Programs, for_seeds, over_devices
from pmaprl.device.replay import describe_replay
from pmaprl.device.sharding import AXIS, arrays_of, to_host
from pmaprl.drawing.figures import draw_curve, draw_population
from pmaprl.envs.bytes import describe_bytes
from pmaprl.envs.custom import wrap
from pmaprl.envs.environment import Env, check_spaces, defaults_left_off
from pmaprl.envs.host import evaluation_params
from pmaprl.envs.registry import list_envs, make
from pmaprl.envs.variation import run_env
from pmaprl.runs.directory import describe_shared
from pmaprl.runs.lock import locked
from pmaprl.runs.recorder import Callback
from pmaprl.runs.reports import TrainResult
from pmaprl.runs.results import ranked, training_returns
from pmaprl.runs.run import Run
from pmaprl.runs.scripts import remember


def run_algorithm(
    args: Any,
    script: str,
    make_algorithm: Callable,
    env: Any = None,
    callback: Callback | None = None,
) -> TrainResult | None:
    """Train as the command line does, with the pure functions that `make_algorithm(args, spec)`
    returns.

    `env` is a gymnax-style environment, in place of the name `args.env`. `callback` gets every row
    of metrics, and ends the run where it returns True. With --list-envs there is no result.
    """
    if args.list_envs:
        return list_envs(SUITES if isinstance(args, FlagsByPlace) else HOST_SUITES, args.list_envs)
    if isinstance(args, HostEnvArgs) and env is not None:
        raise UsageError(
            "environments on the host are named by --env: an object cannot be made anew by "
            "each actor"
        )
    if not args.benchmark:
        remember(Path(script))
    with multihost.joined(args, describe_shared(args, script) if args.distributed else {}):
        if isinstance(args, HostEnvArgs):
            return train_with_actors(args, script, make_algorithm, callback)
        return train_on_devices(args, script, make_algorithm, env, callback)


def train_on_devices(
    args: Any,
    script: str,
    make_algorithm: Callable,
    env: Any = None,
    callback: Callback | None = None,
) -> TrainResult:
    """Environments step on the devices too, and many updates run in one call."""
    if args.sharding == "members":
        devices = choose_devices(args.num_devices, args.num_agents, shared="the number of agents,")
    else:
        devices = choose_devices(
            args.num_devices, args.num_envs, args.block, args.envs_per_cpu_device, args.processes
        )
    env = run_env(
        args, make(args.env, args.env_params) if env is None else wrap(env, args.env_params)
    )
    check_spaces(args, env)
    algorithm = make_algorithm(args, env.spec)
    programs = over_devices(for_seeds(algorithm, args, env), devices, args.sharding)
    members = arrays_of(args.members, len(devices), args.sharding)
    shapes = jax.eval_shape(programs.init, members)
    example = np.int32(0)
    check_fits(args, shapes, example, env.spec, devices)
    notes = (
        describe_bytes(args, env.spec)
        | describe_replay(args, shapes)
        | defaults_left_off(args, env.spec)
    )
    if env.declared_steps > env.max_steps:
        notes["eval"] = f"cuts episodes after {env.max_steps:,} of {env.declared_steps:,} steps"
    run = Run(args, script, env, devices, notes, callback, algorithm.cautions)
    with locked(run.dir), run:
        state, update = run.start(programs, members, shapes, example)
        while run.unfinished:
            updates = run.next_call()
            state, outcome = update(state, updates)
            run.advance(state, updates, partial(outcome.fetch, int(updates)))
        ends = {
            "picture": partial(draw_metrics, run, env),
            "gif": partial(draw_policy, run, env, algorithm),
        }
        return run.finish(state, ends | {"ratings": partial(rate_members, run, env, algorithm)})


def train_with_actors(
    args: HostEnvArgs, script: str, make_algorithm: Callable, callback: Callback | None = None
) -> TrainResult:
    """Environments step on the host, in threads beside the learner; an update learns from some of
    their rollouts.

    Of several processes each has actors of its own, which feed its own learner devices.
    """
    # Before JAX starts
    actor_devices, devices = choose_roles(args.actor_indices, args.learner_indices)
    args = args.among(multihost.count())
    env = inspect_env(args)
    own = len(multihost.own(devices))
    check_spaces(args, env.spec)
    algorithm = make_algorithm(args, env.spec)
    driver = host_driver(algorithm, args, env.spec)
    args.check_split(own)
    threads = f"{args.actor_threads} thread{'s' * (args.actor_threads > 1)}"
    notes = {"actors": f"{threads} on each of {describe(actor_devices)}"}
    if args.processes > 1:
        notes["actors"] += f" in each of {args.processes} processes"
    if (params := evaluation_params(vars(args))) != args.env_params:
        notes["eval"] = f"with {params}"
    programs = programs_over_learners(driver, devices)
    members = arrays_of(args.members, len(devices))
    shapes = jax.eval_shape(programs.init, members)
    example = example_batch(args, env, driver, own)
    check_fits(args, shapes, example, env.spec, devices)
    notes |= (
        describe_bytes(args, env.spec)
        | describe_replay(args, shapes)
        | defaults_left_off(args, env.spec)
    )
    run = Run(args, script, env, devices, notes, callback, algorithm.cautions)
    with locked(run.dir), run:
        evaluation = HostEvaluation(
            args, algorithm._replace(act=jax.jit(algorithm.act)), run.console.warn
        )
        state, update = run.start(programs, members, shapes, example, evaluation)
        if run.unfinished:
            state = _learn_from_actors(run, driver, state, update, actor_devices)
        ends = {
            "picture": partial(draw_metrics, run, env),
            "gif": partial(draw_policy_on_host, run, algorithm),
        }
        return run.finish(state, ends)


def programs_over_learners(driver: HostDriver, devices: list[jax.Device]) -> Programs:
    """The programs on all `devices`. A state has an axis for its one seed."""

    def init(members):
        return jax.tree.map(lambda x: x[None], driver.init(members.seed[0]))

    def update(state, batch):
        state, published, tally = driver.update(jax.tree.map(lambda x: x[0], state), batch.rollouts)
        wants_to_stop = jax.tree.map(lambda x: jax.lax.pmax(x, AXIS), batch.wants_to_stop)
        return (
            jax.tree.map(lambda x: x[None], state),
            published,
            (tally, driver.snapshot_metrics(state), wants_to_stop),
        )

    pmap = partial(jax.pmap, axis_name=AXIS, devices=devices)
    update = in_one_order(update, devices, AXIS)
    return Programs(
        pmap(init), pmap(update, out_axes=(0, None, None), donate_argnums=0), evaluate=None
    )


def _learn_from_actors(
    run: Run, driver: HostDriver, state: Any, update: Callable, actor_devices: list[jax.Device]
) -> Any:
    """Updates of `state` until the run ends; returns the last state."""
    host = to_host(state.replace(actors=()))
    learner, started = jax.tree.map(lambda x: x[0], (host.learner, host.run))
    # Its console is silent
    this = f"warning: process {jax.process_index()} of {multihost.count()}:"
    elsewhere = partial(print, this, file=sys.stderr, flush=True)
    warn = (
        run.console.warn if multihost.is_first() else lambda text: elsewhere(printable_lines(text))
    )
    sharding = jax.NamedSharding(
        jax.sharding.Mesh(multihost.own(run.devices), (AXIS,)), jax.P(AXIS)
    )
    with Batches(run.args, driver, learner, started, actor_devices, sharding, warn) as batches:
        run.figures = batches.figures
        while run.unfinished:
            state = _run_chunk(run, batches, state, update)
    return state


def _run_chunk(run: Run, batches: Batches, state: Any, update: Callable) -> Any:
    """Updates of `state` up to the next thing that is due, or fewer where the run stops; returns
    the new state.

    While an update runs, the rollouts of the next one are awaited and copied to the devices.
    Several processes make the same updates: each tells the others with its rollouts that it has to
    stop. Raises ActorsFailed, with everything saved by a process that is alone: others wait in an
    update for those that fail.
    """
    metrics = UpdateMetrics()
    failure = None
    due = run.next_chunk()
    while metrics.updates < due and not (metrics.broken or metrics.wants_to_stop):
        run.console.reach(run.steps + metrics.updates * run.args.steps_per_update)
        run.console.doing("collecting")
        try:
            batch = batches.next(partial(_stopping, run, state), wants_to_stop=run.wants_to_stop)
        except ActorsFailed as error:
            if multihost.count() > 1:
                raise
            batch = None
            failure = error
        if batch is None:
            break
        run.console.doing("learning")
        with batches.learner.doing("update"):
            state, published, reported = update(state, batch)
        batches.publish(published)
        run.catch_up()  # with the last chunk
        with batches.learner.doing("update"):
            metrics.add(*reported)
    if metrics.updates:
        run.advance(state, metrics.updates, partial(metrics.read, batches.row()))
    if metrics.broken:
        run.catch_up()  # raises
    if failure:
        run.save_after_failure(state)
        raise failure
    return state


def _stopping(run: Run, state: Any) -> bool:
    """Whether to wait for rollouts no longer, which several processes cannot decide on while they
    wait.

    Raises what has befallen the newest update, which returned `state`, such as the loss of another
    process.
    """
    if multihost.count() == 1:
        return run.stopping
    if (newest := jax.tree.leaves(state)[0]).is_ready():
        jax.block_until_ready(newest)
    return False


def draw_metrics(run: Run, env: Any, learners: Any, status: str) -> str:
    """Draw the metrics of a run to a picture."""
    title = f"{env.name}, {run.config['algorithm']}"
    if run.args.is_population:
        return f"picture  {draw_population(run.dir, title, run.args.members.member_values)}"
    return f"curve    {draw_curve(run.dir, title)}"


def draw_policy(run: Run, env: Env, algorithm: Any, learners: Any, status: str) -> str:
    """With --gif, draw an episode with the policy of the first, or best, of `learners` [S, ...] to
    `policy.gif`.
    """
    if not run.args.gif or status == "interrupted":
        return ""
    from pmaprl.drawing.episodes import draw_gif, record  # slow, and needed with --gif only

    path = _path_of_gif(run)
    returns = run.evaluations.newest.returns
    best_first = ranked(returns, training_returns(run.dir, run.evaluations.newest.step))
    member = best_first[0] if run.args.is_population and returns else 0
    policy = Policy(algorithm, jax.tree.map(lambda x: x[member], learners), env.spec)
    recording = record(env, policy.player(), jax.random.key(run.args.seed), env.max_steps)
    draw_gif(env, recording, path, run.console.warn)
    return f"gif      {path}"


def draw_policy_on_host(run: Run, algorithm: Any, learners: Any, status: str) -> str:
    """With --gif, draw an episode with the policy of the one of `learners` [1, ...] to
    `policy.gif`.

    It is played in an environment that is made for it, with the parameters of evaluations.
    """
    if not run.args.gif or status == "interrupted":
        return ""
    from pmaprl.drawing.episodes import draw_gif  # slow, and needed with --gif only
    from pmaprl.recording import record_on_host

    path = _path_of_gif(run)
    learner = jax.tree.map(lambda x: x[0], learners)
    played = record_on_host(run.args, algorithm, learner, stopped=lambda: run.interrupted)
    if played is None:
        return ""
    draw_gif(*played, path, run.console.warn)
    return f"gif      {path}"


def _path_of_gif(run: Run) -> Path:
    """The file for a run's episode, without that of an earlier end."""
    path = run.dir / "policy.gif"
    path.unlink(missing_ok=True)
    return path
