"""Numbers of an episode over its steps: observations, actions, reward and return."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from pmaprl.drawing.figures import COLORS
from pmaprl.drawing.pictures import GREY, INK, Paint, font, shortened
from pmaprl.envs import spaces
from pmaprl.envs.spaces import Box, Space

MOST_LINES = 8  # numbers of a group that are drawn as lines; groups of more are shades
LEFT = 66  # width of the ticks in pixels
PLOT = 330  # width of the episode
RIGHT = 184  # width of the legend
TITLE = 22  # pixels above each group, for its title
BOTTOM = 36  # pixels below the last group
TRACK = 38  # height of a track
LOW_TRACK = 30  # height of a track where there are many
MOST_TRACKS = 8  # tracks that may have the full height
SHADES = 150  # height of a group that is drawn as shades
FILLED = 0.62  # share of a track's height that its line fills
SIZE = 11  # height of texts in pixels
NAMED = 13  # least pixels between two names beside shades
VALUE = 62  # width of a number beside its name
DPI = 100  # pixels per inch, by which matplotlib counts
BLUES = "Blues"  # matplotlib's name of the shades


class Track(NamedTuple):
    """One number of an episode of T steps."""

    name: str
    values: np.ndarray  # [T + 1]: before the first step and after each one; NaN where there is none
    low: float  # end of its axis
    high: float  # other end of its axis
    of_steps: bool = False  # True if a value belongs to the step before it, as a reward does


class Group(NamedTuple):
    """Tracks that belong together."""

    title: str
    tracks: list[Track]

    @property
    def in_shades(self) -> bool:
        return len(self.tracks) > MOST_LINES


class Placed(NamedTuple):
    """A group and its place in the picture, in pixels."""

    group: Group
    top: int
    height: int
    colors: list[str]  # colours of its tracks; empty for shades

    def middle(self, index: int) -> float:
        """Vertical place of a track's middle."""
        return self.top + (index + 0.5) * self.height / len(self.group.tracks)


def groups_of(
    recording: Any,
    observed: Sequence[tuple],
    action_space: Space,
    names_for: Callable[[int], Sequence[str]],
) -> list[Group]:
    """Gather all numbers of a `Recording`.

    Args:
      recording: the episode.
      observed: name, leaf of the space and numbers [T + 1, ...] of each part of the observations.
      action_space: the action space of the environment.
      names_for: returns names for a number of entries of an observation, or none.
    """
    obs = []
    for name, leaf, values in observed:
        obs += _tracks("obs", name, leaf, values)
    names = names_for(len(obs))
    if names:
        obs = [track._replace(name=name) for track, name in zip(obs, names, strict=True)]
    steps = len(recording.rewards)
    clipped = spaces.clip(recording.actions, action_space, (steps,), np)
    actions = []
    for name, leaf, values in spaces.leaves(action_space, clipped):
        tracks = _tracks("action", name, leaf, values)
        actions += [_after_steps(track) for track in tracks]
    reward = _after_steps(_track("reward", recording.rewards))
    returns = _track("return", np.cumsum([0.0, *recording.rewards]))
    groups = [
        Group("observations", obs),
        Group("actions", actions),
        Group("rewards", [reward, returns]),
    ]
    return [group for group in groups if group.tracks]


def _tracks(kind: str, name: str, leaf: spaces.Leaf, values: np.ndarray) -> list[Track]:
    """One track for each number of a leaf.

    Args:
      kind: "obs" or "action".
      name: the name of the leaf; may be empty, or an index in a tuple.
      leaf: its space.
      values: its numbers [T, ...].
    """
    flat = np.reshape(values, (len(values), -1)).astype(float)
    indices = [",".join(map(str, index)) for index in np.ndindex(*values.shape[1:])]
    if not any(map(str.isalpha, name)):
        name = f"{kind} {name}".rstrip()
    between = ", " if name[-1:].isdigit() else " "
    labels = [f"{name}{between}{index}" for index in indices]
    if len(labels) == 1:
        labels = [name]
    tracks = [_track(label, numbers) for label, numbers in zip(labels, flat.T, strict=True)]
    if isinstance(leaf, Box):
        return tracks
    return [
        track._replace(low=0.0, high=count - 1.0)
        for track, count in zip(tracks, leaf.nvec, strict=True)
    ]


def _track(name: str, values: np.ndarray) -> Track:
    """A track whose axis spans its finite values."""
    numbers = np.asarray(values, float)
    finite = numbers[np.isfinite(numbers)]
    return Track(
        name=name,
        values=numbers,
        low=float(finite.min()) if len(finite) else 0.0,
        high=float(finite.max()) if len(finite) else 0.0,
    )


def _after_steps(track: Track) -> Track:
    """Move the numbers [T] of steps to the places [T + 1] after them."""
    values = np.concatenate([[np.nan], track.values])
    return track._replace(values=values, of_steps=True)


def paint_tracks(groups: list[Group]) -> Paint:
    """Paint tracks over the steps, each in its own range, with a mark that moves along.

    The name of a track and its value at the mark stand beside it. Groups of many tracks are drawn
    as shades, from the lowest to the highest value of each number.
    """
    placed = _placed(groups)
    length = len(groups[0].tracks[0].values) - 1
    background = _background(placed, length)
    right = LEFT + PLOT + RIGHT - 8
    letters = font(SIZE)

    def paint(step: int) -> Image.Image:
        picture = background.copy()
        canvas = ImageDraw.Draw(picture)
        x = LEFT + (step + 0.5) / (length + 1) * PLOT
        for place in placed:
            bottom = place.top + place.height
            canvas.line([(x, place.top), (x, bottom)], INK, 2)
            for index in range(len(place.colors)):
                value = place.group.tracks[index].values[step]
                text = f"{value:.4g}".replace("nan", "-")
                canvas.text((right, place.middle(index)), text, INK, letters, anchor="rm")
        return picture

    return paint


