"""Drawing with Pillow: colours, text, and a canvas in world coordinates with smooth edges."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

SMOOTHING = 3  # pictures are drawn this many times larger, then reduced

# Told apart by colour-blind eyes (Okabe and Ito).
BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
RED, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
INK, FLOOR, GREY, LIGHT, PAPER = "#2B2F36", "#3C424C", "#8A9099", "#D9DDE2", "#FFFFFF"
BROWN, SILVER = "#8A5A2B", "#B9BEC5"
CHANNELS = (ORANGE, SKY, GREEN, YELLOW, RED, PURPLE, BLUE, PAPER, SILVER, BROWN)  # of a grid, one after the other
COLORS = (BLUE, ORANGE, GREEN, SKY, RED, PURPLE, YELLOW, INK, FLOOR, GREY, LIGHT, PAPER, BROWN, SILVER)

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top
Paint = Callable[[int], Image.Image]  # how an episode is drawn: the picture after so many steps


@functools.cache
def font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """Pillow's font at `size` pixels, or its small fixed one where Pillow is old or has no FreeType."""
    try:
        return ImageFont.load_default(size=size)
    except (TypeError, ImportError, OSError):
        return ImageFont.load_default()


def write(draw: ImageDraw.ImageDraw, x: float, y: float, text: str, color: str, to_left: bool = False) -> float:
    """Text with its middle at height `y`, from `x` on or up to it; returns where it ends."""
    letters = font(11)
    _, top, _, bottom = letters.getbbox("0g")  # anchors are not for Pillow's fixed font
    width = letters.getlength(text)
    left = round(x - width * to_left)
    draw.text((left, round(y - (top + bottom) / 2)), text, color, letters)
    return left + width


def rgb(color: str) -> tuple[int, int, int]:
    return ImageColor.getrgb(color)[:3]


def brief(value: float) -> str:
    """A number in at most eight characters."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    size = abs(value)
    if size < 5e-5:
        return "0.00"
    if size < 0.01:
        return f"{value:.0e}".replace("e-0", "e-")
    if size < 100:
        return f"{value:.2f}"
    return f"{value:.1f}" if size < 10_000 else f"{value:.2g}"


class Canvas:
    """A picture of the world's `box`, `width` pixels wide. Positions are world units with y up, thicknesses pixels."""

    def __init__(self, box: Box, width: int):
        left, bottom, right, top = box
        if not 0 < right - left < math.inf or not 1 <= (height := width * (top - bottom) / (right - left)) <= 4 * width:
            raise ValueError(f"nothing can be drawn between {box}")
        self.unit = width * SMOOTHING / (right - left)
        self._origin = left, top
        self._image = Image.new("RGB", (width * SMOOTHING, round(height) * SMOOTHING))
        self._image.paste(PAPER, (0, 0, *self._image.size))
        self._draw = ImageDraw.Draw(self._image)

    def copy(self) -> "Canvas":
        """Another canvas with the same picture on it."""
        other = object.__new__(Canvas)
        other.unit, other._origin, other._image = self.unit, self._origin, self._image.copy()
        other._draw = ImageDraw.Draw(other._image)
        return other

    def picture(self) -> Image.Image:
        return self._image.reduce(SMOOTHING)

    def fill(self, corners: Iterable[Point], color: str) -> None:
        self._draw.polygon([self._pixel(point) for point in corners], fill=color)

    def rectangle(self, box: Box, color: str) -> None:
        left, bottom, right, top = box
        self.fill([(left, bottom), (right, bottom), (right, top), (left, top)], color)

    def disc(self, center: Point, radius: float, color: str) -> None:
        """A filled circle; `radius` in world units."""
        (x, y), r = self._pixel(center), radius * self.unit
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=color)

    def ring(self, center: Point, radius: float, color: str, thickness: float) -> None:
        (x, y), r = self._pixel(center), radius * self.unit
        self._draw.ellipse((x - r, y - r, x + r, y + r), outline=color, width=round(thickness * SMOOTHING))

    def line(self, points: Sequence[Point], color: str, thickness: float) -> None:
        """A line through `points`, with round ends."""
        pixels = [self._pixel(point) for point in points]
        self._draw.line(pixels, fill=color, width=round(thickness * SMOOTHING), joint="curve")
        r = thickness * SMOOTHING / 2 - 0.5
        for x, y in (pixels[0], pixels[-1]):
            self._draw.ellipse((x - r, y - r, x + r, y + r), fill=color)

    def arrow(self, points: Sequence[Point], color: str, thickness: float) -> None:
        """A line through `points` with a head at the last one."""
        (x0, y0), (x, y) = points[-2:]
        length = max(math.hypot(x - x0, y - y0), 1e-9)
        size = 3.2 * thickness * SMOOTHING / self.unit
        dx, dy = (x - x0) / length * size, (y - y0) / length * size
        self.line(points, color, thickness)
        self.fill([(x + dx, y + dy), (x - 0.6 * dy, y + 0.6 * dx), (x + 0.6 * dy, y - 0.6 * dx)], color)

    def turn(self, center: Point, radius: float, start: float, angle: float, color: str) -> None:
        """An arrow around `center` from direction `start` by `angle`, in radians, counter-clockwise if positive."""
        if abs(angle) < 0.05:  # too short for its head
            return
        directions = start + np.linspace(0, angle, 24)
        path = np.stack([np.cos(directions), np.sin(directions)], axis=1) * radius + np.asarray(center)
        self.arrow([tuple(point) for point in path], color, 3)

    def _pixel(self, point: Point) -> Point:
        left, top = self._origin
        return (float(point[0]) - left) * self.unit, (top - float(point[1])) * self.unit
