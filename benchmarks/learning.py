"""What the algorithms learn: runs the commands of the docs over many seeds, and writes what came of them.

python -m benchmarks.learning --set classic

What is done is skipped, and what was cut short goes on, so it may be stopped at any time. `python -m benchmarks.report`
makes docs/benchmark.md of what it writes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.jobs import Job, seed_flags
from benchmarks.records import machine_class
from benchmarks.sets import goals
from benchmarks.tasks import EVALUATIONS, FIRST_SEED, Choice, Task, chosen, run_all
from common.cli.command import main, parse
from common.cli.run_flags import flag_words


@dataclass(kw_only=True)
class Args(Choice):
    """Train every environment of a set over many seeds; what is done already is kept."""

    set: Literal["classic", "minatar", "bsuite", "memory", "masks", "suites", "host"] = "classic"
    """The environments; benchmarks/sets.toml lists them."""
    folder: str = "runs/benchmark"
    """Where the runs lie."""


def tasks_of(args: Args) -> list[Task]:
    """What a set asks for. Raises UsageError where nothing of it is chosen."""
    tasks = []
    for goal in chosen([goal for goal in goals() if goal.set == args.set], args.algos, args.envs):
        steps = args.total_timesteps or goal.steps
        size = {"env": goal.env_flag, "total_timesteps": steps, "eval_interval": max(steps // EVALUATIONS, 1)}
        size |= {"eval_episodes": goal.eval_episodes} if goal.eval_episodes else {}
        seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
        flags = [
            flag_words(size | goal.flags | some)
            for some in seed_flags(goal.script, goal.env, seeds, goal.seeds_at_once)
        ]
        jobs = [Job(goal.script, tuple(words), Path(args.folder)) for words in flags]
        tasks.append(Task(goal.algorithm, goal.env, steps, goal.threshold, jobs))
    return tasks


def learn(args: Args) -> None:
    """What the command does. Raises UsageError or TrainingError as `run_all` does."""
    run_all(tasks_of(args), Path(args.results) / machine_class())


if __name__ == "__main__":
    main(learn, parse(Args))
