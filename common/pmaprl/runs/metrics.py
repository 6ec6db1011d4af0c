"""Writing of metrics, to `metrics.jsonl`, TensorBoard and Weights & Biases, and reading them."""

import importlib
import json
import math
import os
import re
import secrets
import shutil
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
LONGEST_LINE = 2**27  # most characters of a row: some hundred metrics of 10,000 members
WRITERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # packages by flag


class LogWriter:
    """Writers for rows of flat names; values are numbers, or lists of one number per seed."""

    def __init__(self, directory: Path, args: Any, config: Row, resume_at: int = 0):
        """Open the writers.

        Args:
            directory: the run's directory.
            args: the flags.
            config: the content of `config.json`.
            resume_at: the step at which the run goes on. Later rows of `metrics.jsonl` are dropped,
                because the run makes them again.
        """
        self._path = directory / "metrics.jsonl"
        with in_one_step(self._path) as temporary, temporary.open("w") as file:
            for row in read(self._path):
                if row["env_steps"] <= resume_at:
                    file.write(json.dumps(row) + "\n")
        self._file = self._path.open("a+")
        self._args = args
        writers = import_writers(args)
        self._tensorboard = None
        if args.tensorboard:
            # TensorBoard hides the numbers of steps that the run makes again
            first_step = resume_at + 1 if args.resume else None
            self._tensorboard = writers["tensorboard"].SummaryWriter(
                str(directory), purge_step=first_step
            )
            flags = json.dumps(config, indent=2, default=str)
            indented = flags.replace("\n", "\n    ")  # Markdown shows indented text as it is
            self._tensorboard.add_text("config", f"    {indented}", resume_at)
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
        # The row of a late evaluation: the times of its step are written already
        if row["env_steps"] <= self._newest:
            scalars = {
                name: value for name, value in scalars.items() if not name.startswith("time/")
            }
        if self._tensorboard:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, row["env_steps"])
        self._newest = max(self._newest, row["env_steps"])
        if self._wandb:
            # wandb drops rows of earlier steps, such as those of late evaluations
            self._wandb.log(scalars, step=self._newest)

    @property
    def is_in_place(self) -> bool:
        """False if `metrics.jsonl` was deleted or replaced since it was opened."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._file.fileno()))

    def write_anew(self) -> None:
        """Write `metrics.jsonl` with all rows again, which the open file has still."""
        with in_one_step(self._path) as temporary:
            file = temporary.open("a+")
            self._file.seek(0)
            shutil.copyfileobj(self._file, file)
            file.flush()
        self._file.close()
        self._file = file

    def close(self) -> None:
        with ExitStack() as writers:  # closes all, even if one fails
            writers.callback(self._file.close)
            if self._tensorboard:
                writers.callback(self._tensorboard.close)
            if self._wandb:
                writers.callback(self._wandb.finish)


def import_writers(args: Any) -> dict[str, ModuleType]:
    """Import the packages of the writers that flags ask for.

    Raises:
        UsageError: one is not installed.
    """
    modules = {}
    for flag, package in WRITERS.items():
        if not getattr(args, flag):
            continue
        try:
            modules[flag] = importlib.import_module(package)
        except ImportError as error:
            raise UsageError(
                f'--{flag} needs {package}: pip install {package}, or -e ".[{flag}]" ({error})'
            ) from error
    return modules


def _wandb_id(directory: Path) -> str:
    """Weights & Biases' name of a run, stored so that a resumed run goes on in the same charts."""
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


PLACES = {"pbt/source"}  # metrics that are indices of members, and no quantities
# Metrics whose highest value is the best one
OF_EPISODES = re.compile("(episode|eval)/return(?!_std|_min)")


