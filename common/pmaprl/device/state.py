"""State on the devices and on the host: over devices by axis D, over seeds or members by axis S.

A `TrainState` has three parts. `learner` and `run` are identical on all devices that share its
agents. The arrays [S, N, ...] of `actors` are split over those devices along the environments.
Under `pmap` each array has one more leading axis, the device, and a process has the rows of its
own devices. If devices have agents of their own (--sharding members), that axis has length 1, and
all arrays are split along S.

On the host there is no such axis, and a process has its own environments only: no process ever has
the environments of all processes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from pmaprl.cli.run_flags import Members
from pmaprl.device.sharding import AXIS, sharding_of_members
from pmaprl.machine import multihost
from pmaprl.machine.devices import Device


class TrainState(struct.PyTreeNode):
    """Everything that training changes."""

    learner: Any  # the algorithm's own state
    actors: Any  # the `Actors` of this device; () if environments step on the host
    run: Any  # the `RunState`


Arrays = dict[str, np.ndarray]
"""Host arrays by names such as `learner/params/actor/params/Dense_0/kernel`."""


def by_name(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by name, without the classes of this repository."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def flatten(tree: Any, left_out: tuple[str, ...] = ()) -> Arrays:
    """Turn a tree of host arrays into named arrays.

    Arrays whose names begin with one of `left_out` are left out.
    """
    leaves = by_name(tree)
    return {name: np.asarray(x) for name, x in leaves.items() if not name.startswith(left_out)}


def unflatten(arrays: Arrays, like: Any) -> Any:
    """Make the tree with the structure of `like` from named arrays: the inverse of `flatten`."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in flatten(like)])


def to_host(state: TrainState, unwanted: tuple[str, ...] = ()) -> TrainState:
    """Copy a state to the host, without the device axis.

    Typed keys become their data. Arrays of `actors` whose names begin with one of `unwanted` (such
    as `actors/replay/`) stay on the devices, and are zeros here.

    Returns:
        `learner` and `run` [S, ...], `actors` [S, N, ...]. N counts the environments of all devices
        of this process.
    """
    return _merged(*jax.device_get(_parts_of(state, unwanted)))


def copied(state: TrainState, unwanted: tuple[str, ...] = ()) -> Callable[[], TrainState] | None:
    """Begin to copy a state on its devices, since the next update reuses its memory.

    Returns:
        A function that waits for the copy and returns it as `to_host` does, in any thread. None if
        the devices have little room.
    """
    arrays, structure = jax.tree.flatten(_parts_of(state, unwanted))
    on_devices = [index for index, x in enumerate(arrays) if isinstance(x, Array)]
    if not _have_room([arrays[index] for index in on_devices]):
        return None
    copies = jax.device_put([arrays[index] for index in on_devices], may_alias=False)
    for index, copy in zip(on_devices, copies, strict=True):
        arrays[index] = copy
    return lambda: _merged(*jax.device_get(jax.tree.unflatten(structure, arrays)))


MOST_OF_ROOM = 0.5  # share of a device's free memory that a copy may take


def _have_room(arrays: list[Array]) -> bool:
    """True if the devices that hold these arrays have enough room for a copy."""
    device = min(jax.local_devices(), key=lambda device: device.id)
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    needed = 0.0
    for x in arrays:
        if device in x.sharding.device_set:
            needed += x.nbytes / len(x.sharding.device_set)
    return needed <= MOST_OF_ROOM * free


def _parts_of(state: TrainState, unwanted: tuple[str, ...]) -> tuple[tuple[Any, Any], Any]:
    """Parts of a state that the host needs.

    Returns:
        `learner` and `run` of one device; and `actors`, with a list of each device's part in place
        of every array.
    """
    state = key_data(state)

    def of_one_device(x: Array) -> Array:
        return x.addressable_data(0) if len(x) > 1 else x

    def parts_of_devices(path: Any, x: Array) -> list[Any]:  # of [D, S, N / D, ...]
        name = "actors/" + jax.tree_util.keystr(path, simple=True, separator="/")
        shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
        parts = [x] if x.is_fully_addressable else [shard.data for shard in shards]
        if name.startswith(unwanted):
            return [np.zeros(part.shape, part.dtype) for part in parts]
        return parts

    same = jax.tree.map(of_one_device, (state.learner, state.run))
    return same, jax.tree_util.tree_map_with_path(parts_of_devices, state.actors)


