"""Runs in groups, chosen by flags; their metrics at the same steps, and notes on what should be
known of them.
"""

import difflib
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from pmaprl.cli.checks import check_flags
from pmaprl.cli.errors import UsageError, printable, shortened
from pmaprl.cli.files import is_run, read_config
from pmaprl.cli.run_flags import ONE_TIME
from pmaprl.runs.estimates import Kind
from pmaprl.runs.metrics import EVALUATION, TRAINING, Log, Series, is_number, read_log
from pmaprl.runs.results import checksum_of, has_damaged_result

RUNS = tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")


@dataclass(kw_only=True)
class Selection:
    """Flags that say which runs are looked at, and how."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], RUNS] = ()
    """Run directories, such as runs/*."""
    by: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FLAG"), tyro.conf.UseAppendAction] = ()
    """Split the runs of an algorithm by this flag's value too, such as clip_eps; several with
    commas or repeated.
    """
    estimate: Kind = "iqm"
    """Average over seeds: iqm (no lowest and highest quarter; below 4 seeds the mean) or mean."""

    def __post_init__(self):
        check_flags(self)
        words = [word for text in self.by for word in text.split(",")]
        self.by = tuple(
            dict.fromkeys(word.strip().removeprefix("--").replace("-", "_") for word in words)
        )


class LoggedRun(NamedTuple):
    """A run directory, read; of a population the members with the same flags, as if they had run
    alone.
    """

    path: Path
    algorithm: str
    flags: dict[str, Any]
    seeds: list[int]
    log: Log
    checksum: str | None = None  # of the state in the end; None while the run goes on
    copies: tuple[Path, ...] = ()  # of equal runs, which are not counted
    # Checksums of the versions of the algorithm's file that it was made with
    codes: tuple[str, ...] = ()

    @property
    def meaning(self) -> dict[str, str]:
        """The flags that decide what is learned, as JSON."""
        return {
            name: json.dumps(value)
            for name, value in self.flags.items()
            if name not in FLAGS_WITHOUT_EFFECT
        }


class Group(NamedTuple):
    """All runs of one algorithm, with one recipe, in one environment, with the same values of the
    flags of --by.
    """

    env: str
    algorithm: str
    variant: dict[str, Any]  # those values; a flag that the algorithm does not have is left out
    runs: list[LoggedRun]

    @property
    def key(self) -> str:
        """Unlike the label, nothing of it is shortened."""
        return json.dumps([self.algorithm, self.variant])

    @property
    def label(self) -> str:
        """Such as `ppo_pmap, clip_eps 0.2`."""
        return ", ".join(
            [
                self.algorithm,
                *(f"{name} {flag_text(value)}" for name, value in self.variant.items()),
            ]
        )


def load(selection: Selection, metrics: Iterable[str]) -> list[Group]:
    """Read the runs of `selection` with these metrics, in groups, sorted.

    Runs without metrics, folders that are no run and repetitions of a run are left out, with a note
    each; further notes say what the runs of a group and the groups differ in.

    Raises:
        UsageError: for no runs at all, broken ones, runs that all have no metrics, and a flag in
            `by` that no run has.
    """
    if not selection.runs:
        raise UsageError("name at least one run directory, such as runs/NAME or runs/*")
    paths = list({Path(run).resolve(): Path(run) for run in selection.runs}.values())  # each once
    strangers = [path for path in paths if path.exists() and not is_run(path)]
    if len(strangers) < len(paths):  # else all that is named is wrong
        say(f"{path}: no run directory, left out" for path in strangers)
        paths = [path for path in paths if path not in strangers]
    runs = [run for path in paths for run in _parts(path, metrics)]
    known = set().union(*(run.flags for run in runs))
    for name in selection.by:
        if name not in known:
            raise UsageError(f"--by {name}: none of the runs has this flag; {suggest(name, known)}")
    logged = [run for run in runs if run.log.names]
    if not logged:
        raise UsageError(
            f"{paths[0]} has no metrics yet, its metrics.jsonl no row: wait for the first, "
            "if it goes on"
        )
    say(
        f"{path}: no metrics yet, left out"
        for path in paths
        if path not in {run.path for run in logged}
    )
    say(f"{path}: its result.json is damaged" for path in paths if has_damaged_result(path))
    counted, repeated = once_each(logged)
    groups = group(counted, selection.by)
    say([*repeated, *mixed_flags_notes(groups), *side_by_side(groups)])
    return groups


def _parts(path: Path, metrics: Iterable[str]) -> Iterator[LoggedRun]:
    """The run; of a population without PBT, for each combination of values the members that have
    them, as if alone.
    """
    config = read_config(path)
    log = read_log(path, metrics)
    checksum = checksum_of(path)
    flags = config["args"]
    alike = {}
    algorithm = config["algorithm"]
    recipe = flags.get("recipe") or ""
    algorithm += "" if recipe in algorithm else f" ({recipe})"
    algorithm = shortened(printable(algorithm))
    flags = flags | {"env": shortened(printable(flags["env"]))}
    members = config.get("members") or [
        {"seed": flags.get("seed", 0) + i} for i in range(flags.get("num_seeds", 1))
    ]
    for index, member in enumerate(members):
        own = (
            {}
            if flags.get("pbt")
            else {name: value for name, value in member.items() if name != "seed"}
        )
        alike.setdefault(json.dumps(own), []).append(index)
    for own, indices in alike.items():
        seeds = [members[index]["seed"] for index in indices]
        try:
            part = log.of(indices, len(members))
        except UsageError as error:
            raise UsageError(f"{path}/metrics.jsonl: {error}") from error
        yield LoggedRun(
            path=path,
            algorithm=algorithm,
            flags=flags | json.loads(own) | {"seed": seeds[0]},
            seeds=seeds,
            log=part,
            checksum=checksum,
            codes=_codes(config),
        )


def _codes(config: dict[str, Any]) -> tuple[str, ...]:
    """The checksums of an algorithm's file in `config.json`, those before a resume too."""
    earlier = config.get("earlier_scripts")
    found = [config.get("script_sha256"), *(earlier if isinstance(earlier, list) else [])]
    return tuple(str(code) for code in found if code)


def once_each(runs: Iterable[LoggedRun]) -> tuple[list[LoggedRun], list[str]]:
    """The runs without repetitions, and a note on each: same flags, seeds and metrics, and the same
    state in the end.

    A repetition says nothing about other seeds, and would make intervals too narrow.
    """
    places: dict[str, int] = {}
    counted = []
    notes = []
    for run in runs:
        logged = {
            name: (one.steps.tolist(), one.values.tolist()) for name, one in run.log.series.items()
        }
        identity = [run.algorithm, run.flags["env"], run.meaning, run.seeds, run.checksum, logged]
        name = json.dumps(identity, sort_keys=True)
        if run.checksum and name in places:
            first = counted[places[name]]
            counted[places[name]] = first._replace(copies=(*first.copies, run.path))
            notes.append(
                f"{run.path}: equal to {first.path} in flags, seeds and result, counted once"
            )
        else:
            places[name] = len(counted)
            counted.append(run)
    return counted, list(dict.fromkeys(notes))


def suggest(name: str, known: Iterable[str]) -> str:
    """Which of the `known` names may have been meant; all of them where none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known) or [
        other for other in known if name and name in other
    ]
    return f"did you mean {' or '.join(near[:5])}?" if near else f"there are {', '.join(known)}"


FLAGS_WITHOUT_EFFECT = {
    "env",
    "seed",
    "num_seeds",
    "population",
    "sweep",
    "num_devices",
    "sharding",
    "gif",
    "tensorboard",
}
FLAGS_WITHOUT_EFFECT |= {
    "wandb",
    "log_interval",
    "eval_interval",
    "checkpoint_interval",
    "keep_checkpoints",
}
FLAGS_WITHOUT_EFFECT |= {"keep_best", "log_each"}
FLAGS_WITHOUT_EFFECT |= {name for name in ONE_TIME if name != "init_from"}
"""Flags that decide nothing about what is learned, or are told apart anyway."""


def group(runs: Iterable[LoggedRun], by: tuple[str, ...] = ()) -> list[Group]:
    """Put runs together by environment, algorithm and the flags `by`; sorted, numbers as
    numbers.
    """
    groups: dict[str, Group] = {}
    for run in runs:
        variant = {name: run.flags[name] for name in by if name in run.flags}
        one = Group(env=run.flags["env"], algorithm=run.algorithm, variant=variant, runs=[])
        groups.setdefault(json.dumps(one), one).runs.append(run)

    def order(group: Group) -> tuple:
        values = group.variant.values()
        return (
            group.env,
            group.algorithm,
            [(0, x, "") if is_number(x) else (1, 0.0, str(x)) for x in values],
        )

    return sorted(groups.values(), key=order)


def flag_text(value: Any) -> str:
    """A flag's value as one writes it."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return shortened(printable(text))


def mixed_flags_notes(groups: Iterable[Group]) -> list[str]:
    """Notes on groups whose runs are not repetitions of one experiment with different seeds."""
    places = defaultdict(list)
    for group in groups:
        if text := _pooled(group):
            places[text].append(f"{group.label} in {group.env}")
    return [f"{_listed(names, '; ')}: {text}" for text, names in places.items()]


def _pooled(group: Group) -> str:
    """The note on one group; empty where there is nothing to say."""
    if differing := sorted(_differing([run.meaning for run in group.runs])):
        what = f"runs with different {', '.join(differing)} are put together"
        return f"{what}, --by {differing[0]} tells them apart"
    if len(codes := {code for run in group.runs for code in run.codes}) > 1:
        return (
            f"runs of {len(codes)} versions of the algorithm's file are put together, "
            "which may learn differently"
        )
    counts = Counter(seed for run in group.runs for seed in run.seeds)
    if twice := sorted(seed for seed, count in counts.items() if count > 1):
        return (
            f"seeds {_listed([str(seed) for seed in twice])} count more than once, so "
            "intervals are too narrow"
        )
    return ""


def side_by_side(groups: Iterable[Group]) -> list[str]:
    """A note for each environment on the flags, but for those of --by, that differ between its
    groups.
    """
    together = defaultdict(list)
    for group in groups:
        together[group.env].append(group)
    return [note for env, several in together.items() if (note := _side_by_side(env, several))]


def _side_by_side(env: str, groups: list[Group]) -> str:
    meanings = [group.runs[0].meaning for group in groups]
    by = set().union(*(group.variant for group in groups))
    texts = []
    for name in sorted(_differing(meanings) - by):
        having = defaultdict(list)
        for group, flags in zip(groups, meanings, strict=True):
            having[flag_text(json.loads(flags[name]))].append(group)
        values = " or ".join(
            f"{value} ({_listed(_names(found, groups), '; ')})" for value, found in having.items()
        )
        texts.append(f"{name} {values}")
    texts += _of_some(groups, meanings, by)
    return f"{env}: side by side are different flags: {'; '.join(texts)}" if texts else ""


MOST_OF_SOME = 3  # flags that only some of several algorithms have, as forks do; others have dozens


def _of_some(groups: list[Group], meanings: list[dict[str, str]], by: set[str]) -> list[str]:
    """Such as `bonus 0.2 (my_ppo only)`, where algorithms have nearly the same flags."""
    names = sorted(set().union(*meanings) - set.intersection(*map(set, meanings)) - by)
    if len(names) > MOST_OF_SOME:
        return []
    texts = []
    for name in names:
        having = [group for group, flags in zip(groups, meanings, strict=True) if name in flags]
        values = dict.fromkeys(
            flag_text(json.loads(flags[name])) for flags in meanings if name in flags
        )
        texts.append(f"{name} {' or '.join(values)} ({_listed(_names(having, groups), '; ')} only)")
    return texts


def _differing(flags: Sequence[dict[str, str]]) -> set[str]:
    """The names that all have, with more than one value."""
    names = set.intersection(*map(set, flags))
    return {name for name in names if len({one[name] for one in flags}) > 1}


def _names(some: list[Group], groups: list[Group]) -> list[str]:
    """The labels of some groups, in short that of their algorithm where they are all groups that it
    has.
    """
    names = []
    for group in some:
        is_whole = all(
            any(one is other for other in some)
            for one in groups
            if one.algorithm == group.algorithm
        )
        names.append(group.algorithm if is_whole else group.label)
    return list(dict.fromkeys(names))


def _listed(names: Sequence[str], between: str = ", ") -> str:
    """The names in one text, of many the first ones and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return between.join(names[:3] if more else names) + more


def say(notes: Iterable[str]) -> None:
    """Print notes to stderr."""
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


GRID = 400  # points of a curve at most; more than a picture can show


def align(
    logged: Sequence[Series], x: Literal["env_steps", "wall"] = "env_steps", hold: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Places [P] and the numbers of all seeds of all series there [S, P], interpolated linearly.

    The places are those that any series has; GRID evenly spaced ones where they are more. A seed is
    NaN before its first number and after its last one, which it keeps with `hold`.
    """
    ats = [one.steps if x == "env_steps" else one.wall for one in logged]
    places = np.unique(np.concatenate([at[np.isfinite(at)] for at in ats]))
    places = np.linspace(places[0], places[-1], GRID) if len(places) > GRID else places
    rows = [
        _interpolate(places, at, y, hold)
        for at, one in zip(ats, logged, strict=True)
        for y in one.values.T
    ]
    return places, np.stack(rows)


def _interpolate(places: np.ndarray, x: np.ndarray, y: np.ndarray, hold: bool) -> np.ndarray:
    # So that of equal places the last counts
    there = np.flatnonzero(np.isfinite(x) & np.isfinite(y))[::-1]
    if not len(there):
        return np.full(len(places), np.nan)
    at, first = np.unique(x[there], return_index=True)
    return np.interp(places, at, y[there][first], np.nan, None if hold else np.nan)


def final_returns(log: Log) -> tuple[np.ndarray, bool]:
    """Returns [S] of the last greedy evaluation, or of training where there is none; NaN without.
    And which it is.
    """
    if EVALUATION in log.series:
        return log.series[EVALUATION].values[-1], False
    if TRAINING not in log.series:
        return np.full(1, math.nan), True
    return np.array(
        [[math.nan, *y[np.isfinite(y)]][-1] for y in log.series[TRAINING].values.T]
    ), True
