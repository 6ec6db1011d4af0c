"""Convolutional encoders for image observations, computed so that they train fast on a CPU too."""

import math
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
        return flat(x)


class NatureConvolutions(nn.Module):
    """Features [..., F] of images [..., H, W, C], such as 84 x 84 x 4 (Mnih et al. 2015)."""

    activation: Callable[[jax.Array], jax.Array]
    layer: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = self.activation(nn.Dense(channels, **self.layer)(patches(x, size, stride)))
        return flat(x)


class ImpalaConvolutions(nn.Module):
    """Features [..., F] of images [..., H, W, C]: the residual network of Espeholt et al. 2018, figure 3."""

    activation: Callable[[jax.Array], jax.Array]
    layer: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in (16, 32, 32):
            x = self._same(channels, x)
            height, width = x.shape[-3:-1]
            pooled = nn.max_pool(x.reshape(-1, height, width, channels), (3, 3), strides=(2, 2), padding="SAME")
            x = pooled.reshape(*x.shape[:-3], *pooled.shape[1:])
            for _ in range(2):
                inner = self._same(channels, self.activation(x))
                x = x + self._same(channels, self.activation(inner))
        return flat(self.activation(x))

    def _same(self, channels: int, x: jax.Array) -> jax.Array:
        """A 3 x 3 convolution that keeps height and width."""
        pad = [(0, 0)] * (x.ndim - 3) + [(1, 1), (1, 1), (0, 0)]
        return nn.Dense(channels, **self.layer)(patches(jnp.pad(x, pad)))


def patches(image: jax.Array, size: int = 3, stride: int = 1) -> jax.Array:
    """The `size` x `size` neighbourhoods of [..., H, W, C], as [..., H', W', size * size * C]; short sides are padded.

    A dense layer on them is a convolution, and trains faster on a CPU than XLA's own.
    """
    pad = [(0, 0)] * (image.ndim - 3) + [(0, max(size - side, 0)) for side in image.shape[-3:-1]] + [(0, 0)]
    image = jnp.pad(image, pad)
    height, width = (image.shape[axis] - size + 1 for axis in (-3, -2))
    shifts = [(row, column) for row in range(size) for column in range(size)]
    return jnp.concatenate([image[..., r : r + height : stride, c : c + width : stride, :] for r, c in shifts], axis=-1)


def flat(x: jax.Array) -> jax.Array:
    """Features [..., H * W * C] of [..., H, W, C], of no image at all too."""
    return x.reshape(*x.shape[:-3], math.prod(x.shape[-3:]))
