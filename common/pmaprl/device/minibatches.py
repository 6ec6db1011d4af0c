"""Minibatches of a rollout, shuffled within blocks of environments that never cross devices."""

import jax
import jax.numpy as jnp
from jax import Array

from pmaprl.cli.device_flags import block_width
from pmaprl.device.keys import ids_in_process


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

    This sorts random numbers whose low bits are a label of the index, four times faster than
    `argsort`. Equal random bits are ordered by their labels. Those are not to prefer early indices,
    so index i has label a * i + b modulo a power of two, with a random b and a random odd a.
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
