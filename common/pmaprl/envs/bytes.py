"""Bytes in observations. Networks see them between 0 and 1, by the bounds of their space or by
--byte-max.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import Box, EnvSpec, Space, byte_range, is_image, leaves, map_leaves

IN_BOUNDS = "obs/bytes_in_bounds_min"  # a metric, of which --byte-max 255 is the way out
SMALLEST_PICTURE = 16  # pixels of the shorter side, below which an image may be of codes


def with_byte_max(space: Space, dtype: Any, byte_max: int) -> Space:
    """An observation space whose bytes, by a tree of types, are 0 to `byte_max`; as it is where
    that is 0.
    """

    def bounded(leaf, dtype):
        if not (byte_max and is_bytes(leaf, dtype)):
            return leaf
        low, high = (np.full(leaf.shape, bound, np.float32) for bound in (0, byte_max))
        return Box(low, high, leaf.shape)

    return map_leaves(bounded, space, dtype)


def spec_with_byte_max(spec: EnvSpec, byte_max: int) -> EnvSpec:
    """The same for what a policy knows of its environment."""
    return spec._replace(
        observation_space=with_byte_max(spec.observation_space, spec.obs_dtype, byte_max)
    )


def is_bytes(leaf: Any, dtype: Any) -> bool:
    return isinstance(leaf, Box) and np.dtype(dtype) == np.uint8


def describe_bytes(args: Any, spec: EnvSpec) -> dict[str, str]:
    """Notes for the header of a run on bytes that may be codes, though their bounds are those of
    pixels.
    """
    if args.byte_max or getattr(args, "normalize_obs", False):
        return {}
    found = [f"{name} {leaf}".strip() for name, leaf in _possible_codes(spec)]
    if not found:
        return {}
    what = f"{', '.join(found)} has bounds 0 to 255 and is divided by 255"
    return {"bytes": f"{what}; if the largest one is smaller, say so by --byte-max"}


def _possible_codes(spec: EnvSpec) -> Iterator[tuple[str, Box]]:
    """Names and spaces of parts that are bytes from 0 to 255, or without bounds, and no picture by
    their size.
    """
    for name, leaf, dtype in leaves(spec.observation_space, spec.obs_dtype):
        if is_mask(name) or not is_bytes(leaf, dtype) or not leaf.shape:
            continue
        is_picture = is_image(leaf) and min(leaf.shape[:2]) >= SMALLEST_PICTURE
        if not is_picture and np.all(byte_range(leaf)[1] == 255):
            yield name, leaf
