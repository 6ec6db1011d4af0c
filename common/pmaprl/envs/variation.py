"""Parameters of environments that vary: between members of a population, or in every episode
(domain randomisation).
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.env_flags import DRAWS, PREFIX, Draw, read_draw, read_params
from pmaprl.cli.errors import UsageError
from pmaprl.envs import spaces
from pmaprl.envs.bytes import with_byte_max
from pmaprl.envs.environment import Env, Step
from pmaprl.envs.suite_tools import changed_params, readable_errors

# What metrics can be but means, as the ends of their names say
REDUCTIONS = "sum", "max", "min", "last"
# Up to which float32, in which members and episodes have their numbers, has all whole ones
WHOLE = 2**24
CHOOSE = "let it be one of some numbers, as by choice:100,500"


def member_env(env: Env, member_values: dict[str, jax.Array] | None) -> Env:
    """`env` with those of a member's hyper-parameters that are its numbers."""
    numbers = {
        name.removeprefix(PREFIX): x
        for name, x in (member_values or {}).items()
        if name.startswith(PREFIX)
    }
    return env.with_numbers(numbers) if numbers else env


def run_env(args: Any, env: Env) -> Env:
    """`env` as all agents of a run share it. Raises UsageError where it does not fit the flags."""
    opponent = args.opponent
    game = "a game of several players, such as pgx:connect_four"
    if opponent == "self" and not env.is_game:
        raise UsageError(f"--opponent self needs {game}, not {env.name}")
    if opponent == "members" and not (env.is_game or len(set(env.agents)) > 1):
        team = "an environment of several agents, such as jaxmarl:MPE_simple_spread_v3"
        raise UsageError(f"--opponent members needs {game}, or {team}, not {env.name}")
    if getattr(args, "reset_pool", 0) and env.resets_itself:
        raise UsageError(
            f"--reset-pool needs an environment without resets of its own, and {env.name} has them"
        )
    varied = {
        name: values
        for name, values in args.members.member_values.items()
        if name.startswith(PREFIX)
    }
    for name, values in varied.items():
        check_number(env, name.removeprefix(PREFIX), sorted(set(values)))
    if args.byte_max:
        env = copy.copy(env)
        env.observation_space = with_byte_max(env.observation_space, env.obs_dtype, args.byte_max)
    if logged := dict.fromkeys((*args.log_info, *getattr(env.inner, "log_info", ()))):
        env = copy.copy(env)
        env.logged = _logged_entries(logged, env)
    return env


def _logged_entries(metrics: Iterable[str], env: Env) -> dict[str, str]:
    """By metric the entry of the info that it is of: the entry itself, or ENTRY_max and so on of
    the entry ENTRY.
    """
    numbers = env.info_numbers
    known = {f"{entry}_{kind}": entry for entry in numbers for kind in REDUCTIONS} | {
        entry: entry for entry in numbers
    }
    if unknown := [metric for metric in metrics if metric not in known]:
        there = ", ".join(numbers) or "none"
        raise UsageError(
            f"--log-info {unknown[0]}: of numbers in its info, environment {env.name} has {there}"
        )
    return {metric: known[metric] for metric in metrics}


def check_number(env: Env, name: str, values: Iterable[float]) -> None:
    """Raise UsageError where the parameter called `name` cannot have these values, or cannot be an
    array.
    """
    known = env.numbers
    if name not in known:
        there = ", ".join(known) or "none"
        raise UsageError(
            f"{env.name} has no parameter {name!r} that members or episodes can differ in; "
            f"it has {there}"
        )
    for value in values:
        if isinstance(known[name], int) and not float(value).is_integer():
            raise UsageError(
                f"{env.name} parameter {name!r} is a whole number, not {value:g}: {CHOOSE}"
            )
        if isinstance(known[name], int) and abs(value) > WHOLE:
            raise UsageError(
                f"{env.name} parameter {name!r} may differ up to {WHOLE:,}, got {value:,.0f}"
            )
        changed_params(env.name, known, {name: value})

    def stepped(number: jax.Array) -> Any:
        own = env.with_numbers({name: number})
        keys = jax.random.split(jax.random.key(0), 3)
        _, state = own.reset(keys[0])
        return own.step(keys[1], state, spaces.sample(keys[2], env.action_space))

    why = "which its code needs as a plain number, as for a shape"
    with readable_errors(f"members and episodes of {env.name} cannot differ in {name!r}, {why}"):
        jax.eval_shape(stepped, jnp.float32(0))


class Randomized(Env):
    """Another environment, whose states keep the numbers that their episode has drawn."""

    def __init__(self, env: Env, draws: dict[str, Draw]):
        """Raises UsageError where `env` has no such numbers."""
        if env.resets_itself:
            raise UsageError(
                f"{env.name} resets itself, and so cannot draw {', '.join(draws)} for every episode"
            )
        for name, draw in draws.items():
            check_number(env, name, draw.values)
            if draw.kind != "choice" and isinstance(env.numbers[name], int):
                raise UsageError(f"{env.name} parameter {name!r} is a whole number: {CHOOSE}")
        self._env = env
        self._draws = draws
        self.cheap_reset = env.cheap_reset
        super().__init__(
            env.name, env.inner, env.observation_space, env.action_space, env.declared_steps
        )
        self.obs_names = env.obs_names

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        key, *keys = jax.random.split(key, len(self._draws) + 1)
        numbers = {
            name: drawn(key, draw)
            for key, (name, draw) in zip(keys, self._draws.items(), strict=True)
        }
        obs, state = self._env.with_numbers(numbers).begin(key)
        return obs, (state, numbers)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
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

    def frame(self, state: Any) -> np.ndarray | None:
        state, numbers = state
        env = self._env.with_numbers(numbers) if self._env.shows_numbers else self._env
        return env.frame(state)


def with_draws(make: Callable[[dict[str, Any]], Env], env_params: str) -> Env:
    """What `make` makes of --env-params; where some of them are draws, every episode has its
    own.
    """
    params = read_params(env_params)
    texts = {
        name: text
        for name, text in params.items()
        if isinstance(text, str) and text.startswith(DRAWS)
    }
    draws = {name: read_draw(f"--env-params {name}={text}", text) for name, text in texts.items()}
    # As long as any episode may be
    env = make(params | {name: max(draw.values) for name, draw in draws.items()})
    return Randomized(env, draws) if draws else env


def drawn(key: jax.Array, draw: Draw) -> jax.Array:
    """A number [] by the rule of `draw`."""
    values = jnp.asarray(draw.values, jnp.float32)
    if draw.kind == "choice":
        return jax.random.choice(key, values)
    if draw.kind == "log":
        return jnp.exp(
            jax.random.uniform(key, minval=jnp.log(values[0]), maxval=jnp.log(values[1]))
        )
    return jax.random.uniform(key, minval=values[0], maxval=values[1])
