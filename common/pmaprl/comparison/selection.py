"""Runs that a command selects, read and grouped."""

import difflib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pmaprl.cli.checks import check_flags
from pmaprl.cli.errors import UsageError, printable
from pmaprl.cli.files import is_run
from pmaprl.comparison.groups import Group, group
from pmaprl.comparison.logged_runs import once_each, read_parts
from pmaprl.comparison.notes import with_notes
from pmaprl.runs.estimates import Kind
from pmaprl.runs.results import has_damaged_result

RUNS = tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")


@dataclass(kw_only=True)
class Selection:
    """Flags that select runs, and say how they are grouped and averaged."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], RUNS] = ()
    """Run directories, such as runs/*."""
    by: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FLAG"), tyro.conf.UseAppendAction] = ()
    """Make a line for each value of this flag, such as clip_eps; several: FLAG,FLAG."""
    estimate: Kind = "iqm"
    """Average over seeds: iqm (no lowest and highest quarter; below 4 seeds the mean) or mean."""

    def __post_init__(self):
        check_flags(self)
        words = [word for text in self.by for word in text.split(",")]
        names = [word.strip().removeprefix("--").replace("-", "_") for word in words]
        self.by = tuple(dict.fromkeys(names))


def load(selection: Selection, metrics: Iterable[str]) -> list[Group]:
    """Read the runs of `selection` in sorted groups, which have their notes.

    Runs without metrics, folders that are no run and repetitions of a run are left out, with a note
    each on stderr.

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
    each_seed = "seed" in selection.by
    runs = [run for path in paths for run in read_parts(path, metrics, each_seed)]
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
    say(repeated)
    return with_notes(group(counted, selection.by))


def suggest(name: str, known: Iterable[str]) -> str:
    """Hint at the `known` names that are near `name`; list all of them if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known)
    if name and not near:
        near = [candidate for candidate in known if name in candidate]
    if near:
        return f"did you mean {' or '.join(near[:5])}?"
    return f"there are {', '.join(known)}"


def say(notes: Iterable[str]) -> None:
    """Print notes to stderr."""
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
