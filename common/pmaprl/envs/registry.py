"""Environments by name: `make("CartPole-v1")` for the device, `make_host("envpool:Pong-v5", 8,
seed=0)` for the host.

For every suite in `common/pmaprl/cli/env_flags.py` there is a module
`common/pmaprl/suites/SUITE.py`, which has

- `ids()`, the ids of its environments,
- a class `SuiteEnv`: on the device an `Env`, made as `SuiteEnv(name, env_id, env_params)`; on the
  host `HostEnvs`, made as `SuiteEnv(name, env_id, options)`. `name` is the whole name as the user
  gave it, for messages; `env_id` is what follows the suite's, one of the `ids()`; `env_params` is
  --env-params as a dict; `options` are `HostOptions`.

What a module raises reaches the user as one sentence: a UsageError as it is, everything else after
"environment NAME cannot be made:".
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
from pmaprl.envs.host import HostEnvs, HostOptions
from pmaprl.envs.suite_tools import import_package, readable_errors, refuse_params
from pmaprl.envs.variation import with_draws


def make(name: str, env_params: str = "") -> Env:
    """The environment called `name`: a gymnax id, `suite:id`, or a user's own
    `package.module:factory`.

    `env_params` is a JSON object of environment parameters to replace; those that are draws, such
    as "uniform:8:12", are drawn for every episode. A factory is called without arguments and
    returns an environment or a pair (environment, parameters). Raises UsageError for an unknown
    name or parameter.
    """
    return with_draws(partial(_make, name), env_params)


def make_host(
    name: str, num_envs: int, seed: int, env_params: str = "", **options: Any
) -> HostEnvs:
    """`num_envs` environments called `envpool:id` or `gymnasium:id`; `options` are further ones of
    `HostOptions`.

    `env_params` is a JSON object of arguments for the suite's own `make`. Raises UsageError for an
    unknown name, for arguments that do not work, and for spaces that are not supported.
    """
    if not steps_on_host(name):
        others = [other for other in _names_elsewhere(split_name(name)[1]) if steps_on_host(other)]
        hint = " or ".join(others or ["envpool:CartPole-v1", "gymnasium:CartPole-v1"])
        raise UsageError(f"{name} does not step on the host, as {hint} would")
    params = read_params(env_params)
    refuse_params(params, ("num_envs", "seed"))
    asked = HostOptions(num_envs=num_envs, seed=seed, env_params=params, **options)
    with warnings.catch_warnings():
        # Of bounds that are not exact
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        envs = _make(name, asked)
    if asked.resets_in_step and not envs.resets_in_step:
        envs.close()
        raise UsageError(
            f"{name} resets in a step of its own, which teaches nothing: take another "
            "--vectorization"
        )
    return envs


def list_envs(known: Sequence[str], wanted: str) -> None:
    """Print the names of environments: of the suite `wanted`, one of the `known` ones, or of "all"
    of them.

    Raises UsageError where there is no such suite, or where it is not installed.
    """
    if wanted not in (*known, "all"):
        near = "".join(
            f"; did you mean {suite}?" for suite in difflib.get_close_matches(wanted, known, n=1)
        )
        raise UsageError(
            f"--list-envs {wanted} is none of the suites of this algorithm, "
            f"{', '.join(known)}{near}"
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
            print(
                *(env_id if suite == "gymnax" else f"{suite}:{env_id}" for env_id in ids), sep="\n"
            )


def _make(name: str, options: Any) -> Any:
    suite, env_id = split_name(name)
    if steps_on_host(name) and not isinstance(options, HostOptions):
        raise UsageError(f"{name} steps on the host, not on the device: it is made by make_host")
    with readable_errors(f"environment {name} cannot be made"):
        if is_custom(name) and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # where the user's module may be
        if suite == CUSTOM:
            return _own(name, options)
        if name.startswith("gymnasium:ALE/"):
            import_package("ale_py")  # without which gymnasium does not know them
        # Else the module before the colon registers it
        if suite != "gymnasium" or ":" not in env_id:
            check_known(name, env_id, _module(suite).ids())
        return _module(suite).SuiteEnv(name, env_id, options)


def _own(name: str, env_params: dict[str, Any]) -> Env:
    """The user's environment; where there is none, as with `mujoco:Ant-v5`, suites that have this
    id are named.
    """
    try:
        return custom.make(name, env_params)
    except UsageError as error:
        module, factory = name.rsplit(":", 1)
        # Else what went wrong lies in the user's code
        there = hasattr(sys.modules.get(module), factory)
        meant = [] if there else _names_elsewhere(factory)
        if not meant:
            raise
        raise UsageError(
            f"unknown environment {name!r}: did you mean {', '.join(meant)}?"
        ) from error


def check_known(name: str, env_id: str, known: Sequence[str]) -> None:
    """Raise UsageError, with the nearest ids or with other suites, unless `env_id` of the whole
    `name` is `known`.
    """
    if env_id in known:
        return
    suite = name.removesuffix(env_id)
    lowered = {other.lower(): other for other in known}
    near = difflib.get_close_matches(env_id.lower(), lowered, n=3, cutoff=0.4)
    mistyped = difflib.get_close_matches(env_id.lower(), near, cutoff=0.7)
    meant = [] if mistyped else _names_elsewhere(env_id)  # imports all suites
    if env_id.startswith("ALE/"):  # gymnasium's names of Atari games
        meant = [f"envpool:{env_id.removeprefix('ALE/')}", f"gymnasium:{env_id}"]
    meant = meant or [suite + lowered[match] for match in near]
    listed = f"--list-envs {suite.rstrip(':') or 'gymnax'} prints those there are"
    hint = f"did you mean {', '.join(meant)}?" if meant else listed
    raise UsageError(f"unknown environment {name!r}: {hint}")


def _names_elsewhere(env_id: str) -> list[str]:
    """The names by which suites have this id."""
    found = []
    for suite in SUITES:
        with suppress(Exception):  # it is not installed, or not as it was: nobody has asked for it
            found += [f"{suite}:{env_id}"] if env_id in _module(suite).ids() else []
    return found


def _module(suite: str) -> ModuleType:
    return importlib.import_module(f"pmaprl.suites.{suite}")
