"""A table of runs: returns, differences to a baseline, speeds, and steps to a threshold.

python -m pmaprl.compare runs/* --csv table.csv
python -m pmaprl.compare runs/* --by clip_eps --baseline runs/NAME
"""

import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from pmaprl.cli.checks import Finite
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import UsageError, printable
from pmaprl.cli.files import check_target, replacing
from pmaprl.drawing import groups
from pmaprl.drawing.groups import Group, LoggedRun, Selection
from pmaprl.runs.console import brief
from pmaprl.runs.estimates import (
    CONFIDENCE,
    Difference,
    difference,
    estimate,
    estimate_name,
    mean_over_steps,
    spread,
)
from pmaprl.runs.metrics import EVALUATION, RECENT, TRAINING

LEGEND = """
return        greedy evaluation [95% bootstrap interval]; of fewer than 4 seeds their range; * the
              last training return
AUC           mean height of the curve of greedy evaluations [95% bootstrap interval] over the
              environment steps that all curves have; * of training returns, where some run has
              fewer than two evaluations
threshold     that of --threshold, else 90% of the way from the lowest to the highest return seen
              in the environment
training to   environment steps until the mean training return of the last 100 episodes, of
threshold     sampled actions, reaches the threshold, median over seeds; a greedy return may be
              above it while this is not"""
OF_BASELINE = """\
baseline      the lines of an environment without a difference, put together where they are several
difference    return less that of the baseline [95% bootstrap interval], by pairs of equal seeds
better        probability that a seed returns more than one of the baseline [95% bootstrap
              interval]"""

NUMBER = tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")


@dataclass(kw_only=True)
class Args(Selection):
    """Compare runs in a table: a line for each environment and algorithm, over all seeds of its
    runs.
    """

    csv: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = ""
    """Write the table to this CSV file too, with more columns and full numbers."""
    threshold: Annotated[Finite | None, NUMBER] = None
    """Return to reach (default: 90% of the way from the lowest to the highest one seen)."""
    baseline: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")
    ] = ()
    """Add how other lines differ from those with these runs, or of this algorithm, which count as
    one.
    """


class Span(NamedTuple):
    """A curve and the steps that all curves of an environment have."""

    metric: str
    first: float
    last: float


def compare(args: Args) -> Any:
    """Compare groups of runs.

    Returns:
        A pandas DataFrame with a row for each group, sorted, and the columns of `_row`.

    Raises:
        UsageError: for what is not a run with metrics, and a baseline that is none of the runs or
            all of them.
    """
    import pandas

    found = groups.load(args, [TRAINING, RECENT, EVALUATION])
    environments = defaultdict(list)
    for group in found:
        environments[group.env].append(group)

    rows = []
    baselines = _baselines(found, args.baseline) if args.baseline else {}
    for env, together in environments.items():
        threshold = _most_of_the_way(together) if args.threshold is None else args.threshold
        span = _common_span(together)
        for group in together:
            row = _row(group, args, threshold, span)
            if args.baseline:
                row |= _against(group, baselines.get(env, []), args)
            rows.append(row)
    return pandas.DataFrame(rows)


def _baselines(found: list[Group], names: tuple[str, ...]) -> dict[str, list[Group]]:
    """The groups that count as one baseline, by their environment.

    A name is that of a run, which stands for its group, of an algorithm, or the label of a group.

    Raises:
        UsageError: for a name that fits none of the groups, and where no other group is left to
            compare.
    """
    chosen = set()
    for name in names:
        path = Path(name).resolve()
        fitting = [
            group
            for group in found
            if path in _paths(group) or name in (group.algorithm, group.label)
        ]
        if not fitting:
            lines = "; ".join(dict.fromkeys(group.label for group in found))
            known = f"name it among them too, or take one of these lines: {lines}"
            raise UsageError(f"--baseline {name} is none of the runs with metrics: {known}")
        chosen |= {(group.env, group.key) for group in fitting}

    baselines: dict[str, list[Group]] = {}
    for group in found:
        if (group.env, group.key) in chosen:
            baselines.setdefault(group.env, []).append(group)
    if not any(group.env in baselines for group in found if (group.env, group.key) not in chosen):
        where = " and ".join(baselines)
        what = f"no other line of {where} is left to compare: --by FLAG splits lines"
        raise UsageError(f"--baseline {' '.join(names)}: {what}, and other runs add some")
    return baselines


def _paths(group: Group) -> set[Path]:
    """The directories of a group's runs, and of those that are equal to one."""
    return {path.resolve() for run in group.runs for path in (run.path, *run.copies)}


