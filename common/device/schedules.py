"""Flags that change over a run: learning rate by `--lr-schedule`, entropy coefficient by `--ent-fraction`."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from common.device.hyper import hyper_of

SCHEDULED = {"learning_rate": "learning rate", "ent_coef": "entropy coefficient"}
"""Flags that change over a run, with their names in words."""


def hyper_now(args: Any, learner: Any) -> tuple[SimpleNamespace, dict[str, jax.Array]]:
    """The flags of one agent for the update that comes next, and what schedules make of some of them [], by name."""
    now = {"learning_rate": current_learning_rate(args, learner)}
    if fraction := getattr(args, "ent_fraction", 0.0):  # forks may have none
        now["ent_coef"] = hyper_of(args, learner).ent_coef * _left(args, learner, fraction)
    return hyper_of(args, learner, **now), now


def schedule_notes(args: Any) -> list[str]:
    """Sentences on what has fallen to zero over a run and is higher again in one that is twice as long."""
    falls = getattr(args, "lr_schedule", "") == "linear"
    fractions = {"learning_rate": 1.0 if falls else 0.0, "ent_coef": getattr(args, "ent_fraction", 0.0)}
    sentences = []
    for flag, fraction in fractions.items():
        left = 1 - 0.5 / fraction if fraction > 0.5 else 0  # share of the value, halfway through the longer run
        values = args.values_of(flag) if left else []
        if any(values):
            size = f"{left * values[0]:.3g}" if len(values) == 1 else f"{left:.2g} times its first value"
            sentences.append(f"the {SCHEDULED[flag]} has fallen to 0; a run twice as long (below) resumes with {size}")
    return sentences


def current_learning_rate(args: Any, learner: Any) -> jax.Array:
    """The learning rate [] of the update that comes next: to zero in a line, constant, or as KL divergences have it."""
    if args.lr_schedule == "kl-adaptive":
        return learner.learning_rate
    left = _left(args, learner, 1.0) if args.lr_schedule == "linear" else 1.0
    return jnp.float32(hyper_of(args, learner).learning_rate) * left


def next_learning_rate(args: Any, learner: Any, kl: jax.Array) -> jax.Array:
    """What the learner keeps after an update that moved the policy by `kl`; changes under kl-adaptive only."""
    if args.lr_schedule != "kl-adaptive":
        return learner.learning_rate
    return adapt(learner.learning_rate, kl, hyper_of(args, learner).desired_kl)


def adapt(learning_rate: jax.Array, kl: jax.Array, desired_kl: float) -> jax.Array:
    """Divide by 1.5 where the KL divergence is over twice the desired one, multiply where it is under half of it."""
    factor = jnp.where(kl > 2 * desired_kl, 1 / 1.5, jnp.where(kl < 0.5 * desired_kl, 1.5, 1.0))
    return jnp.clip(learning_rate * factor, 1e-6, 1e-2)


def _left(args: Any, learner: Any, fraction: float) -> jax.Array:
    """What is left [] of a value that falls to zero in a line over this share of the run: 1 at its start."""
    return jnp.maximum(1.0 - learner.updates / max(fraction * args.num_updates, 1.0), 0.0)
