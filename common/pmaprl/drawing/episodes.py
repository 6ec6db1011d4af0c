"""An episode as a GIF: `recording = record(env, act, key, env.max_steps)`, then `draw_gif(env,
recording, path)`.

It is recorded while it is played, on the device or on the host, and drawn afterwards: by its suite,
or from its observations. No display is needed.
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
from pmaprl.device.agents import Player, PolicyInput, at_start
from pmaprl.device.evaluation import episode_keys
from pmaprl.device.sharding import key_data
from pmaprl.drawing.pictures import INK, PAPER, Paint, below, fitting, font, grid
from pmaprl.drawing.tracks import groups_of, paint_tracks
from pmaprl.envs import spaces
from pmaprl.envs.environment import LONGEST_HORIZON, Env
from pmaprl.envs.host import HostEnvs, HostStep
from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import EnvSpec
from pmaprl.envs.suite_tools import place_in_code, reason

MOST_MAPS = 3  # of an observation that are drawn
MAX_FRAMES = 500  # that are drawn
# Seconds between frames that leave out steps: a longer episode plays faster than it was
LONGEST_DELAY = 0.1
LAST_DELAY = 1_000  # milliseconds for which the end is shown before the loop begins again
CAPTION = 24  # pixels: height of the line of numbers, and width that they need
NARROWEST = 280
COLORS = 127  # of a GIF, and one more for what stays as it is


class Recording(NamedTuple):
    """One episode, host arrays with a leading time axis: T steps, T + 1 states and observations.

    The last observation is the true final one. So is the last state where the environment can tell
    it; environments that only know their state after the reset repeat the one before.
    """

    states: Any  # environment states [T + 1, ...], typed keys as their data
    obs: Any  # observations [T + 1, ...]
    actions: Any  # [T, ...] as the policy gave them
    rewards: np.ndarray  # [T]
    paint: Paint | None = None  # the pictures, where they were drawn while it was played
    without_pictures: str = ""  # the reason why they were not, where they should have been
    # Of the numbers of an observation, or of its channels, where they are known
    obs_names: tuple[str, ...] = ()


def frame_stride(steps: int) -> int:
    """How many steps lie between two frames of an episode of `steps`: a power of two.

    While an episode goes on, it is only ever doubled: the frames that are needed in the end have
    all been kept.
    """
    return 2 ** max(math.ceil(math.log2(steps / (MAX_FRAMES - 1))), 0) if steps else 1


def record(env: Env, player: Player | Callable, key: jax.Array, max_steps: int) -> Recording:
    """One episode of at most `max_steps` steps, by `player`, of whatever `Player.of` takes.

    It is the episode that `evaluation.play_episodes` plays with the same `key` and `player`.
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
        return (
            reached,
            jax.tree.map(lambda x: x[None], PolicyInput(out.obs, over, out.reward)),
            memory,
            out.state,
        )

    obs, state = jax.jit(env.reset)(reset_key)
    first = jax.device_get((key_data(state), obs))
    seen = at_start(jax.tree.map(lambda x: x[None], obs))
    memory = player.initial_memory(1)
    steps = []
    over = False
    while len(steps) < max_steps and not over:
        reached, seen, memory, state = advance(len(steps), seen, memory, state)
        # An episode of images never lies on the device as a whole
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
    """The same environments; the first one's first episode is kept: pictures of its suite, else
    observations.
    """

    def __init__(self, envs: HostEnvs):
        self._envs = envs
        self.spec = envs.spec
        self.num_envs = envs.num_envs
        self.resets_in_step = envs.resets_in_step
        self.close = envs.close
        self.kill = envs.kill
        self.without_pictures = ""  # why there are none

    def reset(self) -> Any:
        obs = self._envs.reset()
        self._pictures: dict[int, Image.Image] = {}  # by step
        self._obs = [_first(obs)]
        self._actions = []
        self._rewards = []
        self._over = False
        try:
            self._pictures[0] = fitting(self._envs.frame())
        # No renderer, or one that lacks something here: there is another way to draw it
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
            if not self._pictures:
                self._obs.append(_first(out.obs if out.final_obs is None else out.final_obs))
            elif not (ended and self.resets_in_step):  # which shows the next episode already
                self._keep_picture(len(self._rewards))
        return out

    def recording(self) -> Recording:
        """The episode."""

        def newest(step: int) -> Image.Image:  # the last step may have none of its own
            return self._pictures[max(time for time in self._pictures if time <= step)]

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
        """Add one where it is needed or the last; those go that an episode of this length does
        without.
        """
        stride = frame_stride(time)
        if time % stride and not self._over:
            return
        try:
            self._pictures[time] = fitting(self._envs.frame(), like=self._pictures[0])
        # Of a world that is broken by now, say: the episode goes on without
        except Exception as error:
            self.without_pictures = f"{reason(error)}{place_in_code(error)}"
        self._pictures = {
            step: x for step, x in self._pictures.items() if step % stride == 0 or step == time
        }


def _first(tree: Any) -> Any:
    """The part of the first environment."""
    return jax.tree.map(lambda x: np.array(x[0]), tree)


def _stacked(steps: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.stack(parts), *steps)


