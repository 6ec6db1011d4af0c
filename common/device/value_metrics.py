"""How well values predict what they are to learn, over the samples of all devices."""

import jax
import jax.numpy as jnp

from common.device.sharding import AXIS


def value_metrics(value: jax.Array, target: jax.Array, advantage: jax.Array) -> dict[str, jax.Array]:
    """Metrics of values [B], of their targets and of advantages, all in units of the rewards."""
    samples = jnp.stack([target, target - value, advantage, value])
    mean = jax.lax.pmean(jnp.mean(samples, axis=1), AXIS)
    variance = jax.lax.pmean(jnp.mean(jnp.square(samples - mean[:, None]), axis=1), AXIS)
    target, error, advantage, _ = variance
    return {
        "value/mean": mean[3],
        "value/explained_variance": 1 - error / jnp.maximum(target, 1e-8),
        "advantage/std": jnp.sqrt(advantage),
    }
