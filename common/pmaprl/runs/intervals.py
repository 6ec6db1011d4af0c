"""Intervals of rows of the log, of evaluations and of checkpoints, in environment steps."""

import math
from typing import Any, NamedTuple

MOST_ROWS = 500  # rows of a run without --log-interval
MOST_EVALUATIONS = 100  # evaluations of a run without --eval-interval, and also checkpoints
# Updates of an interval on an accelerator, which waits for a host that reads every update
FEWEST_UPDATES = 8


class Intervals(NamedTuple):
    """Environment steps between two rows, evaluations or checkpoints; 0: at the end only."""

    log: int
    eval: int
    checkpoint: int


def intervals_of(args: Any, on_accelerator: bool) -> Intervals:
    """Take the intervals that flags name, and derive the others from the length of the run.

    A resumed run has the same intervals, because they depend neither on the step at which it
    stopped nor on the time that anything takes. With another --total-timesteps they follow from
    that. Derived evaluations and checkpoints fall on derived rows, because every moment at which
    anything is due gets a row of its own.
    """
    total = args.num_updates * args.steps_per_update
    fewest = FEWEST_UPDATES * args.steps_per_update if on_accelerator else 1
    log = args.log_interval
    if not log:
        log = max(args.least_log_interval, -(-total // MOST_ROWS), fewest)
    rare = max(args.least_eval_interval, -(-total // MOST_EVALUATIONS), fewest)
    if args.log_interval is None:
        rare = -(-rare // log) * log
    return Intervals(
        log=log,
        eval=rare if args.eval_interval is None else args.eval_interval,
        checkpoint=rare if args.checkpoint_interval is None else args.checkpoint_interval,
    )


def describe_intervals(intervals: Intervals) -> str:
    """Describe in one line when anything is due."""
    steps = {
        "row": intervals.log,
        "evaluation": intervals.eval,
        "checkpoint": intervals.checkpoint,
    }
    names_by_time = {}
    for name, interval in steps.items():
        time = f"every {interval:,} steps" if interval else "at the end"
        names_by_time.setdefault(time, []).append(name)
    parts = [f"{' and '.join(names)} {time}" for time, names in names_by_time.items()]
    return "; ".join(parts)


def next_boundary(step: int, interval: int) -> float:
    """Find the first multiple of `interval` after `step`; infinite for interval 0."""
    if not interval:
        return math.inf
    return step + interval - step % interval
