"""Running mean and variance, merged exactly over batches and devices (Chan et al. 1979)."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from pmaprl.device.sharding import AXIS
from pmaprl.envs import spaces
from pmaprl.envs.masks import MASK


class RunningStats(struct.PyTreeNode):
    """Count, mean and sum of squared deviations of everything seen so far.

    After 2^24 samples one more is less than float32 resolves of what there is. So the count has two
    words, and mean and sum have a second number each, what float32 does not hold of them.
    """

    count: jax.Array  # [] uint32, modulo 2^32
    mean: jax.Array  # [*shape]
    m2: jax.Array  # [*shape]
    count_high: jax.Array  # [] uint32: how often `count` has begun anew
    mean_rest: jax.Array  # [*shape]
    m2_rest: jax.Array  # [*shape]

    @property
    def total(self) -> jax.Array:
        """The number of samples [] as a float."""
        return jnp.float32(self.count_high) * 2.0**32 + jnp.float32(self.count)

    @property
    def std(self) -> jax.Array:
        """Standard deviation, 1 before the first batch."""
        total = self.total
        return jnp.where(total > 0, jnp.sqrt(self.m2 / jnp.maximum(total, 1) + 1e-8), 1.0)

    def normalize(self, x: jax.Array, clip: float | None = 10.0) -> jax.Array:
        """`x` [..., *shape] with zero mean and unit variance, clipped to +-`clip` if that is
        given.
        """
        # Not `- mean - rest`: where both are constants, as in an exported policy, XLA would
        # subtract their rounded sum
        std = self.std
        x = _minus(x, self.mean) / std - self.mean_rest / std
        return x if clip is None else jnp.clip(x, -clip, clip)

    def denormalize(self, x: jax.Array) -> jax.Array:
        """What `normalize` gets `x` from, where it does not clip."""
        return self.mean + (self.mean_rest + self.std * x)

    def merge(self, batch: jax.Array, valid: jax.Array | None = None) -> "RunningStats":
        """The statistics after `batch` [..., *shape], a device's equal share; only `valid` [...]
        samples count.
        """
        axes = tuple(range(batch.ndim - self.mean.ndim))
        where = None if valid is None else valid.reshape(*valid.shape, *[1] * self.mean.ndim)
        samples = (
            math.prod(batch.shape[: len(axes)])
            if valid is None
            else jnp.sum(valid, dtype=jnp.uint32)
        )
        new = jnp.uint32(jax.lax.psum(samples, AXIS))
        old = self.total
        count = jnp.float32(new)

        def means_of(*arrays: jax.Array) -> jax.Array:
            """The mean of each over the samples of all devices, in one collective."""
            if valid is None:
                return jax.lax.pmean(jnp.stack([x.mean(axes) for x in arrays]), AXIS)
            sums = jnp.stack([x.sum(axes, where=where) for x in arrays])
            return jax.lax.psum(sums, AXIS) / jnp.maximum(count, 1)

        # Deviations from the mean so far, then from the mean of the batch: nothing large is summed
        # or squared
        (shift,) = means_of(_minus(batch, self.mean) - self.mean_rest)
        centre, centre_rest = _add(self.mean, self.mean_rest, shift)
        deviation = _minus(batch, centre) - centre_rest
        # `missing` is what rounding has left out of `shift`
        missing, squares = means_of(deviation, jnp.square(deviation))
        variance = jnp.maximum(squares - jnp.square(missing), 0.0)
        share = count / jnp.maximum(old + count, 1)
        mean, mean_rest = _add(*_add(self.mean, self.mean_rest, shift * share), missing * share)
        m2, m2_rest = _add(
            self.m2, self.m2_rest, count * variance + jnp.square(shift + missing) * old * share
        )
        low = self.count + new
        return RunningStats(
            count=low,
            mean=mean,
            m2=m2,
            count_high=self.count_high + jnp.uint32(low < new),
            mean_rest=mean_rest,
            m2_rest=m2_rest,
        )


def _minus(x: jax.Array, value: jax.Array) -> jax.Array:
    """`x` - `value` as a float, which loses no more than its own rounding: of large whole numbers
    too.
    """
    near = x.astype(jnp.promote_types(x.dtype, jnp.float32)) - value
    if x.dtype not in (jnp.int32, jnp.uint32):
        return near
    # They have 32 bits and floats 24: where nothing overflows, subtract before the conversion
    whole = jnp.round(value)
    exact = jax.lax.bitcast_convert_type(x - whole.astype(x.dtype), jnp.int32)
    return jnp.where(jnp.abs(near) < 2.0**30, jnp.float32(exact) - (value - whole), near)


def _add(value: jax.Array, rest: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`value` + `rest` + `x` as a float and what that does not hold of the sum (Knuth 1969, 4.2.2,
    theorem B).
    """
    total = value + x
    added = total - value
    error = (value - (total - added)) + (x - added)
    rest = rest + error
    new = total + rest
    return new, rest - (new - total)


