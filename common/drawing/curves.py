"""Learning curves: one for each seed of a group of runs, and all of them at the same places."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.cli.errors import UsageError
from common.drawing.groups import Group, LoggedRun

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


def align(curves: list[Curve], hold: bool = False) -> Aligned:
    """Interpolate linearly to all places that any curve has (beyond GRID: to evenly spaced ones), where all curves are.

    With `hold`, a curve that has ended keeps its last value until the last one ends. Raises UsageError where the curves
    have no range in common.
    """
    latest_start = max(curves, key=lambda curve: curve.x[0])
    ends = sorted(curves, key=lambda curve: curve.x[-1])
    start, end = latest_start.x[0], ends[-1 if hold else 0].x[-1]
    if start > end:
        raise UsageError(
            f"{ends[0].run.path} ends at {end:,.0f}, before {latest_start.run.path} begins at {start:,.0f}: "
            "they have no range in common to average over; leave one out, or tell them apart with --by"
        )
    places = np.unique(np.concatenate([curve.x for curve in curves]))
    places = places[(places >= start) & (places <= end)]
    places = np.linspace(start, end, GRID) if len(places) > GRID else places
    return Aligned(places, np.stack([np.interp(places, curve.x, curve.y) for curve in curves]))
