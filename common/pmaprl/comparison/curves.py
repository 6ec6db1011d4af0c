"""Metrics of runs at common steps, and their last returns."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from pmaprl.runs.metrics import EVALUATION, TRAINING, Log, Series

GRID = 400  # most points of a curve; a picture cannot show more


def align(
    logged: Sequence[Series], x: Literal["env_steps", "wall"] = "env_steps", hold: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate all seeds of all series linearly at the same places.

    The places are those of all series, or GRID evenly spaced ones if they are more.

    Args:
        logged: The series.
        x: The horizontal axis.
        hold: Keep the last number of a seed after its end, instead of NaN.

    Returns:
        The places [P], and the numbers [S, P]. A seed is NaN before its first number.
    """
    xs = [series.steps if x == "env_steps" else series.wall for series in logged]
    finite = [places[np.isfinite(places)] for places in xs]
    places = np.unique(np.concatenate(finite))
    if len(places) > GRID:
        places = np.linspace(places[0], places[-1], GRID)
    rows = []
    for run_places, series in zip(xs, logged, strict=True):
        rows += [_interpolate(places, run_places, y, hold) for y in series.values.T]
    return places, np.stack(rows)


def _interpolate(places: np.ndarray, x: np.ndarray, y: np.ndarray, hold: bool) -> np.ndarray:
    """Interpolate the finite points (x, y) linearly; at equal places the last one counts."""
    finite = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if not len(finite):
        return np.full(len(places), np.nan)
    backwards = finite[::-1]  # np.unique returns the first of equal places
    known_places, first = np.unique(x[backwards], return_index=True)
    values = y[backwards][first]
    after = None if hold else np.nan
    return np.interp(places, known_places, values, np.nan, after)


def final_returns(log: Log) -> tuple[np.ndarray, bool]:
    """Find the last return of each seed.

    Returns:
        The returns [S] of the last greedy evaluation, or of training if there was none, NaN where
        nothing is known; and True if they are of training.
    """
    if EVALUATION in log.series:
        return log.series[EVALUATION].values[-1], False
    if TRAINING not in log.series:
        return np.full(1, math.nan), True
    returns = []
    for values in log.series[TRAINING].values.T:
        finite = values[np.isfinite(values)]
        returns.append(finite[-1] if len(finite) else math.nan)
    return np.array(returns), True
