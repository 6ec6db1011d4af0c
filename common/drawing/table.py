"""A table of groups of runs: on a terminal, in a pipe, and as a CSV file."""

import csv
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.cli.errors import printable
from common.cli.files import replacing
from common.drawing.groups import flag_text


@dataclass(frozen=True)
class Row:
    """What the table says of a group. Times are seconds of wall time, over all invocations of a run."""

    env: str
    algorithm: str
    flags: dict[str, Any]  # of --by
    seeds: int
    steps: int  # of the shortest run
    steps_max: int  # of the longest
    estimate: str  # "IQM" or "mean"
    return_: float  # estimate over seeds; NaN where no seed has one
    return_low: float  # 95% bootstrap interval; NaN with one seed
    return_high: float
    training_seeds: int  # so many of the returns are the last ones of training, for want of an evaluation
    steps_per_second: float  # of training, median over runs, of each seed
    wall_seconds: float  # median over runs
    threshold: float  # NaN where there is no return yet
    reached: int  # seeds that reached it
    seconds_to_threshold: float  # median over all seeds; infinite where half of them did not reach it


def show(rows: list[Row], by: tuple[str, ...], legend: dict[str, str]) -> None:
    """Print the table; where the terminal is too narrow for it, a list for each row instead. A pipe gets it whole."""
    records = [texts(row, by) for row in rows]
    table = _table(records)
    width = Console(width=10_000).measure(table).maximum
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(width, 200))
    if width <= console.width:
        console.print(table)
    else:
        for record in records:
            console.print("\n".join(f"{name:<16} {text}" for name, text in record.items()) + "\n", markup=False)
    for column, meaning in legend.items():
        console.print(f"{column:<14}{meaning}", markup=False)


def write_csv(rows: list[Row], by: tuple[str, ...], path: Path) -> None:
    """One line for each row; empty where there is no number. Raises UsageError where it cannot be written."""
    fields = [one.name for one in dataclasses.fields(Row) if one.name != "flags"]
    fields[2:2] = by
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(name.rstrip("_") for name in fields)
        for row in rows:
            values = vars(row) | {name: flag_text(value) for name, value in row.flags.items()}
            writer.writerow(_cell(values.get(name, "")) for name in fields)


def texts(row: Row, by: tuple[str, ...]) -> dict[str, str]:
    """What the table says of a row, by column; `by` are the flags of --by."""
    spread = f" [{_brief(row.return_low)}, {_brief(row.return_high)}]" if math.isfinite(row.return_low) else ""
    kind = f"{row.estimate} " if spread else ""
    steps = f"{row.steps:,}" if row.steps == row.steps_max else f"{row.steps:,} to {row.steps_max:,}"
    return {
        "env": row.env,
        "algorithm": row.algorithm,
        **{name: flag_text(row.flags.get(name, "-")) for name in by},
        "seeds": str(row.seeds),
        "steps": steps,
        "return [95% CI]": f"{kind}{_brief(row.return_)}{spread}{' *' * bool(row.training_seeds)}",
        "steps/s": f"{row.steps_per_second:,.0f}" if math.isfinite(row.steps_per_second) else "-",
        "wall": _seconds(row.wall_seconds),
        "threshold": _brief(row.threshold),
        "to threshold": _reached(row),
    }


def _table(records: list[dict[str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in records[0]:
        table.add_column(
            Text(printable(name)), justify="left" if name in ("env", "algorithm") else "right", no_wrap=True
        )
    for record in records:
        table.add_row(*(Text(printable(value)) for value in record.values()))
    return table


def _reached(row: Row) -> str:
    some = f"{row.reached} of {row.seeds}"
    if not math.isfinite(row.seconds_to_threshold):
        return some if row.reached else "-"
    return _seconds(row.seconds_to_threshold) + (f" ({some})" if row.reached < row.seeds else "")


def _brief(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{_brief(value)} s" if math.isfinite(value) else "-"


def _cell(value: Any) -> Any:
    return "" if isinstance(value, float) and not math.isfinite(value) else value
