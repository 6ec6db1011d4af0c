"""Flags as they are typed on a command line."""

import shlex
from typing import Any


def as_words(flags: dict[str, Any]) -> list[str]:
    """Names and values of flags as words, switches as `--name` or `--no-name`."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple | list) else (value,))]
    return words


def as_typed(flags: dict[str, Any]) -> str:
    """The same as one line for a shell."""
    return shlex.join(as_words(flags))
