"""Stored results of a run: `result.json`, and the order of members by their returns.

The module imports nothing slow, because plots and tables read many runs.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.cli.stored import read_json
from pmaprl.runs.metrics import TRAINING, Series, is_number, read_log

RESULT = "result.json"


@dataclass(repr=False)
class TrainResult:
    """Result of `train`."""

    params: Any  # host arrays with a leading seed axis
    evaluation: dict[str, Any]  # the last one, such as `eval/return_mean`: one number per seed
    env_steps: int
    run_dir: Path | None
    state_sha256: str
    status: str  # "finished" or "stopped"

    def __repr__(self) -> str:
        returns = self.evaluation.get("eval/return_mean")
        fields = f"{self.status!r}, env_steps={self.env_steps}, return_mean={returns}"
        return f"TrainResult(status={fields}, run_dir={str(self.run_dir)!r})"


class EvaluationResult(NamedTuple):
    """Metrics of an evaluation, with one number per seed."""

    step: int  # environment steps of the state that was evaluated
    evaluation: dict[str, list[float]]  # empty if there was none

    @property
    def returns(self) -> list[float]:
        return self.evaluation.get("eval/return_mean", [])


def result_at(run_dir: Path, step: int) -> dict[str, Any]:
    """Read `result.json`.

    Returns:
        The content; {} if it is of another step, or missing.

    Raises:
        UsageError: a metric of the evaluation in it has something that is no number.
    """
    record = read_json(run_dir, RESULT)
    if not isinstance(record, dict) or record.get("env_steps") != step:
        return {}
    for name, values in _evaluation_of(record).items():
        if not all(map(_is_result, values)):
            raise UsageError(
                f"{run_dir / RESULT} has something in {name} that is no number: delete the file"
            )
    return record


def _evaluation_of(record: dict[str, Any]) -> dict[str, list[Any]]:
    """Metrics of the evaluation in `result.json`, with one value per seed."""
    return {
        name: values
        for name, values in record.items()
        if name.startswith("eval/") and isinstance(values, list)
    }


def _is_result(value: Any) -> bool:
    return value is None or is_number(value)


def checksum_of(run_dir: Path) -> str | None:
    """The checksum of the state in which a run ended; None while it goes on, or if it failed."""
    record = read_json(run_dir, RESULT)
    checksum = record.get("state_sha256") if isinstance(record, dict) else None
    return checksum if isinstance(checksum, str) else None


def has_damaged_result(run_dir: Path) -> bool:
    """True if a run has a `result.json` that cannot be read."""
    return (run_dir / RESULT).exists() and not isinstance(read_json(run_dir, RESULT), dict)


def has_ended_at(run_dir: Path, step: int) -> bool:
    """True if the run ended at this step by itself, as `result.json` says."""
    return result_at(run_dir, step).get("status") in ("finished", "stopped")


# Metrics of an evaluation that the footer shows
SHOWN = {"eval/return_mean", "eval/return_std", "eval/return_min", "eval/return_max"}


def stored_evaluation(run_dir: Path, step: int, count: int = 1) -> EvaluationResult:
    """Read the last evaluation in `result.json`, if the run was at `step` then.

    Args:
        run_dir: the run.
        step: environment steps.
        count: number of agents.

    Raises:
        UsageError: the stored evaluation is not one of `count` agents.
    """
    record = result_at(run_dir, step)
    evaluation = {}
    for name, values in _evaluation_of(record).items():
        evaluation[name] = [math.nan if x is None else x for x in values]
    evaluated_at = record.get("eval/env_steps", step)
    is_of_all = all(len(values) == count for values in evaluation.values())
    is_complete = not evaluation or evaluation.keys() >= SHOWN
    if not is_of_all or not is_complete or not isinstance(evaluated_at, int):
        raise UsageError(f"{run_dir / RESULT} has no evaluation of {count} agents: delete the file")
    return EvaluationResult(evaluated_at, evaluation)


def ranked(returns: list[float], training: Series | None = None) -> list[int]:
    """Rank members by their return, the best first, and those without a finite one last.

    Among equal returns the member with the higher last training return comes first, then the one
    that was earlier near the highest training return of any member.

    Args:
        returns: one per member.
        training: training returns of the members so far, as curves show them.

    Returns:
        Indices of the members.
    """
    count = len(returns)
    known = [x if math.isfinite(x) else -math.inf for x in returns]
    newest = [0.0] * count
    reached = [0.0] * count
    if training is not None and training.values.shape[1] == count:
        values = np.where(np.isfinite(training.values), training.values, -np.inf)  # [P, S]
        finite = values[np.isfinite(values)]
        threshold = finite.min() + 0.9 * np.ptp(finite) if len(finite) else math.inf
        is_near = values >= threshold
        newest = [_last_finite(curve) for curve in values.T]
        first_steps = training.steps[is_near.argmax(axis=0)]
        reached = np.where(is_near.any(axis=0), first_steps, math.inf)

    def order(member: int) -> tuple[float, float, float]:
        return -known[member], -newest[member], reached[member]

    return sorted(range(count), key=order)


def _last_finite(curve: np.ndarray) -> float:
    """The last number of a curve: no episode may have ended since; -inf if it has none."""
    finite = curve[np.isfinite(curve)]
    return float(finite[-1]) if len(finite) else -math.inf


def training_returns(run_dir: Path | None, step: float = math.inf) -> Series | None:
    """Read the training returns up to a step, by which equal members are ranked.

    They are the means of each interval. That of the last 100 episodes lags where episodes are
    long, and then prefers a member that has got worse.

    Returns:
        The series; None if there is none.
    """
    if run_dir is None:
        return None
    series = read_log(run_dir, [TRAINING]).series.get(TRAINING)
    if series is None:
        return None
    is_before = series.steps <= step
    if not is_before.any():
        return None
    return Series(
        steps=series.steps[is_before],
        wall=series.wall[is_before],
        values=series.values[is_before],
    )