def _returns(runs: Iterable[LoggedRun]) -> tuple[np.ndarray, list[int], int]:
    """The final returns [S] of runs, their seeds, and how many of them are of training."""
    returns = []
    seeds = []
    of_training = 0
    for run in runs:
        values, training = groups.final_returns(run.log)
        known = np.isfinite(values)
        returns.extend(values[known])
        seeds.extend(np.array(run.seeds[: len(known)])[known])
        of_training += known.sum() * training
    return np.array(returns), [int(seed) for seed in seeds], int(of_training)


def _row(group: Group, args: Args, threshold: float, span: Span) -> dict[str, Any]:
    """The line of a group. Times are seconds of wall time, over all invocations of a run."""
    logs = [run.log for run in group.runs]
    returns, _, of_training = _returns(group.runs)
    band = spread(returns, args.estimate)
    bootstrapped = band is not None and band.name == CONFIDENCE
    areas = np.concatenate([_area(run, span) for run in group.runs])
    areas = areas[np.isfinite(areas)]
    area_band = spread(areas, args.estimate)
    steps = np.concatenate([_until(run, threshold, "steps") for run in group.runs])
    seconds = np.concatenate([_until(run, threshold, "wall") for run in group.runs])
    return {
        "env": group.env,
        "algorithm": group.algorithm,
        **{name: groups.flag_text(group.variant.get(name, "")) for name in args.by},
        "seeds": sum(len(run.seeds) for run in group.runs),
        "steps": min(log.steps for log in logs),  # of the shortest run
        "steps_max": max(log.steps for log in logs),
        "estimate": estimate_name(args.estimate, len(returns)),
        "return": float(estimate(returns, args.estimate)) if len(returns) else math.nan,
        "return_low": float(band.low) if bootstrapped else math.nan,  # 95% bootstrap interval
        "return_high": float(band.high) if bootstrapped else math.nan,
        "return_min": float(returns.min()) if len(returns) else math.nan,
        "return_max": float(returns.max()) if len(returns) else math.nan,
        "training_seeds": of_training,
        "auc": float(estimate(areas, args.estimate)) if len(areas) else math.nan,
        "auc_low": float(area_band.low) if area_band and area_band.name == CONFIDENCE else math.nan,
        "auc_high": float(area_band.high)
        if area_band and area_band.name == CONFIDENCE
        else math.nan,
        "auc_of": span.metric,
        "auc_from": span.first,
        "auc_to": span.last,
        # of training, of each seed, median over runs
        "steps_per_second": float(
            np.median([log.steps / (log.trained_seconds or math.nan) for log in logs])
        ),
        "wall_seconds": float(np.median([log.wall_seconds for log in logs])),
        "threshold": threshold,
        "reached": int(np.isfinite(steps).sum()),  # seeds
        "steps_to_threshold": _median(steps),
        "seconds_to_threshold": _median(seconds),  # compilation included
    }


def _against(group: Group, baseline: list[Group], args: Args) -> dict[str, Any]:
    """How the returns of a group differ from those of a baseline's groups; NaN for one of these,
    and without any.
    """
    returns, seeds, _ = _returns(group.runs)
    base_returns, base_seeds, _ = _returns(run for part in baseline for run in part.runs)
    found = Difference(
        value=math.nan, interval=None, paired=False, probability=math.nan, probability_interval=None
    )
    if all(group is not part for part in baseline) and len(returns) and len(base_returns):
        found = difference(returns, seeds, base_returns, base_seeds, args.estimate)
    band = found.interval
    chances = found.probability_interval
    return {
        "difference": found.value,
        "difference_low": float(band.low) if band else math.nan,
        "difference_high": float(band.high) if band else math.nan,
        "paired": found.paired,
        "better": found.probability,
        "better_low": float(chances.low) if chances else math.nan,
        "better_high": float(chances.high) if chances else math.nan,
    }


def _median(values: np.ndarray) -> float:
    """The median of values that may be infinite, for those that never came; NaN where it is one of
    them.
    """
    median = float(np.median(values))
    return median if math.isfinite(median) else math.nan


def _until(run: LoggedRun, threshold: float, place: str) -> np.ndarray:
    """The `steps` or `wall` seconds [S] until `episode/return_last100` first reaches the threshold;
    else infinite.
    """
    if RECENT not in run.log.series:
        return np.full(len(run.seeds), math.inf)
    series = run.log.series[RECENT]
    reached = series.values >= threshold  # [P, S]
    return np.where(reached.any(axis=0), getattr(series, place)[reached.argmax(axis=0)], math.inf)


