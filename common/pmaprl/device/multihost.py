"""Several processes that train together, each with devices of its own: who this one is, and what
they agree on.

All of them run the same program and come to the same calls in the same order; what could differ
between them, such as a signal or what is found on a disk, is agreed on first. With one process
nothing waits.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from pmaprl.cli.errors import ProcessEnded, TrainingError, UsageError, fail, printable
from pmaprl.cli.run_flags import RunArgs
from pmaprl.device.meeting import meet

T = TypeVar("T")

START = 300  # seconds to wait until all processes are there
# Without a sign of life for as many seconds a process counts as dead, and the others end
HEARTBEAT = 60
# Seconds that a process which has finished waits for the first, which draws pictures
EXIT_TIMEOUT = 3600
# Seconds that the first one, which all depend on, leaves the others where all have to end
GRACE = 2.0
POLL_INTERVAL = 0.02  # seconds between two looks at what goes on in the background of all
LONGEST_TEXT = 400  # characters of a reason that one process gives the others
LOST = re.compile("[A-Z_]+: .*(Gloo|gloo|NCCL|Socket closed|Connection|heartbeat)", re.DOTALL)
"""What errors of collectives begin with that another process has left: XLA's code first, as few
others do.
"""
# Of what goes on in the background; the largest is what counts for all
DONE, UNDER_WAY, FAILED = range(3)


class FailedElsewhere(TrainingError):
    """What all did has failed in another process, there with an error of the type `kind`."""

    def __init__(self, process: int, kind: str, text: str):
        super().__init__(f"process {process}: {text}")
        self.kind = kind


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def own(devices: list[jax.Device]) -> list[jax.Device]:
    """Those of `devices` that are this process's."""
    return [device for device in devices if device.process_index == jax.process_index()]


def max_over_processes(number: int) -> int:
    """The largest of the numbers that the processes have."""
    return (
        number if count() == 1 else int(np.max(multihost_utils.process_allgather(np.int32(number))))
    )


def allgather(value: T) -> list[T]:
    """What each process has in the place of `value`, in all of them.

    Between several processes goes only JSON: lists in place of tuples and arrays, texts as keys and
    in place of paths.
    """
    if count() == 1:
        return [value]
    text = json.dumps(value, default=lambda x: str(x) if isinstance(x, Path) else x.tolist())
    # A power of two, since each length is compiled for
    size = 1 << max_over_processes(len(text)).bit_length()
    rows = multihost_utils.process_allgather(np.frombuffer(text.ljust(size).encode(), np.uint8))
    return [json.loads(row.tobytes()) for row in rows]


def all_or_none(function: Callable[..., T], *args: Any) -> T:
    """What the function, which waits for no process, returns here, once it has returned in all of
    them.

    Where it fails in one, all raise: that one its error, the others FailedElsewhere.
    """
    result = error = None
    try:
        result = function(*args)
    except Exception as failure:
        error = failure
    kind = UsageError.__name__ if isinstance(error, UsageError) else type(error).__name__
    failures = allgather((kind, str(error)[:LONGEST_TEXT]) if error is not None else None)
    for process, failure in enumerate(failures):
        if failure:  # all follow the first one
            raise (
                error
                if error is not None and kind == failure[0]
                else FailedElsewhere(process, *failure)
            )
    return result


def on_first(function: Callable[..., T], *args: Any) -> T:
    """In all processes what the first gets from the function, which it alone calls, as JSON. Fails
    as `all_or_none`.
    """
    return allgather(all_or_none(lambda: function(*args) if is_first() else None))[0]


def in_background(function: Callable[[], T]) -> T:
    """As `all_or_none`, for a function that itself waits for the other processes, perhaps for
    longer than they live: it is left behind in its thread where it fails in one of them, or one is
    gone.
    """
    if count() == 1:
        return function()
    thread = ThreadPoolExecutor(1)
    future = thread.submit(function)
    thread.shutdown(wait=False)

    def progress() -> int:
        return UNDER_WAY if not future.done() else FAILED if future.exception() else DONE

    while max_over_processes(progress()) == UNDER_WAY:
        time.sleep(POLL_INTERVAL)
    return all_or_none(future.result if future.done() else lambda: None)


