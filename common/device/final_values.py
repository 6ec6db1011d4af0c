"""The values of observations that time limits cut off, for which a whole network pass over a rollout would be waste."""

from collections.abc import Callable
from typing import Any

import jax

from common.device.filling import fill_in


def put_final_values(
    next_value: jax.Array, cut_off: jax.Array, final: Any, value_of: Callable[[Any], jax.Array]
) -> jax.Array:
    """`next_value` [T, N] with the value of what is `final`, arrays [T, N, ...], where `cut_off` [T, N].

    Evaluates N of them at a time: no network pass at all while no time limit strikes.
    """
    final = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), final)
    values = fill_in(
        next_value.ravel(),
        cut_off.ravel(),
        width=next_value.shape[1],
        compute=lambda index: value_of(jax.tree.map(lambda x: x[index], final)),
    )
    return values.reshape(next_value.shape)
