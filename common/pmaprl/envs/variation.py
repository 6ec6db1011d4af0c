"""Parameters of environments that vary between members of a population, or between episodes."""

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
from pmaprl.envs.foreign_code import readable_errors
from pmaprl.envs.suite_params import changed_params

# Ends of the names of metrics that are no means
REDUCTIONS = "sum", "max", "min", "last"
# Members and episodes have their numbers in float32, which has all whole numbers up to this one
WHOLE = 2**24
CHOOSE = "let it be one of some numbers, as by choice:100,500"


def member_env(env: Env, member_values: dict[str, jax.Array] | None) -> Env:
    """Set the numbers of an environment that are hyperparameters of a member."""
    if not member_values:
        return env
    numbers = {
        name.removeprefix(PREFIX): value
        for name, value in member_values.items()
        if name.startswith(PREFIX)
    }
    return env.with_numbers(numbers) if numbers else env


def run_env(args: Any, env: Env) -> Env:
    """Make the environment that all agents of a run share.

    Raises:
        UsageError: `env` does not fit the flags.
    """
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
    for name, values in args.members.member_values.items():
        if name.startswith(PREFIX):
            check_number(env, name.removeprefix(PREFIX), sorted(set(values)))
    if args.byte_max:
        env = copy.copy(env)
        env.observation_space = with_byte_max(env.observation_space, env.obs_dtype, args.byte_max)
    own_metrics = getattr(env.inner, "log_info", ())
    logged = dict.fromkeys((*args.log_info, *own_metrics))
    if logged:
        env = copy.copy(env)
        env.logged = _logged_entries(logged, env)
    return env


def _logged_entries(metrics: Iterable[str], env: Env) -> dict[str, str]:
    """Entry of the info for each metric: ENTRY for ENTRY itself, ENTRY_max and so on."""
    known = {}
    for entry in env.info_numbers:
        for kind in REDUCTIONS:
            known[f"{entry}_{kind}"] = entry
    for entry in env.info_numbers:  # an entry may have the name of another one's reduction
        known[entry] = entry
    for metric in metrics:
        if metric not in known:
            entries = ", ".join(env.info_numbers) or "none"
            raise UsageError(
                f"--log-info {metric}: of numbers in its info, environment {env.name} has {entries}"
            )
    return {metric: known[metric] for metric in metrics}


def check_number(env: Env, name: str, values: Iterable[float]) -> None:
    """Raise UsageError if the parameter `name` cannot have these values, or cannot be an array."""
    known = env.numbers
    if name not in known:
        names = ", ".join(known) or "none"
        raise UsageError(
            f"{env.name} has no parameter {name!r} that members or episodes can differ in; "
            f"it has {names}"
        )
    is_whole = isinstance(known[name], int)
    for value in values:
        if is_whole and not float(value).is_integer():
            raise UsageError(
                f"{env.name} parameter {name!r} is a whole number, not {value:g}: {CHOOSE}"
            )
        if is_whole and abs(value) > WHOLE:
            raise UsageError(
                f"{env.name} parameter {name!r} may differ up to {WHOLE:,}, got {value:,.0f}"
            )
        changed_params(env.name, known, {name: value})

    def stepped(number: jax.Array) -> Any:
        changed = env.with_numbers({name: number})
        reset_key, step_key, action_key = jax.random.split(jax.random.key(0), 3)
        _, state = changed.reset(reset_key)
        action = spaces.sample(action_key, env.action_space)
        return changed.step(step_key, state, action)

    why = "which its code needs as a plain number, as for a shape"
    with readable_errors(f"members and episodes of {env.name} cannot differ in {name!r}, {why}"):
        jax.eval_shape(stepped, jnp.float32(0))


class Randomized(Env):
    """An environment with numbers that every episode draws, and keeps in its states."""

    def __init__(self, env: Env, draws: dict[str, Draw]):
        """Check that `env` has the numbers that `draws` names.

        Raises:
            UsageError: `env` lacks one of them, or resets itself.
        """
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
            env.name,
            env.inner,
            env.observation_space,
            env.action_space,
            env.declared_steps,
        )
        self.obs_names = env.obs_names

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        begin_key, *draw_keys = jax.random.split(key, len(self._draws) + 1)
        numbers = {}
        for draw_key, (name, draw) in zip(draw_keys, self._draws.items(), strict=True):
            numbers[name] = drawn(draw_key, draw)
        obs, state = self._env.with_numbers(numbers).begin(begin_key)
        return obs, (state, numbers)

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Step:
        inner_state, numbers = state
        step = self._env.with_numbers(numbers).advance(key, inner_state, action)
        return step._replace(state=(step.state, numbers))

    @property
    def numbers(self) -> dict[str, float]:
        numbers = self._env.numbers
        return {name: value for name, value in numbers.items() if name not in self._draws}

    def with_numbers(self, numbers: dict[str, jax.Array]) -> Env:
        other = copy.copy(self)
        other._env = self._env.with_numbers(numbers)
        return other

    def frame(self, state: Any) -> np.ndarray | None:
        inner_state, numbers = state
        env = self._env
        if env.shows_numbers:
            env = env.with_numbers(numbers)
        return env.frame(inner_state)


def with_draws(make: Callable[[dict[str, Any]], Env], env_params: str) -> Env:
    """Make an environment with --env-params, some of which every episode may draw.

    Args:
        make: makes the environment with parameters.
        env_params: a JSON object.
    """
    params = read_params(env_params)
    draws = {}
    for name, value in params.items():
        if isinstance(value, str) and value.startswith(DRAWS):
            draws[name] = read_draw(f"--env-params {name}={value}", value)
    # The largest values, because the time limit must hold for all episodes
    largest = {name: max(draw.values) for name, draw in draws.items()}
    env = make(params | largest)
    return Randomized(env, draws) if draws else env


def drawn(key: jax.Array, draw: Draw) -> jax.Array:
    """Draw a number [] by the rule of `draw`."""
    values = jnp.asarray(draw.values, jnp.float32)
    if draw.kind == "choice":
        return jax.random.choice(key, values)
    low = values[0]
    high = values[1]
    if draw.kind == "log":
        log = jax.random.uniform(key, minval=jnp.log(low), maxval=jnp.log(high))
        return jnp.exp(log)
    return jax.random.uniform(key, minval=low, maxval=high)