def _common_span(together: list[Group]) -> Span:
    """The curve that all groups of an environment have, of evaluations if possible, and its steps
    in all of them.
    """
    logs = [run.log.series for group in together for run in group.runs]
    several = [len(series[EVALUATION].steps) > 1 for series in logs if EVALUATION in series]
    metric = EVALUATION if len(several) == len(logs) and all(several) else TRAINING
    ends = [_known_steps(series[metric]) for series in logs if metric in series]
    ends = [steps for steps in ends if len(steps)]
    if not ends:
        return Span(metric, math.nan, math.nan)
    return Span(
        metric, float(max(steps.min() for steps in ends)), float(min(steps.max() for steps in ends))
    )


def _known_steps(series: Any) -> np.ndarray:
    """The steps at which every seed that ever has a number has one."""
    ever = np.isfinite(series.values).any(axis=0)
    return series.steps[np.isfinite(series.values[:, ever]).all(axis=1) & ever.any()]


def _area(run: LoggedRun, span: Span) -> np.ndarray:
    """The mean return [S] of a run on the way; NaN where its curve is not."""
    if span.metric not in run.log.series:
        return np.full(len(run.seeds), math.nan)
    steps, values = groups.align([run.log.series[span.metric]])
    return mean_over_steps(steps, values, span.first, span.last)


def _most_of_the_way(together: list[Group]) -> float:
    """The threshold for these groups of one environment; NaN where no run has got anywhere."""
    logs = [run.log.series for group in together for run in group.runs]
    values = np.concatenate(
        [[], *(series[RECENT].values.ravel() for series in logs if RECENT in series)]
    )
    values = values[np.isfinite(values)]
    if not len(values) or values.min() == values.max():  # nothing was learned that could be reached
        return math.nan
    return float(values.min() + 0.9 * (values.max() - values.min()))


def shown(table: Any) -> Any:
    """The table as people read it: numbers in short, the interval beside its return, "-" where
    there is none.
    """
    import pandas

    rows = []
    for _, row in table.iterrows():
        few = row["steps"]
        many = row["steps_max"]
        texts = {
            "steps": f"{few:,}" if few == many else f"{few:,} to {many:,}",
            "return": _return_text(row) + " *" * bool(row["training_seeds"]),
            "AUC": _with_interval(row, "auc")
            + " *" * (row["auc_of"] == TRAINING and math.isfinite(row["auc"])),
            "steps/s": brief(row["steps_per_second"]),
            "wall": brief(row["wall_seconds"], " s"),
            "threshold": brief(row["threshold"]),
            "training to threshold": f"{_steps_text(row['steps_to_threshold'])} "
            f"({row['reached']} of {row['seeds']})",
        }
        if "difference" in row:
            is_paired = math.isfinite(row["difference"]) and bool(row["paired"])
            texts["difference"] = _with_interval(row, "difference") + ", paired" * is_paired
            texts["better"] = _with_interval(row, "better")
        rows.append(dict(row.loc[:"seeds"]) | texts)
    return pandas.DataFrame(rows)


def _return_text(row: Any) -> str:
    """Such as `IQM 83 [70, 99]`, or of few seeds `mean 83 (range 70 to 99)`."""
    if row["return_min"] == row["return_max"] or not math.isfinite(row["return"]):
        return brief(row["return"])
    if math.isfinite(row["return_low"]):
        return f"{row['estimate']} {_with_interval(row, 'return')}"
    ends = f"{brief(row['return_min'])} to {brief(row['return_max'])}"
    return f"{row['estimate']} {brief(row['return'])} (range {ends})"


def _with_interval(row: Any, name: str) -> str:
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{brief(value)} [{brief(low)}, {brief(high)}]" if math.isfinite(low) else brief(value)


def _steps_text(steps: float) -> str:
    return f"{steps:,.0f}" if math.isfinite(steps) else "-"


def _as_text(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: names may come from another's run
    directory.
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "@")) else cell


def run_command(args: Args) -> None:
    """What the command does."""
    if args.csv:
        check_target(Path(args.csv))
    table = compare(args)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(shown(table).to_string(index=False, line_width=width))
    print(LEGEND)
    if args.baseline:
        print(OF_BASELINE)
    if args.csv:
        with replacing(Path(args.csv)) as temporary:
            table.map(_as_text).to_csv(temporary, index=False)
        print(f"saved    {printable(args.csv)}")


if __name__ == "__main__":
    main(run_command, parse(Args))
