"""A replay buffer on the device: a ring of transitions per environment.

A ring overwrites its oldest transition first. Nothing here depends on the number of devices. Rings
are split over them like the environments. Random choices are made by groups of environments that no
device boundary cuts, each with its own key.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from pmaprl.device.interface import Transition
from pmaprl.device.sharding import same_for_all_seeds
from pmaprl.envs.masks import empty_action
from pmaprl.envs.spaces import EnvSpec
from pmaprl.machine.devices import size_of


class Replay(struct.PyTreeNode):
    """Rings of this device's N environments, of K slots each."""

    data: Any  # a record of arrays [N, K, ...]
    count: Array  # [N] transitions that each ring was ever given; the same for all seeds

    @property
    def capacity(self) -> int:
        return jax.tree.leaves(self.data)[0].shape[1]

    @property
    def added(self) -> Array:
        """Transitions [] that each ring was ever given, if that is the same for all of them."""
        return same_for_all_seeds(self.count[0])

    @property
    def slots_in_use(self) -> Array:
        """Slots in use of each ring, [N]."""
        return jnp.minimum(self.count, self.capacity)

    @property
    def fill(self) -> Array:
        """Share of slots in use of each ring, [N]; exactly 1 if all are."""
        return jnp.where(self.slots_in_use == self.capacity, 1.0, self.slots_in_use / self.capacity)

    def add(self, transitions: Any) -> "Replay":
        """Store one transition [N, ...] of every environment, where all rings are equally full."""
        slot = self.added % self.capacity

        def stored(rings: Array, x: Array) -> Array:
            return _write(rings, x.astype(rings.dtype), slot)

        data = jax.tree.map(stored, self.data, transitions)
        return Replay(data=data, count=self.count + 1)

    def add_valid(self, transitions: Any, valid: Array) -> "Replay":
        """Store the valid ones of several steps.

        Args:
            transitions: record of arrays [T, N, ...], with T at most the capacity.
            valid: [T, N] bool.
        """
        order = self.count + jnp.cumsum(valid, axis=0) - valid
        # A slot beyond the ring's end is not written
        slot = jnp.where(valid, order % self.capacity, self.capacity)
        ring = jnp.arange(slot.shape[1])

        def write(step, data):
            at = (ring, slot[step])

            def stored(rings: Array, x: Array) -> Array:
                new = x[step].astype(rings.dtype)
                return rings.at[at].set(new, mode="drop", unique_indices=True)

            return jax.tree.map(stored, data, transitions)

        # XLA must not know the length: it would write a single step to two copies of the buffer,
        # one to sample from
        num_steps = jnp.any(valid) * len(valid)
        data = jax.lax.fori_loop(0, num_steps, write, self.data)
        return Replay(data=data, count=self.count + jnp.sum(valid, axis=0))

    def sample(
        self,
        keys: Array,
        per_group: int,
        num_steps: int = 1,
        gamma: float | Array = 1.0,
    ) -> Any:
        """Draw a batch, uniformly with replacement.

        With `num_steps` above 1 the rings hold a `Transition`. A sample then has the discounted
        rewards of that many steps and the next observation after them (Sutton & Barto 2018, section
        7.1), or of fewer where the episode ends. No sample begins at the newest `num_steps` - 1
        transitions of a ring.

        Args:
            keys: [G] keys. Each draws from its own N / G neighbouring rings.
            per_group: samples of each key.
            num_steps: steps n of n-step returns.
            gamma: discount factor of n-step returns.

        Returns:
            The record with arrays [G * per_group, ...].
        """
        ring, place = self._places(keys, per_group, self._drawable(num_steps))
        if num_steps == 1:  # any order of the slots in use serves
            return jax.tree.map(lambda x: x[ring, place], self.data)
        oldest = jnp.where(self.count > self.capacity, self.count, 0)[ring]
        slots = (oldest + place + jnp.arange(num_steps)[:, None]) % self.capacity  # [num_steps, B]
        goes_on = ~self.data.first[ring, slots[1:]]
        is_first_used = jnp.ones_like(goes_on[:1])
        are_later_used = jnp.cumprod(goes_on, axis=0, dtype=bool)
        used = jnp.concatenate([is_first_used, are_later_used])  # [num_steps, B]
        powers = jnp.asarray(gamma) ** jnp.arange(num_steps + 1)
        count = jnp.sum(used, axis=0)
        newest = jnp.take_along_axis(slots, count[None] - 1, axis=0)[0]
        begin = slots[0]
        first = jax.tree.map(lambda x: x[ring, begin], self.data)
        last = jax.tree.map(lambda x: x[ring, newest], self.data)
        rewards = self.data.reward[ring, slots] * used * powers[:-1, None]
        return last._replace(
            obs=first.obs,
            action=first.action,
            reward=jnp.sum(rewards, axis=0),
            discount=powers[count],
        )

    def can_sample(self, groups: int, num_steps: int = 1) -> Array:
        """True [] if each of this device's `groups` of rings has something to draw."""
        of_groups = self._drawable(num_steps).reshape(groups, -1)
        return jnp.all(jnp.any(of_groups > 0, axis=1))

    def _drawable(self, num_steps: int) -> Array:
        """Number [N] of each ring's transitions at which a sample of `num_steps` may begin."""
        return jnp.maximum(self.slots_in_use - num_steps + 1, 0)

    def _places(
        self,
        keys: Array,
        per_group: int,
        counts: Array,
    ) -> tuple[Array, Array]:
        """Draw rings and places in them, uniformly among the first `counts` [N] of each ring.

        Returns:
            Rings and places, [G * per_group] each.
        """
        drawable = counts.reshape(keys.shape[0], -1)  # [G, rings of a group]

        def draw(key, drawable):
            ends = jnp.cumsum(drawable)
            choice = jax.random.randint(key, (per_group,), 0, ends[-1])
            ring = jnp.searchsorted(ends, choice, side="right", method="compare_all")
            return ring, choice - (ends - drawable)[ring]

        ring, place = jax.vmap(draw)(keys, drawable)  # [G, per_group]
        ring = ring + drawable.shape[1] * jnp.arange(keys.shape[0])[:, None]
        return ring.ravel(), place.ravel()


