"""Drawing with Pillow: a canvas in world coordinates, and pictures of observations as grids, images and lines."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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


WIDTH, HEIGHT = 360, 300  # pixels that a grid fills at most
MAX_LINES = 8  # components; more are drawn as a map instead of as lines
WINDOW = 100  # steps that a line goes back
LANE, LEFT, RIGHT = 30, 66, 62  # height of a line's lane, and the space for its name and value, in pixels


def is_grid(shape: tuple[int, ...]) -> bool:
    """Whether an observation of `shape` is drawn as a grid or an image: [H, W] or [H, W, C]."""
    return len(shape) in (2, 3) and min(shape[:2]) >= 3


def fitting(frame: np.ndarray) -> Image.Image:
    """A frame [H, W, 3] in bytes as large or as small as other pictures, by a whole number of times."""
    picture = Image.fromarray(frame)
    scale = min(WIDTH / picture.width, HEIGHT / picture.height)
    if scale >= 2:
        return picture.resize((int(scale) * picture.width, int(scale) * picture.height), Image.Resampling.NEAREST)
    return picture.reduce(math.ceil(1 / scale)) if scale < 1 else picture


def is_binary(maps: np.ndarray) -> bool:
    return all(((frame == 0) | (frame == 1)).all() for frame in maps)


def grid(obs: np.ndarray) -> Paint:
    """Observations [T + 1, H, W] or [T + 1, H, W, C] as squares: one colour per channel, images as they are."""
    maps = obs if obs.ndim == 4 else obs[..., None]
    binary = is_binary(maps)
    photo = maps.shape[-1] == 3 and not binary
    low, high = min(0.0, float(np.nanmin(maps))), float(np.nanmax(maps))
    scale = 1 / (high - low) if np.isfinite(high - low) and high > low else 1.0
    height, width = maps.shape[1:3]
    cell = max(1, min(40, WIDTH // width, HEIGHT // height))
    shrink = max(1, -(-width // WIDTH), -(-height // HEIGHT))

    def paint(step: int) -> Image.Image:
        values = np.nan_to_num(np.clip((maps[step].astype(np.float32) - low) * scale, 0, 1))
        if photo:
            pixels = _enlarge(values * 255, cell)
        elif binary:
            pixels = _nested(values > 0, cell)
        else:
            pixels = _enlarge(_layers(values), cell)
        if cell >= 8:  # lines between the squares
            pixels[::cell] = pixels[:, ::cell] = rgb(INK)
        return Image.fromarray(np.round(pixels).astype(np.uint8)).reduce(shrink)

    return paint


class Lane(NamedTuple):
    """One number over time."""

    name: str
    values: np.ndarray  # [T + 1], NaN where there is none
    color: str


def lines(obs: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> Paint:
    """The components of observations [T + 1, ...], actions [T, ...] and rewards [T] over the last steps.

    Each has a lane with its own scale; more than `MAX_LINES` components of the observation share a map, one row each.
    """
    components = _columns(obs)
    chosen = np.pad(_columns(actions), ((0, 1), (0, 0)), constant_values=np.nan)  # none at the end
    received = np.pad(_columns(rewards), ((1, 0), (0, 0)), constant_values=np.nan)  # none at the start
    many = components.shape[1] > MAX_LINES
    lanes = [] if many else _lanes("obs", components, BLUE)
    lanes += _lanes("action", chosen[:, :MAX_LINES], ORANGE) + _lanes("reward", received, GREEN)
    rows = _rows(components) if many else None
    map_height = int(np.clip(6 * len(rows), 90, 200)) if many else 0
    box = (0, -map_height - LANE * len(lanes), WIDTH, 0)
    window = min(WINDOW, len(rewards))

    def paint(step: int) -> Image.Image:
        shown = slice(max(0, step - window), step + 1)
        canvas = Canvas(box, WIDTH)
        for index, lane in enumerate(lanes):
            _draw_lane(canvas, -map_height - LANE * (index + 0.5), lane, shown, window)
        picture = canvas.picture()
        draw = ImageDraw.Draw(picture)
        for index, lane in enumerate(lanes):
            y = map_height + LANE * (index + 0.5)
            write(draw, 8, y, lane.name, INK)
            write(draw, WIDTH - 8, y, brief(lane.values[step]), INK, to_left=True)
        if many:
            _paste_map(picture, rows[:, shown], window, map_height)
            write(draw, 8, map_height / 2 - 8, "obs", INK)
            write(draw, 8, map_height / 2 + 8, f"0 .. {len(rows) - 1}", INK)
        return picture

    return paint


def _draw_lane(canvas: Canvas, y: float, lane: Lane, shown: slice, window: int) -> None:
    """The values `shown` of a lane whose middle is at height `y`; the newest has a dot."""
    finite = lane.values[np.isfinite(lane.values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0, 0)
    middle, scale = (low + high) / 2, (LANE - 10) / max(high - low, 1e-9)
    canvas.line([(LEFT, y - LANE / 2), (WIDTH - RIGHT, y - LANE / 2)], LIGHT, 1)
    values = lane.values[shown]
    xs = LEFT + (WIDTH - LEFT - RIGHT) * np.arange(len(values)) / max(window, 1)
    points = [(x, y + (value - middle) * scale) for x, value in zip(xs, values, strict=True) if np.isfinite(value)]
    if len(points) > 1:
        canvas.line(points, lane.color, 1.5)
    if points:
        canvas.disc(points[-1], 3, lane.color)


def _paste_map(picture: Image.Image, rows: np.ndarray, window: int, height: int) -> None:
    """Values 0 .. 1, [components, steps], as shades at the top of a picture of lanes."""
    shades = np.array(rgb(PAPER)) + rows[..., None] * (np.array(rgb(BLUE)) - np.array(rgb(PAPER)))
    width = round((WIDTH - LEFT - RIGHT) * rows.shape[1] / (window + 1))
    image = Image.fromarray(np.round(shades).astype(np.uint8))
    picture.paste(image.resize((max(width, 1), height - 6), Image.Resampling.BOX), (LEFT, 3))


def _rows(components: np.ndarray) -> np.ndarray:
    """Values [T + 1, N] as shades 0.08 .. 1 of each component's own range, [N, T + 1]."""
    finite = np.where(np.isfinite(components), components, np.nan)
    some = np.where(np.isfinite(components).any(axis=0), finite, 0)
    low, high = np.nanmin(some, axis=0), np.nanmax(some, axis=0)
    return np.nan_to_num(0.08 + 0.92 * (components - low) / np.maximum(high - low, 1e-9), posinf=1).clip(0, 1).T


