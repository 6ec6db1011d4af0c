"""An episode of an environment on the device, kept with its states, to be drawn afterwards."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.device.evaluation import episode_keys
from common.device.memory import Player, Seen, at_start
from common.device.sharding import key_data
from common.drawing.canvas import Paint
from common.envs.environment import Env

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
