"""One process at a time in a run directory: a lock that the operating system takes back from a process that ends.

It is one of the file system, so that over NFS it keeps out other hosts too, wherever that has locks at all.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import jax

from common.cli.errors import UsageError
from common.cli.files import writing
from common.device import multihost

try:
    import fcntl
except ImportError:  # a system without such locks, as some file systems are
    fcntl = None

NAME = ".pmaprl.lock"  # of the file; it says who holds it


@contextmanager
def locked(run_dir: Path | None) -> Iterator[None]:
    """Keep other processes out of `run_dir`, if there is one; it is made, and removed again where it stays empty.

    Raises UsageError, naming process and host, where another one is in there.
    """
    if run_dir is None:
        yield
        return
    with writing(f"run directory {run_dir}"):
        new = not run_dir.exists()
        run_dir.mkdir(parents=True, exist_ok=True)
        file = _acquire(run_dir)
        file.truncate()
        file.write(_holder())
        file.flush()
    try:
        yield
    finally:
        with suppress(OSError):
            if is_ours(run_dir):
                (run_dir / NAME).unlink()
                if new:
                    run_dir.rmdir()
        file.close()


def is_ours(run_dir: Path) -> bool:
    """Whether `run_dir` is still there and locked by this process, and not deleted or replaced by another run's."""
    try:
        return (run_dir / NAME).read_text(errors="replace") == _holder()
    except OSError:
        return False


def is_locked(run_dir: Path) -> bool:
    """Whether some process has locked `run_dir`, or was killed while it had."""
    return (run_dir / NAME).exists()


def check_free(run_dir: Path) -> None:
    """Raise UsageError where another process is in `run_dir`."""
    with suppress(FileNotFoundError):
        _open_locked(run_dir, os.O_RDWR).close()


def _holder() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _acquire(run_dir: Path) -> TextIO:
    """The lock's file, open and locked."""
    while True:
        file = _open_locked(run_dir, os.O_RDWR | os.O_CREAT)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(run_dir / NAME)):
                return file
        file.close()  # the one that held it has deleted it in between


def _open_locked(run_dir: Path, flags: int) -> TextIO:
    file = os.fdopen(os.open(run_dir / NAME, flags, 0o666), "r+", errors="replace")
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            holder = "".join(filter(str.isprintable, file.read(200))) or "another process"
        raise UsageError(f"{run_dir} is in use by {holder}: wait until that ends, or end it") from None
    except OSError:
        pass  # a file system without locks
    return file


SECONDS_TO_APPEAR = 10  # of a file that another host has written


def check_shared(run_dir: Path | None) -> None:
    """Raise UsageError where a process does not see the `run_dir` that the first one has locked."""
    if run_dir is None or multihost.count() == 1:
        return
    multihost.max_over_processes(0)  # the first is there
    end = time.monotonic() + SECONDS_TO_APPEAR
    while not (seen := is_locked(run_dir)) and time.monotonic() < end:
        time.sleep(0.1)
    if blind := multihost.max_over_processes(0 if seen else jax.process_index()):
        raise UsageError(f"process {blind} does not see {run_dir}: it has to be on storage that all processes share")
