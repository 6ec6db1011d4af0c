"""An episode as a GIF: `recording = record(env, act, key, env.max_steps)`, then `draw_gif(env, recording, path)`.

It is drawn by its suite, by a scene of classic control, or from its observations: no display is needed.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from common.cli.files import check_target, replacing
from common.drawing.recording import Paint, Recording, fitting, frame_stride
from common.drawing.scenes import CHANNELS, FLOOR, HEIGHT, INK, PAPER, RED, WIDTH, scene_of
from common.envs import spaces
from common.envs.environment import Env
from common.envs.masks import is_mask
from common.envs.spaces import EnvSpec

LONGEST_DELAY = 0.1  # seconds between frames that leave out steps: a longer episode plays faster than it was
LAST_DELAY = 1_000  # milliseconds for which the end is shown before the loop begins again
CAPTION, NARROWEST = 24, 280  # pixels: height of the line of numbers, and width that they need
COLORS = 127  # of a GIF, and one more for what stays as it is
MOST_LINES = 8  # numbers of an observation; more are drawn as shades instead of as lines


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
        paint, seconds = _painter(env, recording)
        steps, delays = timing(len(recording.rewards), seconds)
        returns = np.cumsum([0.0, *recording.rewards])

        def frame(step: int) -> Image.Image:
            reward = f"{recording.rewards[step - 1]:.3g}" if step else "-"
            numbers = f"step {step} / {len(returns) - 1}", f"reward {reward}", f"return {returns[step]:.4g}"
            return _with_caption(paint(step), numbers)

        sample = np.concatenate([np.asarray(frame(step)) for step in steps[:: -(-len(steps) // 16)]])
        palette = Image.fromarray(sample).quantize(COLORS, Image.Quantize.FASTOCTREE)
        images = []
        for done, step in enumerate(steps, 1):
            images.append(frame(step).quantize(palette=palette, dither=Image.Dither.NONE))
            on_frame(done, len(steps))
        every = {"save_all": True, "append_images": images[1:], "duration": delays, "loop": 0}
        images[0].save(temporary, "GIF", optimize=True, **every)
    return len(steps)


def timing(length: int, seconds: float) -> tuple[list[int], list[int]]:
    """After which steps of an episode a frame is drawn, and for how many milliseconds each is shown."""
    stride = frame_stride(length)
    steps = [*range(0, length, stride), length]
    delay = min(stride * seconds, max(seconds, LONGEST_DELAY))
    # A GIF counts hundredths of a second, and browsers take one of them for ten
    delays = [max(20, 10 * round(100 * delay))] * len(steps)
    return steps, [*delays[:-1], LAST_DELAY]


def _with_caption(picture: Image.Image, numbers: tuple[str, ...]) -> Image.Image:
    """The picture, in the middle of at least `NARROWEST` pixels, above its numbers."""
    width, height = max(picture.width, NARROWEST), picture.height
    frame = Image.new("RGB", (width, height + CAPTION), PAPER)
    frame.paste(picture, ((width - picture.width) // 2, 0))
    draw = ImageDraw.Draw(frame)
    for place, text in zip((0.02, 0.38, 0.7), numbers, strict=True):
        draw.text((place * width, height + CAPTION / 2), text, INK, ImageFont.load_default(11), anchor="lm")
    return frame


# -------------------------------------------------------------------------------------------------- pictures of a step


def _painter(env: Env | EnvSpec, recording: Recording) -> tuple[Paint, float]:
    """How the episode is drawn, by the first way that works here, and the seconds that a step lasts."""
    seconds = float(np.clip(4 / len(recording.rewards), 0.04, 0.3))
    if recording.paint:
        return recording.paint, seconds
    if isinstance(env, Env):
        with suppress(Exception):  # such as a pole of length 0
            scene = scene_of(env)
            scene.draw(_state(recording, 0))
            return lambda step: scene.draw(_state(recording, step)), scene.seconds
        with suppress(Exception):  # no renderer, or no graphics library
            fitting(env.frame(_state(recording, 0)))
            return lambda step: fitting(env.frame(_state(recording, step))), seconds
    parts = [x for name, _, x in spaces.leaves(env.observation_space, recording.obs) if not is_mask(name)]
    for obs in parts:
        if obs.ndim in (3, 4) and min(obs.shape[1:3]) >= 3:
            return _grid(obs), seconds
    return _lines(parts, recording.actions, recording.rewards), seconds


def _state(recording: Recording, step: int) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x[step]), recording.states)


def _grid(obs: np.ndarray) -> Paint:
    """Observations [T + 1, H, W] or [T + 1, H, W, C] as squares: one colour per channel, the first ones in front of the
    others; images with red, green and blue as they are.
    """
    maps = obs if obs.ndim == 4 else obs[..., None]
    count = maps.shape[-1]
    is_image = count == 3 and not all(np.isin(frame, (0, 1)).all() for frame in maps)
    of_bytes = is_image and maps.dtype == np.uint8
    low, high = min(0.0, float(np.nanmin(maps))), 255.0 if of_bytes else float(np.nanmax(maps))
    colors = np.array([ImageColor.getrgb(color) for color in ((PAPER,) if count == 1 else CHANNELS)])

    def paint(step: int) -> Image.Image:
        values = np.nan_to_num((maps[step].astype(np.float32) - low) / max(high - low, 1e-9)).clip(0, 1)
        pixels = 255 * values
        if not is_image:
            pixels = np.broadcast_to(np.float32(ImageColor.getrgb(FLOOR)), (*values.shape[:2], 3))
            for channel in reversed(range(count)):
                pixels = pixels + values[..., channel, None] * (colors[channel % len(colors)] - pixels)
        picture = fitting(np.round(pixels).astype(np.uint8))
        if (cell := picture.width // values.shape[1]) < 8:
            return picture
        squares = np.array(picture)
        squares[::cell] = squares[:, ::cell] = ImageColor.getrgb(INK)  # lines between them
        return Image.fromarray(squares)

    return paint


def _lines(obs: Any, actions: Any, rewards: np.ndarray) -> Paint:
    """All numbers of an episode, in trees [T + 1, ...] and [T, ...], over its steps, and a mark that moves along.

    Each number is drawn in its own range: as a line, or as shades where they are many.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    rows, tracks = figure.subplots(3, sharex=True, height_ratios=(3, 1, 1)), (obs, actions, rewards)
    for axes, name, tree in zip(rows, ("obs", "action", "reward"), tracks, strict=True):
        values = np.concatenate([np.reshape(x, (len(x), -1)) for x in jax.tree.leaves(tree)], axis=1).astype(float)
        values = np.nan_to_num(values, posinf=0, neginf=0)
        low, high = values.min(axis=0), values.max(axis=0)
        shares = (values - low) / np.maximum(high - low, 1e-9)  # [T, N]
        if shares.shape[1] > MOST_LINES:
            axes.imshow(shares.T, "Blues", aspect="auto", interpolation="nearest")
        else:
            axes.plot(0.8 * shares - np.arange(shares.shape[1]), linewidth=1.2)
        axes.set_ylabel(name, fontsize=8)
        axes.set_yticks([])
        axes.tick_params(labelsize=7)
    canvas.draw()
    background = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())

    def paint(step: int) -> Image.Image:
        picture = background.copy()
        x, _ = axes.transData.transform((step, 0))
        ImageDraw.Draw(picture).line([(x, 0), (x, picture.height - 20)], RED, 2)
        return picture

    return paint
