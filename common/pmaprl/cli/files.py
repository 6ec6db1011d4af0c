"""Files that are written whole or not at all, `config.json`, and the tables of tuned flags and
recipes.
"""

import dataclasses
import fnmatch
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from pmaprl.cli.errors import UsageError, printable
from pmaprl.cli.stored import read_json

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parents[1]  # of the repository, where it is installed from there
ALGOS = PACKAGE / "algos" if (PACKAGE / "algos" / "ppo_pmap.py").exists() else ROOT / "algos"


def check_target(path: Path, *endings: str) -> None:
    """Raise UsageError, before the work, where no file can be at `path`, or its name has none of
    the `endings`.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path} is not a file: it cannot be replaced by one")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"{path} cannot be written: {path.parent} is no folder that one may write to"
        )
    if endings and path.suffix not in endings:
        raise UsageError(f"{path} must end in {' or '.join(endings)}")
    with writing(path), suppress(FileNotFoundError):
        os.lstat(temporary_of(path))  # fails where its name is too long, or its folder is a file


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Turn an OSError into a UsageError that says `what` cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} cannot be written: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, with the same suffix, that takes its place once it is
    written; of a symbolic link, the place of what it leads to. Raises UsageError where it cannot be
    written.
    """
    with writing(path), in_one_step(Path(os.path.realpath(path))) as temporary:
        yield temporary


def temporary_of(path: Path) -> Path:
    """The file of this process beside `path` that takes its place once it is written."""
    return path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")


@contextmanager
def in_one_step(path: Path) -> Iterator[Path]:
    """Replace a file of a run, of which a reader or a crash never sees half.

    The file is a new one each time, so that nothing is written through a link. Raises OSError.
    """
    temporary = temporary_of(path)
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


TEMPORARY = r"\.(config|metrics|result|elo|curve|population|policy|wandb_id)\.[0-9]+(\.[a-z]+)?"
"""Names of temporary files of a run, which a process that was killed has left."""


def is_temporary(name: str) -> bool:
    """Tell if a file with this `name` was to become one of a run's."""
    return re.fullmatch(TEMPORARY, name) is not None


