"""Results of a run as they stand in its directory: `result.json`, and the order of members by their
returns.

Imports nothing slow: plots and tables read many runs.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.cli.stored import read_json
from pmaprl.runs.metrics import RECENT, Series, is_number, read_log

RESULT = "result.json"


class EvaluationResult(NamedTuple):
    """The metrics of an evaluation, a number per seed each."""

    step: int  # of what was evaluated
    evaluation: dict[str, list[float]]  # empty where there was none

    @property
    def returns(self) -> list[float]:
        return self.evaluation.get("eval/return_mean", [])


def result_at(run_dir: Path, step: int) -> dict[str, Any]:
    """What `result.json` says of a run that was at `step` then; nothing where it is of another
    step, or not there.
    """
    record = read_json(run_dir, RESULT)
    if not isinstance(record, dict) or record.get("env_steps") != step:
        return {}
    for name, values in record.items():
        if (
            name.startswith("eval/")
            and isinstance(values, list)
            and not all(map(_is_result, values))
        ):
            raise UsageError(
                f"{run_dir / RESULT} has something in {name} that is no number: delete the file"
            )
    return record


def _is_result(value: Any) -> bool:
    return value is None or is_number(value)


def checksum_of(run_dir: Path) -> str | None:
    """The checksum of the state in which a run ended; None while it goes on, or where it did not
    end well.
    """
    record = read_json(run_dir, RESULT)
    checksum = record.get("state_sha256") if isinstance(record, dict) else None
    return checksum if isinstance(checksum, str) else None


def has_damaged_result(run_dir: Path) -> bool:
    """Tell if a run has a `result.json` that cannot be read."""
    return (run_dir / RESULT).exists() and not isinstance(read_json(run_dir, RESULT), dict)


def has_ended_at(run_dir: Path, step: int) -> bool:
    """Whether nothing cut the run short at this step, as `result.json` says."""
    return result_at(run_dir, step).get("status") in ("finished", "stopped")


SHOWN = "return_mean", "return_std", "return_min", "return_max"  # of an evaluation, in the footer


def stored_evaluation(run_dir: Path, step: int, count: int = 1) -> EvaluationResult:
    """The last evaluation in `result.json` of so many agents, if there is one and the run was at
    `step` then.

    Raises UsageError where it is none of such a run.
    """
    record = result_at(run_dir, step)
    metrics = {
        name: x for name, x in record.items() if name.startswith("eval/") and isinstance(x, list)
    }
    of_seeds = {
        name: [math.nan if x is None else x for x in values] for name, values in metrics.items()
    }
    evaluated = record.get("eval/env_steps", step)
    fits = all(len(values) == count for values in of_seeds.values()) and isinstance(evaluated, int)
    if not fits or of_seeds and not of_seeds.keys() >= {f"eval/{name}" for name in SHOWN}:
        raise UsageError(f"{run_dir / RESULT} has no evaluation of {count} agents: delete the file")
    return EvaluationResult(evaluated, of_seeds)


def ranked(returns: list[float], training: Series | None = None) -> list[int]:
    """Rank members by their return, the best first; those without a finite one are last.

    Args:
        returns: one per member.
        training: `episode/return_last100` of the members so far. Among equal returns that with the
            higher last one of these comes first, then that which was earlier near the highest that
            any member had.
    """
    count = len(returns)
    known = [x if math.isfinite(x) else -math.inf for x in returns]
    newest = [0.0] * count
    reached = [0.0] * count
    if training is not None and training.values.shape[1] == count:
        values = np.where(np.isfinite(training.values), training.values, -np.inf)  # [P, S]
        finite = values[np.isfinite(values)]
        threshold = finite.min() + 0.9 * np.ptp(finite) if len(finite) else math.inf
        above = values >= threshold
        newest = values[-1]
        reached = np.where(above.any(axis=0), training.steps[above.argmax(axis=0)], math.inf)
    return sorted(
        range(count), key=lambda member: (-known[member], -newest[member], reached[member])
    )


def training_returns(run_dir: Path | None, step: float = math.inf) -> Series | None:
    """`episode/return_last100` of a run up to a step, by which equal members are ranked; None where
    it has none.
    """
    series = read_log(run_dir, [RECENT]).series.get(RECENT) if run_dir else None
    if series is None or not (there := series.steps <= step).any():
        return None
    return Series(steps=series.steps[there], wall=series.wall[there], values=series.values[there])
