"""An episode as a GIF: `recording = record(env, act, key, env.max_steps)`, then `draw_gif(env, recording, path)`.

Nothing is needed but Pillow: no display, no game library.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

from common import pictures, spaces
from common.canvas import COLORS, GREY, INK, LIGHT, PAPER, brief, rgb, write
from common.devices import key_data
from common.envs import Env, Step
from common.evaluate import act_key, step_key
from common.files import check_target, replacing
from common.scenes import SCENES, Episode

CHUNK = 256  # steps in one compiled call; an episode of images never lies on the device as a whole
MAX_FRAMES = 500
LONGEST_DELAY = 0.1  # seconds between frames that leave out steps: a longer episode plays faster than it was
LAST_DELAY = 1_000  # milliseconds for which the end is shown before the loop begins again
CAPTION, NARROWEST = 24, 280  # pixels: height of the line of numbers, and width that they need
COLUMNS = (0, 0.43, 0.71)  # where its numbers begin, as a part of the width
DRAWN_COLORS, FOUND_COLORS = 63, 255  # at most, with colours that are chosen here or that observations have


class Recording(NamedTuple):
    """One episode, host arrays with a leading time axis: T steps, T + 1 states and observations.

    The last observation is the true final one. So is the last state where the environment can tell it; environments
    that only know their state after the reset repeat the one before.
    """

    states: Any  # environment states [T + 1, ...], typed keys as their data
    obs: np.ndarray  # observations [T + 1, ...]
    actions: np.ndarray  # [T, ...] as the policy gave them
    rewards: np.ndarray  # [T]


def record(env: Env, act: Callable[[jax.Array, jax.Array], jax.Array], key: jax.Array, max_steps: int) -> Recording:
    """One episode of at most `max_steps` steps with `act`: (observations [1, ...], key) to actions [1, ...].

    It is the episode that `evaluate.play_episodes` plays with the same `key` and policy.
    """
    advance = jax.jit(lambda time, obs, state: _advance(env, act, key, time, obs, state))
    obs, state = jax.jit(env.reset)(key)
    first = jax.device_get(jax.tree.map(lambda x: x[None], (obs, key_data(state))))
    chunks, over = [], False
    while not over:
        obs, state, chunk = advance(jnp.int32(CHUNK * len(chunks)), obs, state)
        chunk = jax.device_get(chunk)
        left = max_steps - CHUNK * len(chunks)
        ends = np.flatnonzero(chunk.done)
        steps = min(ends[0] + 1 if ends.size else CHUNK, left)
        over = bool(ends.size) or left <= CHUNK
        chunks.append(jax.tree.map(lambda x: x[:steps], chunk))
    chunk = jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)
    obs, states = jax.tree.map(lambda *parts: np.concatenate(parts), first, (chunk.obs, chunk.state))
    return Recording(states, obs, chunk.action, chunk.reward)


class _Chunk(NamedTuple):
    """Steps of an environment, [CHUNK, ...]."""

    state: Any  # after the step, without reset
    obs: jax.Array  # after the step, without reset
    action: jax.Array
    reward: jax.Array
    done: jax.Array


def _advance(env: Env, act: Callable, key: jax.Array, start: jax.Array, obs: jax.Array, state: Any):
    """`CHUNK` steps from step `start`, past the end of the episode where it comes: (obs, state, _Chunk)."""

    def step(carry, time):
        obs, state = carry
        action = act(obs[None], act_key(key, time))[0]
        out = env.step(step_key(key, time), state, action)
        reached = key_data(_without_reset(env, step_key(key, time), state, action, out))
        return (out.obs, out.state), _Chunk(reached, out.final_obs, action, out.reward, out.terminated | out.truncated)

    (obs, state), chunk = jax.lax.scan(step, (obs, state), start + jnp.arange(CHUNK))
    return obs, state, chunk


def _without_reset(env: Env, key: jax.Array, state: Any, action: jax.Array, out: Step) -> Any:
    """The state that a step from `state` reached, where `out` has that of the reset if it ended the episode.

    gymnax's `step_env` gives it. An environment of another kind, or whose final observation does not agree, gets
    `state`. (The compiler shares the work with the step itself.)
    """
    over = out.terminated | out.truncated
    reached, known = state, jnp.bool_(False)
    if _has_step_env(env):
        bare = copy.copy(env)
        bare.inner = _NoReset(env.inner)
        with suppress(Exception):  # it is not gymnax's, and takes other arguments, say
            again = bare.step(key, state, action)
            pair = again.final_obs.astype(jnp.float32), out.final_obs.astype(jnp.float32)
            reached, known = again.state, jnp.allclose(*pair, rtol=1e-4, atol=1e-4, equal_nan=True)
    reached = jax.tree.map(lambda new, old: jnp.where(known, new, old), reached, state)
    return jax.tree.map(lambda end, new: jnp.where(over, end, new), reached, out.state)


class _NoReset:
    """A gymnax environment that stays where an episode ends."""

    def __init__(self, inner: Any):
        self._inner = inner

    def step(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> tuple:
        step_key, _ = jax.random.split(key)  # as gymnax does
        obs, state, reward, terminated, info = self._inner.step_env(step_key, state, action, params)
        return obs, state, reward, terminated, False, info | {"final_observation": obs}


def _has_step_env(env: Env) -> bool:
    owner = next((kind.__name__ for kind in type(env.inner).__mro__ if "step_env" in vars(kind)), "Environment")
    return "Environment" in _gymnax_classes(env) and owner != "Environment"  # whose own is a placeholder


def _gymnax_classes(env: Env) -> list[str]:
    return [kind.__name__ for kind in type(env.inner).__mro__ if kind.__module__.startswith("gymnax.")]


class Drawing(NamedTuple):
    """How an episode is drawn."""

    paint: Callable[[int], Image.Image]  # the picture after so many steps, without its caption
    seconds: float  # that a step lasts
    colors: int = DRAWN_COLORS


def draw_gif(
    env: Env, recording: Recording, path: Path, on_frame: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Write the episode to `path` as a looping GIF; returns its number of frames.

    Calls `on_frame(done, total)` after each. Raises UsageError where the file cannot be written; one that is there
    already is replaced when the new one is whole.
    """
    check_target(path)
    with replacing(path) as temporary:
        temporary.touch()  # fails before the work, not after it
        drawing = _drawing(env, recording)
        steps, delays = _timing(len(recording.rewards), drawing.seconds)
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


