"""What stands before the heads of a network: raw observations as features, and hidden layers."""

import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from common.envs import spaces
from common.envs.masks import is_mask
from common.nets.convolutions import Convolutions, ImpalaConvolutions, NatureConvolutions, by_columns

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
        return cls(space, args.hidden_sizes, args.activation, args.dtype, args.encoder, **name)

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        layer = {"kernel_init": nn.initializers.orthogonal(np.sqrt(2)), "dtype": self.dtype}
        x = Features(self.space, self.activation, layer, self.encoder)(obs)
        seen = (leaf for name, leaf in spaces.leaves(self.space) if not is_mask(name))
        convolved = self.encoder != "flat" and any(map(spaces.is_image, seen))
        return MLP(self.hidden_sizes, self.activation, layer, behind_convolutions=convolved)(x)
