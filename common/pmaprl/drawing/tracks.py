"""Numbers of an episode over its steps: observations, actions, reward and return, with ticks and a
legend.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from pmaprl.drawing.figures import COLORS
from pmaprl.drawing.pictures import GREY, INK, Paint, font, shortened
from pmaprl.envs import spaces
from pmaprl.envs.spaces import Box, Space

MOST_LINES = 8  # numbers of a group; more are drawn as shades instead of as lines
LEFT = 66  # pixels: ticks, the episode, and names with what they are
PLOT = 330
RIGHT = 184
TITLE = 22  # pixels above each group, and below the last one
BOTTOM = 36
TRACK = 38  # pixels of a track, of a lower one, and tracks that may be high
LOW_TRACK = 30
MOST_TRACKS = 8
SHADES = 150  # pixels of a group that is drawn as shades
FILLED = 0.62  # share of a track's height that its line fills
SIZE = 11  # pixels of texts
NAMED = 13  # pixels from one name beside shades to the next, at least
VALUE = 62  # pixels of a number beside its name
DPI = 100  # pixels per inch, by which matplotlib counts
BLUES = "Blues"  # matplotlib's name of the shades


class Track(NamedTuple):
    """One number of an episode of T steps."""

    name: str
    values: np.ndarray  # [T + 1]: before the first step and after each one; NaN where there is none
    low: float  # end of its axis
    high: float  # likewise
    of_steps: bool = False  # whether a value belongs to the step that led there


class Group(NamedTuple):
    """Tracks that belong together."""

    title: str
    tracks: list[Track]

    @property
    def in_shades(self) -> bool:
        return len(self.tracks) > MOST_LINES


class Placed(NamedTuple):
    """A group, and the pixels of a picture that it fills."""

    group: Group
    top: int
    height: int
    colors: list[str]  # of its tracks, where they are lines

    def middle(self, index: int) -> float:
        """The height at which a track is."""
        return self.top + (index + 0.5) * self.height / len(self.group.tracks)


def groups_of(
    recording: Any,
    observed: Sequence[tuple],
    action_space: Space,
    names_for: Callable[[int], Sequence[str]],
) -> list[Group]:
    """All numbers of a `Recording`.

    Args:
      recording: the episode.
      observed: of each part of its observations the name, the leaf of the space, and the numbers [T
          + 1, ...].
      action_space: the environment's.
      names_for: gives the names of so many numbers of an observation, or none.
    """
    obs = [track for name, leaf, x in observed for track in _tracks("obs", name, leaf, x)]
    if names := names_for(len(obs)):
        obs = [track._replace(name=name) for track, name in zip(obs, names, strict=True)]
    steps = len(recording.rewards)
    taken = spaces.clip(recording.actions, action_space, (steps,), np)
    acted = spaces.leaves(action_space, taken)
    action = [
        _after_steps(track) for name, leaf, x in acted for track in _tracks("action", name, leaf, x)
    ]
    returns = np.cumsum([0.0, *recording.rewards])
    reward = [_after_steps(_track("reward", recording.rewards)), _track("return", returns)]
    groups = Group("observations", obs), Group("actions", action), Group("rewards", reward)
    return [group for group in groups if group.tracks]


def _tracks(kind: str, name: str, leaf: spaces.Leaf, values: np.ndarray) -> list[Track]:
    """Tracks of the numbers [T, ...] of a leaf with this name, which may be empty, or the place in
    a tuple.
    """
    flat = np.reshape(values, (len(values), -1)).astype(float)
    indices = [",".join(map(str, index)) for index in np.ndindex(*values.shape[1:])]
    if not any(map(str.isalpha, name)):
        name = f"{kind} {name}".rstrip()
    between = ", " if name[-1:].isdigit() else " "
    named = [name] if len(indices) == 1 else [f"{name}{between}{index}" for index in indices]
    tracks = [_track(label, x) for label, x in zip(named, flat.T, strict=True)]
    if isinstance(leaf, Box):
        return tracks
    return [
        track._replace(low=0.0, high=n - 1.0) for track, n in zip(tracks, leaf.nvec, strict=True)
    ]


def _track(name: str, values: np.ndarray) -> Track:
    """A track as high as what is finite of it."""
    numbers = np.asarray(values, float)
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    return Track(name=name, values=numbers, low=low, high=high)


def _after_steps(track: Track) -> Track:
    """The same numbers [T], each after its step."""
    return track._replace(values=np.concatenate([[np.nan], track.values]), of_steps=True)


def paint_tracks(groups: list[Group]) -> Paint:
    """Pictures of tracks over the steps, each in its own range, with a mark that moves along.

    Beside each stands its name and what it is at the mark. Groups of many are drawn as shades, from
    the lowest to the highest value of each number.
    """
    placed = _placed(groups)
    length = len(groups[0].tracks[0].values) - 1
    background = _background(placed, length)

    def paint(step: int) -> Image.Image:
        picture = background.copy()
        canvas = ImageDraw.Draw(picture)
        x = LEFT + (step + 0.5) / (length + 1) * PLOT
        for place in placed:
            canvas.line([(x, place.top), (x, place.top + place.height)], INK, 2)
            for index in range(len(place.colors)):
                text = f"{place.group.tracks[index].values[step]:.4g}".replace("nan", "-")
                right = LEFT + PLOT + RIGHT - 8
                canvas.text((right, place.middle(index)), text, INK, font(SIZE), anchor="rm")
        return picture

    return paint


def _placed(groups: list[Group]) -> list[Placed]:
    """The groups, one below the other."""
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
    """All that stays as it is while the mark moves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = LEFT + PLOT + RIGHT
    height = placed[-1].top + placed[-1].height + BOTTOM
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    for place in placed:
        bottom = height - place.top - place.height
        axes = figure.add_axes((LEFT / width, bottom / height, PLOT / width, place.height / height))
        (_plot_shades if place.group.in_shades else _plot_lines)(axes, place)
        axes.set_xlim(-0.5, length + 0.5)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=7, length=3, pad=2, labelbottom=place is placed[-1])
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step", fontsize=8, labelpad=1)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    for place in placed:
        _write_legend(ImageDraw.Draw(image), place)
    return image


