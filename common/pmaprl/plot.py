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
from pmaprl.drawing import groups
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
from pmaprl.drawing.groups import Group, Selection
from pmaprl.runs.estimates import estimate, estimate_name, spread
from pmaprl.runs.metrics import RECENT, TRAINING, is_number

ENDS = tyro.conf.arg(metavar="LOW HIGH", help_behavior_hint="")


@dataclass(kw_only=True)
class Args(Selection):
    """Draw learning curves: a panel for each environment, a line for each algorithm over all seeds
    of its runs.
    """

    kind: Literal["curves", "heatmap"] = "curves"
    """Kind of picture: learning curves, or a heat map of last values over the flags of --by."""
    x: Literal["env_steps", "wall"] = "env_steps"
    """Horizontal axis: environment steps, or seconds of all invocations of the run together."""
    y: Annotated[str, tyro.conf.arg(metavar="METRIC")] = TRAINING
    """Metric of metrics.jsonl to draw."""
    logx: bool = False
    """Draw the horizontal axis logarithmically."""
    xlim: Annotated[tuple[Finite, Finite] | None, ENDS] = None
    """Ends of the horizontal axis (default: all that there is)."""
    ylim: Annotated[tuple[Finite, Finite] | None, ENDS] = None
    """Ends of the vertical axis (default: all that there is)."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "curves.png"
    """File to draw to, in the format of its ending: .png, .svg, .pdf ..."""
    title: Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = ""
    """Title of the picture."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("xlim", "ylim"):
            if (ends := getattr(self, name)) and ends[0] >= ends[1]:
                raise UsageError(
                    f"--{name} {ends[0]:g} {ends[1]:g}: the first has to be below the second"
                )
        if self.logx and self.xlim and self.xlim[0] <= 0:
            raise UsageError(f"--logx has no place for --xlim {self.xlim[0]:g}: take one above 0")
        if self.kind == "heatmap" and len(self.by) != 2:
            raise UsageError(
                f"--kind heatmap is drawn over two flags, --by has {len(self.by)}: --by FLAG,FLAG"
            )


class Curve(NamedTuple):
    """The line of a group."""

    group: Group
    line: Line  # without its label
    counted: str  # such as `5 seeds, IQM`


def learning_curves(args: Args) -> Any:
    """The matplotlib Figure that the command writes. Raises UsageError for what cannot be drawn;
    notes go to stderr.
    """
    found = groups.load(args, [args.y])
    names = frozenset().union(*(run.log.names for group in found for run in group.runs))
    if args.y not in names:
        raise UsageError(
            f"--y {args.y}: none of the runs has this metric; {groups.suggest(args.y, names)}"
        )
    return _heat_maps(found, args) if args.kind == "heatmap" else _curves(found, args)


def _curves(found: list[Group], args: Args) -> Any:
    styles = _styles(found)
    curves = []
    for group in found:
        if curve := _curve(group, args, styles[group.key]):
            curves.append(curve)
        else:
            groups.say([f"{group.label} in {group.env}: no {args.y} at common places, left out"])
    if not curves:
        raise UsageError(
            f"{args.y} is null in all rows of the runs: wait for its first number, or choose "
            "another --y"
        )

    panels: dict[str, Panel] = {}
    counted = {curve.counted for curve in curves}
    only_points = all(len(curve.line.x) == 1 for curve in curves)
    legend = _legend_of_factors(found, only_points)
    for group, line, count in curves:
        label = group.label if len(counted) == 1 else f"{group.label} ({count})"
        panel = panels.setdefault(group.env, Panel(group.env, [*legend]))
        panel.lines.append(line._replace(label="" if legend else label))
    return draw(
        [_points_apart(panel, args) for panel in panels.values()],
        args.x,
        AXES.get(args.y, args.y),
        title=args.title,
        note=f"each {'point' if only_points else 'line'}: {counted.pop()}"
        if len(counted) == 1
        else "",
        limits=Limits(x=args.xlim, y=args.ylim, log_x=args.logx),
    )


def _factors(found: list[Group]) -> dict[str, list[Any]]:
    """The flags of --by and their values in order, where nothing else tells the groups apart; else
    none.
    """
    variants = [group.variant for group in found]
    if (
        len({group.algorithm for group in found}) > 1
        or len({tuple(variant) for variant in variants}) > 1
    ):
        return {}
    return {name: _ordered([variant[name] for variant in variants]) for name in variants[0]}


def _ordered(values: list[Any]) -> list[Any]:
    """The different values, numbers by size."""
    different = list({json.dumps(value): value for value in values}.values())
    return sorted(different) if all(map(is_number, different)) else different


def _colors(values: list[Any]) -> list[Any]:
    """A colour for each value: shades for three and more numbers, else colours that are told apart
    easily.
    """
    if len(values) > 2 and all(map(is_number, values)):
        return [shade(place) for place in np.linspace(0, 1, len(values))]
    return [COLORS[index % len(COLORS)] for index in range(len(values))]


def _styles(found: list[Group]) -> dict[str, dict[str, Any]]:
    """Properties of each group's line by its key, the same in every panel.

    The first flag of --by decides the colour, the second one the dashes.
    """
    keys = list(dict.fromkeys(group.key for group in found))
    styles = {
        key: {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)]}
        for index, key in enumerate(keys)
    }
    factors = _factors(found)
    if not 1 <= len(factors) <= 2:
        return styles
    names = list(factors)
    colors = _colors(factors[names[0]])
    for group in found:
        place = factors[names[0]].index(group.variant[names[0]])
        if len(names) == 2:
            dashes = factors[names[1]].index(group.variant[names[1]])
            styles[group.key] = {"color": colors[place], "linestyle": DASHES[dashes % len(DASHES)]}
        elif len(factors[names[0]]) > len(COLORS) or colors[0] not in COLORS:
            styles[group.key] = {"color": colors[place], "linestyle": "-"}
    return styles


