"""Figures by matplotlib: learning curves with bands, `curve.png` of one run and `population.png` of a population."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.files import replacing
from common.drawing.groups import EVALUATION, RECENT, TRAINING, Interval, between
from common.runs.metrics import Log, Series, read_log

AXES = {
    "env_steps": "environment steps",
    "wall": "wall time [s]",
    "seconds": "wall time, compilation and evaluations included [s]",
    "num_envs": "environments",
    "devices": "devices",
    "score": "score: 0 is the worst return on its task, 1 its threshold",
    TRAINING: "episode return (mean of each interval)",
    RECENT: "episode return (mean of the last 100)",
    EVALUATION: "episode return (greedy evaluation)",
}
# Told apart by colour-blind eyes: Okabe and Ito's, without yellow, which is faint on white. With the dashes 28 styles.
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"
DASHES = "-", "--", "-.", ":"


@dataclass(frozen=True)
class Line:
    """One line of a panel; P is the number of its points."""

    label: str
    x: np.ndarray  # [P]
    y: np.ndarray  # [P]
    band: Interval | None = None
    seeds: np.ndarray | None = None  # [S, P], drawn thin
    style: int = 0  # index of colour and dashes


@dataclass(frozen=True)
class Panel:
    title: str
    lines: list[Line]


def draw_curve(run_dir: Path, title: str) -> Path:
    """Draw training and evaluation returns of `run_dir` against environment steps; returns the picture's path."""
    series = read_log(run_dir, (TRAINING, EVALUATION)).series
    lines = []
    labels = {TRAINING: "training, episodes of each interval", EVALUATION: "greedy evaluation"}
    for style, (name, label) in enumerate(labels.items()):
        if name in series and len((found := between(series[name])).steps):
            values = found.values[:, np.isfinite(found.values).any(axis=0)]
            thin = values.T if values.shape[1] > 1 else None
            lines.append(Line(label, found.steps, values.mean(axis=1), seeds=thin, style=style))
    if lines and lines[0].seeds is not None:
        title += f", {len(lines[0].seeds)} seeds and their mean"
    figure = draw([Panel(title, lines)], "env_steps", "episode return")
    path = run_dir / "curve.png"
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return path


def draw(panels: list[Panel], x: str, ylabel: str, title: str = "") -> Any:
    """A matplotlib Figure with one axes for each panel; `x` is a key of `AXES`."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # names may have a $
        return _draw_figure(panels, x, ylabel, title)


def _draw_figure(panels: list[Panel], x: str, ylabel: str, title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(len(panels), 2 if len(panels) == 4 else 3)
    down = math.ceil(len(panels) / across)
    entries = max(len(panel.lines) for panel in panels)
    width, height = (6, 3.6) if len(panels) == 1 else (4.4, 3.2)
    height += 0.19 * max(entries - 2, 0)
    figure = Figure(figsize=(width * across, height * down), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False).flat
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, x)
    for axes in grid[::across]:
        axes.set_ylabel(ylabel, fontsize=10 if len(panels) == 1 else 9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if title:
        figure.suptitle(title)
    if any(line.band for panel in panels for line in panel.lines):
        held = "; runs that have ended keep their last value" if x == "wall" else ""
        note = f"shaded: 95% bootstrap interval{held}"
        figure.supxlabel(note, x=0.99, ha="right", fontsize=8, color="0.4")
    return figure


def _draw_panel(axes: Any, panel: Panel, x: str) -> None:
    from matplotlib.ticker import EngFormatter

    for line in panel.lines:
        _draw_line(axes, line)
    axes.set_xlabel(AXES[x])
    if x == "env_steps":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    # Above the axes, so that it never hides a curve.
    longest = max((len(line.label) for line in panel.lines), default=0)
    room = 12 * axes.figure.get_figwidth() / axes.get_gridspec().ncols  # characters
    columns = max(1, min(len(panel.lines), int(room / (longest + 8))))
    legend = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": columns, "alignment": "left", "frameon": False}
    labelled = axes.get_legend_handles_labels()  # given, because matplotlib warns where it finds none itself
    axes.legend(
        *labelled, **legend, title=panel.title, title_fontproperties={"weight": "bold"}, fontsize=9, borderaxespad=0.2
    )


def _draw_line(axes: Any, line: Line) -> None:
    color, dashes = COLORS[line.style % len(COLORS)], DASHES[line.style % len(DASHES)]
    few = len(line.x) <= 12
    if line.seeds is not None:
        axes.plot(line.x, line.seeds.T, color=color, alpha=0.3, linewidth=0.8)
    if line.band and len(line.x) > 1:
        axes.fill_between(line.x, line.band.low, line.band.high, color=color, alpha=0.18, linewidth=0)
    elif line.band:
        errors = [line.y - line.band.low, line.band.high - line.y]
        axes.errorbar(line.x, line.y, errors, color=color, capsize=4, linewidth=1.2)
    axes.plot(line.x, line.y, dashes, color=color, label=line.label, linewidth=1.8, marker="o" * few, markersize=4)


BEST, OTHERS = COLORS[1], COLORS[0]
WIDE = 20  # how many times the smallest value the largest one is, from which on its axis is logarithmic
SOURCE = "pbt/source"


def draw_population(run_dir: Path, title: str, values: dict[str, list[float]]) -> Path:
    """Draw the members of `run_dir`, which began with these `values` by flag, [S]; returns the picture's path.

    Beside all learning curves stands for each flag the last return against its value, or, where members evolve, its
    values over time, with the descent of the best member.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    log = read_log(run_dir, (TRAINING, EVALUATION, SOURCE, *(f"hyper/{name}" for name in values)))
    found = log.series
    across = 2 if len(values) == 3 else min(1 + len(values), 3)
    down = math.ceil((1 + len(values)) / across)
    path = run_dir / "population.png"
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(4.6 * across, 3.4 * down), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        curves, *others = figure.subplots(down, across, squeeze=False).flat
        returns = _final(log)
        _draw_curves(curves, found.get(TRAINING), returns)
        for axes, (name, x) in zip(others, values.items(), strict=False):
            if SOURCE in found:
                _draw_descent(axes, name, found[f"hyper/{name}"], found[SOURCE].values.astype(int), returns)
            else:
                _draw_values(axes, name, np.array(x), returns)
        for axes in others[len(values) :]:
            axes.set_axis_off()
        figure.suptitle(title)
        with replacing(path) as temporary:
            figure.savefig(temporary)
    return path


