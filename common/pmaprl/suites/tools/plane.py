"""Pictures of a plane with circles on it: their names, ticks, and a legend of their kinds."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDTH = 360  # pixels of a picture
HEIGHT = 282
LEFT = 28  # pixels of the ticks at the left
TOP = 8  # pixels above the plane
SIDE = 240  # pixels of the plane's sides
SMOOTHING = 3  # circles are drawn this many times larger, then reduced
SMALLEST_HALF = 1.5  # least half of the plane's side, in its own units
SMALLEST_RADIUS = 3  # least radius of a circle in pixels
LINE = 20  # pixels from one line of the legend to the next
SIZE = 11  # height of texts in pixels
SMALL = 10  # height of names in pixels

# Colours that colour-blind eyes tell apart (Okabe and Ito)
INK = "#2B2F36"
LIGHT = "#D9DDE2"
PAPER = "#FFFFFF"
RING = "#E69F00"


class Circle(NamedTuple):
    """A circle on the plane."""

    name: str
    kind: str  # name of its colour in the legend
    color: str
    center: tuple[float, float]
    radius: float
    name_above: bool = True  # False: the name stands below
    in_ring: bool = False  # True: a ring marks it


def plane_frame(circles: Sequence[Circle], ring: str = "", notes: Sequence[str] = ()) -> np.ndarray:
    """Draw circles on a plane, larger ones behind: [H, W, 3] in bytes.

    Args:
        circles: the circles.
        ring: meaning of a ring around a circle, for the legend.
        notes: texts in a corner, one below the other.
    """
    from PIL import Image, ImageDraw

    half = _half_side(circles)
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    plane = _drawn(circles, half)
    image.paste(plane.reduce(SMOOTHING), (LEFT, TOP))
    canvas = ImageDraw.Draw(image)
    _write_ticks(canvas, half)
    _write_names(canvas, circles, half)
    _write_legend(canvas, circles, ring)
    for index, note in enumerate(reversed(notes)):
        height = TOP + SIDE - 9 - 13 * index
        _write(canvas, (LEFT + 4, height), note, "lm", SIZE)
    return np.asarray(image)


def _half_side(circles: Sequence[Circle]) -> float:
    """Half of the side of a plane around (0, 0) that shows all circles.

    It is rounded up, so that it seldom changes while they move.
    """
    reaches = [max(map(abs, circle.center)) + circle.radius for circle in circles]
    reach = max(reaches, default=0.0)
    return max(SMALLEST_HALF, math.ceil(2 * reach) / 2)


def _pixel(point: tuple[float, float], half: float) -> tuple[float, float]:
    """Place of a point within a plane of `SIDE` pixels."""
    x, y = point
    across = (x + half) / (2 * half) * SIDE
    down = (half - y) / (2 * half) * SIDE
    return across, down


def _radius(circle: Circle, half: float) -> float:
    """Radius of a circle in pixels."""
    return max(circle.radius / (2 * half) * SIDE, SMALLEST_RADIUS)


def _around(x: float, y: float, radius: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a circle."""
    return x - radius, y - radius, x + radius, y + radius


def _drawn(circles: Sequence[Circle], half: float) -> Any:
    """Draw the plane without texts, `SMOOTHING` times as large."""
    from PIL import Image, ImageDraw

    side = SMOOTHING * SIDE
    image = Image.new("RGB", (side, side), PAPER)
    canvas = ImageDraw.Draw(image)
    end = side - 1
    for tick in _ticks(half):
        across, down = _pixel((tick, tick), half)
        x = SMOOTHING * across
        y = SMOOTHING * down
        canvas.line([(x, 0), (x, end)], LIGHT, SMOOTHING)
        canvas.line([(0, y), (end, y)], LIGHT, SMOOTHING)
    for circle in sorted(circles, key=lambda circle: -circle.radius):
        across, down = _pixel(circle.center, half)
        x = SMOOTHING * across
        y = SMOOTHING * down
        radius = SMOOTHING * _radius(circle, half)
        if circle.in_ring:
            ring = _around(x, y, radius + 4 * SMOOTHING)
            canvas.ellipse(ring, outline=RING, width=3 * SMOOTHING)
        canvas.ellipse(_around(x, y, radius), circle.color, INK, SMOOTHING)
    canvas.rectangle((0, 0, end, end), outline=INK, width=SMOOTHING)
    return image


def _ticks(half: float) -> list[float]:
    """Some five round numbers on the sides of the plane."""
    strides = [stride for stride in (0.5, 1, 2, 5, 10, 20, 50, 100) if half / stride <= 3]
    stride = strides[0] if strides else half / 2
    count = int(half / stride)
    return [stride * index for index in range(-count, count + 1)]


def _write(canvas: Any, place: tuple[float, float], text: str, anchor: str, size: int) -> None:
    from PIL import ImageFont

    canvas.text(place, text, INK, ImageFont.load_default(size), anchor=anchor)


def _write_ticks(canvas: Any, half: float) -> None:
    for tick in _ticks(half):
        across, down = _pixel((tick, tick), half)
        text = f"{tick:g}"
        _write(canvas, (LEFT + across, TOP + SIDE + 9), text, "mm", SIZE)
        _write(canvas, (LEFT - 4, TOP + down), text, "rm", SIZE)
    _write(canvas, (LEFT + SIDE / 2, TOP + SIDE + 24), "x", "mm", SIZE)
    _write(canvas, (LEFT - 20, TOP + 6), "y", "mm", SIZE)


def _write_names(canvas: Any, circles: Sequence[Circle], half: float) -> None:
    """Write names beside their circles, inside the plane, and apart from each other if possible."""
    from PIL import ImageFont

    font = ImageFont.load_default(SMALL)
    written: list[Label] = []
    for circle in circles:
        half_width = font.getlength(circle.name) / 2 + 2
        labels = _places_of_name(circle, half, half_width)
        free = [label for label in labels if not any(_overlap(label, name) for name in written)]
        label = free[0] if free else labels[0]
        written.append(label)
        canvas.text(
            (LEFT + label.x, TOP + label.y),
            circle.name,
            INK,
            font,
            anchor="mm",
            stroke_width=1,
            stroke_fill=PAPER,
        )


class Label(NamedTuple):
    """Place of a name on the plane, in pixels."""

    x: float  # its middle
    y: float
    half_width: float


def _places_of_name(circle: Circle, half: float, half_width: float) -> list[Label]:
    """Places for a circle's name inside the plane, the best one first."""
    x, y = _pixel(circle.center, half)
    away = _radius(circle, half)
    if circle.in_ring:
        away += 5
    above = x, y - away - 7
    below = x, y + away + 7
    right = x + away + half_width + 2, y
    left = x - away - half_width - 2, y
    places = [above, below, right, left]
    if not circle.name_above:
        places = [below, above, right, left]
    labels = []
    for across, down in places:
        label = Label(
            x=min(max(across, half_width), SIDE - half_width),
            y=min(max(down, 7), SIDE - 7),
            half_width=half_width,
        )
        labels.append(label)
    return labels


def _overlap(label: Label, other: Label) -> bool:
    """True if two names cover each other."""
    is_near = abs(label.x - other.x) < label.half_width + other.half_width
    return is_near and abs(label.y - other.y) < SMALL


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
