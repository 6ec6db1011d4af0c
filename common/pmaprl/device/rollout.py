"""Many environments side by side: steps, resets, and keys and minibatches by global index."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pmaprl.cli.device_flags import block_width
from pmaprl.device.sharding import AXIS, gathered, global_ids
from pmaprl.envs.environment import DEFAULT_HORIZON, Env, Step, select
from pmaprl.envs.masks import legal_actions
from pmaprl.envs.spaces import Box, Space, keys_of_parts, map_leaves, sample
from pmaprl.machine.devices import size_of

ResetPool = tuple[Any, Any]
"""Observations and states at the beginning of episodes, arrays [R, ...]."""


class StepKeys(NamedTuple):
    """Keys of steps, split as `Env.step` splits them."""

    advance: Array
    reset: Array


def step_envs(
    env: Env,
    keys: Array | StepKeys,
    states: Any,
    actions: Any,
    starts: ResetPool | None = None,
    resets: ResetPool | None = None,
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

    def new_episodes(index: Array) -> ResetPool:
        if starts is None:
            return jax.vmap(env.reset)(keys.reset[index])
        count = jax.tree.leaves(starts)[0].shape[0]
        chosen = jax.vmap(lambda key: jax.random.randint(key, (), 0, count))(keys.reset[index])
        return jax.tree.map(lambda x: x[chosen], starts)

    obs, state = compute_where(unreset, over, width=math.isqrt(over.size), compute=new_episodes)
    return reached.continued(obs, state)


def keys_of_steps(
    env: Env,
    keys: Array | StepKeys,
    starts: ResetPool | None,
    resets: ResetPool | None,
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


def resets_of_steps(env: Env, keys: Array) -> ResetPool | None:
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
) -> ResetPool | None:
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


OTHER_STREAM = 2**31  # folded into a key for numbers that belong to no update and no epoch


def keys_of(key: Array, local: int) -> Array:
    """Derive a key for each of this device's items, [local], from `key` and its global index."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, global_ids(local))


def ids_in_process(local: int, processes: int) -> Array:
    """Indices [local] of this device's items among the items of its process.

    Each of the `processes` has as many devices.
    """
    return global_ids(local) % (local * (jax.lax.axis_size(AXIS) // processes))


def ids_over_processes(count: int, processes: int) -> Array:
    """Indices [count] of a process's items among the items of all processes."""
    devices = jax.lax.axis_size(AXIS) // processes
    return jax.lax.axis_index(AXIS) // devices * count + jnp.arange(count)


def split_keys(keys: Array, num: int) -> tuple[Array, ...]:
    """Split each key of an array of any shape into `num` keys.

    Returns:
        `num` arrays of that shape.
    """
    split = jax.vmap(lambda key: jax.random.split(key, num))(keys.ravel())  # [keys, num]
    return tuple(split[:, i].reshape(keys.shape) for i in range(num))


def rollout_keys(
    key: Array,
    num_steps: int,
    num_envs: int,
) -> Array:
    """Derive a key for every step and each of this device's environments, [T, N]."""
    step_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_steps))
    return jax.vmap(keys_of, (0, None))(step_keys, num_envs)


def action_noise(
    key: Array,
    space: Space,
    batch: tuple[int, ...] = (),
) -> Any:
    """Draw the noise [*batch, ...] that `Distribution.sample` needs.

    It is standard normal for a Box, and uniform for each component of other actions.
    """

    def noise(leaf, key):
        if isinstance(leaf, Box):
            return jax.random.normal(key, (*batch, math.prod(leaf.shape)))
        return categorical_noise(key, (*batch, len(leaf.nvec)))

    return map_leaves(noise, space, keys_of_parts(key, space))


def categorical_noise(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform numbers in (0, 1).

    They are never 0, which would pick a first choice of probability 0.
    """
    return jax.random.uniform(key, shape, minval=2**-24)


def minibatch_indices(
    key: Array,
    num_steps: int,
    num_envs: int,
    update_epochs: int,
    num_minibatches: int,
    processes: int = 1,
) -> Array:
    """Assign the samples of this device to minibatches.

    Blocks of `block_width` neighbouring environments are permuted with their own keys and split
    evenly over the minibatches. Blocks never cross devices, so every minibatch holds the same
    samples on any number of devices.

    Args:
        key: the update's key. Several processes have a key each.
        num_steps: steps T of the rollout.
        num_envs: environments N of this device.
        update_epochs: epochs E.
        num_minibatches: minibatches M of an epoch.
        processes: number of processes, each of which numbers its own blocks.

    Returns:
        [E, M, T * N / M] indices into samples that are flattened from [T, N].
    """
    width = block_width(num_steps, num_minibatches)
    size = num_steps * width  # samples of a block
    blocks = num_envs // width  # blocks of this device

    def shuffle(epoch, block_id):
        order_key = jax.random.fold_in(jax.random.fold_in(key, epoch), block_id)
        # No epoch has a negative number
        label_key = jax.random.fold_in(jax.random.fold_in(key, -1 - epoch), block_id)
        return random_order(order_key, label_key, size)

    over_blocks = jax.vmap(shuffle, (None, 0))
    over_epochs = jax.vmap(over_blocks, (0, None))
    epochs = jnp.arange(update_epochs)
    order = over_epochs(epochs, ids_in_process(blocks, processes))  # [E, blocks, size]
    step = order // width
    env = order % width + width * jnp.arange(blocks)[:, None]
    index = step * num_envs + env
    split = index.reshape(update_epochs, blocks, num_minibatches, -1)
    return jnp.swapaxes(split, 1, 2).reshape(update_epochs, num_minibatches, -1)


def random_order(
    key: Array,
    label_key: Array,
    size: int,
) -> Array:
    """Permute the numbers below `size`, [size].

    This sorts single numbers, four times faster than `argsort`: random bits, and in the low bits a
    label, by which a number is found again. Of many random bits some are equal. Labels that grow
    with the numbers would leave those in the order of time, so number i has label a * i + b modulo
    a power of two, with a random b and a random odd a.
    """
    label_bits = jnp.uint32(2 ** (size - 1).bit_length() - 1)
    factor, offset = jax.random.bits(label_key, (2,))
    factor |= 1
    labels = factor * jnp.arange(size, dtype=jnp.uint32) + offset
    high_bits = jax.random.bits(key, (size,)) & ~label_bits
    order = jnp.sort(high_bits | (labels & label_bits))
    # The inverse of `factor` modulo 2**32 is right in its lowest three bits at first, and after
    # each of Newton's steps in twice as many
    inverse = factor
    for _ in range(4):
        inverse *= 2 - factor * inverse
    return ((order - offset) * inverse & label_bits).astype(jnp.int32)
