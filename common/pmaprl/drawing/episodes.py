"""Recording of an episode, and its picture as a GIF.

    recording = record(env, player, key, env.max_steps)
    draw_gif(env, recording, path)

An episode is recorded while it is played, on the device or on the host, and drawn afterwards: by
the renderer of its suite, or from its observations. No display is needed.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

from pmaprl.cli.files import check_target, replacing
from pmaprl.device.agents import Player
from pmaprl.device.evaluation import episode_keys
from pmaprl.device.interface import PolicyInput
from pmaprl.device.state import key_data
from pmaprl.drawing.pictures import HEIGHT, INK, PAPER, Paint, below, fitting, font, grid
from pmaprl.drawing.tracks import groups_of, paint_tracks
from pmaprl.envs import spaces
from pmaprl.envs.environment import LONGEST_HORIZON, Env
from pmaprl.envs.foreign_code import place_in_code, reason
from pmaprl.envs.host import HostEnvs, HostStep
from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import EnvSpec

MOST_MAPS = 3  # maps of an observation that are drawn
MAX_FRAMES = 500  # frames of a GIF
# Most seconds between two frames that leave out steps, so a long episode plays faster than it was
LONGEST_DELAY = 0.1
SHORTEST_DELAY = 20  # milliseconds: browsers slow down frames that are shorter
LAST_DELAY = 1_000  # milliseconds for which the end is shown before the loop begins again
TOTAL_SECONDS = 8  # length of a GIF that leaves out no step
SECONDS_PER_STEP = 0.02, 0.3  # bounds of the time for which a step is shown
PALETTE_FRAMES = 16  # frames that the colours of a GIF are chosen from
CAPTION = 24  # pixels: height of the line of numbers
NARROWEST = 280  # pixels: width that the line of numbers needs
COLUMNS = 0.02, 0.38, 0.7  # places of the numbers, as shares of the width
COLORS = 127  # colours of a GIF; one more stands for unchanged pixels


class Recording(NamedTuple):
    """One episode of T steps: host arrays with a leading time axis.

    The last observation is the true final one. So is the last state where the environment knows
    it; environments that only know their state after the reset repeat the state before.
    """

    states: Any  # environment states [T + 1, ...], typed keys as their data
    obs: Any  # observations [T + 1, ...]
    actions: Any  # [T, ...] as the policy gave them
    rewards: np.ndarray  # [T]
    paint: Paint | None = None  # pictures, if they were drawn while the episode was played
    without_pictures: str = ""  # the reason why pictures are missing, if some are
    obs_names: tuple[str, ...] = ()  # names of an observation's numbers or channels, if known


def frame_stride(steps: int) -> int:
    """Number of steps between two frames of an episode of `steps`: a power of two.

    While an episode goes on, the stride only doubles. So no frame that a later stride needs has
    been dropped.
    """
    if not steps:
        return 1
    doublings = math.ceil(math.log2(steps / (MAX_FRAMES - 1)))
    return 2 ** max(doublings, 0)


def record(env: Env, player: Player | Callable, key: jax.Array, max_steps: int) -> Recording:
    """Play and record one episode.

    It is the episode that `evaluation.play_episodes` plays with the same `key` and `player`.

    Args:
      env: the environment, on the device.
      player: a `Player`, or a function `actions = player(obs, key)` as `Player.of` takes it.
      key: the random key of the episode.
      max_steps: the number of steps after which the recording ends.

    Returns:
      The recording, of T <= max_steps steps.
    """
    player = Player.of(player)
    reset_key, *keys = episode_keys(key)

    @jax.jit
    def advance(
        time: jax.Array, seen: PolicyInput, memory: Any, state: Any
    ) -> tuple[Any, PolicyInput, Any, Any]:
        step_key, act_key = (jax.random.fold_in(key, time) for key in keys)
        actions, memory = player.act(seen, memory, act_key[None])
        action = jax.tree.map(lambda x: x[0], actions)
        out = env.step(step_key, state, action)
        over = out.terminated | out.truncated
        reached = key_data(out.final_state), out.final_obs, action, out.reward, over
        seen = jax.tree.map(lambda x: x[None], PolicyInput(out.obs, over, out.reward))
        return reached, seen, memory, out.state

    obs, state = jax.jit(env.reset)(reset_key)
    first = jax.device_get((key_data(state), obs))
    seen = PolicyInput.at_start(jax.tree.map(lambda x: x[None], obs))
    memory = player.initial_memory(1)
    steps = []
    over = False
    while len(steps) < max_steps and not over:
        reached, seen, memory, state = advance(len(steps), seen, memory, state)
        # Step by step, because an episode of images may not fit on the device
        *step, over = jax.device_get(reached)
        steps.append(step)
    states, obs, actions, rewards = zip(*steps, strict=True)
    return Recording(
        states=_stacked([first[0], *states]),
        obs=_stacked([first[1], *obs]),
        actions=_stacked(actions),
        rewards=np.array(rewards),
        obs_names=env.obs_names,
    )


class RecordedEnvs:
    """Host environments that record the first episode of the first one.

    The recording holds the pictures of the suite, or observations where it has none.
    """

    def __init__(self, envs: HostEnvs, height: int = HEIGHT):
        """Record at most `height` pixels of pictures."""
        self._envs = envs
        self._height = height
        self.spec = envs.spec
        self.num_envs = envs.num_envs
        self.resets_in_step = envs.resets_in_step
        self.close = envs.close
        self.kill = envs.kill
        self.without_pictures = ""  # the reason why pictures are missing

    def reset(self) -> Any:
        obs = self._envs.reset()
        self._pictures: dict[int, Image.Image] = {}  # by step
        self._obs = [_first(obs)]
        self._actions = []
        self._rewards = []
        self._over = False
        try:
            self._pictures[0] = fitting(self._envs.frame(), height=self._height)
        # The suite has no renderer, or the renderer lacks something here: draw observations instead
        except Exception as error:
            self.without_pictures = f"{reason(error)}{place_in_code(error)}"
        return obs

    def step(self, action: Any) -> HostStep:
        out = self._envs.step(action)
        if not self._over:
            self._actions.append(_first(action))
            self._rewards.append(float(out.reward[0]))
            ended = bool(out.terminated[0] | out.truncated[0])
            self._over = ended or len(self._rewards) >= LONGEST_HORIZON
            shows_next_episode = ended and self.resets_in_step
            if not self._pictures:
                reached = out.obs if out.final_obs is None else out.final_obs
                self._obs.append(_first(reached))
            elif not shows_next_episode:
                self._keep_picture(len(self._rewards))
        return out

    def recording(self) -> Recording:
        """Return the episode as it is so far."""

        def newest(step: int) -> Image.Image:  # the last step may have no picture of its own
            drawn = [time for time in self._pictures if time <= step]
            return self._pictures[max(drawn)]

        return Recording(
            states=None,
            obs=_stacked(self._obs),
            actions=_stacked(self._actions),
            rewards=np.array(self._rewards),
            paint=newest if self._pictures else None,
            without_pictures=self.without_pictures,
            obs_names=getattr(self._envs, "obs_names", ()),
        )

    def _keep_picture(self, time: int) -> None:
        """Keep the picture of this time if it is due or the last, and drop those no longer due."""
        stride = frame_stride(time)
        if time % stride and not self._over:
            return
        try:
            self._pictures[time] = fitting(
                self._envs.frame(), like=self._pictures[0], height=self._height
            )
        # The simulation may be broken by now: the episode goes on without pictures
        except Exception as error:
            self.without_pictures = f"{reason(error)}{place_in_code(error)}"
        self._pictures = {
            step: picture
            for step, picture in self._pictures.items()
            if step % stride == 0 or step == time
        }


def _first(tree: Any) -> Any:
    """Part of the first environment, copied to the host."""
    return jax.tree.map(lambda x: np.array(x[0]), tree)


def _stacked(steps: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.stack(parts), *steps)


def draw_gif(
    env: Env | EnvSpec,
    recording: Recording,
    path: Path,
    warn: Callable[[str], None] = lambda text: None,
    height: int = HEIGHT,
) -> int:
    """Write an episode as a looping GIF, with the pictures of its suite or of its observations.

    Args:
      env: the environment in which the episode was played.
      recording: the episode.
      path: the file; an older one is replaced once the new one is complete.
      warn: called with a sentence if the suite draws no pictures here.
      height: most pixels of the height of the suite's pictures of a state.

    Returns:
      The number of frames.

    Raises:
      UsageError: the file cannot be written.
    """
    check_target(path)
    with replacing(path) as temporary:
        temporary.touch()  # fails before the work, not after it
        paint = _painter(env, recording, warn, height)
        length = len(recording.rewards)
        seconds = float(np.clip(TOTAL_SECONDS / length, *SECONDS_PER_STEP))
        steps, delays = timing(length, seconds)
        returns = np.cumsum([0.0, *recording.rewards])

        def frame(step: int) -> Image.Image:
            reward = f"{recording.rewards[step - 1] + 0.0:.3g}" if step else "-"
            numbers = [
                f"step {step} / {length}",
                f"reward {reward}",
                f"return {returns[step]:.4g}",
            ]
            return _with_caption(paint(step), numbers)

        stride = math.ceil(len(steps) / PALETTE_FRAMES)
        sample = [np.asarray(frame(step)) for step in steps[::stride]]
        stacked = Image.fromarray(np.concatenate(sample))
        palette = stacked.quantize(COLORS, Image.Quantize.FASTOCTREE)
        frames = [frame(step).quantize(palette=palette, dither=Image.Dither.NONE) for step in steps]
        frames[0].save(
            temporary,
            "GIF",
            save_all=True,
            append_images=frames[1:],
            duration=delays,
            loop=0,
            optimize=True,
        )
    return len(steps)


def _with_caption(picture: Image.Image, numbers: Sequence[str]) -> Image.Image:
    """Picture with a line of numbers below it, wide enough for the numbers."""
    width = max(picture.width, NARROWEST)
    image = Image.new("RGB", (width, picture.height + CAPTION), PAPER)
    image.paste(picture, ((width - picture.width) // 2, 0))
    canvas = ImageDraw.Draw(image)
    middle = picture.height + CAPTION / 2
    for column, text in zip(COLUMNS, numbers, strict=True):
        canvas.text((column * width, middle), text, INK, font(11), anchor="lm")
    return image


def timing(length: int, seconds: float) -> tuple[list[int], list[int]]:
    """Choose the frames of an episode, and how long each is shown.

    Args:
      length: the number of steps of the episode.
      seconds: the time that a step should take.

    Returns:
      The steps after which a frame is drawn, and the milliseconds that each frame is shown.
    """
    stride = frame_stride(length)
    steps = [*range(0, length, stride), length]
    delay = min(stride * seconds, max(seconds, LONGEST_DELAY))
    hundredths = round(100 * delay)  # the unit of a GIF
    milliseconds = max(SHORTEST_DELAY, 10 * hundredths)
    delays = [milliseconds] * (len(steps) - 1)
    return steps, [*delays, LAST_DELAY]


# --------------------------------------------------------------------------------------------------
# pictures of a step


def _painter(
    env: Env | EnvSpec, recording: Recording, warn: Callable[[str], None], height: int
) -> Paint:
    """Choose the first way to draw the episode that works here."""
    missing = f"some pictures of {env.name} are missing, and those before are shown"
    why = recording.without_pictures
    if recording.paint:
        if why:
            warn(f"{missing}: {why}")
        return recording.paint
    if isinstance(env, Env):
        try:
            pictures = _pictures_of_states(
                env, recording.states, lambda reason: warn(f"{missing}: {reason}"), height
            )
            if pictures is not None:
                return pictures
        except Exception as error:  # no graphics library, or a pole of length 0
            why = f"{reason(error)}{place_in_code(error)}"
    if why:
        warn(f"drawn from observations, as {env.name} shows no pictures here: {why}")
    return _paint_observations(env, recording, warn)


def _paint_observations(
    env: Env | EnvSpec, recording: Recording, warn: Callable[[str], None]
) -> Paint:
    """Paint maps, and all other numbers below them.

    A map that is the whole observation is drawn without actions and rewards.
    """

    def names_for(count: int) -> tuple[str, ...]:
        names = recording.obs_names
        if not names or len(names) == count:
            return names
        warn(
            f"obs_names of {env.name} are {len(names)}, for observations of {count}: drawn "
            "without them"
        )
        return ()

    leaves = spaces.leaves(env.observation_space, recording.obs)
    visible = [leaf for leaf in leaves if not is_mask(leaf[0])]
    maps = {name: values for name, _, values in visible if _is_map(values)}
    numbers = [leaf for leaf in visible if leaf[0] not in maps]
    if len(visible) == len(maps) == 1:
        (only,) = maps.values()
        return grid(only, names_for)
    grids = [grid(values, lambda count: (), title=name) for name, values in maps.items()]
    if len(grids) > MOST_MAPS:
        warn(f"only {MOST_MAPS} of {len(grids)} maps that {env.name} shows are drawn")
    groups = groups_of(recording, numbers, env.action_space, names_for)
    return below([*grids[:MOST_MAPS], paint_tracks(groups)])


def _is_map(values: np.ndarray) -> bool:
    """True for numbers [T + 1, H, W] or [T + 1, H, W, C] of at least 3 by 3 cells."""
    return values.ndim in (3, 4) and min(values.shape[1:3]) >= 3


def _pictures_of_states(
    env: Env, states: Any, warn: Callable[[str], None], height: int
) -> Paint | None:
    """Pictures by the suite's own renderer; None if it has none.

    An error of the renderer at the first picture is raised. At a later one `warn` is called, once,
    and the picture of an earlier step is shown instead.
    """

    def frame_at(step: int) -> Any:
        return env.frame(jax.tree.map(lambda x: jnp.asarray(x[step]), states))

    first = frame_at(0)
    if first is None:
        return None
    newest = fitting(first, height=height)
    warned = False
    begin = newest

    def paint(step: int) -> Image.Image:
        nonlocal newest, warned
        try:
            newest = fitting(frame_at(step), like=begin, height=height)
        except Exception as error:
            if not warned:
                warn(f"{reason(error)}{place_in_code(error)}")
            warned = True
        return newest

    return paint
