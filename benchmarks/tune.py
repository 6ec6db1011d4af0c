"""Finds flags for an environment by successive halving, and tries them on seeds that the search has
not seen.

python -m benchmarks.tune --env MountainCar-v0 python -m benchmarks.tune --env Asterix-MinAtar
Breakout-MinAtar --pattern "*-MinAtar" --total-timesteps 2e6

Many candidates train for a short time, the best of them for longer, and so on (Jamieson and
Talwalkar 2016). What is done is kept, so it may be stopped at any time and goes on with the same
command.
"""

import importlib
import json
import math
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.jobs import ROOT, Job, jobs_over, last_of, run
from benchmarks.records import log_of, spread
from pmaprl.cli.checks import Bounds, Count, check_flags
from pmaprl.cli.command import NO_DEFAULT, main, parse
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.run_flags import as_command_line
from pmaprl.runs.estimates import RESAMPLES, estimate
from pmaprl.runs.metrics import EVALUATION

EVALUATIONS = 10  # of a run
KEEP = 3  # one of so many candidates goes on, for so many times as long
SEEN = 2_000  # the first seed of those that the search sees, and that it does not
UNSEEN = 1_000
TODAY = "the flags of today"
HParams = dict[str, Any]


@dataclass(kw_only=True)
class Args:
    """Find flags for an environment, or for several alike."""

    env: tuple[str, ...]
    """Environment, or several for which the same flags should be good."""
    algo: str = "ppo_pmap"
    """File of algos/, by its name."""
    space: Annotated[str, NO_DEFAULT] = ""
    """Table of benchmarks/spaces.toml (default: the one named after the algorithm)."""
    pattern: Annotated[str, NO_DEFAULT] = ""
    """Pattern that the entry is for, such as "*-MinAtar" (default: the environment)."""
    total_timesteps: Count = 500_000
    """Environment steps of the last candidates; earlier ones get fewer."""
    candidates: Annotated[int, Bounds(2)] = 27
    """Candidates to begin with; the flags of today are one of them."""
    seeds: Count = 3
    """Seeds of a candidate."""
    unseen_seeds: Annotated[int, Bounds(2, SEEN - UNSEEN)] = 10
    """New seeds on which the best candidate and the flags of today are compared in the end."""
    folder: str = "runs/tune"
    """Folder of the runs."""

    def __post_init__(self):
        check_flags(self)
        if not (ROOT / "algos" / f"{self.algo}.py").exists():
            raise UsageError(f"--algo {self.algo} is no file of algos/, such as ppo_pmap")
        if len(self.env) > 1 and not self.pattern:
            raise UsageError(
                "--pattern has to say what the entry for several environments is for, such "
                'as "*-MinAtar"'
            )


