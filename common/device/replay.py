"""A replay buffer on the device: rings of transitions, one per environment of an update, oldest overwritten first.

Nothing here depends on the number of devices:
rings are split over them like the environments, and random choices are made by groups of environments that no device
boundary cuts, each with its own key.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from common.cli.errors import UsageError
from common.device.devices import memory_of, size_of
from common.device.interface import Transition
from common.device.sharding import same_for_all_seeds
from common.envs.masks import empty_action
from common.envs.spaces import zeros

LARGE = 50_000_000  # bytes, from which on the header says what checkpoints take


class Replay(struct.PyTreeNode):
    """Rings of this device's N environments, of C slots each."""

    data: Any  # a record of arrays [N, C, ...]
    count: jax.Array  # [N] transitions that each ring was ever given; the same for all seeds

    @property
    def capacity(self) -> int:
        return jax.tree.leaves(self.data)[0].shape[1]

    @property
    def added(self) -> jax.Array:
        """Transitions that each ring was ever given, [], where that is the same for all of them."""
        return same_for_all_seeds(self.count[0])

    @property
    def filled(self) -> jax.Array:
        """Slots in use of each ring, [N]."""
        return jnp.minimum(self.count, self.capacity)

    def add(self, transitions: Any) -> "Replay":
        """The buffer with one more transition of every environment, [N, ...], where all rings are equally full."""
        slot = self.added % self.capacity
        new = jax.tree.map(lambda x, ring: x.astype(ring.dtype), transitions, self.data)
        data = jax.tree.map(lambda rings, new: _write(rings, new, slot), self.data, new)
        return Replay(data, self.count + 1)

    def add_valid(self, transitions: Any, valid: jax.Array) -> "Replay":
        """The buffer with those of the transitions [T, N, ...] that are `valid` [T, N]; T is at most the capacity."""
        order = self.count + jnp.cumsum(valid, axis=0) - valid
        beyond = self.capacity + jnp.arange(len(valid))[:, None]  # the ring's end, where nothing is written
        slot = jnp.where(valid, order % self.capacity, beyond)
        ring = jnp.arange(slot.shape[1])

        def write(rings, new):
            return rings.at[ring, slot].set(new.astype(rings.dtype), mode="drop", unique_indices=True)

        return Replay(jax.tree.map(write, self.data, transitions), self.count + jnp.sum(valid, axis=0))

    def sample(self, keys: jax.Array, per_group: int) -> Any:
        """Transitions [G * per_group, ...], drawn uniformly with replacement.

        Each of the G `keys` draws `per_group` transitions from its own N / G neighbouring rings.
        """
        filled = self.filled.reshape(keys.shape[0], -1)  # [G, rings of a group]

        def draw(key, filled):
            ends = jnp.cumsum(filled)
            choice = jax.random.randint(key, (per_group,), 0, ends[-1])
            ring = jnp.searchsorted(ends, choice, side="right", method="compare_all")
            return ring, choice - (ends - filled)[ring]

        ring, slot = jax.vmap(draw)(keys, filled)  # [G, per_group]
        ring = ring + filled.shape[1] * jnp.arange(keys.shape[0])[:, None]
        return jax.tree.map(lambda x: x[ring.ravel(), slot.ravel()], self.data)


def new_replay(example: Any, num_envs: int, capacity: int) -> Replay:
    """An empty buffer with `capacity` slots for each of `num_envs` transitions like `example`."""
    data = jax.tree.map(lambda x: jnp.zeros((num_envs, capacity, *x.shape), x.dtype), example)
    return Replay(data, jnp.zeros(num_envs, jnp.int32))


def num_groups(num_envs: int, batch_size: int) -> int:
    """Groups of environments that contribute equal parts of a batch."""
    return math.gcd(num_envs, batch_size)


def memory_note(args: Any, env: Any, devices: list[jax.Device], versions: bool = False) -> dict[str, str]:
    """What to say in a header of the memory that the buffers of all seeds take, where there are any.

    Raises UsageError, with the numbers, where the devices do not have it.
    """
    if not hasattr(args, "buffer_size"):
        return {}
    size, available = size_of(jax.eval_shape(lambda: example_transition(env, versions))), memory_of(devices)
    whole = args.capacity * args.num_rings
    transitions = whole * args.num_agents
    if transitions * size > available:
        raise UsageError(
            f"--buffer-size {args.buffer_size} does not fit: {transitions:,} transitions of {size:,} bytes are "
            f"{transitions * size / 1e9:,.1f} GB, and there are {available / 1e9:,.1f} GB; at most "
            f"{int(available / size):,} transitions fit{', over all agents together' if args.num_agents > 1 else ''}"
        )
    note = f"{transitions:,} transitions of {size:,} bytes = {transitions * size / 1e6:,.1f} MB"
    if whole < args.buffer_size:
        note += f" ({args.buffer_size:,} rounded down to {whole:,}, a ring for each of {args.num_rings} environments)"
    if not args.save_buffer:
        note += ", not saved: a resumed run fills it again before it learns on"
    elif transitions * size > LARGE:
        note += ", and as much again while a checkpoint is saved or loaded"
    return {"replay": note}


def example_transition(env: Any, versions: bool = False) -> Transition:
    """One transition of zeros, which says what the replay buffer has to hold; with `versions` those of policies too."""
    obs, version = zeros(env), jnp.int32(0) if versions else None
    return Transition(obs, empty_action(env.action_space), jnp.float32(0), jnp.bool_(False), obs, version)


@jax.custom_batching.custom_vmap
def _write(rings: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
    """`rings` [N, C, ...] with `new` [N, ...] at `slot`."""
    return jax.lax.dynamic_update_slice_in_dim(rings, new[:, None], slot, axis=1)


@_write.def_vmap
def _(axis_size, in_batched, rings, new, slot):
    # Still one slice: `vmap` by itself makes a scatter of it, and XLA a copy of the buffer for the scatter.
    rings, new = (
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip((rings, new), in_batched, strict=False)
    )
    return jax.lax.dynamic_update_slice_in_dim(rings, new[:, :, None], slot, axis=2), True
