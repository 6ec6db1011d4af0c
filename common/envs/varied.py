"""Environments as a run wants them: which parameters differ between members, as `env.gravity`, and what is logged."""

import copy
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from common.cli.errors import UsageError
from common.cli.sweeps import PREFIX
from common.envs import spaces
from common.envs.environment import Env
from common.envs.requirements import need_fitting_steps
from common.envs.usage import changed_params, readable_errors

REDUCTIONS = "sum", "max", "min", "last"  # what metrics can be but means, as the ends of their names say
CHOOSE = "let it be one of some numbers, as by choice:100,500"


def for_member(env: Env, hyper: dict[str, jax.Array] | None) -> Env:
    """`env` with those of a member's hyper-parameters that are its numbers.

    Where it is judged and does not say by what, it is by the rewards of `env` itself for the same states and actions.
    """
    numbers = {name.removeprefix(PREFIX): x for name, x in (hyper or {}).items() if name.startswith(PREFIX)}
    if not numbers:
        return env
    own = env.with_numbers(numbers)
    if env.is_judged and not env.tells_objective:
        own = copy.copy(own)
        own.judge = env
    return own


def for_run(args: Any, env: Env) -> Env:
    """`env` as all agents of a run share it. Raises UsageError where it does not fit the flags."""
    need_fitting_steps(args, env)
    varied = {name: values for name, values in args.members.hyper.items() if name.startswith(PREFIX)}
    for name, values in varied.items():
        check_number(env, name.removeprefix(PREFIX), sorted(set(values)))
        if args.pbt and name in args.evolving and isinstance(env.numbers[name.removeprefix(PREFIX)], int):
            raise UsageError(f"{name} cannot evolve: it is a whole number, and factors make others of it")
    if logged := dict.fromkeys((*args.log_info, *getattr(env.inner, "log_info", ()))):
        env = copy.copy(env)
        env.logged = logged_entries(logged, env.info_numbers, env.name)
    if args.pbt and varied:  # which go from member to member, whether or not chance changes them
        env = copy.copy(env)
        env.is_judged = True
    return env


def logged_entries(metrics: Iterable[str], numbers: Iterable[str], name: str) -> dict[str, str]:
    """By metric the entry of the info that it is of: the entry itself, or ENTRY_max and so on of the entry ENTRY.

    `numbers` are the entries of the info of environment `name` that are numbers. Raises UsageError for any other.
    """
    known = {f"{entry}_{kind}": entry for entry in numbers for kind in REDUCTIONS} | {entry: entry for entry in numbers}
    if unknown := [metric for metric in metrics if metric not in known]:
        there = ", ".join(numbers) or "none"
        raise UsageError(f"--log-info {unknown[0]}: of numbers in its info, environment {name} has {there}")
    return {metric: known[metric] for metric in metrics}


def check_number(env: Env, name: str, values: Iterable[float]) -> None:
    """Raise UsageError where the parameter called `name` cannot have these values, or cannot be an array."""
    known = env.numbers
    if name not in known:
        there = ", ".join(known) or "none"
        raise UsageError(f"{env.name} has no parameter {name!r} that members or episodes can differ in; it has {there}")
    for value in values:
        if isinstance(known[name], int) and not float(value).is_integer():
            raise UsageError(f"{env.name} parameter {name!r} is a whole number, not {value:g}: {CHOOSE}")
        changed_params(env.name, known, {name: value})

    def stepped(number: jax.Array) -> Any:
        own, keys = env.with_numbers({name: number}), jax.random.split(jax.random.key(0), 3)
        _, state = own.reset(keys[0])
        return own.step(keys[1], state, spaces.sample(keys[2], env.action_space))

    alike = f"give all of them the same, as with --env-params '{json.dumps({name: known[name]})}'"
    others = ", ".join(other for other in known if other != name) or "none"
    why = "which its code needs as a plain number, as for a shape"
    with readable_errors(
        f"members and episodes of {env.name} cannot differ in {name!r}, {why}: {alike}; others are {others}"
    ):
        jax.eval_shape(stepped, jnp.float32(0))
