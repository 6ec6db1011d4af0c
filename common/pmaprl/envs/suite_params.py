"""Parameters of environments that are not ours: their kinds, types and limits.

Processes of environments import this too, so it imports nothing slow.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pmaprl.cli.checks import LARGEST, float32_rule
from pmaprl.cli.errors import UsageError

COUNTS = (
    "max_steps_in_episode",
    "max_timesteps",
    "max_num_steps_per_episodes",
    "max_steps",
    "time_limit",
    "episode_length",
    "action_repeat",
    "frame_skip",
    "fps",
    "instruction_frequency",
)
"""Parameters that count steps or frames, and so are at least 1."""


def changed_params(name: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a user's parameters to the types of the known ones.

    Args:
        name: name of the environment, for messages.
        known: parameters and their values: numbers, switches, words, tuples of them.
        given: the user's values of some of them.

    Raises:
        UsageError: a parameter is unknown, of another type, or no device can compute with it.
    """
    for field, value in given.items():
        if field not in known:
            raise UsageError(
                f"{name} has no parameter {field!r}; it has {', '.join(known) or 'none'}"
            )
        if not _is_like(value, known[field]):
            raise UsageError(
                f"{name} parameter {field!r} must be like {known[field]!r}, got {value!r}"
            )
        rule = _rule_of_devices(value, known[field])
        if rule:
            raise UsageError(f"{name} parameter {field!r} must be {rule}, got {value!r}")
        if field in COUNTS:
            check_time_limit(name, field, value)
    return {field: type(known[field])(value) for field, value in given.items()}


def _is_like(value: Any, known: Any) -> bool:
    """True if `value` is of the kind of `known`: a switch, a finite number, a text, a tuple."""
    if isinstance(known, tuple):
        has_length = isinstance(value, list) and len(value) == len(known)
        return has_length and all(map(_is_like, value, known))
    is_switch = isinstance(value, bool) or isinstance(known, bool)
    if is_switch or not isinstance(known, int | float):
        return type(value) is type(known)
    is_finite = isinstance(value, int | float) and math.isfinite(value)
    return is_finite and type(known)(value) == value


def is_number(x: Any) -> bool:
    """True for a plain number, or one of NumPy's or JAX's."""
    if isinstance(x, bool | int | float):
        return True
    kind = getattr(getattr(x, "dtype", None), "kind", "O")  # PyTorch's types have none
    return kind in "biuf" and x.shape == ()


def _rule_of_devices(value: Any, known: Any) -> str:
    """Rule, in words, that a number breaks if devices cannot compute with it; "" if they can."""
    if isinstance(known, tuple):
        rules = map(_rule_of_devices, value, known)
        return next(filter(None, rules), "")
    if isinstance(known, float):
        return float32_rule(float(value))
    is_large = isinstance(known, int) and abs(value) > LARGEST
    return f"at most {LARGEST:,} in magnitude" if is_large else ""


def obs_names_of(environment: Any) -> tuple[str, ...]:
    """The `obs_names` that a user's environment may have.

    Raises:
        UsageError: they are no texts.
    """
    names = getattr(environment, "obs_names", ())
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"obs_names must be a tuple of texts, got {names!r}")
    return tuple(names)


def settable(values: Callable | Mapping[str, Any]) -> dict[str, Any]:
    """Select the parameters that --env-params can change.

    Args:
        values: parameters and their values, or a constructor, whose arguments have defaults.
    """
    if callable(values):
        arguments = inspect.signature(values).parameters
        values = {name: argument.default for name, argument in arguments.items()}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | int | float | str | tuple)
    }


def check_time_limit(name: str, parameter: str, steps: int) -> None:
    """Raise UsageError if a `parameter` leaves no step to an episode, or cannot be counted."""
    if not 1 <= steps <= LARGEST:
        raise UsageError(
            f"{name} parameter {parameter!r} must be at least 1 and at most {LARGEST:,}, got "
            f"{steps}"
        )


def refuse_params(params: dict[str, Any], taken: Iterable[str]) -> None:
    """Raise UsageError if `params` has one of the names that other flags set."""
    for name in taken:
        if name in params:
            raise UsageError(f"--env-params cannot set {name!r}: it follows from other flags")
