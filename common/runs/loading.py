"""What a run begins from: nothing, a run that it resumes, or parameters of another one; and why these may not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from common.cli.env_flags import steps_on_host
from common.cli.errors import UsageError
from common.cli.files import read_config
from common.device import multihost
from common.device.sharding import check_learners, host_like, to_devices, to_host
from common.runs.arrays import COUNTERS, ROWS, Arrays, Mismatch, first_part, flatten, unflatten
from common.runs.checkpoints import FOLDER, Checkpoints, Damaged
from common.runs.console import Console
from common.runs.directory import differences
from common.runs.ranking import overall_of
from common.runs.reports import Score, stored_evaluation

TRANSFERRED = "learner/params/", "learner/obs_stats/", "learner/return_stats/"  # what --init-from takes over


class Start(NamedTuple):
    """What a run begins from."""

    step: int = 0
    arrays: Arrays = {}  # of another state, in place of fresh ones; not to be changed
    host: Any = None  # that state on the host, where a run is resumed
    counters: dict[str, int] = {}  # of host workers; not to be changed
    newest: Score = Score(0, {})  # the last evaluation; not to be changed
    damaged: tuple[Damaged, ...] = ()  # checkpoints that do not load


def load(args: Any, config: dict[str, Any], like: Any, console: Console) -> Start:
    """Read what --resume or --init-from names, for a state `like` this.

    Raises UsageError where it does not fit.
    """
    if args.resume and (start := _resume(args, config, like, console)):
        return start
    source = config["args"]["init_from"]
    return Start(arrays=_parameters_of(source, config, like, console)) if source else Start()


def place(start: Start, make: Callable[[], Any], shapes: Any, devices: list[jax.Device], sharding: str = "pmap") -> Any:
    """The state on `devices` with that `sharding`, with these `shapes`; `make` gives a fresh one.

    Raises TrainingError where not all processes have the same learner.
    """
    if not start.arrays:
        state = make()
    else:
        is_whole = start.arrays.keys() >= flatten(host_like(shapes)).keys()
        host = start.host if is_whole else to_host(make())  # the devices need not hold two states at once
        state = to_devices(unflatten(flatten(host) | start.arrays, host), shapes, devices, sharding)
    check_learners(jax.block_until_ready(state))
    return state


def _resume(args: Any, config: dict[str, Any], like: Any, console: Console) -> Start | None:
    """The newest state of the run that is resumed; None where it has not saved any yet."""
    path = Path(args.resume)
    saved = Checkpoints(path / FOLDER, read_only=True, overall=overall_of(args))
    has_saved, has_finished = multihost.on_first(lambda: (bool(saved.steps()), (path / "DONE").exists()))
    if not has_saved:
        if has_finished:
            raise UsageError(f"{path} has finished, but its checkpoints are gone: nothing is left to resume")
        console.warn(f"{path} has no checkpoint yet: starting it from step 0")
        return None
    then = read_config(path)["args"]["env"]
    if steps_on_host(then) != steps_on_host(args.env):
        raise UsageError(
            f"{path} cannot go on with {args.env}: it was trained on {then}, which steps elsewhere; --init-from {path} "
            "starts a run from its parameters"
        )
    zeros, optional = flatten(like), args.dispensable + args.renewed
    try:
        step, stored, damaged = saved.load(zeros, optional=optional)
        if args.keep_best and multihost.on_first(lambda: saved.by_return()[-1:]) not in ([], [step]):
            # A damaged one must not count as the best
            damaged += saved.load(zeros, optional=optional, candidates=lambda: [step, *saved.by_return()])[2]
    except Mismatch as error:
        why = explain_mismatch(error, read_config(path), config)
        raise UsageError(f"{path} cannot go on with these flags: {why}") from error
    total = args.num_updates * args.steps_per_update
    if step > total:
        raise UsageError(f"--total-timesteps {args.total_timesteps} is less than the {step} steps that {path} has done")
    console.say(f"resumed  {path} at step {step:,}")
    missing = zeros.keys() - stored.keys()
    for part in args.dispensable:
        if any(name.startswith(part) for name in missing):
            console.say(f"resumed  without {part}, which is not in the checkpoint: it fills again")
    renewed = tuple(part for part in args.renewed if any(name.startswith(part) for name in missing))
    if renewed:
        console.say("resumed  without its environments, which are not in the checkpoint: new episodes begin")
    whole = zeros | stored
    return Start(
        step=step,
        arrays={name: x for name, x in whole.items() if not name.startswith(renewed)},
        host=unflatten(whole, like),
        counters={name.split("/", 1)[1]: int(x[0]) for name, x in stored.items() if first_part(name) == COUNTERS},
        newest=Score(*multihost.on_first(stored_evaluation, path, step)),
        damaged=tuple({one.step: one for one in damaged}.values()),
    )


def _parameters_of(source: str, config: dict[str, Any], like: Any, console: Console) -> Arrays:
    """Parameters and normaliser statistics of the newest state of another run."""
    theirs, others = read_config(Path(source)), Checkpoints(Path(source) / FOLDER, read_only=True)
    wanted = {name: x for name, x in flatten(like).items() if name.startswith(TRANSFERRED)}
    try:
        step, arrays, damaged = others.load(wanted, TRANSFERRED)
    except Mismatch as error:
        why = explain_mismatch(error, theirs, config)
        raise UsageError(f"--init-from {source} does not fit: {why}") from error
    for one in damaged:
        console.warn(str(one))
    console.say(f"started from the parameters of {source} at step {step:,}")
    return arrays


OF_LEARNER = ("env", "env_params", "num_seeds", "population", "sweep", "hidden_sizes", "normalize_obs")
OF_LEARNER += ("normalize_returns", "share_torso", "encoder", "critic_layer_norm", "rnn", "rnn_size", "rnn_layers")
OF_LEARNER += ("obs_prev_action_reward", "opponent")
OF_ACTORS = "num_envs", "buffer_size"
"""Flags that decide, in algorithms that have them, which arrays there are and how large."""


def explain_mismatch(error: Mismatch, then: dict[str, Any], now: dict[str, Any]) -> str:
    """What of two configurations, `then` and `now`, makes their arrays differ, and the first array that does."""
    deciding = OF_LEARNER + OF_ACTORS * (first_part(error.first) == ROWS)
    flags = [name for name in deciding if name in now["args"].keys() & then["args"].keys()]
    other = [f"it was made by {then['algorithm']}"] if then["algorithm"] != now["algorithm"] else []
    return "; ".join([*other, *differences(then["args"], now["args"], flags), str(error)])