def new_replay(
    example: Any,
    num_envs: int,
    capacity: int,
) -> Replay:
    """Make an empty buffer of `num_envs` rings, with `capacity` slots each.

    `example` is one transition.
    """
    data = jax.tree.map(lambda x: jnp.zeros((num_envs, capacity, *x.shape), x.dtype), example)
    return Replay(data, jnp.zeros(num_envs, jnp.int32))


def describe_replay(args: Any, state: Any) -> dict[str, str]:
    """Describe the buffers in the header of a run; nothing if there are none.

    `state` has the shapes of the run's state.
    """
    if not hasattr(args, "buffer_size"):
        return {}
    capacity = args.capacity * args.envs_per_update
    megabytes = size_of(state.actors.replay) / 1e6
    note = f"{capacity * args.num_agents:,} transitions, {megabytes:,.1f} MB"
    if capacity < args.buffer_size:
        rings = f"a ring for each of {args.envs_per_update} environments"
        note += f" ({args.buffer_size:,} rounded down, {rings})"
    if not args.save_buffer:
        note += ", not saved: a resumed run fills it again first"
    return {"replay": note}


def example_transition(
    args: Any,
    env: EnvSpec,
    versions: bool = False,
) -> Transition:
    """Make a transition of zeros, with the shapes and types of the replay buffer's entries.

    With `versions` it has a policy version too.
    """
    obs = env.example_obs()
    version = jnp.int32(0) if versions else None
    first = jnp.bool_(True) if args.n_steps > 1 else None
    return Transition(
        obs=obs,
        action=empty_action(env.action_space),
        reward=jnp.float32(0),
        terminated=jnp.bool_(False),
        next_obs=obs,
        version=version,
        first=first,
    )


@jax.custom_batching.custom_vmap
def _write(
    rings: Array,
    new: Array,
    slot: Array,
) -> Array:
    """Write `new` [N, ...] at `slot` of `rings` [N, K, ...]."""
    return jax.lax.dynamic_update_slice_in_dim(rings, new[:, None], slot, axis=1)


@_write.def_vmap
def _(axis_size, in_batched, rings, new, slot):
    # This stays one slice: `vmap` by itself makes a scatter of it, and XLA copies the buffer for a
    # scatter
    rings, new = (
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip((rings, new), in_batched, strict=False)
    )
    return jax.lax.dynamic_update_slice_in_dim(rings, new[:, :, None], slot, axis=2), True
