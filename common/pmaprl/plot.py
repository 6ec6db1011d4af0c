"""Learning curves of many runs in one picture.

python -m pmaprl.plot runs/* --y eval/return_mean --out curves.png
python -m pmaprl.plot runs/* --by gamma,clip_eps --kind heatmap
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from pmaprl.cli.checks import Finite
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import UsageError, printable
from pmaprl.cli.files import check_target, replacing
from pmaprl.comparison.curves import align
from pmaprl.comparison.groups import Group, variant_text
from pmaprl.comparison.notes import listed_notes
from pmaprl.comparison.selection import Selection, load, say, suggest
from pmaprl.drawing.figures import (
    AXES,
    COLORS,
    DASHES,
    MARKERS,
    Grid,
    Limits,
    Line,
    Panel,
    draw,
    draw_grids,
    shade,
    side_by_side,
)
from pmaprl.runs.estimates import estimate, estimate_name, spread
from pmaprl.runs.metrics import RECENT, TRAINING, Series, is_number

ENDS = tyro.conf.arg(metavar="LOW HIGH", help_behavior_hint="")


@dataclass(kw_only=True)
class Args(Selection):
    """Draw learning curves: a panel per environment, a line per algorithm over all its seeds."""

    kind: Literal["curves", "heatmap"] = "curves"
    """Kind of picture: learning curves, or a heat map of last values over the flags of --by."""
    x: Literal["env_steps", "wall"] = "env_steps"
    """Horizontal axis: environment steps, or seconds of all invocations of the run together."""
    y: Annotated[str, tyro.conf.arg(metavar="METRIC")] = TRAINING
    """Metric of metrics.jsonl to draw."""
    logx: bool = False
    """Draw the horizontal axis logarithmically."""
    xlim: Annotated[tuple[Finite, Finite] | None, ENDS] = None
    """Ends of the horizontal axis (default: the range of the data)."""
    ylim: Annotated[tuple[Finite, Finite] | None, ENDS] = None
    """Ends of the vertical axis (default: the range of the data)."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "curves.png"
    """File to draw to, in the format of its ending: .png, .svg, .pdf ..."""
    title: Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = ""
    """Title of the picture."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("xlim", "ylim"):
            ends = getattr(self, name)
            if ends and ends[0] >= ends[1]:
                raise UsageError(
                    f"--{name} {ends[0]:g} {ends[1]:g}: the first has to be below the second"
                )
        if self.logx and self.xlim and self.xlim[0] <= 0:
            raise UsageError(f"--logx cannot begin at --xlim {self.xlim[0]:g}: take one above 0")
        if self.kind == "heatmap" and len(self.by) != 2:
            raise UsageError(
                f"--kind heatmap is drawn over two flags, --by has {len(self.by)}: --by FLAG,FLAG"
            )


class Curve(NamedTuple):
    """The line of a group."""

    group: Group
    line: Line  # without its label
    counted: str  # such as `5 seeds, IQM`
    notes: list[str]  # on where the line begins and ends


def learning_curves(args: Args) -> Any:
    """Draw the matplotlib Figure that the command writes; notes go to stderr.

    Raises:
        UsageError: there is nothing to draw.
    """
    all_groups = load(args, [args.y])
    runs = [run for group in all_groups for run in group.runs]
    names = frozenset().union(*(run.log.names for run in runs))
    if args.y not in names:
        raise UsageError(
            f"--y {args.y}: none of the runs has this metric; {suggest(args.y, names)}"
        )
    if args.kind == "heatmap":
        return _heat_maps(all_groups, args)
    return _curves(all_groups, args)


def _curves(all_groups: list[Group], args: Args) -> Any:
    styles = _styles(all_groups)
    curves = []
    for group in all_groups:
        curve = _curve(group, args, styles[group.key])
        if curve:
            notes = (*group.notes, *curve.notes)
            curves.append(curve._replace(group=group._replace(notes=notes)))
        else:
            say([f"{group.label} in {group.env}: no {args.y} at common places, left out"])
    if not curves:
        raise UsageError(_nothing_to_draw(all_groups, args))

    panels: dict[str, Panel] = {}
    counted = {curve.counted for curve in curves}
    only_points = all(len(curve.line.x) == 1 for curve in curves)
    legend = _legend_of_factors(all_groups, only_points)
    is_same_count = len(counted) == 1
    for group, line, count, _ in curves:
        label = group.label if is_same_count else f"{group.label} ({count})"
        panel = panels.setdefault(group.env, Panel(group.env, [*legend]))
        panel.lines.append(line._replace(label="" if legend else label))
    notes = listed_notes(curve.group for curve in curves)
    say(notes)
    if is_same_count:
        notes.append(f"each {'point' if only_points else 'line'}: {counted.pop()}")
    return draw(
        [_points_apart(panel, args) for panel in panels.values()],
        args.x,
        AXES.get(args.y, args.y),
        title=args.title,
        notes=notes,
        limits=Limits(x=args.xlim, y=args.ylim, log_x=args.logx),
    )


def _nothing_to_draw(all_groups: list[Group], args: Args) -> str:
    """The reason why no group has a curve."""
    logged = [run.log.series.get(args.y) for group in all_groups for run in group.runs]
    if args.x == "wall" and any(x is not None and np.isfinite(x.values).any() for x in logged):
        return (
            f"--x wall: the runs have no time/wall in rows with {args.y}: draw over --x env_steps"
        )
    return (
        f"{args.y} is null in all rows of the runs: wait for its first number, or choose "
        "another --y"
    )


def _factors(all_groups: list[Group]) -> dict[str, list[Any]]:
    """The flags of --by and their sorted values; empty if groups differ in anything else."""
    variants = [group.variant for group in all_groups]
    algorithms = {group.algorithm for group in all_groups}
    flags = {tuple(variant) for variant in variants}
    if len(algorithms) > 1 or len(flags) > 1:
        return {}
    return {name: _ordered([variant[name] for variant in variants]) for name in variants[0]}


def _ordered(values: list[Any]) -> list[Any]:
    """The different values, numbers by size."""
    by_text = {json.dumps(value): value for value in values}
    different = list(by_text.values())
    return sorted(different) if all(map(is_number, different)) else different


def _colors(values: list[Any]) -> list[Any]:
    """A colour for each value: shades for three and more numbers, otherwise distinct colours."""
    if len(values) > 2 and all(map(is_number, values)):
        return [shade(place) for place in np.linspace(0, 1, len(values))]
    return [COLORS[index % len(COLORS)] for index in range(len(values))]


def _styles(all_groups: list[Group]) -> dict[str, dict[str, Any]]:
    """Properties of each group's line by its key, the same in every panel.

    The first flag of --by decides the colour, the second one the dashes.
    """
    keys = dict.fromkeys(group.key for group in all_groups)
    styles = {}
    for index, key in enumerate(keys):
        styles[key] = {
            "color": COLORS[index % len(COLORS)],
            "linestyle": DASHES[index % len(DASHES)],
        }
    factors = _factors(all_groups)
    if not 1 <= len(factors) <= 2:
        return styles
    first, *rest = factors
    colors = _colors(factors[first])
    for group in all_groups:
        color = colors[factors[first].index(group.variant[first])]
        if rest:
            second = rest[0]
            index = factors[second].index(group.variant[second])
            styles[group.key] = {"color": color, "linestyle": DASHES[index % len(DASHES)]}
        elif len(factors[first]) > len(COLORS) or colors[0] not in COLORS:
            styles[group.key] = {"color": color, "linestyle": "-"}
    return styles


def _points_apart(panel: Panel, args: Args) -> Panel:
    """Put lines of a single point side by side if they are at the same place."""
    drawn = [line.x for line in panel.lines if len(line.x)]
    points = [index for index, line in enumerate(panel.lines) if len(line.x) == 1]
    x = np.array([panel.lines[index].x[0] for index in points])
    places = np.unique(x)
    if len(points) == len(drawn) and len(places) == 1:
        panel = panel._replace(xticks=tuple(places))
    if len(places) == len(x):
        return panel
    ends = np.concatenate(drawn)
    ends = np.log(ends) if args.logx else ends
    moved = side_by_side(x, np.zeros(len(x)), args.logx, float(np.ptp(ends)))
    lines = list(panel.lines)
    for index, place in zip(points, moved, strict=True):
        lines[index] = lines[index]._replace(x=np.array([place]))
    return panel._replace(lines=lines, is_apart=True)


def _legend_of_factors(all_groups: list[Group], of_points: bool) -> list[Line]:
    """Legend entries for the values of two flags, as empty lines; none for few combinations."""
    factors = _factors(all_groups)
    counts = [len(values) for values in factors.values()]
    if len(factors) != 2 or min(counts) < 2 or max(counts) < 3:
        return []
    first, second = factors
    if len(factors[second]) > len(DASHES):
        return []

    def entry(name: str, value: Any, color: Any, dashes: str) -> Line:
        how = {"color": color, "linestyle": dashes}
        if of_points:
            how |= {"linestyle": "", "marker": MARKERS[dashes], "markersize": 6}
        return Line(
            label=f"{name} {variant_text(value)}",
            x=np.empty(0),
            y=np.empty(0),
            how=how,
        )

    colors = _colors(factors[first])
    lines = []
    for value, color in zip(factors[first], colors, strict=True):
        lines.append(entry(first, value, color, "-"))
    for value, dashes in zip(factors[second], DASHES, strict=False):
        lines.append(entry(second, value, "0.4", dashes))
    return lines


def _curve(group: Group, args: Args, style: dict[str, Any]) -> Curve | None:
    """The curve of a group, over the places at which every seed that has numbers has one.

    It is None if there is no such place.
    """
    logged = [run for run in group.runs if args.y in run.log.series]
    if not logged:
        return None
    series = [run.log.series[args.y] for run in logged]
    if args.x == "wall":
        timeless = [run.path for run in logged if not _has_times(run.log.series[args.y])]
        say(f"{path}: no time/wall in rows with {args.y}, left out" for path in timeless)
    x, values = align(series, args.x, hold=args.x == "wall")
    num_seeds = sum(len(run.seeds) for run in logged)
    unit = "seed" if len(values) == num_seeds else "run"
    values = values[np.isfinite(values).any(axis=1)]
    if not values.size:
        return None
    is_common = np.isfinite(values).all(axis=0)
    last = x[-1]
    first = x[0]
    x = x[is_common]
    values = values[:, is_common]
    if not values.size:
        return None
    begin = x[0]
    end = x[-1]
    notes = []
    if begin - first > 0.1 * last and args.x == "env_steps":
        notes.append(
            f"the line begins at {begin:,.0f}, from where on all its runs have numbers, not "
            f"at {first:,.0f}"
        )
    if end < 0.9 * last:
        notes.append(f"the line ends at {end:,.0f} with the shortest run, not at {last:,.0f}")
    count = len(values)
    line = Line(
        label="",
        x=x,
        y=estimate(values, args.estimate),
        band=spread(values, args.estimate),
        how=style,
    )
    counted = f"1 {unit}"
    if count > 1:
        seeds = len({seed for run in group.runs for seed in run.seeds})
        plural = "" if seeds == 1 else "s"
        several = f"{count} runs of {seeds} seed{plural}" if seeds < count else f"{count} {unit}s"
        counted = f"{several}, {estimate_name(args.estimate, count)}"
    return Curve(group, line, counted, notes)


def _has_times(series: Series) -> bool:
    """True if a row has both a number and its wall time."""
    return bool((np.isfinite(series.wall) & np.isfinite(series.values).any(axis=1)).any())


def _heat_maps(all_groups: list[Group], args: Args) -> Any:
    """Draw the estimate of the metric's last value for each combination of two flags."""
    first, second = args.by
    grids: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    shown_groups = []
    values: dict[str, list[Any]] = {first: [], second: []}
    seeds = set()
    for group in all_groups:
        if {first, second} - group.variant.keys():
            say([f"{group.label} in {group.env}: it does not have both flags, left out"])
            continue
        logs = [run.log.series[args.y] for run in group.runs if args.y in run.log.series]
        last = np.concatenate([[], *(_last_values(series.values) for series in logs)])
        seeds.add(len(last))
        cell = json.dumps(group.variant[second]), json.dumps(group.variant[first])
        rest = {name: value for name, value in group.variant.items() if name not in args.by}
        cells = grids.setdefault((group.env, group._replace(variant=rest).label), {})
        cells[cell] = float(estimate(last, args.estimate)) if len(last) else np.nan
        for name in args.by:
            values[name].append(group.variant[name])
        shown_groups.append(group)
    estimates = [value for cells in grids.values() for value in cells.values()]
    if not np.isfinite(estimates).any():
        raise UsageError(f"{args.y} is null in all rows of the runs that have both flags of --by")
    columns = _ordered(values[first])
    rows = _ordered(values[second])
    drawn = []
    for (env, label), cells in grids.items():
        numbers = np.full((len(rows), len(columns)), np.nan)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                cell = json.dumps(row), json.dumps(column)
                numbers[i, j] = cells.get(cell, np.nan)
        grid = Grid(
            title=f"{env}, {label}",
            rows=[variant_text(row) for row in rows],
            columns=[variant_text(column) for column in columns],
            values=numbers,
        )
        drawn.append(grid)
    most = max(seeds)
    counted = f"{most}" if min(seeds) == most else f"{min(seeds)} to {most}"
    kind = f"{estimate_name(args.estimate, most)} over {counted} seeds" if most > 1 else "1 seed"
    moment = "in training" if args.y in (TRAINING, RECENT) else "of the run"
    notes = listed_notes(shown_groups)
    say(notes)
    notes.append(f"last value {moment}; each cell: {kind}")
    return draw_grids(drawn, first, second, AXES.get(args.y, args.y), args.title, notes)


def _last_values(values: np.ndarray) -> np.ndarray:
    """The last finite number of each seed of values [P, S]."""
    finite = [seed[np.isfinite(seed)] for seed in values.T]
    return np.array([seed[-1] for seed in finite if len(seed)])


def plot(args: Args) -> None:
    """Run the command."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(args.out)
    check_target(path, *(f".{name}" for name in FigureCanvasAgg.filetypes))
    figure = learning_curves(args)
    with replacing(path) as temporary:
        try:
            figure.savefig(temporary)
        except (RuntimeError, ValueError) as error:  # such as .pgf without LaTeX
            raise UsageError(
                f"--out {path}: {str(error).splitlines()[0]}; .png always works"
            ) from error
    print(f"saved    {printable(path)}")


if __name__ == "__main__":
    main(plot, parse(Args))
