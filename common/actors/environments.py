"""The environments that the flags of a run name: what they are, and how every actor makes its own."""

from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from common.actors.watching import LOOK_INTERVAL, Limits, Worker
from common.cli.errors import TrainingError, UsageError
from common.cli.host_flags import HostEnvArgs
from common.envs.evaluation_params import evaluation_params
from common.envs.host import HostEnvs
from common.envs.masks import legal_actions, sample_legal
from common.envs.registry import make_host
from common.envs.spaces import is_number
from common.envs.spec import EnvSpec
from common.envs.usage import readable_errors
from common.envs.varied import logged_entries

LONGEST_LOOK = 1_000  # steps in search of the numbers that --log-info names


class HostEnvKind(NamedTuple):
    """What is known of an environment before any actor has one."""

    name: str
    spec: EnvSpec
    resets_in_step: bool
    logged: dict[str, str]  # by metric of --log-info, the entry of the info


def inspect_env(args: HostEnvArgs) -> HostEnvKind:
    """Make the environment once to see what it is, and once more where evaluations have another one.

    Raises UsageError where that does not work or both do not fit, TrainingError where it takes too long.
    """
    kind = _inspect(args, args.env_params)
    if eval_params(args) != args.env_params:
        try:
            _check_same(kind, _inspect(args, eval_params(args)))
        except UsageError as error:
            raise UsageError(f"in evaluations, with --eval-env-params: {error}") from error
    return kind


def eval_params(args: HostEnvArgs) -> str:
    """The parameters of the environments in evaluations, as --env-params are those of the others."""
    return evaluation_params(args.env, args.vectorization, args.env_params, args.eval_env_params)


def env_maker(args: HostEnvArgs, num_envs: int, env_params: str) -> Callable[[int], HostEnvs]:
    """A function of a seed that makes `num_envs` environments."""
    more = env_params, args.vectorization, args.reset_timeout, args.step_timeout
    return lambda seed: make_host(args.env, num_envs, seed, *more, resets_in_step=args.resets_in_step)


def _inspect(args: HostEnvArgs, env_params: str) -> HostEnvKind:
    """What one environment is, made and closed in a thread, for at most --reset-timeout each."""
    worker, limits = Worker(args.env), Limits.of(args)
    kind = worker.run(partial(_make_and_close, args, env_params, worker))
    while not kind.done():
        if flag := worker.stuck(limits):
            raise TrainingError(f"environment {args.env} does not return from {worker.activity.phase} ({flag})")
        wait([kind], timeout=LOOK_INTERVAL)
    return kind.result()


def _make_and_close(args: HostEnvArgs, env_params: str, worker: Worker) -> HostEnvKind:
    vectorization = "vector" if args.vectorization == "vector" else "sync"
    with worker.doing("make"):
        envs = make_host(args.env, 1, args.seed, env_params, vectorization, resets_in_step=args.resets_in_step)
    try:
        with readable_errors(f"environment {args.env} cannot be stepped"):
            logged = _find_logged(args, envs, worker) if args.log_info else {}
    finally:
        with worker.doing("close"), readable_errors(f"environment {args.env} cannot be closed"):
            envs.close()
    return HostEnvKind(args.env, envs.spec, envs.resets_in_step, logged)


def _find_logged(args: HostEnvArgs, envs: HostEnvs, worker: Worker) -> dict[str, str]:
    """The entries, which the info has in the first step, or at least until the end of an episode of random actions."""
    with worker.doing("reset"):
        obs = envs.reset()
    found = {}
    for key in jax.random.split(jax.random.key(args.seed), LONGEST_LOOK):
        legal = legal_actions(jax.tree.map(lambda x: x[0], obs))
        action = jax.tree.map(lambda x: np.asarray(x)[None], sample_legal(key, envs.spec.action_space, legal))
        with worker.doing("step"):
            out = envs.step(action)
        obs, info = out.obs, out.info.get("final_info", out.info)
        numbers = [name for name, x in info.items() if np.shape(x) == (1,) and is_number(x[0])]
        found |= dict.fromkeys(name for name in numbers if not name.startswith("_"))
        with suppress(UsageError):
            return logged_entries(args.log_info, found, args.env)
        if out.terminated[0] or out.truncated[0]:
            break
    return logged_entries(args.log_info, found, args.env)


def _check_same(trained: HostEnvKind, evaluated: HostEnvKind) -> None:
    for what in ("observation", "action"):
        ours, theirs = (str(getattr(kind.spec, f"{what}_space")) for kind in (trained, evaluated))
        if ours != theirs:
            raise UsageError(f"{what}s are {theirs}, and {ours} in the training")
