"""Learning curves as matplotlib figures: lines with bands in panels, and `curve.png` of one run."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.files import replacing
from common.drawing.curves import between
from common.drawing.groups import EVALUATION, RECENT, TRAINING
from common.drawing.statistics import Interval
from common.runs.history import read_log

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
