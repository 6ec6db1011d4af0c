"""An episode of an environment on the device or on the host, recorded while it is played, to be drawn afterwards."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image

from common.device.agents import Player, Seen, at_start
from common.device.evaluation import episode_keys
from common.device.sharding import key_data
from common.drawing.scenes import HEIGHT, WIDTH
from common.envs.environment import LONGEST_HORIZON, Env
from common.envs.host import HostEnvs, HostStep
from common.envs.suite_tools import reason

Paint = Callable[[int], Image.Image]  # the picture after so many steps of an episode
MAX_FRAMES = 500  # that are drawn


class Recording(NamedTuple):
    """One episode, host arrays with a leading time axis: T steps, T + 1 states and observations.

    The last observation is the true final one. So is the last state where the environment can tell it; environments
    that only know their state after the reset repeat the one before.
    """

    states: Any  # environment states [T + 1, ...], typed keys as their data
    obs: Any  # observations [T + 1, ...]
    actions: Any  # [T, ...] as the policy gave them
    rewards: np.ndarray  # [T]
    paint: Paint | None = None  # the pictures, where they were drawn while it was played


def frame_stride(steps: int) -> int:
    """How many steps lie between two frames of an episode of `steps`: a power of two.

    While an episode goes on, it is only ever doubled: the frames that are needed in the end have all been kept.
    """
    stride = 1
    while stride * (MAX_FRAMES - 1) < steps:
        stride *= 2
    return stride


class _Step(NamedTuple):
    """What one step has led to."""

    state: Any  # without reset
    obs: jax.Array  # without reset
    action: jax.Array
    reward: jax.Array
    done: jax.Array


def record(env: Env, player: Player | Callable, key: jax.Array, max_steps: int) -> Recording:
    """One episode of at most `max_steps` steps, by `player`, of whatever `Player.of` takes.

    It is the episode that `evaluation.play_episodes` plays with the same `key` and `player`.
    """
    player = Player.of(player)
    reset_key, *keys = episode_keys(key)

    @jax.jit
    def advance(time: jax.Array, seen: Seen, memory: Any, state: Any) -> tuple[_Step, Seen, Any, Any]:
        step_key, act_key = (jax.random.fold_in(key, time) for key in keys)
        actions, memory = player.act(seen, memory, act_key[None])
        action = jax.tree.map(lambda x: x[0], actions)
        out = env.step(step_key, state, action)
        over = out.terminated | out.truncated
        step = _Step(key_data(env.without_numbers(out.final_state)), out.final_obs, action, out.reward, over)
        return step, jax.tree.map(lambda x: x[None], Seen(out.obs, over, out.reward)), memory, out.state

    obs, state = jax.jit(env.reset)(reset_key)
    first_state, first_obs = jax.device_get((key_data(env.without_numbers(state)), obs))
    seen, memory, steps = at_start(jax.tree.map(lambda x: x[None], obs)), player.initial_memory(1), []
    while len(steps) < max_steps and not (steps and steps[-1].done):
        step, seen, memory, state = advance(len(steps), seen, memory, state)
        steps.append(jax.device_get(step))  # an episode of images never lies on the device as a whole
    states, obs = [first_state, *(step.state for step in steps)], [first_obs, *(step.obs for step in steps)]
    return Recording(
        _stacked(states), _stacked(obs), _stacked([step.action for step in steps]), np.array([s.reward for s in steps])
    )


class RecordedEnvs:
    """The same environments; the first one's first episode is kept: pictures of its suite, else observations."""

    def __init__(self, envs: HostEnvs):
        self._envs, self.spec, self.num_envs = envs, envs.spec, envs.num_envs
        self.resets_in_step, self.close, self.kill = envs.resets_in_step, envs.close, envs.kill
        self.without_pictures = ""  # why there are none

    def reset(self) -> Any:
        obs = self._envs.reset()
        self._pictures: dict[int, Image.Image] = {}  # by step
        self._obs, self._actions, self._rewards, self._over = [_first(obs)], [], [], False
        try:
            self._pictures[0] = fitting(self._envs.frame())
        except Exception as error:  # no renderer, or one that lacks something here: there is another way to draw it
            self.without_pictures = reason(error)
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
        """The episode. Without pictures `paint` is None."""
        paint = self._picture if self._pictures else None
        return Recording(None, _stacked(self._obs), _stacked(self._actions), np.array(self._rewards), paint)

    def _keep_picture(self, time: int) -> None:
        """Add one where it is needed or the last; those go that an episode of this length does without."""
        stride = frame_stride(time)
        if time % stride and not self._over:
            return
        with suppress(Exception):  # of a world that is broken by now, say: the episode goes on without
            self._pictures[time] = fitting(self._envs.frame())
        self._pictures = {step: x for step, x in self._pictures.items() if step % stride == 0 or step == time}

    def _picture(self, step: int) -> Image.Image:
        """The newest one of that time; the last step of an episode may have none."""
        return self._pictures[max(time for time in self._pictures if time <= step)]


def fitting(frame: np.ndarray) -> Image.Image:
    """A frame [H, W, 3] in bytes as large or as small as other pictures, by a whole number of times."""
    picture = Image.fromarray(frame)
    scale = min(WIDTH / picture.width, HEIGHT / picture.height)
    if scale >= 2:
        return picture.resize((int(scale) * picture.width, int(scale) * picture.height), Image.Resampling.NEAREST)
    return picture.reduce(math.ceil(1 / scale)) if scale < 1 else picture


def _first(tree: Any) -> Any:
    """The part of the first environment."""
    return jax.tree.map(lambda x: np.array(x[0]), tree)


def _stacked(steps: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.stack(parts), *steps)
