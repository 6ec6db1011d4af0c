"""Many environments side by side: steps, resets where episodes ended, and keys and minibatches by
global index.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pmaprl.cli.device_flags import block_width
from pmaprl.device.devices import size_of
from pmaprl.device.sharding import AXIS, gathered, global_ids
from pmaprl.envs.environment import DEFAULT_HORIZON, Env, Step, select
from pmaprl.envs.masks import legal_actions
from pmaprl.envs.spaces import Box, Space, keys_of_parts, map_leaves, sample

ResetPool = tuple[Any, Any]  # observations and states at the beginning of episodes, arrays [P, ...]


class StepKeys(NamedTuple):
    """Keys of steps, split as `Env.step` splits them."""

    advance: jax.Array
    reset: jax.Array


def step_envs(
    env: Env,
    keys: jax.Array | StepKeys,
    states: Any,
    actions: Any,
    starts: ResetPool | None = None,
    resets: ResetPool | None = None,
) -> Step:
    """One step of N environments, each with its own of `keys` [N], as `Env.step` makes it.

    Only environments whose episodes ended do a reset, with the keys that `Env.step` would give
    them; or they take one of `starts`, or their own of `resets` [N, ...], where those are given.
    See `keys_of_steps` for keys that are split.
    """
    keys = keys_of_steps(env, keys, starts, resets)
    if not isinstance(keys, StepKeys):
        return jax.vmap(env.step)(keys, states, actions)
    reached = jax.vmap(env.advance_checked)(keys.advance, states, actions)

    def begun(index):
        if starts is None:
            return jax.vmap(env.reset)(keys.reset[index])
        count = jax.tree.leaves(starts)[0].shape[0]
        chosen = jax.vmap(lambda key: jax.random.randint(key, (), 0, count))(keys.reset[index])
        return jax.tree.map(lambda x: x[chosen], starts)

    over = reached.terminated | reached.truncated
    if resets is None:
        obs, state = compute_where(
            (reached.obs, reached.state), over, width=math.isqrt(over.size), compute=begun
        )
    else:
        obs, state = jax.vmap(select)(over, resets, (reached.obs, reached.state))
    return reached.continued(obs, state)


def keys_of_steps(
    env: Env, keys: jax.Array | StepKeys, starts: ResetPool | None, resets: ResetPool | None
) -> jax.Array | StepKeys:
    """Split keys of any shape as `step_envs` needs them: in front of a loop over steps that is one
    pass for all.

    Keys stay whole where `Env.step` takes them, and where they are split already.
    """
    is_whole = env.resets_itself or (resets_at_once(env) and starts is None and resets is None)
    return keys if is_whole or isinstance(keys, StepKeys) else StepKeys(*split_keys(keys, 2))


def resets_at_once(env: Env) -> bool:
    """Whether to compute the reset of every environment in every step, sooner than to find out who
    needs one.
    """
    return env.cheap_reset and jax.default_backend() != "cpu"


SMALL_RESET = 128  # bytes of an environment's state and observation


def resets_of_steps(env: Env, keys: jax.Array) -> ResetPool | None:
    """What every step of environments would begin with, by its `keys` [T, N], in one pass; None
    where that is much.
    """
    if (
        env.resets_itself
        or not resets_at_once(env)
        or size_of(jax.eval_shape(env.reset, keys[0, 0])) > SMALL_RESET
    ):
        return None
    return jax.vmap(jax.vmap(env.reset))(split_keys(keys, 2)[1])


def reset_mid_episode(env: Env, keys: jax.Array) -> tuple[Any, Any]:
    """Observations and states of N environments after up to a horizon of random actions, by keys
    [N] of their own.
    """
    reset_keys, phase_keys, walk_keys = split_keys(keys, 3)
    longest = min(env.max_steps, DEFAULT_HORIZON)
    steps = jax.vmap(lambda key: jax.random.randint(key, (), 0, longest))(phase_keys)  # [N]

    def random_action(key, obs):
        return sample(key, env.action_space, legal_actions(obs))

    def walk(step, carry):
        obs, states = carry
        action_keys, step_keys = split_keys(
            jax.vmap(jax.random.fold_in, (0, None))(walk_keys, step), 2
        )
        out = step_envs(env, step_keys, states, jax.vmap(random_action)(action_keys, obs))
        return jax.vmap(select)(step < steps, (out.obs, out.state), carry)

    return jax.lax.fori_loop(0, jnp.max(steps), walk, jax.vmap(env.reset)(reset_keys))


def new_starts(env: Env, key: jax.Array, count: int) -> ResetPool | None:
    """`count` beginnings of episodes, the same on every device, each of which makes its share; None
    of 0.
    """
    if not count:
        return None
    share = jax.vmap(env.reset)(keys_of(key, -(-count // jax.lax.axis_size(AXIS))))
    return jax.tree.map(lambda x: gathered(x)[:count], share)


def compute_where(
    values: Any, missing: jax.Array, width: int, compute: Callable[[jax.Array], Any]
) -> Any:
    """`values`, arrays [B, ...], with what `compute` gives for those that are `missing` [B].

    `compute` takes the indices of `width` of them, until none is missing; also under `vmap`, where
    a `cond` computes everything. Where fewer are left, the last index is B, and what is computed
    for it goes nowhere.
    """

    def fill_some(carry):
        values, missing = carry
        (index,) = jnp.nonzero(missing, size=width, fill_value=missing.size)
        values = jax.tree.map(
            lambda old, new: old.at[index].set(new, mode="drop"), values, compute(index)
        )
        return values, missing.at[index].set(False, mode="drop")

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), fill_some, (values, missing))[0]


OTHER_STREAM = 2**31  # of no update and of no epoch: folded into a key, for what is neither


def keys_of(key: jax.Array, local: int) -> jax.Array:
    """A key for each of this device's `local` items, [local], from `key` and the item's global
    index.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, global_ids(local))


