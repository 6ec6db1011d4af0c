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
import math
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.jobs import Job, run
from benchmarks.records import POPULATIONS, machine_class, read_record
from benchmarks.tasks import FIRST_SEED
from common.cli.checks import CountOrZero, check_flags
from common.cli.command import main, parse
from common.cli.config import read_config
from common.cli.errors import TrainingError, UsageError
from common.cli.files import read_text, writing
from common.cli.words import as_words
from common.drawing.statistics import estimate, interval
from common.runs.directory import write_json
from common.runs.ranking import ranked

ALGORITHM = "ppo_pmap"
SETTINGS = tomllib.loads((Path(__file__).parent / "populations.toml").read_text())
SWEEP = "learning_rate=log:1e-5:1e-1"
PBT, RANDOM, ALONE = "PBT", "random search", "member 0 alone"
NAMES = ("env", "population", "total_timesteps", "seeds", "arms", "commands", "versions", "git", "devices")
NAMES += ("wall_seconds",)
Record = dict[str, Any]


@dataclass(kw_only=True)
class Args:
    """Train populations that evolve and populations that do not, over several seeds, and print a table of both."""

    envs: tuple[str, ...] = tuple(SETTINGS)
    """Environments; benchmarks/populations.toml has their flags."""
    seeds: CountOrZero = 0
    """Populations of each kind, with seeds from 100 on; none has a member whose seed another one has. 0 are as many as
    benchmarks/populations.toml says."""
    population: CountOrZero = 0
    """Members of each; 0 are those of benchmarks/populations.toml."""
    total_timesteps: CountOrZero = 0
    """Environment steps of each member; 0 are those of benchmarks/populations.toml."""
    report: bool = False
    """Train nothing: print the table of the results that are there, of every class of machine."""
    folder: str = "runs/populations"
    """Where the runs lie."""
    results: str = "benchmarks/results"
    """Where the results go, into a folder for this class of machine."""

    def __post_init__(self):
        check_flags(self)
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
class Pair:
    """Populations on one environment: `random[i]` and `pbt[i]` have the same seeds and first draws."""

    env: str
    random: tuple[Job, ...]
    pbt: tuple[Job, ...]

    @cached_property
    def size(self) -> tuple[int, int]:
        """Members, and the steps of each."""
        return self.pbt[0].args.population, self.pbt[0].args.total_timesteps

    @property
    def jobs(self) -> tuple[Job, ...]:
        return self.random + self.pbt

    def path(self, results: Path) -> Path:
        """The file of its record."""
        return results / POPULATIONS / f"{self.env}.json"

    def record(self) -> Record:
        """What came of it, when all its jobs are done. Raises UsageError where a run lacks something."""
        random, pbt = ([earned(job) for job in jobs] for jobs in (self.random, self.pbt))
        config, (population, steps) = read_config(self.pbt[0].run_dir), self.size
        return {
            "env": self.env,
            "population": population,
            "total_timesteps": steps,
            "seeds": [job.args.seed for job in self.pbt],
            "arms": {
                PBT: {"chosen": [x.chosen for x in pbt], "median": [x.median for x in pbt]},
                RANDOM: {"chosen": [x.chosen for x in random], "median": [x.median for x in random]},
                ALONE: {"chosen": [x.first for x in pbt]},
            },
            "commands": {PBT: self.pbt[0].command, RANDOM: self.random[0].command},
            **{name: config[name] for name in ("versions", "git", "devices")},
            "wall_seconds": [_result(job)["wall_seconds"] for job in self.jobs],
        }


def pairs_of(args: Args) -> list[Pair]:
    """What the flags ask for, an entry for each environment."""
    return [_pair(args, env) for env in args.envs]


def _pair(args: Args, env: str) -> Pair:
    told = {name: getattr(args, name) for name in ("seeds", "population", "total_timesteps")}
    flags = SETTINGS[env] | {name: value for name, value in told.items() if value}
    count = flags.pop("seeds")
    shared = {name: value for name, value in flags.items() if not name.startswith("pbt")}
    evolving = {"pbt": True} | {name: value for name, value in flags.items() if name.startswith("pbt")}
    seeds = [FIRST_SEED + index * flags["population"] for index in range(count)]
    both = []
    for more in ({}, evolving):
        every = {"env": env} | shared | {"sweep": SWEEP, "eval_interval": 0} | more
        words = [tuple(as_words(every | {"seed": seed})) for seed in seeds]
        both.append(tuple(Job(ALGORITHM, some, Path(args.folder), cached=True) for some in words))
    return Pair(env, *both)


