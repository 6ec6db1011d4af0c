"""Random keys by global index of the environment, which no number of devices changes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pmaprl.device.sharding import AXIS, global_ids
from pmaprl.envs.spaces import Box, Space, keys_of_parts, map_leaves

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
