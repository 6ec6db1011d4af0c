"""Several processes that train together, each with devices of its own: who this one is, and what they agree on.

All of them run the same program and come to the same calls in the same order; what could differ between them, such as
a signal or what is found on a disk, is agreed on first. With one process everything is at once what it was given.
"""

import atexit
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from common.cli.errors import TrainingError, UsageError
from common.cli.process_flags import ProcessArgs

T = TypeVar("T")

START = 300  # seconds to wait until all processes are there
HEARTBEAT = 60  # without a sign of life for as many seconds a process counts as dead, and the others end
FAREWELL = 30  # seconds that a process which ends waits for the others
LOST = "Gloo|NCCL|Socket|Connection|heartbeat"  # in errors of collectives that another process has left


@contextmanager
def joined(args: ProcessArgs) -> Iterator[None]:
    """Inside, this process is one of several, if the flags say so; begins before anything else happens on a device.

    One that fails inside ends without a farewell, and the others then cannot go on and end too. Raises UsageError where
    they do not come together, TrainingError where another one has ended.
    """
    if args.is_distributed and not jax.distributed.is_initialized():
        _meet(args)
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        # What is registered last is called first: else JAX would wait for the others
        atexit.register(_leave, 2 if isinstance(error, UsageError) else 1)
        this = f"process {jax.process_index()} of {count()}"
        if isinstance(error, jax.errors.JaxRuntimeError) and re.search(LOST, str(error)):
            raise TrainingError(f"{this} has lost another one; saved checkpoints are intact") from error
        if isinstance(error, UsageError | TrainingError) and not is_first():
            raise (UsageError if isinstance(error, UsageError) else TrainingError)(f"{this}: {error}") from error
        raise


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def own(devices: list[jax.Device]) -> list[jax.Device]:
    """Those of `devices` that are this process's."""
    return [device for device in devices if device.process_index == jax.process_index()]


def own_share(x: np.ndarray) -> np.ndarray:
    """This process's part of `x` [D, ...], which has a row for each device of all processes."""
    share = len(x) // count()
    return x[jax.process_index() * share :][:share]


def gathered(tree: Any) -> Any:
    """Host arrays [D, ...] with the rows of all processes, from those of this one's devices."""
    return tree if count() == 1 else multihost_utils.process_allgather(tree, tiled=True)


def largest(number: int) -> int:
    """The largest of the numbers that the processes have."""
    return number if count() == 1 else int(np.max(multihost_utils.process_allgather(np.int32(number))))


def on_first(function: Callable[..., T], *args: Any) -> T:
    """What the function returns in the first process, where alone it is called; in all processes.

    Raises what it raises, in the others UsageError or TrainingError with the same text.
    """
    if count() == 1:
        return function(*args)
    if not is_first():
        result, usage, failure = pickle.loads(_broadcast(b""))
        if failure is not None:
            raise (UsageError if usage else TrainingError)(failure)
        return result
    try:
        result = function(*args)
    except Exception as error:
        _broadcast(pickle.dumps((None, isinstance(error, UsageError), str(error))))
        raise
    _broadcast(pickle.dumps((result, False, None)))
    return result


def check_equal(what: str, value: str) -> None:
    """Raise TrainingError where the processes have different values; `what` says of what."""
    if count() == 1:
        return
    theirs = multihost_utils.process_allgather(np.frombuffer(value.encode().ljust(64)[:64], np.uint8))
    if differing := [str(i) for i in range(count()) if (theirs[i] != theirs[0]).any()]:
        raise TrainingError(f"{what} of process {', '.join(differing)} is not that of process 0")


def _broadcast(content: bytes) -> bytes:
    """The first process's `content`, in all."""
    size = largest(len(content))
    return multihost_utils.broadcast_one_to_all(np.frombuffer(content.ljust(size, b"\0"), np.uint8)).tobytes()


def _meet(args: ProcessArgs) -> None:
    """Start JAX's runtime for several processes."""
    times = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": FAREWELL}
    if args.process_id < 1 and not args.quiet:
        print(f"meeting  the other processes{args.coordinator and f' at {args.coordinator}'} ...", flush=True)
    try:
        jax.distributed.initialize(**args.process, **times, initialization_timeout=START)
    except (ValueError, RuntimeError) as error:
        raise UsageError(_reason(args, error)) from error


def _reason(args: ProcessArgs, error: Exception) -> str:
    """Why processes do not come together, in one sentence."""
    text = re.sub(r"\s+", " ", str(error))
    if "must be called before" in text:
        return "JAX has started already in this process: --distributed has to come before anything on a device"
    if not args.coordinator:
        systems = "no Slurm, Open MPI, Kubernetes or TPU pod here"
        return f"--distributed finds {systems}: name --coordinator HOST:PORT, --num-processes and --process-id"
    process = f"process {args.process_id} of {args.num_processes}"
    return f"{process} could not meet the others at {args.coordinator}: {text[:200]}"
