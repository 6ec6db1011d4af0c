"""Codes of the things on a grid, as MiniGrid has them, as planes of a picture."""

import jax
import jax.numpy as jnp

from pmaprl.envs.spaces import Box, box


def planes(codes: jax.Array, counts: tuple[int, ...]) -> jax.Array:
    """Convert codes [H, W, C] to planes [H, W, sum(counts)] of bools, one for each code.

    Codes beyond the count of their kind map to its last plane.
    """
    kinds = []
    for kind, count in enumerate(counts):
        known = jnp.minimum(codes[..., kind], count - 1)
        kinds.append(jax.nn.one_hot(known, count, dtype=bool))
    return jnp.concatenate(kinds, axis=-1)


def space_of_planes(shape: tuple[int, ...], counts: tuple[int, ...]) -> Box:
    """The space of `planes` of codes of this shape, [H, W, C]."""
    return box((*shape[:2], sum(counts)), 0.0, 1.0)
