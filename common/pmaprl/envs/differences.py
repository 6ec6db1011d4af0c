"""Differences between two environments that change what the parameters of a policy mean."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmaprl.cli.errors import UsageError, shortened
from pmaprl.envs.bytes import is_bytes, spec_with_byte_max
from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import (
    Box,
    EnvSpec,
    Leaf,
    MultiDiscrete,
    Space,
    byte_range,
    is_image,
    map_leaves,
)

CLOSE = 1e-6  # relative distance of equal bounds: those of older runs were rounded otherwise


class Property(NamedTuple):
    """One thing in which spaces may differ."""

    name: str
    value: str | np.ndarray  # a text, or numbers [n, k], a row for each number of an element


class Side(NamedTuple):
    """Spaces of observations or of actions, and what is compared of them."""

    space: Space
    dtype: Any  # a type for each leaf, None where it is unknown
    channels_first: tuple[str, ...]
    is_action: bool
    exact: bool  # True: also what networks do not see


def difference(
    then: EnvSpec,
    now: EnvSpec,
    when: tuple[str, str] = ("then", "now"),
    exact: bool = False,
    has_types: bool = True,
) -> str:
    """Name the first difference between two environments, in words.

    Kinds, names, numbers and order of parts, shapes, types and choices count, and so do bounds by
    which actions are scaled and bytes divided. Networks do not see other bounds of observations,
    nor the place of channels at the environment: these count if `exact`. The names of the
    environments do not count.

    Args:
        then: one environment.
        now: the other one.
        when: words for the two.
        exact: compare what networks do not see too.
        has_types: False if `then` has neither types nor shapes of actions, as in older runs.

    Returns:
        Words such as "bounds of the action: -1.0 to 1.0 then, -2.0 to 2.0 now", or "".
    """
    pairs = zip(_sides(then, exact, has_types), _sides(now, exact, has_types), strict=True)
    for kind, pair in zip(("observation", "action"), pairs, strict=True):
        properties = zip(*(_properties(side, kind, "") for side in pair), strict=False)
        for old, new in properties:  # of equal structure, up to the first difference
            row = _first_row(old.value, new.value)
            if row is None:
                continue
            where = f", number {row}" if row > 0 else ""
            values = f"{_text(old.value, row)} {when[0]}, {_text(new.value, row)} {when[1]}"
            return f"{old.name}{where}: {values}"
    return ""


def difference_from_run(
    run_dir: str | Path,
    config: dict[str, Any],
    now: EnvSpec,
    exact: bool = False,
) -> str:
    """Name the first difference from the environment of a run, as `difference` does.

    Args:
        run_dir: the run's directory.
        config: the content of its `config.json`.
        now: the other environment.
        exact: compare what networks do not see too.

    Raises:
        UsageError: the run does not say what its spaces are.
    """
    if "env_spec" not in config:  # an old run
        return ""
    then = spec_of_run(run_dir, config)
    return difference(then, now, exact=exact, has_types=has_types_of_actions(config))


def has_types_of_actions(config: dict[str, Any]) -> bool:
    """True if the run with this `config.json` has stored types and shapes of actions."""
    return "channels_first" in config["env_spec"]  # which came with the same version


def spec_of_run(run_dir: str | Path, config: dict[str, Any]) -> EnvSpec:
    """Read the spec of a run's environment from its `config.json`.

    Raises:
        UsageError: the run does not say what its spaces are.
    """
    try:
        spec = EnvSpec.from_json(config["env_spec"])
        return spec_with_byte_max(spec, config["args"].get("byte_max", 0))
    except Exception as error:
        raise UsageError(
            f"{run_dir} does not say what its observations and actions are: {error!r}"
        ) from error


def _sides(spec: EnvSpec, exact: bool, has_types: bool) -> tuple[Side, Side]:
    """Observations and actions of an environment."""

    def dtype_of(leaf: Leaf) -> np.dtype | None:
        usual = np.float32 if isinstance(leaf, Box) else np.int32
        return np.dtype(leaf.dtype or usual) if has_types else None

    observations = Side(
        space=spec.observation_space,
        dtype=spec.obs_dtype,
        channels_first=spec.channels_first,
        is_action=False,
        exact=exact,
    )
    actions = Side(
        space=spec.action_space,
        dtype=map_leaves(dtype_of, spec.action_space),
        channels_first=(),
        is_action=True,
        exact=exact,
    )
    return observations, actions


def _properties(side: Side, kind: str, name: str) -> Iterator[Property]:
    """Properties of a space and of its parts, those of the whole before those of its parts.

    Args:
        side: the space.
        kind: name of the whole in words.
        name: name of this part in the whole, "" for the whole.
    """
    space = side.space
    what = f"{kind} {name}".strip()
    if isinstance(space, Leaf):
        yield from _of_leaf(side, space, what, name)
        return
    has_names = isinstance(space, Mapping)
    texts = ", ".join(map(repr, space)) if has_names else f"{len(space)} without names"
    yield Property(f"kind of the {what}", "parts")
    yield Property(f"parts of the {what}", texts)
    for key, part in space.items() if isinstance(space, Mapping) else enumerate(space):
        inner = side._replace(space=part, dtype=side.dtype[key])
        yield from _properties(inner, kind, f"{name}/{key}" if name else str(key))


def _of_leaf(side: Side, leaf: Leaf, what: str, name: str) -> Iterator[Property]:
    has_shape = side.dtype is not None or not isinstance(leaf, MultiDiscrete)
    yield Property(f"kind of the {what}", type(leaf).__name__)
    yield Property(f"shape of the {what}", str(list(leaf.shape)) if has_shape else "")
    is_hidden = not side.is_action and is_mask(name)  # networks do not see a mask
    if side.exact or not is_hidden:
        yield Property(f"type of the {what}", str(side.dtype or ""))
    if not isinstance(leaf, Box):
        yield Property(f"choices of the {what}", np.array(leaf.nvec)[:, None])
        return
    low = leaf.low
    high = leaf.high
    is_divided = not is_hidden and not side.is_action and is_bytes(leaf, side.dtype)
    if is_divided and not side.exact:
        low, size = byte_range(leaf)
        high = low + size
    if side.exact or side.is_action or is_divided:
        yield Property(f"bounds of the {what}", np.stack([np.ravel(low), np.ravel(high)], axis=-1))
    if side.exact and is_image(leaf):
        order = "first" if name in side.channels_first else "last"
        yield Property(f"channels of the {what}", order)


def _first_row(old: str | np.ndarray, new: str | np.ndarray) -> int | None:
    """Index of the first row of numbers that differs; -1 for texts, None without a difference."""
    if isinstance(old, str) or isinstance(new, str):
        return -1 if old != new else None
    if len(old) != len(new):
        return -1
    is_close = np.isclose(old, new, rtol=CLOSE, atol=0).all(axis=-1)
    return None if is_close.all() else int(np.argmin(is_close))


def _text(value: str | np.ndarray, row: int) -> str:
    if isinstance(value, str):
        return shortened(value)
    if row < 0:
        return f"{len(value)}"
    return " to ".join(str(number) for number in value[row])
