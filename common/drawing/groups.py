"""Runs in groups, chosen by flags; their metrics at the same steps, and estimates over seeds with bootstrap intervals,
as Agarwal et al. (2021) recommend: arxiv.org/abs/2108.13264.
"""

import difflib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from common.cli.checks import check_flags
from common.cli.errors import UsageError, printable, shortened
from common.cli.files import is_run, read_config
from common.cli.run_flags import ONE_TIME
from common.runs.metrics import Log, Series, is_number, read_log

TRAINING, EVALUATION = "episode/return", "eval/return_mean"
RECENT = "episode/return_last100"
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
        words = [word for text in self.by for word in text.split(",")]
        self.by = tuple(dict.fromkeys(word.strip().removeprefix("--").replace("-", "_") for word in words))


class LoggedRun(NamedTuple):
    """A run directory, read; of a population the members with the same flags, as if they had run alone."""

    path: Path
    algorithm: str
    flags: dict[str, Any]
    seeds: list[int]
    log: Log


class Group(NamedTuple):
    """All runs of one algorithm, with one recipe, in one environment, with the same values of the flags of --by."""

    env: str
    algorithm: str
    variant: dict[str, Any]  # those values; a flag that the algorithm does not have is left out
    runs: list[LoggedRun]

    @property
    def label(self) -> str:
        """Such as `ppo_pmap, clip_eps 0.2`."""
        return ", ".join([self.algorithm, *(f"{name} {flag_text(value)}" for name, value in self.variant.items())])


def load(selection: Selection, metrics: Iterable[str]) -> list[Group]:
    """The runs of `selection` with these metrics, in groups, sorted.

    What is no run or has no metrics is left out, with a note, and there is one on runs that are no repetitions. Raises
    UsageError for no runs at all, broken ones, runs that all have no metrics, and a flag in `by` that no run has.
    """
    if not selection.runs:
        raise UsageError("name at least one run directory, such as runs/NAME or runs/*")
    paths = list({Path(run).resolve(): Path(run) for run in selection.runs}.values())  # each once
    strangers = [path for path in paths if path.exists() and not is_run(path)]
    if len(strangers) < len(paths):  # else all that is named is wrong
        say(f"{path}: no run directory, left out" for path in strangers)
        paths = [path for path in paths if path not in strangers]
    runs = [run for path in paths for run in _parts(path, read_config(path), read_log(path, metrics))]
    known = set().union(*(run.flags for run in runs))
    for name in selection.by:
        if name not in known:
            raise UsageError(f"--by {name}: none of the runs has this flag; {suggest(name, known)}")
    logged = [run for run in runs if run.log.names]
    if not logged:
        raise UsageError(f"{paths[0]} has no metrics yet: wait for the first row of its metrics.jsonl")
    say(f"{path}: no metrics yet, left out" for path in paths if path not in {run.path for run in logged})
    groups = group(logged, selection.by)
    say(note for one in groups for note in pooled(one))
    return groups


def _parts(path: Path, config: dict[str, Any], log: Log) -> Iterator[LoggedRun]:
    """The run; of a population without PBT, for each combination of values the members that have them, as if alone."""
    flags, alike, algorithm = config["args"], {}, config["algorithm"]
    recipe = flags.get("recipe") or ""
    algorithm += "" if recipe in algorithm else f" ({recipe})"
    algorithm = shortened(printable(algorithm))
    flags = flags | {"env": shortened(printable(flags["env"]))}
    members = config.get("members") or [{"seed": flags.get("seed", 0) + i} for i in range(flags.get("num_seeds", 1))]
    for index, member in enumerate(members):
        own = {} if flags.get("pbt") else {name: value for name, value in member.items() if name != "seed"}
        alike.setdefault(json.dumps(own), []).append(index)
    for own, indices in alike.items():
        seeds, part = [members[index]["seed"] for index in indices], log.of(indices, len(members))
        yield LoggedRun(path, algorithm, flags | json.loads(own) | {"seed": seeds[0]}, seeds, part)


def suggest(name: str, known: Iterable[str]) -> str:
    """Which of the `known` names may have been meant; all of them where none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known) or [other for other in known if name and name in other]
    return f"did you mean {' or '.join(near[:5])}?" if near else f"there are {', '.join(known)}"


PLUMBING = {"env", "seed", "num_seeds", "population", "sweep", "num_devices", "sharding", "gif", "tensorboard"}
PLUMBING |= {"wandb", "log_interval", "eval_interval", "checkpoint_interval", "keep_checkpoints", "keep_best"}
PLUMBING |= {name for name in ONE_TIME if name != "init_from"}
"""Flags that decide nothing about what is learned, or are told apart anyway."""


def group(runs: Iterable[LoggedRun], by: tuple[str, ...] = ()) -> list[Group]:
    """Put runs together by environment, algorithm and the flags `by`; sorted, numbers as numbers."""
    groups: dict[str, Group] = {}
    for run in runs:
        variant = {name: run.flags[name] for name in by if name in run.flags}
        one = Group(run.flags["env"], run.algorithm, variant, [])
        groups.setdefault(json.dumps(one), one).runs.append(run)

    def order(group: Group) -> tuple:
        values = group.variant.values()
        return group.env, group.algorithm, [(0, x, "") if is_number(x) else (1, 0.0, str(x)) for x in values]

    return sorted(groups.values(), key=order)


def flag_text(value: Any) -> str:
    """A flag's value as one writes it."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return shortened(printable(text))