# ------------------------------------------------------------------------------------------- how
# they meet, and part


@contextmanager
def joined(args: RunArgs, run: dict[str, Any]) -> Iterator[None]:
    """Inside, this process is one of several, if the flags say so; begins before anything else
    happens on a device.

    `run` is what all processes of this run have in common; one of another run is refused.
    """
    if args.distributed and not jax.distributed.is_initialized():
        _meet(args, run)
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        raise _ended(error) from error


def _meet(args: RunArgs, run: dict[str, Any]) -> None:
    """Start JAX's runtime for several processes; which ones is known first, where the flags say how
    they meet.
    """
    if not args.coordinator:
        # JAX finds the others
        _start_runtime("by themselves: name --distributed HOST:PORT,ID/COUNT")
        return
    where = f"at {args.coordinator}"
    if not args.quiet:
        meeting = f"process {args.process_id} is meeting {args.processes} processes {where}"
        print(f"{printable(meeting)}, for {START} s at most ...", file=sys.stderr, flush=True)
    met = meet(args.coordinator, args.process_id, args.processes, run, START)
    try:
        with met.watched(partial(_end_after_loss, args)):
            _start_runtime(
                where,
                coordinator_address=met.coordinator,
                num_processes=args.processes,
                process_id=args.process_id,
                coordinator_bind_address=met.bind_address,
            )
    except UsageError:
        met.close()
        raise


def _end_after_loss(args: RunArgs, process: int) -> NoReturn:
    """End at once where another process is gone while JAX waits for it, which it does in vain until
    it aborts.
    """
    lost = (
        f"process {args.process_id} of {args.processes} has lost process {process} while they met"
    )
    os._exit(fail(f"{lost} at {args.coordinator}", 1))


def _start_runtime(where: str, **told: Any) -> None:
    """Initialise JAX with what it is told; it finds out the rest. Raises UsageError where that
    fails.
    """
    # Between CPUs nothing but this keeps the collectives of two programs in one order, the same in
    # all processes.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with suppress(AttributeError):  # in versions that have it always
        # It would take SIGTERM, and tell nobody
        jax.config.update("jax_enable_preemption_service", False)
    times = {"heartbeat_timeout_seconds": HEARTBEAT, "shutdown_timeout_seconds": EXIT_TIMEOUT}
    in_main = threading.current_thread() is threading.main_thread()
    handlers = (
        {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if in_main
        else {}
    )
    if in_main:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not come to handle it
    try:
        jax.distributed.initialize(**told, **times, initialization_timeout=START)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"the processes of --distributed could not meet {where} ({reason})"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def has_lost(error: BaseException | None) -> str:
    """The first line of an error which says that a collective failed, be it the `error` or one
    behind it; else "".
    """
    line = ""
    while error is not None and count() > 1:
        if isinstance(error, RuntimeError | ValueError) and LOST.match(str(error)):
            line = str(error).splitlines()[0]  # the one furthest behind says it best
        error = error.__cause__
    return line


def _ended(error: Exception) -> ProcessEnded:
    """Why this process ends, in one sentence."""
    this = f"process {jax.process_index()} of {count()}"
    grace = GRACE if is_first() else 0.0
    if lost := has_lost(error):
        return ProcessEnded(
            f"{this} has lost another one ({lost[:120]}); saved checkpoints are intact", 1, 0.0
        )
    usage = isinstance(error, UsageError) or getattr(error, "kind", "") == UsageError.__name__
    known = isinstance(error, UsageError | TrainingError)
    text = str(error) or type(error).__name__
    text = text if known else text.splitlines()[0]
    return ProcessEnded(
        text if known and is_first() else f"{this}: {text}", 2 if usage else 1, grace
    )
