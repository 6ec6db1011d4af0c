"""An episode as a GIF: `recording = record(env, act, key, env.max_steps)`, then `draw_gif(env, recording, path)`.

Nothing is needed but Pillow: no display, no game library.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

from common.cli.files import check_target, replacing
from common.drawing import pictures, scenes
from common.drawing.pictures import COLORS, GREY, INK, LIGHT, PAPER, Paint, brief, rgb, write
from common.drawing.recording import Recording, frame_stride
from common.drawing.scenes import Episode
from common.envs import spaces
from common.envs.environment import Env
from common.envs.masks import is_mask
from common.envs.spaces import EnvSpec

SCENES = scenes.CLASSIC_CONTROL | scenes.POINTS_AND_MAZES
LONGEST_DELAY = 0.1  # seconds between frames that leave out steps: a longer episode plays faster than it was
LAST_DELAY = 1_000  # milliseconds for which the end is shown before the loop begins again
CAPTION, NARROWEST = 24, 280  # pixels: height of the line of numbers, and width that they need
COLUMNS = (0, 0.43, 0.71)  # where its numbers begin, as a part of the width
DRAWN_COLORS, FOUND_COLORS = 63, 255  # at most, with colours that are chosen here or that observations have


class Drawing(NamedTuple):
    """How an episode is drawn."""

    paint: Paint  # without the caption
    seconds: float  # that a step lasts
    colors: int = DRAWN_COLORS


def draw_gif(
    env: Env | EnvSpec,
    recording: Recording,
    path: Path,
    on_frame: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the episode to `path` as a looping GIF; returns its number of frames.

    Calls `on_frame(done, total)` after each. Raises UsageError where the file cannot be written; one that is there
    already is replaced when the new one is whole.
    """
    check_target(path)
    with replacing(path) as temporary:
        temporary.touch()  # fails before the work, not after it
        drawing = _drawing(env, recording)
        steps, delays = timing(len(recording.rewards), drawing.seconds)
        returns = np.concatenate([[0.0], np.cumsum(recording.rewards, dtype=np.float64)])

        def frame(step: int) -> Image.Image:
            reward = f"{brief(recording.rewards[step - 1])}" if step else "-"
            numbers = {"step": f"{step} / {len(returns) - 1}", "reward": reward, "return": brief(returns[step])}
            return _caption(drawing.paint(step), numbers)

        palette = _palette([frame(step) for step in steps[:: -(-len(steps) // 16)]], drawing.colors)
        frames = _changes(map(frame, steps), palette, drawing.colors)
        shown = (image for done, image in enumerate(frames, 1) if not on_frame(done, len(steps)))
        next(shown).save(
            temporary,
            "GIF",
            save_all=True,
            append_images=shown,
            duration=delays,
            loop=0,
            disposal=1,
            transparency=drawing.colors,
            optimize=False,
        )
    return len(steps)


def _drawing(env: Env | EnvSpec, recording: Recording) -> Drawing:
    """As the suite draws it, or from the states if their kind is known, else from the observations."""
    length = len(recording.rewards)
    if paint := recording.paint:
        return Drawing(paint, _seconds_of_frames(length), FOUND_COLORS)
    actions = _columns(spaces.clip(recording.actions, env.action_space, (length,), np))
    if isinstance(env, Env) and (drawing := _from_states(env, recording, actions)):
        return drawing
    obs = _part_to_draw(env.observation_space, recording.obs)
    dt = getattr(getattr(env, "params", None), "dt", max(0.1, 4 / length))
    seconds = float(np.clip(dt, 0.02, 0.4))
    if pictures.is_grid(obs.shape[1:]):
        colors = DRAWN_COLORS if pictures.is_binary(obs) else FOUND_COLORS
        return Drawing(pictures.grid(obs), seconds, colors)
    return Drawing(pictures.lines(obs, actions, recording.rewards), seconds)


def _seconds_of_frames(length: int) -> float:
    return float(np.clip(4 / length, 0.04, 0.3))


def _from_states(env: Env, recording: Recording, actions: np.ndarray) -> Drawing | None:
    """By a scene of this kit or by the suite's renderer."""
    classes = [kind.__name__ for kind in type(env.inner).__mro__ if kind.__module__.startswith("gymnax.")]
    scene = next((SCENES[name] for name in classes if name in SCENES), None)
    if scene and all(hasattr(recording.states, field) for field in scene.fields):
        states = SimpleNamespace(**{field: _finite(getattr(recording.states, field)) for field in scene.fields})
        with suppress(ArithmeticError, ValueError):  # parameters without a picture, such as a pole of length 0
            paint = scene.prepare(Episode(env.inner, env.params, states, _finite(actions)))
            paint(0)
            return Drawing(paint, scene.seconds)
    paint = _frames(env, recording)
    return Drawing(paint, _seconds_of_frames(len(recording.rewards)), FOUND_COLORS) if paint else None


def _frames(env: Env, recording: Recording) -> Paint | None:
    """Pictures by the suite's own renderer, if it has one that works here."""

    def paint(step: int) -> Image.Image:
        return pictures.fitting(env.frame(jax.tree.map(lambda x: jnp.asarray(x[step]), recording.states)))

    with suppress(Exception):  # no graphics library, say: there is another way to draw it
        paint(0)
        return paint
    return None


def _part_to_draw(space: spaces.Space, obs: Any) -> np.ndarray:
    """Of observations with parts the first that is a picture, or all their numbers."""
    parts = [x for name, _, x in spaces.leaves(space, obs) if not is_mask(name)]
    return next((x for x in parts if pictures.is_grid(x.shape[1:])), _columns(parts))


def _columns(tree: Any) -> np.ndarray:
    """The numbers of all parts, [T, ...]; of a single one in its shape."""
    parts = jax.tree.leaves(tree)
    return parts[0] if len(parts) == 1 else np.concatenate([x.reshape(len(x), -1) for x in parts], axis=1)


def _finite(values: np.ndarray) -> np.ndarray:
    """Numbers that can be drawn, also where an environment or a policy has diverged."""
    return np.nan_to_num(values).clip(-1e6, 1e6) if values.dtype.kind == "f" else values


def timing(length: int, seconds: float) -> tuple[list[int], list[int]]:
    """After which steps of an episode a frame is drawn, and for how many milliseconds each is shown."""
    stride = frame_stride(length)
    steps = [*range(0, length, stride), length]
    delay = min(stride * seconds, max(seconds, LONGEST_DELAY))
    # A GIF counts hundredths of a second, and browsers take one of them for ten
    delays = [max(20, 10 * round(100 * delay))] * len(steps)
    return steps, [*delays[:-1], LAST_DELAY]


def _caption(picture: Image.Image, numbers: dict[str, str]) -> Image.Image:
    """The picture, in the middle of at least `NARROWEST` pixels, above its numbers."""
    width, height = max(picture.width, NARROWEST), picture.height
    frame = Image.new("RGB", (width, height + CAPTION), PAPER)
    frame.paste(picture, ((width - picture.width) // 2, 0))
    draw = ImageDraw.Draw(frame)
    draw.line([(0, height), (width, height)], LIGHT)
    for left, (name, number) in zip(COLUMNS, numbers.items(), strict=True):
        y = height + CAPTION / 2 + 1
        end = write(draw, 8 + left * (width - 8), y, name, GREY)
        write(draw, end + 3, y, number, INK)
    return frame


def _palette(samples: list[Image.Image], count: int) -> Image.Image:
    """An image with `count` colours, the named ones and what the `samples` need most, and one more for none."""
    width, height = samples[0].size
    sheet = Image.new("RGB", (width, height * len(samples)))
    for index, sample in enumerate(samples):
        sheet.paste(sample, (0, height * index))
    named = np.array([rgb(color) for color in COLORS])
    found = np.reshape(sheet.quantize(count - len(named)).getpalette(), (-1, 3))[: count - len(named)]
    # Pillow looks colours up coarsely: one close to a named one would take its place
    apart = np.abs(found[:, None] - named).max(axis=2).min(axis=1) > 8
    colors = np.zeros((count + 1, 3), int)
    colors[: len(named) + apart.sum()] = np.concatenate([named, found[apart]])
    palette = Image.new("P", (1, 1))
    palette.putpalette(colors.ravel().tolist())
    return palette


def _changes(frames: Iterable[Image.Image], palette: Image.Image, unchanged: int) -> Iterator[Image.Image]:
    """The frames in the colours of `palette`, with the index `unchanged` wherever one is like the one before."""
    before = None
    for frame in frames:
        pixels = np.asarray(frame.quantize(palette=palette, dither=Image.Dither.NONE))
        image = Image.fromarray(pixels if before is None else np.where(pixels == before, np.uint8(unchanged), pixels))
        image.putpalette(palette.getpalette())  # from grey levels to indices
        before = pixels
        yield image
