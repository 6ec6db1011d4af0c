"""The step size over a run, by `--lr-schedule`: `linear` to zero, `constant`, or `kl-adaptive`."""

from typing import Any

import jax
import jax.numpy as jnp

from common.device.hyper import hyper_of


def current_learning_rate(args: Any, learner: Any) -> jax.Array:
    """The step size [] of the update that comes next."""
    if args.lr_schedule == "kl-adaptive":
        return learner.learning_rate
    progress = learner.updates / args.num_updates if args.lr_schedule == "linear" else 0.0
    return jnp.float32(hyper_of(args, learner).learning_rate) * jnp.maximum(1.0 - progress, 0.0)


def next_learning_rate(args: Any, learner: Any, kl: jax.Array) -> jax.Array:
    """What the learner keeps after an update that moved the policy by `kl`; changes under kl-adaptive only."""
    if args.lr_schedule != "kl-adaptive":
        return learner.learning_rate
    return adapt(learner.learning_rate, kl, hyper_of(args, learner).desired_kl)


def adapt(learning_rate: jax.Array, kl: jax.Array, desired_kl: float) -> jax.Array:
    """Divide by 1.5 where the KL divergence is over twice the desired one, multiply where it is under half of it."""
    factor = jnp.where(kl > 2 * desired_kl, 1 / 1.5, jnp.where(kl < 0.5 * desired_kl, 1.5, 1.0))
    return jnp.clip(learning_rate * factor, 1e-6, 1e-2)
