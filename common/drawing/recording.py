"""An episode of an environment on the device or on the host, recorded while it is played, to be drawn afterwards."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from common.device.agents import Player, Seen, at_start
from common.device.evaluation import episode_keys
from common.device.sharding import key_data
from common.drawing.pictures import Paint, fitting
from common.envs.environment import LONGEST_HORIZON, Env
from common.envs.host import HostEnvs, HostStep
from common.envs.suite_tools import reason

MAX_FRAMES = 500  # that are drawn
CHUNK = 256  # steps in one compiled call; an episode of images never lies on the device as a whole


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


def record(env: Env, player: Player | Callable, key: jax.Array, max_steps: int) -> Recording:
    """One episode of at most `max_steps` steps, by `player`, of whatever `Player.of` takes.

    It is the episode that `evaluation.play_episodes` plays with the same `key` and `player`.
    """
    player = Player.of(player)
    reset_key, *keys = episode_keys(key)
    advance = jax.jit(lambda time, carry: _advance(env, player, keys, time, carry))
    obs, state = jax.jit(env.reset)(reset_key)
    carry = at_start(jax.tree.map(lambda x: x[None], obs)), player.initial_memory(1), state
    first = jax.device_get(jax.tree.map(lambda x: x[None], (obs, key_data(env.without_numbers(state)))))
    chunks, over = [], False
    while not over:
        carry, chunk = advance(jnp.int32(CHUNK * len(chunks)), carry)
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


def _advance(env: Env, player: Player, keys: list[jax.Array], start: jax.Array, carry: Any) -> tuple[Any, _Chunk]:
    """`CHUNK` steps from step `start`, past the end of the episode where it comes."""

    def step(carry, time):
        seen, memory, state = carry
        step_key, act_key = (jax.random.fold_in(key, time) for key in keys)
        actions, memory = player.act(seen, memory, act_key[None])
        action = jax.tree.map(lambda x: x[0], actions)
        out = env.step(step_key, state, action)
        over = out.terminated | out.truncated
        chunk = _Chunk(key_data(env.without_numbers(out.final_state)), out.final_obs, action, out.reward, over)
        seen = jax.tree.map(lambda x: x[None], Seen(out.obs, over, out.reward))
        return (seen, memory, out.state), chunk

    return jax.lax.scan(step, carry, start + jnp.arange(CHUNK))


class RecordedEnvs:
    """The same environments; the first one's first episode is kept.

    Its pictures are those of its suite, made small. Where there are none, its observations are kept instead.
    """

    def __init__(self, envs: HostEnvs):
        self._envs, self.spec, self.num_envs = envs, envs.spec, envs.num_envs
        self.resets_in_step, self.close, self.kill = envs.resets_in_step, envs.close, envs.kill
        self.without_pictures = ""  # why there are none

    def reset(self) -> Any:
        obs = self._envs.reset()
        self._pictures: dict[int, Image.Image] = {}
        self._obs, self._actions, self._rewards, self._over = [_first(obs)], [], [], False
        try:
            self._keep_picture(self.frame())
            self._obs = []
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
            self._keep_what_it_led_to(out, ended)
        return out

    def frame(self) -> np.ndarray:
        return self._envs.frame()

    def recording(self) -> Recording:
        """The episode. Without pictures `paint` is None, with them `obs` is."""
        obs = _stacked(self._obs) if self._obs else None
        paint = self._pictures.__getitem__ if self._pictures else None
        return Recording(None, obs, _stacked(self._actions), np.array(self._rewards), paint)

    def _keep_what_it_led_to(self, out: HostStep, ended: bool) -> None:
        time, hidden = len(self._rewards), ended and self.resets_in_step  # behind the next episode's first picture
        if not self._pictures:
            self._obs.append(_first(out.obs if out.final_obs is None else out.final_obs))
        elif self._over or time % frame_stride(time) == 0:
            self._keep_picture(None if hidden else self._frame_if_it_works())

    def _frame_if_it_works(self) -> np.ndarray | None:
        """None of a world that is broken by now, say: the episode goes on without."""
        try:
            return self.frame()
        except Exception:
            return None

    def _keep_picture(self, frame: np.ndarray | None) -> None:
        """Add one, without a `frame` the last one again; those go that an episode of this length does without."""
        time, newest = len(self._rewards), self._pictures and self._pictures[max(self._pictures)]
        picture = newest if frame is None else fitting(frame)
        if newest and picture.size != newest.size:  # a GIF has one
            picture = picture.resize(newest.size)
        stride = frame_stride(time)
        self._pictures = {step: old for step, old in self._pictures.items() if step % stride == 0} | {time: picture}


def _first(tree: Any) -> Any:
    """The part of the first environment."""
    return jax.tree.map(lambda x: np.array(x[0]), tree)


def _stacked(steps: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.stack(parts), *steps)
