"""Running mean and variance, merged exactly over batches and devices (Chan et al. 1979)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from common.device.sharding import AXIS
from common.envs import spaces
from common.envs.masks import MASK


class RunningStats(struct.PyTreeNode):
    """Count, mean and sum of squared deviations of everything seen so far."""

    count: jax.Array  # [] uint32: float32 would stand still from 2^24 on
    mean: jax.Array  # [*shape]
    m2: jax.Array  # [*shape]

    @property
    def std(self) -> jax.Array:
        """Standard deviation, 1 before the first batch."""
        return jnp.where(self.count > 0, jnp.sqrt(self.m2 / jnp.maximum(self.count, 1) + 1e-8), 1.0)

    def normalize(self, x: jax.Array, clip: float | None = 10.0) -> jax.Array:
        """`x` [..., *shape] with zero mean and unit variance, clipped to +-`clip` if that is given."""
        x = (x - self.mean) / self.std
        return x if clip is None else jnp.clip(x, -clip, clip)

    def denormalize(self, x: jax.Array) -> jax.Array:
        """What `normalize` gets `x` from, where it does not clip."""
        return self.mean + self.std * x

    def merge(self, batch: jax.Array, valid: jax.Array | None = None) -> "RunningStats":
        """The statistics after `batch` [..., *shape], a device's equal share; only `valid` [...] samples count."""
        axes = tuple(range(batch.ndim - self.mean.ndim))
        where = None if valid is None else valid.reshape(*valid.shape, *[1] * self.mean.ndim)
        samples = batch.size // self.mean.size if valid is None else jnp.sum(valid, dtype=jnp.uint32)
        new = jnp.uint32(jax.lax.psum(samples, AXIS))
        old, count = jnp.float32(self.count), jnp.float32(new)
        if valid is None:
            mean = jax.lax.pmean(batch.mean(axes), AXIS)
        else:
            mean = jax.lax.psum(batch.sum(axes, where=where), AXIS) / jnp.maximum(count, 1)
        m2 = jax.lax.psum(jnp.sum((batch - mean) ** 2, axes, where=where), AXIS)
        total = old + count
        delta = mean - self.mean
        return RunningStats(
            count=self.count + jnp.minimum(new, ~self.count),  # ~ is what is missing to the largest
            mean=self.mean + delta * count / jnp.maximum(total, 1),
            m2=self.m2 + m2 + delta**2 * old * count / jnp.maximum(total, 1),
        )


Stats = Any
"""RunningStats, or a tree of them, where observations have parts, with None for what is not to be normalised."""


def normalize(stats: Stats, x: Any) -> Any:
    """`stats.normalize(x)` for each part, or `x` where there are no statistics."""
    return _map(lambda stats, x: x if stats is None else stats.normalize(x), stats, x)


def update_stats(stats: Stats, batch: Any, valid: jax.Array | None = None) -> Stats:
    """The statistics of each part after `batch`, see `RunningStats.merge`; none where there are none."""
    return _map(lambda stats, x: stats and stats.merge(x, valid), stats, batch)


def obs_stats(space: spaces.Space, on: bool = True) -> Stats:
    """Statistics of no observations yet: of arrays, and none of numbers that stand for choices; None where not `on`."""
    if not on:
        return None
    stats = spaces.map_leaves(lambda leaf: running_stats(leaf.shape, isinstance(leaf, spaces.Box)), space)
    return stats | {MASK: None} if isinstance(stats, dict) and MASK in stats else stats


def _map(function: Callable, stats: Stats, x: Any) -> Any:
    return jax.tree.map(function, stats, x, is_leaf=lambda stats: stats is None or isinstance(stats, RunningStats))


def denormalize(stats: RunningStats | None, x: jax.Array) -> jax.Array:
    """`stats.denormalize(x)`, or `x` where there are no statistics."""
    return x if stats is None else stats.denormalize(x)


def rescale_output(params: Any, layer: str, old: RunningStats, new: RunningStats) -> Any:
    """Parameters of networks whose linear `layer` predicts in units of `old`, changed to predict the same in `new`.

    The output-preserving half of PopArt (van Hasselt et al. 2016, proposition 1).
    """

    def rescaled(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith(f"/{layer}/kernel"):
            kernels.append(name)
            return x * old.std / new.std
        return (old.denormalize(x) - new.mean) / new.std if name.endswith(f"/{layer}/bias") else x

    kernels = []
    params = jax.tree_util.tree_map_with_path(rescaled, params)
    if not kernels:
        raise ValueError(f'PopArt rescales a layer called "{layer}", and the networks have none')
    return params


def popart(learner: Any, batch: Any, counts: jax.Array | None = None) -> tuple[Any, Any]:
    """PopArt (van Hasselt et al. 2016): the targets of the samples that count move the units of values, which stay.

    `learner` has `params` whose layer "value" predicts in units of `return_stats`. `batch` has `value`, `target` and
    `advantage` in units of the rewards, and gets them in the new units of `learner`; both stay where there are none.
    """
    if learner.return_stats is None:
        return learner, batch
    units = learner.return_stats.merge(batch.target, counts)
    params = rescale_output(learner.params, "value", learner.return_stats, units)
    learner = learner.replace(params=params, return_stats=units)
    value, target = (units.normalize(x, clip=None) for x in (batch.value, batch.target))
    return learner, batch._replace(value=value, target=target, advantage=batch.advantage / units.std)


def running_stats(shape: tuple[int, ...], on: bool = True) -> RunningStats | None:
    """Statistics of nothing yet; None where not `on`."""
    return RunningStats(count=jnp.uint32(0), mean=jnp.zeros(shape), m2=jnp.zeros(shape)) if on else None
