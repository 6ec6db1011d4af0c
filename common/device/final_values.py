"""The values of observations that time limits cut off, for which a whole network pass over a rollout would be waste."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def put_final_values(
    next_value: jax.Array, cut_off: jax.Array, final_obs: jax.Array, value_of: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """`next_value` [T, N] with the value of `final_obs` [T, N, ...] where `cut_off` [T, N].

    Evaluates N observations at a time until all are done: no network pass at all while no time limit strikes, and right
    under `vmap`, where a `cond` would evaluate everything.
    """
    shape, width = next_value.shape, next_value.shape[1]
    final_obs = final_obs.reshape(-1, *final_obs.shape[2:])

    def put_some(carry):
        missing, next_value = carry
        (index,) = jnp.nonzero(missing, size=width, fill_value=missing.size)
        next_value = next_value.at[index].set(value_of(final_obs[index]), mode="drop")
        return missing.at[index].set(False, mode="drop"), next_value

    start = cut_off.ravel(), next_value.ravel()
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0]), put_some, start)[1].reshape(shape)
