"""What the algorithms learn: runs the commands of the docs over many seeds, and writes what came of them.

python -m benchmarks.learning --set classic
python -m benchmarks.learning --help

What is done is skipped, and what was cut short goes on, so it may be stopped at any time. `python -m benchmarks.report`
makes docs/benchmark.md of what it writes.
"""

import dataclasses
import importlib
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.jobs import ROOT, Job, run
from benchmarks.records import machine_class, record_of
from common.cli.checks import check
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.runs.directory import write_json

EVALUATIONS = 20  # of a run


@dataclass(kw_only=True)
class Args:
    """Train every environment of a set over many seeds; what is done already is kept."""

    set: Literal["classic", "minatar", "bsuite", "host"] = "classic"
    """The environments; benchmarks/sets.toml lists them."""
    algos: tuple[str, ...] = ()
    """Algorithms, such as ppo_pmap; default all that the set has."""
    envs: tuple[str, ...] = ()
    """Environments; default all of the set."""
    seeds: int = 10
    """Seeds of each, from 0 on."""
    total_timesteps: int = 0
    """Environment steps of each agent; 0 are those of the set."""
    folder: str = "runs/benchmark"
    """Where the runs lie."""
    results: str = "benchmarks/results"
    """Where the results go, into a folder for this class of machine."""

    def __post_init__(self):
        check(self, "seeds", at_least=1)
        check(self, "total_timesteps", at_least=0)


@dataclass(frozen=True)
class Task:
    """An environment to learn with an algorithm: one job for all seeds, or one for each."""

    algorithm: str
    env: str
    threshold: float
    jobs: list[Job]


def tasks_of(args: Args) -> list[Task]:
    """What a set asks for. Raises UsageError where nothing of it is chosen."""
    chosen = tomllib.loads((ROOT / "benchmarks" / "sets.toml").read_text())[args.set]
    tasks = []
    for algorithm, envs in chosen.items():
        for env, goal in envs.items():
            if (args.algos and algorithm not in args.algos) or (args.envs and env not in args.envs):
                continue
            steps = args.total_timesteps or goal["steps"]
            flags = (
                "--env",
                env,
                "--total-timesteps",
                str(steps),
                "--eval-interval",
                str(max(steps // EVALUATIONS, 1)),
            )
            jobs = [Job(algorithm, (*flags, *more), Path(args.folder)) for more in _seeds(algorithm, args.seeds)]
            tasks.append(Task(algorithm, env, goal["threshold"], jobs))
    if not tasks:
        there = "; ".join(f"{algorithm}: {', '.join(envs)}" for algorithm, envs in chosen.items())
        raise UsageError(f"nothing of --set {args.set} was chosen, which has {there}")
    return tasks


def _seeds(algorithm: str, count: int) -> list[tuple[str, ...]]:
    """Flags that train so many seeds: at once where the algorithm can."""
    fields = dataclasses.fields(importlib.import_module(f"algos.{algorithm}").Args)
    if "num_seeds" in {field.name for field in fields}:
        return [("--seed", "0", "--num-seeds", str(count))]
    return [("--seed", str(seed)) for seed in range(count)]


def learn(args: Args) -> None:
    """Run all jobs and write a file for each task whose jobs are done. Raises TrainingError where some have failed."""
    tasks = tasks_of(args)
    failed = run([job for task in tasks for job in task.jobs])
    folder = Path(args.results) / machine_class()
    for task in tasks:
        if not all(job.done for job in task.jobs):
            continue
        path = folder / task.algorithm / f"{task.env.replace(':', '-').replace('/', '-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record_of(task.jobs, task.threshold))
        print(f"wrote {path}")
    if failed:
        raise TrainingError(f"{len(failed)} of {sum(len(task.jobs) for task in tasks)} runs failed")


if __name__ == "__main__":
    sys.exit(main(learn, parse(Args)))
