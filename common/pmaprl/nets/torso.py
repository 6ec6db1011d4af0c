"""Layers before the heads of a network: encoders of observations, and hidden layers.

Images pass through their encoder as [C, H, W, B], the batch last. A neighbourhood is then a few
long runs of memory. A convolution is one product of matrices, [F, I] with [I, H' * W' * B] for F
features of I inputs each.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax import Array

from pmaprl.cli.errors import UsageError
from pmaprl.device.sharding import flat_pmean
from pmaprl.envs import spaces
from pmaprl.envs.masks import is_mask


class Convolution(nn.Module):
    """Convolution from [C, H, W, B] to [F, H', W', B], with F features."""

    features: int
    size: int = 3
    stride: int = 1
    kernel_init: Callable = nn.linear.default_kernel_init
    dtype: Any = None  # of the arithmetic

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = patches(x, self.size, self.stride)  # [I, H', W', B]
        kernel = self.param("kernel", self.kernel_init, (len(x), self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        columns = x.reshape(len(x), math.prod(x.shape[1:]))
        y = kernel.T @ columns + bias[:, None]
        return y.reshape(self.features, *x.shape[1:])


class ImageEncoder(nn.Module):
    """Base class of encoders, from images [..., H, W, C] to features [..., F].

    Subclasses have a method `convolved`, from [C, H, W, B] to [C', H', W', B].
    """

    activation: Callable[[Array], Array]
    layer: dict[str, Any]  # arguments of every layer, as `nn.Dense` takes them
    layer_norm: bool = False

    @nn.compact
    def __call__(self, images: Array) -> Array:
        x = self.convolved(batch_last(images))
        count = math.prod(x.shape[:3])  # -1 in `reshape` would fail for a batch of no images
        return x.reshape(count, x.shape[3]).T.reshape(*images.shape[:-3], count)

    def activated(self, x: Array) -> Array:
        """Activate features; with `layer_norm` normalize the channels of each pixel before."""
        if self.layer_norm:
            norm = nn.LayerNorm(
                dtype=self.layer.get("dtype"),
                reduction_axes=0,
                feature_axes=0,
            )
            x = norm(x)
        return self.activation(x)


class Convolutions(ImageEncoder):
    """Encoder of 3 x 3 convolutions, with stride 2 while a side is over 16."""

    def convolved(self, x: Array) -> Array:
        while max(x.shape[1:3]) > 16:
            x = self.activated(Convolution(16, stride=2, **self.layer)(x))
        return self.activated(Convolution(16, **self.layer)(x))


class NatureConvolutions(ImageEncoder):
    """Encoder of Mnih et al. 2015, for images such as 84 x 84 x 4."""

    def convolved(self, x: Array) -> Array:
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = self.activated(Convolution(channels, size, stride, **self.layer)(x))
        return x


class ImpalaConvolutions(ImageEncoder):
    """Residual encoder of Espeholt et al. 2018, figure 3."""

    def convolved(self, x: Array) -> Array:
        for channels in (16, 32, 32):
            x = nn.max_pool(
                self._same(channels, x),
                window_shape=(3, 3),
                strides=(2, 2),
                padding="SAME",
            )
            for _ in range(2):
                inner = self._same(channels, self.activated(x))
                x = x + self._same(channels, self.activated(inner))
        return self.activated(x)

    def _same(self, channels: int, x: Array) -> Array:
        """Apply a 3 x 3 convolution that keeps height and width."""
        padded = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
        return Convolution(channels, **self.layer)(padded)


def batch_last(images: Array) -> Array:
    """Rearrange images [..., H, W, C] to [C, H, W, B]."""
    rows = images.reshape(math.prod(images.shape[:-3]), *images.shape[-3:])
    return jnp.moveaxis(rows, (0, -1), (-1, 0))


def patches(
    x: Array,
    size: int = 3,
    stride: int = 1,
) -> Array:
    """Gather the `size` x `size` neighbourhoods of images.

    Sides are padded with zeros until the last neighbourhood ends with them, so that no pixel is
    left out.

    Args:
        x: [C, H, W, B] images.
        size: side of a neighbourhood.
        stride: distance of two neighbourhoods.

    Returns:
        [size * size * C, H', W', B] neighbourhoods.
    """
    padding = [(0, 0)]
    for side in x.shape[1:3]:
        missing = max(size - side, (size - side) % stride)
        padding.append((0, missing))
    x = jnp.pad(x, [*padding, (0, 0)])
    height, width = (side - size + 1 for side in x.shape[1:3])
    parts = []
    for row in range(size):
        for column in range(size):
            rows = slice(row, row + height, stride)
            columns = slice(column, column + width, stride)
            parts.append(x[:, rows, columns])
    return jnp.concatenate(parts)


def dense_columnwise(
    x: Array,
    kernel: Array,
    *_,
    **__,
) -> Array:
    """Multiply features behind an `ImageEncoder` with a kernel.

    It stands for the `dot_general` of a `nn.Dense`. The product begins with the kernel, and a
    barrier keeps it so: the other way round takes a CPU three times as long.

    Args:
        x: [..., I] features.
        kernel: [I, F] weights.

    Returns:
        [..., F] products.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    product = jax.lax.optimization_barrier(kernel.T @ rows.T)
    return product.T.reshape(*x.shape[:-1], kernel.shape[1])


Encoder = Literal["small", "nature", "impala", "flat"]
"""Name of an image encoder; flat is none."""
CONVOLUTIONS = {"small": Convolutions, "nature": NatureConvolutions, "impala": ImpalaConvolutions}


class Features(nn.Module):
    """Encoder of raw observations to vectors [..., F].

    Images [..., H, W, C] pass through an image encoder. The parts of an observation are
    concatenated.
    """

    space: spaces.Space
    activation: str  # a function of flax.linen, such as tanh
    layer: dict[str, Any]  # arguments of every layer, as `nn.Dense` takes them
    encoder: Encoder = "small"
    layer_norm: bool = False
    image_scale: float = 1.0  # factor of images in front of their encoder

    @nn.compact
    def __call__(self, obs: Any) -> Array:
        parts = []
        for name, leaf, x in spaces.leaves(self.space, obs):
            if is_mask(name):
                continue
            x = spaces.encode(x, leaf)  # [..., F] or [..., H, W, C]
            is_image = spaces.is_image(leaf)
            if is_image and self.image_scale != 1:
                x = self.image_scale * x
            if is_image and self.encoder == "flat":
                x = x.reshape(*x.shape[:-3], math.prod(leaf.shape))
            elif is_image:
                convolutions = CONVOLUTIONS[self.encoder](
                    activation=getattr(nn, self.activation),
                    layer=self.layer,
                    layer_norm=self.layer_norm,
                )
                x = convolutions(x)
            parts.append(x)
        return jnp.concatenate(parts, axis=-1)


class BatchNorm(nn.Module):
    """Batch normalization (Ioffe & Szegedy 2015) of [B, F]; each device has an equal share.

    In training it uses mean and variance of the batch, else their running averages, the collection
    `batch_stats`. Batch renormalization (`renorm`, Ioffe 2017) uses the averages in training too,
    after `warmup` batches and as far as they are near the batch's own mean and deviation.
    """

    renorm: bool = False
    use_bias: bool = True
    momentum: float = 0.99
    epsilon: float = 1e-3
    warmup: int = 100_000
    r_max: float = 3.0  # bound of the ratio of both deviations
    d_max: float = 5.0  # bound of the distance of both means, in deviations

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        size = x.shape[-1:]
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scale = self.param("scale", nn.initializers.ones, size)
        bias = self.param("bias", nn.initializers.zeros, size) if self.use_bias else 0.0

        def new_averages() -> Array:
            return jnp.stack([jnp.zeros(size), jnp.ones(size)])

        averages = self.variable("batch_stats", "averages", new_averages)
        batches = self.variable("batch_stats", "batches", jnp.zeros, ())
        running_mean, running_deviation = self._scale_of(averages.value)
        mean = running_mean
        deviation = running_deviation
        if train:
            mean = flat_pmean(jnp.mean(x, axis=0))
            # The mean is a constant here, since the derivative of the variance by it is zero. The
            # form E[x^2] - E[x]^2 would cancel
            centred = x - jax.lax.stop_gradient(mean)
            variance = flat_pmean(jnp.mean(jnp.square(centred), axis=0))
            moments = jnp.stack([mean, variance])
            mean, deviation = self._scale_of(moments)
            # Replace mean and deviation by those with which (x - mean) / deviation is the
            # renormalized x
            if self.renorm:
                is_warm = batches.value >= self.warmup
                ratio = deviation / running_deviation
                r = jnp.where(is_warm, jnp.clip(ratio, 1 / self.r_max, self.r_max), 1.0)
                distance = (mean - running_mean) / running_deviation
                d = jnp.where(is_warm, jnp.clip(distance, -self.d_max, self.d_max), 0.0)
                r, d = jax.lax.stop_gradient((r, d))
                mean = mean - d * deviation / r
                deviation = deviation / r
            averages.value = self.momentum * averages.value + (1 - self.momentum) * moments
            batches.value += 1
        return (x - mean) * (scale / deviation) + bias

    def _scale_of(self, moments: Array) -> tuple[Array, Array]:
        """Mean and standard deviation [F] from mean and variance [2, F]."""
        deviation = jnp.sqrt(moments[1] + self.epsilon)
        return moments[0], deviation


def joint_forward(
    network: "nn.Module | Ensemble",
    variables: Any,
    one: tuple,
    other: tuple,
) -> tuple[Any, Any, Any]:
    """Apply a network to two batches in training (CrossQ, Bhatt et al. 2024, section 3.2).

    A network with batch normalization sees both in one pass, and normalizes by the statistics of
    both. Without statistics each goes through by itself.

    Args:
        network: the network, whose outputs are trees of [Q, B, ...].
        variables: its variables.
        one: inputs of the first batch, arrays [B, ...].
        other: inputs of the second batch, of the same length.

    Returns:
        Outputs of both batches, and the collections of statistics after them.
    """
    if "batch_stats" not in variables:
        return network.apply(variables, *one), network.apply(variables, *other), {}
    inputs = jax.tree.map(lambda *x: jnp.concatenate(x), one, other)
    outputs, stats = network.apply(variables, *inputs, train=True, mutable="batch_stats")
    halves = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 2, axis=1)), outputs)
    of_one = jax.tree.map(lambda x: x[0], halves)
    of_other = jax.tree.map(lambda x: x[1], halves)
    return of_one, of_other, stats


