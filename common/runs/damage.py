"""Whether what a run's files say of its members is whole."""

from pathlib import Path
from typing import Any

from common.cli.errors import UsageError
from common.runs.metrics import damaged_line, is_number

EXCHANGES = "population.jsonl"


def check_members(path: Path, config: dict[str, Any]) -> None:
    """Raise UsageError where the `config` of the run at `path` does not say in what each member differs.

    It may say nothing of members.
    """
    members, size = config.get("members", []), config["args"].get("population")
    whole = isinstance(members, list) and all(isinstance(x, dict) and type(x.get("seed")) is int for x in members)
    if not whole or not all(is_number(value) for member in members for value in member.values()):
        raise UsageError(f"{path} is damaged: its config.json does not list its members with a seed and numbers each")
    if members and size and len(members) != size:
        raise UsageError(f"{path} is damaged: its config.json has {size} as population and lists {len(members)}")


def check_exchanges(path: Path) -> None:
    """Raise UsageError where the run at `path`, when it is resumed, would lose exchanges from a damaged file."""
    file = path / EXCHANGES
    if file.exists() and (line := damaged_line(file)):
        raise UsageError(f"{file} is damaged in line {line}: delete that line to go on without what it said")
