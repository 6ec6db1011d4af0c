"""What all processes do or none: where it fails in one of them, the others neither wait for it nor go on without it."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from common.cli.errors import TrainingError
from common.device.multihost import allgather, count, max_over_processes

T = TypeVar("T")

DONE, UNDER_WAY, FAILED = range(3)  # of what goes on in the background; the largest is what counts for all
POLL_INTERVAL = 0.02  # seconds between two looks at what goes on in the background of all
LONGEST_TEXT = 400  # characters of a reason that one process gives the others


class FailedElsewhere(TrainingError):
    """What all did has failed in another process, there with an error of the type `kind`."""

    def __init__(self, process: int, kind: str, text: str):
        super().__init__(f"process {process}: {text}")
        self.kind = kind


def all_or_none(function: Callable[..., T], *args: Any) -> T:
    """What the function returns here, once it has returned in all processes; it must not wait for any of them.

    Where it fails in one, all raise: that one its error, the others FailedElsewhere.
    """
    if count() == 1:
        return function(*args)
    result, error = _attempt(function, *args)
    first = _first_failure(error)
    if error or first:
        raise error or first
    return result


def in_background(function: Callable[[], T]) -> T:
    """As `all_or_none`, for a function that waits for the other processes by itself, perhaps for longer than they live.

    Where it fails in one of them, or one is gone, it is left behind in its thread.
    """
    if count() == 1:
        return function()
    thread = ThreadPoolExecutor(1)
    future = thread.submit(function)
    thread.shutdown(wait=False)
    while max_over_processes(_progress(future)) == UNDER_WAY:
        time.sleep(POLL_INTERVAL)
    return all_or_none(future.result if future.done() else lambda: None)


def _attempt(function: Callable[..., T], *args: Any) -> tuple[T | None, Exception | None]:
    """What the function returns, or raises."""
    try:
        return function(*args), None
    except Exception as error:
        return None, error


def _first_failure(error: Exception | None) -> FailedElsewhere | None:
    """That of the first process which has one; None where all are well."""
    own = (type(error).__name__, str(error)[:LONGEST_TEXT]) if error else None
    return next((FailedElsewhere(i, *failure) for i, failure in enumerate(allgather(own)) if failure), None)


def _progress(future: Future) -> int:
    if not future.done():
        return UNDER_WAY
    return FAILED if future.exception() else DONE
