"""Codes of the things on a grid, as MiniGrid has them, as planes of a picture."""

import jax
import jax.numpy as jnp

from pmaprl.envs.spaces import Box, box


def planes(codes: jax.Array, counts: tuple[int, ...]) -> jax.Array:
    """Codes [H, W, C] as pictures [H, W, sum(counts)] of bools; of each kind there are so many,
    others are its last.
    """
    kinds = [jnp.minimum(codes[..., kind], count - 1) for kind, count in enumerate(counts)]
    return jnp.concatenate(
        [jax.nn.one_hot(*kind, dtype=bool) for kind in zip(kinds, counts, strict=True)], axis=-1
    )


def space_of_planes(shape: tuple[int, ...], counts: tuple[int, ...]) -> Box:
    """The space of `planes` of codes of this shape, [H, W, C]."""
    return box((*shape[:2], sum(counts)), 0.0, 1.0)