def earned(job: Job) -> Earned:
    """What the members of a finished run earn. Raises UsageError where its end was not evaluated twice."""
    try:
        result = _result(job)
        means, others = result["eval/return_mean"], result["best/return_mean"]
        whole = result["best/env_steps"] == result["eval/env_steps"] and len(means) == len(others) > 1
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole or others[ranked(_known(means))[0]] is None:
        raise UsageError(f"{job.run_dir} lacks an evaluation of its end: delete it, and the same command runs it again")
    known = _known(means)
    broken = min(x for x in known if math.isfinite(x))
    median = float(np.median([x if math.isfinite(x) else broken for x in known]))
    first = others[0]
    return Earned(others[ranked(known)[0]], median, broken if first is None else first)


def _known(returns: list[float | None]) -> list[float]:
    return [math.nan if x is None else x for x in returns]


def _result(job: Job) -> dict[str, Any]:
    return json.loads(read_text(job.run_dir / "result.json"))


def learn(args: Args) -> None:
    """What the command does.

    Raises UsageError where a file is of more seeds, members or steps, TrainingError where runs have failed.
    """
    if args.report:
        print(table(load(sorted(Path(args.results).glob(f"*/{POPULATIONS}/*.json")))))
        return
    results, pairs, written = Path(args.results) / machine_class(), pairs_of(args), []
    for pair in pairs:
        _check_replaceable(pair, pair.path(results))
        with writing(f"folder {results}"):
            pair.path(results).parent.mkdir(parents=True, exist_ok=True)

    def write_done() -> None:
        for pair in pairs:
            if pair in written or not all(job.done for job in pair.jobs):
                continue
            write_json(pair.path(results), pair.record())
            written.append(pair)

    jobs = [job for pair in pairs for job in pair.jobs]
    failed = run(jobs, write_done)
    print(table(load(pair.path(results) for pair in written)))
    if failed:
        raise TrainingError(f"{len(failed)} of {len(jobs)} runs failed")


def _check_replaceable(pair: Pair, path: Path) -> None:
    """Raise UsageError where the file there is of more than what is asked for."""
    if not path.exists():
        return
    (there,) = load([path])
    kept, asked = ((len(x), *size) for x, size in ((there["seeds"], _size(there)), (pair.pbt, pair.size)))
    if any(old > new for old, new in zip(kept, asked, strict=True)):
        old, new = ("{:,} populations of {:,} members with {:,} steps".format(*x) for x in (kept, asked))
        raise UsageError(f"{path} has {old}, and this would replace it by {new}: name another folder with --results")


def _size(record: Record) -> tuple[int, int]:
    return record["population"], record["total_timesteps"]


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
    return "\n".join([*lines, *(line for record in records for line in _rows(record))])


def _rows(record: Record) -> list[str]:
    arms = {
        name: {kind: np.array(x, float) for kind, x in values.items()} for name, values in record["arms"].items()
    }  # [S] each
    less = [(PBT, RANDOM), (PBT, ALONE)]
    differences = {
        f"{a} less {b}": {kind: arms[a][kind] - arms[b][kind] for kind in arms[a].keys() & arms[b].keys()}
        for a, b in less
    }
    members = f"{len(record['seeds'])} x {record['population']} members"
    where = f"{record['env']}, {members} x {record['total_timesteps']:,} steps"
    rows = []
    for name, values in (arms | differences).items():
        cells = [_spread(values[kind]) if kind in values else "" for kind in ("chosen", "median")]
        rows.append(f"| {'' if rows else where} | {name} | {' | '.join(cells)} |")
    return rows


def _spread(values: np.ndarray) -> str:
    spread = interval(values, "iqm")
    return f"{estimate(values, 'iqm'):.4g}" + (f" ({spread.low:.4g} to {spread.high:.4g})" if spread else "")


COLUMNS = ["environment", "search", "chosen member", "median member"]

if __name__ == "__main__":
    sys.exit(main(learn, parse(Args)))
