"""A trained policy, ready to act: `policy = load_policy("runs/NAME")`, then `action = policy(obs)`.

One with memory: `memory = policy.initial_memory(n)`, then `action, memory = policy(obs, memory,
first)`.

Observations go in as the environment gives them and actions come out as it takes them: the
observation normaliser, the one-hot encoding and the action bounds are part of the policy.
"""

import importlib.util
import operator
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, SupportsIndex

import jax
import numpy as np

from pmaprl.cli.command import PolicyArgs
from pmaprl.cli.errors import UsageError, printable
from pmaprl.cli.files import ROOT, is_run, read_config
from pmaprl.cli.run_flags import ONE_TIME
from pmaprl.device.agents import Policy
from pmaprl.device.devices import check_settings, start_jax
from pmaprl.device.optim import hparams_of
from pmaprl.device.sharding import flatten, unflatten
from pmaprl.envs.bytes import spec_with_byte_max
from pmaprl.envs.spaces import EnvSpec
from pmaprl.runs.checkpoints import FOLDER, Checkpoints, Mismatch, step_of
from pmaprl.runs.console import Console
from pmaprl.runs.results import ranked, training_returns
from pmaprl.runs.scripts import may_be_imported


def import_file(path: Path, digest: str) -> ModuleType:
    """The module of a file as it is now, with this SHA-256; the same one again, as long as the file
    is the same.
    """
    name = f"algorithm_{digest[:16]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UsageError(f"{path} is not a Python file")
    # Dataclasses look their module up there
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


Choice = int | Literal["best", "latest"]


def load_policy(
    run: str | Path,
    step: Choice = "latest",
    seed: int | None = None,
    algorithm: ModuleType | str | Path | None = None,
    member: int | None = None,
) -> Policy:
    """The policy of a run directory, or of one of its checkpoints (`runs/NAME/checkpoints/STEP`).

    `step` names a checkpoint, or takes the newest, or the one with this agent's best evaluation.
    `seed` chooses the agent of a run with --num-seeds; its first is the default. `member` chooses
    one of a population, by its place; the default is the best one at that step. `algorithm` is the
    module or the file that the run was made with. It is needed where that is not a file of this
    repository's `algos/`: a run directory is data, it does not decide which code is imported. Warns
    where that file has changed since, of damaged checkpoints, and where the evaluation that tells
    the best member is of another step.

    Raises UsageError where the run, the checkpoint or the agent does not exist, or the algorithm
    does not fit.
    """
    run_dir, step = _split_checkpoint(Path(run), step)
    config = read_config(run_dir)
    start_jax()
    try:
        env = spec_with_byte_max(
            EnvSpec.from_json(config["env_spec"]), config["args"].get("byte_max", 0)
        )
    except Exception as error:
        raise UsageError(
            f"{run_dir} does not say what its observations and actions are: {error!r}"
        ) from error
    module = _module(config, run_dir, algorithm)
    try:
        args, functions, like = _functions(config, env, module)
    except Exception as error:
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        raise UsageError(f"{run_dir} does not fit {module.__file__}: {kind}{error}") from error
    checkpoints = Checkpoints(run_dir / FOLDER, is_population=args.is_population)
    index = _named_agent(args, run_dir, seed, member)
    listed = _candidates(checkpoints, step, index)
    evaluations = {}

    def candidates() -> list[int]:
        # Before it is read, for a run that goes on may delete it meanwhile
        evaluations.update(checkpoints.evaluations())
        return listed()

    try:
        found, arrays, damaged = checkpoints.load(
            flatten(like), ("learner/",), candidates=candidates
        )
    except Mismatch as error:
        raise UsageError(f"{run_dir} does not fit its algorithm's file: {error}") from error
    for one in damaged:
        warnings.warn(printable(one), stacklevel=2)
    evaluations |= checkpoints.evaluations()
    evaluations = {
        at: returns for at, returns in evaluations.items() if len(returns) == args.num_agents
    }
    index = _best_member(run_dir, evaluations, found) if index is None else index
    learner = jax.tree.map(lambda x: x[index], unflatten(arrays, like)["learner"])
    returns = evaluations.get(found, [])
    seed = args.members.seed[index]
    evaluation = returns[index] if len(returns) == args.num_agents else None
    return Policy(
        algorithm=functions,
        learner=learner,
        env=env,
        run_dir=run_dir,
        step=found,
        seed=seed,
        evaluation=evaluation,
        config=config,
        member=index,
    )


def load_named(args: PolicyArgs, console: Console) -> Policy:
    """The policy that a command's flags name; warnings go to `console`. Raises UsageError as
    `load_policy` does.
    """
    check_settings()
    with warnings.catch_warnings(action="always", category=UserWarning):
        warnings.showwarning = lambda message, *_: console.warn(str(message))
        return load_policy(args.run, args.step, args.agent, args.algorithm or None, args.member)


