"""Flags that change over a run: learning rate by `--lr-schedule`, entropy coefficient by `--ent-fraction`."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

SCHEDULED = {"learning_rate": "learning rate", "ent_coef": "entropy coefficient"}
"""Flags that change over a run, with their names in words."""


def hp_of(args: Any, hyper: dict[str, jax.Array] | None = None, **now: jax.Array) -> SimpleNamespace:
    """The flags of one agent: those that are in its `hyper` as arrays [], all others as they are in `args`.

    `now` are values of this moment. A flag that an algorithm reads from here is one that a population can sweep.
    """
    return SimpleNamespace(**vars(args) | (hyper or {}) | now)


def hp_now(args: Any, run: Any, learner: Any) -> tuple[SimpleNamespace, dict[str, jax.Array]]:
    """The flags of one agent for the update that comes next, and what schedules make of some of them [], by name.

    Its `run` is the `RunState`, and under --lr-schedule kl-adaptive its learner has an `AdamState`.
    """
    now, hp = {}, hp_of(args, run.hyper)
    if hasattr(args, "lr_schedule"):
        now["learning_rate"] = _learning_rate(args, hp, run, learner)
    if fraction := getattr(args, "ent_fraction", 0.0):
        now["ent_coef"] = hp.ent_coef * _left(args, run, fraction)
    return hp_of(args, run.hyper, **now), now


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


def _learning_rate(args: Any, hp: SimpleNamespace, run: Any, learner: Any) -> jax.Array:
    """The learning rate [] of the update that comes next: to zero in a line, constant, or as KL divergences have it."""
    if args.lr_schedule == "kl-adaptive":
        return learner.opt_state.learning_rate
    return jnp.float32(hp.learning_rate) * (_left(args, run, 1.0) if args.lr_schedule == "linear" else 1.0)


def _left(args: Any, run: Any, fraction: float) -> jax.Array:
    """What is left [] of a value that falls to zero in a line over this share of the run: 1 at its start."""
    return jnp.maximum(1.0 - run.updates / max(fraction * args.num_updates, 1.0), 0.0)
