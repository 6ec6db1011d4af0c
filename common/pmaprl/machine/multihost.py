"""Several processes that train together, each with devices of its own, and their agreements.

All of them run the same program and come to the same calls in the same order. Anything that could
differ between them, such as a signal or the contents of a disk, is agreed on first. With one
process nothing waits.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from pmaprl.cli.errors import ProcessEnded, TrainingError, UsageError, fail, printable
from pmaprl.cli.run_flags import RunArgs
from pmaprl.machine.devices import Device
from pmaprl.machine.meeting import meet

T = TypeVar("T")

START = 300  # seconds to wait until all processes are there
# Seconds without a sign of life, after which a process counts as dead and the others end
HEARTBEAT = 60
# Seconds that a finished process waits for the first one, which draws pictures
EXIT_TIMEOUT = 3600
# Seconds that the first process lives longer than the others if all have to end: they depend on it
GRACE = 2.0
POLL_INTERVAL = 0.02  # seconds between two looks at the functions in the background
LONGEST_TEXT = 400  # characters of a reason that one process gives the others
LOST = re.compile("[A-Z_]+: .*(Gloo|gloo|NCCL|Socket closed|Connection|heartbeat)", re.DOTALL)
"""Pattern of collectives' errors after another process has left; they begin with XLA's code."""
# States of a function in the background; the largest of all processes counts
DONE, UNDER_WAY, FAILED = range(3)


class FailedElsewhere(TrainingError):
    """The failure of another process in a common step, there by an error of the type `kind`."""

    def __init__(
        self,
        process: int,
        kind: str,
        text: str,
    ):
        super().__init__(f"process {process}: {text}")
        self.kind = kind


def count() -> int:
    """Number of processes."""
    return jax.process_count()


def is_first() -> bool:
    """True for the process that prints and writes."""
    return jax.process_index() == 0


def local_devices(devices: list[Device]) -> list[Device]:
    """Select the `devices` of this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def max_over_processes(number: int) -> int:
    """Largest of the numbers that the processes have."""
    if count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def allgather(value: T) -> list[T]:
    """Gather `value` from all processes, on every process.

    Several processes exchange JSON: tuples and arrays become lists, keys and paths become texts.

    Returns:
        The values, in the order of the processes.
    """
    if count() == 1:
        return [value]
    text = json.dumps(value, default=lambda x: str(x) if isinstance(x, Path) else x.tolist())
    # A power of two, since every new length compiles a program
    size = 1 << max_over_processes(len(text)).bit_length()
    rows = multihost_utils.process_allgather(np.frombuffer(text.ljust(size).encode(), np.uint8))
    return [json.loads(row.tobytes()) for row in rows]


def all_or_none(function: Callable[..., T], *args: Any) -> T:
    """Call a function that waits for no process, and return once all processes have done so.

    Raises:
        Exception: the function has failed in this process.
        FailedElsewhere: it has failed in another one.
    """
    attempt: Future[T] = Future()
    try:
        attempt.set_result(function(*args))
    except Exception as failure:
        attempt.set_exception(failure)
    error = attempt.exception()
    kind = UsageError.__name__ if isinstance(error, UsageError) else type(error).__name__
    report = None if error is None else (kind, str(error)[:LONGEST_TEXT])
    for process, failure in enumerate(allgather(report)):
        if failure:  # all follow the first one
            if error is not None and kind == failure[0]:
                raise error
            raise FailedElsewhere(process, *failure)
    return attempt.result()


def on_first(function: Callable[..., T], *args: Any) -> T:
    """Call a function on the first process only, and return its result on all, as JSON.

    It fails as `all_or_none` does.
    """

    def results() -> list[T]:
        return [function(*args)] if is_first() else []

    (result,) = allgather(all_or_none(results))[0]
    return result


def in_background(function: Callable[[], T]) -> T:
    """Call a function that itself waits for the other processes, as `all_or_none` does.

    The function may wait for longer than the other processes live. So its thread is left behind if
    the function fails in one of them, or if one is gone.
    """
    if count() == 1:
        return function()
    thread = ThreadPoolExecutor(1)
    future = thread.submit(function)
    thread.shutdown(wait=False)

    def progress() -> int:
        if not future.done():
            return UNDER_WAY
        return FAILED if future.exception() else DONE

    while max_over_processes(progress()) == UNDER_WAY:
        time.sleep(POLL_INTERVAL)

    def results() -> list[T]:  # not done: it has failed elsewhere
        return [future.result()] if future.done() else []

    (result,) = all_or_none(results)
    return result


# ------------------------------------------------------------------------------ meeting and parting


@contextmanager
def joined(args: RunArgs, run: dict[str, Any]) -> Iterator[None]:
    """Make this process one of several, if the flags say so.

    It begins before anything else happens on a device. `run` is what all processes of this run have
    in common; a process of another run is refused.
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
    """Start JAX's runtime for several processes.

    If the flags name the address of process 0, the processes know each other first.
    """
    if not args.coordinator:
        # JAX finds the other processes
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
    """End at once if another process is gone while JAX waits for it.

    JAX would wait in vain until it aborts.
    """
    lost = (
        f"process {args.process_id} of {args.processes} has lost process {process} while they met"
    )
    os._exit(fail(f"{lost} at {args.coordinator}", 1))


def _start_runtime(where: str, **arguments: Any) -> None:
    """Initialize JAX for several processes; it finds out `arguments` that are left out.

    Raises:
        UsageError: the processes could not meet.
    """
    # Between CPUs nothing but this keeps the collectives of two programs in one order, the same in
    # all processes
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with suppress(AttributeError):  # versions without the setting always have the service
        # JAX's preemption service would take SIGTERM, and tell nobody
        jax.config.update("jax_enable_preemption_service", False)
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers[signal.SIGINT] = signal.getsignal(signal.SIGINT)
        handlers[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not come to handle it
    try:
        jax.distributed.initialize(
            **arguments,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=EXIT_TIMEOUT,
            initialization_timeout=START,
        )
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"the processes of --distributed could not meet {where} ({reason})"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def has_lost(error: BaseException | None) -> str:
    """First line of the error that says that a collective failed; empty if none does.

    It is the `error` or one of its causes.
    """
    line = ""
    while error is not None and count() > 1:
        if isinstance(error, RuntimeError | ValueError) and LOST.match(str(error)):
            line = str(error).splitlines()[0]  # the deepest cause says it best
        error = error.__cause__
    return line


def _ended(error: Exception) -> ProcessEnded:
    """Explain in one sentence why this process ends."""
    this = f"process {jax.process_index()} of {count()}"
    grace = GRACE if is_first() else 0.0
    if lost := has_lost(error):
        text = f"{this} has lost another one ({lost[:120]}); saved checkpoints are intact"
        return ProcessEnded(text, 1, 0.0)
    is_known = isinstance(error, UsageError | TrainingError)
    is_usage = isinstance(error, UsageError) or getattr(error, "kind", "") == UsageError.__name__
    text = str(error) or type(error).__name__
    if not is_known:
        text = text.splitlines()[0]
    if not (is_known and is_first()):
        text = f"{this}: {text}"
    return ProcessEnded(text, 2 if is_usage else 1, grace)
