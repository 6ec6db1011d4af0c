"""Estimates over seeds and their bootstrap intervals, as Agarwal et al. recommend: arxiv.org/abs/2108.13264."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True)
class Interval:
    """The 95% bootstrap interval of an estimate."""

    low: np.ndarray
    high: np.ndarray


def estimate(values: np.ndarray, kind: Literal["iqm", "mean"]) -> np.ndarray:
    """Over the first axis: the mean, or the interquartile mean of Agarwal et al. 2021.

    The latter is without the lowest and the highest quarter, rounded down: the mean where there are fewer than 4.
    """
    cut = len(values) // 4 if kind == "iqm" else 0
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def estimate_name(kind: Literal["iqm", "mean"], count: int) -> str:
    """What `estimate` computes of `count` values, in a word."""
    return "IQM" if kind == "iqm" and count >= 4 else "mean"


def interval(values: np.ndarray, kind: Literal["iqm", "mean"]) -> Interval | None:
    """The 95% percentile bootstrap interval of `estimate` for `values` [S, ...], resampling whole seeds; None for one.

    The random numbers are the same in every call.
    """
    if len(values) < 2:
        return None
    picks = np.random.default_rng(0).integers(len(values), size=(len(values), RESAMPLES))
    columns = values.reshape(len(values), -1).T
    bounds = [np.percentile(estimate(column[picks], kind), (2.5, 97.5)) for column in columns]
    low, high = np.array(bounds).T.reshape(2, *values.shape[1:])
    return Interval(low, high)


def stratified(tasks: list[np.ndarray], kind: Literal["iqm", "mean"] = "iqm") -> tuple[np.ndarray, Interval | None]:
    """`estimate` over all seeds of several tasks, [S, ...] each, and its interval, resampling seeds within each task.

    None for the interval where a task has one seed only (Agarwal et al. 2021, section 4.1).
    """
    value = estimate(np.concatenate(tasks), kind)
    if min(map(len, tasks)) < 2:
        return value, None
    random = np.random.default_rng(0)
    resampled = [task[random.integers(len(task), size=(len(task), RESAMPLES))] for task in tasks]  # [S, R, ...]
    low, high = np.percentile(estimate(np.concatenate(resampled), kind), (2.5, 97.5), axis=0)
    return value, Interval(low, high)
