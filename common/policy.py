"""A trained policy, ready to act: `policy = load_policy("runs/NAME")`, then `action = policy(obs)`.

One with memory: `memory = policy.initial_memory(n)`, then `action, memory = policy(obs, memory, first)`.

Observations go in as the environment gives them and actions come out as it takes them: the observation normaliser, the
one-hot encoding and the action bounds are part of the policy.
"""

import dataclasses
import importlib.util
import operator
import os
import sys
import warnings
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, SupportsIndex

import jax
import numpy as np

from common.cli.command import PolicyArgs
from common.cli.console import Console
from common.cli.errors import UsageError
from common.cli.files import read_config
from common.cli.run_flags import ONE_TIME
from common.device.agents import Agent, Policy
from common.device.optim import hp_of
from common.envs.spaces import EnvSpec
from common.runs.arrays import Mismatch
from common.runs.checkpoint_files import CheckpointDeleted, Damaged, step_of
from common.runs.checkpoints import ATTEMPTS, FOLDER, Checkpoints
from common.runs.directory import ROOT
from common.runs.loading import explain_mismatch
from common.runs.ranking import best_return, best_step, overall_of, ranked

ALGOS = (ROOT / "algos").resolve()


def find_script(config: dict[str, Any], run_dir: Path, algorithm: str | Path | None) -> Path:
    """The algorithm's file: what the caller names, else the file in `algos/` that the run says it was made with."""
    try:
        path = Path(algorithm or ROOT / str(config.get("script"))).resolve()
        is_file = path.is_file()
    except (OSError, ValueError):  # such as a name that is too long
        path, is_file = Path(), False
    if algorithm is None and (path.parent != ALGOS or path.suffix != ".py"):
        raise UsageError(
            f"{run_dir} was made by {str(config.get('script'))[:200]}, which is not a file of {ALGOS}: "
            "if you trust that code, name it, as algorithm= or --algorithm"
        )
    if not is_file:
        raise UsageError(f"the algorithm of {run_dir} is not there: {str(algorithm or path)[:200]} does not exist")
    return path


def import_file(path: Path) -> ModuleType:
    """The module of a file as it is now; the same one again, as long as the file is the same."""
    name = f"algorithm_{file_sha256(path)[:16]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UsageError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def file_sha256(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


Choice = int | Literal["best", "latest"]


def load_policy(
    run: str | Path,
    step: Choice = "latest",
    seed: int | None = None,
    algorithm: ModuleType | str | Path | None = None,
    member: int | None = None,
) -> Policy:
    """The policy of a run directory, or of one of its checkpoints (`runs/NAME/checkpoints/STEP`).

    `step` names a checkpoint, or takes the newest, or the one with this agent's best evaluation. `seed` chooses the
    agent of a run with --num-seeds; its first is the default. `member` chooses one of a population, by its place; the
    default is the best one at that step, and `evaluation` is of other episodes. `algorithm` is the module or the file
    that the run was made with. It is needed where that is not a file of this repository's `algos/`: a run
    directory is data, it does not decide which code is imported. Warns where that file has changed since, of damaged
    checkpoints, and where the evaluation that tells the best member is of another step.

    Raises UsageError where the run, the checkpoint or the agent does not exist, or the algorithm does not fit.
    """
    run_dir, step = _split_checkpoint(Path(run), step)
    config = read_config(run_dir)
    env = _env_spec(config, run_dir)
    args, functions, like = _algorithm(config, env, run_dir, algorithm)
    checkpoints = Checkpoints(run_dir / FOLDER, read_only=True, overall=overall_of(args))
    try:
        named = _named_agent(args, run_dir, seed, member)
        found, learner, damaged = _load(checkpoints, like, run_dir, step, named)
        index = _best_member(checkpoints, found) if named is None else named
        returns = checkpoints.quoted(found)
    except Mismatch as error:
        raise UsageError(
            f"{run_dir} does not fit its algorithm's file: {explain_mismatch(error, config, config)}"
        ) from error
    finally:
        checkpoints.close()
    for one in damaged:
        warnings.warn(str(one), stacklevel=2)
    learner = jax.tree.map(lambda x: x[index], learner)
    evaluation = returns[index] if len(returns) == args.num_agents else None
    return Policy(
        Agent.of(functions), learner, env, run_dir, found, args.members.seed[index], evaluation, config, index
    )


