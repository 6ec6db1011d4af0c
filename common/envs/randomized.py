"""Environments whose parameters every episode draws anew (domain randomisation)."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.cli.env_params import draws_in
from common.cli.errors import UsageError
from common.cli.sweeps import Draw
from common.envs.environment import Env, Transition
from common.envs.varied import CHOOSE, check_number


class Randomized(Env):
    """Another environment, whose states keep the numbers that their episode has drawn."""

    def __init__(self, env: Env, draws: dict[str, Draw]):
        """Raises UsageError where `env` has no such numbers."""
        if env.resets_itself:
            raise UsageError(f"{env.name} resets itself, and so cannot draw {', '.join(draws)} for every episode")
        for name, draw in draws.items():
            check_number(env, name, draw.values)
            if draw.kind != "choice" and isinstance(env.numbers[name], int):
                raise UsageError(f"{env.name} parameter {name!r} is a whole number: {CHOOSE}")
        self._env, self._draws = env, draws
        self.cheap_reset, self.params = env.cheap_reset, env.params
        super().__init__(env.name, env.inner, env.observation_space, env.action_space, env.declared_steps)

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        key, *keys = jax.random.split(key, len(self._draws) + 1)
        numbers = {name: drawn(key, draw) for key, (name, draw) in zip(keys, self._draws.items(), strict=True)}
        obs, state = self._env.with_numbers(numbers).begin(key)
        return obs, (state, numbers)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        state, numbers = state
        reached = self._env.with_numbers(numbers).advance(key, state, action)
        return reached._replace(state=(reached.state, numbers))

    @property
    def numbers(self) -> dict[str, float]:
        return {name: x for name, x in self._env.numbers.items() if name not in self._draws}

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        other._env = self._env.with_numbers(numbers)
        return other

    def without_numbers(self, state: Any) -> Any:
        return state[0]

    def frame(self, state: Any) -> np.ndarray | None:
        return self._env.frame(state)


def with_draws(make: Callable[[dict[str, Any]], Env], params: dict[str, Any]) -> Env:
    """What `make` makes of `params`; where some of them are draws, every episode has its own."""
    draws = draws_in(params)
    env = make(params | {name: max(draw.values) for name, draw in draws.items()})  # as long as any episode may be
    return Randomized(env, draws) if draws else env


def drawn(key: jax.Array, draw: Draw) -> jax.Array:
    """A number [] by the rule of `draw`."""
    values = jnp.asarray(draw.values, jnp.float32)
    if draw.kind == "choice":
        return jax.random.choice(key, values)
    if draw.kind == "log":
        return jnp.exp(jax.random.uniform(key, minval=jnp.log(values[0]), maxval=jnp.log(values[1])))
    return jax.random.uniform(key, minval=values[0], maxval=values[1])
