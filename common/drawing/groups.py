"""Runs in groups, chosen by flags; their learning curves at common steps, and estimates over seeds with bootstrap
intervals, as Agarwal et al. (2021) recommend: arxiv.org/abs/2108.13264.
"""

import difflib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from common.cli.checks import check_flags
from common.cli.errors import UsageError, printable
from common.cli.files import read_config
from common.cli.run_flags import ONE_TIME
from common.runs.metrics import Log, Series, check_members, is_number, read_log

TRAINING, EVALUATION = "episode/return", "eval/return_mean"
RECENT = "episode/return_last100"
LARGEST = {"seed": 2**31, "num_seeds": 10**5}
RUNS = tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")


@dataclass(kw_only=True)
class Selection:
    """Flags that say which runs are looked at, and how."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], RUNS] = ()
    """Run directories, such as runs/*."""
    by: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FLAG"), tyro.conf.UseAppendAction] = ()
    """Split the runs of an algorithm by this flag's value too, such as clip_eps; several with commas or repeated."""
    estimate: Literal["iqm", "mean"] = "iqm"
    """Over seeds: iqm leaves out the lowest and the highest quarter, which takes 4 seeds (mean below that), or mean."""

    def __post_init__(self):
        check_flags(self)

    @property
    def split(self) -> tuple[str, ...]:
        """The flags named by --by, as they are called in config.json."""
        words = itertools.chain.from_iterable(word.split(",") for word in self.by)
        return tuple(dict.fromkeys(word.strip().removeprefix("--").replace("-", "_") for word in words))


@dataclass(frozen=True)
class LoggedRun:
    """A run directory, read."""

    path: Path
    algorithm: str
    flags: dict[str, Any]
    log: Log
    members: tuple[int, ...] | None = None  # which of a population these are; None for all agents

    @property
    def num_seeds(self) -> int:
        return self.flags.get("num_seeds", 1)

    @property
    def seeds(self) -> list[int]:
        """Of all agents."""
        return self.flags.get("seeds") or [self.flags["seed"] + index for index in range(self.num_seeds)]


@dataclass(frozen=True)
class Group:
    """All runs of one algorithm in one environment, with the same values of the flags of --by."""

    env: str
    algorithm: str
    variant: dict[str, Any]  # those values; a flag that the algorithm does not have is left out
    runs: tuple[LoggedRun, ...]

    @property
    def label(self) -> str:
        """Such as `ppo_pmap, clip_eps 0.2`."""
        return ", ".join([self.algorithm, *(f"{name} {flag_text(value)}" for name, value in self.variant.items())])


@dataclass(frozen=True)
class Note:
    """Something about runs that a picture or a table does not show."""

    who: str
    what: str


def load(selection: Selection, metrics: Iterable[str]) -> list[Group]:
    """The runs of `selection` with these metrics, in groups, sorted.

    What is no run or has no metrics is left out, with a note. Raises UsageError for no runs at all, broken ones, runs
    that all have no metrics, and a flag in `by` that no run has.
    """
    if not selection.runs:
        raise UsageError("name at least one run directory, such as runs/NAME or runs/*")
    paths = list({Path(run).resolve(): Path(run) for run in selection.runs}.values())  # each once
    strangers = [path for path in paths if path.exists() and not (path / "config.json").exists()]
    if len(strangers) < len(paths):  # else all that is named is wrong
        say(Note(str(path), "no run directory, left out") for path in strangers)
        paths = [path for path in paths if path not in strangers]
    configs = {path: _read_config(path) for path in paths}
    flags = set().union(*(config["args"] for config in configs.values()), *map(_swept, configs.values()))
    for name in selection.split:
        if name not in flags:
            raise UsageError(f"--by {name}: none of the runs has this flag; {suggest(name, flags)}")
    logs = {path: read_log(path, metrics) for path in configs}
    silent = [path for path, log in logs.items() if not log.names]
    if len(silent) == len(logs):
        raise UsageError(f"{silent[0]} has no metrics yet: wait for the first row of its metrics.jsonl")
    say(Note(str(path), "no metrics yet, left out") for path in silent)
    found = {path: config for path, config in configs.items() if path not in silent}
    runs = [run for path, config in found.items() for run in _parts(path, config, logs[path])]
    return group(runs, selection.split)


def _parts(path: Path, config: dict[str, Any], log: Log) -> Iterator[LoggedRun]:
    """The run; or of a population, for each combination of values, the members that have them, as if run alone."""
    members, alike = config.get("members", []), {}
    for index, member in enumerate(members):
        own = {name: value for name, value in member.items() if name != "seed"}
        alike.setdefault(json.dumps(own), []).append(index)
    if len(alike) < 2 or config["args"].get("pbt"):  # whose values change
        together = {"num_seeds": len(members), "seeds": [x["seed"] for x in members]} if alike else {}
        yield LoggedRun(path, config["algorithm"], config["args"] | together, log)
        return
    for indices in alike.values():
        seeds = [members[index]["seed"] for index in indices]
        alone = {"num_seeds": len(indices), "seeds": seeds, "population": 0, "sweep": []}
        flags = config["args"] | members[indices[0]] | alone
        yield LoggedRun(path, config["algorithm"], flags, log.of(indices, len(members)), tuple(indices))


def _swept(config: dict[str, Any]) -> set[str]:
    """In what members differ."""
    return set().union(*config.get("members", []))


def _read_config(path: Path) -> dict[str, Any]:
    config = read_config(path)
    for name, default in (("seed", None), ("num_seeds", 1)):
        number = config["args"].get(name, default)
        if type(number) is not int or not 0 <= number < LARGEST[name]:
            raise UsageError(f"{path} is not a run directory: its config.json has no sensible number for {name}")
    check_members(path, config)
    return config


def suggest(name: str, known: Iterable[str]) -> str:
    """Which of the `known` names may have been meant; all of them where none is near."""
    known = sorted(known)
    parts = [other for other in known if name and (name in other or other in name)]
    near = list(dict.fromkeys([*difflib.get_close_matches(name, known, cutoff=0.6), *parts]))
    return f"did you mean {' or '.join(near[:5])}?" if near else f"there are {', '.join(known)}"


PLUMBING = {"env", "seed", "seeds", "num_seeds", "population", "sweep", "num_devices", "sharding", "gif", "tensorboard"}
PLUMBING |= {"wandb", "log_interval", "eval_interval", "checkpoint_interval", "keep_checkpoints", "keep_best"}
PLUMBING |= {name for name in ONE_TIME if name != "init_from"}
"""Flags that decide nothing about what is learned, or are told apart anyway."""


def group(runs: Iterable[LoggedRun], by: tuple[str, ...] = ()) -> list[Group]:
    """Put runs together by environment, algorithm and the flags `by`; sorted, numbers as numbers."""
    together: dict[str, list[LoggedRun]] = {}
    for run in runs:
        together.setdefault(json.dumps([run.flags["env"], run.algorithm, _variant(run, by)]), []).append(run)
    groups = [Group(x[0].flags["env"], x[0].algorithm, _variant(x[0], by), tuple(x)) for x in together.values()]
    return sorted(groups, key=lambda x: (x.env, x.algorithm, [_order(value) for value in x.variant.values()]))


def flag_text(value: Any) -> str:
    """A flag's value as one writes it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def pooled(group: Group) -> Iterator[Note]:
    """What to know of a group whose runs are not repetitions of one experiment with different seeds."""
    who = f"{group.label} in {group.env}"
    flags = [{name: json.dumps(value) for name, value in run.flags.items()} for run in group.runs]
    names = set.intersection(*map(set, flags)) - PLUMBING
    differing = sorted(name for name in names if len({one[name] for one in flags}) > 1)
    if differing:
        what = f"runs with different {', '.join(differing)} are put together, --by {differing[0]} tells them apart"
        yield Note(who, what)
    agents = Counter()
    for run, one in zip(group.runs, flags, strict=True):
        variant = tuple(one[name] for name in differing)
        agents.update((seed, variant) for seed in run.seeds)
    twice = [seed for (seed, _), count in agents.items() if count > 1]
    if twice:
        yield Note(who, f"seed {min(twice)} is there more than once, which makes the interval too narrow")
    if any(run.num_seeds > 1 and _meet(run.flags) for run in group.runs):
        what = "members that exchange weights or play each other count as independent seeds"
        yield Note(who, f"{what}, which makes the interval too narrow")


def _meet(flags: dict[str, Any]) -> bool:
    """Whether members of such a population have to do with each other."""
    return bool(flags.get("pbt")) or flags.get("opponent") == "members"


def say(notes: Iterable[Note]) -> None:
    """Print notes to stderr, those that say the same in one line."""
    together: dict[str, list[str]] = {}
    for note in notes:
        together.setdefault(note.what, []).append(note.who)
    for what, who in together.items():
        more = f" and {len(who) - 1} more" if len(who) > 1 else ""
        print(printable(f"note: {who[0]}{more}: {what}"), file=sys.stderr)


def _variant(run: LoggedRun, by: tuple[str, ...]) -> dict[str, Any]:
    return {name: run.flags[name] for name in by if name in run.flags}


def _order(value: Any) -> tuple[int, float, str]:
    return (0, value, "") if is_number(value) else (1, 0.0, str(value))


GRID = 400  # points of a curve at most; more than a picture can show


@dataclass(frozen=True)
class Curve:
    """One metric of one seed, x strictly increasing, all finite."""

    run: LoggedRun
    x: np.ndarray  # [P]
    y: np.ndarray  # [P]


@dataclass(frozen=True)
class Aligned:
    """Curves at the same places."""

    x: np.ndarray  # [G]
    values: np.ndarray  # [S, G]


def curves(group: Group, metric: str, x: Literal["env_steps", "wall"]) -> list[Curve]:
    """The curve of every seed of a group (of every run, for a metric of the whole run), the empty ones left out."""
    found = []
    for run in group.runs:
        if metric not in run.log.series:
            continue
        series = run.log.series[metric]
        places = series.steps if x == "env_steps" else series.wall
        for values in series.values.T:
            there = np.isfinite(values) & np.isfinite(places)
            reverse = places[there][::-1]  # so that of equal places the last counts
            ordered, first = np.unique(reverse, return_index=True)
            found += [Curve(run, ordered, values[there][::-1][first])] if len(ordered) else []
    return found


def between(series: Series) -> Series:
    """The rows in which some seed has a number; what a seed lacks between two of its own is interpolated."""
    rows = np.isfinite(series.values).any(axis=1)
    steps, values = series.steps[rows], series.values[rows]
    for y in values.T:
        own = np.isfinite(y)
        y[:] = np.interp(steps, steps[own], y[own], np.nan, np.nan) if own.any() else np.nan
    return Series(steps, series.wall[rows], values)


def overlapping(curves: list[Curve]) -> list[Curve]:
    """Those that have a range in common: without any that ends before another one begins."""
    latest_start = max((curve.x[0] for curve in curves), default=0)
    return [curve for curve in curves if curve.x[-1] >= latest_start]


def align(curves: list[Curve], hold: bool = False) -> Aligned:
    """Interpolate linearly to all places that any curve has (beyond GRID: to evenly spaced ones), where all curves are.

    With `hold`, a curve that has ended keeps its last value until the last one ends; without, they have to overlap.
    """
    start = max(curve.x[0] for curve in curves)
    end = (max if hold else min)(curve.x[-1] for curve in curves)
    places = np.unique(np.concatenate([curve.x for curve in curves]))
    places = places[(places >= start) & (places <= end)]
    places = np.linspace(start, end, GRID) if len(places) > GRID else places
    return Aligned(places, np.stack([np.interp(places, curve.x, curve.y) for curve in curves]))


RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True)
class Interval:
    """The 95% bootstrap interval of an estimate."""

    low: np.ndarray
    high: np.ndarray


def estimate(values: np.ndarray, kind: Literal["iqm", "mean"]) -> np.ndarray:
    """Over the first axis: the mean, or the interquartile mean of Agarwal et al. 2021.

    The latter is without the lowest and the highest quarter, rounded down: the mean where there are fewer than 4.
    """
    cut = len(values) // 4 if kind == "iqm" else 0
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def estimate_name(kind: Literal["iqm", "mean"], count: int) -> str:
    """What `estimate` computes of `count` values, in a word."""
    return "IQM" if kind == "iqm" and count >= 4 else "mean"


def interval(values: np.ndarray, kind: Literal["iqm", "mean"]) -> Interval | None:
    """The 95% percentile bootstrap interval of `estimate` for `values` [S, ...], resampling whole seeds; None for one.

    The random numbers are the same in every call.
    """
    if len(values) < 2:
        return None
    picks = np.random.default_rng(0).integers(len(values), size=(len(values), RESAMPLES))
    columns = values.reshape(len(values), -1).T
    bounds = [np.percentile(estimate(column[picks], kind), (2.5, 97.5)) for column in columns]
    low, high = np.array(bounds).T.reshape(2, *values.shape[1:])
    return Interval(low, high)


def stratified(tasks: list[np.ndarray], kind: Literal["iqm", "mean"] = "iqm") -> tuple[np.ndarray, Interval | None]:
    """`estimate` over all seeds of several tasks, [S, ...] each, and its interval, resampling seeds within each task.

    None for the interval where a task has one seed only (Agarwal et al. 2021, section 4.1).
    """
    value = estimate(np.concatenate(tasks), kind)
    if min(map(len, tasks)) < 2:
        return value, None
    random = np.random.default_rng(0)
    resampled = [task[random.integers(len(task), size=(len(task), RESAMPLES))] for task in tasks]  # [S, R, ...]
    low, high = np.percentile(estimate(np.concatenate(resampled), kind), (2.5, 97.5), axis=0)
    return value, Interval(low, high)