def _drawing(env: Env, recording: Recording) -> Drawing:
    """From the state where its kind of environment is known, else from the observation."""
    actions = np.asarray(spaces.clip(jnp.asarray(recording.actions), env.action_space, (len(recording.actions),)))
    scene = next((SCENES[name] for name in _gymnax_classes(env) if name in SCENES), None)
    if scene and all(hasattr(recording.states, field) for field in scene.fields):
        states = SimpleNamespace(**{field: _finite(getattr(recording.states, field)) for field in scene.fields})
        with suppress(ArithmeticError, ValueError):  # parameters without a picture, such as a pole of length 0
            paint = scene.prepare(Episode(env.inner, env.params, states, _finite(actions)))
            paint(0)
            return Drawing(paint, scene.seconds)
    length = len(recording.rewards)
    seconds = float(np.clip(getattr(env.params, "dt", max(0.1, 4 / length)), 0.02, 0.4))
    if pictures.is_grid(recording.obs.shape[1:]):
        colors = DRAWN_COLORS if pictures.is_binary(recording.obs) else FOUND_COLORS
        return Drawing(pictures.grid(recording.obs), seconds, colors)
    return Drawing(pictures.lines(recording.obs, actions, recording.rewards), seconds)


def _finite(values: np.ndarray) -> np.ndarray:
    """Numbers that can be drawn, also where an environment or a policy has diverged."""
    return np.nan_to_num(values).clip(-1e6, 1e6) if values.dtype.kind == "f" else values


def _timing(length: int, seconds: float) -> tuple[list[int], list[int]]:
    """After which steps of an episode a frame is drawn, and for how many milliseconds each is shown."""
    stride = max(1, math.ceil(length / (MAX_FRAMES - 1)))
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
