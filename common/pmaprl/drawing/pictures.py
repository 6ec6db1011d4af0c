"""Pictures of a step: their size and colours, and grids for observations that are maps."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from pmaprl.cli.errors import UsageError, printable

Paint = Callable[[int], Image.Image]  # draws the picture after so many steps of an episode
HEIGHT = 300  # most pixels of a suite's picture, where nothing else is wanted
WIDEST = 1.2  # most width of a suite's picture, in heights

# Colours that colour-blind eyes tell apart (Okabe and Ito)
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
CHANNELS = ORANGE, SKY, GREEN, YELLOW, RED, PURPLE, BLUE, PAPER, GREY  # of a grid, in this order

MARGIN = 24  # pixels at the left and below a grid, for the numbers of its columns and rows
LEGEND = 150  # width of the legend beside a grid
LINE = 20  # pixels from one line of a legend to the next
SQUARE = 12  # pixels of a sample of colour
SMALLEST_CELL = 8  # pixels of the smallest cell that has lines around it
BETWEEN_TICKS = 28  # least pixels between two numbers


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font of all texts."""
    return ImageFont.load_default(size)


def shortened(text: str, pixels: float, size: int) -> str:
    """Shorten a text to a width of `pixels`, with "..." in place of its end."""
    text = printable(text)
    letters = font(size)
    if letters.getlength(text) <= pixels:
        return text
    while text and letters.getlength(f"{text}...") > pixels:
        text = text[:-1]
    return f"{text}..."


def fitting(
    frame: np.ndarray, like: Image.Image | None = None, height: int = HEIGHT
) -> Image.Image:
    """Enlarge or shrink a frame by a whole number, so that it fills a picture.

    Args:
      frame: [H, W, 3], of bytes.
      like: an earlier picture of the episode.
      height: most pixels of the picture's height.

    Raises:
      UsageError: the frame is something else, or its picture differs in size from `like`.
    """
    picture = _fitting(frame, height)
    if like is not None and picture.size != like.size:
        raise UsageError("its pictures differ in size")
    return picture


def _fitting(frame: np.ndarray, height: int) -> Image.Image:
    pixels = np.asarray(frame)
    is_integer = pixels.dtype.kind in "iu" and pixels.size > 0
    if is_integer and pixels.min() >= 0 and pixels.max() <= 255:
        pixels = pixels.astype(np.uint8)
    is_rgb = pixels.ndim == 3 and pixels.shape[-1] == 3
    if pixels.dtype != np.uint8 or not is_rgb or not pixels.size:
        shape = f"{pixels.dtype}{list(pixels.shape)}"
        raise UsageError(f"its picture is {shape} instead of uint8[height, width, 3]")
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    scale = min(WIDEST * height / picture.width, height / picture.height)
    if scale >= 2:
        factor = int(scale)
        size = factor * picture.width, factor * picture.height
        return picture.resize(size, Image.Resampling.NEAREST)
    if scale < 1:
        return picture.reduce(math.ceil(1 / scale))
    return picture


def below(paints: Sequence[Paint]) -> Paint:
    """Paint pictures one below the other."""

    def paint(step: int) -> Image.Image:
        pictures = [paint(step) for paint in paints]
        width = max(picture.width for picture in pictures)
        height = sum(picture.height for picture in pictures)
        image = Image.new("RGB", (width, height), PAPER)
        top = 0
        for picture in pictures:
            image.paste(picture, (0, top))
            top += picture.height
        return image

    return paint if len(paints) > 1 else paints[0]


