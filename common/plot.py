"""The learning curve of a run, `curve.png`."""

from pathlib import Path

import numpy as np

from common.metrics import read

BLUE, ORANGE = "#0072B2", "#D55E00"  # told apart by colour-blind eyes too


def draw_curve(run_dir: Path, title: str) -> Path:
    """Draw training and evaluation returns of `run_dir` against environment steps; returns the picture's path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    names = "episode/return_last100", "eval/return_mean"
    rows = [
        {name: row[name] for name in ("env_steps", *names) if name in row} for row in read(run_dir / "metrics.jsonl")
    ]
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _plot(axes, rows, names[0], "training, last 100 episodes", BLUE, "-")
    _plot(axes, rows, names[1], "greedy evaluation", ORANGE, "o--")
    axes.set(title=title, xlabel="environment steps", ylabel="episode return")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    path = run_dir / "curve.png"
    figure.savefig(path, dpi=130)
    return path


def _plot(axes, rows: list[dict], name: str, label: str, color: str, style: str) -> None:
    """The mean over seeds, with one thin line per seed where there are several."""
    points = [(row["env_steps"], np.atleast_1d(np.array(row[name], dtype=float))) for row in rows if name in row]
    points = [(step, values) for step, values in points if np.isfinite(values).any()]
    if not points:
        return
    steps = [step for step, _ in points]
    values = np.stack([value for _, value in points])  # [points, seeds]
    if values.shape[1] > 1:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, np.nanmean(values, axis=1), style, color=color, label=label, linewidth=1.8, markersize=4)
