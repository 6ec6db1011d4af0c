"""Groups of runs that are averaged, and plotted or listed as one."""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from pmaprl.cli.errors import printable, shortened
from pmaprl.comparison.logged_runs import LoggedRun
from pmaprl.runs.metrics import is_number


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
