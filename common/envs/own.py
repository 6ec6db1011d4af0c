"""A user's own environment: an object, or `package.module:factory` importable from the working directory."""

import difflib
import importlib
import os
import sys
from typing import Any

from common.cli.env_names import SUITES
from common.cli.env_params import read_params
from common.cli.errors import UsageError
from common.envs.environment import Env
from common.envs.gymnax_style import adapt, with_params
from common.envs.randomized import with_draws
from common.envs.usage import reason


def wrap(environment: Any, env_params: str = "") -> Env:
    """An `Env` from a gymnax-style environment, or from a pair (environment, parameters); an `Env` stays as it is.

    `env_params` is as for `make` of the registry. Raises UsageError where an `Env` would have to change by it.
    """
    if not isinstance(environment, Env):
        inner, params = with_params(environment)
        name = getattr(inner, "name", type(inner).__name__)
        return with_draws(lambda changes: adapt(name, inner, params, changes), read_params(env_params))
    if env_params:
        raise UsageError(f"--env-params {env_params} cannot change an object, {environment.name}: make it so")
    return environment


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    return adapt(name, *_call(env_id), env_params)


def _call(path: str) -> tuple[Any, Any]:
    """What the factory called `path` returns, as a pair (environment, parameters)."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, factory = path.rsplit(":", 1)
    try:
        return with_params(getattr(importlib.import_module(module), factory)())
    except (Exception, SystemExit) as error:
        near = difflib.get_close_matches(path.partition(":")[0], SUITES, n=1)
        if near and isinstance(error, ModuleNotFoundError):
            raise UsageError(f"there is no suite {path.partition(':')[0]}; did you mean {near[0]}:?") from error
        raise UsageError(
            f"environment {path} cannot be made ({reason(error)}); a name with a colon is package.module:factory, "
            "importable from the working directory, and the factory takes no arguments"
        ) from error