def write_json(path: Path, value: Any) -> None:
    """Replace `path` in one step."""
    with in_one_step(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")


NAME = "config.json"
KIT = "pmaprl"


def is_run(run_dir: str | Path) -> bool:
    """Tell if a run has begun in `run_dir`."""
    return os.path.exists(Path(run_dir) / NAME)


def finished_text(run_dir: str | Path, goal: float | None = None) -> str:
    """Say that a run is left as it is.

    Args:
        run_dir: the run.
        goal: its --stop-at-return, if that has ended it.
    """
    if goal is not None:
        return (
            f"{printable(run_dir)} has reached --stop-at-return {goal:g}; --stop-at-return None "
            "trains longer"
        )
    return f"{printable(run_dir)} has finished; a larger --total-timesteps trains longer"


def is_of_kit(run_dir: str | Path) -> bool:
    """Tell if a run of this kit has written the `config.json` there.

    Raises:
        UsageError: it is of no run.
    """
    versions = read_config(run_dir).get("versions")
    return isinstance(versions, dict) and KIT in versions


def defaults_of(args_class: type) -> dict[str, Any]:
    """Defaults of the flags that have one."""
    fields = dataclasses.fields(args_class)
    made = {
        field.name: field.default_factory() for field in fields if callable(field.default_factory)
    }
    return {
        field.name: field.default for field in fields if field.default is not dataclasses.MISSING
    } | made


def read_config(run_dir: str | Path) -> dict[str, Any]:
    """`config.json` of a run. Raises UsageError where `run_dir` is not one."""
    there = os.path.exists(run_dir)
    config = read_json(Path(run_dir), NAME) if there else None
    if not isinstance(config, dict):
        reason = "has no readable config.json" if there else "does not exist"
        raise UsageError(f"{run_dir} is not a run directory: it {reason}")
    if wrong := _wrong_in(config):
        raise UsageError(f"{run_dir} is not a run directory: its config.json has no {wrong}")
    args = config["args"]
    if "byte_max" not in args and _has_other_bytes(config.get("env_spec")):
        args["byte_max"] = 255
    if config["algorithm"] == "appo_pmap" and "num_epochs" in args:  # its name at first
        args.setdefault("update_epochs", args.pop("num_epochs"))
    return config


TEXTS = (
    "env",
    "env_params",
    "eval_env_params",
    "init_from",
    "recipe",
    "vectorization",
    "distributed",
)
"""Flags that are texts, read from `config.json` before an algorithm's class of flags checks them
all.
"""
MOST_AGENTS = 10_000  # of a run; `Members` are at most as many


def _wrong_in(config: dict[str, Any]) -> str:
    """Name what is missing in a `config.json`, or is of another type than readers rely on; empty
    where nothing is.
    """
    args = config.get("args")
    if (
        not isinstance(args, dict)
        or "env" not in args
        or not isinstance(config.get("algorithm"), str)
    ):
        return "flags and algorithm"
    if not str(config.get("script", "")).isprintable():
        return "path of its algorithm"
    texts = {name: args[name] for name in TEXTS if name in args}
    numbers = {name: args[name] for name in ("seed", "num_seeds") if name in args}
    if odd := [name for name, value in texts.items() if not isinstance(value, str)]:
        return f"text for {odd[0]}"
    if odd := [
        name for name, value in numbers.items() if type(value) is not int or abs(value) > 2**63
    ]:
        return f"whole number for {odd[0]}"
    if not 1 <= args.get("num_seeds", 1) <= MOST_AGENTS:
        return f"num_seeds of at least 1 and at most {MOST_AGENTS:,}"
    members = config.get("members", [])
    if (
        not isinstance(members, list)
        or len(members) > MOST_AGENTS
        or not all(_is_member(x, args) for x in members)
    ):
        return "flags of members"
    if not _are_earlier_flags(config.get("earlier_flags", {}), args):
        return "earlier flags"
    if not isinstance(config.get("versions", {}), dict):
        return "versions"
    return ""


def _are_earlier_flags(earlier: Any, args: dict[str, Any]) -> bool:
    """Tell if these are values of flags before a resume, each with the step at which it ended."""
    if not isinstance(earlier, dict) or not earlier.keys() <= args.keys():
        return False
    segments = []
    for values in earlier.values():
        if not isinstance(values, list):
            return False
        segments += values
    return all(
        isinstance(x, list) and len(x) == 2 and type(x[1]) is int and 0 <= x[1] <= 2**63
        for x in segments
    )


def _is_member(flags: Any, args: dict[str, Any]) -> bool:
    """Tell if these are the flags by which a member differs from others: its seed, and numbers for
    numbers.
    """
    if not isinstance(flags, dict) or type(flags.get("seed")) is not int:
        return False
    pairs = [(value, args.get(name)) for name, value in flags.items()]
    return all(x is None or type(x) in (int, float, bool) for pair in pairs for x in pair)


def _has_other_bytes(env_spec: Any) -> bool:
    """Tell if observations have bytes whose bounds are not 0 and 255, but which a run divided by
    255 as all were once.

    Runs of versions that look at bounds say what their --byte-max is.
    """

    def has_other(space: Any, dtype: Any) -> bool:
        if (
            isinstance(space, dict)
            and isinstance(space.get("parts"), dict)
            and isinstance(dtype, dict)
        ):
            return any(has_other(part, dtype.get(name)) for name, part in space["parts"].items())
        if (
            isinstance(space, dict)
            and isinstance(space.get("parts"), list)
            and isinstance(dtype, list)
        ):
            return any(map(has_other, space["parts"], dtype))
        is_box = isinstance(space, dict) and space.get("type") == "Box" and dtype == "uint8"
        return is_box and (space.get("low"), space.get("high")) != (0.0, 255.0)

    return isinstance(env_spec, dict) and has_other(
        env_spec.get("observation_space"), env_spec.get("obs_dtype")
    )


class Entry(NamedTuple):
    """A table of flags in a file beside an algorithm's."""

    path: Path
    pattern: str
    flags: dict[str, Any]

    def __str__(self) -> str:
        return f"{Path(*self.path.parts[-3:])} for {self.pattern}"


def find_entry(
    script: Path, folder: str, name: str, known: set[str], are_all_known: bool = True
) -> Entry | None:
    """Find the table for `name` in the file of a `folder` beside an algorithm's `script`.

    The very name comes first, then the first pattern that fits. Unless all flags have to be known,
    those that are not are left out.

    Raises:
        UsageError: the file will not do, or has other than the `known` flags.
    """
    path = script.parent / folder / f"{script.stem}.toml"
    if not path.exists():
        return None
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if outside := [name for name, table in tables.items() if not isinstance(table, dict)]:
        raise UsageError(
            f'{path}: {outside[0]} stands outside of every table, such as ["CartPole-v1"]'
        )
    pattern = fitting(tables, name.removeprefix("gymnax:"))
    if pattern is None:
        return None
    flags = {
        flag: tuple(value) if isinstance(value, list) else value
        for flag, value in tables[pattern].items()
    }
    if not are_all_known:
        flags = {flag: value for flag, value in flags.items() if flag in known}
    if unknown := sorted(flags.keys() - known):
        raise UsageError(f"{path} has {unknown[0]} for {pattern}, which is no flag to be set there")
    return Entry(path, pattern, flags)


def fitting(tables: Collection[str], name: str) -> str | None:
    """The key of `tables` for `name`: by that very name, else by the first pattern that fits;
    commas part patterns.
    """
    keys = {pattern.strip(): key for key in tables for pattern in key.split(",")}
    matching = (key for pattern, key in keys.items() if fnmatch.fnmatchcase(name, pattern))
    return keys[name] if name in keys else next(matching, None)
