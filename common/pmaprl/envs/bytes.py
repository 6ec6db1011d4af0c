"""Bytes in observations, which networks see between 0 and 1, by their bounds or by --byte-max."""

from collections.abc import Iterator
from typing import Any, TypeGuard

import numpy as np

from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import Box, EnvSpec, Space, box, byte_range, is_image, leaves, map_leaves

IN_BOUNDS = "obs/bytes_in_bounds_min"  # name of a metric; --byte-max 255 turns its check off
SMALLEST_PICTURE = 16  # an image with a shorter side, in pixels, may be of codes


def with_byte_max(space: Space, dtype: Any, byte_max: int) -> Space:
    """Bound the bytes of an observation space.

    Args:
        space: the space.
        dtype: its type, or a tree of types.
        byte_max: the largest byte; 0 leaves the space as it is.
    """

    def bounded(leaf, dtype):
        if not byte_max or not is_bytes(leaf, dtype):
            return leaf
        return box(leaf.shape, 0, byte_max)

    return map_leaves(bounded, space, dtype)


def spec_with_byte_max(spec: EnvSpec, byte_max: int) -> EnvSpec:
    """Bound the bytes of a spec's observations, as `with_byte_max` does."""
    space = with_byte_max(spec.observation_space, spec.obs_dtype, byte_max)
    return spec._replace(observation_space=space)


def is_bytes(leaf: Any, dtype: Any) -> TypeGuard[Box]:
    return isinstance(leaf, Box) and np.dtype(dtype) == np.uint8


def describe_bytes(args: Any, spec: EnvSpec) -> dict[str, str]:
    """Notes for the header of a run on bytes that have the bounds of pixels, but may be codes."""
    if args.byte_max or getattr(args, "normalize_obs", False):
        return {}
    parts = [f"{name} {leaf}".strip() for name, leaf in _possible_codes(spec)]
    if not parts:
        return {}
    names = ", ".join(parts)
    return {
        "bytes": f"{names} has bounds 0 to 255 and is divided by 255; if the largest one is "
        "smaller, say so by --byte-max"
    }


def _possible_codes(spec: EnvSpec) -> Iterator[tuple[str, Box]]:
    """Names and spaces of parts whose bytes are 0 to 255, and that are too small for pictures."""
    for name, leaf, dtype in leaves(spec.observation_space, spec.obs_dtype):
        if is_mask(name) or not is_bytes(leaf, dtype) or not leaf.shape:
            continue
        is_picture = is_image(leaf) and min(leaf.shape[:2]) >= SMALLEST_PICTURE
        _, size = byte_range(leaf)
        if not is_picture and np.all(size == 255):
            yield name, leaf
