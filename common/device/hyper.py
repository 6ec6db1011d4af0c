"""Flags as an algorithm's maths takes them: those in which the members of a population differ are arrays."""

from types import SimpleNamespace
from typing import Any

import jax


def hyper_of(args: Any, learner: Any, **now: jax.Array) -> SimpleNamespace:
    """The flags of one agent: those that its learner has in `hyper` as arrays [], all others as they are in `args`.

    `now` are values of this moment.

    A flag that is read from here, and whose type has `Swept` (as `Positive`), is one that a population can sweep.
    """
    return SimpleNamespace(**vars(args) | getattr(learner, "hyper", {}) | now)
