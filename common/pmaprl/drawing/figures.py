"""Figures by matplotlib: learning curves with bands, `curve.png` and `population.png` of a run."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmaprl.cli.env_flags import PREFIX, unswept_text
from pmaprl.cli.errors import printable
from pmaprl.cli.files import replacing
from pmaprl.comparison.curves import align, final_returns
from pmaprl.runs.estimates import CONFIDENCE, FEWEST, Interval
from pmaprl.runs.metrics import EVALUATION, RECENT, TRAINING, Log, Series, read_log
from pmaprl.runs.results import ranked, training_returns

AXES = {
    "env_steps": "environment steps",
    "wall": "wall time, compilation included [s]",
    "seconds": "wall time, compilation and evaluations included [s]",
    TRAINING: "training return of sampled actions (mean of each interval)",
    RECENT: "training return of sampled actions (mean of the last 100)",
    EVALUATION: "greedy return (evaluation)",
}
# Colours that colour-blind eyes tell apart (Okabe and Ito), without yellow: it is faint on white.
# With the dashes they make 28 styles.
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"
DASHES = "-", "--", "-.", ":"
MARKERS = {"-": "o", "--": "s", "-.": "^", ":": "D"}  # for single points, which show no dashes
SEQUENTIAL = "viridis"  # matplotlib's name of the colours for numbers


class Line(NamedTuple):
    """One line of a panel; P is the number of its points."""

    label: str
    x: np.ndarray  # [P]
    y: np.ndarray  # [P]
    band: Interval | None = None
    seeds: np.ndarray | None = None  # [S, P], drawn thin
    style: int = 0  # index of colour and dashes
    # Properties of matplotlib's lines that replace those of `style`; never changed in place
    how: dict[str, Any] = {}


class Panel(NamedTuple):
    """One axes of a figure; empty fields are those of the figure."""

    title: str
    lines: list[Line]
    x: str = ""
    ylabel: str = ""
    log: str = ""  # "x" or "y": the axis that is logarithmic
    xticks: tuple[float, ...] = ()  # places of the horizontal axis that are labelled, if few
    is_apart: bool = False  # points that would hide each other are side by side


def draw_curve(run_dir: Path, title: str) -> Path:
    """Draw training and evaluation returns of `run_dir` against environment steps.

    Returns:
        The picture's path.
    """
    lines = []
    labels = {
        TRAINING: "training, episodes of each interval",
        EVALUATION: "greedy evaluation",
    }
    log = read_log(run_dir, labels)
    for name, series in log.series.items():
        steps, values = align([series])
        values = values[np.isfinite(values).any(axis=1)]
        if not len(values):
            continue
        line = Line(
            label=labels[name],
            x=steps,
            y=values.mean(axis=0),
            seeds=values if len(values) > 1 else None,
            style=list(labels).index(name),
        )
        lines.append(line)
    if lines and lines[0].seeds is not None:
        title += f", {len(lines[0].seeds)} seeds and their mean"
    figure = draw([Panel(title, lines)], "env_steps", "episode return")
    return _save(figure, run_dir / "curve.png")


def draw_population(
    run_dir: Path, title: str, values: dict[str, list[float]], env_params: str = ""
) -> Path:
    """Draw the learning curves of all members, and one panel for each flag that differs.

    The panel of a flag shows the last return against its value. Where members evolve it shows the
    values over time, with the lineage of the best member.

    Args:
        run_dir: The run.
        title: The title of the figure.
        values: The first values [S] of the members, by flag.
        env_params: The parameters of the environment in which all are evaluated.

    Returns:
        The picture's path.
    """
    source = "pbt/source"
    flags = [f"hyper/{name}" for name in values]
    log = read_log(run_dir, (TRAINING, EVALUATION, source, *flags))
    returns, _ = final_returns(log)
    judged = log.series[EVALUATION].steps[-1] if EVALUATION in log.series else math.inf
    ranks = ranked(returns.tolist(), training_returns(run_dir, judged))
    best = ranks[0] if np.isfinite(returns).any() else None
    panels = [_curves_of_members(log, best)]
    for name, first_values in values.items():
        if source in log.series:
            history = log.series[f"hyper/{name}"]
            sources = log.series[source].values.astype(int)
            panel = _descent(name, history, sources, best)
        else:
            panel = _values_of_members(name, np.array(first_values), returns, best)
        panels.append(panel)
    swept = [name for name in values if name.startswith(PREFIX)]
    notes = [f"greedy returns are {unswept_text(swept, env_params)}"] if swept else []
    figure = draw(panels, "env_steps", AXES[TRAINING], plain_text(title), notes)
    return _save(figure, run_dir / "population.png")


def _save(figure: Any, path: Path) -> Path:
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return path


def lineage(sources: np.ndarray, member: int) -> np.ndarray:
    """Indices [P + 1] of the members that carried the final weights of `member`.

    Args:
        sources: The member [P, S] that each member copied in each of P exchanges.
        member: Index of the member whose weights are followed.

    Returns:
        Its ancestors before each exchange, and the member itself after the last one.
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
        is_known = np.isfinite(values).any(axis=0)
        steps = steps[is_known]
        values = values[:, is_known]
        median = Line(
            label=f"median of {len(values)}",
            x=steps,
            y=np.nanmedian(values, axis=0),
            seeds=values,
        )
        winner = Line(
            label=f"member {best}, the best in the last evaluation",
            x=steps,
            y=values[best],
            style=1,
        )
        lines = [median, winner]
    return Panel("", lines)


