"""State on the devices and on the host, and the one collective of a gradient step.

Every algorithm's state has two fields: `learner`, identical on all devices that share its agents, and `shard`, whose
arrays [S, N, ...] are split over those along the environments. Under `pmap` each array has one more leading axis, the
device; a process has the rows of its own devices. Under `shard_map` that axis has length 1 in `learner`: its arrays are
one for all. Where devices have agents of their own, nobody shares these: then D is 1, and all arrays are split along S.

On the host there is no such axis, and a process has its own environments only: nobody ever has those of all processes.
"""

import hashlib
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.device import cluster

AXIS = "devices"
GROUPS = "groups"  # the axis of devices that have agents of their own


class Layout(NamedTuple):
    """How the global arrays of `shard_map` lie on devices, of which D share agents."""

    mesh: Mesh
    learner: P  # [1, S, ...]
    shard: P  # [D, S, N / D, ...]
    reports: P  # [S, ...], what an update says beside its state


def layout_of(devices: list[jax.Device], sharding: str) -> Layout:
    """With `sharding` "members" each device has agents of its own, else environments of all agents."""
    if sharding == "members":
        return Layout(Mesh(np.array(devices)[:, None], (GROUPS, AXIS)), P(None, GROUPS), P(None, GROUPS), P(GROUPS))
    return Layout(mesh_of(devices), P(), P(AXIS), P())


def flat_pmean(tree: Any, axis_name: str = AXIS) -> Any:
    """Mean of a tree over the devices, as one collective on the concatenated arrays instead of one per leaf."""
    if jax.lax.axis_size(axis_name) == 1:
        return jax.tree.map(lambda x: jax.lax.pmean(x, axis_name) if _varies_over(x) else x, tree)
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, axis_name))


def global_ids(local: int, axis_name: str = AXIS) -> jax.Array:
    """Global indices [local] of this device's `local` items: device d holds d*local .. (d+1)*local - 1."""
    return jax.lax.axis_index(axis_name) * local + jnp.arange(local)


def gathered(x: jax.Array, axis_name: str, axis: int = 0) -> jax.Array:
    """The parts `x` of all devices one after the other along `axis`, the same on every device and known to be."""
    typed = {"to": "invarying"} if _varies_over(x) else {}
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True, **typed)


def members_of_all(learner: Any) -> Any:
    """The learners [S, ...] of all `GROUPS` one after the other, from those of this device."""
    everyone = jax.tree.map(lambda x: jax.lax.all_gather(x, GROUPS, tiled=True), key_data(learner))
    return jax.tree.map(lambda x, own: jax.random.wrap_key_data(x) if _is_key(own) else x, everyone, learner)


def same_on_all_devices(x: jax.Array, axis_name: str = AXIS) -> jax.Array:
    """`x`, which has the same value on every device, and is then known to."""
    return jax.lax.pmax(x, axis_name) if _varies_over(x) else x


def varying_like(other: Any, tree: Any) -> Any:
    """`tree`, which counts as different on every device if anything in `other` does.

    `shard_map` checks what does. A loop has to begin with what it goes on with, and the gradient by what is the same on
    all devices would be the sum over them. Elsewhere nothing is checked, and this does nothing.
    """
    wanted = frozenset().union(*map(_varies_over, jax.tree.leaves(other)))

    def cast(x):
        axes = tuple(wanted - _varies_over(x))
        return jax.lax.pcast(x, axes, to="varying") if axes else x

    return jax.tree.map(cast, tree)


def to_host(state: Any, unwanted: tuple[str, ...] = ()) -> Any:
    """The state as host arrays, without the device axis: `learner` [S, ...], `shard` [S, N, ...] of N environments.

    They are all of them, however many devices there are; of several processes each has its own. Typed keys become their
    data. Arrays of `shard` whose names begin as one of `unwanted` (such as `shard/replay/`) stay on the devices, and
    are zeros here.
    """
    state = key_data(state)
    first = jax.tree.map(lambda x: x.addressable_data(0) if len(x) > 1 else x, state.learner)

    def parts(path, x):
        name = "shard/" + jax.tree_util.keystr(path, simple=True, separator="/")
        mine = _own_parts(x)
        return [np.zeros(part.shape, part.dtype) for part in mine] if name.startswith(unwanted) else mine

    learner, shard = jax.device_get((first, jax.tree_util.tree_map_with_path(parts, state.shard)))
    merged = jax.tree.map(_merge, shard, is_leaf=lambda x: isinstance(x, list))
    return state.replace(learner=jax.tree.map(lambda x: x[0], learner), shard=merged)