def ids_in_process(local: int, processes: int) -> jax.Array:
    """Indices [local] of this device's items among those of its process; of so many each has as
    many devices.
    """
    return global_ids(local) % (local * (jax.lax.axis_size(AXIS) // processes))


def ids_over_processes(count: int, processes: int) -> jax.Array:
    """Indices [count] of what this device's process has as a whole, among that of all processes."""
    return jax.lax.axis_index(AXIS) // (jax.lax.axis_size(AXIS) // processes) * count + jnp.arange(
        count
    )


def split_keys(keys: jax.Array, num: int) -> tuple[jax.Array, ...]:
    """`num` new arrays of keys in place of one of any shape."""
    split = jax.vmap(lambda key: jax.random.split(key, num))(keys.ravel())  # [keys, num]
    return tuple(split[:, i].reshape(keys.shape) for i in range(num))


def rollout_keys(key: jax.Array, num_steps: int, num_envs: int) -> jax.Array:
    """A key for every step and each of this device's `num_envs` environments, [T, N]."""
    step_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_steps))
    return jax.vmap(keys_of, (0, None))(step_keys, num_envs)


def action_noise(key: jax.Array, space: Space, batch: tuple[int, ...] = ()) -> Any:
    """The noise [*batch, ...] that `sample` needs: standard normals for a Box, else one uniform per
    component.
    """

    def noise(leaf, key):
        if isinstance(leaf, Box):
            return jax.random.normal(key, (*batch, math.prod(leaf.shape)))
        return categorical_noise(key, (*batch, len(leaf.nvec)))

    return map_leaves(noise, space, keys_of_parts(key, space))


def categorical_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform in (0, 1): never 0, which would pick a first choice of probability 0."""
    return jax.random.uniform(key, shape, minval=2**-24)


def minibatch_indices(
    key: jax.Array,
    num_steps: int,
    num_envs: int,
    update_epochs: int,
    num_minibatches: int,
    processes: int = 1,
) -> jax.Array:
    """Which of this device's samples, flattened from [T, N], go into each minibatch: [E, M, T * N /
    M].

    Blocks of `block_width` neighbouring environments are permuted with their own keys and split
    evenly over the minibatches. Blocks never cross devices, so every minibatch holds the same
    samples on any number of devices. Of several `processes` each numbers its own blocks, and has a
    `key` of its own.
    """
    width = block_width(num_steps, num_minibatches)
    size = num_steps * width  # samples of a block, blocks of this device
    blocks = num_envs // width

    def shuffle(epoch, block_id):
        # Below zero are numbers that no epoch has
        order_key, label_key = (
            jax.random.fold_in(jax.random.fold_in(key, n), block_id) for n in (epoch, -1 - epoch)
        )
        return random_order(order_key, label_key, size)

    over_blocks = jax.vmap(shuffle, (None, 0))
    epochs = jnp.arange(update_epochs)
    # [E, blocks, size]
    order = jax.vmap(over_blocks, (0, None))(epochs, ids_in_process(blocks, processes))
    step = order // width
    env = order % width + width * jnp.arange(blocks)[:, None]
    split = (step * num_envs + env).reshape(update_epochs, blocks, num_minibatches, -1)
    return jnp.swapaxes(split, 1, 2).reshape(update_epochs, num_minibatches, -1)


def in_segments(tree: Any, num_segments: int) -> Any:
    """Arrays [T, N, ...] cut in time into S segments of K steps, which stand beside each other: [K,
    S, N, ...].
    """
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(num_segments, -1, *x.shape[1:]), 0, 1), tree
    )


def side_by_side(tree: Any) -> Any:
    """Segments [K, S, N, ...] as if each were of an environment of its own, [K, S * N, ...]."""
    return jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]), tree)


def random_order(key: jax.Array, label_key: jax.Array, size: int) -> jax.Array:
    """The numbers below `size` in random order, [size].

    Sorts single numbers, four times faster than `argsort`: random bits, and in the low bits a
    label, by which a number is found again. Of many random bits some are equal. Labels that grow
    with the numbers would leave those in the order of time, so number i has label a * i + b modulo
    a power of two, with a random b and a random odd a.
    """
    label_bits = jnp.uint32(2 ** (size - 1).bit_length() - 1)
    factor, offset = jax.random.bits(label_key, (2,))
    factor |= 1
    labels = factor * jnp.arange(size, dtype=jnp.uint32) + offset
    order = jnp.sort((jax.random.bits(key, (size,)) & ~label_bits) | (labels & label_bits))
    # Modulo 2**32: right in its lowest three bits, and after each of Newton's steps in twice as
    # many
    inverse = factor
    for _ in range(4):
        inverse *= 2 - factor * inverse
    return ((order - offset) * inverse & label_bits).astype(jnp.int32)
