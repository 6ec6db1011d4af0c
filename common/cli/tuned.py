"""Flags that were tuned for an environment: the file `tuned/ALGORITHM.toml` beside the algorithm's file.

It has a table for each environment, or for a pattern of names such as `*-MinAtar`, with the names and values of flags.
"""

import fnmatch
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from common.cli.env_names import split_name
from common.cli.errors import UsageError
from common.cli.files import read_text


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
