"""State on the devices and on the host: over devices by axis D, over seeds or members by axis S.

A `TrainState` has three parts. `learner` and `run` are identical on all devices that share its
agents; the arrays [S, N, ...] of `actors` are split over those along the environments. Under `pmap`
each array has one more leading axis, the device; a process has the rows of its own devices. Where
devices have agents of their own (--sharding members), that axis has length 1, and all arrays are
split along S.

On the host there is no such axis, and a process has its own environments only: no process ever has
those of all.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.flatten_util import ravel_pytree

from pmaprl.cli.run_flags import Members
from pmaprl.device import multihost

AXIS = "devices"
GROUPS = "groups"  # the axis of devices that have agents of their own


def sharding_of_members(devices: list[jax.Device]) -> jax.NamedSharding:
    """That of arrays [1, S, ...] over devices which have agents of their own."""
    return jax.NamedSharding(
        jax.sharding.Mesh(np.array(devices)[:, None], (GROUPS, AXIS)), jax.P(None, GROUPS)
    )


class TrainState(struct.PyTreeNode):
    """Everything that training changes."""

    learner: Any  # what the algorithm learns
    # This device's environments, and what belongs to each of them; () where they are elsewhere
    actors: Any
    run: Any  # the `RunState`: what the driver keeps


def flat_pmean(tree: Any) -> Any:
    """Mean of a tree over the devices, as one collective on the concatenated arrays instead of one
    per leaf.
    """
    if jax.lax.axis_size(AXIS) == 1:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, AXIS))


def global_ids(local: int, axis_name: str = AXIS) -> jax.Array:
    """Global indices [local] of this device's `local` items: device d holds d*local .. (d+1)*local
    - 1.
    """
    return jax.lax.axis_index(axis_name) * local + jnp.arange(local)


def gathered(x: jax.Array, axis_name: str = AXIS) -> jax.Array:
    """The parts `x` [N, ...] of all devices one after the other, the same on every device."""
    if jax.lax.axis_size(axis_name) == 1:  # a CPU would take 25 microseconds all the same
        return x
    return jax.lax.all_gather(x, axis_name, tiled=True)


Arrays = dict[str, np.ndarray]
"""Host arrays by names such as `learner/params/actor/params/Dense_0/kernel`."""


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, without the classes of this repository."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def flatten(tree: Any, left_out: tuple[str, ...] = ()) -> Arrays:
    """A tree of host arrays as named arrays, without those whose names begin as one of
    `left_out`.
    """
    return {
        name: np.asarray(leaf)
        for name, leaf in by_name(tree).items()
        if not name.startswith(left_out)
    }


def unflatten(arrays: Arrays, like: Any) -> Any:
    """The inverse of `flatten`, with the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in flatten(like)])


def to_host(state: TrainState, unwanted: tuple[str, ...] = ()) -> TrainState:
    """The state as host arrays, without the device axis: `learner` and `run` [S, ...], `actors` [S,
    N, ...].

    N are all environments, however many devices there are; of several processes each has its own.
    Typed keys become their data. Arrays of `actors` whose names begin as one of `unwanted` (such as
    `actors/replay/`) stay on the devices, and are zeros here.
    """
    return _merged(*jax.device_get(_parts_of(state, unwanted)))


def copied(state: TrainState, unwanted: tuple[str, ...] = ()) -> Callable[[], TrainState] | None:
    """Begin to copy a state on its devices, of which the next update takes the memory.

    Returns:
        What waits for the copy and gives it as `to_host` does, in any thread; None where devices
        have little room.
    """
    arrays, structure = jax.tree.flatten(_parts_of(state, unwanted))
    on_devices = [index for index, x in enumerate(arrays) if isinstance(x, jax.Array)]
    if not _have_room([arrays[index] for index in on_devices]):
        return None
    copies = jax.device_put([arrays[index] for index in on_devices], may_alias=False)
    for index, copy in zip(on_devices, copies, strict=True):
        arrays[index] = copy
    return lambda: _merged(*jax.device_get(jax.tree.unflatten(structure, arrays)))


MOST_OF_ROOM = 0.5  # of the free memory of a device, that a copy may take


def _have_room(arrays: list[jax.Array]) -> bool:
    """Tell if the devices that have these arrays can well take them once more."""
    device = min(jax.local_devices(), key=lambda device: device.id)
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    there = [
        x.nbytes / len(x.sharding.device_set) for x in arrays if device in x.sharding.device_set
    ]
    return sum(there) <= MOST_OF_ROOM * free


def _parts_of(state: TrainState, unwanted: tuple[str, ...]) -> tuple[tuple[Any, Any], Any]:
    """What the host needs of a state: `learner` and `run` of one device, and of `actors` the part
    of each device.
    """
    state = key_data(state)
    same = jax.tree.map(
        lambda x: x.addressable_data(0) if len(x) > 1 else x, (state.learner, state.run)
    )

    def own_parts(path, x):  # [D, S, N / D, ...]
        name = "actors/" + jax.tree_util.keystr(path, simple=True, separator="/")
        shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
        parts = [x] if x.is_fully_addressable else [shard.data for shard in shards]
        return (
            [np.zeros(part.shape, part.dtype) for part in parts]
            if name.startswith(unwanted)
            else parts
        )

    return same, jax.tree_util.tree_map_with_path(own_parts, state.actors)


