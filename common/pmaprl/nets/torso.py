"""What stands before the heads of a network: encoders of observations, also of images, and hidden
layers.

Images pass through them as [C, H, W, B], the batch last. A neighbourhood is then a few long runs of
memory, and a convolution one product of matrices, [N, K] with [K, H' * W' * B].
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

from pmaprl.cli.errors import UsageError
from pmaprl.device.sharding import flat_pmean
from pmaprl.envs import spaces
from pmaprl.envs.masks import is_mask


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
    """Features [..., F] of images [..., H, W, C]. Subclasses have `convolved`, from [C, H, W, B] to
    [C', H', W', B].
    """

    activation: Callable[[jax.Array], jax.Array]
    layer: dict[str, Any]  # arguments of every layer, as of `nn.Dense`
    layer_norm: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.convolved(batch_last(images))
        count = math.prod(x.shape[:3])  # given, for there may be no image at all
        return x.reshape(count, x.shape[3]).T.reshape(*images.shape[:-3], count)

    def activated(self, x: jax.Array) -> jax.Array:
        """The activation, with `layer_norm` after layer normalisation over the channels of each
        pixel.
        """
        if self.layer_norm:
            x = nn.LayerNorm(dtype=self.layer.get("dtype"), reduction_axes=0, feature_axes=0)(x)
        return self.activation(x)


class Convolutions(ImageEncoder):
    """3 x 3 convolutions, with stride 2 while a side is over 16."""

    def convolved(self, x: jax.Array) -> jax.Array:
        while max(x.shape[1:3]) > 16:
            x = self.activated(Convolution(16, stride=2, **self.layer)(x))
        return self.activated(Convolution(16, **self.layer)(x))


class NatureConvolutions(ImageEncoder):
    """Those for images such as 84 x 84 x 4 of Mnih et al. 2015."""

    def convolved(self, x: jax.Array) -> jax.Array:
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = self.activated(Convolution(channels, size, stride, **self.layer)(x))
        return x


class ImpalaConvolutions(ImageEncoder):
    """The residual network of Espeholt et al. 2018, figure 3."""

    def convolved(self, x: jax.Array) -> jax.Array:
        for channels in (16, 32, 32):
            x = nn.max_pool(
                self._same(channels, x), window_shape=(3, 3), strides=(2, 2), padding="SAME"
            )
            for _ in range(2):
                inner = self._same(channels, self.activated(x))
                x = x + self._same(channels, self.activated(inner))
        return self.activated(x)

    def _same(self, channels: int, x: jax.Array) -> jax.Array:
        """A 3 x 3 convolution that keeps height and width."""
        return Convolution(channels, **self.layer)(jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]))


def batch_last(images: jax.Array) -> jax.Array:
    """[C, H, W, B] of [..., H, W, C]."""
    return jnp.moveaxis(
        images.reshape(math.prod(images.shape[:-3]), *images.shape[-3:]), (0, -1), (-1, 0)
    )


def patches(x: jax.Array, size: int = 3, stride: int = 1) -> jax.Array:
    """The `size` x `size` neighbourhoods of [C, H, W, B], as [size * size * C, H', W', B].

    Sides are padded with zeros until the last neighbourhood ends with them, so that no pixel is
    left out.
    """
    missing = (max(size - side, (size - side) % stride) for side in x.shape[1:3])
    x = jnp.pad(x, [(0, 0), *((0, more) for more in missing), (0, 0)])
    height, width = (side - size + 1 for side in x.shape[1:3])
    shifts = [(row, column) for row in range(size) for column in range(size)]
    return jnp.concatenate(
        [x[:, r : r + height : stride, c : c + width : stride] for r, c in shifts]
    )


def dense_columnwise(x: jax.Array, kernel: jax.Array, *_, **__) -> jax.Array:
    """The `dot_general` of a `nn.Dense` behind an `ImageEncoder`: of its features [..., F] and a
    kernel [F, N].

    It begins with the kernel, and the barrier keeps it so: the other way round takes a CPU three
    times as long.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return jax.lax.optimization_barrier(kernel.T @ rows.T).T.reshape(*x.shape[:-1], kernel.shape[1])


Encoder = Literal["small", "nature", "impala", "flat"]  # of images; flat: no convolutions
CONVOLUTIONS = {"small": Convolutions, "nature": NatureConvolutions, "impala": ImpalaConvolutions}


class Features(nn.Module):
    """Raw observations as vectors [..., F]: encoded, images [..., H, W, C] behind their encoder,
    all parts together.
    """

    space: spaces.Space
    activation: str  # a function of flax.linen, such as tanh
    layer: dict[str, Any]  # arguments of every layer, as of `nn.Dense`
    encoder: Encoder = "small"
    layer_norm: bool = False
    image_scale: float = 1.0  # factor of images in front of their encoder

    @nn.compact
    def __call__(self, obs: Any) -> jax.Array:
        parts = []
        for name, leaf, x in spaces.leaves(self.space, obs):
            if is_mask(name):
                continue
            x = spaces.encode(x, leaf)  # [..., F] or [..., H, W, C]
            if spaces.is_image(leaf) and self.image_scale != 1:
                x = self.image_scale * x
            if spaces.is_image(leaf) and self.encoder == "flat":
                x = x.reshape(*x.shape[:-3], math.prod(leaf.shape))
            elif spaces.is_image(leaf):
                x = CONVOLUTIONS[self.encoder](
                    getattr(nn, self.activation), self.layer, self.layer_norm
                )(x)
            parts.append(x)
        return jnp.concatenate(parts, axis=-1)


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe & Szegedy 2015) of [B, F], a batch of which every device holds an
    equal share.

    In training it is by mean and variance of the batch, else by their running averages, the
    collection `batch_stats`. Batch renormalisation (`renorm`, Ioffe 2017) is by the averages in
    training too, once there were `warmup` batches, as far as they are near those of the batch.
    """

    renorm: bool = False
    use_bias: bool = True
    momentum: float = 0.99
    epsilon: float = 1e-3
    warmup: int = 100_000
    r_max: float = 3.0  # bound of the ratio of both deviations
    d_max: float = 5.0  # bound of the distance of both means, in deviations

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        size = x.shape[-1:]
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scale = self.param("scale", nn.initializers.ones, size)
        bias = self.param("bias", nn.initializers.zeros, size) if self.use_bias else 0.0
        averages = self.variable(
            "batch_stats", "averages", lambda: jnp.stack([jnp.zeros(size), jnp.ones(size)])
        )
        batches = self.variable("batch_stats", "batches", jnp.zeros, ())

        def scale_of(moments):  # mean and standard deviation [F] of mean and variance [2, F]
            return moments[0], jnp.sqrt(moments[1] + self.epsilon)

        mean, deviation = running_mean, running_deviation = scale_of(averages.value)
        if train:
            mean = flat_pmean(jnp.mean(x, axis=0))
            # The mean as a constant: the derivative of the variance by it is zero. E[x^2] - E[x]^2
            # would cancel
            centred = x - jax.lax.stop_gradient(mean)
            of_batch = jnp.stack([mean, flat_pmean(jnp.mean(jnp.square(centred), axis=0))])
            mean, deviation = scale_of(of_batch)
            # Mean and deviation with which (x - mean) / deviation is the renormalised x
            if self.renorm:
                warm = batches.value >= self.warmup
                r = jnp.where(
                    warm, jnp.clip(deviation / running_deviation, 1 / self.r_max, self.r_max), 1.0
                )
                d = jnp.where(
                    warm,
                    jnp.clip((mean - running_mean) / running_deviation, -self.d_max, self.d_max),
                    0.0,
                )
                r, d = jax.lax.stop_gradient((r, d))
                mean = mean - d * deviation / r
                deviation = deviation / r
            averages.value = self.momentum * averages.value + (1 - self.momentum) * of_batch
            batches.value += 1
        return (x - mean) * (scale / deviation) + bias


def joint_forward(
    network: nn.Module, variables: Any, one: tuple, other: tuple
) -> tuple[Any, Any, Any]:
    """What a network that normalises batches makes of two in training, and its statistics after
    them, of both.

    One pass is of both batches, equally long along the first axis (Bhatt et al. 2024, section 3.2).
    Outputs are trees of [C, B, ...]. Without statistics each goes through by itself.
    """
    if "batch_stats" not in variables:
        return network.apply(variables, *one), network.apply(variables, *other), {}
    inputs = jax.tree.map(lambda *x: jnp.concatenate(x), one, other)
    outputs, stats = network.apply(variables, *inputs, train=True, mutable="batch_stats")
    halves = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 2, axis=1)), outputs)
    return *(jax.tree.map(lambda x, half=half: x[half], halves) for half in range(2)), stats


class MLP(nn.Module):
    """The hidden layers, [..., F] to [..., width of the last].

    Layer and batch normalisation stand before the activations, batch renormalisation behind them;
    the latter two are of the inputs too. With `residual` each width is a block of two layers around
    which its input passes (Lee et al. 2025). Raises UsageError where those are not of one width.
    """

    hidden_sizes: tuple[int, ...]
    activation: str
    layer: dict[str, Any]
    norm: Literal["none", "layer", "batch", "renorm"] = "none"
    residual: bool = False
    behind_convolutions: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        activation = getattr(nn, self.activation)

        def norm(x, *kinds, use_bias=True):
            """`x` normalised, if that is to be done in one of these ways."""
            if self.norm not in kinds:
                return x
            if self.norm == "layer":
                return nn.LayerNorm(dtype=self.layer.get("dtype"))(x)
            return BatchNorm(self.norm == "renorm", use_bias)(x, train)

        # A linear layer that is centred itself needs no bias in front of it
        x = norm(x, "batch", "renorm", use_bias=self.norm != "batch" or self.residual)
        if self.residual:
            if len(set(self.hidden_sizes)) > 1:
                raise UsageError(
                    f"--residual blocks have one width, hidden sizes {self.hidden_sizes} are "
                    "several"
                )
            x = nn.Dense(
                self.hidden_sizes[0], kernel_init=nn.initializers.orthogonal(1.0), **self.layer
            )(x)
            dense = partial(nn.Dense, kernel_init=nn.initializers.he_normal(), **self.layer)
            for width in self.hidden_sizes:
                x = x + dense(width)(
                    activation(dense(4 * width)(norm(x, "layer", "batch", "renorm")))
                )
            return norm(x, "layer", "batch", "renorm")
        for index, width in enumerate(self.hidden_sizes):
            product = dense_columnwise if self.behind_convolutions and index == 0 else None
            x = nn.Dense(width, dot_general=product, use_bias=self.norm != "batch", **self.layer)(x)
            x = norm(activation(norm(x, "layer", "batch")), "renorm")
        return x


OF_MODULE = "space", "parent", "name"  # fields of a torso that no flag says


class Torso(nn.Module):
    """Features of raw observations and hidden layers behind them, initialised orthogonally with
    gain sqrt(2).
    """

    space: spaces.Space
    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: jnp.dtype | None = None  # of the arithmetic; parameters stay float32
    encoder: Encoder = "small"
    layer_norm: bool = False  # before every activation
    image_scale: float = 1.0

    @classmethod
    def of(cls, args: Any, space: spaces.Space, **overrides: Any) -> "Torso":
        """Make the torso that the flags describe.

        Args:
          args: flags, from which the fields come that they have.
          space: space of the observations.
          overrides: fields that shall be otherwise, such as `hidden_sizes=(32,)`, or the `name` of
              the module.

        Raises TypeError, which names the fields that there are, where an override is none of them.
        """
        fields = [field.name for field in dataclasses.fields(cls) if field.name not in OF_MODULE]
        if unknown := overrides.keys() - {*fields, "name"}:
            known = ", ".join(fields)
            raise TypeError(
                f"Torso has no field {', '.join(sorted(unknown))}; it has {known} and name"
            )
        flags = {name: getattr(args, name) for name in fields if hasattr(args, name)}
        return cls(space, **(flags | overrides))

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        layer = {"kernel_init": nn.initializers.orthogonal(np.sqrt(2)), "dtype": self.dtype}
        x = Features(
            self.space, self.activation, layer, self.encoder, self.layer_norm, self.image_scale
        )(obs)
        seen = (leaf for name, leaf in spaces.leaves(self.space) if not is_mask(name))
        convolved = self.encoder != "flat" and any(map(spaces.is_image, seen))
        norm = "layer" if self.layer_norm else "none"
        mlp = MLP(self.hidden_sizes, self.activation, layer, norm, behind_convolutions=convolved)
        # The gradients of [1, B, F] take a CPU twice as long
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        features = mlp(rows)
        return features.reshape(*x.shape[:-1], features.shape[-1])


class Ensemble(NamedTuple):
    """`size` networks of one kind, parameters and outputs [size, ...]; on an accelerator one
    batched network.
    """

    network: nn.Module
    size: int

    def init(self, key: jax.Array, *inputs: Any) -> Any:
        params = [self.network.init(key, *inputs) for key in jax.random.split(key, self.size)]
        return jax.tree.map(lambda *x: jnp.stack(x), *params)

    def apply(self, params: Any, *inputs: Any, **options: Any) -> Any:
        if jax.default_backend() != "cpu":
            return jax.vmap(lambda params: self.network.apply(params, *inputs, **options))(params)
        # A CPU's batched products take four times as long as one after another
        apart = jax.tree.map(lambda x: [one[0] for one in jnp.split(x, self.size)], params)
        networks = jax.tree.transpose(jax.tree.structure(params), None, apart)
        outputs = [self.network.apply(one, *inputs, **options) for one in networks]
        return jax.tree.map(lambda *x: jnp.stack(x), *outputs)