def load_named(args: PolicyArgs, console: Console) -> Policy:
    """The policy that a command's flags name; warnings go to `console`. Raises UsageError as `load_policy` does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            return load_policy(args.run, args.step, args.agent, args.algorithm or None, args.member)
        finally:
            for warning in caught:
                console.warn(str(warning.message))


def _split_checkpoint(path: Path, step: Choice) -> tuple[Path, Choice]:
    """The run directory and the step that `path` and `step` mean together."""
    step = operator.index(step) if isinstance(step, SupportsIndex) else step
    if os.path.exists(path / "config.json"):
        return path, step
    given, path = path, Path(os.path.abspath(path))
    named = step_of(path.name)
    if path.parent.name != FOLDER or named is None:
        return given, step
    if step not in ("latest", named):
        raise UsageError(f"{path} is the checkpoint of step {named} already: leave out step {step}")
    return path.parent.parent, named


def _env_spec(config: dict[str, Any], run_dir: Path) -> EnvSpec:
    try:
        return EnvSpec.from_json(config["env_spec"])
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"{run_dir} does not say what its observations and actions are: {error!r}") from error


def _algorithm(
    config: dict[str, Any], env: EnvSpec, run_dir: Path, algorithm: ModuleType | str | Path | None
) -> tuple[Any, Any, Any]:
    """The run's flags, the algorithm's functions for it, and the learners of all seeds without their numbers."""
    if isinstance(algorithm, ModuleType):
        module, path = algorithm, Path(algorithm.__file__)
    else:
        path = find_script(config, run_dir, algorithm)
        module = import_file(path)
    if file_sha256(path) != config.get("script_sha256"):
        warnings.warn(f"{path.name} has changed since {run_dir} was made with it", stacklevel=3)
    for name in ("Args", "make_algorithm"):
        if not hasattr(module, name):
            raise UsageError(f"{path} is not an algorithm: it has no {name}")
    flags = {name: value for name, value in config["args"].items() if name not in ONE_TIME}
    flags |= {name: tuple(value) for name, value in flags.items() if isinstance(value, list)}
    args_class = module.Args.at(flags["env"]) if hasattr(module.Args, "at") else module.Args
    unknown = flags.keys() - {field.name for field in dataclasses.fields(args_class)}
    if unknown:
        flag = f"--{min(unknown).replace('_', '-')}"
        raise UsageError(f"{run_dir} was not made by {path} as it is now, which has no {flag}")
    try:
        args = args_class(**flags)
        functions = module.make_algorithm(args, env)
        return args, functions, _learner_like(functions, args)
    except UsageError as error:
        raise UsageError(f"{run_dir} does not fit {path}: {error}") from error
    except Exception as error:
        raise UsageError(f"{run_dir} does not fit {path}: {type(error).__name__}: {error}") from error


def _learner_like(functions: Any, args: Any) -> Any:
    """Arrays in the shape of the learners of all agents, as a checkpoint has them, [S, ...]; they take no memory."""
    hp = hp_of(args, {name: np.float32(0) for name in args.members.hyper})
    shapes = jax.eval_shape(lambda: functions.init(jax.random.key(0), hp))
    return jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), (args.num_agents, *x.shape)), shapes)


def _named_agent(args: Any, run_dir: Path, seed: int | None, member: int | None) -> int | None:
    """The place of an agent among all; None for the best one of a population."""
    seeds = args.members.seed
    if member is not None and seed is not None:
        raise UsageError(f"member {member} and seed {seed}: an agent is chosen by one of them only")
    if member is not None and not (isinstance(member, SupportsIndex) and 0 <= operator.index(member) < len(seeds)):
        raise UsageError(f"{run_dir} has no member {member!r}: it trained {_span('member', range(len(seeds)))}")
    if seed is not None and seed not in seeds:
        raise UsageError(f"{run_dir} has no seed {seed!r}: it trained {_span('seed', seeds)}")
    if seed is not None and seeds.count(seed) > 1:
        raise UsageError(f"{seeds.count(seed)} members of {run_dir} have seed {seed}: choose one by member=")
    if member is None and seed is None and args.is_population:
        return None
    return seeds.index(seed) if seed is not None else member or 0


def _load(
    checkpoints: Checkpoints, like: Any, run_dir: Path, step: Choice, index: int | None, attempts: int = ATTEMPTS
) -> tuple[int, Any, list[Damaged]]:
    """The checkpoint that `step` chooses: another one where the run that goes on has deleted the best one."""
    try:
        return checkpoints.load_learner(like, _choose_step(checkpoints, run_dir, step, index))
    except CheckpointDeleted:
        if step != "best" or attempts == 1:
            raise
        return _load(checkpoints, like, run_dir, step, index, attempts - 1)


def _best_member(checkpoints: Checkpoints, step: int) -> int:
    """The place of the best member at this step; warns where another step has to tell which one that is."""
    evaluations = checkpoints.evaluations()
    if not evaluations:
        warnings.warn("no checkpoint has an evaluation to tell the best member: this is member 0", stacklevel=3)
        return 0
    judged = step if step in evaluations else max(evaluations)
    member = ranked(evaluations[judged])[0]
    if judged != step:
        told = f"checkpoint {step} has no evaluation: this is member {member}, the best one at step {judged}"
        warnings.warn(f"{told}; member=... chooses another one", stacklevel=3)
    return member


def _choose_step(checkpoints: Checkpoints, run_dir: Path, step: Choice, index: int | None) -> int | None:
    """The step to load for the agent at `index` among the seeds, or the best one; None for the newest that loads."""
    steps = checkpoints.steps()
    if not steps:
        raise UsageError(f"{run_dir} has no checkpoint yet")
    if step == "latest":
        return None
    if step == "best":
        best = best_step(checkpoints.evaluations(), index, best_return)
        if best is None:
            raise UsageError(f'no checkpoint of {run_dir} has an evaluation, so that none is "best"; take "latest"')
        return best
    if not isinstance(step, int) or step not in steps:
        raise UsageError(f'{run_dir} has no checkpoint {step!r}: choose "best", "latest" or {_listed(steps)}')
    return step


def _span(what: str, numbers: Sequence[int]) -> str:
    return f"{what} {numbers[0]} only" if len(numbers) == 1 else f"{what}s {numbers[0]} to {numbers[-1]}"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps if len(steps) <= 10 else [*steps[:3], "...", *steps[-3:]]))
