"""Where metrics go: `metrics.jsonl` always, TensorBoard and Weights & Biases on request."""

import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.errors import UsageError
from common.cli.files import check_file, in_one_step

Row = dict[str, Any]
LONGEST = 2**24  # characters of a row; those of ten thousand seeds have 2**22


class Metrics:
    """Writers for rows of flat names; values are numbers, or lists of one number per seed."""

    def __init__(self, directory: Path, args: Any, config: Row, resume_at: int = 0):
        """Open `metrics.jsonl` in `directory`; when resuming, rows after step `resume_at` are dropped first."""
        path = directory / "metrics.jsonl"
        rewrite(path, (row for row in read(path) if row["env_steps"] <= resume_at))
        self._file, self._agent = path.open("a"), "member" if args.is_population else "seed"
        self._tensorboard = (
            _import("tensorboardX", "tensorboard").SummaryWriter(str(directory)) if args.tensorboard else None
        )
        self._wandb, self._newest = _import("wandb", "wandb") if args.wandb else None, 0
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
        scalars = _scalars(row, self._agent)
        if row["env_steps"] <= self._newest:  # an evaluation that was late: the times of that step are there already
            scalars = {name: value for name, value in scalars.items() if not name.startswith("time/")}
        if self._tensorboard:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, row["env_steps"])
        self._newest = max(self._newest, row["env_steps"])
        if self._wandb:
            self._wandb.log(scalars, step=self._newest)  # it drops rows that come late, as background evaluations do

    def close(self) -> None:
        with ExitStack() as writers:  # all are closed, whichever fails
            writers.callback(self._file.close)
            if self._tensorboard:
                writers.callback(self._tensorboard.close)
            if self._wandb:
                writers.callback(self._wandb.finish)


def check_extras(tensorboard: bool, wandb: bool) -> None:
    """Raise UsageError where a wanted writer is not installed."""
    if tensorboard:
        _import("tensorboardX", "tensorboard")
    if wandb:
        _import("wandb", "wandb")


def rewrite(path: Path, rows: Iterable[Row]) -> None:
    """Replace a metrics file in one step; `rows` may come from that very file."""
    with in_one_step(path) as temporary, temporary.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path: Path) -> Iterator[Row]:
    """The rows of a metrics file, one after another; lines that are none, or cut off by a crash, are left out.

    Raises OSError where it cannot be read.
    """
    check_file(path)
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        lines = iter(partial(file.readline, LONGEST), "")  # a longer one comes in pieces, which are no rows
        yield from filter(None, map(_row, lines))


def damaged_line(path: Path) -> int:
    """The number of the first line of such a file that is no row; 0 where all are, but for a last one that a crash cut
    off. Raises OSError where it cannot be read.
    """
    check_file(path)
    with path.open(errors="replace") as file:
        lines = enumerate(iter(partial(file.readline, LONGEST), ""), start=1)
        return next((number for number, line in lines if line.endswith("\n") and _row(line) is None), 0)


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_number(row.get("env_steps")) else None


def is_number(value: Any) -> bool:
    """Whether `value` came from a JSON number, and a finite one."""
    return type(value) is float and math.isfinite(value) or type(value) is int and abs(value) < 2**63


def jsonable(value: Any) -> Any:
    """Arrays [S] as a number (one seed) or a list, with None for what is not finite, so that the line is valid JSON."""
    values = np.ravel(np.asarray(value))
    if values.dtype.kind in "iu":
        clean = values.tolist()
    else:
        clean = [float(f"{x:.7g}") if math.isfinite(x) else None for x in values.astype(float)]
    return clean[0] if len(clean) == 1 else clean


def _wandb_id(directory: Path) -> str:
    """Weights & Biases' name for this run, kept in its directory so that a resumed run goes on in the same charts."""
    path = directory / "wandb_id"
    if not path.exists():
        with in_one_step(path) as temporary:
            temporary.write_text(secrets.token_hex(4))
    return path.read_text()


def _scalars(row: Row, agent: str) -> dict[str, float]:
    scalars = {}
    for name, value in row.items():
        if isinstance(value, list):
            scalars |= {f"{name}/{agent}_{i}": x for i, x in enumerate(value) if x is not None}
        elif value is not None:
            scalars[name] = value
    return scalars


def _import(module: str, extra: str) -> Any:
    try:
        return __import__(module)
    except ImportError as error:
        raise UsageError(f'--{extra} needs {module}: pip install "{module}", or pip install -e ".[{extra}]"') from error
