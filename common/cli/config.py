"""Flags in files: `config.json` of a run, and `tuned/ALGORITHM.toml`, with a table for each environment or pattern."""

import dataclasses
import fnmatch
import json
import os
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from common.cli.env_names import split_name
from common.cli.errors import UsageError
from common.cli.files import read_text

NAME, DONE, KIT = "config.json", "DONE", "pmaprl"


def is_run(run_dir: str | Path) -> bool:
    """Whether a run has begun in `run_dir`."""
    return os.path.exists(Path(run_dir) / NAME)


def is_of_kit(run_dir: str | Path) -> bool:
    """Whether a run of this kit has written the `config.json` there. Raises UsageError where that is of no run."""
    versions = read_config(run_dir).get("versions")
    return isinstance(versions, dict) and KIT in versions


def has_finished(run_dir: str | Path, flags: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Whether the run there has finished, with these flags; those that came later had their `defaults`.

    Raises UsageError where its `config.json` is damaged.
    """
    if not os.path.exists(Path(run_dir) / DONE):
        return False
    flags, defaults = json.loads(json.dumps([flags, defaults]))  # tuples are lists there
    stored = defaults | read_config(run_dir)["args"]
    return all(stored.get(name) == value for name, value in flags.items())


def defaults_of(args_class: type) -> dict[str, Any]:
    """What flags are where nobody says it, without those that have to be said."""
    fields = dataclasses.fields(args_class)
    made = {field.name: field.default_factory() for field in fields if callable(field.default_factory)}
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING} | made


def read_config(run_dir: str | Path) -> dict[str, Any]:
    """`config.json` of a run. Raises UsageError where `run_dir` is not one."""
    path = Path(run_dir) / NAME
    try:
        config = json.loads(read_text(path))
        names = config["args"]["env"] + config["algorithm"] + str(config.get("script"))
        if not names.isprintable():  # they are shown on terminals
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        missing = isinstance(error, OSError) and not os.path.exists(run_dir)
        reason = "does not exist" if missing else "has no readable config.json"
        raise UsageError(f"{run_dir} is not a run directory: it {reason}") from error
    return config


class Entry(NamedTuple):
    """A table of the file."""

    path: Path
    pattern: str
    flags: dict[str, Any]

    def __str__(self) -> str:
        return f"{Path(*self.path.parts[-3:])} for {self.pattern}"


def find_entry(script: Path, env: str) -> Entry | None:
    """What the file beside an algorithm's `script` has for `env`: by its very name, else by the first pattern.

    Raises UsageError where the file cannot be read.
    """
    path = script.parent / "tuned" / f"{script.stem}.toml"
    if not path.exists():
        return None
    try:
        tables = tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    outside = [name for name, table in tables.items() if not isinstance(table, dict)]
    if outside:
        raise UsageError(f'{path}: {outside[0]} stands outside of every table, such as ["CartPole-v1"]')
    suite, env_id = split_name(env)
    name = env_id if suite == "gymnax" else env
    pattern = fitting(tables, name)
    if pattern is None:
        return None
    flags = {flag: tuple(value) if isinstance(value, list) else value for flag, value in tables[pattern].items()}
    return Entry(path, pattern, flags)


def fitting(tables: Collection[str], name: str) -> str | None:
    """The pattern among `tables` that is for `name`: the very name, else the first that matches."""
    if name in tables:
        return name
    return next((pattern for pattern in tables if fnmatch.fnmatchcase(name, pattern)), None)
