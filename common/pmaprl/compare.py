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
from pmaprl.cli.errors import UsageError, printable, printable_lines
from pmaprl.cli.files import check_target, replacing
from pmaprl.comparison.curves import align, final_returns
from pmaprl.comparison.groups import Group, variant_text
from pmaprl.comparison.logged_runs import LoggedRun
from pmaprl.comparison.notes import side_by_side
from pmaprl.comparison.selection import Selection, load
from pmaprl.runs.console import brief
from pmaprl.runs.estimates import (
    CONFIDENCE,
    Difference,
    Interval,
    difference,
    estimate,
    estimate_name,
    mean_over_steps,
    spread,
)
from pmaprl.runs.metrics import EVALUATION, RECENT, TRAINING, Series

LEGEND = """
return        greedy evaluation [95% bootstrap interval]; the range of fewer than 4 seeds; * marks
              the last training return
AUC           mean height of the curve of greedy evaluations [95% bootstrap interval] over the
              environment steps that all curves have; * marks the curve of training returns, used
              where some run has fewer than five evaluations there
threshold     --threshold; by default 90% of the way from the lowest to the highest mean training
              return of the last 100 episodes, over all runs of the environment
training to   environment steps until the mean training return of the last 100 episodes, of
threshold     sampled actions, reaches the threshold, median over seeds; greedy returns may be above
              the threshold earlier
steps/s       environment steps of one seed or member per second of training, median over runs
wall          seconds of a run with compilation and evaluations, of all its agents together"""
BASELINE = tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")
NUMBER = tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")


@dataclass(kw_only=True)
class Args(Selection):
    """Compare runs in a table: a line per environment and algorithm, over all seeds of its runs."""

    csv: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = ""
    """Write the table to this CSV file too, with more columns and full numbers."""
    threshold: Annotated[Finite | None, NUMBER] = None
    """Return to reach (default: 90% of the way from the lowest to the highest in training)."""
    baseline: Annotated[tuple[str, ...], BASELINE] = ()
    """Lines that the others are compared with: run directories, or the name of an algorithm."""


class Span(NamedTuple):
    """A curve and the steps that all curves of an environment have."""

    metric: str
    first: float
    last: float
    points: int  # of the curve that has the fewest


def compare(args: Args) -> Any:
    """Compare groups of runs.

    Returns:
        A pandas DataFrame with a row for each group, sorted, and the columns of `_row`. That of
        `notes` has lists of texts.

    Raises:
        UsageError: a run has no metrics, or the baseline is none of the runs or all of them.
    """
    import pandas

    all_groups = load(args, [TRAINING, RECENT, EVALUATION])
    by_env = defaultdict(list)
    for group in all_groups:
        by_env[group.env].append(group)

    rows = []
    flags = dict.fromkeys([*args.by, *(name for group in all_groups for name in group.variant)])
    notes_on_envs = side_by_side(all_groups)
    baselines = _baselines(all_groups, args.baseline) if args.baseline else {}
    for env, groups_of_env in by_env.items():
        threshold = args.threshold
        if threshold is None:
            threshold = _most_of_the_way(groups_of_env)
        span = _common_span(groups_of_env)
        for group in groups_of_env:
            row = _row(group, list(flags), args, threshold, span)
            if args.baseline:
                row |= _against(group, baselines.get(env, []), args)
            of_env = [notes_on_envs[env]] if env in notes_on_envs else []
            row["notes"] = [*group.notes, *of_env, *_note_on_area(span)]
            rows.append(row)
    return pandas.DataFrame(rows)


def _baselines(all_groups: list[Group], names: tuple[str, ...]) -> dict[str, list[Group]]:
    """The groups that count as one baseline, by their environment.

    A name is a run's directory, which stands for the run's group, an algorithm, or a group's label.

    Raises:
        UsageError: a name fits none of the groups, or no other group is left to compare.
    """
    chosen = set()
    for name in names:
        path = Path(name).resolve()
        fitting = [
            group
            for group in all_groups
            if path in _paths(group) or name in (group.algorithm, group.label)
        ]
        if not fitting:
            lines = "; ".join(dict.fromkeys(group.label for group in all_groups))
            raise UsageError(
                f"--baseline {name} is none of the runs with metrics: name it among them too, or "
                f"take one of these lines: {lines}"
            )
        chosen |= {(group.env, group.key) for group in fitting}

    baselines: dict[str, list[Group]] = {}
    rest = []
    for group in all_groups:
        if (group.env, group.key) in chosen:
            baselines.setdefault(group.env, []).append(group)
        else:
            rest.append(group)
    if not any(group.env in baselines for group in rest):
        raise UsageError(
            f"--baseline {' '.join(names)}: no other line of {' and '.join(baselines)} is left to "
            "compare: --by FLAG splits lines, and other runs add some"
        )
    return baselines


