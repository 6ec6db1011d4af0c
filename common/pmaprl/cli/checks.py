"""Types of flags, which say their bounds and how a population may change them, and the check of
their values.
"""

import dataclasses
import functools
import math
import struct
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from pmaprl.cli.errors import UsageError, shortened

LARGEST = 2**31 - 1  # what the devices can count up to
LARGEST_FLOAT = float(2**128 - 2**104)  # of the devices, which compute in float32
SMALLEST_FLOAT = 2.0**-126  # above 0: to the devices smaller ones are 0
MOST_LAYERS = 200  # hidden or recurrent: each is traced and compiled by itself, several times


class Bounds(NamedTuple):
    """Bounds of a number, or of each of several, which float32 holds too, see `float32_rule`; a
    whole number is at most LARGEST if nothing is said.
    """

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf


class Swept(NamedTuple):
    """Members of a population may differ in this number; --pbt multiplies or divides it by a
    factor.
    """

    # Complement: 1 - x in place of x; share: at most 1
    by: Literal["factor", "complement", "share"] = "factor"


Count = Annotated[int, Bounds(at_least=1)]
CountOrZero = Annotated[int, Bounds(at_least=0)]
Layers = Annotated[int, Bounds(at_least=1, at_most=MOST_LAYERS)]
Steps = Annotated[int, Bounds(at_least=1, at_most=10**18)]
StepsOrZero = Annotated[int, Bounds(at_least=0, at_most=10**18)]
Timeout = Annotated[float, Bounds(above=0)]
Seconds = Annotated[float, Bounds(at_least=0)]
Ratio = Annotated[float, Bounds(above=0)]
Fraction = Annotated[float, Bounds(at_least=0, at_most=1)]
Finite = Annotated[float, Bounds()]
# Numbers in which members of a population may differ, where the algorithm reads them from
# `context.hparams`
Positive = Annotated[float, Bounds(above=0), Swept()]
NonNegative = Annotated[float, Bounds(at_least=0), Swept()]
Discount = Annotated[float, Bounds(at_least=0, at_most=1), Swept("complement")]
AdamBeta = Annotated[float, Bounds(at_least=0, at_most=0.999999), Swept("complement")]
Share = Annotated[float, Bounds(above=0, at_most=1), Swept("share")]
Temperature = Annotated[float, Bounds(at_least=1e-8), Swept()]
Scale = Annotated[float, Bounds(), Swept()]


WORDS = ConstructorRegistry()
"""The rule by which tyro leaves words as they are: classes of flags call `check_flags`, which
converts or refuses.
"""


