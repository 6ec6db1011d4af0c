"""Checks of flags: their types, whole numbers in any spelling, and bounds."""

import dataclasses
import math
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from common.cli.errors import UsageError


def _parse_count(words: list[str]) -> int:
    value = float(words[0].replace("_", ""))
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{words[0]} is not a whole number")
    return int(value) if "e" in words[0].lower() or "." in words[0] else int(words[0])


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=_parse_count,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""An integer that may also be written 1e6 or 1_000_000."""


def check(args: Any, names: str, at_least=-math.inf, at_most=math.inf, above=-math.inf) -> None:
    """Raise UsageError unless each of the named numbers (or each of its elements) is finite and within the bounds."""
    for name in names.split():
        value = getattr(args, name)
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if at_least <= number <= at_most and number > above and math.isfinite(number):
                continue
            bounds = [("at least", at_least), ("at most", at_most), ("greater than", above)]
            rules = [f"{words} {bound}" for words, bound in bounds if math.isfinite(bound)]
            rules += [] if math.isfinite(number) and rules else ["finite"]
            raise UsageError(f"--{name.replace('_', '-')} must be {' and '.join(rules)}, got {number}")


def check_types(args: Any) -> None:
    """Raise UsageError where a value does not have its field's type; whole floats become integers (`1e6`)."""
    for field in dataclasses.fields(args):
        flag = "--" + field.name.replace("_", "-")
        setattr(args, field.name, _typed(flag, getattr(args, field.name), field.type))


def _typed(flag: str, value: Any, kind: Any) -> Any:
    if type(None) in get_args(kind):
        return None if value is None else _typed(flag, value, get_args(kind)[0])
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{flag} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if kind in (int, Count):
        return _whole(flag, value)
    if get_origin(kind) is tuple:
        if not isinstance(value, (tuple, list)):
            raise UsageError(f"{flag} must be a sequence of whole numbers, got {value!r}")
        if not value:
            raise UsageError(f"{flag} needs at least one number")
        return tuple(_whole(flag, number) for number in value)
    if kind is float and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise UsageError(f"{flag} must be a number, got {value!r}")
    if kind in (bool, str) and not isinstance(value, kind):
        raise UsageError(f"{flag} must be a {kind.__name__}, got {value!r}")
    return value


def _whole(flag: str, value: Any) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value != int(value)
    ):
        raise UsageError(f"{flag} must be a whole number, got {value!r}")
    return int(value)
