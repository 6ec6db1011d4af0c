"""Notes on flags in which compared runs differ."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from pmaprl.comparison.groups import Group, flag_text


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
