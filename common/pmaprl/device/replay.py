"""A replay buffer on the device: rings of transitions, one per environment of an update, oldest
overwritten first.

Nothing here depends on the number of devices: rings are split over them like the environments, and
random choices are made by groups of environments that no device boundary cuts, each with its own
key.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from pmaprl.device.devices import size_of
from pmaprl.device.interface import Transition
from pmaprl.device.sharding import same_for_all_seeds
from pmaprl.envs.masks import empty_action
from pmaprl.envs.spaces import EnvSpec


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

    @property
    def fill(self) -> jax.Array:
        """The share of slots in use of each ring, [N]; 1 exactly where all are."""
        return jnp.where(self.filled == self.capacity, 1.0, self.filled / self.capacity)

    def add(self, transitions: Any) -> "Replay":
        """The buffer with one more transition of every environment, [N, ...], where all rings are
        equally full.
        """
        slot = self.added % self.capacity
        data = jax.tree.map(
            lambda rings, x: _write(rings, x.astype(rings.dtype), slot), self.data, transitions
        )
        return Replay(data, self.count + 1)

    def add_valid(self, transitions: Any, valid: jax.Array) -> "Replay":
        """The buffer with those of the transitions [T, N, ...] that are `valid` [T, N]; T is at
        most the capacity.
        """
        order = self.count + jnp.cumsum(valid, axis=0) - valid
        # Beyond the ring's end nothing is written
        slot = jnp.where(valid, order % self.capacity, self.capacity)
        ring = jnp.arange(slot.shape[1])

        def write(step, data):
            at = (ring, slot[step])
            new = jax.tree.map(lambda x, like: x[step].astype(like.dtype), transitions, data)
            return jax.tree.map(
                lambda rings, x: rings.at[at].set(x, mode="drop", unique_indices=True), data, new
            )

        # XLA must not know the length: it would write a single step to two copies of the buffer,
        # one to sample from
        data = jax.lax.fori_loop(0, jnp.any(valid) * len(valid), write, self.data)
        return Replay(data, self.count + jnp.sum(valid, axis=0))

    def sample(
        self, keys: jax.Array, per_group: int, num_steps: int = 1, gamma: float | jax.Array = 1.0
    ) -> Any:
        """Transitions [G * per_group, ...]: each of the G `keys` draws `per_group` of its own N / G
        neighbouring rings, uniformly with replacement.

        With several `num_steps` the data are a `Transition`, with the rewards and the next
        observation of so many steps (Sutton & Barto 2018, 7.1), fewer where the episode ends; a
        ring's newest `num_steps` - 1 are not drawn.
        """
        ring, place = self._places(keys, per_group, self._drawable(num_steps))
        if num_steps == 1:
            return jax.tree.map(lambda x: x[ring, place], self.data)
        oldest = jnp.where(self.count > self.capacity, self.count, 0)[ring]
        slots = (oldest + place + jnp.arange(num_steps)[:, None]) % self.capacity  # [n, B]
        goes_on = ~self.data.first[ring, slots[1:]]
        # [n, B]
        used = jnp.concatenate(
            [jnp.ones_like(goes_on[:1]), jnp.cumprod(goes_on, axis=0, dtype=bool)]
        )
        powers = jnp.asarray(gamma) ** jnp.arange(num_steps + 1)
        count = jnp.sum(used, axis=0)
        newest = jnp.take_along_axis(slots, count[None] - 1, axis=0)[0]
        first, last = (
            jax.tree.map(lambda x: x[ring, slot], self.data) for slot in (slots[0], newest)
        )
        reward = jnp.sum(self.data.reward[ring, slots] * used * powers[:-1, None], axis=0)
        return last._replace(
            obs=first.obs, action=first.action, reward=reward, discount=powers[count]
        )

    def can_sample(self, groups: int, num_steps: int = 1) -> jax.Array:
        """Tell if each of this device's `groups` of rings has something to draw for `sample`,
        [].
        """
        of_groups = self._drawable(num_steps).reshape(groups, -1)
        return jnp.all(jnp.any(of_groups > 0, axis=1))

    def _drawable(self, num_steps: int) -> jax.Array:
        """Transitions of each ring, [N], that begin so many steps."""
        return jnp.maximum(self.filled - num_steps + 1, 0)

    def _places(
        self, keys: jax.Array, per_group: int, counts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rings and places in them [G * per_group], uniformly among the first `counts` [N] of
        each.
        """
        filled = counts.reshape(keys.shape[0], -1)  # [G, rings of a group]

        def draw(key, filled):
            ends = jnp.cumsum(filled)
            choice = jax.random.randint(key, (per_group,), 0, ends[-1])
            ring = jnp.searchsorted(ends, choice, side="right", method="compare_all")
            return ring, choice - (ends - filled)[ring]

        ring, slot = jax.vmap(draw)(keys, filled)  # [G, per_group]
        ring = ring + filled.shape[1] * jnp.arange(keys.shape[0])[:, None]
        return ring.ravel(), slot.ravel()


def new_replay(example: Any, num_envs: int, capacity: int) -> Replay:
    """An empty buffer with `capacity` slots for each of `num_envs` transitions like `example`."""
    data = jax.tree.map(lambda x: jnp.zeros((num_envs, capacity, *x.shape), x.dtype), example)
    return Replay(data, jnp.zeros(num_envs, jnp.int32))


def describe_replay(args: Any, state: Any) -> dict[str, str]:
    """What the header of a run, whose `state` has these shapes, says of its buffers, where there
    are any.
    """
    if not hasattr(args, "buffer_size"):
        return {}
    whole = args.capacity * args.envs_per_update
    note = f"{whole * args.num_agents:,} transitions, {size_of(state.actors.replay) / 1e6:,.1f} MB"
    if whole < args.buffer_size:
        note += (
            f" ({args.buffer_size:,} rounded down, a ring for each of "
            f"{args.envs_per_update} environments)"
        )
    return {
        "replay": note
        + ("" if args.save_buffer else ", not saved: a resumed run fills it again first")
    }


def example_transition(args: Any, env: EnvSpec, versions: bool = False) -> Transition:
    """One transition of zeros, which says what the replay buffer has to hold; with `versions` those
    of policies too.
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
def _write(rings: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
    """`rings` [N, C, ...] with `new` [N, ...] at `slot`."""
    return jax.lax.dynamic_update_slice_in_dim(rings, new[:, None], slot, axis=1)


@_write.def_vmap
def _(axis_size, in_batched, rings, new, slot):
    # Still one slice: `vmap` by itself makes a scatter of it, and XLA a copy of the buffer for the
    # scatter.
    rings, new = (
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip((rings, new), in_batched, strict=False)
    )
    return jax.lax.dynamic_update_slice_in_dim(rings, new[:, :, None], slot, axis=2), True
