"""Running mean and variance, merged exactly over batches and devices (Chan et al. 1979)."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from pmaprl.device.sharding import AXIS
from pmaprl.envs import spaces
from pmaprl.envs.masks import MASK


class RunningStats(struct.PyTreeNode):
    """Count, mean and sum of squared deviations of everything seen so far.

    Beyond 2^24 a float32 cannot count one more sample. So the count is an integer of two words, and
    mean and sum have a second number each: the rest that float32 does not hold.
    """

    count: Array  # [] uint32, number of samples modulo 2^32
    mean: Array  # [*shape]
    m2: Array  # [*shape] sum of squared deviations
    count_high: Array  # [] uint32, number of samples divided by 2^32
    mean_rest: Array  # [*shape]
    m2_rest: Array  # [*shape]

    @property
    def total(self) -> Array:
        """Number of samples [] as a float."""
        return jnp.float32(self.count_high) * 2.0**32 + jnp.float32(self.count)

    @property
    def std(self) -> Array:
        """Standard deviation [*shape]; 1 before the first batch."""
        total = self.total
        std = jnp.sqrt(self.m2 / jnp.maximum(total, 1) + 1e-8)
        return jnp.where(total > 0, std, 1.0)

    def normalize(self, x: Array, clip: float | None = 10.0) -> Array:
        """Shift and scale `x` [..., *shape] to zero mean and unit variance.

        Args:
            x: [..., *shape] numbers.
            clip: bound of the absolute values of the result. None: no bound.

        Returns:
            [..., *shape] normalized numbers.
        """
        # The form `x - mean - rest` would be wrong: if both are constants, as in an exported
        # policy, XLA subtracts their rounded sum
        std = self.std
        x = _minus(x, self.mean) / std - self.mean_rest / std
        return x if clip is None else jnp.clip(x, -clip, clip)

    def denormalize(self, x: Array) -> Array:
        """Invert `normalize`, if that does not clip."""
        return self.mean + (self.mean_rest + self.std * x)

    def merge(self, batch: Array, valid: Array | None = None) -> "RunningStats":
        """Add a batch of samples, an equal share of it on each device (Chan et al. 1979).

        Args:
            batch: [..., *shape] samples of this device.
            valid: [...] bool, True for samples that count. None: all.

        Returns:
            The statistics with the samples of all devices.
        """
        axes = tuple(range(batch.ndim - self.mean.ndim))
        if valid is None:
            where = None
            samples = math.prod(batch.shape[: len(axes)])
        else:
            where = valid.reshape(*valid.shape, *[1] * self.mean.ndim)
            samples = jnp.sum(valid, dtype=jnp.uint32)
        new = jnp.uint32(jax.lax.psum(samples, AXIS))
        old = self.total
        added = jnp.float32(new)

        def means_of(*arrays: Array) -> Array:
            """Average each array over the samples of all devices, in one collective."""
            if valid is None:
                means = [x.mean(axes) for x in arrays]
                return jax.lax.pmean(jnp.stack(means), AXIS)
            sums = [x.sum(axes, where=where) for x in arrays]
            return jax.lax.psum(jnp.stack(sums), AXIS) / jnp.maximum(added, 1)

        # Deviations are taken from the mean so far, then from the mean of the batch: nothing large
        # is summed or squared
        (shift,) = means_of(_minus(batch, self.mean) - self.mean_rest)
        centre, centre_rest = _add(self.mean, self.mean_rest, shift)
        deviation = _minus(batch, centre) - centre_rest
        # `missing` is the part of the mean that rounding has left out of `shift`
        missing, squares = means_of(deviation, jnp.square(deviation))
        variance = jnp.maximum(squares - jnp.square(missing), 0.0)
        share = added / jnp.maximum(old + added, 1)
        mean, mean_rest = _add(self.mean, self.mean_rest, shift * share)
        mean, mean_rest = _add(mean, mean_rest, missing * share)
        added_m2 = added * variance + jnp.square(shift + missing) * old * share
        m2, m2_rest = _add(self.m2, self.m2_rest, added_m2)
        low = self.count + new
        return RunningStats(
            count=low,
            mean=mean,
            m2=m2,
            count_high=self.count_high + jnp.uint32(low < new),
            mean_rest=mean_rest,
            m2_rest=m2_rest,
        )


def _minus(x: Array, value: Array) -> Array:
    """Subtract `value` from `x` as a float, which loses no more than its own rounding.

    This holds for large whole numbers too.
    """
    near = x.astype(jnp.promote_types(x.dtype, jnp.float32)) - value
    if x.dtype not in (jnp.int32, jnp.uint32):
        return near
    # Such integers have 32 bits and floats 24: unless it overflows, subtract before the conversion
    whole = jnp.round(value)
    exact = jax.lax.bitcast_convert_type(x - whole.astype(x.dtype), jnp.int32)
    is_small = jnp.abs(near) < 2.0**30
    return jnp.where(is_small, jnp.float32(exact) - (value - whole), near)


def _add(
    value: Array,
    rest: Array,
    x: Array,
) -> tuple[Array, Array]:
    """Add `x` to `value` + `rest` (Knuth 1969, section 4.2.2, theorem B).

    Returns:
        The sum as a float, and the rest that the float does not hold.
    """
    total = value + x
    added = total - value
    error = (value - (total - added)) + (x - added)
    rest = rest + error
    new = total + rest
    return new, rest - (new - total)


class Normalizer(struct.PyTreeNode):
    """Running statistics that normalize numbers; without statistics, numbers stay as they are.

    Attributes:
        stats: `RunningStats`, or a tree of them for observations with parts. Parts with None stay
            as they are.
    """

    stats: Any

    @classmethod
    def of(cls, space: spaces.Space, on: bool = True) -> "Normalizer":
        """Make the normalizer of observations, without samples.

        Args:
            space: the observation space. Each Box in it gets statistics, choices and masks none.
            on: whether to normalize.
        """
        if not on:
            return cls(stats=None)

        def of_leaf(leaf: Any) -> RunningStats | None:
            return running_stats(leaf.shape) if isinstance(leaf, spaces.Box) else None

        stats = spaces.map_leaves(of_leaf, space)
        has_mask = isinstance(stats, dict) and MASK in stats
        return cls(stats=stats | {MASK: None} if has_mask else stats)

    @classmethod
    def of_numbers(cls, on: bool = True) -> "Normalizer":
        """Make the normalizer of single numbers, such as returns, without samples."""
        return cls(stats=running_stats(()) if on else None)

    @property
    def std(self) -> Any:
        """Standard deviations of the parts; 1 before the first batch, and where nothing is
        normalized.
        """
        return _map(lambda stats: 1.0 if stats is None else stats.std, self.stats)

    def normalize(self, x: Any, clip: float | None = 10.0) -> Any:
        """Shift and scale each part to zero mean and unit variance.

        Args:
            x: raw observations or numbers [..., *shape].
            clip: bound of the absolute values of the result. None: no bound.
        """
        return _map(
            lambda stats, x: x if stats is None else stats.normalize(x, clip), self.stats, x
        )

    def denormalize(self, x: Any) -> Any:
        """Invert `normalize`, if that does not clip."""
        return _map(lambda stats, x: x if stats is None else stats.denormalize(x), self.stats, x)

    def update(self, batch: Any, valid: Array | None = None) -> "Normalizer":
        """Add a batch of this device's numbers to the statistics.

        Args:
            batch: raw observations or numbers [..., *shape] of this device.
            valid: [...] bool, True for those that count. None: all.

        Returns:
            The normalizer with the numbers of all devices.
        """
        stats = _map(lambda stats, x: stats and stats.merge(x, valid), self.stats, batch)
        return self.replace(stats=stats)


def _map(function: Callable, stats: Any, *trees: Any) -> Any:
    def is_leaf(stats: Any) -> bool:
        return stats is None or isinstance(stats, RunningStats)

    return jax.tree.map(function, stats, *trees, is_leaf=is_leaf)


def running_stats(shape: tuple[int, ...]) -> RunningStats:
    """Statistics of no samples [*shape] yet."""
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


def rescale_output(
    params: Any,
    layer: str,
    old: RunningStats,
    new: RunningStats,
) -> Any:
    """Rescale a linear layer to predict the same in other units (PopArt's output preservation).

    Van Hasselt et al. 2016, proposition 1.

    Args:
        params: parameters of networks.
        layer: name of the layer.
        old: statistics in whose units the layer predicts.
        new: statistics in whose units it shall predict.

    Returns:
        The changed parameters.

    Raises:
        ValueError: the networks have no such layer.
    """
    shift = (old.mean - new.mean) + (old.mean_rest - new.mean_rest)
    kernels = []

    def rescaled(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith(f"/{layer}/kernel"):
            kernels.append(name)
            return x * old.std / new.std
        if name.endswith(f"/{layer}/bias"):
            return (old.std * x + shift) / new.std
        return x

    params = jax.tree_util.tree_map_with_path(rescaled, params)
    if not kernels:
        raise ValueError(f'PopArt rescales a layer called "{layer}", and the networks have none')
    return params


# Least standard deviation of the first targets, as a share of their mean
LEAST_SPREAD = 0.01


def _with_spread(old: RunningStats, new: RunningStats) -> RunningStats:
    """Take |mean| as the standard deviation of the first targets, if they are nearly equal.

    Equal rewards with --num-steps 1, --gae-lambda 0 or episodes of one step make equal targets.
    Divided by a deviation of about 0, they would be thousands of units away from the first values,
    which no number of gradient steps bridges.

    Args:
        old: the statistics before the batch.
        new: the statistics with the batch.
    """
    is_narrow = (old.total == 0) & (new.std < LEAST_SPREAD * jnp.abs(new.mean))
    missing = jnp.where(is_narrow, new.total * jnp.square(new.mean), 0.0)
    return new.replace(m2=new.m2 + missing)


def popart(
    learner: Any,
    batch: Any,
    valid: Array | None = None,
) -> tuple[Any, Any]:
    """Add value targets to their statistics, and keep predictions as they are in the new units.

    PopArt, van Hasselt et al. 2016.

    Args:
        learner: has `return_stats`, a `Normalizer`, and `params` with a layer "value" that
            predicts in its units.
        batch: has `value`, `target` and `advantage` in units of the rewards.
        valid: bool, True for samples whose targets count. None: all.

    Returns:
        The learner with new units, and the batch in these units. Both stay as they are if
        `return_stats` has no statistics.
    """
    old = learner.return_stats.stats
    if old is None:
        return learner, batch
    units = learner.return_stats.update(batch.target, valid)
    units = units.replace(stats=_with_spread(old, units.stats))
    params = rescale_output(learner.params, "value", old, units.stats)
    learner = learner.replace(params=params, return_stats=units)
    batch = batch._replace(
        value=units.normalize(batch.value, clip=None),
        target=units.normalize(batch.target, clip=None),
        advantage=batch.advantage / units.std,
    )
    return learner, batch