def _paths(group: Group) -> set[Path]:
    """Directories of a group's runs, and of runs that repeat them."""
    return {path.resolve() for run in group.runs for path in (run.path, *run.copies)}


def _returns(runs: Iterable[LoggedRun]) -> tuple[np.ndarray, list[int], int]:
    """The final returns [S] of runs, their seeds, and the number of returns from training."""
    returns = []
    seeds = []
    num_of_training = 0
    for run in runs:
        values, is_training = final_returns(run.log)
        is_known = np.isfinite(values)
        returns.extend(values[is_known])
        seeds.extend(np.array(run.seeds[: len(is_known)])[is_known].tolist())
        if is_training:
            num_of_training += int(is_known.sum())
    return np.array(returns), seeds, num_of_training


def _ends(band: Interval | None) -> tuple[float, float]:
    """Ends of a 95% bootstrap interval; NaN for a band of another kind."""
    if band is None or band.name != CONFIDENCE:
        return math.nan, math.nan
    return float(band.low), float(band.high)


def _row(
    group: Group, flags: list[str], args: Args, threshold: float, span: Span
) -> dict[str, Any]:
    """The line of a group. Times are seconds of wall time, over all invocations of a run."""
    logs = [run.log for run in group.runs]
    returns, _, num_of_training = _returns(group.runs)
    low, high = _ends(spread(returns, args.estimate))
    areas = np.concatenate([_area(run, span) for run in group.runs])
    areas = areas[np.isfinite(areas)]
    area_low, area_high = _ends(spread(areas, args.estimate))
    steps = np.concatenate([_until(run, threshold, "steps") for run in group.runs])
    seconds = np.concatenate([_until(run, threshold, "wall") for run in group.runs])
    speeds = [log.steps / (log.trained_seconds or math.nan) for log in logs]
    variant = {name: variant_text(value) for name, value in group.variant.items()}
    return {
        "env": group.env,
        "algorithm": group.algorithm,
        **dict.fromkeys(flags, ""),
        **variant,
        "seeds": sum(len(run.seeds) for run in group.runs),
        "distinct_seeds": len({seed for run in group.runs for seed in run.seeds}),
        "runs": "; ".join(str(run.path) for run in group.runs),
        "steps": min(log.steps for log in logs),  # of the shortest run
        "steps_max": max(log.steps for log in logs),
        "estimate": estimate_name(args.estimate, len(returns)),
        "return": float(estimate(returns, args.estimate)) if len(returns) else math.nan,
        "return_low": low,  # 95% bootstrap interval
        "return_high": high,
        "return_min": float(returns.min()) if len(returns) else math.nan,
        "return_max": float(returns.max()) if len(returns) else math.nan,
        "training_seeds": num_of_training,
        "auc": float(estimate(areas, args.estimate)) if len(areas) else math.nan,
        "auc_low": area_low,
        "auc_high": area_high,
        "auc_of": span.metric,
        "auc_from": span.first,
        "auc_to": span.last,
        "auc_points": span.points,
        "steps_per_second": float(np.median(speeds)),  # of training, of each seed, over runs
        "wall_seconds": float(np.median([log.wall_seconds for log in logs])),
        "threshold": threshold,
        "reached": int(np.isfinite(steps).sum()),  # seeds
        "steps_to_threshold": _median(steps),
        "seconds_to_threshold": _median(seconds),  # compilation included
    }


def _against(group: Group, baseline: list[Group], args: Args) -> dict[str, Any]:
    """Differences of a group's returns from those of a baseline's groups.

    They are NaN for a group of the baseline, and if there is no baseline.
    """
    returns, seeds, _ = _returns(group.runs)
    base_returns, base_seeds, _ = _returns(run for part in baseline for run in part.runs)
    result = Difference(
        value=math.nan,
        interval=None,
        paired=False,
        probability=math.nan,
        probability_interval=None,
    )
    is_of_baseline = any(group is part for part in baseline)
    if not is_of_baseline and len(returns) and len(base_returns):
        result = difference(returns, seeds, base_returns, base_seeds, args.estimate)
    low, high = _ends(result.interval)
    lowest, highest = _ends(result.probability_interval)
    return {
        "difference": result.value,
        "difference_low": low,
        "difference_high": high,
        "paired": result.paired,
        "better": result.probability,
        "better_low": lowest,
        "better_high": highest,
    }