def pooled(group: Group) -> Iterator[str]:
    """What to know of a group whose runs are not repetitions of one experiment with different seeds."""
    flags = [{name: json.dumps(value) for name, value in run.flags.items()} for run in group.runs]
    names = set.intersection(*map(set, flags)) - PLUMBING
    differing = sorted(name for name in names if len({one[name] for one in flags}) > 1)
    if differing:
        what = f"runs with different {', '.join(differing)} are put together"
        yield f"{group.label} in {group.env}: {what}, --by {differing[0]} tells them apart"


def say(notes: Iterable[str]) -> None:
    """Print notes to stderr."""
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


GRID = 400  # points of a curve at most; more than a picture can show


def align(
    logged: Sequence[Series], x: Literal["env_steps", "wall"] = "env_steps", hold: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Places [P] and the numbers of all seeds of all series there [S, P], interpolated linearly.

    The places are those that any series has; GRID evenly spaced ones where they are more. A seed is NaN before its
    first number and after its last one, which it keeps with `hold`.
    """
    ats = [one.steps if x == "env_steps" else one.wall for one in logged]
    places = np.unique(np.concatenate([at[np.isfinite(at)] for at in ats]))
    places = np.linspace(places[0], places[-1], GRID) if len(places) > GRID else places
    rows = [_interpolate(places, at, y, hold) for at, one in zip(ats, logged, strict=True) for y in one.values.T]
    return places, np.stack(rows)


def _interpolate(places: np.ndarray, x: np.ndarray, y: np.ndarray, hold: bool) -> np.ndarray:
    there = np.flatnonzero(np.isfinite(x) & np.isfinite(y))[::-1]  # so that of equal places the last counts
    if not len(there):
        return np.full(len(places), np.nan)
    at, first = np.unique(x[there], return_index=True)
    return np.interp(places, at, y[there][first], np.nan, None if hold else np.nan)


def final_returns(log: Log) -> tuple[np.ndarray, bool]:
    """Returns [S] of the last greedy evaluation, or of training where there is none; NaN without. And which it is."""
    if EVALUATION in log.series:
        return log.series[EVALUATION].values[-1], False
    if TRAINING not in log.series:
        return np.full(1, math.nan), True
    return np.array([[math.nan, *y[np.isfinite(y)]][-1] for y in log.series[TRAINING].values.T]), True


RESAMPLES = 2000  # of the bootstrap


class Interval(NamedTuple):
    """The 95% bootstrap interval of an estimate."""

    low: np.ndarray
    high: np.ndarray


def estimate(values: np.ndarray, kind: Literal["iqm", "mean"] = "iqm") -> np.ndarray:
    """Over the first axis: the mean, or the interquartile mean of Agarwal et al. 2021.

    The latter is without the lowest and the highest quarter, rounded down: the mean where there are fewer than 4.
    """
    cut = len(values) // 4 if kind == "iqm" else 0
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def estimate_name(kind: Literal["iqm", "mean"], count: int) -> str:
    """What `estimate` computes of `count` values, in a word."""
    return "IQM" if kind == "iqm" and count >= 4 else "mean"


def interval(*tasks: np.ndarray, kind: Literal["iqm", "mean"] = "iqm") -> Interval | None:
    """The 95% percentile bootstrap interval of `estimate` over all seeds of one or several tasks, [S, ...] each.

    It resamples whole seeds within each task (Agarwal et al. 2021, section 4.1), by the same random numbers in every
    call. None where a task has one seed only.
    """
    if min(map(len, tasks)) < 2:
        return None
    random = np.random.default_rng(0)
    picks = [random.integers(len(task), size=(len(task), RESAMPLES)) for task in tasks]
    columns = [task.reshape(len(task), -1).T for task in tasks]  # one after another: [S, RESAMPLES] are in memory
    bounds = []
    for column in zip(*columns, strict=True):
        resampled = np.concatenate([seeds[pick] for seeds, pick in zip(column, picks, strict=True)])
        bounds.append(np.percentile(estimate(resampled, kind), (2.5, 97.5)))
    low, high = np.array(bounds).T.reshape(2, *tasks[0].shape[1:])
    return Interval(low, high)
