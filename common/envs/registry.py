"""Environments by name: `make("CartPole-v1")` for the device, `make_host("envpool:Pong-v5", 8, seed=0)` for the host.

The tables in `common/cli/env_names.py` name a module for every suite. It gives two functions:

- `make(name, env_id, env_params)` returns an `Env`, or `make(name, env_id, options)` a `HostEnvs`. `name` is the whole
  name as the user gave it, for messages; `env_id` is what follows the suite's; `env_params` is --env-params as a dict.
- `ids()` returns the ids that `make` knows, where there is a list of them.

What a module raises reaches the user as one sentence: a UsageError as it is, everything else after "environment NAME
cannot be made:".
"""

import importlib
import warnings
from typing import Any

from common.cli.env_names import DEVICE_SUITES, HOST_SUITES, split_name, steps_on_host
from common.cli.errors import UsageError
from common.envs.environment import Env
from common.envs.host import HostEnvs, HostOptions, Vectorization
from common.envs.usage import read_params, readable_errors, refuse_params


def make(name: str, env_params: str = "") -> Env:
    """The environment called `name`: a gymnax id, `suite:id`, or a user's own `package.module:factory`.

    `env_params` is a JSON object of environment parameters to replace. A factory is called without arguments and
    returns an environment or a pair (environment, parameters). Raises UsageError for an unknown name or parameter.
    """
    if steps_on_host(name):
        raise UsageError(f"{name} steps on the host, not on the device: algos/appo_pmap.py trains on it")
    return _make(DEVICE_SUITES, name, read_params(env_params))


def make_host(
    name: str,
    num_envs: int,
    seed: int,
    env_params: str = "",
    vectorization: Vectorization = "async",
    reset_timeout: float | None = None,
    step_timeout: float | None = None,
) -> HostEnvs:
    """`num_envs` environments called `envpool:id` or `gymnasium:id`, see `HostOptions` for the rest.

    `env_params` is a JSON object of arguments for the suite's own `make`. Raises UsageError for an unknown name, for
    arguments that do not work, and for spaces that are not supported.
    """
    if not steps_on_host(name):
        raise UsageError(f"{name} does not step on the host: name one as envpool:CartPole-v1 or gymnasium:CartPole-v1")
    params = read_params(env_params)
    refuse_params(params, ("num_envs", "seed"))
    options = HostOptions(num_envs, seed, params, vectorization, reset_timeout, step_timeout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")  # of bounds that are not exact
        return _make(HOST_SUITES, name, options)


def _make(suites: dict[str, str], name: str, options: Any) -> Any:
    suite, env_id = split_name(name)
    with readable_errors(f"environment {name} cannot be made"):
        return importlib.import_module(suites[suite]).make(name, env_id, options)
