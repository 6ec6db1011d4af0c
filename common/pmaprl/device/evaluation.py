"""Evaluation on the device: one episode in each of a fixed set of environments, all in parallel."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmaprl.device.agents import Player
from pmaprl.device.episodes import Episodes
from pmaprl.device.interface import PolicyInput
from pmaprl.device.keys import keys_of
from pmaprl.device.rollout import step_envs
from pmaprl.envs.environment import Env
from pmaprl.envs.masks import NO_LEGAL_ACTION, nothing_legal
from pmaprl.envs.ranges import OUTSIDE, in_space

SEED = 20_250_101  # the same episodes for every run, seed and evaluation


def episode_keys(key: Array) -> tuple[Array, Array, Array]:
    """Split the key of an episode into those of its reset, of its steps and of its actions.

    Step number t folds t into the latter two. `fold_in(key, t)` itself would be a key that the
    reset may split off `key` too.
    """
    reset_key, step_key, act_key = jax.random.split(key, 3)
    return reset_key, step_key, act_key


def run_episodes(
    env: Env,
    player: Player | Callable,
    num_episodes: int,
    seed: int | Array = SEED,
) -> Episodes:
    """Play this device's `num_episodes` episodes.

    The beginning of an episode depends on the `seed` and on its global index only.
    """
    return play_episodes(env, player, keys_of(jax.random.key(seed), num_episodes))


def play_episodes(
    env: Env,
    player: Player | Callable,
    keys: Array,
) -> Episodes:
    """Play one episode from each key, of at most `env.max_steps` steps.

    Args:
        env: the environment.
        player: anything that `Player.of` takes.
        keys: [J] keys.

    Returns:
        Returns and lengths [J]. A length is NaN if the player had to act without a legal action,
        and infinite if an observation was outside of its space (see `fault_of`).
    """
    player = Player.of(player)
    num_episodes = keys.shape[0]
    reset_keys, step_keys, act_keys = jax.vmap(episode_keys)(keys)
    obs, env_state = jax.vmap(env.reset)(reset_keys)
    zeros = jnp.zeros(num_episodes)
    fold = jax.vmap(jax.random.fold_in, (0, None))

    def unfinished(carry):
        time, *_, done, _ = carry
        return (time < env.max_steps) & ~jnp.all(done)

    def step(carry):
        time, env_state, seen, memory, done, episodes = carry
        action, memory = player.act(seen, memory, fold(act_keys, time))
        out = step_envs(env, fold(step_keys, time), env_state, action)
        one_step = jnp.where(nothing_legal(seen.obs, env.action_space), jnp.nan, 1.0)
        one_step = jnp.where(in_space(seen.obs, env.observation_space), one_step, jnp.inf)
        earned = Episodes(
            ret=jnp.where(done, 0.0, out.reward),
            length=jnp.where(done, 0.0, one_step),
        )
        episodes = jax.tree.map(jnp.add, episodes, earned)
        over = out.terminated | out.truncated
        seen = PolicyInput(
            obs=out.obs,
            first=over,
            reward=out.reward,
        )
        return time + 1, out.state, seen, memory, done | over, episodes

    memory = player.initial_memory(num_episodes)
    episodes = Episodes(ret=zeros, length=zeros)
    none_done = jnp.zeros(num_episodes, bool)
    start = (jnp.int32(0), env_state, PolicyInput.at_start(obs), memory, none_done, episodes)
    *_, episodes = jax.lax.while_loop(unfinished, step, start)
    return episodes


def fault_of(episodes: Episodes) -> str:
    """Explain why episodes do not count, as the end of a sentence on their environment.

    `episodes` are host arrays. The text is empty if they count.
    """
    if np.isnan(episodes.length).any():
        return NO_LEGAL_ACTION
    return OUTSIDE if np.isinf(episodes.length).any() else ""