class MLP(nn.Module):
    """Hidden layers, from [..., F] to [..., width of the last].

    Layer and batch normalization stand before the activations, batch renormalization behind them.
    The latter two normalize the inputs too. With `residual` each width is a block of two layers
    around which its input passes (SimBa, Lee et al. 2025).

    Raises:
        UsageError: residual blocks have several widths.
    """

    hidden_sizes: tuple[int, ...]
    activation: str
    layer: dict[str, Any]
    norm: Literal["none", "layer", "batch", "renorm"] = "none"
    residual: bool = False
    behind_convolutions: bool = False

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        activation = getattr(nn, self.activation)

        def norm(x, *kinds, use_bias=True):
            """Normalize `x`, if the network does so in one of these ways."""
            if self.norm not in kinds:
                return x
            if self.norm == "layer":
                return nn.LayerNorm(dtype=self.layer.get("dtype"))(x)
            return BatchNorm(self.norm == "renorm", use_bias)(x, train)

        # A linear layer with batch normalization of its own needs no bias in front of it
        x = norm(x, "batch", "renorm", use_bias=self.norm != "batch" or self.residual)
        if self.residual:
            if len(set(self.hidden_sizes)) > 1:
                sizes = f"hidden sizes {self.hidden_sizes} are several"
                raise UsageError(f"--residual blocks have one width, {sizes}")
            first = self.hidden_sizes[0]
            x = nn.Dense(first, kernel_init=nn.initializers.orthogonal(1.0), **self.layer)(x)
            dense = partial(nn.Dense, kernel_init=nn.initializers.he_normal(), **self.layer)
            for width in self.hidden_sizes:
                outer = dense(width)
                inner = dense(4 * width)(norm(x, "layer", "batch", "renorm"))
                x = x + outer(activation(inner))
            return norm(x, "layer", "batch", "renorm")
        for index, width in enumerate(self.hidden_sizes):
            product = dense_columnwise if self.behind_convolutions and index == 0 else None
            dense = nn.Dense(
                width,
                dot_general=product,
                use_bias=self.norm != "batch",
                **self.layer,
            )
            x = norm(dense(x), "layer", "batch")
            x = norm(activation(x), "renorm")
        return x


