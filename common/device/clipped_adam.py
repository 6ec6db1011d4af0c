"""The optimizer of PPO and its siblings."""

import jax
import jax.numpy as jnp
import optax


def clipped_adam(max_grad_norm: float | jax.Array) -> optax.GradientTransformation:
    """Directions of steps, whose length is the step size: Adam, after the global norm of the gradient is clipped; 0
    does not clip.
    """
    off = isinstance(max_grad_norm, float) and max_grad_norm == 0
    clip = optax.identity() if off else optax.clip_by_global_norm(unless_zero(max_grad_norm))
    return optax.flatten(optax.chain(clip, optax.scale_by_adam(eps=1e-5)))


def unless_zero(limit: float | jax.Array) -> float | jax.Array:
    """`limit` [], or infinity where it is 0, which turns it off; numbers stay numbers."""
    return limit or jnp.inf if isinstance(limit, float) else jnp.where(limit > 0, limit, jnp.inf)