def _plot_lines(axes: Any, place: Placed) -> None:
    """Draw tracks one below the other, with the ends of their ranges as ticks."""
    ticks = {}
    for index, track in enumerate(place.group.tracks):
        low = (1 - FILLED) / 2 - index - 1
        spread = track.high - track.low
        shares = (
            (track.values - track.low) / spread
            if spread
            else np.where(np.isnan(track.values), np.nan, 0.5)
        )
        shares = np.where(np.isfinite(shares), shares, np.nan)
        steps = np.arange(len(shares))
        style = "steps-pre" if track.of_steps else "default"
        marker = "." if np.isfinite(shares).sum() == 1 else ""  # one point has no line
        color = place.colors[index]
        axes.plot(
            steps, low + FILLED * shares, color, drawstyle=style, marker=marker, linewidth=1.4
        )
        ends = (
            {low: track.low, low + FILLED: track.high} if spread else {low + FILLED / 2: track.low}
        )
        ticks |= {at: f"{end:.3g}" for at, end in ends.items()}
        axes.axhline(-index, color="#D9DDE2", linewidth=0.6)
    axes.set_ylim(-len(place.group.tracks), 0)
    axes.set_yticks(list(ticks), list(ticks.values()))


def _plot_shades(axes: Any, place: Placed) -> None:
    """Draw numbers below each other as shades, with ticks at some of their places."""
    tracks = place.group.tracks
    values = np.stack([track.values for track in tracks])
    low, high = (
        np.array([getattr(track, end) for track in tracks])[:, None] for end in ("low", "high")
    )
    shares = np.ma.masked_invalid((values - low) / np.maximum(high - low, 1e-30))
    axes.imshow(shares, BLUES, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
    axes.set_yticks(_rows_with_names(tracks))


def _rows_with_names(tracks: list[Track]) -> list[int]:
    """Those of the numbers in shades beside which there is room for a name."""
    return list(range(0, len(tracks), -(-len(tracks) * NAMED // SHADES)))


def _write_legend(canvas: ImageDraw.ImageDraw, place: Placed) -> None:
    """Write the group's title, and what its colours are."""
    left = LEFT + PLOT + 8
    above = place.top - TITLE / 2
    tracks = place.group.tracks
    canvas.text((LEFT, above), place.group.title, INK, font(12), anchor="lm")
    if place.group.in_shades:
        _write_shades(canvas, left, above)
        for index in _rows_with_names(tracks):
            name = shortened(tracks[index].name, RIGHT - 16, SIZE)
            canvas.text((left, place.middle(index)), name, INK, font(SIZE), anchor="lm")
        return
    canvas.text((LEFT + PLOT + RIGHT - 8, above), "now", GREY, font(SIZE), anchor="rm")
    for index, color in enumerate(place.colors):
        y = place.middle(index)
        canvas.line([(left, y), (left + 14, y)], color, 3)
        name = shortened(tracks[index].name, RIGHT - VALUE - 34, SIZE)
        canvas.text((left + 20, y), name, INK, font(SIZE), anchor="lm")


def _write_shades(canvas: ImageDraw.ImageDraw, left: float, middle: float) -> None:
    """Write the ends of the shades and what is between them."""
    import matplotlib

    shades = matplotlib.colormaps[BLUES](np.linspace(0, 1, 60), bytes=True)[:, :3].tolist()
    canvas.text((left, middle), "lowest", INK, font(SIZE), anchor="lm")
    start = left + 44
    for offset, color in enumerate(shades):
        canvas.line([(start + offset, middle - 5), (start + offset, middle + 5)], tuple(color))
    canvas.text((start + 66, middle), "highest", INK, font(SIZE), anchor="lm")
