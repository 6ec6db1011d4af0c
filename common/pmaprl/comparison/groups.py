"""Groups of runs that are averaged, and plotted or listed as one."""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from pmaprl.cli.env_flags import PREFIX
from pmaprl.comparison.logged_runs import LoggedRun, flag_text
from pmaprl.runs.metrics import is_number

# Flags that decide what a return is a return of, and their values in runs that lack them
TASK_FLAGS = {"env_params": "", "eval_env_params": "", "opponent": "random"}


class Group(NamedTuple):
    """Runs of one algorithm and recipe at one task, with equal values of the --by flags."""

    env: str
    algorithm: str
    # Values of the --by flags that the algorithm has, and of the task's flags that differ
    variant: dict[str, Any]
    runs: list[LoggedRun]
    notes: tuple[str, ...] = ()  # what a reader of the line has to know

    @property
    def key(self) -> str:
        """Name of the group without anything shortened, unlike the label."""
        return json.dumps([self.algorithm, self.variant])

    @property
    def label(self) -> str:
        """Name of the group in legends, such as `ppo_pmap, clip_eps 0.2`."""
        values = [f"{name} {variant_text(value)}" for name, value in self.variant.items()]
        return ", ".join([self.algorithm, *values])


def group(runs: Iterable[LoggedRun], by: tuple[str, ...] = ()) -> list[Group]:
    """Group runs by environment, algorithm and the flags `by`, and sort the groups.

    Returns of different tasks have no common mean, so runs of an environment are split as well by
    the flags of the task in which they differ.
    """
    runs = list(runs)
    tasks = _differing_tasks(runs)
    groups: dict[str, Group] = {}
    for run in _with_versions(runs):
        variant = {name: run.flags[name] for name in by if name in run.flags}
        variant = variant | _task_of(run, tasks[run.flags["env"]])
        empty = Group(
            env=run.flags["env"],
            algorithm=run.algorithm,
            variant=variant,
            runs=[],
        )
        groups.setdefault(json.dumps(empty), empty).runs.append(run)

    def order(group: Group) -> tuple:
        values = [sort_key(value) for value in group.variant.values()]
        return group.env, group.algorithm, values

    return sorted(groups.values(), key=order)


def is_of_task(name: str) -> bool:
    """True for flags that decide what a return is a return of."""
    return name in TASK_FLAGS or name.startswith(PREFIX)


def _task_of(run: LoggedRun, names: Iterable[str]) -> dict[str, Any]:
    """Values of some flags of a run's task."""
    values = {}
    for name in names:
        if name in run.flags or name in TASK_FLAGS:
            values[name] = run.flags.get(name, TASK_FLAGS.get(name))
    return values


def _differing_tasks(runs: list[LoggedRun]) -> dict[str, list[str]]:
    """Names of the flags in which the tasks of an environment's runs differ, by environment."""
    runs_of = defaultdict(list)
    for run in runs:
        runs_of[run.flags["env"]].append(run)
    found = {}
    for env, several in runs_of.items():
        names = dict.fromkeys(name for run in several for name in run.flags if is_of_task(name))
        found[env] = []
        for name in names:
            values = {json.dumps(_task_of(run, [name])) for run in several}
            if len(values) > 1:
                found[env].append(name)
    return found


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


def sort_key(value: Any) -> tuple:
    """Order of a flag's values: numbers by size, then texts."""
    return (0, value, "") if is_number(value) else (1, 0.0, str(value))


def variant_text(value: Any) -> str:
    """A flag's value in the name of a line, in which it cannot be empty."""
    return "default" if value == "" else flag_text(value)
