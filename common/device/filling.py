"""Work that only some of many items need, such as a reset after an episode's end: a few of them at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def fill_in(values: Any, missing: jax.Array, width: int, compute: Callable[[jax.Array], Any]) -> Any:
    """`values`, arrays [B, ...], with what `compute` gives for those that are `missing` [B].

    `compute` takes the indices of `width` of them and is called until all are done: not at all where none is missing.
    That is right under `vmap`, where a `cond` would compute everything. Where fewer are left, the last index is B, and
    what is computed for it goes nowhere.
    """

    def fill_some(carry):
        values, missing = carry
        (index,) = jnp.nonzero(missing, size=width, fill_value=missing.size)
        values = jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), values, compute(index))
        return values, missing.at[index].set(False, mode="drop")

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), fill_some, (values, missing))[0]
