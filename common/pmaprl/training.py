"""Training of every algorithm: on devices alone, or with batches from actors on the host."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from pmaprl.actors.actor import inspect_env
from pmaprl.actors.batches import ActorsFailed, Batches, UpdateMetrics, example_batch
from pmaprl.actors.host_drivers import HostDriver, host_driver
from pmaprl.actors.host_evaluation import HostEvaluation
from pmaprl.actors.threads import ActorFlags
from pmaprl.cli.env_flags import HOST_SUITES, SUITES
from pmaprl.cli.errors import UsageError, printable_lines
from pmaprl.cli.host_flags import FlagsByPlace
from pmaprl.device.collectives import in_one_order
from pmaprl.device.programs import Programs, for_seeds, over_devices
from pmaprl.device.replay import describe_replay
from pmaprl.device.sharding import AXIS
from pmaprl.device.state import members_on_devices, to_host
from pmaprl.drawing.figures import draw_curve, draw_population
from pmaprl.envs.bytes import describe_bytes
from pmaprl.envs.custom import wrap
from pmaprl.envs.environment import Env, channels_in_front, check_spaces, defaults_left_off
from pmaprl.envs.host import evaluation_params
from pmaprl.envs.registry import list_envs, make
from pmaprl.envs.spaces import EnvSpec
from pmaprl.envs.variation import run_env
from pmaprl.machine import multihost
from pmaprl.machine.devices import Device, check_fits, choose_devices, choose_roles, describe
from pmaprl.policies.policy import Policy
from pmaprl.policies.ratings import rate_members
from pmaprl.runs.directory import describe_shared
from pmaprl.runs.lock import locked
from pmaprl.runs.results import TrainResult, ranked, training_returns
from pmaprl.runs.run import Run
from pmaprl.runs.scripts import remember
from pmaprl.runs.setup import Callback, Setup


def run_algorithm(
    args: Any,
    script: str,
    make_algorithm: Callable,
    env: Any = None,
    callback: Callback | None = None,
) -> TrainResult | None:
    """Train an agent, as the command line does. `train` of every algorithm calls this.

    Args:
        args: the algorithm's flags.
        script: the algorithm's file.
        make_algorithm: makes the algorithm of the flags and an `EnvSpec`, such as a class that
            derives from `OnPolicy`, `RecurrentOnPolicy` or `OffPolicy`.
        env: a gymnax-style environment, in place of the name `args.env`.
        callback: called with every row of metrics, a dictionary; True ends the run.

    Returns:
        Parameters [S, ...], the last evaluation and more; None with --list-envs.

    Raises:
        UsageError: flags or the environment cannot be used.
        TrainingError: training had to stop.
        KeyboardInterrupt: SIGINT has stopped the run.
        SystemExit: another signal has stopped the run.
    """
    if wanted := args.list_envs:
        suites = SUITES if isinstance(args, FlagsByPlace) else HOST_SUITES
        return list_envs(suites, wanted)
    if isinstance(args, ActorFlags) and env is not None:
        raise UsageError(
            "environments on the host are named by --env: an object cannot be made anew by "
            "each actor"
        )
    if not args.benchmark:
        remember(Path(script))
    shared = describe_shared(args, script) if args.distributed else {}
    with multihost.joined(args, shared):
        if isinstance(args, ActorFlags):
            return train_with_actors(args, script, make_algorithm, callback)
        return train_on_devices(args, script, make_algorithm, env, callback)


def train_on_devices(
    args: Any,
    script: str,
    make_algorithm: Callable,
    env: Any = None,
    callback: Callback | None = None,
) -> TrainResult:
    """Train with environments that step on the devices too, many updates in one call."""
    if args.sharding == "members":
        devices = choose_devices(args.num_devices, args.num_agents, shared="the number of agents,")
    else:
        devices = choose_devices(
            args.num_devices, args.num_envs, args.block, args.envs_per_cpu_device, args.processes
        )
    env = make(args.env, args.env_params) if env is None else wrap(env, args.env_params)
    env = run_env(args, env)
    check_spaces(args, env)
    algorithm = make_algorithm(args, env.spec)
    programs = over_devices(for_seeds(algorithm, args, env), devices, args.sharding)
    members = members_on_devices(args.members, len(devices), args.sharding)
    shapes = jax.eval_shape(programs.init, members)
    example = np.int32(0)
    check_fits(args, shapes, example, env.spec, devices)
    notes = _notes(args, env.spec, shapes)
    if told := channels_in_front(env):
        notes["images"] = told
    if env.declared_steps > env.max_steps:
        notes["eval"] = f"cuts episodes after {env.max_steps:,} of {env.declared_steps:,} steps"
    setup = Setup(args, script, env, devices, notes, callback, algorithm.cautions)
    with locked(setup.dir), setup.interruption, Run(setup, programs, shapes) as run:
        state, update = run.start(members, example)
        while run.unfinished:
            updates = run.next_call()
            state, outcome = update(state, updates)
            run.advance(state, int(updates), partial(outcome.fetch, int(updates)))
        ends = {
            "picture": partial(draw_metrics, run, env),
            "gif": partial(draw_policy, run, env, algorithm),
            "ratings": partial(rate_members, run, env, algorithm),
        }
        return run.finish(state, ends)


def _notes(args: Any, spec: EnvSpec, shapes: Any) -> dict[str, str]:
    """Notes for the header of a run on bytes, the replay buffer, and flags without effect."""
    notes = describe_bytes(args, spec)
    notes |= describe_replay(args, shapes)
    return notes | defaults_left_off(args, spec)


def train_with_actors(
    args: ActorFlags, script: str, make_algorithm: Callable, callback: Callback | None = None
) -> TrainResult:
    """Train with environments that step on the host, in threads beside the learner.

    An update learns from some rollouts of the threads. Each of several processes has actors of its
    own, which feed its own learner devices.
    """
    # First of all, because it decides how JAX starts
    actor_devices, devices = choose_roles(args.actor_indices, args.learner_indices)
    args = args.among(multihost.count())
    env = inspect_env(args)
    num_learners = len(multihost.local_devices(devices))
    check_spaces(args, env.spec)
    algorithm = make_algorithm(args, env.spec)
    driver = host_driver(algorithm, args, env.spec)
    args.check_split(num_learners)
    threads = f"{args.actor_threads} thread{'s' * (args.actor_threads > 1)}"
    notes = {"actors": f"{threads} on each of {describe(actor_devices)}"}
    if args.processes > 1:
        notes["actors"] += f" in each of {args.processes} processes"
    params = evaluation_params(vars(args))
    if params != args.env_params:
        notes["eval"] = f"with {params}"
    programs = programs_over_learners(driver, devices)
    members = members_on_devices(args.members, len(devices))
    shapes = jax.eval_shape(programs.init, members)
    example = example_batch(args, env, driver, num_learners)
    check_fits(args, shapes, example, env.spec, devices)
    notes |= _notes(args, env.spec, shapes)
    setup = Setup(args, script, env, devices, notes, callback, algorithm.cautions)
    evaluation = HostEvaluation(args, algorithm, setup.console.warn)
    with locked(setup.dir), setup.interruption, Run(setup, programs, shapes, evaluation) as run:
        state, update = run.start(members, example)
        if run.unfinished:
            state = _learn_from_actors(run, driver, state, update, actor_devices)
        ends = {
            "picture": partial(draw_metrics, run, env),
            "gif": partial(draw_policy_on_host, run, algorithm),
        }
        return run.finish(state, ends)


def programs_over_learners(driver: HostDriver, devices: list[Device]) -> Programs:
    """Make the programs on all `devices`. A state has an axis for its one seed."""

    def init(members):
        return jax.tree.map(lambda x: x[None], driver.init(members.seed[0]))

    def update(state, batch):
        state = jax.tree.map(lambda x: x[0], state)
        state, published, metric_sums = driver.update(state, batch.rollouts)
        wants_to_stop = jax.tree.map(lambda x: jax.lax.pmax(x, AXIS), batch.wants_to_stop)
        reported = metric_sums, driver.snapshot_metrics(state), wants_to_stop
        return jax.tree.map(lambda x: x[None], state), published, reported

    pmap = partial(jax.pmap, axis_name=AXIS, devices=devices)
    update = in_one_order(update, devices, AXIS)
    return Programs(
        init=pmap(init),
        update=pmap(update, out_axes=(0, None, None), donate_argnums=0),
        evaluate=_evaluates_on_host,
    )


def _evaluates_on_host(state: Any, seed: Any) -> NoReturn:
    """Refuse to evaluate on the devices, in place of a program."""
    raise NotImplementedError("a HostEvaluation plays")


def _learn_from_actors(
    run: Run, driver: HostDriver, state: Any, update: Callable, actor_devices: list[Device]
) -> Any:
    """Update the state until the run ends, and return the last state."""
    host = to_host(state.replace(actors=()))
    learner, started = jax.tree.map(lambda x: x[0], (host.learner, host.run))
    warn = run.console.warn if multihost.is_first() else _warn_of_process
    mesh = jax.sharding.Mesh(multihost.local_devices(run.devices), (AXIS,))
    sharding = jax.NamedSharding(mesh, jax.P(AXIS))
    with Batches(run.args, driver, learner, started, actor_devices, sharding, warn) as batches:
        run.extra_results = batches.extra_results
        while run.unfinished:
            state = _run_chunk(run, batches, state, update)
    return state


def _warn_of_process(text: str) -> None:
    """Print a warning of a process that is not the first, whose console is silent."""
    process = f"process {jax.process_index()} of {multihost.count()}"
    print(f"warning: {process}: {printable_lines(text)}", file=sys.stderr, flush=True)


def _run_chunk(run: Run, batches: Batches, state: Any, update: Callable) -> Any:
    """Update the state until anything is due or the run stops, and return the new state.

    While an update runs, the rollouts of the next one are awaited and copied to the devices.
    Several processes make the same updates, so each sends with its rollouts whether it has to stop.

    Raises:
        ActorsFailed: the actors have failed. A single process has saved everything by then; others
            wait in an update for the process that fails.
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
    """True if this process should stop waiting for rollouts.

    Several processes decide that together, in an update, and not here. For them this raises the
    error of the newest update, the one that returned `state`, such as the loss of a process.
    """
    if multihost.count() == 1:
        return run.stopping
    newest = jax.tree.leaves(state)[0]
    if newest.is_ready():
        jax.block_until_ready(newest)
    return False


