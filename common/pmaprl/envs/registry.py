"""Environments by name: `make("CartPole-v1")`, or `make_host("envpool:Pong-v5", 8, seed=0)`.

For every suite in `common/pmaprl/cli/env_flags.py` there is a module
`common/pmaprl/suites/SUITE.py`, which has

- `ids()`, the ids of its environments,
- a class `SuiteEnv`: on the device an `Env`, made as `SuiteEnv(name, env_id, env_params)`; on the
  host `HostEnvs`, made as `SuiteEnv(name, env_id, options)`. `name` is the user's whole name, for
  messages; `env_id` is the part behind the suite's, one of the `ids()`; `env_params` is
  --env-params as a dict; `options` are `HostOptions`.

An error of a module reaches the user as one sentence: a UsageError as it is, every other error
after "environment NAME cannot be made:".
"""

import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from pmaprl.cli.env_flags import CUSTOM, SUITES, is_custom, read_params, split_name, steps_on_host
from pmaprl.cli.errors import UsageError, printable
from pmaprl.envs import custom
from pmaprl.envs.environment import Env
from pmaprl.envs.foreign_code import import_package, readable_errors
from pmaprl.envs.host import HostEnvs, HostOptions
from pmaprl.envs.suite_params import refuse_params
from pmaprl.envs.variation import with_draws


def make(name: str, env_params: str = "") -> Env:
    """Make the environment called `name`, which steps on the device.

    Args:
        name: a gymnax id, `suite:id`, or a user's own `package.module:factory`. A factory is called
            without arguments and returns an environment or a pair (environment, parameters).
        env_params: a JSON object of environment parameters to replace. Parameters such as
            "uniform:8:12" are drawn for every episode.

    Raises:
        UsageError: the name or a parameter is unknown, or the environment cannot be used.
    """
    return with_draws(partial(_make, name), env_params)


def make_host(
    name: str, num_envs: int, seed: int, env_params: str = "", **options: Any
) -> HostEnvs:
    """Make environments that step on the host.

    Args:
        name: `envpool:id` or `gymnasium:id`.
        num_envs: number of environments N.
        seed: their seed.
        env_params: a JSON object of arguments for the suite's own `make`.
        options: further fields of `HostOptions`.

    Raises:
        UsageError: the name is unknown, arguments do not work, or a space is not supported.
    """
    if not steps_on_host(name):
        _, env_id = split_name(name)
        similar = [known for known in _names_elsewhere(env_id) if steps_on_host(known)]
        hint = " or ".join(similar or ["envpool:CartPole-v1", "gymnasium:CartPole-v1"])
        raise UsageError(f"{name} does not step on the host, as {hint} would")
    params = read_params(env_params)
    refuse_params(params, ("num_envs", "seed"))
    all_options = HostOptions(num_envs=num_envs, seed=seed, env_params=params, **options)
    with warnings.catch_warnings():
        # gymnasium warns of bounds that are not exact
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        envs = _make(name, all_options)
    if all_options.resets_in_step and not envs.resets_in_step:
        envs.close()
        raise UsageError(
            f"{name} resets in a step of its own, which teaches nothing: take another "
            "--vectorization"
        )
    return envs


def list_envs(known: Sequence[str], wanted: str) -> None:
    """Print the names of environments.

    Args:
        known: the suites of an algorithm.
        wanted: one of them, or "all".

    Raises:
        UsageError: there is no such suite, or it is not installed.
    """
    if wanted not in (*known, "all"):
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"--list-envs {wanted} is none of the suites of this algorithm, "
            f"{', '.join(known)}{hint}"
        )
    for suite in known if wanted == "all" else [wanted]:
        try:
            with readable_errors(f"suite {suite} cannot be loaded"):
                ids = _module(suite).ids()
        except UsageError as error:  # it is not installed
            if suite == wanted:
                raise
            print(f"note: {printable(error)}", file=sys.stderr)
        else:
            prefix = "" if suite == "gymnax" else f"{suite}:"
            print(*(f"{prefix}{env_id}" for env_id in ids), sep="\n")


def _make(name: str, options: dict[str, Any] | HostOptions) -> Any:
    suite, env_id = split_name(name)
    if steps_on_host(name) and not isinstance(options, HostOptions):
        raise UsageError(f"{name} steps on the host, not on the device: it is made by make_host")
    with readable_errors(f"environment {name} cannot be made"):
        if is_custom(name) and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the user's module may be there
        if suite == CUSTOM and not isinstance(options, HostOptions):
            return _own(name, options)
        if name.startswith("gymnasium:ALE/"):
            import_package("ale_py")  # registers the games
        registers_itself = suite == "gymnasium" and ":" in env_id  # by the module before the colon
        if not registers_itself:
            check_known(name, env_id, _module(suite).ids())
        return _module(suite).SuiteEnv(name, env_id, options)


def _own(name: str, env_params: dict[str, Any]) -> Env:
    """Make the user's environment.

    If it does not exist, as with `mujoco:Ant-v5`, the error names suites that have the id.
    """
    try:
        return custom.make(name, env_params)
    except UsageError as error:
        module, factory = name.rsplit(":", 1)
        if hasattr(sys.modules.get(module), factory):
            raise  # the user's own code failed
        suggestions = _names_elsewhere(factory)
        if not suggestions:
            raise
        raise UsageError(
            f"unknown environment {name!r}: did you mean {', '.join(suggestions)}?"
        ) from error


def check_known(name: str, env_id: str, known: Sequence[str]) -> None:
    """Raise UsageError, with the nearest ids or other suites, unless the id is known.

    Args:
        name: the user's whole name.
        env_id: the id in it.
        known: the ids of the suite.
    """
    if env_id in known:
        return
    suite = name.removesuffix(env_id)
    by_lower_case = {known_id.lower(): known_id for known_id in known}
    near = difflib.get_close_matches(env_id.lower(), by_lower_case, n=3, cutoff=0.4)
    is_mistyped = difflib.get_close_matches(env_id.lower(), near, cutoff=0.7)
    suggestions = [] if is_mistyped else _names_elsewhere(env_id)  # imports all suites
    if env_id.startswith("ALE/"):  # gymnasium's names of Atari games
        suggestions = [f"envpool:{env_id.removeprefix('ALE/')}", f"gymnasium:{env_id}"]
    if not suggestions:
        suggestions = [suite + by_lower_case[match] for match in near]
    hint = f"--list-envs {suite.rstrip(':') or 'gymnax'} prints those there are"
    if suggestions:
        hint = f"did you mean {', '.join(suggestions)}?"
    raise UsageError(f"unknown environment {name!r}: {hint}")


def _names_elsewhere(env_id: str) -> list[str]:
    """Names of the environments with this id, of all suites."""
    names = []
    for suite in SUITES:
        with suppress(Exception):  # a suite that nobody has asked for may be missing or broken
            if env_id in _module(suite).ids():
                names.append(f"{suite}:{env_id}")
    return names


def _module(suite: str) -> ModuleType:
    return importlib.import_module(f"pmaprl.suites.{suite}")
