"""Learning curves: a picture of many runs, and `curve.png` of one.

python -m common.plot runs/* --y eval/return_mean --out curves.png
python -m common.plot --help
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.cli.files import check_target, replacing
from common.drawing.figures import AXES, Line, Panel, draw
from common.drawing.groups import (
    TRAINING,
    Curve,
    Group,
    Note,
    Selection,
    align,
    curves,
    estimate,
    estimate_name,
    interval,
    load,
    overlapping,
    pooled,
    say,
    suggest,
)


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
    groups = load(args, [args.y])
    names = frozenset().union(*(run.log.names for group in groups for run in group.runs))
    if args.y not in names:
        raise UsageError(f"--y {args.y}: none of the runs has this metric; {suggest(args.y, names)}")
    labels = list(dict.fromkeys(group.label for group in groups))  # the same style in every panel
    panels: dict[str, Panel] = {}
    notes: list[Note] = []
    for group in groups:
        found = curves(group, args.y, args.x)
        notes += [*pooled(group), *_missing(group, found, args.y)]
        if args.x == "env_steps":
            together = overlapping(found)
            ended = {curve.run.path for curve in found} - {curve.run.path for curve in together}
            notes += [Note(str(path), "ends before another run begins, left out") for path in sorted(ended)]
            notes += _shortened(group, together)
            found = together
        if found:
            panel = panels.setdefault(group.env, Panel(group.env, []))
            panel.lines.append(_line(group, found, args, labels.index(group.label)))
    say(notes)
    if not panels:
        raise UsageError(f"{args.y} is null in all rows of the runs: wait for its first number, or choose another --y")
    return draw(list(panels.values()), args.x, AXES.get(args.y, args.y), args.title)


def plot(args: Args) -> None:
    """What the command does."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path, formats = Path(args.out), FigureCanvasAgg.filetypes
    if path.suffix[1:].lower() not in formats:
        raise UsageError(f"--out {path}: its ending must be one of {', '.join('.' + name for name in sorted(formats))}")
    check_target(path)
    figure = learning_curves(args)
    with replacing(path) as temporary:
        try:
            figure.savefig(temporary)
        except (RuntimeError, ValueError) as error:  # such as .pgf without LaTeX
            raise UsageError(f"--out {path}: {str(error).splitlines()[0]}; .png always works") from error
    print(f"saved    {path}")


# ------------------------------------------------------------------------------------------------------------- lines


def _line(group: Group, found: list[Curve], args: Args, style: int) -> Line:
    aligned = align(found, hold=args.x == "wall")
    count = len(found)
    per_seed = all(curve.run.log.series[args.y].values.shape[1] == curve.run.num_seeds for curve in found)
    counted = f"{count} {'seed' if per_seed else 'run'}{'s' * (count > 1)}"
    drawn = f", {estimate_name(args.estimate, count)}" if count > 1 else ""
    center, band = estimate(aligned.values, args.estimate), interval(aligned.values, args.estimate)
    return Line(f"{group.label} ({counted}{drawn})", aligned.x, center, band, style=style)


def _missing(group: Group, found: list[Curve], metric: str) -> Iterator[Note]:
    """What of the group is not drawn."""
    for run in group.runs:
        has = sum(curve.run is run for curve in found)
        wanted = run.log.series[metric].values.shape[1] if metric in run.log.series else 1
        if not has:
            yield Note(str(run.path), f"no {metric}, left out")
        elif has < wanted:
            yield Note(str(run.path), f"no {metric} of {wanted - has} of {wanted} seeds, which are left out")


def _shortened(group: Group, found: list[Curve]) -> Iterator[Note]:
    """Whether a much shorter run decides where the line ends."""
    ends = sorted(found, key=lambda curve: curve.x[-1])
    if ends and ends[0].x[-1] < 0.9 * ends[-1].x[-1]:
        first, last = ends[0].x[-1], ends[-1].x[-1]
        what = f"the line ends at step {first:,.0f} as {ends[0].run.path} does, other runs go on to {last:,.0f}"
        yield Note(f"{group.label} in {group.env}", what)


if __name__ == "__main__":
    main(plot, parse(Args))
