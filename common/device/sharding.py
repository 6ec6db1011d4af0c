"""State on the devices and on the host, and the one collective of a gradient step.

Every algorithm's state has two fields: `learner`, identical on every device, and `shard`, whose arrays [S, N, ...] are
split over the devices along the environments. Under `pmap` each array has one more leading axis, the device; a process
has the rows of its own devices.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from common.device import cluster

AXIS = "devices"


def flat_pmean(tree: Any, axis_name: str = AXIS) -> Any:
    """Mean of a tree over the devices, as one collective on the concatenated arrays instead of one per leaf."""
    if jax.lax.axis_size(axis_name) == 1:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, axis_name))


def global_ids(local: int, axis_name: str = AXIS) -> jax.Array:
    """Global indices [local] of this device's `local` items: device d holds d*local .. (d+1)*local - 1."""
    return jax.lax.axis_index(axis_name) * local + jnp.arange(local)


def to_host(state: Any, unwanted: tuple[str, ...] = ()) -> Any:
    """The global state as host arrays, without the device axis: `learner` [S, ...], `shard` [S, num_envs, ...].

    Does not depend on the number of devices; of several processes every one has it all. Typed keys become their data.
    Arrays of `shard` whose names begin as one of `unwanted` (such as `shard/replay/`) stay on the devices, and are
    zeros here.
    """
    state = key_data(state)
    first = jax.tree.map(lambda x: x.addressable_data(0), state.learner)

    def whole(path, x):
        name = "shard/" + jax.tree_util.keystr(path, simple=True, separator="/")
        if name.startswith(unwanted):
            return np.zeros((len(x) * cluster.count(), *x.shape[1:]), x.dtype)
        return cluster.gathered(x)

    learner, shard = jax.device_get((first, jax.tree_util.tree_map_with_path(whole, state.shard)))
    return state.replace(learner=jax.tree.map(lambda x: x[0], learner), shard=jax.tree.map(_merge, shard))


def host_like(shapes: Any) -> Any:
    """Zeros with the structure, shapes and types that `to_host` gives for a state of `shapes` (from `eval_shape`, which
    knows of the devices of all processes).
    """

    def zeros(x, shape):
        data = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        return np.zeros(shape + data.shape[len(x.shape) :], data.dtype)

    return shapes.replace(
        learner=jax.tree.map(lambda x: zeros(x, x.shape[1:]), shapes.learner),
        shard=jax.tree.map(lambda x: zeros(x, (x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:])), shapes.shard),
    )


def to_devices(host: Any, like: Any, devices: list[jax.Device]) -> Any:
    """The inverse of `to_host`: a state for `pmap` over `devices`, with the types of `like`."""
    count, local = len(devices), len(cluster.own(devices))
    split = host.replace(
        learner=jax.tree.map(lambda x: np.broadcast_to(x, (local, *np.shape(x))), host.learner),
        shard=jax.tree.map(lambda x: cluster.own_share(_split(x, count)), host.shard),
    )

    # Out of a pmap with the same axis name: any other placement makes the update compile a second time.
    def place(state):
        return jax.tree.map(lambda x, old: jax.random.wrap_key_data(x) if _is_key(old) else x, state, like)

    return jax.pmap(place, axis_name=AXIS, devices=devices)(split)


def check_learners(state: Any) -> None:
    """Raise TrainingError where the processes do not have the same learner, to the bit."""
    if cluster.count() == 1:
        return
    digest = hashlib.sha256()
    for x in jax.tree.leaves(key_data(state.learner)):
        digest.update(np.asarray(x.addressable_data(0)).tobytes())
    cluster.check_equal("the learner", digest.hexdigest())


def key_data(tree: Any) -> Any:
    """`tree` with plain arrays in place of typed keys."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _merge(x: np.ndarray) -> np.ndarray:
    devices, seeds, local, *shape = x.shape  # [D, S, N / D, ...]
    return np.moveaxis(x, 0, 1).reshape(seeds, devices * local, *shape)


def _split(x: np.ndarray, count: int) -> np.ndarray:
    seeds, total, *shape = x.shape
    return np.moveaxis(np.reshape(x, (seeds, count, total // count, *shape)), 1, 0)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
