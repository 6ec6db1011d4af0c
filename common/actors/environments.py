"""The environments that the flags of a run name: what they are, and how every actor makes its own."""

from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import NamedTuple

from common.actors.watching import LOOK_INTERVAL, Limits, Worker
from common.cli.errors import TrainingError
from common.cli.host_flags import HostEnvArgs
from common.envs.host import HostEnvs
from common.envs.registry import make_host
from common.envs.spaces import EnvSpec
from common.envs.usage import readable_errors


class HostEnvKind(NamedTuple):
    """What is known of an environment before any actor has one."""

    name: str
    spec: EnvSpec
    resets_in_step: bool


def inspect_env(args: HostEnvArgs) -> HostEnvKind:
    """Make the environment once to see what it is.

    Raises UsageError where that does not work, TrainingError where it takes longer than --reset-timeout.
    """
    worker, limits = Worker(args.env), Limits.of(args)
    kind = worker.run(partial(_inspect, args, worker))
    while not kind.done():
        if flag := worker.stuck(limits):
            raise TrainingError(f"environment {args.env} does not return from {worker.activity.phase} ({flag})")
        wait([kind], timeout=LOOK_INTERVAL)
    return kind.result()


def _inspect(args: HostEnvArgs, worker: Worker) -> HostEnvKind:
    vectorization = "vector" if args.vectorization == "vector" else "sync"
    with worker.doing("make"):
        envs = make_host(args.env, 1, args.seed, args.env_params, vectorization)
    with worker.doing("close"), readable_errors(f"environment {args.env} cannot be closed"):
        envs.close()
    return HostEnvKind(args.env, envs.spec, envs.resets_in_step)


def env_maker(args: HostEnvArgs, num_envs: int) -> Callable[[int], HostEnvs]:
    """A function of a seed that makes `num_envs` environments."""
    more = args.env_params, args.vectorization, args.reset_timeout, args.step_timeout
    return lambda seed: make_host(args.env, num_envs, seed, *more)
