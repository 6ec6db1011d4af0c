"""Learning curves: one for each seed of a group of runs, and all of them at the same places."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.drawing.groups import Group, LoggedRun
from common.runs.history import Series

GRID = 400  # points of a curve at most; more than a picture can show


@dataclass(frozen=True)
class Curve:
    """One metric of one seed, x strictly increasing, all finite."""

    run: LoggedRun
    x: np.ndarray  # [P]
    y: np.ndarray  # [P]


@dataclass(frozen=True)
class Aligned:
    """Curves at the same places."""

    x: np.ndarray  # [G]
    values: np.ndarray  # [S, G]


def curves(group: Group, metric: str, x: Literal["env_steps", "wall"]) -> list[Curve]:
    """The curve of every seed of a group (of every run, for a metric of the whole run), the empty ones left out."""
    found = []
    for run in group.runs:
        if metric not in run.log.series:
            continue
        series = run.log.series[metric]
        places = series.steps if x == "env_steps" else series.wall
        for values in series.values.T:
            there = np.isfinite(values) & np.isfinite(places)
            reverse = places[there][::-1]  # so that of equal places the last counts
            ordered, first = np.unique(reverse, return_index=True)
            found += [Curve(run, ordered, values[there][::-1][first])] if len(ordered) else []
    return found


def between(series: Series) -> Series:
    """The rows in which some seed has a number; what a seed lacks between two of its own is interpolated."""
    rows = np.isfinite(series.values).any(axis=1)
    steps, values = series.steps[rows], series.values[rows]
    for y in values.T:
        own = np.isfinite(y)
        y[:] = np.interp(steps, steps[own], y[own], np.nan, np.nan) if own.any() else np.nan
    return Series(steps, series.wall[rows], values)


def overlapping(curves: list[Curve]) -> list[Curve]:
    """Those that have a range in common: without any that ends before another one begins."""
    latest_start = max((curve.x[0] for curve in curves), default=0)
    return [curve for curve in curves if curve.x[-1] >= latest_start]


def align(curves: list[Curve], hold: bool = False) -> Aligned:
    """Interpolate linearly to all places that any curve has (beyond GRID: to evenly spaced ones), where all curves are.

    With `hold`, a curve that has ended keeps its last value until the last one ends; without, they have to overlap.
    """
    start = max(curve.x[0] for curve in curves)
    end = (max if hold else min)(curve.x[-1] for curve in curves)
    places = np.unique(np.concatenate([curve.x for curve in curves]))
    places = places[(places >= start) & (places <= end)]
    places = np.linspace(start, end, GRID) if len(places) > GRID else places
    return Aligned(places, np.stack([np.interp(places, curve.x, curve.y) for curve in curves]))