Stats = Any
"""RunningStats, or a tree of them, where observations have parts, with None for what is not to be
normalised.
"""


def normalize(stats: Stats, x: Any) -> Any:
    """`stats.normalize(x)` for each part, or `x` where there are no statistics."""
    return _map(lambda stats, x: x if stats is None else stats.normalize(x), stats, x)


def update_stats(stats: Stats, batch: Any, valid: jax.Array | None = None) -> Stats:
    """The statistics of each part after `batch`, see `RunningStats.merge`; none where there are
    none.
    """
    return _map(lambda stats, x: stats and stats.merge(x, valid), stats, batch)


def obs_stats(space: spaces.Space, on: bool = True) -> Stats:
    """Statistics of no observations yet: of arrays, and none of numbers that stand for choices;
    None where not `on`.
    """
    if not on:
        return None
    stats = spaces.map_leaves(
        lambda leaf: running_stats(leaf.shape, isinstance(leaf, spaces.Box)), space
    )
    return stats | {MASK: None} if isinstance(stats, dict) and MASK in stats else stats


def _map(function: Callable, stats: Stats, x: Any) -> Any:
    return jax.tree.map(
        function, stats, x, is_leaf=lambda stats: stats is None or isinstance(stats, RunningStats)
    )


def denormalize(stats: RunningStats | None, x: jax.Array) -> jax.Array:
    """`stats.denormalize(x)`, or `x` where there are no statistics."""
    return x if stats is None else stats.denormalize(x)


def rescale_output(params: Any, layer: str, old: RunningStats, new: RunningStats) -> Any:
    """Parameters of networks whose linear `layer` predicts in units of `old`, changed to predict
    the same in `new`.

    The output-preserving half of PopArt (van Hasselt et al. 2016, proposition 1).
    """

    def rescaled(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith(f"/{layer}/kernel"):
            kernels.append(name)
            return x * old.std / new.std
        return (old.std * x + shift) / new.std if name.endswith(f"/{layer}/bias") else x

    shift = (old.mean - new.mean) + (old.mean_rest - new.mean_rest)
    kernels = []
    params = jax.tree_util.tree_map_with_path(rescaled, params)
    if not kernels:
        raise ValueError(f'PopArt rescales a layer called "{layer}", and the networks have none')
    return params


def popart(learner: Any, batch: Any, counts: jax.Array | None = None) -> tuple[Any, Any]:
    """PopArt (van Hasselt et al. 2016): the targets of the samples that count move the units of
    values, which stay.

    `learner` has `params` whose layer "value" predicts in units of `return_stats`. `batch` has
    `value`, `target` and `advantage` in units of the rewards, and gets them in the new units of
    `learner`; both stay where there are none.
    """
    if learner.return_stats is None:
        return learner, batch
    units = learner.return_stats.merge(batch.target, counts)
    params = rescale_output(learner.params, "value", learner.return_stats, units)
    learner = learner.replace(params=params, return_stats=units)
    value, target = (units.normalize(x, clip=None) for x in (batch.value, batch.target))
    return learner, batch._replace(
        value=value, target=target, advantage=batch.advantage / units.std
    )


def running_stats(shape: tuple[int, ...], on: bool = True) -> RunningStats | None:
    """Statistics of nothing yet; None where not `on`."""
    if not on:
        return None
    zeros = jnp.zeros(shape)
    none = jnp.uint32(0)
    return RunningStats(
        count=none,
        mean=zeros,
        m2=zeros,
        count_high=none,
        mean_rest=zeros,
        m2_rest=zeros,
    )
