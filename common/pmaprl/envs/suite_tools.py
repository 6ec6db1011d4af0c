"""Imports, checks of parameters and errors of code that is not ours, such as suites of
environments.

Processes of environments import this too, so it imports nothing slow.
"""

import importlib
import inspect
import io
import math
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from pmaprl.cli.checks import LARGEST, float32_rule
from pmaprl.cli.errors import FailedEnvError, UsageError

COUNTS = (
    "max_steps_in_episode",
    "max_timesteps",
    "max_num_steps_per_episodes",
    "max_steps",
    "time_limit",
)
COUNTS += "episode_length", "action_repeat", "frame_skip", "fps", "instruction_frequency"
"""Parameters that count steps or frames, and so are at least 1."""

EXTRAS = {"mujoco_playground": "playground", "envpool": "host", "ale_py": "", "jax2onnx": "onnx"}
EXTRAS |= {"onnxruntime": "onnx"}
"""The extras of pyproject.toml that are not named as the package that they bring; "" is none."""


def changed_params(name: str, known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The values that are `given`, in the types of those that are `known`: numbers, switches,
    words, tuples of them.
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
        if rule := _rule_of_devices(value, known[field]):
            raise UsageError(f"{name} parameter {field!r} must be {rule}, got {value!r}")
        if field in COUNTS:
            check_time_limit(name, field, value)
    return {field: type(known[field])(value) for field, value in given.items()}


def _is_like(value: Any, known: Any) -> bool:
    """Whether `value` can stand where `known` does: a switch for a switch, a finite number for a
    number, and so on.
    """
    if isinstance(known, tuple):
        return (
            isinstance(value, list)
            and len(value) == len(known)
            and all(map(_is_like, value, known))
        )
    if isinstance(value, bool) or isinstance(known, bool) or not isinstance(known, int | float):
        return type(value) is type(known)
    return isinstance(value, int | float) and math.isfinite(value) and type(known)(value) == value


def is_number(x: Any) -> bool:
    """Tell a plain number, or one of NumPy's or JAX's, from everything else."""
    kind = getattr(getattr(x, "dtype", None), "kind", "O")  # PyTorch's types have none
    return isinstance(x, bool | int | float) or (kind in "biuf" and x.shape == ())


def _rule_of_devices(value: Any, known: Any) -> str:
    """Rule, in words, that a number in place of a `known` one breaks, as devices cannot compute
    with it; else empty.
    """
    if isinstance(known, tuple):
        return next(filter(None, map(_rule_of_devices, value, known)), "")
    if isinstance(known, float):
        return float32_rule(float(value))
    is_large = isinstance(known, int) and abs(value) > LARGEST
    return f"at most {LARGEST:,} in magnitude" if is_large else ""


def own_names(environment: Any) -> tuple[str, ...]:
    """The `obs_names` that an environment of somebody's own may have; raises UsageError where they
    are no texts.
    """
    names = getattr(environment, "obs_names", ())
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"obs_names must be a tuple of texts, got {names!r}")
    return tuple(names)


def settable(values: Callable | Mapping[str, Any]) -> dict[str, Any]:
    """Of `values`, or of a constructor's arguments with defaults, those that --env-params can
    change.
    """
    if callable(values):
        values = {
            argument.name: argument.default
            for argument in inspect.signature(values).parameters.values()
        }
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | int | float | str | tuple)
    }


def check_time_limit(name: str, parameter: str, steps: int) -> None:
    """Raise UsageError where a `parameter` leaves no step to an episode, or cannot be counted."""
    if not 1 <= steps <= LARGEST:
        raise UsageError(
            f"{name} parameter {parameter!r} must be at least 1 and at most {LARGEST:,}, got "
            f"{steps}"
        )


def refuse_params(params: dict[str, Any], taken: Iterable[str]) -> None:
    """Raise UsageError where `params` has one of the names that are not the user's to set there."""
    for name in taken:
        if name in params:
            raise UsageError(f"--env-params cannot set {name!r}: it follows from other flags")


@contextmanager
def quiet():
    """Without warnings and what a suite prints, as of parts that are not installed; not for threads
    of actors.
    """
    printed = io.StringIO()
    console = sys.__stdout__
    errors = sys.stderr
    try:
        # Which jaxmarl puts in the place of `sys.stdout`; it moves `sys.stderr` too
        sys.__stdout__ = printed
        with warnings.catch_warnings(action="ignore"), redirect_stdout(printed):
            yield
    finally:
        sys.__stdout__ = console
        sys.stderr = errors


def import_package(package: str, use: str = "") -> ModuleType:
    """A package that is an extra, or a module of it. Raises UsageError, with how to get it and what
    for: its `use`.
    """
    root = package.partition(".")[0]
    extra = EXTRAS.get(root, root)
    try:
        with nullcontext() if extra in ("", "host") else quiet():
            return importlib.import_module(package)
    except ImportError as error:
        what = f'-e ".[{extra}]"' if extra else root.replace("_", "-")
        raise UsageError(f"{root} cannot be imported{use}: pip install {what} ({error})") from error


@contextmanager
def readable_errors(what: str):
    """Turn every other exception into a UsageError that says `what` went wrong, why, and where in
    the user's code.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what}: {reason(error)}{place_in_code(error)}") from error


PACKAGE = Path(__file__).resolve().parents[1]
NOT_THE_USERS = f"{PACKAGE}/", f"{sysconfig.get_path('stdlib')}/", "<"


def place_in_code(error: BaseException) -> str:
    """Place in the user's own code where an exception arose, to follow its text; empty where there
    is none.

    JAX traces environments, so the innermost line of a traceback is hardly ever the one to mend.
    The cause of an error may be the text of a traceback, of another process.
    """
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places += re.findall(r'File "(.+)", line (\d+)', str(error.__cause__ or ""))
    for file, line in reversed(places):
        if not file.startswith(NOT_THE_USERS) and "site-packages" not in file:
            path = Path(file)
            near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f" ({near}, line {line})"
    return ""


def reason(error: BaseException) -> str:
    """An exception in one line."""
    kind = "" if isinstance(error, FailedEnvError | UsageError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0][:300].removesuffix(": ")
