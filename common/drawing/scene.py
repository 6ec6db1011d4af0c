"""What a scene is: how the states of one gymnax class become pictures.

Its function prepares what stays the same in an episode, and returns how to paint one frame.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from common.drawing.canvas import Paint


class Episode(NamedTuple):
    """What a scene is drawn from."""

    inner: Any  # the gymnax environment
    params: Any
    states: Any  # the fields that the scene reads, [T + 1, ...], finite
    actions: np.ndarray  # [T, ...] in the environment's shape and bounds, finite

    def push(self, step: int, scale: float, middle: float = 0.0) -> float:
        """The first component of the action chosen after `step` steps, -1 .. 1; 0 where no action follows."""
        return (float(np.ravel(self.actions[step])[0]) - middle) / scale if step < len(self.actions) else 0.0


class Scene(NamedTuple):
    """How the states of one gymnax class are drawn."""

    prepare: Callable[[Episode], Paint]
    fields: tuple[str, ...]  # that it reads from the state
    seconds: float  # that a step lasts: close to the physics, or what is pleasant to watch
