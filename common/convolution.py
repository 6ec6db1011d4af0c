"""A small convolutional encoder for image observations, computed so that it trains fast on a CPU too."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

CHANNELS = 16
LARGEST_SIDE = 16


class Convolutions(nn.Module):
    """Features [..., F] of images [..., H, W, C]: 3 x 3 convolutions, with stride 2 while a side is over 16."""

    activation: Callable[[jax.Array], jax.Array]
    layer: dict[str, Any]  # arguments of every `nn.Dense`

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        while max(x.shape[-3:-1]) > LARGEST_SIDE:
            x = self.activation(nn.Dense(CHANNELS, **self.layer)(patches(x, stride=2)))
        x = self.activation(nn.Dense(CHANNELS, **self.layer)(patches(x)))
        return x.reshape(*x.shape[:-3], -1)


def patches(image: jax.Array, stride: int = 1) -> jax.Array:
    """The 3 x 3 neighbourhoods of [..., H, W, C], as [..., H', W', 9 * C]; sides under 3 are padded.

    A dense layer on them is a convolution, and trains faster on a CPU than XLA's own.
    """
    pad = [(0, 0)] * (image.ndim - 3) + [(0, max(3 - side, 0)) for side in image.shape[-3:-1]] + [(0, 0)]
    image = jnp.pad(image, pad)
    height, width = (image.shape[axis] - 2 for axis in (-3, -2))
    shifts = [(row, column) for row in range(3) for column in range(3)]
    return jnp.concatenate([image[..., r : r + height : stride, c : c + width : stride, :] for r, c in shifts], axis=-1)
