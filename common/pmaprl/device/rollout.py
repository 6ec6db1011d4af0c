"""Many environments side by side: steps and resets."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pmaprl.device.keys import keys_of, split_keys
from pmaprl.device.sharding import AXIS, gathered
from pmaprl.envs.environment import DEFAULT_HORIZON, Env, Step, select
from pmaprl.envs.masks import legal_actions
from pmaprl.envs.spaces import sample
from pmaprl.machine.devices import size_of

Beginnings = tuple[Any, Any]
"""Observations and states where episodes begin: [R, ...] to draw from, or one each [N, ...]."""


class StepKeys(NamedTuple):
    """Keys of steps, split as `Env.step` splits them."""

    advance: Array
    reset: Array


def step_envs(
    env: Env,
    keys: Array | StepKeys,
    states: Any,
    actions: Any,
    starts: Beginnings | None = None,
    resets: Beginnings | None = None,
) -> Step:
    """Step N environments once, and reset those whose episodes ended.

    Args:
        env: the environment.
        keys: [N] keys of the step, or the same keys split by `keys_of_steps`. A reset takes the key
            that `Env.step` would give it.
        states: [N, ...] states of the environments.
        actions: [N, ...] actions as the environment takes them.
        starts: [R, ...] beginnings of episodes: a reset draws one of them, and makes none.
        resets: [N, ...] the beginning that each environment takes if it is reset in this step.

    Returns:
        The outcome [N, ...], as `Env.step` makes it.
    """
    keys = keys_of_steps(env, keys, starts, resets)
    if not isinstance(keys, StepKeys):
        return jax.vmap(env.step)(keys, states, actions)
    reached = jax.vmap(env.advance_checked)(keys.advance, states, actions)
    unreset = reached.obs, reached.state
    over = reached.terminated | reached.truncated
    if resets is not None:
        obs, state = jax.vmap(select)(over, resets, unreset)
        return reached.continued(obs, state)

    def new_episodes(index: Array) -> Beginnings:
        if starts is None:
            return jax.vmap(env.reset)(keys.reset[index])
        count = jax.tree.leaves(starts)[0].shape[0]
        chosen = jax.vmap(lambda key: jax.random.randint(key, (), 0, count))(keys.reset[index])
        return jax.tree.map(lambda x: x[chosen], starts)

    # Few resets a step: neither many turns of the loop, nor many resets that nobody needs
    width = math.isqrt(over.size)
    obs, state = compute_where(unreset, over, width=width, compute=new_episodes)
    return reached.continued(obs, state)


def keys_of_steps(
    env: Env,
    keys: Array | StepKeys,
    starts: Beginnings | None,
    resets: Beginnings | None,
) -> Array | StepKeys:
    """Split keys of any shape as `step_envs` needs them.

    Call this before a loop over steps, to split the keys of all steps in one pass. Keys stay whole
    if `Env.step` takes whole keys. Keys that are split already stay as they are.
    """
    is_given = starts is not None or resets is not None
    is_whole = env.resets_itself or (resets_at_once(env) and not is_given)
    if is_whole or isinstance(keys, StepKeys):
        return keys
    advance, reset = split_keys(keys, 2)
    return StepKeys(advance, reset)


def resets_at_once(env: Env) -> bool:
    """True if every step resets every environment: cheaper than finding out who needs it."""
    return env.cheap_reset and jax.default_backend() != "cpu"


SMALL_RESET = 128  # bytes of an environment's state and observation


def resets_of_steps(env: Env, keys: Array) -> Beginnings | None:
    """Compute the reset of every step in one pass.

    Args:
        env: the environment.
        keys: [T, N] keys of the steps.

    Returns:
        Observations and states [T, N, ...]; None if that would be large, or of no use.
    """
    if env.resets_itself or not resets_at_once(env):
        return None
    if size_of(jax.eval_shape(env.reset, keys[0, 0])) > SMALL_RESET:
        return None
    reset_keys = split_keys(keys, 2)[1]
    return jax.vmap(jax.vmap(env.reset))(reset_keys)


def reset_mid_episode(env: Env, keys: Array) -> tuple[Any, Any]:
    """Reset N environments, and let each make up to a horizon of random steps.

    Args:
        env: the environment.
        keys: [N] keys, one for each environment.

    Returns:
        Observations and states [N, ...] in the middle of episodes.
    """
    reset_keys, phase_keys, walk_keys = split_keys(keys, 3)
    longest = min(env.max_steps, DEFAULT_HORIZON)
    steps = jax.vmap(lambda key: jax.random.randint(key, (), 0, longest))(phase_keys)  # [N]
    fold = jax.vmap(jax.random.fold_in, (0, None))

    def random_action(key, obs):
        return sample(key, env.action_space, legal_actions(obs))

    def walk(step, carry):
        obs, states = carry
        action_keys, step_keys = split_keys(fold(walk_keys, step), 2)
        actions = jax.vmap(random_action)(action_keys, obs)
        out = step_envs(env, step_keys, states, actions)
        return jax.vmap(select)(step < steps, (out.obs, out.state), carry)

    num_steps = jnp.max(steps)
    return jax.lax.fori_loop(0, num_steps, walk, jax.vmap(env.reset)(reset_keys))


def new_starts(
    env: Env,
    key: Array,
    count: int,
) -> Beginnings | None:
    """Make `count` beginnings of episodes, the same on every device; None if `count` is 0.

    Each device makes an equal share of them.
    """
    if not count:
        return None
    share = -(-count // jax.lax.axis_size(AXIS))
    starts = jax.vmap(env.reset)(keys_of(key, share))
    return jax.tree.map(lambda x: gathered(x)[:count], starts)


def compute_where(
    values: Any,
    missing: Array,
    width: int,
    compute: Callable[[Array], Any],
) -> Any:
    """Fill in the values that are missing, and compute no others.

    This holds under `vmap` too, where a `cond` would compute everything.

    Args:
        values: tree of arrays [B, ...].
        missing: [B] bool.
        width: number of values to compute at a time.
        compute: computes the values [width, ...] at given indices [width]. The index B fills up a
            short list, and its value is dropped.

    Returns:
        The tree, without missing values.
    """

    def fill_some(carry):
        values, missing = carry
        (index,) = jnp.nonzero(missing, size=width, fill_value=missing.size)
        computed = compute(index)
        values = jax.tree.map(lambda old, x: old.at[index].set(x, mode="drop"), values, computed)
        return values, missing.at[index].set(False, mode="drop")

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), fill_some, (values, missing))[0]
