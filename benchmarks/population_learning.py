"""Whether it helps that a population evolves: PBT beside random search and beside one run with the given flags.

taskset -c 0 python -m benchmarks.population_learning
python -m benchmarks.population_learning --report
python -m benchmarks.population_learning --help

Learning rates are drawn over four decades. Random search and PBT begin with the same seeds and draws, and their members
train for the same number of steps. Member 0 of PBT keeps the flags of the command line, and takes over nobody: it is
the run that they make alone. What counts of a search is the member that an evaluation at the end chooses, by its return
in other episodes, and what the median member earns.

What is done is skipped, and what was cut short goes on, so it may be stopped at any time.
"""

import json
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.jobs import Job
from benchmarks.records import POPULATIONS, machine_class, read_record
from benchmarks.tasks import FIRST_SEED, Task, run_all
from common.cli.checks import check, check_types
from common.cli.command import main, parse
from common.cli.config import read_config
from common.cli.errors import UsageError
from common.cli.files import read_text
from common.cli.words import as_words
from common.drawing.statistics import estimate, interval
from common.runs.ranking import ranked

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

    envs: tuple[str, ...] = tuple(SETTINGS)
    """Environments; benchmarks/populations.toml has their flags."""
    seeds: int = 0
    """Populations of each kind, with seeds from 100 on; none has a member whose seed another one has. 0 are as many as
    benchmarks/populations.toml says."""
    population: int = 0
    """Members of each; 0 are those of benchmarks/populations.toml."""
    total_timesteps: int = 0
    """Environment steps of each member; 0 are those of benchmarks/populations.toml."""
    report: bool = False
    """Train nothing: print the table of the results that are there, of every class of machine."""
    folder: str = "runs/populations"
    """Where the runs lie."""
    results: str = "benchmarks/results"
    """Where the results go, into a folder for this class of machine."""

    def __post_init__(self):
        check_types(self)
        check(self, "seeds population total_timesteps", at_least=0)
        unknown = [name for name in self.envs if name not in SETTINGS] or ["without a name"] * (not self.envs)
        if unknown:
            raise UsageError(f"--envs {unknown[0]} chooses nothing of {', '.join(SETTINGS)}")
        if self.population == 1:
            raise UsageError("--population 1 cannot evolve: give 2 or more, or 0")


class Earned(NamedTuple):
    """Greedy returns of the members of a finished run."""

    chosen: float  # of the best one, in other episodes than those by which it was chosen
    median: float  # over the members; who broke counts as the worst
    first: float  # of member 0, in the other episodes


@dataclass(frozen=True)
class Searches(Task):
    """Populations on one environment: the jobs of random search, then as many of PBT, with their seeds and draws."""

    @property
    def sizes(self) -> dict[str, int]:
        population = self.jobs[0].args.population
        return {"populations": len(self.jobs) // 2, "members": population, "steps": self.steps}

    def sizes_in(self, path: Path) -> dict[str, int]:
        (there,) = load([path])
        count = len(there["seeds"])
        return {"populations": count, "members": there["population"], "steps": there["total_timesteps"]}

    def record(self) -> Record:
        """What came of it. Raises UsageError where a run lacks something."""
        count = len(self.jobs) // 2
        random, pbt = ([earned(job) for job in jobs] for jobs in (self.jobs[:count], self.jobs[count:]))
        config = read_config(self.jobs[count].run_dir)
        return {
            "env": self.env,
            "population": self.sizes["members"],
            "total_timesteps": self.steps,
            "seeds": [job.args.seed for job in self.jobs[count:]],
            "arms": {
                PBT: {"chosen": [x.chosen for x in pbt], "median": [x.median for x in pbt]},
                RANDOM: {"chosen": [x.chosen for x in random], "median": [x.median for x in random]},
                ALONE: {"chosen": [x.first for x in pbt]},
            },
            "commands": {PBT: self.jobs[count].command, RANDOM: self.jobs[0].command},
            **{name: config[name] for name in FROM_CONFIG},
            "wall_seconds": [_result(job)["wall_seconds"] for job in self.jobs],
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
    words = [tuple(as_words(shared | more | seed)) for more in ({}, evolving) for seed in seeds]
    jobs = [Job("ppo_pmap", some, Path(args.folder), cached=True) for some in words]
    return Searches(POPULATIONS, env, flags["total_timesteps"], np.inf, jobs)


def earned(job: Job) -> Earned:
    """What the members of a finished run earn. Raises UsageError where its end was not evaluated twice."""
    try:
        result = _result(job)
        means, others = (np.array(result[f"{name}/return_mean"], float) for name in ("eval", "best"))  # None is NaN
        chosen = others[ranked(means.tolist())[0]]
        whole = result["best/env_steps"] == result["eval/env_steps"] and len(means) == len(others) > 1
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        whole = False
    if not whole or np.isnan(chosen):
        raise UsageError(f"{job.run_dir} lacks an evaluation of its end: delete it, and the same command runs it again")
    broken = means[np.isfinite(means)].min()
    median = np.median(np.where(np.isfinite(means), means, broken))
    return Earned(float(chosen), float(median), float(broken if np.isnan(others[0]) else others[0]))


def _result(job: Job) -> dict[str, Any]:
    return json.loads(read_text(job.run_dir / "result.json"))


def learn(args: Args) -> None:
    """What the command does. Raises UsageError or TrainingError as `run_all` does."""
    paths = sorted(Path(args.results).glob(f"*/{POPULATIONS}/*.json"))
    if not args.report:
        results, tasks = Path(args.results) / machine_class(), [searches_on(env, args) for env in args.envs]
        run_all(tasks, results)
        paths = [task.path(results) for task in tasks]
    print(table(load(paths)))


def load(paths: Iterable[Path]) -> list[Record]:
    """Records, in the order of populations.toml. Raises UsageError where a file is something else."""
    records = [read_record(path, NAMES, _check, "benchmarks.population_learning") for path in paths]
    return sorted(records, key=lambda record: list(SETTINGS).index(record["env"]))


def _check(record: Record) -> None:
    """Raise an error where something is no number, or of other sizes than the seeds."""
    for name, kinds in ((PBT, 2), (RANDOM, 2), (ALONE, 1)):
        values = np.array(list(record["arms"][name].values()), float)
        if values.shape != (kinds, len(record["seeds"])) or not np.isfinite(values).all():
            raise ValueError(name)


def table(records: list[Record]) -> str:
    """Markdown: IQMs over seeds with 95% bootstrap intervals, of each arm, and of the differences seed by seed."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for record in records:
        arms = {name: {kind: np.array(x) for kind, x in arm.items()} for name, arm in record["arms"].items()}  # [S]
        for a, b in (PBT, RANDOM), (PBT, ALONE):
            arms[f"{a} less {b}"] = {kind: arms[a][kind] - x for kind, x in arms[b].items()}
        members = f"{len(record['seeds'])} x {record['population']} members"
        where = f"{record['env']}, {members} x {record['total_timesteps']:,} steps"
        for name, values in arms.items():
            cells = [_spread(values[kind]) if kind in values else "" for kind in ("chosen", "median")]
            lines.append(f"| {where} | {name} | {' | '.join(cells)} |")
            where = ""
    return "\n".join(lines)


def _spread(values: np.ndarray) -> str:
    spread = interval(values, "iqm")
    return f"{estimate(values, 'iqm'):.4g}" + (f" ({spread.low:.4g} to {spread.high:.4g})" if spread else "")


if __name__ == "__main__":
    sys.exit(main(learn, parse(Args)))
