"""The picture of what every device has and of what is split over them, for docs/scaling.md.

python -m benchmarks.sharding_picture
"""

import sys
from dataclasses import dataclass
from typing import Any

from common.cli.command import main, parse
from common.cli.files import writing
from common.drawing.figure import COLORS

BLUE, ORANGE = COLORS[0], COLORS[1]
DEVICES, OF_EACH = 4, 2  # and how many a process has
WIDTH, GAP = 2.5, 0.3  # of a device, and between two
LEFT = 1.8  # where the devices begin, beside the names of the rows
ENVS, MINIBATCH = 64, 1024  # all of them, of the example


@dataclass(kw_only=True)
class Args:
    """Draw the picture of docs/scaling.md."""

    out: str = "docs/images/sharding.png"
    """The picture."""


def picture() -> Any:
    """Two processes with two devices each, as a matplotlib Figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.3), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, LEFT + DEVICES * (WIDTH + GAP) + GAP), ylim=(0.15, 6.05))
    axes.set_axis_off()
    for process in range(DEVICES // OF_EACH):
        _process(axes, process)
    for device in range(DEVICES):
        _device(axes, device)
    _row(axes, 4.12, "the same on\nevery device", BLUE)
    _row(axes, 2.42, "split", ORANGE)
    _all_reduce(axes)
    return figure


def _left(device: int) -> float:
    return LEFT + GAP / 2 + device * (WIDTH + GAP)


def _process(axes: Any, process: int) -> None:
    left, width = _left(process * OF_EACH) - 0.1, OF_EACH * (WIDTH + GAP) - GAP + 0.2
    _box(axes, left, 1.35, width, 4.55, edge="0.75", face="0.97")
    axes.text(left + width / 2, 5.62, f"process {process}", ha="center", va="center", fontsize=10, color="0.35")


def _device(axes: Any, device: int) -> None:
    left = _left(device)
    envs, samples = ENVS // DEVICES, MINIBATCH // DEVICES
    axes.text(left + WIDTH / 2, 5.2, f"device {device}", ha="center", va="center", fontsize=10, weight="bold")
    same = "parameters\noptimizer\nnormalisers\nkeys, statistics"
    _box(axes, left, 3.4, WIDTH, 1.5, edge=BLUE, face=f"{BLUE}22", text=same)
    own = f"environments {device * envs} to {(device + 1) * envs - 1},\ntheir memories and replay"
    _box(axes, left, 2.5, WIDTH, 0.75, edge=ORANGE, face=f"{ORANGE}22", text=own)
    share = f"{samples} of {MINIBATCH:,} samples\nof a minibatch"
    _box(axes, left, 1.6, WIDTH, 0.75, edge=ORANGE, face=f"{ORANGE}22", text=share)
    arrow = {"arrowstyle": "<->", "color": "0.35", "linewidth": 1.2}
    axes.annotate("", (left + WIDTH / 2, 0.85), (left + WIDTH / 2, 1.6), arrowprops=arrow)


def _row(axes: Any, height: float, text: str, color: str) -> None:
    axes.text(LEFT - 0.15, height, text, ha="right", va="center", fontsize=10, color=color, weight="bold")


def _all_reduce(axes: Any) -> None:
    text = "one all-reduce per gradient step: the mean of the gradients, 4 bytes for each parameter"
    width = _left(DEVICES - 1) + WIDTH - _left(0)
    _box(axes, _left(0), 0.3, width, 0.55, edge="0.35", face="white", text=text, size=9.5)


def _box(
    axes: Any,
    left: float,
    bottom: float,
    width: float,
    height: float,
    *,
    edge: str,
    face: str,
    text: str = "",
    size: float = 9,
) -> None:
    """A rectangle with rounded corners around a text."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, style, edgecolor=edge, facecolor=face))
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=size, linespacing=1.4)


def draw(args: Args) -> None:
    """What the command does."""
    with writing(f"picture {args.out}"):
        picture().savefig(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    sys.exit(main(draw, parse(Args)))