def _points_apart(panel: Panel, args: Args) -> Panel:
    """Put lines of a single point side by side where they are at the same place."""
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


def _legend_of_factors(found: list[Group], of_points: bool) -> list[Line]:
    """Empty lines that name the values of two flags one by one, where their combinations would be
    many.
    """
    factors = _factors(found)
    if (
        len(factors) != 2
        or min(map(len, factors.values())) < 2
        or max(map(len, factors.values())) < 3
    ):
        return []
    (first, values), (second, others) = factors.items()
    if len(others) > len(DASHES):
        return []
    nowhere = np.empty(0)
    colors = _colors(values)

    def look(color: Any, dashes: str) -> dict[str, Any]:
        how = (
            {"linestyle": "", "marker": MARKERS[dashes], "markersize": 6}
            if of_points
            else {"linestyle": dashes}
        )
        return {"color": color} | how

    lines = [
        Line(label=f"{first} {groups.flag_text(value)}", x=nowhere, y=nowhere, how=look(color, "-"))
        for value, color in zip(values, colors, strict=True)
    ]
    lines += [
        Line(
            label=f"{second} {groups.flag_text(value)}",
            x=nowhere,
            y=nowhere,
            how=look("0.4", dashes),
        )
        for value, dashes in zip(others, DASHES, strict=False)
    ]
    return lines


def _curve(group: Group, args: Args, style: dict[str, Any]) -> Curve | None:
    """Over all seeds that have numbers, where all of these have them; None where that is
    nowhere.
    """
    logged = [run for run in group.runs if args.y in run.log.series]
    if not logged:
        return None
    x, values = groups.align(
        [run.log.series[args.y] for run in logged], args.x, hold=args.x == "wall"
    )
    what = "seed" if len(values) == sum(len(run.seeds) for run in logged) else "run"
    values = values[np.isfinite(values).any(axis=1)]
    there = np.isfinite(values).all(axis=0)
    if not values[:, there].size:
        return None
    begin = x[there][0]
    end = x[there][-1]
    last = x[-1]
    notes = []
    if begin - x[0] > 0.1 * last and args.x == "env_steps":
        notes.append(
            f"the line begins at {begin:,.0f}, from where on all its runs have numbers, not "
            f"at {x[0]:,.0f}"
        )
    if end < 0.9 * last:
        notes.append(f"the line ends at {end:,.0f} with the shortest run, not at {last:,.0f}")
    groups.say(f"{group.label} in {group.env}: {note}" for note in notes)
    x, values, count = x[there], values[:, there], len(values)
    line = Line(
        label="",
        x=x,
        y=estimate(values, args.estimate),
        band=spread(values, args.estimate),
        how=style,
    )
    counted = (
        f"{count} {what}s, {estimate_name(args.estimate, count)}" if count > 1 else f"1 {what}"
    )
    return Curve(group, line, counted)


def _heat_maps(found: list[Group], args: Args) -> Any:
    """The estimate over seeds of the last value of the metric, for each combination of two
    flags.
    """
    first, second = args.by
    grids: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    values: dict[str, list[Any]] = {first: [], second: []}
    seeds = set()
    for group in found:
        if {first, second} - group.variant.keys():
            groups.say([f"{group.label} in {group.env}: it does not have both flags, left out"])
            continue
        logs = [run.log.series[args.y] for run in group.runs if args.y in run.log.series]
        last = np.concatenate([[], *(_last_values(series.values) for series in logs)])
        seeds.add(len(last))
        cell = json.dumps(group.variant[second]), json.dumps(group.variant[first])
        cells = grids.setdefault((group.env, group.algorithm), {})
        cells[cell] = float(estimate(last, args.estimate)) if len(last) else np.nan
        for name in args.by:
            values[name].append(group.variant[name])
    if not any(np.isfinite(value) for cells in grids.values() for value in cells.values()):
        raise UsageError(f"{args.y} is null in all rows of the runs that have both flags of --by")
    columns = _ordered(values[first])
    rows = _ordered(values[second])
    drawn = [
        Grid(
            title=f"{env}, {algorithm}",
            rows=[groups.flag_text(row) for row in rows],
            columns=[groups.flag_text(column) for column in columns],
            values=np.array(
                [
                    [cells.get((json.dumps(row), json.dumps(column)), np.nan) for column in columns]
                    for row in rows
                ]
            ),
        )
        for (env, algorithm), cells in grids.items()
    ]
    most = max(seeds)
    counted = f"{most}" if min(seeds) == most else f"{min(seeds)} to {most}"
    how = f"{estimate_name(args.estimate, most)} over {counted} seeds" if most > 1 else "1 seed"
    note = (
        f"last value {'in training' if args.y in (TRAINING, RECENT) else 'of the run'}; "
        f"each cell: {how}"
    )
    return draw_grids(drawn, first, second, AXES.get(args.y, args.y), args.title, note)


def _last_values(values: np.ndarray) -> np.ndarray:
    """The last finite number of each seed of [P, S]."""
    known = [seed[np.isfinite(seed)] for seed in values.T]
    return np.array([seed[-1] for seed in known if len(seed)])


def plot(args: Args) -> None:
    """What the command does."""
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
