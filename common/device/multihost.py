"""Several processes that train together, each with devices of its own: who this one is, and what they agree on.

All of them run the same program and come to the same calls in the same order; what could differ between them, such as
a signal or what is found on a disk, is agreed on first. With one process everything is at once what it was given.
"""

import errno
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from common.cli.errors import ProcessEnded, TrainingError, UsageError
from common.cli.run_flags import ProcessArgs

T = TypeVar("T")

START = 300  # seconds to wait until all processes are there
HEARTBEAT = 60  # without a sign of life for as many seconds a process counts as dead, and the others end
EXIT_TIMEOUT = 3600  # seconds that a process which has finished waits for the first, which draws pictures
GRACE = 2.0  # seconds that the first one, which all depend on, leaves the others where all have to end
LOST = re.compile("[A-Z_]+: .*(Gloo|gloo|NCCL|Socket closed|Connection|heartbeat)", re.DOTALL)
"""What errors of collectives begin with that another process has left: XLA's code first, as few others do."""


@contextmanager
def joined(args: ProcessArgs) -> Iterator[None]:
    """Inside, this process is one of several, if the flags say so; begins before anything else happens on a device.

    Raises UsageError where they do not come together, ProcessEnded for whatever fails inside: the others then cannot go
    on either.
    """
    if args.is_distributed and not jax.distributed.is_initialized():
        _meet(args)
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        raise _ended(error) from error


def has_lost(error: BaseException | None) -> str:
    """The first line of an error which says that a collective failed, be it the `error` or one behind it; else ""."""
    line = ""
    while error is not None and count() > 1:
        if isinstance(error, RuntimeError | ValueError) and LOST.match(str(error)):
            line = str(error).splitlines()[0]  # the one furthest behind says it best
        error = error.__cause__
    return line


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def own(devices: list[jax.Device]) -> list[jax.Device]:
    """Those of `devices` that are this process's."""
    return [device for device in devices if device.process_index == jax.process_index()]


def gathered(tree: Any) -> Any:
    """Host arrays [D, ...] with the rows of all processes, from those of this one's devices: for what is small."""
    return tree if count() == 1 else multihost_utils.process_allgather(tree, tiled=True)


def allgather(value: T) -> list[T]:
    """What each process has in the place of `value`, in all of them.

    Only JSON goes from one to another, since a stranger may have joined them: of several processes the values have
    lists in place of tuples and of arrays, and texts as keys and in place of paths.
    """
    if count() == 1:
        return [value]
    return [_decoded(row) for row in multihost_utils.process_allgather(_padded(_json(value)))]


def max_over_processes(number: int) -> int:
    """The largest of the numbers that the processes have."""
    return number if count() == 1 else int(np.max(multihost_utils.process_allgather(np.int32(number))))


def on_first(function: Callable[..., T], *args: Any) -> T:
    """What the function returns in the first process, where alone it is called; in all processes.

    Of several it is what JSON makes of it, as in `allgather`. Raises what it raises, in the others UsageError or
    TrainingError with the same text.
    """
    if count() == 1:
        return function(*args)
    if not is_first():
        result, usage, failure = _broadcast("")
        if failure is not None:
            raise (UsageError if usage else TrainingError)(failure)
        return result
    try:
        text = _json((function(*args), False, None))
    except Exception as error:
        _broadcast(_json((None, isinstance(error, UsageError), str(error))))
        raise
    return _broadcast(text)[0]


def check_equal(what: str, value: str, error: type[Exception] = TrainingError) -> None:
    """Raise `error` where the processes have different values; `what` says of what."""
    theirs = allgather(value)
    if differing := [str(i) for i, other in enumerate(theirs) if other != theirs[0]]:
        raise error(f"{what} of process {', '.join(differing)} is not that of process 0")


def _broadcast(text: str) -> Any:
    """What the first process's `text` says, which is JSON; in all."""
    return _decoded(multihost_utils.broadcast_one_to_all(_padded(text)))


def _json(value: Any) -> str:
    return json.dumps(value, default=lambda x: str(x) if isinstance(x, Path) else x.tolist())


def _padded(text: str) -> np.ndarray:
    """The text with spaces behind it, as long in all processes: a power of two, since each length is compiled for."""
    size = 1 << max_over_processes(len(text)).bit_length()
    return np.frombuffer(text.ljust(size).encode(), np.uint8)


def _decoded(row: np.ndarray) -> Any:
    """What another process has said. Raises TrainingError where that is no JSON."""
    try:
        return json.loads(row.tobytes())
    except (ValueError, RecursionError) as error:
        raise TrainingError(f"another process has sent what is no JSON ({error})") from error


def _ended(error: Exception) -> ProcessEnded:
    """Why this process ends, in one sentence."""
    first = jax.process_index() == 0
    this, grace = f"process {jax.process_index()} of {count()}", GRACE if first else 0.0
    text = str(error) or type(error).__name__
    if lost := has_lost(error):
        return ProcessEnded(f"{this} has lost another one ({lost[:120]}); saved checkpoints are intact", 1, 0.0)
    if isinstance(error, UsageError | TrainingError):
        return ProcessEnded(text if first else f"{this}: {text}", 2 if isinstance(error, UsageError) else 1, grace)
    return ProcessEnded(f"{this}: {text.splitlines()[0]}", 1, grace)


def _meet(args: ProcessArgs) -> None:
    """Start JAX's runtime for several processes."""
    if args.process_id == 0:
        _check_port(args)
    times = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": EXIT_TIMEOUT}
    if args.coordinator and not args.quiet:
        where = f"{args.num_processes} processes at {args.coordinator}, for {START} s at most"
        print(f"process {args.process_id} is meeting {where} ...", file=sys.stderr, flush=True)
    # Between CPUs nothing but this keeps the collectives of two programs in one order, the same in all processes.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with suppress(AttributeError):  # in versions that have it always
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, and tell nobody
    try:
        with _ending_at_once():
            jax.distributed.initialize(**args.process, **times, initialization_timeout=START)
    except (ValueError, RuntimeError) as error:
        raise UsageError(_reason(args, error)) from error


def _check_port(args: ProcessArgs) -> None:
    """Raise UsageError where another program listens there: JAX would let a run's processes meet another run's, or die.

    What is no matter of the port is left to JAX.
    """
    how = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    try:
        socket.create_server(("", int(args.coordinator.rpartition(":")[2])), **how).close()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            text = f"process 0 cannot listen at {args.coordinator} ({os.strerror(error.errno)}): name another port"
            raise UsageError(text) from error


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process even while no Python runs; in another thread that is the caller's business.

    After it SIGTERM does what it did before, whatever JAX has made of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # it was not set from Python
                signal.signal(number, handler)


def _reason(args: ProcessArgs, error: Exception) -> str:
    """Why processes do not come together, in one sentence."""
    text = re.sub(r"\s+", " ", str(error))
    if "must be called before" in text:
        return "JAX has started already in this process: --distributed has to come before anything on a device"
    if "should be defined" in text or "must be defined" in text:
        systems = "no Slurm, Open MPI, Kubernetes or TPU pod here"
        return f"--distributed finds {systems}: name --distributed HOST:PORT,ID/COUNT"
    if not args.coordinator:
        return f"this process could not meet the others: {text[:200]}"
    process = f"process {args.process_id} of {args.num_processes}"
    return f"{process} could not meet the others at {args.coordinator}: {text[:200]}"
