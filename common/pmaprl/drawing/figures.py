"""Figures by matplotlib: learning curves with bands, `curve.png` of one run and `population.png` of
a population.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmaprl.cli.errors import printable
from pmaprl.cli.files import replacing
from pmaprl.drawing.groups import align, final_returns
from pmaprl.runs.estimates import CONFIDENCE, FEWEST, Interval
from pmaprl.runs.metrics import EVALUATION, RECENT, TRAINING, Log, Series, read_log
from pmaprl.runs.results import ranked, training_returns

AXES = {
    "env_steps": "environment steps",
    "wall": "wall time, compilation included [s]",
    "seconds": "wall time, compilation and evaluations included [s]",
    TRAINING: "episode return (mean of each interval)",
    RECENT: "episode return (mean of the last 100)",
    EVALUATION: "episode return (greedy evaluation)",
}
# Told apart by colour-blind eyes: Okabe and Ito's, without yellow, which is faint on white. With
# the dashes 28 styles.
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"
DASHES = "-", "--", "-.", ":"
MARKERS = {"-": "o", "--": "s", "-.": "^", ":": "D"}  # of a single point, which shows no dashes
SEQUENTIAL = "viridis"  # matplotlib's name of the colours for numbers


class Line(NamedTuple):
    """One line of a panel; P is the number of its points."""

    label: str
    x: np.ndarray  # [P]
    y: np.ndarray  # [P]
    band: Interval | None = None
    seeds: np.ndarray | None = None  # [S, P], drawn thin
    style: int = 0  # index of colour and dashes
    # Further properties of matplotlib's lines, before `style`; not to be changed
    how: dict[str, Any] = {}


class Panel(NamedTuple):
    """One axes of a figure; what it does not say itself is that of the figure."""

    title: str
    lines: list[Line]
    x: str = ""
    ylabel: str = ""
    log: str = ""  # "x" or "y": the axis that is logarithmic
    # The places of the horizontal axis that are named, where they are few
    xticks: tuple[float, ...] = ()
    is_apart: bool = False  # points that would hide each other are side by side


def draw_curve(run_dir: Path, title: str) -> Path:
    """Draw training and evaluation returns of `run_dir` against environment steps; returns the
    picture's path.
    """
    lines = []
    labels = {TRAINING: "training, episodes of each interval", EVALUATION: "greedy evaluation"}
    for name, series in read_log(run_dir, labels).series.items():
        steps, values = align([series])
        values = values[np.isfinite(values).any(axis=1)]
        if len(values):
            style = list(labels).index(name)
            seeds = values if len(values) > 1 else None
            lines.append(
                Line(label=labels[name], x=steps, y=values.mean(axis=0), seeds=seeds, style=style)
            )
    if lines and lines[0].seeds is not None:
        title += f", {len(lines[0].seeds)} seeds and their mean"
    return _save(draw([Panel(title, lines)], "env_steps", "episode return"), run_dir / "curve.png")


def draw_population(run_dir: Path, title: str, values: dict[str, list[float]]) -> Path:
    """Draw the members of `run_dir`, which began with these `values` by flag, [S]; returns the
    picture's path.

    Beside all learning curves stands for each flag the last return against its value, or, where
    members evolve, its values over time, with the descent of the best member.
    """
    source = "pbt/source"
    log = read_log(run_dir, (TRAINING, EVALUATION, source, *(f"hyper/{name}" for name in values)))
    returns, _ = final_returns(log)
    judged = log.series[EVALUATION].steps[-1] if EVALUATION in log.series else math.inf
    ranks = ranked(returns.tolist(), training_returns(run_dir, judged))
    best = ranks[0] if np.isfinite(returns).any() else None
    panels = [_curves_of_members(log, best)]
    for name, x in values.items():
        if source in log.series:
            panels.append(
                _descent(
                    name, log.series[f"hyper/{name}"], log.series[source].values.astype(int), best
                )
            )
        else:
            panels.append(_values_of_members(name, np.array(x), returns, best))
    return _save(
        draw(panels, "env_steps", AXES[TRAINING], plain_text(title)), run_dir / "population.png"
    )


def _save(figure: Any, path: Path) -> Path:
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return path


def lineage(sources: np.ndarray, member: int) -> np.ndarray:
    """Where the weights that `member` has in the end were before each of the exchanges [P, S], and
    after the last one: places among the members, [P + 1].
    """
    path = [member]
    for source in sources[::-1]:
        path.append(source[path[-1]])
    return np.array(path[::-1])


def _curves_of_members(log: Log, best: int | None) -> Panel:
    """All members, the best one in front."""
    lines = []
    if TRAINING in log.series and best is not None:
        steps, values = align([log.series[TRAINING]])
        there = np.isfinite(values).any(axis=0)
        steps = steps[there]
        values = values[:, there]
        lines.append(
            Line(
                label=f"median of {len(values)}",
                x=steps,
                y=np.nanmedian(values, axis=0),
                seeds=values,
            )
        )
        lines.append(
            Line(label=f"member {best}, the best in the end", x=steps, y=values[best], style=1)
        )
    return Panel("", lines)


FEW_VALUES = 5  # of a flag, each of which has a tick


def _values_of_members(name: str, x: np.ndarray, returns: np.ndarray, best: int | None) -> Panel:
    """The last return against the value of a flag; what broke stands at the foot as a cross."""
    alive = np.isfinite(returns)
    lines = []
    dots = {"linestyle": "", "marker": "o", "alpha": 0.6}
    values = np.unique(x)
    is_log = bool(values[0] > 0 and values[-1] >= 10 * values[0])
    at = x
    if best is not None:
        x = side_by_side(at, np.where(alive, returns, returns[alive].min()), is_log)
        lines.append(Line(label="member", x=x[alive], y=returns[alive], how=dots))
        lines.append(
            Line(
                label="the best",
                x=x[[best]],
                y=returns[[best]],
                style=1,
                how=dots | {"alpha": 1, "markersize": 7},
            )
        )
        if not alive.all():
            foot = np.full(np.sum(~alive), returns[alive].min())
            lines.append(
                Line(label="broke", x=x[~alive], y=foot, style=6, how=dots | {"marker": "x"})
            )
    return Panel(
        title="",
        lines=lines,
        x=name,
        ylabel="final greedy return",
        log="x" * is_log,
        xticks=tuple(values) if len(values) <= FEW_VALUES else (),
        is_apart=bool(np.any(x != at)),
    )


def side_by_side(
    x: np.ndarray, y: np.ndarray, is_log: bool = False, width: float = 0.0
) -> np.ndarray:
    """Move those points (x, y) apart that would hide each other, x being equal and y nearly so: a
    small row, by y.

    Args:
        x: Places [S] on the horizontal axis.
        y: Places [S] on the vertical axis.
        is_log: The horizontal axis is logarithmic.
        width: Length of the horizontal axis, of logarithms where it is one of these; 0: that
            between the points.

    Returns:
        The new x [S].
    """
    places = np.log(x) if is_log else x.astype(float)
    known = np.unique(places)
    width = width or known[-1] - known[0] or 1.0
    room = 0.6 * min(np.diff(known), default=width)
    closeness = 0.02 * (y.max() - y.min())
    moved = places.copy()
    for place in known:
        order = np.flatnonzero(places == place)
        order = order[np.argsort(y[order], kind="stable")]
        for row in np.split(order, np.flatnonzero(np.diff(y[order]) > closeness) + 1):
            step = min(0.04 * width, room / len(row))
            moved[row] += step * (np.arange(len(row)) - (len(row) - 1) / 2)
    return np.where(moved == places, x, np.exp(moved) if is_log else moved)


def _descent(name: str, series: Series, sources: np.ndarray, best: int | None) -> Panel:
    """The values of all members over time, and in front those of the ancestors of the best one."""
    values = series.values  # a value holds until the next exchange
    how = {"drawstyle": "steps-post"}
    dotted = how | {"linestyle": ":"}
    lines = [
        Line(
            label="member 0, the control",
            x=series.steps,
            y=values[:, 0],
            seeds=values.T,
            how=dotted,
        )
    ]
    if best is not None:
        path = lineage(sources, best)[1:]  # after the exchange of each row
        lines.append(
            Line(
                label="descent of the best",
                x=series.steps,
                y=values[np.arange(len(path)), path],
                style=1,
                how=how,
            )
        )
    return Panel(title="", lines=lines, x="", ylabel=name, log="y" * _spans_decades(values))


def _spans_decades(values: np.ndarray) -> bool:
    return bool(values.min() > 0 and values.max() > 20 * values.min())


class Limits(NamedTuple):
    """Ends and scale of the axes of a figure."""

    x: tuple[float, float] | None = None
    y: tuple[float, float] | None = None
    log_x: bool = False


EVERYTHING = Limits()


def draw(
    panels: list[Panel],
    x: str,
    ylabel: str,
    title: str = "",
    note: str = "",
    limits: Limits = EVERYTHING,
) -> Any:
    """Draw a matplotlib Figure with one axes for each panel.

    Args:
        panels: what to draw; their legend is one where they have labels in common.
        x: a key of `AXES`, or the text at the horizontal axis.
        ylabel: the text at the vertical axis.
        title: of the figure.
        note: a text at the foot, before that on shaded areas.
        limits: of all axes.
    """
    from matplotlib.figure import Figure

    across = min(len(panels), 2 if len(panels) == 4 else 3)
    down = math.ceil(len(panels) / across)
    labels = [[line.label for line in panel.lines if line.label] for panel in panels]
    entries = max(map(len, labels))
    shared = sum(map(len, labels)) > len(set().union(*labels))
    width, height = (6, 3.6) if len(panels) == 1 else (4.4, 3.2)
    if entries > FEW_ENTRIES and not shared:
        width += 2
    elif not shared:
        height += 0.19 * max(entries - 2, 0)
    figure = Figure(figsize=(width * across, height * down), dpi=130, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flat
    for index, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        _draw_panel(axes, panel, panel.x or x, limits)
        if shared:
            axes.set_title(plain_text(panel.title), loc="left", fontsize=10, weight="bold")
        else:
            _add_legend(axes, panel.title)
        if panel.ylabel or index % across == 0:
            text = plain_text(panel.ylabel or ylabel)
            is_small = len(panels) > 1
            axes.set_ylabel(
                text.replace(" (", "\n(") if is_small else text, fontsize=9 if is_small else 10
            )
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if shared:
        _add_shared_legend(figure, title)
    elif title:
        figure.suptitle(title)
    shades = sorted({line.band.name for panel in panels for line in panel.lines if line.band})
    held = "runs that have ended keep their last value" if x == "wall" and shades else ""
    shaded = f"{_drawn_as(panels)}: {_spread_text(shades)}" if shades else ""
    if foot := "; ".join(filter(None, (note, shaded, held))):
        figure.supxlabel(foot, x=0.99, ha="right", fontsize=8, color="0.4")
    return figure


def _drawn_as(panels: list[Panel]) -> str:
    """How spreads are drawn: around a line, and around a single point."""
    points = [len(line.x) for panel in panels for line in panel.lines if line.band]
    return " and ".join(["shaded"] * (max(points) > 1) + ["bars"] * (min(points) == 1))


def _spread_text(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{CONFIDENCE}, of fewer than {FEWEST} seeds their range"


def plain_text(text: str) -> str:
    """A text as matplotlib draws it letter by letter: formulas between dollars may not be any."""
    return printable(text).replace("$", r"\$")


def _draw_panel(axes: Any, panel: Panel, x: str, limits: Limits) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    for line in panel.lines:
        _draw_line(axes, line)
    axes.set_xlabel(plain_text(AXES.get(x, x)) + " (equal points side by side)" * panel.is_apart)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(**{f"{axis}scale": "log" for axis in panel.log})
    if limits.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if panel.xticks:
        axes.set_xticks(panel.xticks, [f"{place:.6g}" for place in panel.xticks])
        axes.minorticks_off()
    elif not panel.log and not limits.log_x:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    if x == "env_steps":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlim=limits.x, ylim=limits.y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


FEW_ENTRIES = 8  # of a legend above the axes; longer ones stand beside them, and must not be higher
LEGEND_ROWS = 18


def _add_legend(axes: Any, title: str) -> None:
    """Add a legend above the axes, which never hides a curve, or beside them where it is long."""
    # Given, because matplotlib warns where it finds none itself
    handles, labels = axes.get_legend_handles_labels()
    look = {
        "title": plain_text(title),
        "title_fontproperties": {"weight": "bold"},
        "alignment": "left",
        "frameon": False,
    }
    if len(labels) > FEW_ENTRIES:
        columns = math.ceil(len(labels) / LEGEND_ROWS)
        place = {"loc": "upper left", "bbox_to_anchor": (1, 1), "ncols": columns, "fontsize": 7}
    else:
        longest = max(map(len, labels), default=0)
        room = 12 * axes.figure.get_figwidth() / axes.get_gridspec().ncols  # characters
        columns = max(1, min(len(labels), int(room / (longest + 8))))
        place = {
            "loc": "lower left",
            "bbox_to_anchor": (0, 1),
            "borderaxespad": 0.2,
            "ncols": columns,
            "fontsize": 9,
        }
    axes.legend(handles, labels, **place, **look)


def _add_shared_legend(figure: Any, title: str) -> None:
    """Add one legend with all labels of the axes of a figure, below the title, which could lie on
    it elsewhere.
    """
    entries = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    room = 12 * figure.get_figwidth()  # characters
    columns = max(1, min(len(entries), int(room / (max(map(len, entries)) + 8))))
    look = {"ncols": columns, "frameon": False, "fontsize": 9, "alignment": "left"}
    look |= {"title": title, "title_fontproperties": {"weight": "bold"}} if title else {}
    figure.legend(entries.values(), entries.keys(), loc="outside upper left", **look)


class Grid(NamedTuple):
    """Numbers over two factors."""

    title: str
    rows: list[str]  # values of the factor along the vertical axis, [R]
    columns: list[str]  # likewise along the horizontal axis, [C]
    values: np.ndarray  # [R, C], NaN where nothing is known


def draw_grids(
    grids: list[Grid], x: str, y: str, values: str, title: str = "", note: str = ""
) -> Any:
    """Draw a matplotlib Figure with a heat map for each grid, whose axes are the factors `x` and
    `y`.

    Below stands the `note`.
    """
    from matplotlib.figure import Figure

    across = min(len(grids), 3)
    down = math.ceil(len(grids) / across)
    width = max(4.0, 1.8 + 0.7 * max(len(grid.columns) for grid in grids))
    height = max(3.0, 1.2 + 0.4 * max(len(grid.rows) for grid in grids))
    figure = Figure(figsize=(width * across, height * down), dpi=130, layout="constrained")
    places = figure.subplots(down, across, squeeze=False).flat
    for axes, grid in zip(places, grids, strict=False):
        image = axes.imshow(grid.values, origin="lower", aspect="auto", cmap=SEQUENTIAL)
        figure.colorbar(image, ax=axes).set_label(plain_text(values), size=8)
        axes.set_xticks(range(len(grid.columns)), map(plain_text, grid.columns))
        axes.set_yticks(range(len(grid.rows)), map(plain_text, grid.rows))
        axes.set_xlabel(plain_text(x))
        axes.set_ylabel(plain_text(y))
        axes.set_title(plain_text(grid.title), loc="left", fontsize=10, weight="bold")
        for row, column in np.argwhere(np.isfinite(grid.values)):
            dark = image.norm(grid.values[row, column]) < 0.6
            text = f"{grid.values[row, column]:.4g}"
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
            )
    for axes in places[len(grids) :]:
        axes.set_axis_off()
    if title:
        figure.suptitle(title)
    if note:
        figure.supxlabel(note, x=0.99, ha="right", fontsize=8, color="0.4")
    return figure


def shade(place: float) -> tuple[float, ...]:
    """The colour of a number between 0, the smallest, and 1, the largest; the lightest ones are
    left out.
    """
    from matplotlib import colormaps

    return colormaps[SEQUENTIAL](0.92 * place)


def _draw_line(axes: Any, line: Line) -> None:
    how = {
        "color": COLORS[line.style % len(COLORS)],
        "marker": "o" * (0 < len(line.x) <= 12),
        "markersize": 4,
    }
    how |= {"linestyle": DASHES[line.style % len(DASHES)]} | line.how
    if len(line.x) == 1 and "marker" not in line.how:
        how |= {"marker": MARKERS[how["linestyle"]], "markersize": 6, "linestyle": ""}
    if line.seeds is not None:
        faint = max(0.12, 0.8 / math.sqrt(len(line.seeds)))
        axes.plot(
            line.x,
            line.seeds.T,
            **how | {"linestyle": "-", "markersize": 2},
            alpha=faint,
            linewidth=0.8,
        )
    if line.band and len(line.x) > 1:
        axes.fill_between(
            line.x, line.band.low, line.band.high, color=how["color"], alpha=0.18, linewidth=0
        )
    elif line.band:
        errors = [line.y - line.band.low, line.band.high - line.y]
        axes.errorbar(line.x, line.y, errors, color=how["color"], capsize=4, linewidth=1.2)
    axes.plot(line.x, line.y, label=plain_text(line.label), linewidth=1.8, **how)