def _placed(groups: list[Group]) -> list[Placed]:
    """Place the groups one below the other."""
    lines = sum(len(group.tracks) for group in groups if not group.in_shades)
    track = TRACK if lines <= MOST_TRACKS else LOW_TRACK
    placed = []
    top = TITLE
    first = 0
    for group in groups:
        count = 0 if group.in_shades else len(group.tracks)
        height = count * track or SHADES
        colors = [COLORS[(first + index) % len(COLORS)] for index in range(count)]
        placed.append(Placed(group=group, top=top, height=height, colors=colors))
        first += count
        top += height + TITLE
    return placed


def _background(placed: list[Placed], length: int) -> Image.Image:
    """Draw everything but the mark and the values beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = LEFT + PLOT + RIGHT
    height = placed[-1].top + placed[-1].height + BOTTOM
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    for place in placed:
        bottom = height - place.top - place.height
        rectangle = (
            LEFT / width,
            bottom / height,
            PLOT / width,
            place.height / height,
        )
        axes = figure.add_axes(rectangle)
        if place.group.in_shades:
            _plot_shades(axes, place)
        else:
            _plot_lines(axes, place)
        axes.set_xlim(-0.5, length + 0.5)
        axes.locator_params("x", integer=True)
        axes.tick_params(labelsize=7, length=3, pad=2, labelbottom=place is placed[-1])
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel("step", fontsize=8, labelpad=1)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    image = Image.fromarray(pixels[..., :3].copy())
    for place in placed:
        _write_legend(ImageDraw.Draw(image), place)
    return image


def _plot_lines(axes: Any, place: Placed) -> None:
    """Draw tracks one below the other, with the ends of their ranges as ticks."""
    ticks = {}
    for index, track in enumerate(place.group.tracks):
        low = (1 - FILLED) / 2 - index - 1
        spread = track.high - track.low
        if spread:
            shares = (track.values - track.low) / spread
            ticks[low] = f"{track.low:.3g}"
            ticks[low + FILLED] = f"{track.high:.3g}"
        else:
            shares = np.where(np.isnan(track.values), np.nan, 0.5)
            ticks[low + FILLED / 2] = f"{track.low:.3g}"
        is_finite = np.isfinite(shares)
        heights = low + FILLED * np.where(is_finite, shares, np.nan)
        axes.plot(
            np.arange(len(heights)),
            heights,
            place.colors[index],
            drawstyle="steps-pre" if track.of_steps else "default",
            marker="." if is_finite.sum() == 1 else "",  # one point has no line
            linewidth=1.4,
        )
        axes.axhline(-index, color="#D9DDE2", linewidth=0.6)
    axes.set_ylim(-len(place.group.tracks), 0)
    axes.set_yticks(list(ticks), list(ticks.values()))


def _plot_shades(axes: Any, place: Placed) -> None:
    """Draw numbers below each other as shades, with a tick beside each name."""
    tracks = place.group.tracks
    values = np.stack([track.values for track in tracks])
    low = np.array([[track.low] for track in tracks])
    high = np.array([[track.high] for track in tracks])
    spread = np.maximum(high - low, 1e-30)
    shares = np.ma.masked_invalid((values - low) / spread)
    axes.imshow(
        shares,
        BLUES,
        aspect="auto",
        interpolation="nearest",
        vmin=0,
        vmax=1,
    )
    axes.set_yticks(_rows_with_names(tracks))


def _rows_with_names(tracks: list[Track]) -> list[int]:
    """Indices of the tracks in shades beside which there is room for a name."""
    stride = math.ceil(len(tracks) * NAMED / SHADES)
    return list(range(0, len(tracks), stride))


def _write_legend(canvas: ImageDraw.ImageDraw, place: Placed) -> None:
    """Write the group's title and its names, with a sample of each colour."""
    left = LEFT + PLOT + 8
    right = LEFT + PLOT + RIGHT - 8
    above = place.top - TITLE / 2
    tracks = place.group.tracks
    letters = font(SIZE)
    canvas.text((LEFT, above), place.group.title, INK, font(12), anchor="lm")
    if place.group.in_shades:
        _write_shades(canvas, left, above)
        for index in _rows_with_names(tracks):
            name = shortened(tracks[index].name, RIGHT - 16, SIZE)
            canvas.text((left, place.middle(index)), name, INK, letters, anchor="lm")
        return
    canvas.text((right, above), "now", GREY, letters, anchor="rm")
    for index, color in enumerate(place.colors):
        y = place.middle(index)
        canvas.line([(left, y), (left + 14, y)], color, 3)
        name = shortened(tracks[index].name, RIGHT - VALUE - 34, SIZE)
        canvas.text((left + 20, y), name, INK, letters, anchor="lm")


def _write_shades(canvas: ImageDraw.ImageDraw, left: float, middle: float) -> None:
    """Write the scale of the shades, with its ends."""
    import matplotlib

    scale = np.linspace(0, 1, 60)
    colors = matplotlib.colormaps[BLUES](scale, bytes=True)[:, :3]
    letters = font(SIZE)
    canvas.text((left, middle), "lowest", INK, letters, anchor="lm")
    start = left + 44
    for offset, color in enumerate(colors.tolist()):
        x = start + offset
        canvas.line([(x, middle - 5), (x, middle + 5)], tuple(color))
    canvas.text((start + 66, middle), "highest", INK, letters, anchor="lm")
