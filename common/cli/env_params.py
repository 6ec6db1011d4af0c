"""`--env-params`: a JSON object, in which lists and draws stand for more than one number.

Parameters of an environment in which members of a population differ have names with a prefix, as in `env.gravity`.
"""

import json
from collections.abc import Mapping
from typing import Any

from common.cli.checks import shortened
from common.cli.errors import UsageError
from common.cli.sweeps import PREFIX, Draw, is_draw, read_draw


def read_params(env_params: str, flag: str = "--env-params") -> dict[str, Any]:
    """The JSON object that a `flag` is; nothing where it is empty."""
    if not env_params:
        return {}
    try:
        params = json.loads(env_params)
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} {shortened(repr(env_params))} is not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        short = shortened(repr(env_params))
        raise UsageError(f"{flag} {short} has a number that is too long, or too many brackets") from error
    if not isinstance(params, dict):
        raise UsageError(f"{flag} {shortened(repr(env_params))} must be a JSON object such as '{{\"name\": 1.0}}'")
    return params


def draws_in(params: Mapping[str, Any]) -> dict[str, Draw]:
    """What every episode draws anew, by parameter: texts such as `uniform:8:12`. Raises UsageError."""
    drawn = {name: text for name, text in params.items() if isinstance(text, str) and is_draw(text)}
    return {name: read_draw(f"--env-params {name}={text}", text) for name, text in drawn.items()}


def lists_in(env_params: str) -> dict[str, tuple[float, ...]]:
    """Lists of numbers, of which each member of a population draws one, by prefixed name."""
    params = read_params(env_params)
    return {PREFIX + name: tuple(map(float, x)) for name, x in params.items() if _is_list(x)}


def given_params(flags: Mapping[str, Any]) -> str:
    """The parameters with which a run with these flags evaluates: where members draw from a list, its first number."""
    env_params = flags.get("env_params", "")
    if not flags.get("population") or not lists_in(env_params):
        return env_params
    return json.dumps({name: x[0] if _is_list(x) else x for name, x in read_params(env_params).items()})


def given_number(env_params: str, name: str) -> float | None:
    """The number that `env_params` has for a prefixed name, the first of a list; None where there is none."""
    value = read_params(env_params).get(name.removeprefix(PREFIX))
    value = value[0] if _is_list(value) else value
    return float(value) if _is_number(value) else None


def as_flags(member: Mapping[str, Any], env_params: str) -> dict[str, Any]:
    """What members differ in as flags for one of them alone, whose `--env-params` are otherwise these."""
    own = {name.removeprefix(PREFIX): value for name, value in member.items() if name.startswith(PREFIX)}
    flags = {name: value for name, value in member.items() if not name.startswith(PREFIX)}
    return flags | ({"env_params": json.dumps(read_params(env_params) | own)} if own else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))
