"""What the algorithms learn: runs the commands of the docs over many seeds, and writes what came of them.

python -m benchmarks.learning --set classic
python -m benchmarks.learning --help

What is done is skipped, and what was cut short goes on, so it may be stopped at any time. `python -m benchmarks.report`
makes docs/benchmark.md of what it writes.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.jobs import Job, run, seed_flags
from benchmarks.records import load_record, machine_class, record_of
from benchmarks.sets import Goal, goals
from common.cli.checks import check, check_types
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.cli.files import writing
from common.cli.words import as_words
from common.runs.directory import write_json

EVALUATIONS = 20  # of a run
FIRST_SEED = 100


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
    """Seeds of each, from 100 on: no search for flags has seen them."""
    total_timesteps: int = 0
    """Environment steps of each agent; 0 are those of the set."""
    folder: str = "runs/benchmark"
    """Where the runs lie."""
    results: str = "benchmarks/results"
    """Where the results go, into a folder for this class of machine."""

    def __post_init__(self):
        check_types(self)
        check(self, "seeds", at_least=1)
        check(self, "total_timesteps", at_least=0)


@dataclass(frozen=True)
class Task:
    """An environment to learn with an algorithm: one job for all seeds, or one for each."""

    algorithm: str
    env: str
    steps: int
    threshold: float
    jobs: list[Job]

    @property
    def seeds(self) -> int:
        return sum(job.args.num_seeds for job in self.jobs)

    def path(self, results: Path) -> Path:
        """The file of its record."""
        return results / self.algorithm / f"{re.sub('[:/]', '-', self.env)}.json"


def tasks_of(args: Args) -> list[Task]:
    """What a set asks for. Raises UsageError where nothing of it is chosen."""
    there = [goal for goal in goals() if goal.set == args.set]
    chosen = [goal for goal in there if wanted(goal.algorithm, args.algos) and wanted(goal.env, args.envs)]
    if not chosen:
        raise UsageError(f"nothing of --set {args.set} was chosen, which has {listed(there)}")
    tasks = []
    for goal in chosen:
        steps = args.total_timesteps or goal.steps
        size = {"env": goal.env, "total_timesteps": steps, "eval_interval": max(steps // EVALUATIONS, 1)}
        seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
        flags = [as_words(size | some) for some in seed_flags(goal.algorithm, seeds, goal.seeds_at_once)]
        jobs = [Job(goal.algorithm, tuple(words), Path(args.folder)) for words in flags]
        tasks.append(Task(goal.algorithm, goal.env, steps, goal.threshold, jobs))
    return tasks


def wanted(name: str, chosen: tuple[str, ...]) -> bool:
    """Whether it is among the chosen ones; none means all."""
    return not chosen or name in chosen


def listed(chosen: list[Goal]) -> str:
    """Algorithms, with the environments of each."""
    envs = {}
    for goal in chosen:
        envs.setdefault(goal.algorithm, []).append(goal.env)
    return "; ".join(f"{algorithm}: {', '.join(names)}" for algorithm, names in envs.items())


def learn(args: Args) -> None:
    """Run all jobs and write a file for each task as soon as its jobs are done.

    Raises UsageError where a file is of more seeds or steps, TrainingError where some jobs have failed.
    """
    run_all(tasks_of(args), Path(args.results) / machine_class())


def run_all(tasks: list[Task], results: Path) -> None:
    """What `learn` does, for tasks of any kind."""
    written = []
    for task in tasks:
        _check_replaceable(task.path(results), task.seeds, task.steps)
        with writing(f"folder {results}"):
            task.path(results).parent.mkdir(parents=True, exist_ok=True)

    def write_done() -> None:
        for task in tasks:
            if task in written or not all(job.done for job in task.jobs):
                continue
            write_json(task.path(results), record_of(task.jobs, task.threshold))
            written.append(task)

    failed = run([job for task in tasks for job in task.jobs], write_done)
    for task in written:
        print(f"wrote {task.path(results)}")
    if failed:
        raise TrainingError(f"{len(failed)} of {sum(len(task.jobs) for task in tasks)} runs failed")


def _check_replaceable(path: Path, seeds: int, steps: int) -> None:
    """Raise UsageError where the file there is of more than what is asked for."""
    if not path.exists():
        return
    record = load_record(path)
    count, there = len(record["seeds"]), record["flags"]["total_timesteps"]
    if count > seeds or there > steps:
        raise UsageError(
            f"{path} has {count} seeds of {there:,} steps, and this would replace it by {seeds} of {steps:,}: "
            "name another folder with --results"
        )


if __name__ == "__main__":
    sys.exit(main(learn, parse(Args)))
