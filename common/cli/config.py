"""`config.json`: what a run was started with."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

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