def draw_metrics(run: Run, env: Any, directory: Path, learners: Any, status: str) -> str:
    """Draw the metrics of a run to a picture, if it has trained anything."""
    if not run.steps:
        return ""
    title = f"{env.name}, {run.config['algorithm']}"
    if run.args.is_population:
        values = run.args.members.member_values
        picture = draw_population(directory, title, values, run.args.env_params)
        return f"picture  {picture}"
    return f"curve    {draw_curve(directory, title)}"


def draw_policy(
    run: Run, env: Env, algorithm: Any, directory: Path, learners: Any, status: str
) -> str:
    """Draw an episode of the first seed, or of the best member, to `policy.gif`, with --gif."""
    if not run.args.gif or status == "interrupted":
        return ""
    from pmaprl.drawing.episodes import draw_gif, record  # slow, and needed with --gif only

    path = _path_of_gif(directory)
    returns = run.evaluations.newest.returns
    best_first = ranked(returns, training_returns(directory, run.evaluations.newest.step))
    member = best_first[0] if run.args.is_population and returns else 0
    policy = Policy(algorithm, jax.tree.map(lambda x: x[member], learners), env.spec)
    recording = record(env, policy.player(), jax.random.key(run.args.seed), env.max_steps)
    draw_gif(env, recording, path, run.console.warn)
    return f"gif      {path}"


def draw_policy_on_host(
    run: Run, algorithm: Any, directory: Path, learners: Any, status: str
) -> str:
    """Draw an episode to `policy.gif`, with --gif.

    The episode has an environment of its own, with the parameters of evaluations.
    """
    if not run.args.gif or status == "interrupted":
        return ""
    from pmaprl.drawing.episodes import draw_gif  # slow, and needed with --gif only
    from pmaprl.recording import record_on_host

    path = _path_of_gif(directory)
    learner = jax.tree.map(lambda x: x[0], learners)
    played = record_on_host(run.args, algorithm, learner, stopped=lambda: run.interrupted)
    if played is None:
        return ""
    draw_gif(*played, path, run.console.warn)
    return f"gif      {path}"


def _path_of_gif(directory: Path) -> Path:
    """Path of the picture of a run's episode; an older picture is deleted."""
    path = directory / "policy.gif"
    path.unlink(missing_ok=True)
    return path
