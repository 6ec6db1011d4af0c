"""Tasks of a benchmark, the kit's and the peers': jobs for all seeds, and one record of what comes of them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job, run
from benchmarks.records import load_record, record_of
from benchmarks.sets import Goal
from common.cli.checks import Count, CountOrZero, check_flags
from common.cli.errors import TrainingError, UsageError
from common.cli.files import writing
from common.runs.directory import write_json

EVALUATIONS = 20  # of a run
FIRST_SEED = 100


@dataclass(kw_only=True)
class Choice:
    """Flags of every command that trains tasks."""

    algos: tuple[str, ...] | None = None
    """Only these algorithms, such as ppo_pmap, or of a peer sb3_ppo."""
    envs: tuple[str, ...] | None = None
    """Only these environments."""
    seeds: Count = 10
    """Seeds of each, from 100 on: no search for our flags has seen them."""
    total_timesteps: CountOrZero = 0
    """Environment steps of each agent; 0 are those of the set."""
    results: str = "benchmarks/results"
    """Where the results go, into a folder for this class of machine."""

    def __post_init__(self):
        check_flags(self)


@dataclass(frozen=True)
class Task:
    """An environment to learn with an algorithm: one job for all seeds, or one for each."""

    algorithm: str
    env: str
    steps: int
    threshold: float
    jobs: list[Job]

    @property
    def sizes(self) -> dict[str, int]:
        """What a record has as much of."""
        return {"seeds": sum(job.args.num_agents for job in self.jobs), "steps": self.steps}

    def sizes_in(self, path: Path) -> dict[str, int]:
        """Those of a record that is there."""
        record = load_record(path)
        return {"seeds": len(record["seeds"]), "steps": record["flags"]["total_timesteps"]}

    def record(self) -> dict[str, Any]:
        """What came of it, when all its jobs are done."""
        return record_of(self.algorithm, self.env, self.jobs, self.threshold)

    def path(self, results: Path) -> Path:
        """The file of its record."""
        algorithm, env = (re.sub("[:/() ]+", "-", name).strip("-") for name in (self.algorithm, self.env))
        return results / algorithm / f"{env}.json"


def chosen(there: list[Goal], algos: tuple[str, ...] | None, envs: tuple[str, ...] | None) -> list[Goal]:
    """The goals with these algorithms and environments; None means all. Raises UsageError where a name has none."""
    found = [
        goal for goal in there if goal.algorithm in (algos or [goal.algorithm]) and goal.env in (envs or [goal.env])
    ]
    for flag, names, used in (("algos", algos, {x.algorithm for x in found}), ("envs", envs, {x.env for x in found})):
        if names is not None and not (names and used.issuperset(names)):
            unknown = [name for name in names if name not in used] or ["without a name"]
            raise UsageError(f"--{flag} {unknown[0]} chooses nothing of {listed(there)}")
    return found


def listed(some: list[Goal]) -> str:
    """Algorithms, with the environments of each."""
    envs = {}
    for goal in some:
        envs.setdefault(goal.algorithm, []).append(goal.env)
    return "; ".join(f"{algorithm}: {', '.join(names)}" for algorithm, names in envs.items())


def run_all(tasks: list[Task], results: Path) -> None:
    """Run all jobs and write a file for each task as soon as its jobs are done.

    Raises UsageError where a file is of more seeds or steps, TrainingError where some jobs have failed.
    """
    written = []
    for task in tasks:
        path = task.path(results)
        there = task.sizes_in(path) if path.exists() else {}
        if any(there[name] > task.sizes[name] for name in there):
            old, new = (" x ".join(f"{count:,} {name}" for name, count in x.items()) for x in (there, task.sizes))
            raise UsageError(
                f"{path} has {old}, and this would replace it by {new}: name another folder with --results"
            )
        with writing(f"folder {results}"):
            path.parent.mkdir(parents=True, exist_ok=True)

    def write_done() -> None:
        for task in tasks:
            if task not in written and all(job.done for job in task.jobs):
                write_json(task.path(results), task.record())
                written.append(task)

    failed = run([job for task in tasks for job in task.jobs], write_done)
    for task in written:
        print(f"wrote {task.path(results)}")
    if failed:
        raise TrainingError(f"{len(failed)} of {sum(len(task.jobs) for task in tasks)} runs failed")