def over_processes(rows: np.ndarray) -> jax.Array:
    """The array [S, num_envs, ...] of which each process has its own `rows` [S, N, ...]; nothing is sent for that.

    It lies where the host can read it, on one CPU device of each process, if JAX has those.
    """
    try:
        devices = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves them out
        devices = jax.devices()
    of_each = {device.process_index: device for device in reversed(devices)}
    mesh = Mesh(np.array([of_each[process] for process in range(cluster.count())]), (AXIS,))
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P(None, AXIS)), rows)


def host_like(shapes: Any) -> Any:
    """Zeros with the structure, shapes and types that `to_host` gives for a state of `shapes` (from `eval_shape`, which
    knows of the devices of all processes).
    """

    def zeros(x, shape):
        data = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        return np.zeros(shape + data.shape[len(x.shape) :], data.dtype)

    return shapes.replace(
        learner=jax.tree.map(lambda x: zeros(x, x.shape[1:]), shapes.learner),
        shard=jax.tree.map(lambda x: zeros(x, _merged_shape(x.shape)), shapes.shard),
    )


def to_devices(host: Any, like: Any, devices: list[jax.Device], sharding: str = "pmap") -> Any:
    """The inverse of `to_host`: a state for programs over `devices` with that `sharding`, with the types of `like`."""
    local = len(cluster.own(devices))
    replicas, parts = local if sharding == "pmap" else 1, 1 if sharding == "members" else local
    split = host.replace(
        learner=jax.tree.map(lambda x: np.broadcast_to(x, (replicas, *np.shape(x))), host.learner),
        shard=jax.tree.map(lambda x: _split(x, parts), host.shard),
    )

    # Out of a pmap with the same axis name: any other placement makes the update compile a second time.
    def place(state):
        return jax.tree.map(lambda x, old: jax.random.wrap_key_data(x) if _is_key(old) else x, state, like)

    if sharding != "pmap":
        layout = layout_of(devices, sharding)
        where = host.replace(learner=layout.learner, shard=layout.shard)
        return jax.jit(place, out_shardings=jax.tree.map(partial(NamedSharding, layout.mesh), where))(split)
    return jax.pmap(place, axis_name=AXIS, devices=devices)(split)


def mesh_of(devices: list[jax.Device]) -> Mesh:
    """The devices as `shard_map` takes them."""
    return Mesh(np.array(devices), (AXIS,))


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


def _own_parts(x: jax.Array) -> list[jax.Array]:
    """Arrays [D, S, N / D, ...] with the rows of own devices, of those of one process in one."""
    if x.is_fully_addressable:
        return [x]
    return [shard.data for shard in sorted(x.addressable_shards, key=lambda shard: shard.device.id)]


def _merge(parts: list[np.ndarray]) -> np.ndarray:
    """The rows of parts [D, S, N / D, ...] one after the other, [S, N, ...]."""
    shapes = [(x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:]) for x in parts]
    merged = [np.moveaxis(x, 0, 1).reshape(shape) for x, shape in zip(parts, shapes, strict=True)]
    return merged[0] if len(merged) == 1 else np.concatenate(merged, axis=1)


def _merged_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    devices, seeds, local, *more = shape
    return seeds, devices * local // cluster.count(), *more


def _split(x: np.ndarray, count: int) -> np.ndarray:
    seeds, total, *shape = x.shape
    return np.moveaxis(np.reshape(x, (seeds, count, total // count, *shape)), 1, 0)


def _varies_over(x: Any) -> frozenset[str]:
    """The axes along which `x` differs, as `shard_map` sees it."""
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # so named since JAX 0.10


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
