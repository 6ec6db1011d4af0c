"""The optimizer of PPO and its siblings."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clipped_adam(hyper: Any) -> optax.GradientTransformation:
    """Directions of steps, whose length is the learning rate: Adam, after the global norm of the gradient is clipped.

    `hyper` has `max_grad_norm`, of which 0 does not clip, and `adam_b1` and `adam_b2`, numbers or arrays [].
    """
    limit = hyper.max_grad_norm
    off = isinstance(limit, float) and limit == 0
    clip = optax.identity() if off else optax.clip_by_global_norm(unless_zero(limit))
    return optax.flatten(optax.chain(clip, optax.scale_by_adam(hyper.adam_b1, hyper.adam_b2, eps=1e-5)))


def unless_zero(limit: float | jax.Array) -> float | jax.Array:
    """`limit` [], or infinity where it is 0, which turns it off; numbers stay numbers."""
    return limit or jnp.inf if isinstance(limit, float) else jnp.where(limit > 0, limit, jnp.inf)