def _merged(same: tuple[Any, Any], actors: Any) -> TrainState:
    """Put the parts together once they are on the host."""

    def merged(parts: list[np.ndarray]) -> np.ndarray:
        x = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.moveaxis(x, 0, 1).reshape(_merged_shape(x.shape))

    learner, run = jax.tree.map(lambda x: x[0], same)
    actors = jax.tree.map(merged, actors, is_leaf=lambda x: isinstance(x, list))
    return TrainState(
        learner=learner,
        actors=actors,
        run=run,
    )


def host_like(shapes: Any) -> Any:
    """Zeros with the structure that `to_host` returns.

    `shapes` are those of a state on the devices of all processes.
    """
    shapes = jax.eval_shape(key_data, shapes)
    processes = multihost.count()

    def zeros_of_agents(x: Any) -> np.ndarray:
        return np.zeros(x.shape[1:], x.dtype)

    def zeros_of_environments(x: Any) -> np.ndarray:
        return np.zeros(_merged_shape(x.shape, processes), x.dtype)

    return TrainState(
        learner=jax.tree.map(zeros_of_agents, shapes.learner),
        actors=jax.tree.map(zeros_of_environments, shapes.actors),
        run=jax.tree.map(zeros_of_agents, shapes.run),
    )


def _merged_shape(shape: tuple[int, ...], processes: int = 1) -> tuple[int, ...]:
    """Shape [S, N, ...] of merged arrays [D, S, N / D, ...]; processes have equal parts of N."""
    devices, seeds, local, *more = shape
    total = devices * local
    return seeds, total // processes, *more


def to_devices(
    host: TrainState,
    like: TrainState,
    devices: list[Device],
    sharding: str = "pmap",
) -> TrainState:
    """Place a host state on devices: the inverse of `to_host`.

    Args:
        host: the state as `to_host` returns it.
        like: a state, or its shapes, with the wanted types.
        devices: all devices of the run.
        sharding: "pmap" or "members", as in `programs.over_devices`.
    """
    num_local = 1 if sharding == "members" else len(multihost.local_devices(devices))

    def repeated(x: Any) -> np.ndarray:
        return np.broadcast_to(x, (num_local, *np.shape(x)))

    def split(x: np.ndarray) -> np.ndarray:
        seeds, total, *shape = x.shape
        rows = np.reshape(x, (seeds, num_local, total // num_local, *shape))
        return np.moveaxis(rows, 1, 0)

    state = TrainState(
        learner=jax.tree.map(repeated, host.learner),
        actors=jax.tree.map(split, host.actors),
        run=jax.tree.map(repeated, host.run),
    )
    typed = partial(with_keys, like=like)
    if sharding == "members":
        return jax.jit(typed, out_shardings=sharding_of_members(devices))(state)
    # The state comes out of a pmap with the update's axis name: any other placement makes the
    # update compile a second time
    return jax.pmap(typed, axis_name=AXIS, devices=devices)(state)


def place_on_devices(
    arrays: Arrays,
    make: Callable[[], Any],
    shapes: Any,
    devices: list[Device],
    sharding: str,
) -> Any:
    """Place a state on devices, some or all of whose arrays were loaded.

    Args:
        arrays: loaded arrays by name.
        make: makes a new state on the devices, which gives the arrays that are not loaded.
        shapes: shapes of that state.
        devices: all devices of the run.
        sharding: "pmap" or "members".
    """
    if not arrays:
        return jax.block_until_ready(make())
    like = host_like(shapes)
    if by_name(like).keys() - arrays.keys():
        # By way of the host: the devices need not hold two states at once
        arrays = flatten(to_host(make())) | arrays
    host = unflatten(arrays, like)
    return jax.block_until_ready(to_devices(host, shapes, devices, sharding))


def key_data(tree: Any) -> Any:
    """Replace the typed keys of a tree by plain arrays."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def with_keys(tree: Any, like: Any) -> Any:
    """Restore typed keys where `like` has some: the inverse of `key_data`."""

    def restored(x: Any, old: Any) -> Any:
        return jax.random.wrap_key_data(x) if _is_key(old) else x

    return jax.tree.map(restored, tree, like)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def members_on_devices(
    members: Members,
    num_devices: int,
    sharding: str = "pmap",
) -> Members:
    """Seeds and values of the agents, as the program `init` takes them.

    Returns:
        Arrays [D, S], the same for each of this process's devices; [1, S] if devices have agents of
        their own.
    """
    copies = 1 if sharding == "members" else num_devices // multihost.count()
    seed = np.asarray(members.seed, np.int32)
    values = {name: np.asarray(x, np.float32) for name, x in members.member_values.items()}
    return jax.tree.map(lambda x: np.tile(x, (copies, 1)), Members(seed, values))
