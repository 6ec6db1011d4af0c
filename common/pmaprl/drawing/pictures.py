"""Pictures of a step: their size and colours, and observations that are maps, as grids with a
legend.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from pmaprl.cli.errors import UsageError, printable

Paint = Callable[[int], Image.Image]  # the picture after so many steps of an episode
WIDTH = 360  # pixels that a picture of a suite fills at most
HEIGHT = 300

# Told apart by colour-blind eyes (Okabe and Ito).
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
SKY = "#56B4E9"
RED = "#D55E00"
PURPLE = "#CC79A7"
YELLOW = "#F0E442"
INK = "#2B2F36"
FLOOR = "#3C424C"
GREY = "#8A9099"
PAPER = "#FFFFFF"
# Of a grid, one after the other
CHANNELS = ORANGE, SKY, GREEN, YELLOW, RED, PURPLE, BLUE, PAPER, GREY

MARGIN = 24  # pixels at the left and below a grid, for the numbers of its columns and rows
LEGEND = 150  # pixels beside a grid
LINE = 20  # pixels from one line of a legend to the next
SQUARE = 12  # pixels of a sample of colour
SMALLEST_CELL = 8  # pixels of a cell that has lines around it
BETWEEN_TICKS = 28  # pixels at least


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font of all texts."""
    return ImageFont.load_default(size)


def shortened(text: str, pixels: float, size: int) -> str:
    """A text that fits into so many pixels, with "..." in place of its end."""
    text = printable(text)
    if font(size).getlength(text) <= pixels:
        return text
    while text and font(size).getlength(f"{text}...") > pixels:
        text = text[:-1]
    return f"{text}..."


def fitting(frame: np.ndarray, like: Image.Image | None = None) -> Image.Image:
    """A frame [H, W, 3] in bytes as large or as small as other pictures, by a whole number of
    times.

    Raises UsageError where it is something else, or not as large as `like` becomes.
    """
    picture = _fitting(frame)
    if like is not None and picture.size != like.size:
        raise UsageError("its pictures differ in size")
    return picture


def _fitting(frame: np.ndarray) -> Image.Image:
    pixels = np.asarray(frame)
    if pixels.dtype.kind in "iu" and pixels.size and pixels.min() >= 0 and pixels.max() <= 255:
        pixels = pixels.astype(np.uint8)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] != 3 or not pixels.size:
        found = f"{pixels.dtype}{list(pixels.shape)}"
        raise UsageError(f"its picture is {found} instead of uint8[height, width, 3]")
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    scale = min(WIDTH / picture.width, HEIGHT / picture.height)
    if scale >= 2:
        size = int(scale) * picture.width, int(scale) * picture.height
        return picture.resize(size, Image.Resampling.NEAREST)
    return picture.reduce(math.ceil(1 / scale)) if scale < 1 else picture


def below(paints: Sequence[Paint]) -> Paint:
    """Pictures one below the other."""

    def paint(step: int) -> Image.Image:
        pictures = [paint(step) for paint in paints]
        size = max(x.width for x in pictures), sum(x.height for x in pictures)
        image = Image.new("RGB", size, PAPER)
        top = 0
        for picture in pictures:
            image.paste(picture, (0, top))
            top += picture.height
        return image

    return paint if len(paints) > 1 else paints[0]


def grid(obs: np.ndarray, names_for: Callable[[int], Sequence[str]], title: str = "") -> Paint:
    """Pictures of observations that are maps: a colour per channel, the first in front, or the
    image itself.

    Args:
      obs: [T + 1, H, W] or [T + 1, H, W, C].
      names_for: gives the names of so many channels, or none.
      title: stands above the legend in place of its own.
    """
    maps = obs if obs.ndim == 4 else obs[..., None]
    count = maps.shape[-1]
    is_image = count == 3 and not all(np.isin(frame, (0, 1)).all() for frame in maps)
    low = min(0.0, float(np.nanmin(maps)))
    high = float(np.nanmax(maps))
    high = 255.0 if is_image and maps.dtype == np.uint8 else high
    chosen = (PAPER,) if count == 1 else CHANNELS
    colors = np.array([ImageColor.getrgb(color) for color in chosen])
    legend = None if is_image else _legend(count, names_for(count), low, high, title)

    def paint(step: int) -> Image.Image:
        values = np.nan_to_num((maps[step].astype(np.float32) - low) / max(high - low, 1e-9)).clip(
            0, 1
        )
        pixels = 255 * values
        if not is_image:
            pixels = np.broadcast_to(np.float32(ImageColor.getrgb(FLOOR)), (*values.shape[:2], 3))
            for channel in reversed(range(count)):
                share = values[..., channel, None]
                pixels = pixels + share * (colors[channel % len(colors)] - pixels)
        picture = fitting(np.round(pixels).astype(np.uint8))
        return picture if legend is None else _with_legend(picture, values.shape[:2], legend)

    return paint


def _legend(count: int, names: Sequence[str], low: float, high: float, title: str) -> Image.Image:
    """Colours of a map's channels with their names, or of one channel with its numbers."""
    if count == 1:
        title = title or (names[0] if names else "value")
        entries = [(PAPER, f"{high:.3g}"), (FLOOR, f"{low:.3g}")]
    else:
        title = f"{title}: channel" if title else ("channels" if names else "channel")
        labels = names or [str(channel) for channel in range(count)]
        shown = enumerate(CHANNELS[:count])
        entries = [(color, ", ".join(labels[first :: len(CHANNELS)])) for first, color in shown]
    image = Image.new("RGB", (LEGEND, LINE * (len(entries) + 1)), PAPER)
    canvas = ImageDraw.Draw(image)
    canvas.text((8, LINE / 2), shortened(title, LEGEND - 10, 12), INK, font(12), anchor="lm")
    for index, (color, label) in enumerate(entries, start=1):
        top = index * LINE + (LINE - SQUARE) // 2
        canvas.rectangle((8, top, 8 + SQUARE, top + SQUARE), color, INK)
        label = shortened(label, LEGEND - SQUARE - 18, 12)
        canvas.text((SQUARE + 15, top + SQUARE / 2), label, INK, font(12), anchor="lm")
    return image


def _with_legend(picture: Image.Image, shape: tuple[int, int], legend: Image.Image) -> Image.Image:
    """A picture of a grid of this shape with lines between cells, numbers of columns and rows, and
    a legend.
    """
    cell = picture.width // shape[1]
    height = max(picture.height + MARGIN, legend.height)
    image = Image.new("RGB", (MARGIN + picture.width + LEGEND, height), PAPER)
    canvas = ImageDraw.Draw(image)
    if cell >= SMALLEST_CELL:
        squares = np.array(picture)
        squares[::cell] = squares[:, ::cell] = ImageColor.getrgb(INK)
        picture = Image.fromarray(squares)
    image.paste(picture, (MARGIN, 0))
    image.paste(legend, (MARGIN + picture.width, 0))
    for column in _ticks(shape[1], picture.width):
        x = MARGIN + (column + 0.5) * picture.width / shape[1]
        canvas.text((x, picture.height + MARGIN / 2), str(column), INK, font(11), anchor="mm")
    for row in _ticks(shape[0], picture.height):
        y = (row + 0.5) * picture.height / shape[0]
        canvas.text((MARGIN - 5, y), str(row), INK, font(11), anchor="rm")
    return image


def _ticks(count: int, pixels: int) -> range:
    """The cells of a side that have their number beside them."""
    apart = BETWEEN_TICKS * count / pixels
    stride = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200) if step >= apart), count)
    return range(0, count, stride)
