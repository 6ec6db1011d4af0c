"""Many updates in one call: the loop that every algorithm's `update` runs on the device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from common.device.episodes import EpisodeTotals, no_episodes
from common.device.optim import zeros_of
from common.device.reductions import Tally


def repeat(
    update: Callable[[Any], tuple[Any, Tally, EpisodeTotals]], state: Any, num_updates: jax.Array
) -> tuple[Any, dict[str, jax.Array], dict[str, jax.Array]]:
    """Run `update` `num_updates` times; metrics are put together, episodes merged.

    `num_updates` is traced: one executable serves every length, and a resumed run executes the very same code. Returns
    the state, the metrics, and for each of `update`'s metrics the index of the first update in which it was not finite
    (or -1).
    """
    update = jax.jit(update)  # traced once, although its shapes are asked for too
    _, zeros, none = zeros_of(update, state)
    never = {name: jnp.int32(-1) for name in zeros.value}

    def body(index, carry):
        state, tally, broken, episodes = carry
        state, new, finished = update(state)
        broken = {
            name: jnp.where((first < 0) & ~jnp.isfinite(new.value[name]), index, first)
            for name, first in broken.items()
        }
        return state, tally + new, broken, episodes.merge(finished)

    start = state, zeros, never, no_episodes(none.info)
    state, tally, broken, episodes = jax.lax.fori_loop(0, num_updates, body, start)
    return state, tally.metrics() | episodes.metrics(), broken


def repeat_and_add(step: Callable[[jax.Array, Any], tuple[Any, Tally]], state: Any, count: jax.Array):
    """Run `step` of 0 .. `count` - 1 and the state, `count` times; the state and the sum of the tallies."""
    step = jax.jit(step)  # traced once, although its shapes are asked for too
    _, zeros = zeros_of(step, jnp.int32(0), state)

    def body(index, carry):
        state, tally = carry
        state, new = step(index, state)
        return state, tally + new

    return jax.lax.fori_loop(0, count, body, (state, zeros))