def grid(obs: np.ndarray, names_for: Callable[[int], Sequence[str]], title: str = "") -> Paint:
    """Paint observations that are maps: one colour per channel, or an image as it is.

    Args:
      obs: [T + 1, H, W] or [T + 1, H, W, C]; the first channel is drawn in front.
      names_for: returns names for a number of channels, or none.
      title: the title of the legend, in place of its usual one.
    """
    maps = obs if obs.ndim == 4 else obs[..., None]
    count = maps.shape[-1]
    is_image = count == 3 and not _is_binary(maps)
    low = min(0.0, float(np.nanmin(maps)))
    high = float(np.nanmax(maps))
    if is_image and maps.dtype == np.uint8:
        high = 255.0
    spread = max(high - low, 1e-9)
    floor = np.array(ImageColor.getrgb(FLOOR), np.float32)
    names_of_colors = (PAPER,) if count == 1 else CHANNELS
    colors = np.array([ImageColor.getrgb(color) for color in names_of_colors])
    legend = None if is_image else _legend(count, names_for(count), low, high, title)

    def paint(step: int) -> Image.Image:
        values = (maps[step].astype(np.float32) - low) / spread
        shares = np.nan_to_num(values).clip(0, 1)
        if legend is None:
            return _picture(255 * shares)
        shape = shares.shape[:2]
        pixels = np.broadcast_to(floor, (*shape, 3))
        for channel in reversed(range(count)):
            color = colors[channel % len(colors)]
            pixels = pixels + shares[..., channel, None] * (color - pixels)
        return _with_legend(_picture(pixels), shape, legend)

    return paint


def _is_binary(maps: np.ndarray) -> bool:
    """True if maps [T + 1, H, W, C] hold zeros and ones only."""
    return all(np.isin(frame, (0, 1)).all() for frame in maps)


def _picture(pixels: np.ndarray) -> Image.Image:
    """Picture of colours [H, W, 3] between 0 and 255."""
    return fitting(np.round(pixels).astype(np.uint8))


def _legend(count: int, names: Sequence[str], low: float, high: float, title: str) -> Image.Image:
    """Colours of a map's channels with their names, or of one channel with its numbers."""
    if count == 1:
        first_name = names[0] if names else "value"
        title = title or first_name
        entries = [(PAPER, f"{high:.3g}"), (FLOOR, f"{low:.3g}")]
    else:
        kind = "channels" if names else "channel"
        title = f"{title}: channel" if title else kind
        labels = names or [str(channel) for channel in range(count)]
        entries = []
        for first, color in enumerate(CHANNELS[:count]):
            same_color = labels[first :: len(CHANNELS)]
            entries.append((color, ", ".join(same_color)))
    image = Image.new("RGB", (LEGEND, LINE * (len(entries) + 1)), PAPER)
    canvas = ImageDraw.Draw(image)
    letters = font(12)
    title = shortened(title, LEGEND - 10, 12)
    canvas.text((8, LINE / 2), title, INK, letters, anchor="lm")
    for index, (color, label) in enumerate(entries, start=1):
        top = index * LINE + (LINE - SQUARE) // 2
        canvas.rectangle((8, top, 8 + SQUARE, top + SQUARE), color, INK)
        label = shortened(label, LEGEND - SQUARE - 18, 12)
        canvas.text((SQUARE + 15, top + SQUARE / 2), label, INK, letters, anchor="lm")
    return image


def _with_legend(picture: Image.Image, shape: tuple[int, int], legend: Image.Image) -> Image.Image:
    """Add lines between cells, numbers of columns and rows, and a legend to a picture of a grid.

    Args:
      picture: the cells.
      shape: the numbers of rows and columns.
      legend: stands at the right.
    """
    rows, columns = shape
    cell = picture.width // columns
    width = MARGIN + picture.width + LEGEND
    height = max(picture.height + MARGIN, legend.height)
    image = Image.new("RGB", (width, height), PAPER)
    canvas = ImageDraw.Draw(image)
    if cell >= SMALLEST_CELL:
        squares = np.array(picture)
        ink = ImageColor.getrgb(INK)
        squares[::cell] = ink
        squares[:, ::cell] = ink
        picture = Image.fromarray(squares)
    image.paste(picture, (MARGIN, 0))
    image.paste(legend, (MARGIN + picture.width, 0))
    letters = font(11)
    y = picture.height + MARGIN / 2
    for column in _ticks(columns, picture.width):
        x = MARGIN + (column + 0.5) * picture.width / columns
        canvas.text((x, y), str(column), INK, letters, anchor="mm")
    x = MARGIN - 5
    for row in _ticks(rows, picture.height):
        y = (row + 0.5) * picture.height / rows
        canvas.text((x, y), str(row), INK, letters, anchor="rm")
    return image


def _ticks(count: int, pixels: int) -> range:
    """Indices of the cells of a side that have their number beside them."""
    apart = BETWEEN_TICKS * count / pixels
    strides = [stride for stride in (1, 2, 5, 10, 20, 50, 100, 200) if stride >= apart]
    return range(0, count, strides[0] if strides else count)