def descent(sources: np.ndarray, member: int) -> np.ndarray:
    """Where the weights that `member` has in the end were before each of the exchanges [P, S], and after the last one:
    places among the members, [P + 1].
    """
    path = [member]
    for source in sources[::-1]:
        path.append(source[path[-1]])
    return np.array(path[::-1])


def _final(log: Log) -> np.ndarray:
    """The last greedy return of every member, NaN where it broke, [S]; that of training where there is none."""
    if EVALUATION in log.series:
        return log.series[EVALUATION].values[-1]
    return log.series[TRAINING].last if TRAINING in log.series else np.full(1, math.nan)


def _draw_curves(axes: Any, series: Series | None, returns: np.ndarray) -> None:
    """All members, the best one in front."""
    axes.set_ylabel(AXES[TRAINING])
    _over_steps(axes)
    if series is None or not np.isfinite(returns).any():
        return
    best, series = int(np.nanargmax(returns)), between(series)
    mark = _mark(series)
    axes.plot(series.steps, series.values, color=OTHERS, alpha=_faint(returns), linewidth=0.9, **mark)
    median = [np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else math.nan for row in series.values]
    axes.plot(series.steps, median, "--", color=OTHERS, label=f"median of {len(returns)}", linewidth=1.6, **mark)
    front = {"color": BEST, "label": f"member {best}, the best in the end", "linewidth": 1.8}
    axes.plot(series.steps, series.values[:, best], **front, **mark)
    axes.legend(fontsize=9, frameon=False)


def _draw_values(axes: Any, name: str, x: np.ndarray, returns: np.ndarray) -> None:
    """The last return against the value of a flag; what broke stands at the foot as a cross."""
    axes.set_xlabel(name)
    axes.set_ylabel("final greedy return")
    if x.min() > 0 and x.max() > WIDE * x.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter("")  # whose own one writes formulas
    _tidy(axes)
    alive = np.isfinite(returns)
    if not alive.any():
        return
    best = int(np.nanargmax(returns))
    axes.plot(x[alive], returns[alive], "o", color=OTHERS, alpha=0.6, markersize=4)
    axes.plot(x[best], returns[best], "o", color=BEST, markersize=7)
    if not alive.all():
        foot = np.full(np.sum(~alive), returns[alive].min())
        axes.plot(x[~alive], foot, "x", color="0.4", markersize=5, label="broke")
        axes.legend(fontsize=9, frameon=False)


def _draw_descent(axes: Any, name: str, series: Series, sources: np.ndarray, returns: np.ndarray) -> None:
    """The values of all members over time, and in front those of the ancestors of the best one."""
    axes.set_ylabel(name)
    _over_steps(axes)
    if series.values.min() > 0 and series.values.max() > WIDE * series.values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.yaxis.set_minor_formatter("")
    how = {"drawstyle": "steps-post"} | _mark(series)  # a value holds until the next exchange
    axes.plot(series.steps, series.values, color=OTHERS, alpha=_faint(returns), linewidth=0.9, **how)
    axes.plot(series.steps, series.values[:, 0], ":", color="0.3", linewidth=1.4, label="member 0, the control", **how)
    if np.isfinite(returns).any():
        path = descent(sources, int(np.nanargmax(returns)))[1:]  # after the exchange of each row
        line = series.values[np.arange(len(path)), path]
        axes.plot(series.steps, line, color=BEST, linewidth=1.8, label="descent of the best", **how)
    axes.legend(fontsize=9, frameon=False)


def _mark(series: Series) -> dict[str, Any]:
    """How points are drawn: a line of a single one would not be seen."""
    return {"marker": "o", "markersize": 4} if len(series.steps) == 1 else {}


def _faint(returns: np.ndarray) -> float:
    return max(0.08, 0.5 / math.sqrt(len(returns)))


def _over_steps(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(AXES["env_steps"])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
