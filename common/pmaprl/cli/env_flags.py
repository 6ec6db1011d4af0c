"""Environments on the command line: their names, `--env-params`, and values that are lists or
random draws.

A bare id is gymnax's, `suite:id` another suite's, `package.module:factory` a user's own. Draws and
lists, such as `log:1e-4:1e-2` and `3e-4,1e-3`, stand for parameters of environments and for flags
of a population's members.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

from pmaprl.cli.errors import UsageError, shortened

CUSTOM = ""
HOST_SUITES = "envpool", "gymnasium"
SUITES = "gymnax", "pmaprl", "brax", "craftax", "playground", "jumanji", "pgx", "navix"
SUITES += "xminigrid", "jaxmarl", "octax", *HOST_SUITES
"""All suites; the environments of the others step on the device."""


def split_name(name: str) -> tuple[str, str]:
    """Suite and id of an environment's name."""
    suite, colon, env_id = name.partition(":")
    if not colon:
        return "gymnax", name
    return (suite, env_id) if suite in SUITES else (CUSTOM, name)


def is_custom(name: str) -> bool:
    """Tell if a name is of a user's own code: `package.module:factory`, `gymnasium:module:id`."""
    return ":" in split_name(name)[1]


def steps_on_host(name: str) -> bool:
    return split_name(name)[0] in HOST_SUITES


FORMS = "log:LOW:HIGH, uniform:LOW:HIGH (the lower first) or choice:A,B,..."
# Of a parameter of the environment in which members of a population differ, as in env.gravity
PREFIX = "env."
DRAWS = "log:", "uniform:", "choice:"  # beginnings of texts that say what is drawn
DIGITS = 6  # of a drawn value: as many as one types to train a member alone


class Draw(NamedTuple):
    """Distribution to draw a flag or an environment parameter from, or a list of values."""

    kind: str  # log, uniform or choice; empty: nothing is drawn
    values: tuple[float, ...]  # lowest and highest, or all that there are

    def draw(self, random: Random) -> float:
        if self.kind == "choice":
            return self.values[int(random.random() * len(self.values))]
        low, high = self.values
        share = random.random()
        drawn = low * (high / low) ** share if self.kind == "log" else low + (high - low) * share
        return min(max(rounded(drawn), low), high)


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def read_draw(what: str, text: str) -> Draw:
    """A draw, or values, from a text. Raises UsageError, naming `what` it is, where it has no such
    form.
    """
    if ":" not in text:
        return Draw("", _numbers(what, text, ","))
    kind, _, rest = text.partition(":")
    if kind == "choice":
        return Draw(kind, _numbers(what, rest, ","))
    values = _numbers(what, rest, ":") if kind in ("log", "uniform") else ()
    if len(values) != 2 or values[0] > values[1]:
        raise UsageError(f"{what} is not of the form {FORMS}")
    if kind == "log" and values[0] <= 0:
        raise UsageError(f"{what} begins at {values[0]:g}: a logarithmic range begins above 0")
    return Draw(kind, values)


def _numbers(what: str, text: str, between: str) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(between)))
    except ValueError:
        raise UsageError(f"{what} has something in it that is no number") from None
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{what} has a number in it that is not finite")
    return numbers


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python's JSON has and no parameter can be: NaN counts as true,
    and so on.
    """
    raise ValueError(f"{name} is no number in JSON")


def read_params(env_params: str, flag: str = "--env-params") -> dict[str, Any]:
    """The JSON object that a `flag` is; nothing where it is empty."""
    try:
        params = json.loads(env_params or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {shortened(repr(env_params))} is not JSON: {error}") from error
    if not isinstance(params, dict):
        raise UsageError(
            f"{flag} {shortened(repr(env_params))} must be a JSON object such as "
            f"'{{\"name\": 1.0}}'"
        )
    return params


PLAIN = r"\w([\w ,+=-]|\.(?![^\W\d]))*|"  # a word of a setting; a file, a module or a URL has more
DRAWN = r"(log|uniform|choice):[0-9.eE+:,-]*"
NAMES_OF_CODE = (
    "path|file|dir|url|uri|module|import|entry|spec|xml|rom|lib|plugin|wrapper|class|env_?id|whole"
)
"""Parts of the names of arguments whose texts suites may take for files, modules or addresses."""


def named_by_text(env: str, env_params: str) -> str:
    """The first parameter whose text could name a file, code or an address, of an environment's
    parameters as a run has stored them; "" where there is none.

    Args:
      env: name of the environment. Of a user's own nobody knows what it does with a text.
      env_params: JSON object, as behind --env-params; what is none has no such parameter, and is
          refused later.
    """
    with suppress(UsageError):
        for name, value in read_params(env_params).items():
            keys, texts = _keys_and_texts(name, value)
            if not all(re.fullmatch(PLAIN, key) for key in keys):
                return name
            if not all(_is_setting(env, text) for text in texts):
                return name
            if (
                texts
                and steps_on_host(env)
                and any(re.search(NAMES_OF_CODE, key, re.IGNORECASE) for key in keys)
            ):
                return name
    return ""


def _is_setting(env: str, text: str) -> bool:
    """Tell if a text is nothing but a word of a setting, or a draw where environments know
    draws.
    """
    if not steps_on_host(env) and re.fullmatch(DRAWN, text):
        return True
    return not is_custom(env) and re.fullmatch(PLAIN, text) is not None


def _keys_and_texts(name: str, value: Any) -> tuple[list[str], list[str]]:
    """All keys in a value of JSON that has this name, its own among them, and all texts, to which
    inner keys belong.
    """
    keys = [name]
    texts = []
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            keys += part
            texts += part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return keys, texts


def unswept_text(names: Iterable[str], env_params: str) -> str:
    """Say in which environment members are evaluated that differ in parameters of theirs.

    Args:
        names: swept parameters, such as `env.gravity`.
        env_params: the parameters of all members.
    """
    base = f"with --env-params {env_params}" if env_params else "with its own parameters"
    return (
        f"of one environment for all, {base}, not of the {', '.join(names)} that a member was "
        "trained with"
    )


def flags_alone(member: Mapping[str, Any]) -> dict[str, Any]:
    """Flags that train one member alone, and evaluate it as the population did.

    A parameter of the environment is a sweep of one value, because --env-params would change
    evaluations too.
    """
    swept = [f"{name}={value}" for name, value in member.items() if name.startswith(PREFIX)]
    flags = {name: value for name, value in member.items() if not name.startswith(PREFIX)}
    return flags | ({"sweep": tuple(swept)} if swept else {})