def _split_checkpoint(path: Path, step: Choice) -> tuple[Path, Choice]:
    """The run directory and the step that `path` and `step` mean together."""
    step = operator.index(step) if isinstance(step, SupportsIndex) else step
    absolute = Path(os.path.abspath(path))
    named = step_of(absolute.name)
    if is_run(path) or absolute.parent.name != FOLDER or named is None:
        return path, step
    if step not in ("latest", named):
        raise UsageError(f"{path} is the checkpoint of step {named} already: leave out step {step}")
    return absolute.parent.parent, named


def _module(
    config: dict[str, Any], run_dir: Path, algorithm: ModuleType | str | Path | None
) -> ModuleType:
    """The algorithm: what the caller names, else the file in `algos/` that the run says it was made
    with.
    """
    given = isinstance(algorithm, ModuleType)
    path = Path(
        (algorithm.__file__ if given else algorithm) or ROOT / str(config.get("script"))
    ).resolve()
    is_there = path.is_file()
    digest = sha256(path.read_bytes()).hexdigest() if is_there else ""
    if algorithm is None and not may_be_imported(path, digest):
        ways = f"--algorithm {shlex.quote(str(path))}"
        in_python = f"load_policy(..., algorithm={str(path)!r})"
        told = f"{run_dir} was made by {path}, which has not trained here as it is now"
        raise UsageError(
            f"{told}: if you trust that file, name it by {ways}, in Python {in_python}"
        )
    if not is_there:
        raise UsageError(f"the algorithm of {run_dir} is not there: {path} does not exist")
    module = algorithm if given else import_file(path, digest)
    if digest != config.get("script_sha256"):
        text = f"{path.name} has changed since {run_dir} was made with it"
        warnings.warn(printable(text), stacklevel=3)
    return module


def _functions(config: dict[str, Any], env: EnvSpec, module: ModuleType) -> tuple[Any, Any, Any]:
    """The run's flags, the algorithm's functions for it, and as `learner` those of all agents
    without their numbers.
    """
    flags = {name: value for name, value in config["args"].items() if name not in ONE_TIME}
    args = module.Args(**flags)
    functions = module.make_algorithm(args, env)
    hparams = hparams_of(args, {name: np.float32(0) for name in args.members.member_values})
    shapes = jax.eval_shape(lambda: {"learner": functions.init(jax.random.key(0), hparams)})
    count = args.num_agents  # as a checkpoint has them, [S, ...]; they take no memory
    return (
        args,
        functions,
        jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), (count, *x.shape)), shapes),
    )


def _named_agent(args: Any, run_dir: Path, seed: int | None, member: int | None) -> int | None:
    """The place of an agent among all; None for the best one of a population."""
    if member is not None and seed is not None:
        raise UsageError(f"member {member} and seed {seed}: an agent is chosen by one of them only")
    seeds = args.members.seed
    what, name, known = (
        ("seed", seed, seeds) if member is None else ("member", member, range(len(seeds)))
    )
    if name is None:
        return None if args.is_population else 0
    if name not in known:
        raise UsageError(
            f"{run_dir} has no {what} {name!r}: it trained {what}s {known[0]} to {known[-1]}"
        )
    return known.index(name)


def _candidates(
    checkpoints: Checkpoints, step: Choice, index: int | None
) -> Callable[[], list[int]]:
    """What `load` is to try for `step`, of the agent at `index` or of the best one."""
    steps = checkpoints.steps()
    if not steps:
        raise UsageError(f"{checkpoints.directory.parent} has no checkpoint yet")
    if step not in ("best", "latest", *steps):
        some = ", ".join(map(str, steps if len(steps) <= 10 else [*steps[:3], "...", *steps[-3:]]))
        raise UsageError(
            f'{checkpoints.directory} has no {step!r}: choose "best", "latest" or {some}'
        )
    by_word = {"best": lambda: checkpoints.by_return(index), "latest": checkpoints.steps}
    if step == "best" and not by_word[step]():
        raise UsageError(
            f'no evaluation says which checkpoint in {checkpoints.directory} is "best": take '
            '"latest"'
        )
    return by_word.get(step, lambda: [step])


def _best_member(run_dir: Path, evaluations: dict[int, list[float]], step: int) -> int:
    """The place of the best member at this step; warns where another step has to tell which one
    that is.
    """
    if not evaluations:
        warnings.warn(
            "no checkpoint has an evaluation to tell the best member: this is member 0",
            stacklevel=3,
        )
        return 0
    judged = step if step in evaluations else max(evaluations)
    member = ranked(evaluations[judged], training_returns(run_dir, judged))[0]
    if judged != step:
        told = (
            f"checkpoint {step} has no evaluation: this is member {member}, the best one "
            f"at step {judged}"
        )
        warnings.warn(f"{told}; member=... chooses another one", stacklevel=3)
    return member
