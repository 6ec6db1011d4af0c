"""Codes of what lies on the squares of a map, such as 2 for a wall, as pictures with a plane for each of them.

Divided by their largest value, as bytes of pictures are, walls would be something between floors and doors.
"""

import jax
import jax.numpy as jnp

from common.envs.spaces import Box, box


def planes(codes: jax.Array, counts: tuple[int, ...]) -> jax.Array:
    """Codes [H, W, C] as pictures [H, W, sum(counts)] of bools; of each kind there are so many, others are its last."""
    kinds = [jnp.minimum(codes[..., kind], count - 1) for kind, count in enumerate(counts)]
    return jnp.concatenate([jax.nn.one_hot(*kind, dtype=bool) for kind in zip(kinds, counts, strict=True)], axis=-1)


def space_of_planes(shape: tuple[int, ...], counts: tuple[int, ...]) -> Box:
    """The space of `planes` of codes of this shape, [H, W, C]."""
    return box((*shape[:2], sum(counts)), 0.0, 1.0)
