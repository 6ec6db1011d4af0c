"""Randomness that does not depend on the number of devices: keys and minibatches by *global* environment index."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from common.cli.rollout_flags import block_width
from common.device.sharding import AXIS, global_ids
from common.envs.spaces import Box, Space, keys_of_parts, map_leaves


def keys_of(key: jax.Array, local: int) -> jax.Array:
    """A key for each of this device's `local` items, [local], from `key` and the item's global index."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, global_ids(local))


def ids_in_process(local: int, processes: int) -> jax.Array:
    """Indices [local] of this device's items among those of its process; of so many each has as many devices."""
    return global_ids(local) % (local * (jax.lax.axis_size(AXIS) // processes))


def ids_over_processes(count: int, processes: int) -> jax.Array:
    """Indices [count] of what this device's process has as a whole, among that of all processes."""
    return jax.lax.axis_index(AXIS) // (jax.lax.axis_size(AXIS) // processes) * count + jnp.arange(count)


def split_keys(keys: jax.Array, num: int) -> tuple[jax.Array, ...]:
    """`num` new arrays of keys in place of one of any shape."""
    split = jax.vmap(lambda key: jax.random.split(key, num))(keys.ravel())  # [keys, num]
    return tuple(split[:, i].reshape(keys.shape) for i in range(num))


def rollout_keys(key: jax.Array, num_steps: int, num_envs: int) -> jax.Array:
    """A key for every step and each of this device's `num_envs` environments, [T, N]."""
    step_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_steps))
    return jax.vmap(keys_of, (0, None))(step_keys, num_envs)


def action_noise(key: jax.Array, space: Space, batch: tuple[int, ...] = ()) -> Any:
    """The noise [*batch, ...] that `sample` needs: standard normals for a Box, else one uniform per component."""

    def noise(leaf, key):
        if isinstance(leaf, Box):
            return jax.random.normal(key, (*batch, math.prod(leaf.shape)))
        return categorical_noise(key, (*batch, len(leaf.nvec)))

    return map_leaves(noise, space, keys_of_parts(key, space))


def categorical_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform in (0, 1): never 0, which would pick a first choice of probability 0."""
    return jax.random.uniform(key, shape, minval=2**-24)


def minibatch_indices(
    key: jax.Array, num_steps: int, num_envs: int, update_epochs: int, num_minibatches: int, processes: int = 1
) -> jax.Array:
    """Which of this device's samples, flattened from [T, N], go into each minibatch: [E, M, T * N / M].

    Blocks of `block_width` neighbouring environments are permuted with their own keys and split evenly over the
    minibatches. Blocks never cross devices, so every minibatch holds the same samples on any number of devices. Of
    several `processes` each numbers its own blocks, and has a `key` of its own.
    """
    width = block_width(num_steps, num_minibatches)
    size, blocks = num_steps * width, num_envs // width  # samples of a block, blocks of this device

    def shuffle(epoch, block_id):
        # Below zero are numbers that no epoch has
        order_key, label_key = (jax.random.fold_in(jax.random.fold_in(key, n), block_id) for n in (epoch, -1 - epoch))
        return random_order(order_key, label_key, size)

    over_blocks = jax.vmap(shuffle, (None, 0))
    order = jax.vmap(over_blocks, (0, None))(
        jnp.arange(update_epochs), ids_in_process(blocks, processes)
    )  # [E, blocks, size]
    step, env = order // width, order % width + width * jnp.arange(blocks)[:, None]
    split = (step * num_envs + env).reshape(update_epochs, blocks, num_minibatches, -1)
    return jnp.swapaxes(split, 1, 2).reshape(update_epochs, num_minibatches, -1)


def in_segments(tree: Any, num_segments: int) -> Any:
    """Arrays [T, N, ...] cut in time into S segments of K steps, which stand beside each other: [K, S, N, ...]."""
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(num_segments, -1, *x.shape[1:]), 0, 1), tree)


def side_by_side(tree: Any) -> Any:
    """Segments [K, S, N, ...] as if each were of an environment of its own, [K, S * N, ...]."""
    return jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]), tree)


def random_order(key: jax.Array, label_key: jax.Array, size: int) -> jax.Array:
    """The numbers below `size` in random order, [size].

    Sorts single numbers, four times faster than `argsort`: random bits, and in the low bits a label, by which a number
    is found again. Of many random bits some are equal. Labels that grow with the numbers would leave those in the order
    of time, so number i has label a * i + b modulo a power of two, with a random b and a random odd a.
    """
    label_bits = jnp.uint32(2 ** (size - 1).bit_length() - 1)
    factor, offset = jax.random.bits(label_key, (2,))
    factor |= 1
    labels = factor * jnp.arange(size, dtype=jnp.uint32) + offset
    order = jnp.sort((jax.random.bits(key, (size,)) & ~label_bits) | (labels & label_bits))
    return ((order - offset) * inverse(factor) & label_bits).astype(jnp.int32)


def inverse(odd: jax.Array) -> jax.Array:
    """The number whose product with the `odd` one is 1 modulo 2**32."""
    result = odd  # right in its lowest three bits, and after each of Newton's steps in twice as many
    for _ in range(4):
        result *= 2 - odd * result
    return result
