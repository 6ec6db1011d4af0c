"""Axes of devices and of agents: averages, gathers, and global indices along them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from pmaprl.machine.devices import Device

AXIS = "devices"
GROUPS = "groups"  # the axis of devices that have agents of their own


def sharding_of_members(devices: list[Device]) -> jax.NamedSharding:
    """Sharding of arrays [1, S, ...] over devices that have agents of their own."""
    mesh = jax.sharding.Mesh(np.array(devices)[:, None], (GROUPS, AXIS))
    return jax.NamedSharding(mesh, jax.P(None, GROUPS))


def flat_pmean(tree: Any) -> Any:
    """Average a tree over devices.

    The arrays are concatenated for one collective, since one for each array takes a CPU four times
    as long.
    """
    if jax.lax.axis_size(AXIS) == 1:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, AXIS))


def global_ids(local: int, axis_name: str = AXIS) -> Array:
    """Global indices [local] of this device's items.

    Device d has d * local .. (d + 1) * local - 1.
    """
    return jax.lax.axis_index(axis_name) * local + jnp.arange(local)


def gathered(x: Array, axis_name: str = AXIS) -> Array:
    """Concatenate the parts `x` [N, ...] of all devices, on every device."""
    if jax.lax.axis_size(axis_name) == 1:  # a CPU would take 25 microseconds all the same
        return x
    return jax.lax.all_gather(x, axis_name, tiled=True)


MEMBERS = "members"  # name of the axis S, along which agents exchange


def over_seeds(function: Callable, tree: Any) -> Any:
    """Map a function over the seeds of arrays [S, ...].

    A single seed skips `vmap`, which costs time.
    """
    if jax.tree.leaves(tree)[0].shape[0] > 1:
        return jax.vmap(function, axis_name=MEMBERS)(tree)
    only = jax.tree.map(lambda x: x[0], tree)
    return jax.tree.map(lambda x: x[None], function(only))


@jax.custom_batching.custom_vmap
def same_for_all_seeds(x: Array) -> Array:
    """Keep `x`, which is equal for all seeds, as one value under `over_seeds` too.

    A loop's length or a slice's start that differs by seed would turn into masks, scatters and
    copies.
    """
    return x


@same_for_all_seeds.def_vmap
def _(axis_size, in_batched, x):
    return (x[0] if in_batched[0] else x), False
