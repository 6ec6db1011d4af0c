"""Pictures of a plane with circles on it: their names, ticks, and a legend of their kinds."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDTH = 360  # pixels of a picture
HEIGHT = 282
LEFT = 28  # pixels: ticks, above the plane, and of the plane's sides
TOP = 8
SIDE = 240
SMOOTHING = 3  # circles are drawn this many times larger, then reduced
SMALLEST_HALF = 1.5  # of the plane's side, at least
SMALLEST_RADIUS = 3  # pixels
LINE = 20  # pixels from one line of the legend to the next
SIZE = 11  # pixels of texts
SMALL = 10  # pixels of names

# Told apart by colour-blind eyes (Okabe and Ito).
INK = "#2B2F36"
LIGHT = "#D9DDE2"
PAPER = "#FFFFFF"
RING = "#E69F00"


class Circle(NamedTuple):
    """A circle on the plane."""

    name: str
    kind: str  # in the legend
    color: str
    center: tuple[float, float]
    radius: float
    name_above: bool = True
    in_ring: bool = False  # whether it is marked


def plane_frame(circles: Sequence[Circle], ring: str = "", notes: Sequence[str] = ()) -> np.ndarray:
    """A picture [H, W, 3] in bytes of circles, those that are larger behind.

    Args:
      circles: what is on the plane.
      ring: what a ring around a circle means, for the legend.
      notes: texts in a corner, one below the other.
    """
    from PIL import Image, ImageDraw

    half = _half_side(circles)
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    image.paste(_drawn(circles, half).reduce(SMOOTHING), (LEFT, TOP))
    canvas = ImageDraw.Draw(image)
    _write_ticks(canvas, half)
    _write_names(canvas, circles, half)
    _write_legend(canvas, circles, ring)
    for index, note in enumerate(reversed(notes)):
        _write(canvas, (LEFT + 4, TOP + SIDE - 9 - 13 * index), note, "lm", SIZE)
    return np.asarray(image)


def _half_side(circles: Sequence[Circle]) -> float:
    """Half of the side of a plane around (0, 0) that shows all circles; it seldom changes while
    they move.
    """
    reach = max(
        (max(abs(x) for x in circle.center) + circle.radius for circle in circles), default=0.0
    )
    return max(SMALLEST_HALF, math.ceil(2 * reach) / 2)


def _pixel(point: tuple[float, float], half: float) -> tuple[float, float]:
    """The place of a point within a plane of `SIDE` pixels."""
    x, y = point
    return (x + half) / (2 * half) * SIDE, (half - y) / (2 * half) * SIDE


def _drawn(circles: Sequence[Circle], half: float) -> Any:
    """The plane without texts, `SMOOTHING` times as large."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SMOOTHING * SIDE, SMOOTHING * SIDE), PAPER)
    canvas = ImageDraw.Draw(image)
    end = SMOOTHING * SIDE - 1
    for tick in _ticks(half):
        across, down = (SMOOTHING * x for x in _pixel((tick, tick), half))
        canvas.line([(across, 0), (across, end)], LIGHT, SMOOTHING)
        canvas.line([(0, down), (end, down)], LIGHT, SMOOTHING)
    for circle in sorted(circles, key=lambda circle: -circle.radius):
        x, y = (SMOOTHING * place for place in _pixel(circle.center, half))
        radius = SMOOTHING * max(circle.radius / (2 * half) * SIDE, SMALLEST_RADIUS)
        if circle.in_ring:
            outer = radius + 4 * SMOOTHING
            canvas.ellipse(
                (x - outer, y - outer, x + outer, y + outer), outline=RING, width=3 * SMOOTHING
            )
        canvas.ellipse(
            (x - radius, y - radius, x + radius, y + radius), circle.color, INK, SMOOTHING
        )
    canvas.rectangle((0, 0, end, end), outline=INK, width=SMOOTHING)
    return image


def _ticks(half: float) -> list[float]:
    """Round numbers on the sides of the plane, some five of them."""
    stride = next((x for x in (0.5, 1, 2, 5, 10, 20, 50, 100) if half / x <= 3), half / 2)
    count = int(half / stride)
    return [stride * index for index in range(-count, count + 1)]


def _write(canvas: Any, place: tuple[float, float], text: str, anchor: str, size: int) -> None:
    from PIL import ImageFont

    canvas.text(place, text, INK, ImageFont.load_default(size), anchor=anchor)


def _write_ticks(canvas: Any, half: float) -> None:
    for tick in _ticks(half):
        across, down = _pixel((tick, tick), half)
        _write(canvas, (LEFT + across, TOP + SIDE + 9), f"{tick:g}", "mm", SIZE)
        _write(canvas, (LEFT - 4, TOP + down), f"{tick:g}", "rm", SIZE)
    _write(canvas, (LEFT + SIDE / 2, TOP + SIDE + 24), "x", "mm", SIZE)
    _write(canvas, (LEFT - 20, TOP + 6), "y", "mm", SIZE)


def _write_names(canvas: Any, circles: Sequence[Circle], half: float) -> None:
    """Write names beside their circles, inside the plane, and where there is room not over each
    other.
    """
    from PIL import ImageFont

    font = ImageFont.load_default(SMALL)
    taken: list[tuple[float, float, float]] = []  # the middles of names, and half of their widths
    for circle in circles:
        x, y = _pixel(circle.center, half)
        width = font.getlength(circle.name) / 2 + 2
        away = max(circle.radius / (2 * half) * SIDE, SMALLEST_RADIUS) + 5 * circle.in_ring
        above = (x, y - away - 7)
        below = (x, y + away + 7)
        sides = (x + away + width + 2, y), (x - away - width - 2, y)
        places = (above, below, *sides) if circle.name_above else (below, above, *sides)
        inside = [
            (min(max(across, width), SIDE - width), min(max(down, 7), SIDE - 7))
            for across, down in places
        ]
        free = (
            place
            for place in inside
            if not any(_overlap((*place, width), other) for other in taken)
        )
        chosen = next(free, inside[0])
        taken.append((*chosen, width))
        place = LEFT + chosen[0], TOP + chosen[1]
        canvas.text(place, circle.name, INK, font, anchor="mm", stroke_width=1, stroke_fill=PAPER)


def _overlap(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    """Whether two names cover each other."""
    return abs(one[0] - other[0]) < one[2] + other[2] and abs(one[1] - other[1]) < SMALL


def _write_legend(canvas: Any, circles: Sequence[Circle], ring: str) -> None:
    """Write the kinds of circles beside the plane, each with its colour."""
    left = LEFT + SIDE + 8
    colors = {circle.kind: circle.color for circle in circles}
    for index, (kind, color) in enumerate(colors.items()):
        y = TOP + 8 + LINE * index
        canvas.ellipse((left, y - 5, left + 10, y + 5), color, INK)
        _write(canvas, (left + 15, y), kind, "lm", SMALL)
    if ring and any(circle.in_ring for circle in circles):
        y = TOP + 8 + LINE * len(colors)
        canvas.ellipse((left, y - 5, left + 10, y + 5), outline=RING, width=3)
        _write(canvas, (left + 15, y), ring, "lm", SMALL)
