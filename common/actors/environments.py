"""The environments that the flags of a run name: what they are, and how every actor makes its own."""

from collections.abc import Callable
from typing import NamedTuple

from common.cli.host_flags import HostEnvArgs
from common.envs.host import HostEnvs
from common.envs.registry import make_host
from common.envs.spaces import EnvSpec


class HostEnvKind(NamedTuple):
    """What is known of an environment before any actor has one."""

    name: str
    spec: EnvSpec
    resets_in_step: bool


def inspect_env(args: HostEnvArgs) -> HostEnvKind:
    """Make the environment once to see what it is. Raises UsageError where that does not work."""
    vectorization = "vector" if args.vectorization == "vector" else "sync"
    envs = make_host(args.env, 1, args.seed, args.env_params, vectorization)
    try:
        return HostEnvKind(args.env, envs.spec, envs.resets_in_step)
    finally:
        envs.close()


def env_maker(args: HostEnvArgs, num_envs: int) -> Callable[[int], HostEnvs]:
    """A function of a seed that makes `num_envs` environments."""
    more = args.env_params, args.vectorization, args.reset_timeout, args.step_timeout
    return lambda seed: make_host(args.env, num_envs, seed, *more)
