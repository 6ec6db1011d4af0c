"""A table of runs: return, speed, and time to a threshold, for each environment and algorithm.

python -m common.compare runs/* --csv table.csv
python -m common.compare --help
"""

import csv
import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.cli.checks import Finite
from common.cli.command import main, parse
from common.cli.errors import printable
from common.cli.files import check_target, read_text, replacing
from common.drawing.groups import (
    EVALUATION,
    RECENT,
    TRAINING,
    Group,
    LoggedRun,
    Note,
    Selection,
    estimate,
    estimate_name,
    flag_text,
    interval,
    load,
    pooled,
    say,
)
from common.runs.metrics import is_number


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


LEGEND = {
    "return": "greedy evaluation; * the last training return, for want of one",
    "to threshold": "wall time until the mean return of the last 100 episodes reaches it, median over seeds",
}
MOST_OF_THE_WAY = "90% of the way from the lowest to the highest return seen in the environment"


@dataclass(kw_only=True)
class Args(Selection):
    """Compare runs in a table: a line for each environment and algorithm, over all seeds of its runs."""

    csv: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Also write the table to this CSV file, with full numbers."""
    threshold: Annotated[Finite | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Return to reach; default 90% of the way from the lowest to the highest one seen in the environment."""


@dataclass(frozen=True)
class Returns:
    """The final returns of a run, one for each seed that has one."""

    values: list[float]
    note: str = ""  # what is special about them
    training: bool = False


def compare(args: Args) -> list[Row]:
    """The rows of the table, sorted. Raises UsageError for what is not a run with metrics; prints notes to stderr."""
    groups = load(args, [TRAINING, RECENT, EVALUATION])
    finals = {(run.path, run.members): final_returns(run) for group in groups for run in group.runs}
    notes = [Note(str(path), returns.note) for (path, _), returns in finals.items() if returns.note]
    say([*(note for group in groups for note in (*pooled(group), *_lengths(group))), *notes])
    thresholds = {group.env: args.threshold for group in groups}
    if args.threshold is None:
        thresholds = {env: _most_of_the_way([one for one in groups if one.env == env]) for env in thresholds}
    rows = []
    for group in groups:
        returns = [finals[run.path, run.members] for run in group.runs]
        rows.append(_row(group, returns, args.estimate, thresholds[group.env]))
    return rows


def seconds_to(run: LoggedRun, threshold: float) -> list[float]:
    """Wall seconds until `episode/return_last100` of each seed first reaches `threshold`, infinite if it never does."""
    if RECENT not in run.log.series:
        return [math.inf] * run.num_seeds
    series = run.log.series[RECENT]
    reached = series.values >= threshold  # [P, S]
    return np.where(reached.any(axis=0), series.wall[reached.argmax(axis=0)], math.inf).tolist()


def final_returns(run: LoggedRun) -> Returns:
    """The greedy evaluation in `result.json`, or the last training returns where there is none."""
    result = _result(run.path)
    if result:
        rows = run.log.series.get(EVALUATION)
        at = min([result["env_steps"], *([rows.steps[-1]] if rows else [])])
        note = f"the evaluation is from step {at:,.0f} of {run.log.steps:,}" if at < run.log.steps else ""
        returns = result[EVALUATION]
        if run.members and max(run.members) < len(returns):
            returns = [returns[member] for member in run.members]
        return Returns([x for x in returns if is_number(x)], note)
    found = run.log.series[TRAINING].last if TRAINING in run.log.series else np.empty(0)
    last = found[np.isfinite(found)].tolist()
    what = f"the last {TRAINING} stands for it" if last else "no episode has ended either"
    return Returns(last, f"no evaluation in result.json, {what}", training=True)


def _result(path: Path) -> dict[str, Any]:
    """Steps and evaluation, numbers only, in `result.json`; empty where it is not there, damaged or without one."""
    try:
        result = json.loads(read_text(path / "result.json"))
        values = np.ravel(result[EVALUATION]).tolist()
        known = any(map(is_number, values)) and is_number(result["env_steps"])
        return {"env_steps": result["env_steps"], EVALUATION: values} if known else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _lengths(group: Group) -> Iterator[Note]:
    """Whether returns after very different numbers of steps are put together."""
    steps = sorted(run.log.steps for run in group.runs)
    if steps[0] < 0.9 * steps[-1]:
        what = f"runs of {steps[0]:,} to {steps[-1]:,} steps are put together"
        yield Note(f"{group.label} in {group.env}", what)


def _most_of_the_way(groups: list[Group]) -> float:
    """The threshold for these groups of one environment; NaN where no run has got anywhere."""
    logs = [run.log.series.get(RECENT) for group in groups for run in group.runs]
    values = np.concatenate([np.ravel(series.values) for series in logs if series] or [np.empty(0)])
    values = values[np.isfinite(values)]
    if not len(values) or values.min() == values.max():  # nothing was learned that could be reached
        return math.nan
    return float(values.min() + 0.9 * (values.max() - values.min()))


def _row(group: Group, finals: list[Returns], kind: Literal["iqm", "mean"], threshold: float) -> Row:
    returns = np.array([value for one in finals for value in one.values])
    band = interval(returns, kind)
    logs, nothing = [run.log for run in group.runs], math.nan
    seconds = [value for run in group.runs for value in seconds_to(run, threshold)]
    return Row(
        env=group.env,
        algorithm=group.algorithm,
        flags=group.variant,
        seeds=sum(run.num_seeds for run in group.runs),
        steps=min(log.steps for log in logs),
        steps_max=max(log.steps for log in logs),
        estimate=estimate_name(kind, len(returns)),
        return_=float(estimate(returns, kind)) if len(returns) else nothing,
        return_low=float(band.low) if band else nothing,
        return_high=float(band.high) if band else nothing,
        training_seeds=sum(len(one.values) for one in finals if one.training),
        steps_per_second=float(np.median([log.steps / (log.trained_seconds or math.nan) for log in logs])),
        wall_seconds=float(np.median([log.wall_seconds for log in logs])),
        threshold=threshold,
        reached=sum(math.isfinite(value) for value in seconds),
        seconds_to_threshold=float(np.median(seconds)),
    )


def run_command(args: Args) -> None:
    """What the command does."""
    if args.csv:
        check_target(Path(args.csv))
    rows = compare(args)
    seen = {} if args.threshold is not None else {"threshold": MOST_OF_THE_WAY}
    show(rows, args.split, LEGEND | seen)
    if args.csv:
        write_csv(rows, args.split, Path(args.csv))
        print(f"saved    {args.csv}")


if __name__ == "__main__":
    main(run_command, parse(Args))
