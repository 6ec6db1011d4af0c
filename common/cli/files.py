"""Reading what is a file, and writing one whole or not at all."""

import errno
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.cli.errors import UsageError

LARGEST_TEXT = 2**24  # bytes of a file that is read whole; it takes a hundred times that in memory at most


def check_file(path: Path, at_most: float = math.inf) -> None:
    """Raise OSError where there is something else than a file, such as a pipe, which might never end; or a larger one.

    `at_most` is in bytes.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    if os.path.exists(path) and os.path.getsize(path) > at_most:
        raise OSError(errno.EINVAL, f"it is larger than {at_most:,} bytes", str(path))


def read_text(path: Path) -> str:
    """The text of a file. Raises OSError, also where it is too large to be meant, or UnicodeDecodeError."""
    check_file(path, LARGEST_TEXT)
    return path.read_text()


def check_target(path: Path, *endings: str) -> None:
    """Raise UsageError where no file can be at `path`: to know it before the work that it takes to fill one.

    With `endings`, its name must have one of them.
    """
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory: name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path} is not a file: it cannot be replaced by one")
    if not os.path.isdir(path.parent):
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: the folder {path.parent} is read-only")
    if endings and path.suffix not in endings:
        raise UsageError(f"{path} must end in {' or '.join(endings)}")


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Turn an OSError into a UsageError that says `what` cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} cannot be written: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, with the same suffix, that takes its place once it is written.

    A symbolic link stays one: what it leads to is replaced.

    Raises UsageError where it cannot be written.
    """
    with writing(path), in_one_step(Path(os.path.realpath(path))) as temporary:
        yield temporary


@contextmanager
def in_one_step(path: Path) -> Iterator[Path]:
    """As `replacing`, for files of a run: a reader or a crash never sees half of one.

    The file is a new one each time, so that nothing is written through a link. Raises OSError.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def final_name(name: str) -> str:
    """The name that a file of this `name` gets once it is written; the same where it is no temporary one."""
    return re.sub(r"^\.(.+)\.\d+(\.\w+|)$", r"\1\2", name)