def _lanes(name: str, columns: np.ndarray, color: str) -> list[Lane]:
    count = columns.shape[1]
    return [Lane(f"{name} {i}" if count > 1 else name, columns[:, i], color) for i in range(count)]


def _columns(values: np.ndarray) -> np.ndarray:
    """Values [T, ...] as [T, N], floating."""
    return np.asarray(values, np.float64).reshape(len(values), -1)


def _nested(active: np.ndarray, cell: int) -> np.ndarray:
    """Pixels of the channels `active` [H, W, C]: where several share a square, the first ones lie inside the last."""
    height, width, count = active.shape
    squares = np.broadcast_to(np.array(rgb(FLOOR), np.float32), (height, width, 3))
    pixels = _enlarge(squares, cell)
    depth = np.zeros((height, width), int)  # channels drawn so far in each square
    from_edge = np.minimum(np.arange(cell), np.arange(cell)[::-1])
    from_edge = np.minimum(from_edge[:, None], from_edge)  # of a pixel in its square
    for channel in reversed(range(count)):
        margin = np.repeat(np.repeat(np.minimum(depth, 2) * (cell // 5), cell, axis=0), cell, axis=1)
        inside = np.tile(from_edge, (height, width)) >= margin
        here = np.repeat(np.repeat(active[..., channel], cell, axis=0), cell, axis=1)
        pixels[inside & here] = rgb(CHANNELS[channel % len(CHANNELS)])
        depth += active[..., channel]
    return pixels


def _layers(values: np.ndarray) -> np.ndarray:
    """Colours [H, W, 3] of graded channels [H, W, C] within 0 .. 1: the last over the others, a single one in grey."""
    colors = CHANNELS if values.shape[-1] > 1 else (PAPER,)
    pixels = np.broadcast_to(np.array(rgb(INK), np.float32), (*values.shape[:2], 3))
    for channel in range(values.shape[-1]):
        pixels = pixels + values[..., channel, None] * (np.array(rgb(colors[channel % len(colors)])) - pixels)
    return pixels


def _enlarge(pixels: np.ndarray, cell: int) -> np.ndarray:
    return np.repeat(np.repeat(pixels, cell, axis=0), cell, axis=1)
