"""Environments by name: `make("CartPole-v1")` for the device, `make_host("envpool:Pong-v5", 8, seed=0)` for the host.

For every suite in `common/cli/env_flags.py` there is a module `common/envs/SUITE_suite.py` with these functions:

- `make(name, env_id, env_params)` returns an `Env`, or `make(name, env_id, options)` a `HostEnvs`. `name` is the whole
  name as the user gave it, for messages; `env_id` is what follows the suite's; `env_params` is --env-params as a dict.
- `ids()` returns the ids that `make` knows.

What a module raises reaches the user as one sentence: a UsageError as it is, everything else after "environment NAME
cannot be made:".
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, Literal

from common.cli.env_flags import CUSTOM, SUITES, read_params, split_name, steps_on_host
from common.cli.errors import UsageError
from common.envs.environment import Env
from common.envs.host import HostEnvs, HostOptions, Vectorization
from common.envs.suite_tools import UnknownId, readable_errors, refuse_params
from common.envs.variation import with_draws

Place = Literal["device", "host"]


def make(name: str, env_params: str = "") -> Env:
    """The environment called `name`: a gymnax id, `suite:id`, or a user's own `package.module:factory`.

    `env_params` is a JSON object of environment parameters to replace; those that are draws, such as "uniform:8:12",
    are drawn for every episode. A factory is called without arguments and returns an environment or a pair
    (environment, parameters). Raises UsageError for an unknown name or parameter.
    """
    return with_draws(partial(_make, name), env_params)


def make_host(
    name: str,
    num_envs: int,
    seed: int,
    env_params: str = "",
    vectorization: Vectorization = "async",
    reset_timeout: float | None = None,
    step_timeout: float | None = None,
    frames: bool = False,
    resets_in_step: bool = False,
) -> HostEnvs:
    """`num_envs` environments called `envpool:id` or `gymnasium:id`, see `HostOptions` for the rest.

    `env_params` is a JSON object of arguments for the suite's own `make`. Raises UsageError for an unknown name, for
    arguments that do not work, and for spaces that are not supported.
    """
    if not steps_on_host(name):
        others = [other for other in _names_elsewhere(split_name(name)[1]) if steps_on_host(other)]
        hint = " or ".join(others or ["envpool:CartPole-v1", "gymnasium:CartPole-v1"])
        raise UsageError(f"{name} does not step on the host, as {hint} would")
    params = read_params(env_params)
    refuse_params(params, ("num_envs", "seed"))
    options = HostOptions(num_envs, seed, params, vectorization, reset_timeout, step_timeout, frames, resets_in_step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")  # of bounds that are not exact
        envs = _make(name, options)
    if resets_in_step and not envs.resets_in_step:
        envs.close()
        raise UsageError(f"{name} resets in a step of its own, which teaches nothing: take another --vectorization")
    return envs


def list_envs(places: Sequence[Place], wanted: str) -> None:
    """Print the names of environments that step there: of the suite `wanted`, or of "all" of them.

    Raises UsageError where there is no such suite, or where it is not installed.
    """
    suites = [suite for suite, where in SUITES.items() if where in places]
    if wanted not in (*suites, "all"):
        raise UsageError(f"--list-envs {wanted}: this algorithm trains on {' and '.join(suites)}")
    for suite in suites if wanted == "all" else [wanted]:
        try:
            ids = _module(suite).ids()
        except UsageError as error:  # it is not installed
            if suite == wanted:
                raise
            print(f"note: {error}", file=sys.stderr)
            continue
        print(*(env_id if suite == "gymnax" else f"{suite}:{env_id}" for env_id in ids), sep="\n")


def _make(name: str, options: Any) -> Any:
    suite, env_id = split_name(name)
    if steps_on_host(name) and not isinstance(options, HostOptions):
        raise UsageError(f"{name} steps on the host, not on the device: it is made by make_host")
    try:
        with readable_errors(f"environment {name} cannot be made"):
            return _module(suite).make(name, env_id, options)
    except UnknownId as error:
        if not (others := _names_elsewhere(env_id)):  # imports all suites
            raise
        raise UsageError(f"unknown environment {name!r}: did you mean {' or '.join(others)}?") from error


def _module(suite: str) -> ModuleType:
    return importlib.import_module("common.envs.custom" if suite == CUSTOM else f"common.envs.{suite}_suite")


def _names_elsewhere(env_id: str) -> list[str]:
    """The names by which suites have this id."""
    found = []
    for suite in SUITES:
        with suppress(Exception):  # it is not installed, or not as it was: nobody has asked for it
            found += [f"{suite}:{env_id}"] if env_id in _module(suite).ids() else []
    return found
