"""Checks of flags: their kinds, whole numbers in any spelling, and bounds."""

import dataclasses
import math
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro

from common.cli.errors import UsageError

LARGEST = 2**31 - 1
"""What the devices can count up to."""


class Word(str):
    """A word of the command line where a number or a choice belongs; `check_types` makes one of it."""


WORDS = tyro.constructors.ConstructorRegistry()
"""The rule by which tyro leaves words to `check_types`: it says what is wrong with them as it does in Python."""


@WORDS.primitive_rule
def _leave(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    metavar = _metavar(info.type)
    if not metavar:
        return None  # tyro's own ways, for texts and switches
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: Word(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _metavar(kind: Any) -> str:
    """What --help shows for a number or a choice; empty for other kinds."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if _is_union(kind):
        return "|".join(filter(None, map(_metavar, get_args(kind))))
    return {int: "INT", float: "FLOAT"}.get(kind, "")


Suite = Annotated[
    str,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[SUITE]",
        instance_from_str=lambda words: " ".join(words) or "all",
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    ),
]
"""The name of a suite of environments, or "all" where a flag stands without one."""


def check(args: Any, names: str, at_least=-math.inf, at_most=math.inf, above=-math.inf) -> None:
    """Raise UsageError unless each of the named numbers (or each of its elements) is finite and within the bounds.

    Whole numbers have to be at most LARGEST where `at_most` says nothing.
    """
    for name in names.split():
        value = getattr(args, name)
        if value == ():
            raise UsageError(f"{_flag(name)} needs at least one number")
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            most = LARGEST if isinstance(number, int) and at_most == math.inf else at_most
            if at_least <= number <= most and number > above and abs(number) < math.inf:
                continue
            bounds = [("at least", at_least), ("at most", most if number > most else at_most), ("greater than", above)]
            rules = [f"{words} {bound}" for words, bound in bounds if math.isfinite(bound)]
            rules += [] if abs(number) < math.inf and rules else ["finite"]
            raise UsageError(f"{_flag(name)} must be {' and '.join(rules)}, got {number}")


def multiples_near(number: int, unit: int) -> str:
    """The multiples of `unit` around `number`, in words."""
    near = {max(number // unit, 1) * unit, -(-number // unit) * unit}
    return " or ".join(map(str, sorted(near)))


def check_types(args: Any) -> None:
    """Raise UsageError where a value does not have its field's type; whole floats become integers (`1e6`)."""
    for field in dataclasses.fields(args):
        setattr(args, field.name, _typed(_flag(field.name), getattr(args, field.name), field.type))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _typed(flag: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return _typed(flag, value, get_args(kind)[0])
    if get_origin(kind) is tuple:
        if not isinstance(value, (tuple, list)):
            raise UsageError(f"{flag} must be a sequence, got {value!r}")
        return tuple(_typed(flag, element, get_args(kind)[0]) for element in value)
    options = get_args(kind) if _is_union(kind) else (kind,)
    for option in options:
        with suppress(ValueError, OverflowError):
            return _read(value, option)
    described = " or ".join(_described(option) for option in options if option is not NoneType)
    raise UsageError(f"{flag} must be {described}, got {value!r}")


def _read(value: Any, kind: Any) -> Any:
    """`value` as a number, a choice, a text, a switch or nothing. Raises ValueError where it is none."""
    if kind is int:
        return _whole(value)
    if kind is float and isinstance(value, (int, Word)) and not isinstance(value, bool):
        return float(value)
    if kind is NoneType and value == "None":
        return None
    if get_origin(kind) is Literal and value in get_args(kind):
        return str(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise ValueError


def _whole(value: Any) -> int:
    if isinstance(value, Word):
        value = float(value) if set(value.lower()) & set(".e") else int(value)  # which is exact, however long
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    return value


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}[kind]


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)
