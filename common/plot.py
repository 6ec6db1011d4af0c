"""Learning curves of many runs in one picture.

python -m common.plot runs/* --y eval/return_mean --out curves.png
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from common.cli.command import main, parse
from common.cli.errors import UsageError, printable
from common.cli.files import check_target, replacing
from common.drawing import groups
from common.drawing.figures import AXES, Line, Panel, draw
from common.drawing.groups import TRAINING, Group, Selection


@dataclass(kw_only=True)
class Args(Selection):
    """Draw learning curves: a panel for each environment, a line for each algorithm over all seeds of its runs."""

    x: Literal["env_steps", "wall"] = "env_steps"
    """Horizontal axis: environment steps, or seconds of all invocations of the run together."""
    y: Annotated[str, tyro.conf.arg(metavar="METRIC")] = TRAINING
    """Metric of metrics.jsonl to draw."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "curves.png"
    """Picture to write; its ending says the format: .png, .svg, .pdf, ..."""
    title: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """Title of the picture."""


def learning_curves(args: Args) -> Any:
    """The matplotlib Figure that the command writes. Raises UsageError for what cannot be drawn; notes go to stderr."""
    found = groups.load(args, [args.y])
    names = frozenset().union(*(run.log.names for group in found for run in group.runs))
    if args.y not in names:
        raise UsageError(f"--y {args.y}: none of the runs has this metric; {groups.suggest(args.y, names)}")
    labels = list(dict.fromkeys(group.label for group in found))  # the same style in every panel
    panels: dict[str, Panel] = {}
    for group in found:
        if line := _line(group, args, labels.index(group.label)):
            panels.setdefault(group.env, Panel(group.env, [])).lines.append(line)
        else:
            groups.say([f"{group.label} in {group.env}: no {args.y} at common places, left out"])
    if not panels:
        raise UsageError(f"{args.y} is null in all rows of the runs: wait for its first number, or choose another --y")
    return draw(list(panels.values()), args.x, AXES.get(args.y, args.y), args.title)


def _line(group: Group, args: Args, style: int) -> Line | None:
    """Over all seeds that have numbers, where all of these have them; None where that is nowhere."""
    logged = [run for run in group.runs if args.y in run.log.series]
    if not logged:
        return None
    x, values = groups.align([run.log.series[args.y] for run in logged], args.x, hold=args.x == "wall")
    what = "seed" if len(values) == sum(len(run.seeds) for run in logged) else "run"
    values = values[np.isfinite(values).any(axis=1)]
    there = np.isfinite(values).all(axis=0)
    if not values[:, there].size:
        return None
    end, last = x[there][-1], x[-1]
    if end < 0.9 * last:
        note = f"the line ends at {end:,.0f} with the shortest run, not at {last:,.0f}"
        groups.say([f"{group.label} in {group.env}: {note}"])
    x, values, count = x[there], values[:, there], len(values)
    center, band = groups.estimate(values, args.estimate), groups.interval(values, kind=args.estimate)
    counted = f"{count} {what}s, {groups.estimate_name(args.estimate, count)}" if count > 1 else f"1 {what}"
    return Line(f"{group.label} ({counted})", x, center, band, style=style)


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
            raise UsageError(f"--out {path}: {str(error).splitlines()[0]}; .png always works") from error
    print(f"saved    {printable(path)}")


if __name__ == "__main__":
    main(plot, parse(Args))
