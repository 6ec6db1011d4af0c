"""Lock of a run directory, which the operating system releases when its process ends.

The file system holds it, so over NFS it keeps out other hosts too, if NFS has locks. The module
imports nothing beyond the standard library and `common/pmaprl/cli`, because peers of the benchmark
live in environments of their own.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pmaprl.cli.errors import UsageError, shortened
from pmaprl.cli.files import writing
from pmaprl.cli.stored import descriptor_of

LOCK = ".pmaprl.lock"  # file that names the process
_held: set[tuple[int, int]] = set()  # devices and inodes of the locks that this process holds


@contextmanager
def locked(run_dir: Path | None) -> Iterator[None]:
    """Keep other processes out of a run directory.

    The directory is made if it is missing, and removed again if it stays empty.

    Args:
        run_dir: the directory; None: do nothing.

    Raises:
        UsageError: another process, which the message names, uses the directory.
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
    held = _identity(os.fstat(file.fileno()))
    _held.add(held)
    try:
        yield
    finally:
        with suppress(OSError):
            _release(run_dir, new)
        _held.remove(held)
        file.close()


def _release(run_dir: Path, new: bool) -> None:
    """Remove the lock, and the directory if it is `new` and empty.

    Another run may have replaced the directory, whose lock is none of this process then.
    """
    if not is_ours(run_dir):
        return
    (run_dir / LOCK).unlink()
    if new:
        run_dir.rmdir()


def is_ours(run_dir: Path) -> bool:
    """True if this process has locked `run_dir`, and nobody has deleted or replaced it since.

    The lock is told by its inode, because a copy of the directory has the same text.
    """
    try:
        return _identity(os.lstat(run_dir / LOCK)) in _held
    except OSError:
        return False


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def check_free(run_dir: Path) -> None:
    """Raise UsageError if another process uses `run_dir`."""
    with suppress(FileNotFoundError):
        _open_locked(run_dir, os.O_RDWR).close()


def _holder() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _acquire(run_dir: Path) -> TextIO:
    """Open and lock the lock's file."""
    while True:
        file = _open_locked(run_dir, os.O_RDWR | os.O_CREAT)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(run_dir / LOCK)):
                return file
        file.close()  # the process that held it has deleted it in between


def _open_locked(run_dir: Path, flags: int) -> TextIO:
    file = os.fdopen(descriptor_of(run_dir, LOCK, flags), "r+", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            holder = shortened(file.read())
        raise UsageError(
            f"{run_dir} is in use by {holder}: wait until that ends, or end it"
        ) from None
    except OSError:
        pass  # a file system without locks
    return file
