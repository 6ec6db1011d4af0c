"""Many environments side by side: their resets, and steps after which those whose episodes ended begin anew."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from common.device.filling import fill_in
from common.device.sampling import keys_of, split_keys
from common.device.sharding import AXIS, gathered
from common.envs.environment import DEFAULT_HORIZON, Env, Step, select
from common.envs.masks import legal_actions, sample_legal

Starts = tuple[Any, Any]  # observations and states at the beginning of episodes, arrays [P, ...]


def step_envs(env: Env, keys: jax.Array, states: Any, actions: Any, starts: Starts | None = None) -> Step:
    """One step of N environments, each with its own of `keys` [N], as `Env.step` makes it.

    Only environments whose episodes ended do a reset, with the keys that `Env.step` would give them; or they take one
    of `starts`, where those are given.
    """
    sooner_done = env.cheap_reset and jax.default_backend() != "cpu"
    if env.resets_itself or (sooner_done and starts is None):
        return jax.vmap(env.step)(keys, states, actions)
    advance_keys, reset_keys = split_keys(keys, 2)
    reached = jax.vmap(env.advance_checked)(advance_keys, states, actions)

    def begun(index):
        if starts is None:
            return jax.vmap(env.reset)(reset_keys[index])
        chosen = jax.vmap(lambda key: jax.random.randint(key, (), 0, num_starts(starts)))(reset_keys[index])
        return jax.tree.map(lambda x: x[chosen], starts)

    over = reached.terminated | reached.truncated
    obs, state = fill_in((reached.obs, reached.state), over, width=math.isqrt(over.size), compute=begun)
    outcome = reached.reward, reached.terminated, reached.truncated
    return Step(obs, state, *outcome, reached.obs, reached.state, reached.objective, reached.info)


def reset_envs(env: Env, keys: jax.Array, mid_episode: bool = False) -> tuple[Any, Any]:
    """First observations and states of N environments, each from its own of `keys` [N].

    With `mid_episode` at random phases of an episode: after up to one horizon of random actions.
    """
    if not mid_episode:
        return jax.vmap(env.reset)(keys)
    reset_keys, phase_keys, walk_keys = split_keys(keys, 3)
    longest = min(env.max_steps, DEFAULT_HORIZON)
    steps = jax.vmap(lambda key: jax.random.randint(key, (), 0, longest))(phase_keys)  # [N]

    def random_action(key, obs):
        return sample_legal(key, env.action_space, legal_actions(obs))

    def walk(step, carry):
        obs, states = carry
        action_keys, step_keys = split_keys(jax.vmap(jax.random.fold_in, (0, None))(walk_keys, step), 2)
        out = step_envs(env, step_keys, states, jax.vmap(random_action)(action_keys, obs))
        return jax.vmap(select)(step < steps, (out.obs, out.state), carry)

    return jax.lax.fori_loop(0, jnp.max(steps), walk, jax.vmap(env.reset)(reset_keys))


def new_starts(env: Env, key: jax.Array, count: int) -> Starts | None:
    """`count` beginnings of episodes, the same on every device, each of which makes its share.

    None where `count` is 0.
    """
    if not count:
        return None
    share = jax.vmap(env.reset)(keys_of(key, -(-count // jax.lax.axis_size(AXIS))))
    return jax.tree.map(lambda x: gathered(x)[:count], share)


def num_starts(starts: Starts) -> int:
    return jax.tree.leaves(starts)[0].shape[0]