FEW_VALUES = 5  # most values of a flag that have a tick each


def _values_of_members(
    name: str, flag_values: np.ndarray, returns: np.ndarray, best: int | None
) -> Panel:
    """The last return against the value of a flag; failed members are crosses at the foot."""
    alive = np.isfinite(returns)
    lines = []
    dots = {"linestyle": "", "marker": "o", "alpha": 0.6}
    values = np.unique(flag_values)
    is_log = bool(values[0] > 0 and values[-1] >= 10 * values[0])
    x = flag_values
    if best is not None:
        lowest = returns[alive].min()
        x = side_by_side(flag_values, np.where(alive, returns, lowest), is_log)
        members = Line(label="member", x=x[alive], y=returns[alive], how=dots)
        winner = Line(
            label="the best",
            x=x[[best]],
            y=returns[[best]],
            style=1,
            how=dots | {"alpha": 1, "markersize": 7},
        )
        lines = [members, winner]
        if not alive.all():
            broken = Line(
                label="broke",
                x=x[~alive],
                y=np.full(np.sum(~alive), lowest),
                style=6,
                how=dots | {"marker": "x"},
            )
            lines.append(broken)
    return Panel(
        title="",
        lines=lines,
        x=name,
        ylabel="final greedy return",
        log="x" * is_log,
        xticks=tuple(values) if len(values) <= FEW_VALUES else (),
        is_apart=bool(np.any(x != flag_values)),
    )


