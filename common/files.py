"""Writing a file whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import UsageError


def check_target(path: Path, *endings: str) -> None:
    """Raise UsageError where no file can be at `path`: to know it before the work that it takes to fill one.

    With `endings`, its name must have one of them.
    """
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory: name a file in it")
    if not os.path.isdir(path.parent):
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")
    if endings and path.suffix not in endings:
        raise UsageError(f"{path} must end in {' or '.join(endings)}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, with the same suffix, that takes its place once it is written.

    Raises UsageError where it cannot be written.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
