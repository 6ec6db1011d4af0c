"""Evaluation on the device: one episode in each of a fixed set of environments, all of them in parallel."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from common.device.agents import Player, Seen, at_start
from common.device.rollout import keys_of, reset_envs, step_envs
from common.envs.environment import Env

SEED = 20_250_101  # the same episodes for every run, seed and evaluation
OTHER_SEED = SEED + 10_000_000  # other episodes, for what was chosen by its return in those; suites count on from it


class Episodes(NamedTuple):
    """Outcome of each evaluation episode."""

    ret: jax.Array  # [E] sum of raw rewards
    length: jax.Array  # [E] steps
    fingerprint: jax.Array  # [E] of all observations and rewards: the same for episodes that are the same


class Evaluated(NamedTuple):
    """Episodes with the state that a run had at some step."""

    step: int
    episodes: Episodes  # [S, E], host arrays
    state: Any = None  # that state on the host, where the run may have gone on since


def episode_keys(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The keys of an episode that begins with `key`: of its reset, of its steps, and of the actions in them.

    Step number t folds t into the latter two. `fold_in(key, t)` itself is a key that the reset may split off `key` too.
    """
    return tuple(jax.random.split(key, 3))


def run_episodes(env: Env, player: Player | Callable, num_episodes: int, seed: int | jax.Array = SEED) -> Episodes:
    """Play this device's `num_episodes` episodes with `player`, of whatever `Player.of` takes.

    Initial states depend only on the `seed` and on the episode's global index, so that evaluations are comparable.
    """
    return play_episodes(env, player, keys_of(jax.random.key(seed), num_episodes))


def play_episodes(env: Env, player: Player | Callable, keys: jax.Array) -> Episodes:
    """One episode from each of `keys` [E], by `player`, of whatever `Player.of` takes.

    An episode ends at termination, at truncation or after `env.max_steps`.
    """
    player, num_episodes = Player.of(player), keys.shape[0]
    reset_keys, step_keys, act_keys = jax.vmap(episode_keys)(keys)
    obs, env_state = reset_envs(env, reset_keys)
    zeros = jnp.zeros(num_episodes)

    def unfinished(carry):
        time, *_, done, _ = carry
        return (time < env.max_steps) & ~jnp.all(done)

    def step(carry):
        time, env_state, seen, memory, done, episodes = carry
        action, memory = player.act(seen, memory, jax.vmap(jax.random.fold_in, (0, None))(act_keys, time))
        out = step_envs(env, jax.vmap(jax.random.fold_in, (0, None))(step_keys, time), env_state, action)
        episodes = Episodes(
            ret=episodes.ret + jnp.where(done, 0.0, out.reward),
            length=episodes.length + jnp.where(done, 0.0, 1.0),
            fingerprint=jnp.where(
                done, episodes.fingerprint, add_to_fingerprint(episodes.fingerprint, seen.obs, out.reward)
            ),
        )
        over = out.terminated | out.truncated
        return time + 1, out.state, Seen(out.obs, over, out.reward), memory, done | over, episodes

    memory = player.initial_memory(num_episodes)
    begun = Episodes(zeros, zeros, jnp.zeros(num_episodes, jnp.uint32))
    start = (jnp.int32(0), env_state, at_start(obs), memory, zeros > 0, begun)
    *_, episodes = jax.lax.while_loop(unfinished, step, start)
    return episodes


def add_to_fingerprint(fingerprint: jax.Array, obs: Any, reward: jax.Array) -> jax.Array:
    """The fingerprints [E] after one more step, from `obs` [E, ...] with `reward` [E].

    Every bit counts. Of 128 different episodes two have the same one with a chance of 2e-6.
    """
    for x in (*jax.tree.leaves(obs), reward):
        x = x.reshape(len(fingerprint), -1)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) if is_float else x.astype(jnp.uint32)
        places = _mixed(jnp.arange(bits.shape[1], dtype=jnp.uint32))
        fingerprint = _mixed(31 * fingerprint + jnp.sum(_mixed(bits + places), axis=1, dtype=jnp.uint32))
    return fingerprint


def _mixed(x: jax.Array) -> jax.Array:
    """Another number for every one of 32 bits, as if drawn at random: nullprogram.com/blog/2018/07/31."""
    x = (x ^ x >> 16) * jnp.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * jnp.uint32(0x846CA68B)
    return x ^ x >> 16