def side_by_side(
    x: np.ndarray, y: np.ndarray, is_log: bool = False, width: float = 0.0
) -> np.ndarray:
    """Move points apart that would hide each other: with equal x and nearly equal y.

    Such points become a small row, in the order of y.

    Args:
        x: Places [S] on the horizontal axis.
        y: Places [S] on the vertical axis.
        is_log: True if the horizontal axis is logarithmic.
        width: Length of the horizontal axis, in logarithms if it is logarithmic; 0: the distance
            between the outermost points.

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
        gaps = np.diff(y[order]) > closeness
        for row in np.split(order, np.flatnonzero(gaps) + 1):
            step = min(0.04 * width, room / len(row))
            middle = (len(row) - 1) / 2
            moved[row] += step * (np.arange(len(row)) - middle)
    return np.where(moved == places, x, np.exp(moved) if is_log else moved)


def _descent(name: str, series: Series, sources: np.ndarray, best: int | None) -> Panel:
    """The values of all members over time, with those of the best one's ancestors in front."""
    values = series.values
    how = {"drawstyle": "steps-post"}  # a value holds until the next exchange
    control = Line(
        label="member 0, the control",
        x=series.steps,
        y=values[:, 0],
        seeds=values.T,
        how=how | {"linestyle": ":"},
    )
    lines = [control]
    if best is not None:
        path = lineage(sources, best)[1:]  # after the exchange of each row
        ancestors = Line(
            label="descent of the best",
            x=series.steps,
            y=values[np.arange(len(path)), path],
            style=1,
            how=how,
        )
        lines.append(ancestors)
    return Panel(
        title="",
        lines=lines,
        ylabel=name,
        log="y" if _spans_decades(values) else "",
    )


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
    notes: Sequence[str] = (),
    limits: Limits = EVERYTHING,
) -> Any:
    """Draw a matplotlib Figure with one axes for each panel.

    Args:
        panels: what to draw; panels with labels in common share one legend.
        x: a key of `AXES`, or the label of the horizontal axis.
        ylabel: the label of the vertical axis.
        title: the title of the figure.
        notes: sentences at the foot, before the explanation of shaded areas.
        limits: ends and scale of all axes.
    """
    from matplotlib.figure import Figure

    across = min(len(panels), 2 if len(panels) == 4 else 3)
    down = math.ceil(len(panels) / across)
    labels = [_labels(panel) for panel in panels]
    counts = [len(names) for names in labels]
    entries = max(counts)
    shared = sum(counts) > len(set().union(*labels))
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
            size = 10 if len(panels) == 1 else 9
            axes.set_ylabel(plain_text(panel.ylabel or ylabel), fontsize=size)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if shared:
        _add_shared_legend(figure, title)
    elif title:
        figure.suptitle(title)
    notes = list(notes)
    banded = [line for panel in panels for line in panel.lines if line.band]
    if banded:
        notes.append(_spread_note(banded))
        if x == "wall":
            notes.append("runs that have ended keep their last value")
    _add_foot(figure, notes)
    fit_labels(figure)
    return figure


FOOT_CHARACTERS = 80  # of a short text at the foot, in one line
FOOT_LINE = 0.14  # inches
SMALLEST_FONT = 5


def _add_foot(figure: Any, notes: Sequence[str]) -> None:
    """Add sentences at the foot of a figure, on lines of their own if they are long together."""
    text = "; ".join(map(plain_text, notes))
    look = {"x": 0.99, "ha": "right"}
    if len(text) > FOOT_CHARACTERS:
        text = "\n".join(map(plain_text, notes))
        look = {"x": 0.01, "ha": "left"}
    if text:
        figure.supxlabel(text, fontsize=8, color="0.4", **look)


def fit_labels(figure: Any) -> None:
    """Wrap the labels, titles and notes of a figure that are longer than there is room for.

    A label is not to be longer than its axes, and a title or a note not longer than the figure,
    which becomes higher by the lines at its foot.
    """
    figure.draw_without_rendering()
    foot = figure._supxlabel
    more = 0.0
    if foot:
        _fit(foot, foot.get_text(), 0.98 * figure.bbox.width)
        more = FOOT_LINE * foot.get_text().count("\n")
        figure.set_figheight(figure.get_figheight() + more)
    labels = [text for axes in figure.axes for text in (axes.xaxis.label, axes.yaxis.label)]
    whole = {text: text.get_text() for text in labels}
    changed = bool(foot and more)
    for _ in range(3):  # a label of more lines leaves the axes less room
        if changed:
            figure.draw_without_rendering()
        fitted = []
        if title := figure._suptitle:
            fitted.append(_fit(title, title.get_text(), 0.98 * figure.bbox.width))
        for axes in figure.axes:
            box = axes.get_window_extent()
            title = axes._left_title
            fitted += [
                _fit(axes.xaxis.label, whole[axes.xaxis.label], box.width),
                _fit(axes.yaxis.label, whole[axes.yaxis.label], box.height, is_upright=True),
                _fit(title, title.get_text(), figure.bbox.width / _columns_of(axes)),
            ]
        changed = any(fitted)
        if not changed:
            break


def _columns_of(axes: Any) -> int:
    """Columns of the grid of axes that these belong to."""
    spec = axes.get_subplotspec()
    return spec.get_gridspec().ncols if spec else 1


