"""Estimates over seeds and their uncertainty, as Agarwal et al. (2021) recommend.

The paper is arxiv.org/abs/2108.13264. Shapes: S seeds, P points of a curve. All bootstraps draw the
same random numbers in every call.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["iqm", "mean"]
RESAMPLES = 2000  # resamples of a bootstrap
FEWEST = 4  # least seeds of an interval: resamples of fewer say almost nothing about other seeds
CONFIDENCE = "95% bootstrap interval"
ENDS = 2.5, 97.5  # percentiles of the interval
RANGE = "range of the seeds"


class Interval(NamedTuple):
    """Range of an estimate: a bootstrap interval, or the range of few seeds."""

    low: np.ndarray
    high: np.ndarray
    name: str = CONFIDENCE


def estimate(values: np.ndarray, kind: Kind = "iqm") -> np.ndarray:
    """Estimate the mean or the interquartile mean of values [S, ...] over the first axis.

    The interquartile mean leaves out the lowest and the highest quarter, rounded down, and so is
    the mean of fewer than four values.
    """
    cut = len(values) // 4 if kind == "iqm" else 0
    middle = np.sort(values, axis=0)[cut : len(values) - cut]
    return middle.mean(axis=0)


def estimate_name(kind: Kind, count: int) -> str:
    """Name of the estimate that `estimate` computes of `count` values."""
    return "IQM" if kind == "iqm" and count >= FEWEST else "mean"


def interval(*tasks: np.ndarray, kind: Kind = "iqm") -> Interval | None:
    """Compute the 95% percentile bootstrap interval of `estimate` over seeds.

    It resamples whole seeds within each task (section 4.1 of the paper).

    Args:
        tasks: values [S, ...] of each task.
        kind: the estimate.

    Returns:
        The interval [...]; None if a task has fewer than FEWEST seeds.
    """
    if min(map(len, tasks)) < FEWEST:
        return None
    random = np.random.default_rng(0)
    picks = [random.integers(len(task), size=(len(task), RESAMPLES)) for task in tasks]
    columns = [task.reshape(len(task), -1).T for task in tasks]
    bounds = []
    for column in zip(*columns, strict=True):  # one by one, so that memory holds [S, RESAMPLES]
        resamples = [seeds[pick] for seeds, pick in zip(column, picks, strict=True)]
        estimates = estimate(np.concatenate(resamples), kind)
        bounds.append(np.percentile(estimates, ENDS))
    low, high = np.array(bounds).T.reshape(2, *tasks[0].shape[1:])
    return Interval(low, high)


def spread(values: np.ndarray, kind: Kind = "iqm") -> Interval | None:
    """The bootstrap interval of values [S, ...], or the range of few seeds; None for one seed."""
    if len(values) < 2:
        return None
    bootstrap = interval(values, kind=kind)
    if bootstrap:
        return bootstrap
    return Interval(values.min(axis=0), values.max(axis=0), RANGE)


class Difference(NamedTuple):
    """Difference of values from those of a baseline."""

    value: float  # estimate of the values, minus the estimate of the baseline
    interval: Interval | None  # 95%; None for too few seeds
    paired: bool  # True if both sides have the same seeds
    probability: float  # of improvement: that a seed of the values is above one of the baseline
    probability_interval: Interval | None


def difference(
    values: np.ndarray,
    seeds: Sequence[int],
    baseline: np.ndarray,
    baseline_seeds: Sequence[int],
    kind: Kind = "iqm",
) -> Difference:
    """Compare values with those of a baseline.

    If both have the same seeds, each of them once, a resample takes the same seeds on both sides.
    The probability of improvement is that of section 4.3 of the paper: Mann and Whitney's statistic
    over the number of pairs, in which a tie is half.

    Args:
        values: values [S].
        seeds: their seeds.
        baseline: values [S'] of the baseline.
        baseline_seeds: their seeds.
        kind: the estimate.
    """
    paired = sorted(seeds) == sorted(baseline_seeds) and len(set(seeds)) == len(seeds)
    if paired:
        values = values[np.argsort(seeds)]
        baseline = baseline[np.argsort(baseline_seeds)]
    value = float(estimate(values, kind) - estimate(baseline, kind))
    probability = float(_improvement(values[:, None], baseline[:, None])[0])
    if min(len(values), len(baseline)) < FEWEST:
        return Difference(
            value=value,
            interval=None,
            paired=paired,
            probability=probability,
            probability_interval=None,
        )

    random = np.random.default_rng(0)
    picks = random.integers(len(values), size=(len(values), RESAMPLES))
    baseline_picks = picks
    if not paired:
        baseline_picks = random.integers(len(baseline), size=(len(baseline), RESAMPLES))
    ours = values[picks]  # [S, RESAMPLES]
    theirs = baseline[baseline_picks]
    differences = estimate(ours, kind) - estimate(theirs, kind)
    low, high = np.percentile(differences, ENDS)
    lowest, highest = np.percentile(_improvement(ours, theirs), ENDS)
    return Difference(
        value=value,
        interval=Interval(low, high),
        paired=paired,
        probability=probability,
        probability_interval=Interval(lowest, highest),
    )


def _improvement(values: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """Share of pairs whose value is above their baseline value; a tie counts as half.

    Args:
        values: [S, R], in R resamples.
        baseline: [S', R].

    Returns:
        The share [R].
    """
    from scipy.stats import rankdata

    count = len(values)
    ranks = rankdata(np.concatenate([values, baseline]), axis=0)[:count]
    above = ranks.sum(axis=0) - count * (count + 1) / 2
    return above / (count * len(baseline))


def mean_over_steps(steps: np.ndarray, values: np.ndarray, first: float, last: float) -> np.ndarray:
    """Average curves over steps: the area between two steps, over their distance.

    Between two points a curve is a line.

    Args:
        steps: places [P].
        values: curves [S, P] at these places.
        first: beginning of the average.
        last: its end.

    Returns:
        The averages [S]; NaN for a curve that does not reach from `first` to `last`.
    """
    inside = (steps > first) & (steps < last)
    points = np.concatenate([[first], steps[inside], [last]])
    areas = []
    for curve in values:
        is_finite = np.isfinite(curve)
        if is_finite.any() and last > first:
            y = np.interp(points, steps[is_finite], curve[is_finite], left=np.nan, right=np.nan)
            areas.append(np.trapezoid(y, points) / (last - first))
        else:
            areas.append(np.nan)
    return np.array(areas)
