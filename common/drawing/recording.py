"""An episode of an environment on the device, kept with its states, to be drawn afterwards."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.device.evaluation import episode_keys
from common.device.sharding import key_data
from common.envs.environment import Env

CHUNK = 256  # steps in one compiled call; an episode of images never lies on the device as a whole


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
    reset_key, *keys = episode_keys(key)
    advance = jax.jit(lambda time, obs, state: _advance(env, act, keys, time, obs, state))
    obs, state = jax.jit(env.reset)(reset_key)
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


def _advance(env: Env, act: Callable, keys: list[jax.Array], start: jax.Array, obs: jax.Array, state: Any):
    """`CHUNK` steps from step `start`, past the end of the episode where it comes: (obs, state, _Chunk)."""

    def step(carry, time):
        obs, state = carry
        step_key, act_key = (jax.random.fold_in(key, time) for key in keys)
        action = act(obs[None], act_key)[0]
        out = env.step(step_key, state, action)
        over = out.terminated | out.truncated
        return (out.obs, out.state), _Chunk(key_data(out.final_state), out.final_obs, action, out.reward, over)

    (obs, state), chunk = jax.lax.scan(step, (obs, state), start + jnp.arange(CHUNK))
    return obs, state, chunk
