"""A table of runs: return, speed, and time to a threshold, for each environment and algorithm.

python -m common.compare runs/* --csv table.csv
"""

import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from common.cli.checks import Finite
from common.cli.command import main, parse
from common.cli.errors import printable
from common.cli.files import check_target, replacing
from common.drawing import groups
from common.drawing.groups import EVALUATION, RECENT, TRAINING, Group, LoggedRun, Selection
from common.runs.console import brief

LEGEND = """
return        greedy evaluation; * the last training return, for want of one
threshold     that of --threshold, else 90% of the way from the lowest to the highest return seen in the environment
to threshold  wall time until the mean return of the last 100 episodes reaches it, median over seeds"""


@dataclass(kw_only=True)
class Args(Selection):
    """Compare runs in a table: a line for each environment and algorithm, over all seeds of its runs."""

    csv: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Also write the table to this CSV file, with full numbers."""
    threshold: Annotated[Finite | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Return to reach; default 90% of the way from the lowest to the highest one seen in the environment."""


def compare(args: Args) -> Any:
    """A pandas DataFrame with a row for each group, sorted, and the columns of `_row`.

    Raises UsageError for what is not a run with metrics; prints notes to stderr.
    """
    import pandas

    found = groups.load(args, [TRAINING, RECENT, EVALUATION])
    thresholds = {group.env: args.threshold for group in found}
    if args.threshold is None:
        thresholds = {env: _most_of_the_way([one for one in found if one.env == env]) for env in thresholds}
    return pandas.DataFrame([_row(group, args, thresholds[group.env]) for group in found])


def _row(group: Group, args: Args, threshold: float) -> dict[str, Any]:
    """What the table says of a group. Times are seconds of wall time, over all invocations of a run."""
    logs = [run.log for run in group.runs]
    finals = [(values[np.isfinite(values)], of_training) for values, of_training in map(groups.final_returns, logs)]
    returns = np.concatenate([values for values, _ in finals])
    band = groups.interval(returns, kind=args.estimate)
    seconds = np.concatenate([seconds_to(run, threshold) for run in group.runs])
    median = float(np.median(seconds))
    return {
        "env": group.env,
        "algorithm": group.algorithm,
        **{name: groups.flag_text(group.variant.get(name, "")) for name in args.by},
        "seeds": sum(len(run.seeds) for run in group.runs),
        "steps": min(log.steps for log in logs),  # of the shortest run
        "steps_max": max(log.steps for log in logs),
        "estimate": groups.estimate_name(args.estimate, len(returns)),
        "return": float(groups.estimate(returns, args.estimate)) if len(returns) else math.nan,
        "return_low": float(band.low) if band else math.nan,  # 95% bootstrap interval
        "return_high": float(band.high) if band else math.nan,
        "training_seeds": sum(len(values) for values, of_training in finals if of_training),
        # of training, of each seed, median over runs
        "steps_per_second": float(np.median([log.steps / (log.trained_seconds or math.nan) for log in logs])),
        "wall_seconds": float(np.median([log.wall_seconds for log in logs])),
        "threshold": threshold,
        "reached": int(np.isfinite(seconds).sum()),  # seeds
        "seconds_to_threshold": median if math.isfinite(median) else math.nan,
    }


def seconds_to(run: LoggedRun, threshold: float) -> np.ndarray:
    """Wall seconds until `episode/return_last100` of each seed first reaches `threshold`, infinite if it never does."""
    if RECENT not in run.log.series:
        return np.full(len(run.seeds), math.inf)
    series = run.log.series[RECENT]
    reached = series.values >= threshold  # [P, S]
    return np.where(reached.any(axis=0), series.wall[reached.argmax(axis=0)], math.inf)


def _most_of_the_way(together: list[Group]) -> float:
    """The threshold for these groups of one environment; NaN where no run has got anywhere."""
    logs = [run.log.series for group in together for run in group.runs]
    values = np.concatenate([[], *(series[RECENT].values.ravel() for series in logs if RECENT in series)])
    values = values[np.isfinite(values)]
    if not len(values) or values.min() == values.max():  # nothing was learned that could be reached
        return math.nan
    return float(values.min() + 0.9 * (values.max() - values.min()))


def shown(table: Any) -> Any:
    """The table as people read it: numbers in short, the interval beside its return, "-" where there is none."""
    import pandas

    rows = []
    for _, row in table.iterrows():
        low, high = map(brief, (row["return_low"], row["return_high"]))
        value = brief(row["return"]) if low == "-" else f"{row['estimate']} {brief(row['return'])} [{low}, {high}]"
        few, many = row["steps"], row["steps_max"]
        texts = {
            "steps": f"{few:,}" if few == many else f"{few:,} to {many:,}",
            "return [95% CI]": value + " *" * bool(row["training_seeds"]),
            "steps/s": brief(row["steps_per_second"]),
            "wall": brief(row["wall_seconds"], " s"),
            "threshold": brief(row["threshold"]),
            "to threshold": f"{brief(row['seconds_to_threshold'], ' s')} ({row['reached']} of {row['seeds']})",
        }
        rows.append(dict(row.loc[:"seeds"]) | texts)
    return pandas.DataFrame(rows)


def run_command(args: Args) -> None:
    """What the command does."""
    if args.csv:
        check_target(Path(args.csv))
    table = compare(args)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(shown(table).to_string(index=False, line_width=width))
    print(LEGEND)
    if args.csv:
        with replacing(Path(args.csv)) as temporary:
            table.to_csv(temporary, index=False)
        print(f"saved    {printable(args.csv)}")


if __name__ == "__main__":
    main(run_command, parse(Args))
