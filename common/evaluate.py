"""Evaluation on the device: one episode in each of a fixed set of environments, all of them in parallel."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from common.envs import Env
from common.sampling import keys_of

SEED = 20_250_101  # the same episodes for every run, seed and evaluation


class Episodes(NamedTuple):
    """Outcome of each evaluation episode."""

    ret: jax.Array  # [E] sum of raw rewards
    length: jax.Array  # [E] steps


def run_episodes(env: Env, policy: Callable[[jax.Array], jax.Array], num_episodes: int) -> Episodes:
    """Play this device's `num_episodes` episodes with `policy`: observations [E, ...] to actions [E, ...].

    An episode ends at termination, at truncation or after `env.max_steps`. Initial states depend only on the episode's
    global index, so that evaluations are comparable.
    """
    root = jax.random.key(SEED)
    keys = keys_of(root, num_episodes)
    obs, env_state = jax.vmap(env.reset)(keys)
    zeros = jnp.zeros(num_episodes)

    def unfinished(carry):
        time, _, _, done, _ = carry
        return (time < env.max_steps) & ~jnp.all(done)

    def step(carry):
        time, env_state, obs, done, episodes = carry
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, time)
        out = jax.vmap(env.step)(step_keys, env_state, policy(obs))
        episodes = Episodes(
            ret=episodes.ret + jnp.where(done, 0.0, out.reward), length=episodes.length + jnp.where(done, 0.0, 1.0)
        )
        return time + 1, out.state, out.obs, done | out.terminated | out.truncated, episodes

    start = (jnp.int32(0), env_state, obs, zeros > 0, Episodes(zeros, zeros))
    *_, episodes = jax.lax.while_loop(unfinished, step, start)
    return episodes