def _fit(text: Any, words: str, room: float, is_upright: bool = False) -> bool:
    """Wrap a text, or set it in smaller letters where its words are too long for that.

    Args:
        text: matplotlib's Text, which has been drawn.
        words: what it says, before it was wrapped.
        room: the pixels that it may be long.
        is_upright: True if it is written upwards.

    Returns:
        True if the text has changed.
    """
    box = text.get_window_extent()
    length = box.height if is_upright else box.width
    if not words or length <= room:
        return False
    longest = max(map(len, text.get_text().split("\n")))
    wrapped = wrap(words, int(longest * room / length))
    text.set_text(wrapped)
    if max(map(len, wrapped.split("\n"))) >= longest:  # one long word
        text.set_fontsize(max(text.get_fontsize() * room / length, SMALLEST_FONT))
    return True


def wrap(words: str, most: int, break_words: bool = False) -> str:
    """Wrap each line of a text at so many characters."""
    lines = []
    for line in words.split("\n"):
        lines += textwrap.wrap(
            line, max(most, 1), break_long_words=break_words, break_on_hyphens=False
        )
    return "\n".join(lines)


def _labels(panel: Panel) -> list[str]:
    """Labels of a panel's lines, without the empty ones."""
    return [line.label for line in panel.lines if line.label]


def _spread_note(lines: list[Line]) -> str:
    """Explanation of the spreads: shaded around a line, bars around a single point."""
    points = [len(line.x) for line in lines]
    shapes = []
    if max(points) > 1:
        shapes.append("shaded")
    if min(points) == 1:
        shapes.append("bars")
    names = {line.band.name for line in lines if line.band}
    mixed = f"{CONFIDENCE}, of fewer than {FEWEST} seeds their range"
    meaning = names.pop() if len(names) == 1 else mixed
    return f"{' and '.join(shapes)}: {meaning}"


def plain_text(text: str) -> str:
    """Escape a text so that matplotlib does not read formulas between dollar signs."""
    return printable(text).replace("$", r"\$")


def _draw_panel(axes: Any, panel: Panel, x: str, limits: Limits) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    for line in panel.lines:
        _draw_line(axes, line)
    xlabel = plain_text(AXES.get(x, x))
    if panel.is_apart:
        xlabel += " (equal points side by side)"
    axes.set_xlabel(xlabel)
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


FEW_ENTRIES = 8  # entries of a legend above the axes; longer ones stand beside them
LEGEND_ROWS = 18  # rows of a legend beside the axes, which must not be higher than these
CHARACTERS_PER_INCH = 12  # width of a legend's text
CHARACTERS_BESIDE = 40  # width of a legend beside the axes


def _add_legend(axes: Any, title: str) -> None:
    """Add a legend above the axes, where it hides no curve, or beside them if it is long."""
    # Handles are passed on, because matplotlib warns if it looks for some and there are none
    handles, labels = axes.get_legend_handles_labels()
    look = {
        "title": plain_text(title),
        "title_fontproperties": {"weight": "bold"},
        "alignment": "left",
        "frameon": False,
    }
    if len(labels) > FEW_ENTRIES:
        labels = [wrap(label, CHARACTERS_BESIDE, break_words=True) for label in labels]
        columns = math.ceil(len(labels) / LEGEND_ROWS)
        place = {"loc": "upper left", "bbox_to_anchor": (1, 1), "ncols": columns, "fontsize": 7}
    else:
        width = axes.figure.get_figwidth() / axes.get_gridspec().ncols
        labels = _wrapped_labels(labels, width)
        columns = _legend_columns(labels, width)
        place = {
            "loc": "lower left",
            "bbox_to_anchor": (0, 1),
            "borderaxespad": 0.2,
            "ncols": columns,
            "fontsize": 9,
        }
    axes.legend(handles, labels, **place, **look)


def _add_shared_legend(figure: Any, title: str) -> None:
    """Add one legend with all labels of a figure, under a title that thus never overlaps it."""
    entries = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    labels = _wrapped_labels(list(entries), figure.get_figwidth())
    look = {
        "ncols": _legend_columns(labels, figure.get_figwidth()),
        "frameon": False,
        "fontsize": 9,
        "alignment": "left",
    }
    if title:
        look |= {"title": title, "title_fontproperties": {"weight": "bold"}}
    figure.legend(entries.values(), labels, loc="outside upper left", **look)