def draw_gif(
    env: Env | EnvSpec,
    recording: Recording,
    path: Path,
    warn: Callable[[str], None] = lambda text: None,
) -> int:
    """Write an episode as a looping GIF, by the pictures of its suite, else by its observations.

    Args:
      env: the environment that it was played in.
      recording: the episode.
      path: the file; one that is there already is replaced when the new one is whole.
      warn: gets a sentence where the suite shows no pictures here.

    Returns:
      The number of frames.

    Raises:
      UsageError: the file cannot be written.
    """
    check_target(path)
    with replacing(path) as temporary:
        temporary.touch()  # fails before the work, not after it
        paint = _painter(env, recording, warn)
        length = len(recording.rewards)
        steps, delays = timing(length, seconds=float(np.clip(8 / length, 0.02, 0.3)))  # 8 in all
        returns = np.cumsum([0.0, *recording.rewards])

        def frame(step: int) -> Image.Image:
            picture = paint(step)
            reward = f"{recording.rewards[step - 1]:.3g}" if step else "-"
            image = Image.new(
                "RGB", (max(picture.width, NARROWEST), picture.height + CAPTION), PAPER
            )
            image.paste(picture, ((image.width - picture.width) // 2, 0))
            numbers = f"step {step} / {length}", f"reward {reward}", f"return {returns[step]:.4g}"
            for place, text in zip((0.02, 0.38, 0.7), numbers, strict=True):
                at = place * image.width, picture.height + CAPTION / 2
                ImageDraw.Draw(image).text(at, text, INK, font(11), anchor="lm")
            return image

        sample = np.concatenate(
            [np.asarray(frame(step)) for step in steps[:: -(-len(steps) // 16)]]
        )
        palette = Image.fromarray(sample).quantize(COLORS, Image.Quantize.FASTOCTREE)
        first, *others = (
            frame(step).quantize(palette=palette, dither=Image.Dither.NONE) for step in steps
        )
        first.save(
            temporary,
            "GIF",
            save_all=True,
            append_images=others,
            duration=delays,
            loop=0,
            optimize=True,
        )
    return len(steps)


def timing(length: int, seconds: float) -> tuple[list[int], list[int]]:
    """After which steps of an episode a frame is drawn, and for how many milliseconds each is
    shown.
    """
    stride = frame_stride(length)
    steps = [*range(0, length, stride), length]
    delay = min(stride * seconds, max(seconds, LONGEST_DELAY))
    # A GIF counts hundredths of a second, and browsers take one of them for ten
    delays = [max(20, 10 * round(100 * delay))] * len(steps)
    return steps, [*delays[:-1], LAST_DELAY]


# --------------------------------------------------------------------------------------------------
# pictures of a step


def _painter(env: Env | EnvSpec, recording: Recording, warn: Callable[[str], None]) -> Paint:
    """How the episode is drawn, by the first way that works here."""
    missing = f"some pictures of {env.name} are missing, and those before are shown"
    why = recording.without_pictures
    if recording.paint:
        if why:
            warn(f"{missing}: {why}")
        return recording.paint
    if isinstance(env, Env):
        try:
            if shown := _pictures_of_states(
                env, recording.states, lambda why: warn(f"{missing}: {why}")
            ):
                return shown
        except Exception as error:  # no graphics library, or a pole of length 0
            why = f"{reason(error)}{place_in_code(error)}"
    if why:
        warn(f"drawn from observations, as {env.name} shows no pictures here: {why}")
    return _paint_observations(env, recording, warn)


def _paint_observations(
    env: Env | EnvSpec, recording: Recording, warn: Callable[[str], None]
) -> Paint:
    """Pictures of maps, and of all other numbers below them; of a map that is alone without actions
    and rewards.
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

    seen = [x for x in spaces.leaves(env.observation_space, recording.obs) if not is_mask(x[0])]
    maps = {name: x for name, _, x in seen if x.ndim in (3, 4) and min(x.shape[1:3]) >= 3}
    numbers = [x for x in seen if x[0] not in maps]
    if len(seen) == len(maps) == 1:
        return grid(*maps.values(), names_for)
    grids = [grid(x, lambda count: (), title=name) for name, x in maps.items()]
    if len(grids) > MOST_MAPS:
        warn(f"only {MOST_MAPS} of {len(grids)} maps that {env.name} shows are drawn")
    tracks = paint_tracks(groups_of(recording, numbers, env.action_space, names_for))
    return below([*grids[:MOST_MAPS], tracks])


def _pictures_of_states(env: Env, states: Any, warn: Callable[[str], None]) -> Paint | None:
    """Pictures by the suite's own renderer; None where it has none. Raises what the renderer raises
    at first.

    Later it costs a picture, which `warn` is told once: that of a step before takes its place.
    """

    def frame_at(step: int) -> Any:
        return env.frame(jax.tree.map(lambda x: jnp.asarray(x[step]), states))

    first = frame_at(0)
    if first is None:
        return None
    newest = fitting(first)
    warned = False
    begin = newest

    def paint(step: int) -> Image.Image:
        nonlocal newest, warned
        try:
            newest = fitting(frame_at(step), like=begin)
        except Exception as error:
            if not warned:
                warn(f"{reason(error)}{place_in_code(error)}")
            warned = True
        return newest

    return paint
