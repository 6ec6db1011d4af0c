"""What a run's `metrics.jsonl` holds of the metrics one asks for, read row by row: it may be larger than memory."""

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.errors import UsageError
from common.runs.metrics import is_number, read


@dataclass(frozen=True)
class Series:
    """One metric over the rows of a run that have it."""

    steps: np.ndarray  # [P]
    wall: np.ndarray  # [P], seconds
    values: np.ndarray  # [P, S], or [P, 1] for a number of the whole run; NaN where there is none

    @property
    def last(self) -> np.ndarray:
        """The last number of every seed, [S]; NaN where it has none."""
        return np.array([[math.nan, *y[np.isfinite(y)]][-1] for y in self.values.T])


@dataclass(frozen=True)
class Log:
    """What `metrics.jsonl` holds of the metrics that were asked for."""

    series: dict[str, Series]  # a metric that no row has is left out
    names: frozenset[str]  # all metrics that some row has
    steps: int
    wall_seconds: float  # of all invocations; NaN where no row has it
    trained_seconds: float  # without compilation, evaluation and saving

    def of(self, agents: list[int], count: int) -> "Log":
        """That of some of `count` agents; numbers of the whole run stay."""
        series = {
            name: replace(one, values=one.values[:, agents]) if one.values.shape[1] == count else one
            for name, one in self.series.items()
        }
        return replace(self, series=series)


class _Clock:
    """Steps and seconds at a row, over all invocations: the counters of `time/*` begin again when a run is resumed.

    A resume is seen by another `time/compile`, which is constant in an invocation, or by a smaller `time/wall`. Seconds
    of rows that a resume dropped, because they were after the checkpoint, are not in the file and not counted.
    """

    def __init__(self):
        self.steps = self._first_step = 0
        self._wall = self._wall_before = self._trained = self._trained_before = 0.0
        self._compile = None

    def advance(self, row: dict[str, Any]) -> tuple[float, float]:
        """Step and seconds of the row. That of a late evaluation is of a moment before, and changes nothing."""
        wall, compiled, speed = (row.get(f"time/{name}") for name in ("wall", "compile", "sps_total"))
        if row["env_steps"] <= self.steps and is_number(wall) and compiled == self._compile:
            return row["env_steps"], self._wall_before + wall
        if is_number(wall):
            if wall < self._wall or compiled != self._compile:
                self._wall_before += self._wall
                self._trained_before += self._trained
                self._first_step, self._trained = self.steps, 0.0
            self._wall, self._compile = wall, compiled
        self.steps = row["env_steps"]
        if is_number(speed) and speed > 0:
            self._trained = (self.steps - self._first_step) / speed
        return self.steps, self.wall_seconds

    @property
    def wall_seconds(self) -> float:
        return self._wall_before + self._wall or math.nan  # before the first row that has it

    @property
    def trained_seconds(self) -> float:
        return self._trained_before + self._trained


class _Column:
    """The rows that have one metric, 8 bytes a number."""

    def __init__(self):
        self._steps, self._wall, self._values = array("d"), array("d"), array("d")
        self._width = 0

    def add(self, step: float, wall: float, value: Any) -> None:
        """Add a number, None or a list of them; anything else, or another length than before, is damage: left out."""
        numbers = value if isinstance(value, list) else [value]
        self._width = self._width or len(numbers)
        if len(numbers) != self._width or not all(x is None or is_number(x) for x in numbers):
            return
        self._steps.append(step)
        self._wall.append(wall)
        self._values.extend(math.nan if x is None else x for x in numbers)

    def series(self) -> Series | None:
        if not self._steps:
            return None
        values = np.array(self._values).reshape(len(self._steps), self._width)
        return Series(np.array(self._steps), np.array(self._wall), values)


def read_log(run_dir: Path, metrics: Iterable[str]) -> Log:
    """Read `metrics.jsonl` row by row, keeping `metrics` only. Raises UsageError where it is there but not readable."""
    columns, clock, names = {name: _Column() for name in metrics}, _Clock(), set()
    for row in _rows(run_dir / "metrics.jsonl"):
        moment = clock.advance(row)
        names.update(row)
        for name in columns.keys() & row.keys():
            columns[name].add(*moment, row[name])
    series = {name: column.series() for name, column in columns.items()}
    series = {name: one for name, one in series.items() if one}
    return Log(series, frozenset(names), clock.steps, clock.wall_seconds, clock.trained_seconds)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', '') or 'it is not text'}") from error
