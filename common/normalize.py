"""Running mean and variance, merged exactly over batches and devices (Chan et al. 1979)."""

import jax
import jax.numpy as jnp
from flax import struct


class RunningStats(struct.PyTreeNode):
    """Count, mean and sum of squared deviations of everything seen so far."""

    count: jax.Array  # []
    mean: jax.Array  # [*shape]
    m2: jax.Array  # [*shape]

    @property
    def std(self) -> jax.Array:
        """Standard deviation, 1 before the first batch."""
        return jnp.where(self.count > 0, jnp.sqrt(self.m2 / jnp.maximum(self.count, 1) + 1e-8), 1.0)

    def normalize(self, x: jax.Array, clip: float = 10.0) -> jax.Array:
        """`x` [..., *shape] with zero mean and unit variance, clipped to +-`clip`."""
        return jnp.clip((x - self.mean) / self.std, -clip, clip)

    def merge(self, batch: jax.Array, axis_name: str, valid: jax.Array | None = None) -> "RunningStats":
        """The statistics after `batch` [..., *shape], of which every device on `axis_name` holds an equal share.

        Only those samples count that are `valid` [...].
        """
        axes = tuple(range(batch.ndim - self.mean.ndim))
        where = None if valid is None else valid.reshape(*valid.shape, *[1] * self.mean.ndim)
        samples = batch.size // self.mean.size if valid is None else jnp.sum(valid.astype(jnp.float32))
        count = jax.lax.psum(samples, axis_name)
        if valid is None:
            mean = jax.lax.pmean(batch.mean(axes), axis_name)
        else:
            mean = jax.lax.psum(batch.sum(axes, where=where), axis_name) / jnp.maximum(count, 1)
        m2 = jax.lax.psum(jnp.sum((batch - mean) ** 2, axes, where=where), axis_name)
        total = self.count + count
        delta = mean - self.mean
        return RunningStats(
            count=total,
            mean=self.mean + delta * count / jnp.maximum(total, 1),
            m2=self.m2 + m2 + delta**2 * self.count * count / jnp.maximum(total, 1),
        )


def discounted_returns(
    discounted: jax.Array, reward: jax.Array, done: jax.Array, gamma: float
) -> tuple[jax.Array, jax.Array]:
    """The running discounted return [N] after a rollout of `reward` and `done` [T, N], and at each of its steps [T, N].

    Its deviation is the scale of rewards that `--normalize-rewards` divides by.
    """

    def step(discounted, inputs):
        reward, done = inputs
        discounted = gamma * discounted + reward
        return jnp.where(done, 0.0, discounted), discounted

    return jax.lax.scan(step, discounted, (reward, done))


def running_stats(shape: tuple[int, ...]) -> RunningStats:
    """Statistics of nothing yet."""
    return RunningStats(count=jnp.zeros(()), mean=jnp.zeros(shape), m2=jnp.zeros(shape))
