"""Where metrics go, `metrics.jsonl`, TensorBoard and Weights & Biases, and how they are read
again.
"""

import importlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pmaprl.cli.errors import UsageError, shortened
from pmaprl.cli.files import in_one_step
from pmaprl.cli.stored import opened, read_bytes

TRAINING = "episode/return"
EVALUATION = "eval/return_mean"
RECENT = "episode/return_last100"
Row = dict[str, Any]
LONGEST_LINE = 2**27  # characters of a row: of 10,000 members some hundred metrics
WRITERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # by its flag, the package of a writer


class LogWriter:
    """Writers for rows of flat names; values are numbers, or lists of one number per seed."""

    def __init__(self, directory: Path, args: Any, config: Row, resume_at: int = 0):
        """Open `metrics.jsonl` in `directory`. Rows after step `resume_at` go: a resumed run has
        not had them yet.
        """
        path = directory / "metrics.jsonl"
        with in_one_step(path) as temporary, temporary.open("w") as file:
            file.writelines(
                json.dumps(row) + "\n" for row in read(path) if row["env_steps"] <= resume_at
            )
        self._file = path.open("a")
        self._args = args
        writers = import_writers(args)
        self._tensorboard = None
        if args.tensorboard:
            # TensorBoard then hides what the run has shown of steps that it makes again
            again = resume_at + 1 if args.resume else None
            self._tensorboard = writers["tensorboard"].SummaryWriter(
                str(directory), purge_step=again
            )
            flags = json.dumps(config, indent=2, default=str).replace("\n", "\n    ")
            # Indented, Markdown keeps it as it is
            self._tensorboard.add_text("config", f"    {flags}", resume_at)
        self._wandb = writers.get("wandb")
        self._newest = 0
        if self._wandb:
            self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "pmaprl"),
                name=os.environ.get("WANDB_NAME", directory.name),
                dir=str(directory),
                id=_wandb_id(directory),
                resume="allow",
                config=config,
            )

    def write(self, row: Row) -> None:
        """Add one row; it is on disk when this returns."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        scalars = {}
        if self._tensorboard or self._wandb:
            scalars = summarized(row, self._args.is_population, self._args.log_each)
        # An evaluation that was late: the times of that step are there already
        if row["env_steps"] <= self._newest:
            scalars = {
                name: value for name, value in scalars.items() if not name.startswith("time/")
            }
        if self._tensorboard:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, row["env_steps"])
        self._newest = max(self._newest, row["env_steps"])
        if self._wandb:
            # It drops rows that come late, as background evaluations do
            self._wandb.log(scalars, step=self._newest)

    def close(self) -> None:
        with ExitStack() as writers:  # all are closed, whichever fails
            writers.callback(self._file.close)
            if self._tensorboard:
                writers.callback(self._tensorboard.close)
            if self._wandb:
                writers.callback(self._wandb.finish)


def import_writers(args: Any) -> dict[str, ModuleType]:
    """The packages of the writers that flags ask for. Raises UsageError where one is not
    installed.
    """
    found = {}
    for flag, package in WRITERS.items():
        try:
            found |= {flag: importlib.import_module(package)} if getattr(args, flag) else {}
        except ImportError as error:
            raise UsageError(
                f'--{flag} needs {package}: pip install {package}, or -e ".[{flag}]" ({error})'
            ) from error
    return found


def _wandb_id(directory: Path) -> str:
    """Weights & Biases' name for this run, kept in its directory so that a resumed run goes on in
    the same charts.
    """
    path = directory / "wandb_id"
    if not path.exists():
        with in_one_step(path) as temporary:
            temporary.write_text(secrets.token_hex(4))
    name = read_bytes(directory, path.name).decode(errors="replace")
    if not re.fullmatch("[0-9a-z]{1,64}", name):
        raise UsageError(
            f"{path} is no name of a run in Weights & Biases, {shortened(name)!r}: delete the file"
        )
    return name


PLACES = {"pbt/source"}  # metrics that are places of members, and no quantities
# Metrics of which the best is the highest
OF_EPISODES = re.compile("(episode|eval)/return(?!_std|_min)")


def summarized(row: Row, is_population: bool, each: bool = False) -> dict[str, float]:
    """The scalars of a row for charts: of several seeds the mean, of members the median and the
    best return.

    Args:
        row: numbers, or lists of one number per seed or member; None where there is none.
        is_population: whether lists are of members.
        each: whether every seed or member has a scalar of its own too.
    """
    scalars = {}
    agent = "member" if is_population else "seed"
    for name, value in row.items():
        if not isinstance(value, list):
            scalars[name] = value
            continue
        known = [x for x in value if x is not None]
        if name in PLACES:
            known = []
        if known and is_population:
            scalars[f"{name}/median"] = float(np.median(known))
            scalars |= {f"{name}/best": max(known)} if OF_EPISODES.match(name) else {}
        elif known:
            scalars[name] = float(np.mean(known))
        if each:
            scalars |= {f"{name}/{agent}_{index}": x for index, x in enumerate(value)}
    return {name: x for name, x in scalars.items() if x is not None}


def jsonable(value: Any) -> Any:
    """Arrays [S] as a number (one seed) or a list, with None for what is not finite, so that the
    line is valid JSON.
    """
    if type(value) is int:
        return value
    if type(value) is float:
        return _rounded(value)
    values = np.asarray(value)
    if values.dtype.kind not in "iufb" or values.dtype.itemsize > 8:
        values = values.astype(float)
    clean = [x if type(x) is int else _rounded(x) for x in values.ravel().tolist()]
    return clean[0] if len(clean) == 1 else clean


def _rounded(number: float) -> float | None:
    """Seven digits, which is what float32 has; None for what is not finite."""
    return float("%.7g" % number) if math.isfinite(number) else None  # noqa: UP031 (it is twice as fast)


# --------------------------------------------------------------------------------------------------
# read


def read(path: Path) -> Iterator[Row]:
    """The rows of a metrics file, one after another; lines that are none, or cut off by a crash,
    are left out.

    Raises UsageError where the file is none of a run, see `stored.py`.
    """
    if not os.path.lexists(path):
        return
    with opened(path) as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise UsageError(
                    f"{path} has a line of over {LONGEST_LINE:,} characters: it is damaged"
                )
            if row := _row(line):
                yield row


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_number(row.get("env_steps")) else None


def _numbers_of(value: Any) -> np.ndarray | None:
    """A metric of a row, [S] or [1]; None where it is neither a number nor a list of numbers."""
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(x is None or isinstance(x, int | float) for x in numbers):
        return None
    try:
        return np.array(numbers, float)
    except OverflowError:
        return None


def is_number(value: Any) -> bool:
    """Whether `value` came from a JSON number, and a finite one."""
    return (
        type(value) is float and math.isfinite(value) or type(value) is int and abs(value) < 2**63
    )


def _as_number(value: Any) -> float:
    return value if is_number(value) else math.nan


@dataclass(frozen=True)
class Series:
    """One metric over the rows of a run that have it."""

    steps: np.ndarray  # [P]
    wall: np.ndarray  # [P], seconds
    values: np.ndarray  # [P, S], or [P, 1] for a number of the whole run; NaN where there is none


@dataclass(frozen=True)
class Log:
    """What `metrics.jsonl` holds of the metrics that were asked for."""

    series: dict[str, Series]  # a metric that no row has is left out
    names: frozenset[str]  # all metrics that some row has
    steps: int
    wall_seconds: float  # of all invocations; NaN where no row has it
    trained_seconds: float  # without compilation, evaluation and saving

    def of(self, agents: list[int], count: int) -> "Log":
        """Take that of some of `count` agents; numbers of the whole run stay.

        Raises UsageError where a metric has numbers of more or fewer agents.
        """
        for name, one in self.series.items():
            if (agents_of_metric := one.values.shape[1]) not in (1, count):
                raise UsageError(
                    f"{name} has numbers of {agents_of_metric} agents, in a run of {count}"
                )
        series = {
            name: replace(one, values=one.values[:, agents])
            if one.values.shape[1] == count
            else one
            for name, one in self.series.items()
        }
        return replace(self, series=series)


def read_log(run_dir: Path, metrics: Iterable[str]) -> Log:
    """Read `metrics.jsonl` row by row, keeping `metrics` only."""
    names = set()
    newest = 0
    wall_seconds = math.nan
    speed = math.nan
    found = {name: ([], [], []) for name in metrics}  # steps, seconds and values
    for row in read(run_dir / "metrics.jsonl"):
        step = row["env_steps"]
        wall = _as_number(row.get("time/wall"))
        if step > newest:  # else it is a late evaluation's, of a moment before
            newest = step
            wall_seconds = wall
            speed = _as_number(row.get("time/sps_total", speed))
        names.update(row)
        for name in found.keys() & row.keys():
            values = _numbers_of(row[name])
            if values is None:
                what = f"{name} is {shortened(repr(row[name]))} at step {step:,}"
                raise UsageError(
                    f"{run_dir}/metrics.jsonl: {what}, not a number or a list of numbers"
                )
            if found[name][2] and len(values) != len(found[name][2][-1]):
                lengths = f"{len(values)} at step {step:,}, and {len(found[name][2][-1])} before"
                raise UsageError(
                    f"{run_dir}/metrics.jsonl: {name} has numbers of several agents, {lengths}"
                )
            for column, value in zip(found[name], (step, wall, values), strict=True):
                column.append(value)
    series = {
        name: Series(*(np.array(x, float) for x in columns))
        for name, columns in found.items()
        if columns[0]
    }
    trained = newest / speed if is_number(speed) and speed > 0 else math.nan
    return Log(
        series=series,
        names=frozenset(names),
        steps=newest,
        wall_seconds=wall_seconds,
        trained_seconds=trained,
    )