def _wrapped_labels(labels: list[str], width: float) -> list[str]:
    """Labels that fit beside their handles on a `width` in inches."""
    most = int(CHARACTERS_PER_INCH * width) - 10
    return [wrap(label, most, break_words=True) for label in labels]


def _legend_columns(labels: list[str], width: float) -> int:
    """Number of columns that a legend has room for, on a `width` in inches."""
    longest = max(map(len, labels), default=0)
    fitting = int(CHARACTERS_PER_INCH * width / (longest + 8))
    return max(1, min(len(labels), fitting))


class Grid(NamedTuple):
    """Numbers over two factors."""

    title: str
    rows: list[str]  # values of the factor along the vertical axis, [R]
    columns: list[str]  # values of the factor along the horizontal axis, [C]
    values: np.ndarray  # [R, C], NaN where nothing is known


def draw_grids(
    grids: list[Grid],
    x: str,
    y: str,
    values: str,
    title: str = "",
    notes: Sequence[str] = (),
) -> Any:
    """Draw a matplotlib Figure with a heat map for each grid.

    Args:
        grids: the numbers.
        x: the factor along the horizontal axes.
        y: the factor along the vertical axes.
        values: the label of the numbers.
        title: the title of the figure.
        notes: sentences at the foot.
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
        _set_ticks(axes, grid)
        axes.set_xlabel(plain_text(x))
        axes.set_ylabel(plain_text(y))
        axes.set_title(plain_text(grid.title), loc="left", fontsize=10, weight="bold")
        for row, column in np.argwhere(np.isfinite(grid.values)):
            value = grid.values[row, column]
            is_dark = image.norm(value) < 0.6
            axes.text(
                column,
                row,
                f"{value:.4g}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if is_dark else "black",
            )
    for axes in places[len(grids) :]:
        axes.set_axis_off()
    if title:
        figure.suptitle(title)
    _add_foot(figure, notes)
    fit_labels(figure)
    return figure


COLUMN_CHARACTERS = 12  # width of the label of a heat map's column
ROW_CHARACTERS = 20


def _set_ticks(axes: Any, grid: Grid) -> None:
    """Label rows and columns of a heat map with the values of its factors."""
    columns = [wrap(plain_text(x), COLUMN_CHARACTERS, break_words=True) for x in grid.columns]
    rows = [wrap(plain_text(x), ROW_CHARACTERS, break_words=True) for x in grid.rows]
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)


def shade(place: float) -> tuple[float, ...]:
    """The colour of a number between 0, the smallest, and 1, the largest."""
    from matplotlib import colormaps

    return colormaps[SEQUENTIAL](0.92 * place)  # the lightest colours are hard to see on white


def _draw_line(axes: Any, line: Line) -> None:
    how = {
        "color": COLORS[line.style % len(COLORS)],
        "marker": "o" if 0 < len(line.x) <= 12 else "",
        "markersize": 4,
        "linestyle": DASHES[line.style % len(DASHES)],
    }
    how |= line.how
    if len(line.x) == 1 and "marker" not in line.how:
        how |= {
            "marker": MARKERS[how["linestyle"]],
            "markersize": 6,
            "linestyle": "",
        }
    if line.seeds is not None:
        faint = {
            "linestyle": "-",
            "markersize": 2,
            "alpha": max(0.12, 0.8 / math.sqrt(len(line.seeds))),
            "linewidth": 0.8,
        }
        axes.plot(line.x, line.seeds.T, **how | faint)
    if line.band and len(line.x) > 1:
        axes.fill_between(
            line.x,
            line.band.low,
            line.band.high,
            color=how["color"],
            alpha=0.18,
            linewidth=0,
        )
    elif line.band:
        errors = [line.y - line.band.low, line.band.high - line.y]
        axes.errorbar(line.x, line.y, errors, color=how["color"], capsize=4, linewidth=1.2)
    axes.plot(line.x, line.y, label=plain_text(line.label), linewidth=1.8, **how)
