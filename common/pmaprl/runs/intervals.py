"""Intervals of rows of the log, of evaluations and of checkpoints, in environment steps."""

import math
from typing import Any, NamedTuple

MOST_ROWS = 500  # of a run, as far as it decides itself
MOST_EVALUATIONS = 100  # likewise, and as many checkpoints
# In an interval on an accelerator, which a host that reads every update keeps waiting
FEWEST_UPDATES = 8


class Intervals(NamedTuple):
    """Environment steps between two rows, evaluations or checkpoints; 0: at the end only."""

    log: int
    eval: int
    checkpoint: int


def intervals_of(args: Any, on_accelerator: bool) -> Intervals:
    """Take the intervals that flags name, and let the others follow from the length of the run.

    A run that resumes has the same ones, as they depend on neither where it stopped nor on what
    time anything takes; with another --total-timesteps they follow from that. Evaluations and
    checkpoints fall on rows, where rows follow from the length too: each moment at which anything
    is due is a row of its own.
    """
    total = args.num_updates * args.steps_per_update
    fewest = FEWEST_UPDATES * args.steps_per_update if on_accelerator else 1
    log = args.log_interval or max(args.least_log_interval, -(-total // MOST_ROWS), fewest)
    rare = max(args.least_eval_interval, -(-total // MOST_EVALUATIONS), fewest)
    if args.log_interval is None:
        rare = -(-rare // log) * log
    return Intervals(
        log=log,
        eval=rare if args.eval_interval is None else args.eval_interval,
        checkpoint=rare if args.checkpoint_interval is None else args.checkpoint_interval,
    )


def describe_intervals(intervals: Intervals) -> str:
    """Say in one line when anything is due."""
    names = {"row": intervals.log, "evaluation": intervals.eval, "checkpoint": intervals.checkpoint}
    parts = {}  # names by the words for their interval, in the order of the names
    for name, interval in names.items():
        when = f"every {interval:,} steps" if interval else "at the end"
        parts.setdefault(when, []).append(name)
    return "; ".join(f"{' and '.join(together)} {when}" for when, together in parts.items())


def next_boundary(step: int, interval: int) -> float:
    """Find the first multiple of `interval` after `step`; infinite for interval 0."""
    return step + interval - step % interval if interval else math.inf
