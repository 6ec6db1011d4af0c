"""A trained policy, ready to act.

    policy = load_policy("runs/NAME")
    action = policy(obs)

A policy with memory acts with it:

    memory = policy.initial_memory(n)
    action, memory = policy(obs, memory, first)

Observations go in as the environment gives them and actions come out as it takes them: the
observation normalizer, the one-hot encoding and the action bounds are part of the policy.
"""

import importlib.util
import operator
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
from pmaprl.device.optim import hparams_of
from pmaprl.device.state import flatten, unflatten
from pmaprl.envs.differences import spec_of_run
from pmaprl.envs.spaces import EnvSpec
from pmaprl.machine.devices import check_settings, start_jax
from pmaprl.policies.policy import Policy
from pmaprl.runs.checkpoints import FOLDER, Checkpoints, Mismatch, step_of
from pmaprl.runs.console import Console
from pmaprl.runs.results import ranked, training_returns
from pmaprl.runs.scripts import may_be_imported


def import_file(path: Path, digest: str) -> ModuleType:
    """Import a file, or return its module if the same content was imported before.

    Args:
        path: the file.
        digest: its SHA-256.

    Raises:
        UsageError: the file cannot be imported.
    """
    name = f"algorithm_{digest[:16]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


@dataclass(eq=False, repr=False, kw_only=True)
class StoredPolicy(Policy):
    """Policy of an agent that a run has stored.

    Attributes:
        run_dir: directory of the run.
        step: environment steps trained for.
        seed: seed of the agent.
        evaluation: mean greedy return at this step; None if it was not evaluated.
        config: contents of the run's config.json.
        member: index of the agent in its population.
    """

    run_dir: Path
    step: int
    seed: int
    evaluation: float | None
    config: dict[str, Any]
    member: int

    @property
    def who(self) -> str:
        """Name of this agent within its run, in words."""
        args = self.config["args"]
        is_member = args.get("population") or args.get("sweep")
        if is_member:
            return f"member {self.member}, with seed {self.seed}"
        count = args.get("num_seeds", 1)
        return f"seed {self.seed}, one of {count}" if count > 1 else f"seed {self.seed}"

    def __repr__(self) -> str:
        return (
            f"Policy(env={self.env.name!r}, run_dir={str(self.run_dir)!r}, "
            f"step={self.step}, seed={self.seed})"
        )


Choice = int | Literal["best", "latest"]


def load_policy(
    run: str | Path,
    step: Choice = "latest",
    seed: int | None = None,
    algorithm: ModuleType | str | Path | None = None,
    member: int | None = None,
) -> StoredPolicy:
    """Load the policy of a run.

    A warning tells if the algorithm's file has changed since the run, if checkpoints are damaged,
    and if the best member was chosen by the evaluation of another step.

    Args:
        run: a run directory, or one of its checkpoints (`runs/NAME/checkpoints/STEP`).
        step: environment steps of a checkpoint, "latest", or "best", the checkpoint with this
            agent's best evaluation.
        seed: the agent of a run with --num-seeds; None: the first.
        algorithm: the module or file that the run was made with. None takes the file that the run
            names, if it belongs to the kit or has trained on this machine: a run directory is data,
            and does not decide which code is imported.
        member: index of a member of a population; None: the best one at that step.

    Returns:
        The policy, with its `step`, `seed`, `member` and `evaluation`.

    Raises:
        UsageError: the run, the checkpoint or the agent does not exist, or the algorithm does not
            fit.
    """
    run_dir, step = _split_checkpoint(Path(run), step)
    config = read_config(run_dir)
    start_jax()
    env = spec_of_run(run_dir, config)
    module = _module(config, run_dir, algorithm)
    try:
        args, functions, like = _functions(config, env, module)
    except Exception as error:
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        raise UsageError(f"{run_dir} does not fit {module.__file__}: {kind}{error}") from error
    checkpoints = Checkpoints(run_dir / FOLDER, is_population=args.is_population)
    index = _named_agent(args, run_dir, seed, member)
    steps_to_try = _candidates(run_dir, checkpoints, step, index)
    evaluations = {}

    def candidates() -> list[int]:
        # Read before the checkpoint, which a run that goes on may delete meanwhile
        evaluations.update(checkpoints.evaluations())
        return steps_to_try()

    try:
        loaded_step, arrays, damaged = checkpoints.load(
            flatten(like), ("learner/",), candidates=candidates
        )
    except Mismatch as error:
        raise UsageError(f"{run_dir} does not fit its algorithm's file: {error}") from error
    for checkpoint in damaged:
        warnings.warn(printable(checkpoint), stacklevel=2)
    evaluations |= checkpoints.evaluations()
    complete = {
        evaluated_step: returns
        for evaluated_step, returns in evaluations.items()
        if len(returns) == args.num_agents
    }
    if index is None:
        index = _best_member(run_dir, complete, loaded_step)
    returns = complete.get(loaded_step)
    return StoredPolicy(
        algorithm=functions,
        learner=jax.tree.map(lambda x: x[index], unflatten(arrays, like)["learner"]),
        env=env,
        run_dir=run_dir,
        step=loaded_step,
        seed=args.members.seed[index],
        evaluation=returns[index] if returns else None,
        config=config,
        member=index,
    )


