"""Groups of runs to plot and compare, their metrics at common steps, and notes on both."""

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
    """Flags that select runs, and say how they are grouped and averaged."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], RUNS] = ()
    """Run directories, such as runs/*."""
    by: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FLAG"), tyro.conf.UseAppendAction] = ()
    """Split the runs of an algorithm by this flag too; several with commas or repeated."""
    estimate: Kind = "iqm"
    """Average over seeds: iqm (no lowest and highest quarter; below 4 seeds the mean) or mean."""

    def __post_init__(self):
        check_flags(self)
        words = [word for text in self.by for word in text.split(",")]
        names = [word.strip().removeprefix("--").replace("-", "_") for word in words]
        self.by = tuple(dict.fromkeys(names))


class LoggedRun(NamedTuple):
    """A run directory, read.

    A population becomes several of these: members with the same flags, as if they had run alone.
    """

    path: Path
    algorithm: str
    flags: dict[str, Any]
    seeds: list[int]
    log: Log
    checksum: str | None = None  # checksum of the final state; None while the run goes on
    copies: tuple[Path, ...] = ()  # equal runs, which are not counted
    codes: tuple[str, ...] = ()  # checksums of all versions of the algorithm's file that it used

    @property
    def meaning(self) -> dict[str, str]:
        """The flags that decide what is learned, as JSON."""
        return {
            name: json.dumps(value)
            for name, value in self.flags.items()
            if name not in FLAGS_WITHOUT_EFFECT
        }


class Group(NamedTuple):
    """Runs of one algorithm and recipe, in one environment, with equal values of the --by flags."""

    env: str
    algorithm: str
    variant: dict[str, Any]  # values of the --by flags, without flags that the algorithm lacks
    runs: list[LoggedRun]

    @property
    def key(self) -> str:
        """Name of the group without anything shortened, unlike the label."""
        return json.dumps([self.algorithm, self.variant])

    @property
    def label(self) -> str:
        """Name of the group in legends, such as `ppo_pmap, clip_eps 0.2`."""
        values = [f"{name} {flag_text(value)}" for name, value in self.variant.items()]
        return ", ".join([self.algorithm, *values])


def load(selection: Selection, metrics: Iterable[str]) -> list[Group]:
    """Read the runs of `selection` in sorted groups.

    Runs without metrics, folders that are no run and repetitions of a run are left out, with a note
    each. Further notes name the flags in which the runs of a group, and the groups, differ.

    Args:
        selection: The runs, and the flags that split them.
        metrics: Names of the metrics to read.

    Raises:
        UsageError: No run is named, a run is broken, no run has metrics yet, or no run has a flag
            of `by`.
    """
    if not selection.runs:
        raise UsageError("name at least one run directory, such as runs/NAME or runs/*")
    by_path = {Path(run).resolve(): Path(run) for run in selection.runs}
    paths = list(by_path.values())
    not_runs = [path for path in paths if path.exists() and not is_run(path)]
    if len(not_runs) < len(paths):  # otherwise nothing is left, which is an error below
        say(f"{path}: no run directory, left out" for path in not_runs)
        paths = [path for path in paths if path not in not_runs]
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
    with_metrics = {run.path for run in logged}
    without_metrics = [path for path in paths if path not in with_metrics]
    say(f"{path}: no metrics yet, left out" for path in without_metrics)
    say(f"{path}: its result.json is damaged" for path in paths if has_damaged_result(path))
    counted, repeated = once_each(logged)
    groups = group(counted, selection.by)
    say([*repeated, *mixed_flags_notes(groups), *side_by_side(groups)])
    return groups


def _parts(path: Path, metrics: Iterable[str]) -> Iterator[LoggedRun]:
    """Read a run, split into members with equal flags.

    A population with PBT is one part, because its members change their values.
    """
    config = read_config(path)
    log = read_log(path, metrics)
    checksum = checksum_of(path)
    flags = config["args"]
    algorithm = config["algorithm"]
    recipe = flags.get("recipe") or ""
    if recipe not in algorithm:
        algorithm += f" ({recipe})"
    algorithm = shortened(printable(algorithm))
    flags = flags | {"env": shortened(printable(flags["env"]))}
    members = config.get("members") or _members_by_seed(flags)
    alike = {}
    for index, member in enumerate(members):
        values = {name: value for name, value in member.items() if name != "seed"}
        if flags.get("pbt"):
            values = {}
        alike.setdefault(json.dumps(values), []).append(index)
    for values, indices in alike.items():
        seeds = [members[index]["seed"] for index in indices]
        try:
            part = log.of(indices, len(members))
        except UsageError as error:
            raise UsageError(f"{path}/metrics.jsonl: {error}") from error
        yield LoggedRun(
            path=path,
            algorithm=algorithm,
            flags=flags | json.loads(values) | {"seed": seeds[0]},
            seeds=seeds,
            log=part,
            checksum=checksum,
            codes=_codes(config),
        )


def _members_by_seed(flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Members of a run that differ in their seed only."""
    first = flags.get("seed", 0)
    count = flags.get("num_seeds", 1)
    return [{"seed": seed} for seed in range(first, first + count)]


def _codes(config: dict[str, Any]) -> tuple[str, ...]:
    """The checksums of the algorithm's file in `config.json`, including those before a resume."""
    codes = [config.get("script_sha256")]
    earlier = config.get("earlier_scripts")
    if isinstance(earlier, list):
        codes += earlier
    return tuple(str(code) for code in codes if code)


def once_each(runs: Iterable[LoggedRun]) -> tuple[list[LoggedRun], list[str]]:
    """Leave out repetitions: runs with the same flags, seeds, metrics and final state.

    A repetition says nothing about other seeds, and would make intervals too narrow.

    Returns:
        The other runs, and a note on each repetition.
    """
    places: dict[str, int] = {}
    counted = []
    notes = []
    for run in runs:
        identity = _identity(run)
        if run.checksum and identity in places:
            first = counted[places[identity]]
            counted[places[identity]] = first._replace(copies=(*first.copies, run.path))
            notes.append(
                f"{run.path}: equal to {first.path} in flags, seeds and result, counted once"
            )
        else:
            places[identity] = len(counted)
            counted.append(run)
    return counted, list(dict.fromkeys(notes))


def _identity(run: LoggedRun) -> str:
    """Text that two runs share only if one repeats the other."""
    logged = {
        name: (series.steps.tolist(), series.values.tolist())
        for name, series in run.log.series.items()
    }
    parts = [
        run.algorithm,
        run.flags["env"],
        run.meaning,
        run.seeds,
        run.checksum,
        logged,
    ]
    return json.dumps(parts, sort_keys=True)


def suggest(name: str, known: Iterable[str]) -> str:
    """Hint at the `known` names that are near `name`; list all of them if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known)
    if name and not near:
        near = [candidate for candidate in known if name in candidate]
    if near:
        return f"did you mean {' or '.join(near[:5])}?"
    return f"there are {', '.join(known)}"


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
    "wandb",
    "log_interval",
    "eval_interval",
    "checkpoint_interval",
    "keep_checkpoints",
    "keep_best",
    "log_each",
}
FLAGS_WITHOUT_EFFECT |= {name for name in ONE_TIME if name != "init_from"}
"""Flags that do not change what is learned, or by which runs are grouped anyway."""


def group(runs: Iterable[LoggedRun], by: tuple[str, ...] = ()) -> list[Group]:
    """Group runs by environment, algorithm and the flags `by`, and sort the groups."""
    groups: dict[str, Group] = {}
    for run in _with_versions(list(runs)):
        variant = {name: run.flags[name] for name in by if name in run.flags}
        empty = Group(
            env=run.flags["env"],
            algorithm=run.algorithm,
            variant=variant,
            runs=[],
        )
        groups.setdefault(json.dumps(empty), empty).runs.append(run)

    def order(group: Group) -> tuple:
        values = [_sort_key(value) for value in group.variant.values()]
        return group.env, group.algorithm, values

    return sorted(groups.values(), key=order)


def _with_versions(runs: list[LoggedRun]) -> list[LoggedRun]:
    """Add the file's version to names of algorithms whose files differ within an environment."""
    versions = defaultdict(set)
    for run in runs:
        versions[run.flags["env"], run.algorithm].add(run.codes)
    named = []
    for run in runs:
        if len(versions[run.flags["env"], run.algorithm]) > 1:
            version = " after ".join(code[:6] for code in run.codes)
            run = run._replace(algorithm=f"{run.algorithm} [file {version or 'unknown'}]")
        named.append(run)
    return named


def _sort_key(value: Any) -> tuple:
    """Order of a flag's values: numbers by size, then texts."""
    return (0, value, "") if is_number(value) else (1, 0.0, str(value))


def flag_text(value: Any) -> str:
    """A flag's value as it is written on the command line."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return shortened(printable(text))


def mixed_flags_notes(groups: Iterable[Group]) -> list[str]:
    """Notes on groups whose runs differ in more than their seeds."""
    places = defaultdict(list)
    for group in groups:
        text = _mixed_flags_note(group)
        if text:
            places[text].append(f"{group.label} in {group.env}")
    return [f"{_listed(names, '; ')}: {text}" for text, names in places.items()]


def _mixed_flags_note(group: Group) -> str:
    """The note on one group; empty if its runs differ in their seeds only."""
    differing = sorted(_differing([run.meaning for run in group.runs]))
    if differing:
        names = ", ".join(differing)
        return f"runs with different {names} are put together, --by {differing[0]} tells them apart"
    counts = Counter(seed for run in group.runs for seed in run.seeds)
    repeated = sorted(seed for seed, count in counts.items() if count > 1)
    if repeated:
        seeds = _listed([str(seed) for seed in repeated])
        return f"seeds {seeds} count more than once, so intervals are too narrow"
    return ""


def side_by_side(groups: Iterable[Group]) -> list[str]:
    """One note for each environment whose groups differ in flags other than those of --by."""
    by_env = defaultdict(list)
    for group in groups:
        by_env[group.env].append(group)
    notes = [_side_by_side(env, several) for env, several in by_env.items()]
    return [note for note in notes if note]


def _side_by_side(env: str, groups: list[Group]) -> str:
    """The note on one environment; empty if its groups do not differ."""
    meanings = [group.runs[0].meaning for group in groups]
    by = set().union(*(group.variant for group in groups))
    texts = []
    for name in sorted(_differing(meanings) - by):
        groups_with = defaultdict(list)
        for group, flags in zip(groups, meanings, strict=True):
            value = flag_text(json.loads(flags[name]))
            groups_with[value].append(group)
        values = [f"{value} ({_group_names(some, groups)})" for value, some in groups_with.items()]
        texts.append(f"{name} {' or '.join(values)}")
    texts += _flags_of_some(groups, meanings, by)
    if not texts:
        return ""
    return f"{env}: side by side are different flags: {'; '.join(texts)}"


# A fork has few flags that the original lacks; of different algorithms, dozens would be named
MOST_FLAGS_OF_SOME = 3


def _flags_of_some(groups: list[Group], meanings: list[dict[str, str]], by: set[str]) -> list[str]:
    """Flags that only some algorithms have, such as `bonus 0.2 (my_ppo only)`.

    None are named where algorithms differ in many flags.
    """
    in_some = set().union(*meanings)
    in_all = set.intersection(*map(set, meanings))
    names = sorted(in_some - in_all - by)
    if len(names) > MOST_FLAGS_OF_SOME:
        return []
    texts = []
    for name in names:
        groups_with = []
        values = {}
        for group, flags in zip(groups, meanings, strict=True):
            if name in flags:
                groups_with.append(group)
                values[flag_text(json.loads(flags[name]))] = True
        texts.append(f"{name} {' or '.join(values)} ({_group_names(groups_with, groups)} only)")
    return texts


def _differing(flags: Sequence[dict[str, str]]) -> set[str]:
    """Names of the flags that all runs have and that have more than one value."""
    names = set.intersection(*map(set, flags))
    return {name for name in names if len({values[name] for values in flags}) > 1}


def _group_names(some: list[Group], groups: list[Group]) -> str:
    """Labels of some groups, or the name of an algorithm if all of its groups are among them."""
    names = {}
    chosen = {id(group) for group in some}
    for group in some:
        siblings = [sibling for sibling in groups if sibling.algorithm == group.algorithm]
        is_whole = all(id(sibling) in chosen for sibling in siblings)
        names[group.algorithm if is_whole else group.label] = True
    return _listed(list(names), "; ")


def _listed(names: Sequence[str], between: str = ", ") -> str:
    """The names in one text; if they are many, the first three and the number of the rest."""
    if len(names) <= 4:
        return between.join(names)
    return f"{between.join(names[:3])} and {len(names) - 3} more"


def say(notes: Iterable[str]) -> None:
    """Print notes to stderr."""
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)


GRID = 400  # most points of a curve; a picture cannot show more


def align(
    logged: Sequence[Series], x: Literal["env_steps", "wall"] = "env_steps", hold: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate all seeds of all series linearly at the same places.

    The places are those of all series, or GRID evenly spaced ones if they are more.

    Args:
        logged: The series.
        x: The horizontal axis.
        hold: Keep the last number of a seed after its end, instead of NaN.

    Returns:
        The places [P], and the numbers [S, P]. A seed is NaN before its first number.
    """
    xs = [series.steps if x == "env_steps" else series.wall for series in logged]
    finite = [places[np.isfinite(places)] for places in xs]
    places = np.unique(np.concatenate(finite))
    if len(places) > GRID:
        places = np.linspace(places[0], places[-1], GRID)
    rows = []
    for run_places, series in zip(xs, logged, strict=True):
        rows += [_interpolate(places, run_places, y, hold) for y in series.values.T]
    return places, np.stack(rows)


def _interpolate(places: np.ndarray, x: np.ndarray, y: np.ndarray, hold: bool) -> np.ndarray:
    """Interpolate the finite points (x, y) linearly; at equal places the last one counts."""
    finite = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if not len(finite):
        return np.full(len(places), np.nan)
    backwards = finite[::-1]  # np.unique returns the first of equal places
    known_places, first = np.unique(x[backwards], return_index=True)
    values = y[backwards][first]
    after = None if hold else np.nan
    return np.interp(places, known_places, values, np.nan, after)


def final_returns(log: Log) -> tuple[np.ndarray, bool]:
    """Find the last return of each seed.

    Returns:
        The returns [S] of the last greedy evaluation, or of training if there was none, NaN where
        nothing is known; and True if they are of training.
    """
    if EVALUATION in log.series:
        return log.series[EVALUATION].values[-1], False
    if TRAINING not in log.series:
        return np.full(1, math.nan), True
    returns = []
    for values in log.series[TRAINING].values.T:
        finite = values[np.isfinite(values)]
        returns.append(finite[-1] if len(finite) else math.nan)
    return np.array(returns), True