def _median(values: np.ndarray) -> float:
    """The median of values that are infinite for seeds that never got there; NaN if infinite."""
    median = float(np.median(values))
    return median if math.isfinite(median) else math.nan


def _until(run: LoggedRun, threshold: float, place: str) -> np.ndarray:
    """Steps or seconds [S] until `episode/return_last100` reaches the threshold; infinite if never.

    Args:
        run: the run.
        threshold: the return to reach.
        place: "steps" or "wall".
    """
    if RECENT not in run.log.series:
        return np.full(len(run.seeds), math.inf)
    series = run.log.series[RECENT]
    reached = series.values >= threshold  # [P, S]
    first = getattr(series, place)[reached.argmax(axis=0)]
    return np.where(reached.any(axis=0), first, math.inf)


FEWEST_POINTS = 5  # points of a curve whose mean height tells more than its last value


def _common_span(groups_of_env: list[Group]) -> Span:
    """The curve to compare, and the steps that all groups have.

    It is that of evaluations where each run has enough of them, otherwise that of training.
    """
    logs = [run.log.series for group in groups_of_env for run in group.runs]
    span = _span(logs, EVALUATION)
    is_complete = all(EVALUATION in series for series in logs)
    training = _span(logs, TRAINING)
    enough = min(FEWEST_POINTS, training.points + 1)
    return span if is_complete and span.points >= enough else training


def _span(logs: list[dict[str, Series]], metric: str) -> Span:
    """The steps that all curves of a metric have; NaN if there are none."""
    curves = [_known_steps(series[metric]) for series in logs if metric in series]
    curves = [steps for steps in curves if len(steps)]
    if not curves:
        return Span(metric, math.nan, math.nan, 0)
    first = max(steps.min() for steps in curves)
    last = min(steps.max() for steps in curves)
    counts = [int(np.sum((first <= steps) & (steps <= last))) for steps in curves]
    return Span(metric, float(first), float(last), min(counts))


def _note_on_area(span: Span) -> list[str]:
    """The note on curves with few points."""
    if not 0 < span.points < FEWEST_POINTS:
        return []
    return [f"AUC rests on few numbers: {_of_span(span.metric, span.points)}"]


def _of_span(metric: str, points: int) -> str:
    kind = "training return" if metric == TRAINING else "evaluation"
    plural = "" if points == 1 else "s"
    return f"{points:,} {kind}{plural} of the run that has fewest"


def _known_steps(series: Any) -> np.ndarray:
    """The steps at which no seed lacks a number; seeds without any number are ignored."""
    ever = np.isfinite(series.values).any(axis=0)
    return series.steps[np.isfinite(series.values[:, ever]).all(axis=1) & ever.any()]


def _area(run: LoggedRun, span: Span) -> np.ndarray:
    """The mean return [S] of a run over a span; NaN for a seed whose curve does not cover it."""
    if span.metric not in run.log.series:
        return np.full(len(run.seeds), math.nan)
    steps, values = align([run.log.series[span.metric]])
    return mean_over_steps(steps, values, span.first, span.last)


def _most_of_the_way(groups_of_env: list[Group]) -> float:
    """The threshold for the groups of one environment; NaN if no run has learned anything."""
    logs = [run.log.series for group in groups_of_env for run in group.runs]
    returns = [series[RECENT].values.ravel() for series in logs if RECENT in series]
    values = np.concatenate([[], *returns])
    values = values[np.isfinite(values)]
    if not len(values) or values.min() == values.max():
        return math.nan
    return float(values.min() + 0.9 * (values.max() - values.min()))


