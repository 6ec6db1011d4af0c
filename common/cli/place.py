"""Flags of an algorithm wherever its environments step: on the devices, or on the host beside actors, as --env says."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar

from common.cli.config import read_config
from common.cli.env_names import steps_on_host


class Placed:
    """Flags that an algorithm has in both places; an instance also has those of the place of its `env`.

    `Args(env="CartPole-v1")` is a `Args.on_device` too, `Args(env="gymnasium:CartPole-v1")` a `Args.on_host`.
    """

    on_device: ClassVar[type]
    on_host: ClassVar[type]
    flags: ClassVar[type | None] = None  # of a class with a place: the one without

    def __new__(cls, **flags: Any):
        return object.__new__(cls if cls.flags else cls.at(flags.get("env", "")))

    @classmethod
    def at(cls, env: str = "") -> type:
        """The class for the place of `env`, or of the environment that is the default."""
        flags = cls.flags or cls
        env = env or getattr(flags, "env", flags.on_device.env)
        return _with_place(flags, flags.on_host if steps_on_host(env) else flags.on_device)

    @classmethod
    def for_env(cls, env: str, **overrides: Any):
        """The flags that were tuned for `env`, if there are any, changed by `overrides`."""
        return super(Placed, cls.at(env)).for_env(env, **overrides)

    @classmethod
    def from_run(cls, run_dir: str | Path, **overrides: Any):
        """The flags to resume `run_dir` with, changed by `overrides`; see `RunArgs.from_run`."""
        return super(Placed, cls.at(read_config(Path(run_dir))["args"]["env"])).from_run(run_dir, **overrides)


@functools.cache
def _with_place(flags: type, place: type) -> type:
    texts = {"flags": flags, "__doc__": flags.__doc__, "__module__": flags.__module__}
    return dataclasses.make_dataclass(flags.__name__, [], bases=(flags, place), kw_only=True, namespace=texts)