def _merged(same: tuple[Any, Any], actors: Any) -> TrainState:
    """Put the parts together once they are on the host."""

    def merged(parts):
        x = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.moveaxis(x, 0, 1).reshape(_merged_shape(x.shape))

    learner, run = jax.tree.map(lambda x: x[0], same)
    return TrainState(
        learner, jax.tree.map(merged, actors, is_leaf=lambda x: isinstance(x, list)), run
    )


def host_like(shapes: Any) -> Any:
    """Zeros as `to_host` gives them for a state of these `shapes`, which are of the devices of all
    processes.
    """
    shapes = jax.eval_shape(key_data, shapes)
    learner, run = jax.tree.map(
        lambda x: np.zeros(x.shape[1:], x.dtype), (shapes.learner, shapes.run)
    )
    rows = jax.tree.map(
        lambda x: np.zeros(_merged_shape(x.shape, multihost.count()), x.dtype), shapes.actors
    )
    return TrainState(learner, rows, run)


def _merged_shape(shape: tuple[int, ...], processes: int = 1) -> tuple[int, ...]:
    """[S, N, ...] of [D, S, N / D, ...], of which each process has an equal part of N."""
    devices, seeds, local, *more = shape
    return seeds, devices * local // processes, *more


def to_devices(
    host: TrainState, like: TrainState, devices: list[jax.Device], sharding: str = "pmap"
) -> TrainState:
    """The inverse of `to_host`: a state for programs over `devices` with that `sharding`, with the
    types of `like`.
    """
    parts = 1 if sharding == "members" else len(multihost.own(devices))

    def split(x):
        seeds, total, *shape = x.shape
        return np.moveaxis(np.reshape(x, (seeds, parts, total // parts, *shape)), 1, 0)

    learner, run = jax.tree.map(
        lambda x: np.broadcast_to(x, (parts, *np.shape(x))), (host.learner, host.run)
    )
    state = TrainState(learner, jax.tree.map(split, host.actors), run)

    typed = partial(with_keys, like=like)
    if sharding == "members":
        return jax.jit(typed, out_shardings=sharding_of_members(devices))(state)
    # Out of a pmap with the same axis name: any other placement makes the update compile a second
    # time
    return jax.pmap(typed, axis_name=AXIS, devices=devices)(state)


def place(
    arrays: Arrays, make: Callable[[], Any], shapes: Any, devices: list[jax.Device], sharding: str
) -> Any:
    """A state of these `shapes` on `devices`: as `make` gives it, with `arrays` in place of some or
    all of its own.
    """
    if not arrays:
        return jax.block_until_ready(make())
    like = host_like(shapes)
    if by_name(like).keys() - arrays.keys():
        # By way of the host: the devices need not hold two states at once
        arrays = flatten(to_host(make())) | arrays
    return jax.block_until_ready(to_devices(unflatten(arrays, like), shapes, devices, sharding))


def key_data(tree: Any) -> Any:
    """`tree` with plain arrays in place of typed keys."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def with_keys(tree: Any, like: Any) -> Any:
    """The inverse of `key_data`: typed keys where `like` has some."""
    return jax.tree.map(
        lambda x, old: jax.random.wrap_key_data(x) if _is_key(old) else x, tree, like
    )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


MEMBERS = "members"  # the axis S by its name, for what agents take from each other


def arrays_of(members: Members, num_devices: int, sharding: str = "pmap") -> Members:
    """What agents begin from, the same on each of this process's devices, [D, S]; [1, S] where
    those have their own.
    """
    seed = np.asarray(members.seed, np.int32)
    member_values = {k: np.asarray(v, np.float32) for k, v in members.member_values.items()}
    copies = 1 if sharding == "members" else num_devices // multihost.count()
    return jax.tree.map(lambda x: np.tile(x, (copies, 1)), Members(seed, member_values))


def over_seeds(function: Callable, tree: Any) -> Any:
    """`function` of arrays [S, ...], mapped over their seeds; a single seed skips `vmap` and its
    cost.
    """
    if jax.tree.leaves(tree)[0].shape[0] > 1:
        return jax.vmap(function, axis_name=MEMBERS)(tree)
    return jax.tree.map(lambda x: x[None], function(jax.tree.map(lambda x: x[0], tree)))


@jax.custom_batching.custom_vmap
def same_for_all_seeds(x: jax.Array) -> jax.Array:
    """`x`, which has the same value for every seed, as one value under `over_seeds` too.

    A loop's length or a slice's start that differs by seed would turn into masks, scatters and
    copies.
    """
    return x


@same_for_all_seeds.def_vmap
def _(axis_size, in_batched, x):
    return (x[0] if in_batched[0] else x), False
