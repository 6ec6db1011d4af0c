"""Train with the commands of the docs over many seeds, and write what came of them.

python -m benchmarks.learning --set classic

What is done is skipped, and what was cut short goes on, so it may be stopped at any time. `python
-m benchmarks.report` makes docs/benchmark.md of what it writes.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.jobs import Job, jobs_over, make_folder, run
from benchmarks.records import load_record, machine_class, record_of
from pmaprl.cli.checks import Count, CountOrZero, check_flags
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.files import fitting
from pmaprl.runs.directory import write_json

EVALUATIONS = 20  # of a run
FIRST_SEED = 100
FOLDER = Path(__file__).resolve().parent


class Goal(NamedTuple):
    """An environment that an algorithm is to learn.

    `algorithm` and `env` are names to show. In brackets they may say what `flags` do, as in
    "ppo_rnn_pmap (lstm)".
    """

    set: str
    algorithm: str
    env: str
    steps: int  # of the environment, for each agent
    threshold: float
    seeds_at_once: int | None  # in one run; None for all
    flags: dict[str, Any]  # beside those; a peer's own, as its authors publish them
    eval_episodes: int | None = None  # of an evaluation; None for as many as usual


def goals() -> list[Goal]:
    """The goals of the kit."""
    found = []
    for name, algorithms in tomllib.loads((FOLDER / "sets.toml").read_text()).items():
        for algorithm, envs in algorithms.items():
            for env, flags in envs.items():
                goal = Goal(
                    set=name,
                    algorithm=algorithm,
                    env=env,
                    steps=flags.pop("steps", None),
                    threshold=flags.pop("threshold", None),
                    seeds_at_once=flags.pop("seeds_at_once", None),
                    eval_episodes=flags.pop("eval_episodes", None),
                    flags=flags,
                )
                found.append(goal)
    return found


def peers(table: str = "peers") -> dict[str, dict[str, Any]]:
    """Look up what is known of each peer, by name; or `flags`, by peer and algorithm."""
    return _published()[table]


@cache
def _published() -> dict[str, Any]:
    """The whole file, read once: a page of the benchmark asks thousands of times. Not to be
    changed.
    """
    return tomllib.loads((FOLDER / "peers" / "peers.toml").read_text())


def goals_of_peer(peer: str) -> list[Goal]:
    """Goals of the kit for which the peer's authors publish flags; its PPO has the goals of APPO,
    too.
    """
    published = peers("flags")
    found = []
    for goal in goals():
        kind = goal.algorithm.replace("_pmap", "").replace("appo", "ppo")
        tables = published.get(f"{peer}_{kind}") or published.get(
            f"{peers()[peer].get('flags_of')}_{kind}", {}
        )
        if pattern := fitting(tables, goal.env):
            found.append(goal._replace(algorithm=f"{peer}_{kind}", flags=tables[pattern]))
    return found


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
    """Environment steps of each agent; 0: those of the set."""
    results: str = "benchmarks/results"
    """Folder for the results, in a folder of this class of machine."""

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

    def path(self, results: Path) -> Path:
        """The file of its record."""
        algorithm, env = (
            re.sub("[:/() ]+", "-", name).strip("-") for name in (self.algorithm, self.env)
        )
        return results / algorithm / f"{env}.json"


def chosen(
    there: list[Goal], algos: tuple[str, ...] | None, envs: tuple[str, ...] | None
) -> list[Goal]:
    """The goals with these algorithms and environments; None means all. Raises UsageError where a
    name has none.
    """
    found = [
        x
        for x in there
        if (algos is None or x.algorithm in algos) and (envs is None or x.env in envs)
    ]
    for flag, names, used in (
        ("algos", algos, {x.algorithm for x in found}),
        ("envs", envs, {x.env for x in found}),
    ):
        if names is not None and not (names and used.issuperset(names)):
            unknown = [name for name in names if name not in used] or ["without a name"]
            raise UsageError(f"--{flag} {unknown[0]} chooses nothing of {listed(there)}")
    return found


def listed(some: list[Goal]) -> str:
    """Algorithms, with the environments of each."""
    envs = {
        goal.algorithm: [other.env for other in some if other.algorithm == goal.algorithm]
        for goal in some
    }
    return "; ".join(f"{algorithm}: {', '.join(names)}" for algorithm, names in envs.items())


def run_all(tasks: list[Task], results: Path) -> None:
    """Run all jobs and write a file for each task as soon as its jobs are done.

    Raises UsageError where a file is of more seeds or steps, TrainingError where some jobs have
    failed.
    """
    written = []
    for task in tasks:
        path = task.path(results)
        there = {}
        sizes = {"seeds": sum(job.args.num_agents for job in task.jobs), "steps": task.steps}
        if path.exists():
            record = load_record(path)
            there = {"seeds": len(record["seeds"]), "steps": record["flags"]["total_timesteps"]}
        if any(there[name] > sizes[name] for name in there):
            old, new = (
                " x ".join(f"{count:,} {name}" for name, count in x.items()) for x in (there, sizes)
            )
            raise UsageError(
                f"{path} has {old}, and this would replace it by {new}: name other --results"
            )
        make_folder(path.parent)

    def write_done() -> None:
        for task in tasks:
            if task not in written and all(job.done for job in task.jobs):
                write_json(
                    task.path(results),
                    record_of(task.algorithm, task.env, task.jobs, task.threshold),
                )
                written.append(task)

    failed = run([job for task in tasks for job in task.jobs], write_done)
    for task in written:
        print(f"wrote {task.path(results)}")
    if failed:
        raise TrainingError(f"{len(failed)} of {sum(len(task.jobs) for task in tasks)} runs failed")


@dataclass(kw_only=True)
class Args(Choice):
    """Train every environment of a set over many seeds; what is done already is kept."""

    set: Literal["classic", "minatar", "bsuite", "memory", "masks", "suites", "host"] = "classic"
    """Set of environments; benchmarks/sets.toml lists them."""
    folder: str = "runs/benchmark"
    """Folder of the runs."""


def tasks_of(args: Args) -> list[Task]:
    """List what a set asks for. Raises UsageError where nothing of it is chosen."""
    tasks = []
    for goal in chosen([goal for goal in goals() if goal.set == args.set], args.algos, args.envs):
        steps = args.total_timesteps or goal.steps
        flags = {"total_timesteps": steps, "eval_interval": max(steps // EVALUATIONS, 1)}
        flags |= {"eval_episodes": goal.eval_episodes} if goal.eval_episodes else {}
        seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
        # Without what stands in brackets
        algorithm, env = (name.partition(" (")[0] for name in (goal.algorithm, goal.env))
        jobs = jobs_over(
            seeds, algorithm, env, flags | goal.flags, Path(args.folder), goal.seeds_at_once
        )
        tasks.append(
            Task(
                algorithm=goal.algorithm,
                env=goal.env,
                steps=steps,
                threshold=goal.threshold,
                jobs=jobs,
            )
        )
    return tasks


def learn(args: Args) -> None:
    """Run the command. Raises UsageError or TrainingError as `run_all` does."""
    run_all(tasks_of(args), Path(args.results) / machine_class())


if __name__ == "__main__":
    main(learn, parse(Args))