def tune(args: Args) -> None:
    """Search, then compare with the flags of today. Raises TrainingError where all candidates
    fail.
    """
    candidates = draw(args)
    rungs = max(int(math.log(args.candidates, KEEP) + 1e-9), 1)
    for rung in range(rungs):
        steps = max(args.total_timesteps // KEEP ** (rungs - 1 - rung), 1)
        print(f"{len(candidates)} candidates, {args.seeds} seeds, {steps:,} steps", flush=True)
        returns = returns_of_all(args, candidates, steps)  # [environments, candidates]
        order = np.argsort(-scores_of(returns), kind="stable")
        order = order[: len(candidates) // KEEP if rung < rungs - 1 else 1]
        candidates = [candidates[index] for index in order]
        for index, candidate in zip(order, candidates, strict=True):
            earned = "  ".join(f"{value:8.2f}" for value in returns[:, index])
            print(f"  {earned}  {as_command_line(candidate) or TODAY}", flush=True)
    conclude(args, candidates[0])


def draw(args: Args) -> list[HParams]:
    """The candidates: the flags of today, {}, and others of the space. Raises UsageError where
    there is no space.
    """
    spaces = tomllib.loads((ROOT / "benchmarks" / "spaces.toml").read_text())
    space = args.space or args.algo
    algorithm = importlib.import_module(f"pmaprl.algos.{args.algo}").Args
    if space not in spaces:
        raise UsageError(f"benchmarks/spaces.toml has no {space}, but {', '.join(spaces)}")
    random = np.random.default_rng(0)
    candidates = [{}]
    for _ in range(100 * args.candidates):
        drawn = {name: _value(random, kind) for name, kind in spaces[space].items()}
        flags = {name: value for name, value in drawn.items() if value is not None}
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in flags.items()
        }
        # The algorithm may refuse them together; a space of another one has flags that this one has
        # not.
        with suppress(UsageError, TypeError):
            if len(candidates) < args.candidates and algorithm(env=args.env[0], **given):
                candidates.append(flags)
    if len(candidates) < args.candidates:
        raise UsageError(
            f"of {100 * args.candidates} candidates of {space} {args.algo} takes "
            f"{len(candidates) - 1}"
        )
    return candidates


def _value(random: np.random.Generator, kind: Any) -> Any:
    """Draw what a candidate gets: a choice of a list, a number of two digits between two bounds, or
    None for the default.
    """
    if isinstance(kind, list | dict) and random.random() < 0.5:
        return None
    if isinstance(kind, list):
        return kind[random.integers(len(kind))]
    if not isinstance(kind, dict):
        return kind
    return float(f"{math.exp(random.uniform(math.log(kind['low']), math.log(kind['high']))):.1e}")


def jobs_of(args: Args, env: str, flags: HParams, steps: int, seeds: range) -> list[Job]:
    """The runs of a candidate; those of today take what was tuned before."""
    interval = max(steps // EVALUATIONS, 1)
    sizes = {"total_timesteps": steps, "eval_interval": interval, "checkpoint_interval": interval}
    sizes |= {"keep_checkpoints": 1} | ({"tuned": False} | flags if flags else {})
    return jobs_over(seeds, args.algo, env, sizes, Path(args.folder))


def returns_of_all(args: Args, candidates: list[HParams], steps: int) -> np.ndarray:
    """Returns of candidates [environments, candidates], mean over seeds; NaN where one has failed.

    Raises TrainingError where all have.
    """
    returns = []
    for env in args.env:
        of_each = [
            jobs_of(args, env, flags, steps, range(SEEN, SEEN + args.seeds)) for flags in candidates
        ]
        if candidates[0] == {} and (failed := run(of_each[0])):
            said = last_of(failed[0].log.read_text())
            if said.startswith("error: "):  # such as an environment that the algorithm cannot train
                raise UsageError(said.removeprefix("error: "))
            raise TrainingError(f"{TODAY} fail on {env}: {said} ({failed[0].log} has the rest)")
        run(job for jobs in of_each for job in jobs)
        returns.append(
            [
                returns_of(jobs).mean() if all(job.done for job in jobs) else np.nan
                for jobs in of_each
            ]
        )
        if np.isnan(returns[-1]).all():
            raise TrainingError(
                f"all candidates have failed on {env}: {of_each[0][0].log} says why"
            )
    return np.array(returns)


def scores_of(returns: np.ndarray) -> np.ndarray:
    """A score for each candidate: the mean over the environments, in each 0 for the worst, 1 for
    the best.

    It is -1 where the candidate has failed.
    """
    low = np.nanmin(returns, axis=1, keepdims=True)
    high = np.nanmax(returns, axis=1, keepdims=True)
    return np.nan_to_num((returns - low) / np.maximum(high - low, 1e-9), nan=-1.0).mean(axis=0)


def returns_of(jobs: list[Job]) -> np.ndarray:
    """Mean greedy returns of each seed [S] over the second half of the run: learning sooner counts,
    too.
    """
    curves = [log_of(job).series[EVALUATION] for job in jobs]
    return np.concatenate(
        [curve.values[curve.steps > curve.steps[-1] / 2].mean(axis=0) for curve in curves]
    )


def conclude(args: Args, best: HParams) -> None:
    """Compare with the flags of today on unseen seeds, and print the entry where it is better."""
    if not best:
        print("nothing better than the flags of today was found")
        return
    steps = args.total_timesteps
    seeds = range(UNSEEN, UNSEEN + args.unseen_seeds)
    random = np.random.default_rng(0)
    given = {
        name: x
        for name, x in vars(args).items()
        if x != getattr(Args, name, None) and name != "folder"
    }
    what = (
        f"greedy returns over the second half of {steps:,} steps, IQM of seeds {seeds[0]} "
        f"to {seeds[-1]}"
    )
    comments = [
        f"# python -m benchmarks.tune {as_command_line(given)}",
        f"# {what}, 95% intervals:",
    ]
    print(
        f"the best one and {TODAY}, {len(seeds)} seeds from {UNSEEN} on, {steps:,} steps",
        flush=True,
    )
    better = True
    for env in args.env:
        of_each = [jobs_of(args, env, flags, steps, seeds) for flags in (best, {})]
        if failed := run(job for jobs in of_each for job in jobs):
            raise TrainingError(f"{len(failed)} runs have failed: {failed[0].log} says why")
        tuned, today = map(returns_of, of_each)
        comments.append(f"# {env}: {spread(tuned)}, with {TODAY} {spread(today)}")
        print(f"  {comments[-1][2:]}", flush=True)
        many = [
            estimate(x[random.integers(len(x), size=(len(x), RESAMPLES))]) for x in (tuned, today)
        ]
        # The 95% bootstrap interval of their difference
        better &= np.percentile(many[0] - many[1], 2.5) > 0
    if not better:
        print("the best one is not clearly better on seeds that the search has not seen")
        return
    name = args.pattern or args.env[0]
    path = Path(args.folder) / f"{args.algo}__{re.sub('[^A-Za-z0-9-]', '_', name)}.toml"
    lines = [
        *comments,
        f"[{json.dumps(name)}]",
        *(f"{name} = {json.dumps(value)}" for name, value in best.items()),
    ]
    path.write_text("\n".join(lines) + "\n")
    print(f"for algos/tuned/{args.algo}.toml, also in {path}:\n\n{path.read_text()}")


if __name__ == "__main__":
    main(tune, parse(Args))
