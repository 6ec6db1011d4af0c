"""navix's MiniGrid worlds: `navix:Navix-DoorKey-6x6-v0`.

Its `step` resets one step late, so its `_step` is used, which does not reset.
"""

from typing import Any

import jax
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs.environment import Env, Step
from pmaprl.envs.foreign_code import import_package
from pmaprl.envs.spaces import Discrete, box
from pmaprl.envs.suite_params import changed_params
from pmaprl.suites.tools.planes import planes, space_of_planes

# Numbers of codes for things, colours, and states (a player's direction, or a door's state)
COUNTS = 11, 6, 4
SYMBOLS = "symbolic", "symbolic_first_person"  # observations that are codes [H, W, 3]
PICTURES = "rgb", "rgb_first_person"  # observations that are images


def ids() -> list[str]:
    return list(import_package("navix").registry())


class SuiteEnv(Env):
    """One of navix's worlds, whose states are its time steps."""

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        navix = import_package("navix")
        known = {
            "max_steps": int(navix.make(env_id).max_steps),
            "observation": SYMBOLS[0],
        }
        params = known | changed_params(name, known, env_params)
        kind = params.pop("observation")
        kinds = SYMBOLS + PICTURES
        if kind not in kinds:
            raise UsageError(
                f"{name} parameter 'observation' must be one of {', '.join(kinds)}, got {kind!r}"
            )
        observe = getattr(navix.observations, kind)
        inner = navix.make(env_id, observation_fn=observe, **params)
        self._codes = kind in SYMBOLS
        self._draw = jax.jit(navix.observations.rgb)
        first = jax.eval_shape(inner.reset, jax.random.key(0))
        shape = first.observation.shape
        observations = space_of_planes(shape, COUNTS) if self._codes else box(shape, 0.0, 255.0)
        actions = Discrete(int(inner.action_space.n))
        super().__init__(name, inner, observations, actions, inner.max_steps)

    def begin(self, key: jax.Array) -> tuple[jax.Array, Any]:
        step = self.inner.reset(key)
        return self._observed(step), step

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        step = self.inner._step(state, action)
        return Step(
            obs=self._observed(step),
            state=step,
            reward=step.reward,
            terminated=step.is_termination(),
            truncated=step.is_truncation(),
        )

    def frame(self, state: Any) -> np.ndarray:
        return np.asarray(self._draw(state.state))

    def _observed(self, step: Any) -> jax.Array:
        return planes(step.observation, COUNTS) if self._codes else step.observation
