"""Whether it helps that a population evolves: PBT beside random search and beside one run with the given flags.

taskset -c 0 python -m benchmarks.population_learning
python -m benchmarks.population_learning --report

Learning rates are drawn over four decades. Random search and PBT begin with the same seeds and draws, and their members
train for the same number of steps. Member 0 of PBT keeps the flags of the command line, and takes over nobody: it is
the run that they make alone. What counts of a search is the member that an evaluation at the end chooses, by its return
in other episodes, and what the median member earns.

What is done is skipped, and what was cut short goes on, so it may be stopped at any time.
"""

import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.jobs import Job
from benchmarks.records import POPULATIONS, machine_class, markdown, read_record, spread
from benchmarks.tasks import FIRST_SEED, Task, run_all
from common.cli.checks import CountOrZero, check_flags
from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.cli.files import read_config, read_json
from common.cli.run_flags import flag_words
from common.device.evaluation import play_episodes
from common.envs.registry import make
from common.policy import load_policy
from common.runs.reports import ranked

SETTINGS = tomllib.loads((Path(__file__).parent / "populations.toml").read_text())
SWEEP = "learning_rate=log:1e-5:1e-1"
PBT, RANDOM, ALONE = "PBT", "random search", "member 0 alone"
FROM_CONFIG = ("versions", "git", "devices")
NAMES = ("env", "population", "total_timesteps", "seeds", "arms", "commands", *FROM_CONFIG, "wall_seconds")
COLUMNS = ["environment", "search", "chosen member", "median member"]
Record = dict[str, Any]


@dataclass(kw_only=True)
class Args:
    """Train populations that evolve and populations that do not, over several seeds, and print a table of both."""

    envs: tuple[Literal[tuple(SETTINGS)], ...] = tuple(SETTINGS)
    """Environments; benchmarks/populations.toml has their flags."""
    seeds: CountOrZero = 0
    """Populations of each kind, with seeds from 100 on; 0 are as many as benchmarks/populations.toml says."""
    population: CountOrZero = 0
    """Members of each; 0 likewise."""
    total_timesteps: CountOrZero = 0
    """Environment steps of each member; 0 likewise."""
    report: bool = False
    """Train nothing: print the table of the results that are there, of every class of machine."""
    folder: str = "runs/populations"
    """Where the runs lie."""
    results: str = "benchmarks/results"
    """Where the results go, into a folder for this class of machine."""

    def __post_init__(self):
        check_flags(self)
        if self.population == 1:
            raise UsageError("--population 1 cannot evolve: give 2 or more, or 0")


@dataclass(frozen=True)
class Searches(Task):
    """Populations on one environment: the jobs of random search, then as many of PBT, with their seeds and draws."""

    @property
    def sizes(self) -> dict[str, int]:
        return {"populations": len(self.jobs) // 2, "members": self.jobs[0].args.population, "steps": self.steps}

    def sizes_in(self, path: Path) -> dict[str, int]:
        there = load(path)
        return dict(zip(self.sizes, (len(there["seeds"]), there["population"], there["total_timesteps"]), strict=True))

    def record(self) -> Record:
        """What came of it. Raises UsageError where a run lacks something."""
        first, *_ = pbt = self.jobs[len(self.jobs) // 2 :]
        chosen, median, alone = zip(*map(earned, pbt), strict=True)
        of_random = dict(zip(("chosen", "median"), zip(*map(earned, self.jobs[: len(pbt)]), strict=True), strict=False))
        config = read_config(first.run_dir)
        return {
            "env": self.env,
            "population": self.sizes["members"],
            "total_timesteps": self.steps,
            "seeds": [job.args.seed for job in pbt],
            "arms": {PBT: {"chosen": chosen, "median": median}, RANDOM: of_random, ALONE: {"chosen": alone}},
            "commands": {PBT: first.command, RANDOM: self.jobs[0].command},
            **{name: config[name] for name in FROM_CONFIG},
            "wall_seconds": [read_json(job.run_dir / "result.json")["wall_seconds"] for job in self.jobs],
        }


def searches_on(env: str, args: Args) -> Searches:
    """What the flags ask for on an environment."""
    told = {name: getattr(args, name) for name in ("seeds", "population", "total_timesteps")}
    flags = SETTINGS[env] | {name: value for name, value in told.items() if value}
    count = flags.pop("seeds")
    shared = {name: value for name, value in flags.items() if not name.startswith("pbt")}
    shared = {"env": env} | shared | {"sweep": SWEEP, "eval_interval": 0}
    evolving = {"pbt": True} | {name: value for name, value in flags.items() if name.startswith("pbt")}
    seeds = [{"seed": FIRST_SEED + index * flags["population"]} for index in range(count)]
    words = [tuple(flag_words(shared | more | seed)) for more in ({}, evolving) for seed in seeds]
    jobs = [Job("ppo_pmap", some, Path(args.folder), cached=True) for some in words]
    return Searches(POPULATIONS, env, flags["total_timesteps"], np.inf, jobs)


def earned(job: Job) -> tuple[float, float, float]:
    """Greedy returns of the chosen member in other episodes, of the median member, and of member 0 in the others.

    A member that broke counts as the worst. Raises UsageError where the end of the run was not evaluated.
    """
    result = read_json(job.run_dir / "result.json")
    if len(result.get("eval/return_mean", [])) < 2:
        raise UsageError(f"{job.run_dir} lacks an evaluation of its end: delete it, and the same command runs it again")
    means, keys = np.array(result["eval/return_mean"], float), jax.random.split(jax.random.key(7), 128)  # None is NaN
    env, worst = make(read_config(job.run_dir)["args"]["env"]), means[np.isfinite(means)].min()

    def again(member: int) -> float:
        play = jax.jit(partial(play_episodes, env, load_policy(job.run_dir, member=member)))
        return float(play(keys).ret.mean()) if np.isfinite(means[member]) else worst

    median = np.median(np.where(np.isfinite(means), means, worst))
    return again(ranked(means.tolist())[0]), float(median), again(0)


def learn(args: Args) -> None:
    """What the command does. Raises UsageError or TrainingError as `run_all` does."""
    paths = sorted(Path(args.results).glob(f"*/{POPULATIONS}/*.json"))
    if not args.report:
        results, tasks = Path(args.results) / machine_class(), [searches_on(env, args) for env in args.envs]
        run_all(tasks, results)
        paths = [task.path(results) for task in tasks]
    print(table(sorted(map(load, paths), key=lambda record: list(SETTINGS).index(record["env"]))))


def load(path: Path) -> Record:
    """What `record` gave. Raises UsageError where the file is something else."""
    return read_record(path, NAMES, lambda record: table([record]), "benchmarks.population_learning")


def table(records: list[Record]) -> str:
    """Markdown: IQMs over seeds with 95% bootstrap intervals, of each arm, and of the differences seed by seed."""
    lines = []
    for record in records:
        arms = {name: {kind: np.array(x) for kind, x in arm.items()} for name, arm in record["arms"].items()}  # [S]
        for a, b in (PBT, RANDOM), (PBT, ALONE):
            arms[f"{a} less {b}"] = {kind: arms[a][kind] - x for kind, x in arms[b].items()}
        members = f"{len(record['seeds'])} x {record['population']} members"
        where = f"{record['env']}, {members} x {record['total_timesteps']:,} steps"
        for name, values in arms.items():
            cells = [spread(values[kind]) if kind in values else "" for kind in ("chosen", "median")]
            lines.append([where, name, *cells])
            where = ""
    return markdown(COLUMNS, lines)


if __name__ == "__main__":
    main(learn, parse(Args))