def summarized(row: Row, is_population: bool, each: bool = False) -> dict[str, float]:
    """Reduce a row to scalars for charts: the mean of seeds, or median and best of members.

    Args:
        row: numbers, or lists of one number per seed or member; None is no number.
        is_population: True if lists are of members.
        each: True to give every seed or member a scalar of its own too.
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
            if OF_EPISODES.match(name):
                scalars[f"{name}/best"] = max(known)
        elif known:
            scalars[name] = float(np.mean(known))
        if each:
            for index, x in enumerate(value):
                scalars[f"{name}/{agent}_{index}"] = x
    return {name: x for name, x in scalars.items() if x is not None}


def jsonable(value: Any) -> Any:
    """Convert an array [S] to a number (one seed) or a list, with None for NaN and infinity."""
    if type(value) is int:
        return value
    if type(value) is float:
        return _rounded(value)
    values = np.asarray(value)
    if values.size == 1 and values.dtype.kind == "f":  # most numbers of a run with one agent
        return _rounded(values.item())
    if values.dtype.kind not in "iufb" or values.dtype.itemsize > 8:
        values = values.astype(float)
    clean = [x if type(x) is int else _rounded(x) for x in values.ravel().tolist()]
    return clean[0] if len(clean) == 1 else clean


def _rounded(number: float) -> float | None:
    """Round to the seven digits that float32 has; None for NaN and infinity."""
    return float("%.7g" % number) if math.isfinite(number) else None  # noqa: UP031 (it is twice as fast)


# --------------------------------------------------------------------------------------------------
# read


def read(path: Path) -> Iterator[Row]:
    """Iterate over the rows of a metrics file.

    Lines that are no rows, or that a crash has cut off, are left out.

    Raises:
        UsageError: the file cannot be one of a run, see `stored.py`.
    """
    if not os.path.lexists(path):
        return
    with opened(path) as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise UsageError(
                    f"{path} has a line of over {LONGEST_LINE:,} characters: it is damaged"
                )
            row = _row(line)
            if row:
                yield row


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_number(row.get("env_steps")) else None


def _numbers_of(value: Any) -> np.ndarray | None:
    """A metric of a row, [S] or [1]; None if it is neither a number nor a list of numbers."""
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(x is None or isinstance(x, int | float) for x in numbers):
        return None
    try:
        return np.array(numbers, float)
    except OverflowError:
        return None


def is_number(value: Any) -> bool:
    """True for a value of a finite JSON number."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) < 2**63


def _as_number(value: Any) -> float:
    return value if is_number(value) else math.nan


@dataclass(frozen=True)
class Series:
    """One metric over the rows of a run that have it."""

    steps: np.ndarray  # [P]
    wall: np.ndarray  # [P], seconds
    values: np.ndarray  # [P, S], or [P, 1] for a number of the whole run; NaN is no number


@dataclass(frozen=True)
class Log:
    """Some metrics of `metrics.jsonl`."""

    series: dict[str, Series]  # without metrics that no row has
    names: frozenset[str]  # all metrics that some row has
    steps: int
    wall_seconds: float  # of all invocations; NaN if no row has it
    trained_seconds: float  # without compilation, evaluation and saving

    def of(self, agents: list[int], count: int) -> "Log":
        """Select the numbers of some of `count` agents; numbers of the whole run stay.

        Raises:
            UsageError: a metric has numbers of more or fewer agents.
        """
        selected = {}
        for name, series in self.series.items():
            num_agents = series.values.shape[1]
            if num_agents not in (1, count):
                raise UsageError(f"{name} has numbers of {num_agents} agents, in a run of {count}")
            if num_agents == count:
                series = replace(series, values=series.values[:, agents])
            selected[name] = series
        return replace(self, series=selected)


def read_log(run_dir: Path, metrics: Iterable[str]) -> Log:
    """Read `metrics.jsonl` row by row, keeping `metrics` only."""
    names = set()
    newest = 0
    wall_seconds = math.nan
    speed = math.nan
    points = {name: [] for name in metrics}  # (step, seconds, numbers) of each row
    for row in read(run_dir / "metrics.jsonl"):
        step = row["env_steps"]
        wall = _as_number(row.get("time/wall"))
        if step > newest:  # otherwise it is the row of a late evaluation
            newest = step
            wall_seconds = wall
            speed = _as_number(row.get("time/sps_total", speed))
        names.update(row)
        for name in points.keys() & row.keys():
            numbers = _numbers_of(row[name])
            if numbers is None:
                value = shortened(repr(row[name]))
                raise UsageError(
                    f"{run_dir}/metrics.jsonl: {name} is {value} at step {step:,}, not a number "
                    "or a list of numbers"
                )
            before = points[name][-1][2] if points[name] else numbers
            if len(numbers) != len(before):
                raise UsageError(
                    f"{run_dir}/metrics.jsonl: {name} has numbers of several agents, "
                    f"{len(numbers)} at step {step:,}, and {len(before)} before"
                )
            points[name].append((step, wall, numbers))
    series = {}
    for name, rows in points.items():
        if rows:
            steps, walls, values = zip(*rows, strict=True)
            series[name] = Series(
                steps=np.array(steps, float),
                wall=np.array(walls, float),
                values=np.array(values, float),
            )
    trained = newest / speed if is_number(speed) and speed > 0 else math.nan
    return Log(
        series=series,
        names=frozenset(names),
        steps=newest,
        wall_seconds=wall_seconds,
        trained_seconds=trained,
    )
