"""The values of observations that time limits cut off, for which a whole network pass over a rollout would be waste."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def put_final_values(
    next_value: jax.Array, cut_off: jax.Array, final: Any, value_of: Callable[[Any], jax.Array]
) -> jax.Array:
    """`next_value` [T, N] with the value of what is `final`, arrays [T, N, ...], where `cut_off` [T, N].

    Evaluates N of them at a time until all are done: no network pass at all while no time limit strikes, and right
    under `vmap`, where a `cond` would evaluate everything.
    """
    shape, width = next_value.shape, next_value.shape[1]
    final = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), final)

    def put_some(carry):
        missing, next_value = carry
        (index,) = jnp.nonzero(missing, size=width, fill_value=missing.size)
        next_value = next_value.at[index].set(value_of(jax.tree.map(lambda x: x[index], final)), mode="drop")
        return missing.at[index].set(False, mode="drop"), next_value

    start = cut_off.ravel(), next_value.ravel()
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0]), put_some, start)[1].reshape(shape)
