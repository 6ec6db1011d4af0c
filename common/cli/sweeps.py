"""What the members of a population draw for a flag, or go through: `log:1e-4:1e-2`, `3e-4,1e-3`."""

import itertools
import math
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

from common.cli.checks import shortened
from common.cli.errors import UsageError

FORMS = "log:LOW:HIGH, uniform:LOW:HIGH or choice:A,B,..."
PREFIX = "env."  # of what is a parameter of the environment
KINDS = "log", "uniform", "choice"
DIGITS = 6  # of a drawn value: as many as one types to train a member alone


class Draw(NamedTuple):
    """What a member draws for a flag."""

    kind: str  # log, uniform or choice
    values: tuple[float, ...]  # lowest and highest, or all to choose from

    def draw(self, random: Random) -> float:
        """A value."""
        if self.kind == "choice":
            return self.values[int(random.random() * len(self.values))]
        low, high = self.values
        share = random.random()
        drawn = low * (high / low) ** share if self.kind == "log" else low + (high - low) * share
        return min(max(rounded(drawn), low), high)


def read_sweep(words: Iterable[str], able: Iterable[str]) -> tuple[dict[str, Draw], dict[str, tuple[float, ...]]]:
    """By flag, what `--sweep` draws, and the values it goes through. Raises UsageError for what cannot be swept."""
    draws, values = {}, {}
    for name, text in _pairs("--sweep", words, able, f"NAME=A,B,... or NAME={FORMS}").items():
        what = f"--sweep {name}={shortened(text)}"
        if ":" in text:
            draws[name] = read_draw(what, text)
        else:
            values[name] = _numbers(what, text)
    return draws, values


def drawn(draws: dict[str, Draw], seed: int, count: int) -> dict[str, list[float]]:
    """Values for `count` members, by flag. A flag draws the same whatever others are swept."""
    streams = {name: Random(f"{seed} {name}") for name in draws}
    return {name: [draw.draw(streams[name]) for _ in range(count)] for name, draw in draws.items()}


def combined(grid: dict[str, tuple[float, ...]], each: int) -> dict[str, list[float]]:
    """All combinations, each for as many members, by flag; the last flag changes first."""
    rows = [row for row in itertools.product(*grid.values()) for _ in range(each)]
    return {name: [row[index] for row in rows] for index, name in enumerate(grid)}


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def check_sweepable(flag: str, names: Iterable[str], sweepable: Iterable[str]) -> None:
    """Raise UsageError where members cannot differ in one of the named flags.

    Of parameters of the environment only itself knows, see `common/envs/varied.py`.
    """
    for name in names:
        if name not in sweepable and not name.startswith(PREFIX):
            known = f"{', '.join(sweepable)} only, or in {PREFIX}NAME, a number of the environment"
            raise UsageError(f"{flag} {shortened(name)}: members may differ in {known}")


def is_draw(text: str) -> bool:
    """Whether it looks like what a member draws."""
    return text.partition(":")[0] in KINDS and ":" in text


def _pairs(flag: str, words: Iterable[str], sweepable: Iterable[str], form: str) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, text = "".join(word.split()).partition("=")
        name = name.removeprefix("--")
        name = name if name.startswith(PREFIX) else name.replace("-", "_")
        if not equals or not text:
            raise UsageError(f"{flag} {shortened(repr(word))} is not of the form {form}")
        check_sweepable(flag, [name], sweepable)
        if name in found:
            raise UsageError(f"{flag} has {name} twice: {shortened(found[name])} and {shortened(text)}")
        found[name] = text
    return found


def read_draw(what: str, text: str) -> Draw:
    """A draw from its text. Raises UsageError, naming `what` it is, where it has no such form."""
    kind, _, rest = text.partition(":")
    if not is_draw(text):
        raise UsageError(f"{what} is not of the form {FORMS}")
    if kind == "choice":
        return Draw(kind, _numbers(what, rest))
    values = _numbers(what, rest, ":")
    if len(values) != 2 or values[0] > values[1]:
        raise UsageError(f"{what} needs the lowest number and then the highest, as in {kind}:1e-4:1e-2")
    if kind == "log" and values[0] <= 0:
        raise UsageError(f"{what} begins at {values[0]:g}: a logarithmic range begins above 0")
    return Draw(kind, values)


def _numbers(what: str, text: str, between: str = ",") -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(between)))
    except ValueError:
        raise UsageError(f"{what} has something in it that is no number") from None
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{what} has a number in it that is not finite")
    if between == "," and len(set(numbers)) < len(numbers):
        raise UsageError(f"{what} has a number twice")
    return numbers
