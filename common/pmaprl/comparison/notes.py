"""Notes on what a reader has to know of the lines of a comparison."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from pmaprl.cli.env_flags import PREFIX, unswept_text
from pmaprl.comparison.groups import Group, is_of_task, sort_key
from pmaprl.comparison.logged_runs import LoggedRun, flag_text


def with_notes(groups: Iterable[Group]) -> list[Group]:
    """Add to each group the notes on what its runs differ in, and on how they were trained."""
    return [group._replace(notes=tuple(_notes(group.runs))) for group in groups]


def listed_notes(groups: Iterable[Group]) -> list[str]:
    """The notes of groups, each once, with the lines that it is on, and those on environments."""
    groups = list(groups)
    places = defaultdict(list)
    for group in groups:
        for note in group.notes:
            places[note].append(f"{group.label} in {group.env}")
    notes = [f"{_listed(names, '; ')}: {text}" for text, names in places.items()]
    return [*notes, *(f"{env}: {text}" for env, text in side_by_side(groups).items())]


def _notes(runs: list[LoggedRun]) -> list[str]:
    notes = []
    meanings = [run.meaning for run in runs]
    differing = sorted(_differing([{x: (text,) for x, text in run.items()} for run in meanings]))
    if differing:
        texts = []
        for name in differing:
            values = sorted({flags[name] for flags in meanings}, key=_json_key)
            texts.append(f"{name} ({_text(values, ' or ')})")
        notes.append(
            f"runs with different {_listed(texts)} are put together, --by {differing[0]} tells "
            "them apart"
        )
    counts = Counter(seed for run in runs for seed in run.seeds)
    repeated = sorted(seed for seed, count in counts.items() if count > 1)
    if repeated:
        seeds = _listed([str(seed) for seed in repeated])
        some = f"seed {seeds} counts" if len(repeated) == 1 else f"seeds {seeds} count"
        notes.append(f"{some} more than once, so intervals are too narrow")
    return [*notes, *_changed_flags(runs), *_tasks_of_members(runs)]


def _changed_flags(runs: list[LoggedRun]) -> list[str]:
    """The note on flags that a resume changed."""
    changed = [run for run in runs if any(name in run.meaning for name in run.changed)]
    texts = {}
    for run in changed:
        for name in run.changed:
            if name in run.meaning:
                texts[f"{name} was {run.flags[name]}"] = True
    if not changed:
        return []
    some = f" of {len(changed)} of {len(runs)} runs" if len(runs) > 1 else ""
    return [f"flags changed at a resume{some}: {_listed(list(texts), '; ')}"]


def _tasks_of_members(runs: list[LoggedRun]) -> list[str]:
    """The note on members that are evaluated in another environment than they train in."""
    swept = {}
    for run in runs:
        names = [name for name in run.flags if name.startswith(PREFIX)]
        if names:
            swept[unswept_text(names, str(run.flags.get("env_params", "")))] = True
    return [f"greedy returns are {text}" for text in swept]


def side_by_side(groups: Iterable[Group]) -> dict[str, str]:
    """Notes, by environment, on flags other than those of --by in which its groups differ."""
    by_env = defaultdict(list)
    for group in groups:
        by_env[group.env].append(group)
    notes = {env: _side_by_side(several) for env, several in by_env.items()}
    return {env: note for env, note in notes.items() if note}


EVALUATED = {"env_params", "eval_env_params"}  # flags of the task that evaluations have too
Values = dict[str, tuple[str, ...]]  # all values of each flag in the runs of a group, as JSON


def _side_by_side(groups: list[Group]) -> str:
    """The note on one environment; empty if its groups do not differ."""
    values_of = [_values(group) for group in groups]
    by = set().union(*(group.variant for group in groups))
    texts = []
    for name in sorted(_differing(values_of) - by):
        groups_with = defaultdict(list)
        for group, values in zip(groups, values_of, strict=True):
            groups_with[_text(values[name])].append(group)
        parts = [f"{value} ({_group_names(some, groups)})" for value, some in groups_with.items()]
        texts.append(f"{name} {' or '.join(parts)}")
    texts += _flags_of_some(groups, values_of, by)
    notes = [f"these lines differ in {'; '.join(texts)}"] if texts else []
    tasks = [name for name in _differing([group.variant for group in groups]) if is_of_task(name)]
    if tasks:
        are_evaluated_alike = not EVALUATED & set(tasks)
        kind = "training returns" if are_evaluated_alike else "returns"
        notes.append(f"{kind} of different {', '.join(sorted(tasks))} are no common measure")
    return "; ".join(notes)


def _values(group: Group) -> Values:
    """The values of all flags that decide what a group's runs learn."""
    values = defaultdict(dict)
    for run in group.runs:
        for name, value in run.meaning.items():
            values[name][value] = True
    return {name: tuple(sorted(found, key=_json_key)) for name, found in values.items()}


def _json_key(value: str) -> tuple:
    return sort_key(json.loads(value))


def _text(values: Iterable[str], between: str = " and ") -> str:
    """The values of a flag in one line, such as `0.1 and 1.0`."""
    texts = [flag_text(json.loads(value)) for value in values]
    return _listed([f"'{text}'" if " " in text else text for text in texts], between)


# A fork has few flags that the original lacks; of different algorithms, dozens would be named
MOST_FLAGS_OF_SOME = 3


def _flags_of_some(groups: list[Group], values_of: list[Values], by: set[str]) -> list[str]:
    """Flags that only some algorithms have, such as `bonus 0.2 (my_ppo only)`.

    None are named where algorithms differ in many flags.
    """
    in_some = set().union(*values_of)
    in_all = set.intersection(*map(set, values_of))
    names = sorted(in_some - in_all - by)
    if len(names) > MOST_FLAGS_OF_SOME:
        return []
    texts = []
    for name in names:
        groups_with = []
        found = {}
        for group, values in zip(groups, values_of, strict=True):
            if name in values:
                groups_with.append(group)
                found[_text(values[name])] = True
        texts.append(f"{name} {' or '.join(found)} ({_group_names(groups_with, groups)} only)")
    return texts


def _differing(flags: Sequence[dict]) -> set[str]:
    """Names of the flags that all have and that have more than one value."""
    names = set.intersection(*map(set, flags))
    return {name for name in names if any(values[name] != flags[0][name] for values in flags)}


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