OF_MODULE = "space", "parent", "name"  # fields of a torso that do not come from flags


class Torso(nn.Module):
    """Features of raw observations and hidden layers.

    Layers are initialized orthogonally with gain sqrt(2).
    """

    space: spaces.Space
    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: jnp.dtype | None = None  # of the arithmetic; parameters stay float32
    encoder: Encoder = "small"
    layer_norm: bool = False  # before every activation
    image_scale: float = 1.0

    @classmethod
    def of(
        cls,
        args: Any,
        space: spaces.Space,
        **overrides: Any,
    ) -> "Torso":
        """Make the torso that the flags describe.

        Args:
            args: flags, from which the torso takes the fields that they have.
            space: space of the observations.
            overrides: fields to set in place of the flags, such as `hidden_sizes=(32,)`, or the
                module's `name`.

        Raises:
            TypeError: an override is no field. The message names all fields.
        """
        names = [field.name for field in dataclasses.fields(cls) if field.name not in OF_MODULE]
        if unknown := overrides.keys() - {*names, "name"}:
            wrong = ", ".join(sorted(unknown))
            known = ", ".join(names)
            raise TypeError(f"Torso has no field {wrong}; it has {known} and name")
        fields = {name: getattr(args, name) for name in names if hasattr(args, name)}
        fields |= overrides
        return cls(space, **fields)

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        layer = {"kernel_init": nn.initializers.orthogonal(np.sqrt(2)), "dtype": self.dtype}
        encoder = Features(
            space=self.space,
            activation=self.activation,
            layer=layer,
            encoder=self.encoder,
            layer_norm=self.layer_norm,
            image_scale=self.image_scale,
        )
        x = encoder(obs)
        observed = [leaf for name, leaf in spaces.leaves(self.space) if not is_mask(name)]
        has_image = any(spaces.is_image(leaf) for leaf in observed)
        mlp = MLP(
            hidden_sizes=self.hidden_sizes,
            activation=self.activation,
            layer=layer,
            norm="layer" if self.layer_norm else "none",
            behind_convolutions=has_image and self.encoder != "flat",
        )
        # Two axes suffice: the gradients of [1, B, F] take a CPU twice as long
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        features = mlp(rows)
        return features.reshape(*x.shape[:-1], features.shape[-1])


class Ensemble(NamedTuple):
    """Several networks of one kind: on an accelerator one batched network.

    Attributes:
        network: one network.
        size: number Q of networks.
    """

    network: nn.Module
    size: int

    def init(self, key: Array, *inputs: Any) -> Any:
        """Initialize the parameters [Q, ...], each network by a key of its own."""
        keys = jax.random.split(key, self.size)
        params = [self.network.init(key, *inputs) for key in keys]
        return jax.tree.map(lambda *x: jnp.stack(x), *params)

    def apply(self, params: Any, *inputs: Any, **options: Any) -> Any:
        """Apply all networks to the same inputs; the outputs are [Q, ...]."""

        def apply_one(params: Any) -> Any:
            return self.network.apply(params, *inputs, **options)

        if jax.default_backend() != "cpu":
            return jax.vmap(apply_one)(params)
        # A CPU takes four times as long for batched products as for one after another
        apart = jax.tree.map(lambda x: [part[0] for part in jnp.split(x, self.size)], params)
        networks = jax.tree.transpose(jax.tree.structure(params), None, apart)
        outputs = [apply_one(params) for params in networks]
        return jax.tree.map(lambda *x: jnp.stack(x), *outputs)
