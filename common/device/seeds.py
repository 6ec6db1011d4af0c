"""Several agents at once: the leading axis S of everything, one entry for each seed or member of a population."""

from collections.abc import Callable

import jax
import numpy as np

from common.cli.members import Members
from common.device import cluster

MEMBERS = "members"  # the axis S by its name, for what agents take from each other


def arrays_of(members: Members, num_devices: int, sharding: str = "pmap") -> Members:
    """What the agents begin from, for each of this process's devices the same, [D, S].

    [1, S] where devices have agents of their own.
    """
    seed, hyper = np.asarray(members.seed, np.int32), {k: np.asarray(v, np.float32) for k, v in members.hyper.items()}
    copies = 1 if sharding == "members" else num_devices // cluster.count()
    return jax.tree.map(lambda x: np.tile(x, (copies, 1)), Members(seed, hyper))


def over_seeds(function: Callable, num_seeds: int) -> Callable:
    """`function` mapped over the leading seed axis of all its arguments; a single seed skips `vmap` and its cost."""
    if num_seeds > 1:
        return jax.vmap(function, axis_name=MEMBERS)

    def single(*args):
        outputs = function(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], outputs)

    return single


@jax.custom_batching.custom_vmap
def same_for_all_seeds(x: jax.Array) -> jax.Array:
    """`x`, which has the same value for every seed, as one value under `over_seeds` too.

    A loop's length or a slice's start that differs by seed would turn into masks, scatters and copies.
    """
    return x


@same_for_all_seeds.def_vmap
def _(axis_size, in_batched, x):
    return (x[0] if in_batched[0] else x), False
