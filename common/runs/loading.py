"""What a run begins from: nothing, a run that it resumes, or parameters of another one; and why these may not fit."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from common.cli.env_flags import steps_on_host
from common.cli.errors import UsageError
from common.cli.files import read_config
from common.device import multihost
from common.device.optim import SCHEDULED, hp_now
from common.device.sharding import TrainState, check_learners, to_devices, to_host
from common.envs.spaces import Box, Dict, Discrete, EnvSpec, Space, Tuple, leaves
from common.runs.arrays import ROWS, Arrays, Mismatch, counters_of, first_part, flatten, select, unflatten, without
from common.runs.checkpoint_files import Damaged, saved_steps
from common.runs.checkpoints import FOLDER, Checkpoints
from common.runs.console import Console
from common.runs.directory import differences
from common.runs.ranking import overall_of
from common.runs.reports import Score, stored_evaluation

TRANSFERRED = "params", "obs_stats", "return_stats"  # what --init-from takes over, of the learner


class Start(NamedTuple):
    """What a run begins from."""

    step: int = 0
    host: Any = None  # the state on the host, where a run is resumed
    renewed: tuple[str, ...] = ()  # beginnings of the names of arrays that it has not, and that are fresh
    transferred: Arrays | None = None  # arrays of another run, in place of fresh ones
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
    return Start(transferred=_parameters_of(source, config, like, console) if source else None)


def place(start: Start, make: Callable[[], Any], shapes: Any, devices: list[jax.Device], sharding: str = "pmap") -> Any:
    """The state on `devices` with that `sharding`, with these `shapes`; `make` gives a fresh one.

    Raises TrainingError where not all processes have the same learner.
    """
    state = jax.block_until_ready(_placed(start, make, shapes, devices, sharding))
    check_learners(state)
    return state


def _placed(start: Start, make: Callable[[], Any], shapes: Any, devices: list[jax.Device], sharding: str) -> Any:
    if start.host is not None and not start.renewed:
        return to_devices(start.host, shapes, devices, sharding)
    loaded = start.transferred or without(flatten(start.host), start.renewed)
    if not loaded:
        return make()
    host = to_host(make())  # the devices need not hold two states at once
    return to_devices(unflatten(flatten(host) | loaded, host), shapes, devices, sharding)


def with_learner(state: Any, learner: Any, shapes: Any, devices: list[jax.Device], sharding: str) -> Any:
    """`state`, which has these `shapes`, with another `learner` from the host; in all processes or in none."""
    alone = TrainState(shapes.learner, (), ())
    placed = multihost.all_or_none(to_devices, alone.replace(learner=learner), alone, devices, sharding)
    return state.replace(learner=placed.learner)


def _resume(args: Any, config: dict[str, Any], like: Any, console: Console) -> Start | None:
    """The newest state of the run that is resumed; None where it has not saved any yet."""
    path = Path(args.resume)
    folder = path / FOLDER
    has_saved, has_finished = multihost.on_first(lambda: (bool(saved_steps(folder)), (path / "DONE").exists()))
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
    saved, zeros = Checkpoints(folder, read_only=True, overall=overall_of(args)), flatten(like)
    try:
        step, arrays, found = saved.load(zeros, dispensable=args.dispensable + args.renewed)
    except Mismatch as error:
        why = explain_mismatch(error, read_config(path), config)
        raise UsageError(f"{path} cannot go on with these flags: {why}") from error
    better = saved.damaged_best(step, zeros, args.dispensable + args.renewed) if args.keep_best else []
    damaged = {one.step: one for one in found + better}
    total = args.num_updates * args.steps_per_update
    if step > total:
        raise UsageError(f"--total-timesteps {args.total_timesteps} is less than the {step} steps that {path} has done")
    host, counters = unflatten(zeros | arrays, like), counters_of(arrays)
    # By another --total-timesteps they jump
    now = hp_now(args, host.run, host.learner)[1]
    sizes = [f"{words} {np.max(now[name]):.3g}" for name, words in SCHEDULED.items() if name in now]
    console.say(f"resumed  {path} at step {step:,}{' with ' * bool(sizes)}{' and '.join(sizes)}")
    for name in args.dispensable:
        if not any(stored.startswith(name) for stored in arrays):
            console.say(f"resumed  without {name}, which is not in the checkpoint: it fills again")
    renewed = tuple({part for part in args.renewed for name in zeros.keys() - arrays.keys() if name.startswith(part)})
    if renewed:
        console.say("resumed  without its environments, which are not in the checkpoint: new episodes begin")
    return Start(
        step=step,
        host=host,
        renewed=renewed,
        counters=counters,
        newest=Score(*multihost.on_first(stored_evaluation, path, step)),
        damaged=tuple(damaged.values()),
    )


def _parameters_of(source: str, config: dict[str, Any], like: Any, console: Console) -> Arrays:
    """Parameters and normaliser statistics of the newest state of another run."""
    others = Checkpoints(Path(source) / FOLDER, read_only=True)
    wanted = select(flatten(like), TRANSFERRED)
    try:
        step, arrays, damaged = others.load(wanted, "learner", TRANSFERRED)
    except Mismatch as error:
        raise UsageError(
            f"--init-from {source} does not fit: {explain_mismatch(error, read_config(source), config)}"
        ) from error
    for one in damaged:
        console.warn(str(one))
    console.say(f"started from the parameters of {source} at step {step:,}")
    return arrays


OF_LEARNER = ("num_seeds", "population", "sweep")
OF_LEARNER += ("hidden_sizes", "normalize_obs", "normalize_returns", "share_torso", "encoder")
OF_LEARNER += ("critic_layer_norm", "rnn", "rnn_size", "rnn_layers", "obs_prev_action_reward", "opponent")
OF_ACTORS = "num_envs", "buffer_size"
"""Flags that decide, in algorithms that have them, which arrays there are and how large."""
NAMED = 3  # layers at most, in a sentence

Config = dict[str, Any]


def explain_mismatch(error: Mismatch, then: Config, now: Config) -> str:
    """What of two configurations, `then` and `now`, makes their arrays differ; where nothing does, which arrays do."""
    layers = _layers(error)
    if then["algorithm"] != now["algorithm"] and layers:
        return f"it was made by {then['algorithm']}, whose layers differ from those of {now['algorithm']}: {layers}"
    spaces = list(_spaces(then, now))
    of_env = ("env", "env_params") if spaces or first_part(error.first) == ROWS else ()
    of_actors = OF_ACTORS if any(first_part(name) == ROWS for name in error.wanted) else ()
    flags = [name for name in (*of_env, *of_actors, *OF_LEARNER) if name in now["args"].keys() & then["args"].keys()]
    return "; ".join([*differences(then["args"], now["args"], flags), *spaces]) or layers or str(error)


def _spaces(then: Config, now: Config) -> Iterator[str]:
    """What differs of observations and actions."""
    try:
        there, here = (EnvSpec.from_json(config["env_spec"]) for config in (then, now))
    except (KeyError, TypeError, ValueError, ArithmeticError):  # the file says something else
        return
    for kind in ("observation", "action"):
        before, after = (_in_words(getattr(spec, f"{kind}_space")) for spec in (there, here))
        if before != after:
            shorter = after.removesuffix(" numbers") if before.endswith(" numbers") else after
            yield f"an {kind} is {before} there, {shorter} here"


def _in_words(space: Space) -> str:
    if isinstance(space, (Dict, Tuple)):
        return ", ".join(f"{name}: {_in_words(leaf)}" for name, leaf in leaves(space))
    if isinstance(space, Box):
        return f"{_size(space.shape)} number{'s' * (math.prod(space.shape) != 1)}"
    return f"one of {space.n}" if isinstance(space, Discrete) else f"one of each of {_size(space.nvec)}"


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _layers(error: Mismatch) -> str:
    """What differs of the layers."""
    there, here = _sizes(error.stored), _sizes(error.wanted)
    differing = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    said = [f"{name} is {there.get(name, 'missing')} there, {here.get(name, 'missing')} here" for name in differing]
    more = [f"and {len(said) - NAMED} more"] if len(said) > NAMED else []
    return "; ".join(said[:NAMED] + more)


def _sizes(arrays: Arrays) -> dict[str, str]:
    """By the names of layers, such as `actor/Torso_0/Dense_0`, their largest arrays, such as 4 x 64, of one seed."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, array in arrays.items():
        parts = name.split("/")
        if parts[1:2] == ["params"]:
            layer = "/".join(part for part in parts[2:-1] or parts[2:] if part != "params")
            shapes.setdefault(layer, []).append(tuple(array.shape[1:]))
    return {layer: _size(max(found, key=math.prod)) for layer, found in shapes.items()}
