"""What stands before the heads of a network: encoders of observations, also of images, and hidden layers.

Images pass through them as [C, H, W, B], the batch last. A neighbourhood is then a few long runs of memory, and a
convolution one product of matrices, [N, K] with [K, H' * W' * B].
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from common.envs import spaces
from common.envs.masks import is_mask

CHANNELS = 16
LARGEST_SIDE = 16


class Convolution(nn.Module):
    """[N, H', W', B] of [C, H, W, B]: N features of each `size` x `size` neighbourhood."""

    features: int
    size: int = 3
    stride: int = 1
    kernel_init: Callable = nn.linear.default_kernel_init
    dtype: Any = None  # of the arithmetic

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = patches(x, self.size, self.stride)  # [K, H', W', B]
        kernel = self.param("kernel", self.kernel_init, (len(x), self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = kernel.T @ x.reshape(len(x), math.prod(x.shape[1:])) + bias[:, None]
        return y.reshape(self.features, *x.shape[1:])


class ImageEncoder(nn.Module):
    """Features [..., F] of images [..., H, W, C]."""

    activation: Callable[[jax.Array], jax.Array]
    layer: dict[str, Any]  # arguments of every layer, as of `nn.Dense`

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return flat(self.convolved(batch_last(images)), images.shape[:-3])

    def convolved(self, x: jax.Array) -> jax.Array:
        """[C', H', W', B] of [C, H, W, B]."""
        raise NotImplementedError


class Convolutions(ImageEncoder):
    """3 x 3 convolutions, with stride 2 while a side is over 16."""

    def convolved(self, x: jax.Array) -> jax.Array:
        while max(x.shape[1:3]) > LARGEST_SIDE:
            x = self.activation(Convolution(CHANNELS, stride=2, **self.layer)(x))
        return self.activation(Convolution(CHANNELS, **self.layer)(x))


class NatureConvolutions(ImageEncoder):
    """Those for images such as 84 x 84 x 4 of Mnih et al. 2015."""

    def convolved(self, x: jax.Array) -> jax.Array:
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = self.activation(Convolution(channels, size, stride, **self.layer)(x))
        return x


class ImpalaConvolutions(ImageEncoder):
    """The residual network of Espeholt et al. 2018, figure 3."""

    def convolved(self, x: jax.Array) -> jax.Array:
        for channels in (16, 32, 32):
            x = nn.max_pool(self._same(channels, x), window_shape=(3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                inner = self._same(channels, self.activation(x))
                x = x + self._same(channels, self.activation(inner))
        return self.activation(x)

    def _same(self, channels: int, x: jax.Array) -> jax.Array:
        """A 3 x 3 convolution that keeps height and width."""
        return Convolution(channels, **self.layer)(jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]))


def batch_last(images: jax.Array) -> jax.Array:
    """[C, H, W, B] of [..., H, W, C]."""
    return jnp.moveaxis(images.reshape(math.prod(images.shape[:-3]), *images.shape[-3:]), (0, -1), (-1, 0))


def patches(x: jax.Array, size: int = 3, stride: int = 1) -> jax.Array:
    """The `size` x `size` neighbourhoods of [C, H, W, B], as [size * size * C, H', W', B].

    Sides are padded with zeros until the last neighbourhood ends with them, so that no pixel is left out.
    """
    missing = (max(size - side, (size - side) % stride) for side in x.shape[1:3])
    x = jnp.pad(x, [(0, 0), *((0, more) for more in missing), (0, 0)])
    height, width = (side - size + 1 for side in x.shape[1:3])
    shifts = [(row, column) for row in range(size) for column in range(size)]
    return jnp.concatenate([x[:, r : r + height : stride, c : c + width : stride] for r, c in shifts])


def flat(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Features [*batch, C * H * W] of [C, H, W, B], of no image at all too."""
    count = math.prod(x.shape[:3])
    return x.reshape(count, x.shape[3]).T.reshape(*batch, count)


def by_columns(x: jax.Array, kernel: jax.Array, *_, **__) -> jax.Array:
    """The `dot_general` of a `nn.Dense` behind convolutions: features [..., F] as `flat` left them, a kernel [F, N].

    It begins with the kernel, and the barrier keeps it so: the other way round takes a CPU three times as long.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return jax.lax.optimization_barrier(kernel.T @ rows.T).T.reshape(*x.shape[:-1], kernel.shape[1])


Encoder = Literal["small", "nature", "impala", "flat"]  # of images; flat: no convolutions
CONVOLUTIONS = {"small": Convolutions, "nature": NatureConvolutions, "impala": ImpalaConvolutions}


class Features(nn.Module):
    """Raw observations as vectors [..., F]: encoded, images [..., H, W, C] behind their encoder, all parts together."""

    space: spaces.Space
    activation: str  # a function of flax.linen, such as tanh
    layer: dict[str, Any]  # arguments of every layer, as of `nn.Dense`
    encoder: Encoder = "small"

    @nn.compact
    def __call__(self, obs: Any) -> jax.Array:
        parts = [self._features(leaf, x) for name, leaf, x in spaces.leaves(self.space, obs) if not is_mask(name)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    def _features(self, space: spaces.Leaf, obs: jax.Array) -> jax.Array:
        x = spaces.encode(obs, space)  # [..., F] or [..., H, W, C]
        if not spaces.is_image(space):
            return x
        if self.encoder == "flat":
            return x.reshape(*x.shape[:-3], math.prod(space.shape))
        return CONVOLUTIONS[self.encoder](getattr(nn, self.activation), self.layer)(x)


class MLP(nn.Module):
    """The hidden layers, [..., F] to [..., width of the last]."""

    hidden_sizes: tuple[int, ...]
    activation: str
    layer: dict[str, Any]
    layer_norm: bool = False
    behind_convolutions: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index, width in enumerate(self.hidden_sizes):
            product = by_columns if self.behind_convolutions and index == 0 else None
            x = nn.Dense(width, dot_general=product, **self.layer)(x)
            x = nn.LayerNorm(dtype=self.layer.get("dtype"))(x) if self.layer_norm else x
            x = getattr(nn, self.activation)(x)
        return x


class Torso(nn.Module):
    """Features of raw observations and hidden layers behind them, initialised orthogonally with gain sqrt(2)."""

    space: spaces.Space
    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: jnp.dtype | None = None  # of the arithmetic; parameters stay float32
    encoder: Encoder = "small"

    @classmethod
    def of(cls, args: Any, space: spaces.Space, **name: str) -> "Torso":
        """As the flags say."""
        encoder = getattr(args, "encoder", cls.encoder)
        return cls(space, args.hidden_sizes, args.activation, args.dtype, encoder, **name)

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        layer = {"kernel_init": nn.initializers.orthogonal(np.sqrt(2)), "dtype": self.dtype}
        x = Features(self.space, self.activation, layer, self.encoder)(obs)
        seen = (leaf for name, leaf in spaces.leaves(self.space) if not is_mask(name))
        convolved = self.encoder != "flat" and any(map(spaces.is_image, seen))
        return MLP(self.hidden_sizes, self.activation, layer, behind_convolutions=convolved)(x)