@WORDS.primitive_rule
def _numbers_and_choices(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    if not any(kind in (int, float) or get_origin(kind) is Literal for kind in _options(info.type)):
        return None  # tyro's own ways, for texts, switches and kinds that are none of ours
    return PrimitiveConstructorSpec(
        1, metavar_of(info.type), lambda x: x[0], lambda x: True, lambda x: [str(x)]
    )


def metavar_of(kind: Any) -> str:
    """Text that --help shows for a value."""
    if spec := note_of(kind, PrimitiveConstructorSpec):
        return spec.metavar
    if get_origin(kind) is Literal:
        return "{" + ",".join(_choices(kind)) + "}"
    if (options := _options(kind)) != (kind,):
        return "|".join(filter(None, map(metavar_of, options)))
    if get_origin(kind) in (tuple, list, dict):
        return " ".join("..." if part is ... else metavar_of(part) for part in get_args(kind))
    return {int: "INT", float: "FLOAT", NoneType: ""}.get(kind, "TEXT")


def check_flags(args: Any) -> None:
    """Raise UsageError where a value is not of its field's type, or out of its bounds; numbers
    become of that type.

    Values of kinds that are none of ours (see `_NAMES`) stay as they are.
    """
    for name, kind in kinds_of(type(args)).items():
        flag = flag_of(name)
        value = getattr(args, name)
        try:
            setattr(args, name, number := converted(value, kind))
        except ValueError:
            wanted = " or ".join(map(_described, _options(kind)))
            raise UsageError(f"{flag} must be {wanted}, got {shortened(repr(value))}") from None
        if bounds := note_of(kind, Bounds):
            check_bounds(flag, number, bounds)
        # Several whole numbers are widths of layers
        is_widths = isinstance(number, tuple) and isinstance(number[0] if number else 0, int)
        if is_widths and len(number) > MOST_LAYERS:
            raise UsageError(
                f"{flag} has {len(number):,} numbers: at most {MOST_LAYERS:,} layers compile "
                "within reason"
            )


def converted(value: Any, kind: Any) -> Any:
    """`value`, which may be a word of the command line, as one of that kind. Raises ValueError
    where it is none.
    """
    for option in _options(kind):
        with suppress(ValueError, TypeError, OverflowError, KeyError):
            return _converted(value, option)
    raise ValueError


def _converted(value: Any, kind: Any) -> Any:
    container = get_origin(kind)
    parts = get_args(kind)
    if container is Literal:
        return {str(choice): choice for choice in parts}[str(value)]
    if container is dict:
        return {converted(key, parts[0]): converted(x, parts[1]) for key, x in dict(value).items()}
    if container in (tuple, list):
        if not isinstance(value, tuple | list):
            raise ValueError
        return container(converted(x, parts[0]) for x in value)
    if kind is NoneType and value == "None":
        return None
    if kind is int and isinstance(value, str):  # in digits it is exact, however long
        value = float(value) if set(value.lower()) & set(".e") else int(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and isinstance(value, str | int) and not isinstance(value, bool):
        return float(value)
    if kind in _NAMES and (
        not isinstance(value, kind) or isinstance(value, bool) and kind is not bool
    ):
        raise ValueError
    return value


def check_bounds(flag: str, value: Any, bounds: Bounds) -> None:
    """Raise UsageError unless the number, or each of several, is within the bounds and one that
    devices can compute with; None is nothing.
    """
    if value in ((), []):
        raise UsageError(f"{flag} needs at least one number")
    at_least, at_most, above = bounds
    for number in value if isinstance(value, tuple | list) else () if value is None else (value,):
        most = LARGEST if isinstance(number, int) and at_most == math.inf else at_most
        broken = (
            ""
            if isinstance(number, int)
            else float32_rule(number) or _bound_rule(number, at_least, at_most)
        )
        inside = at_least <= number <= most and number > above
        if inside and not broken:
            continue
        limits = [
            ("at least", at_least),
            ("at most", most if number > most else at_most),
            ("greater than", above),
        ]
        rules = [f"{words} {limit:,}" for words, limit in limits if math.isfinite(limit)]
        if broken and (inside or not rules):
            rules = [broken]
        raise UsageError(f"{flag} must be {' and '.join(rules)}, got {shortened(f'{number:,}')}")


def float32_rule(number: float) -> str:
    """Rule, in words, that a number breaks which the devices cannot compute with; empty where they
    can.
    """
    if not math.isfinite(number):
        return "finite"
    if abs(number) > LARGEST_FLOAT:
        return f"at most {LARGEST_FLOAT:.3g} in magnitude, the largest number of float32"
    if 0 < abs(number) < SMALLEST_FLOAT:
        return f"at least {SMALLEST_FLOAT:.3g} in magnitude, below which float32 has nothing but 0"
    return ""


def _bound_rule(number: float, *bounds: float) -> str:
    """Name the bound to which float32 rounds a number, as a rule; "" if it rounds to none."""
    single = struct.unpack("f", struct.pack("f", number))[0]
    for bound in bounds:
        if single == bound != number:
            return f"{bound:g} or further from it, as float32 has nothing between"
    return ""


def limits_of(bounds: Bounds) -> tuple[float, float]:
    """Lowest and highest number within the bounds that the devices can compute with."""
    low = max(bounds.at_least, -LARGEST_FLOAT)
    return SMALLEST_FLOAT if bounds.above == 0 else low, min(bounds.at_most, LARGEST_FLOAT)


# Atoms from 0 to the largest magnitude that float32 tells apart, each in 8 steps
ATOM_STEPS = 2.0**20


def check_atoms(low: float, high: float, count: int, flags: str) -> None:
    """Raise UsageError, naming the `flags`, unless float32 tells `count` equally spaced numbers
    apart, and returns between them.
    """
    spacing = (high - low) / (count - 1)
    least = max(SMALLEST_FLOAT, max(abs(low), abs(high)) / ATOM_STEPS)
    if high - low <= LARGEST_FLOAT / 4 and spacing >= least:
        return
    atoms = f"{count:,} atoms from {low:.10g} to {high:.10g}"
    why = f"they are {spacing:.3g} apart, and float32 needs {least:.3g} there"
    if spacing >= least:
        why = f"float32 computes with ranges up to {LARGEST_FLOAT / 4:.3g}"
    raise UsageError(f"{flags}: {atoms} cannot be told apart: {why}")


@functools.cache
def sweepable(args_class: type) -> dict[str, str]:
    """The flags in which members of a population may differ, and how --pbt changes each."""
    found = {name: note_of(kind, Swept) for name, kind in kinds_of(args_class).items()}
    return {name: sweep.by for name, sweep in found.items() if sweep}


@functools.cache
def kinds_of(args_class: type) -> dict[str, Any]:
    """The type of each flag, also where annotations are texts."""
    hints = get_type_hints(args_class, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(args_class)}


def note_of(kind: Any, what: type) -> Any:
    """Find the last note of that class in the type of a flag, or of its elements; or None."""
    if get_origin(kind) is Annotated and (
        notes := [note for note in kind.__metadata__ if isinstance(note, what)]
    ):
        return notes[-1]
    return next(filter(None, (note_of(part, what) for part in get_args(kind))), None)


def multiples_near(number: int, unit: int) -> str:
    """The multiples of `unit` around `number`, in words."""
    near = {max(number // unit, 1) * unit, -(-number // unit) * unit}
    return " or ".join(map(str, sorted(near)))


def divisors_near(number: int, whole: int) -> str:
    """The divisors of `whole` around `number`, in words."""
    small = [divisor for divisor in range(1, math.isqrt(whole) + 1) if whole % divisor == 0]
    divisors = {*small, *(whole // divisor for divisor in small)}
    below = (x for x in divisors if x < number)
    above = (x for x in divisors if x > number)
    return " or ".join(str(x) for x in (max(below, default=None), min(above, default=None)) if x)


def check_multiple(flag: str, number: int, unit: int, shares: str) -> None:
    """Raise UsageError unless `number` is a multiple of `unit`: it is split evenly over the
    `shares`.
    """
    if number % unit:
        raise UsageError(
            f"{flag} {number} is split evenly over {shares}: take {multiples_near(number, unit)}"
        )


def flag_of(name: str) -> str:
    """A flag as it is typed."""
    return "--" + name.replace("_", "-")


def _choices(kind: Any) -> list[str]:
    # Which stands for a flag that is left out
    return [str(choice) for choice in get_args(kind) if choice != ""]


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(_choices(kind))}"
    if get_origin(kind) in (tuple, list):
        return f"a sequence, each {' or '.join(map(_described, _options(get_args(kind)[0])))}"
    return _NAMES.get(kind, "a dictionary")


_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    NoneType: "None",
}


def _options(kind: Any) -> tuple[Any, ...]:
    """The kinds that a value may be of."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    return (
        sum(map(_options, get_args(kind)), ())
        if get_origin(kind) in (Union, UnionType)
        else (kind,)
    )