def load_named(args: PolicyArgs, console: Console) -> StoredPolicy:
    """Load the policy that a command's flags name, with warnings on the `console`.

    Raises:
        UsageError: see `load_policy`.
    """
    check_settings()
    with warnings.catch_warnings(action="always", category=UserWarning):
        warnings.showwarning = lambda message, *_: console.warn(str(message))
        return load_policy(args.run, args.step, args.agent, args.algorithm or None, args.member)


def _split_checkpoint(path: Path, step: Choice) -> tuple[Path, Choice]:
    """Split a path that may be a checkpoint's into a run directory and a step."""
    if isinstance(step, SupportsIndex):
        step = operator.index(step)
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
    """Import the algorithm of a run: the caller's, or else the file that the run names."""
    is_module = isinstance(algorithm, ModuleType)
    file = algorithm.__file__ if is_module else algorithm
    path = Path(file or ROOT / str(config.get("script"))).resolve()
    if algorithm is None and not may_be_imported(path):
        flag = f"--algorithm {shlex.quote(str(path))}"
        in_python = f"load_policy(..., algorithm={str(path)!r})"
        raise UsageError(
            f"{run_dir} was made by {path}, which has not trained here as it is now: if you trust "
            f"that file, name it by {flag}, in Python {in_python}"
        )
    if not path.is_file():
        raise UsageError(f"the algorithm of {run_dir} is not there: {path} does not exist")
    digest = sha256(path.read_bytes()).hexdigest()
    module = algorithm if is_module else import_file(path, digest)
    if digest != config.get("script_sha256"):
        text = f"{path.name} has changed since {run_dir} was made with it"
        warnings.warn(printable(text), stacklevel=3)
    return module


def _functions(config: dict[str, Any], env: EnvSpec, module: ModuleType) -> tuple[Any, Any, Any]:
    """Rebuild the parts of a run that its flags determine.

    Returns:
        The flags, the algorithm's functions, and {"learner": ...} of all agents, zeros that take no
        memory.
    """
    flags = {name: value for name, value in config["args"].items() if name not in ONE_TIME}
    args = module.Args(**flags)
    functions = module.make_algorithm(args, env)
    hparams = hparams_of(args, {name: np.float32(0) for name in args.members.member_values})
    shapes = jax.eval_shape(lambda: {"learner": functions.init(jax.random.key(0), hparams)})

    def of_all_agents(x: jax.ShapeDtypeStruct) -> np.ndarray:
        zero = np.zeros((), x.dtype)
        return np.broadcast_to(zero, (args.num_agents, *x.shape))

    return args, functions, jax.tree.map(of_all_agents, shapes)


def _named_agent(args: Any, run_dir: Path, seed: int | None, member: int | None) -> int | None:
    """Index of an agent among all; None for the best one of a population."""
    if member is not None and seed is not None:
        raise UsageError(f"member {member} and seed {seed}: an agent is chosen by one of them only")
    seeds = args.members.seed
    if member is not None:
        kind = "member"
        name = member
        choices = range(len(seeds))
    elif seed is not None:
        kind = "seed"
        name = seed
        choices = seeds
    else:
        return None if args.is_population else 0
    if name not in choices:
        raise UsageError(
            f"{run_dir} has no {kind} {name!r}: it trained {kind}s {choices[0]} to {choices[-1]}"
        )
    return choices.index(name)


def _candidates(
    run_dir: Path, checkpoints: Checkpoints, step: Choice, index: int | None
) -> Callable[[], list[int]]:
    """A function that returns the steps to try for `step`, the preferred one last.

    Args:
        run_dir: directory of the run.
        checkpoints: its checkpoints.
        step: the caller's choice.
        index: index of the agent; None: the best one.
    """
    steps = checkpoints.steps()
    if not steps:
        raise UsageError(f"{run_dir} has no checkpoint yet")
    if step not in ("best", "latest", *steps):
        listed = steps if len(steps) <= 10 else [*steps[:3], "...", *steps[-3:]]
        names = ", ".join(map(str, listed))
        raise UsageError(f'{run_dir / FOLDER} has no {step!r}: choose "best", "latest" or {names}')
    if step == "latest":
        return checkpoints.steps
    if step != "best":
        return lambda: [step]
    if not checkpoints.by_return(index):
        raise UsageError(
            f'no evaluation says which checkpoint in {run_dir / FOLDER} is "best": take "latest"'
        )
    return lambda: checkpoints.by_return(index)


def _best_member(run_dir: Path, evaluations: dict[int, list[float]], step: int) -> int:
    """Index of the best member at `step`; warn if the evaluation of another step chooses it."""
    if not evaluations:
        warnings.warn(
            "no checkpoint has an evaluation to tell the best member: this is member 0",
            stacklevel=3,
        )
        return 0
    judged = step if step in evaluations else max(evaluations)
    member = ranked(evaluations[judged], training_returns(run_dir, judged))[0]
    if judged != step:
        warnings.warn(
            f"checkpoint {step} has no evaluation: this is member {member}, the best one at step "
            f"{judged}; member=... chooses another one",
            stacklevel=3,
        )
    return member
