"""Many updates in one call: the loop that every algorithm's `update` runs on the device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from common.episodes import EpisodeTotals, no_episodes


def repeat(
    update: Callable[[Any], tuple[Any, dict[str, jax.Array], EpisodeTotals]], state: Any, num_updates: jax.Array
) -> tuple[Any, dict[str, jax.Array], dict[str, jax.Array]]:
    """Run `update` `num_updates` times; metrics are averaged, episodes merged.

    `num_updates` is traced: one executable serves every length, and a resumed run executes the very same code. Returns
    the state, the metrics, and for each of `update`'s metrics the index of the first update in which it was not finite
    (or -1).
    """
    update = jax.jit(update)  # traced once, although its shapes are asked for too
    _, metrics, episodes = jax.eval_shape(update, state)
    zeros = jax.tree.map(jnp.zeros_like, metrics)
    never = jax.tree.map(lambda x: jnp.full(x.shape, -1, jnp.int32), metrics)
    none = jax.tree.map(lambda x, shape: jnp.broadcast_to(x, shape.shape), no_episodes(), episodes)

    def body(index, carry):
        state, sums, broken, totals = carry
        state, metrics, episodes = update(state)
        sums = jax.tree.map(jnp.add, sums, metrics)
        broken = jax.tree.map(lambda first, x: jnp.where((first < 0) & ~jnp.isfinite(x), index, first), broken, metrics)
        return state, sums, broken, totals.merge(episodes)

    state, sums, broken, totals = jax.lax.fori_loop(0, num_updates, body, (state, zeros, never, none))
    means = jax.tree.map(lambda total: total / jnp.maximum(num_updates, 1), sums)
    return state, means | totals.metrics(), broken