def shown(table: Any) -> Any:
    """Format a table for reading: few digits, intervals beside their numbers, "-" for NaN.

    Notes have numbers, which are those of `numbered_notes`.
    """
    import pandas

    numbers = {note: str(number) for number, note in enumerate(numbered_notes(table), start=1)}
    rows = []
    for _, row in table.iterrows():
        min_steps = row["steps"]
        max_steps = row["steps_max"]
        return_mark = " *" if row["training_seeds"] else ""
        is_of_training = row["auc_of"] == TRAINING and math.isfinite(row["auc"])
        auc_mark = " *" if is_of_training else ""
        reached = f"({row['reached']} of {row['seeds']})"
        texts = {
            "steps": f"{min_steps:,}"
            if min_steps == max_steps
            else f"{min_steps:,} to {max_steps:,}",
            "return": _return_text(row) + return_mark,
            "AUC": _with_interval(row, "auc") + auc_mark,
            "steps/s": brief(row["steps_per_second"]),
            "wall": brief(row["wall_seconds"], " s"),
            "threshold": brief(row["threshold"]),
            "training to threshold": f"{_steps_text(row['steps_to_threshold'])} {reached}",
        }
        if "difference" in row:
            paired_mark = ", paired" if _is_paired(row) else ""
            texts["difference"] = _with_interval(row, "difference") + paired_mark
            texts["better"] = _with_interval(row, "better")
        if numbers:
            texts["notes"] = ", ".join(numbers[note] for note in row["notes"])
        rows.append(dict(row.loc[:"seeds"]) | texts)
    return pandas.DataFrame(rows)


def numbered_notes(table: Any) -> list[str]:
    """The notes on the lines of a table, each once."""
    return list(dict.fromkeys(note for notes in table["notes"] for note in notes))


def legend(table: Any) -> str:
    """Explain the columns of a table, and its notes."""
    lines = [LEGEND]
    for env, rows in table.groupby("env", sort=False):
        row = rows.iloc[0]
        if math.isfinite(row["auc_from"]):
            ends = f"{row['auc_from']:,.0f} to {row['auc_to']:,.0f}"
            points = _of_span(row["auc_of"], row["auc_points"])
            lines.append(f"AUC           of {env}: over steps {ends}, {points}")
    if "difference" in table:
        lines += _legend_of_baseline(table)
    for number, note in enumerate(numbered_notes(table), start=1):
        lines.append(f"{f'note {number}':<13} {note}")
    return "\n".join(map(printable_lines, lines))


def _legend_of_baseline(table: Any) -> list[str]:
    """Explain how the differences of a table were computed."""
    known = table[np.isfinite(table["difference_low"])]
    interval = ""
    how = ""
    if len(known):
        interval = " [95% bootstrap interval]"
        is_paired = [_is_paired(row) for _, row in known.iterrows()]
        how = ", seeds of both sides drawn apart, as they are not the same ones"
        if all(is_paired):
            how = ", by pairs of equal seeds"
        elif any(is_paired):
            how = ", by pairs of equal seeds where paired"
    return [
        "baseline      the lines that have no difference; several lines of an environment count as "
        "one",
        f"difference    return minus the baseline's return{interval}{how}",
        f"better        probability that the return of a seed is above that of a seed of the "
        f"baseline{interval}",
    ]


def _is_paired(row: Any) -> bool:
    """True if seeds were paired for the interval of a row's difference."""
    return bool(math.isfinite(row["difference_low"]) and row["paired"])


def _return_text(row: Any) -> str:
    """Format a return, as `IQM 83 [70, 99]`, or for few seeds as `mean 83 (range 70 to 99)`."""
    if row["return_min"] == row["return_max"] or not math.isfinite(row["return"]):
        return brief(row["return"])
    if math.isfinite(row["return_low"]):
        return f"{row['estimate']} {_with_interval(row, 'return')}"
    ends = f"{brief(row['return_min'])} to {brief(row['return_max'])}"
    return f"{row['estimate']} {brief(row['return'])} (range {ends})"


def _with_interval(row: Any, name: str) -> str:
    value = brief(row[name])
    low = row[f"{name}_low"]
    high = row[f"{name}_high"]
    if not math.isfinite(low):
        return value
    return f"{value} [{brief(low)}, {brief(high)}]"


def _steps_text(steps: float) -> str:
    return f"{steps:,.0f}" if math.isfinite(steps) else "-"


def _as_text(cell: Any) -> Any:
    """Quote a cell that a spreadsheet would take for a formula, as names may be a stranger's.

    A list becomes one text. Without control characters no cell ends early, and none begins with
    one.
    """
    if isinstance(cell, list):
        cell = " | ".join(cell)
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    is_formula = text.lstrip().startswith(("=", "+", "-", "@")) and not _is_number(text)
    return f"'{text}" if is_formula else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def run_command(args: Args) -> None:
    """Run the command."""
    if args.csv:
        check_target(Path(args.csv))
    table = compare(args)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(shown(table).to_string(index=False, line_width=width))
    print(legend(table))
    if args.csv:
        with replacing(Path(args.csv)) as temporary:
            table.map(_as_text).to_csv(temporary, index=False)
        print(f"saved    {printable(args.csv)}")


if __name__ == "__main__":
    main(run_command, parse(Args))
