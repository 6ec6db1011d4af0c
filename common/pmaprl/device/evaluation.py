"""Evaluation on the device: one episode in each of a fixed set of environments, all of them in
parallel.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.device.agents import Player, PolicyInput, at_start
from pmaprl.device.rollout import keys_of, step_envs
from pmaprl.device.statistics import Episodes
from pmaprl.envs.environment import Env
from pmaprl.envs.masks import NO_LEGAL_ACTION, nothing_legal
from pmaprl.envs.ranges import OUTSIDE, in_space

SEED = 20_250_101  # the same episodes for every run, seed and evaluation


def episode_keys(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The keys of an episode that begins with `key`: of its reset, of its steps, and of the actions
    in them.

    Step number t folds t into the latter two. `fold_in(key, t)` itself is a key that the reset may
    split off `key` too.
    """
    return tuple(jax.random.split(key, 3))


def run_episodes(
    env: Env, player: Player | Callable, num_episodes: int, seed: int | jax.Array = SEED
) -> Episodes:
    """This device's `num_episodes` episodes: how each begins depends on the `seed` and on its
    global index only.
    """
    return play_episodes(env, player, keys_of(jax.random.key(seed), num_episodes))


def play_episodes(env: Env, player: Player | Callable, keys: jax.Array) -> Episodes:
    """One episode from each of `keys` [E], by `player`, of whatever `Player.of` takes; of
    `env.max_steps` at most.

    The length of an episode is NaN where the player had to act without a legal action, and infinite
    where it was shown what its space rules out, see `fault_of`.
    """
    player = Player.of(player)
    num_episodes = keys.shape[0]
    reset_keys, step_keys, act_keys = jax.vmap(episode_keys)(keys)
    obs, env_state = jax.vmap(env.reset)(reset_keys)
    zeros = jnp.zeros(num_episodes)

    def unfinished(carry):
        time, *_, done, _ = carry
        return (time < env.max_steps) & ~jnp.all(done)

    def step(carry):
        time, env_state, seen, memory, done, episodes = carry
        action, memory = player.act(
            seen, memory, jax.vmap(jax.random.fold_in, (0, None))(act_keys, time)
        )
        out = step_envs(
            env, jax.vmap(jax.random.fold_in, (0, None))(step_keys, time), env_state, action
        )
        counted = jnp.where(nothing_legal(seen.obs, env.action_space), jnp.nan, 1.0)
        counted = jnp.where(in_space(seen.obs, env.observation_space), counted, jnp.inf)
        earned = Episodes(jnp.where(done, 0.0, out.reward), jnp.where(done, 0.0, counted))
        episodes = jax.tree.map(jnp.add, episodes, earned)
        over = out.terminated | out.truncated
        return (
            time + 1,
            out.state,
            PolicyInput(out.obs, over, out.reward),
            memory,
            done | over,
            episodes,
        )

    memory = player.initial_memory(num_episodes)
    start = (jnp.int32(0), env_state, at_start(obs), memory, zeros > 0, Episodes(zeros, zeros))
    *_, episodes = jax.lax.while_loop(unfinished, step, start)
    return episodes


def fault_of(episodes: Episodes) -> str:
    """Say why the `episodes`, host arrays, do not count, for the end of a sentence on their
    environment; else "".
    """
    if np.isnan(episodes.length).any():
        return NO_LEGAL_ACTION
    return OUTSIDE if np.isinf(episodes.length).any() else ""
