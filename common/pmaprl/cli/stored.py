"""Files of a run directory, which may come from a stranger: what is opened there, and JSON that is
read from there.

A file is opened where it is a regular one with a single link, has no more bytes than such a file
can have, and lies in the directory itself: no name below the directory is followed through a link.
The directory itself may be reached through links.
"""

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from pmaprl.cli.errors import UsageError

SMALL = 2**26  # bytes of a file that is read as a whole
LARGE = 2**33  # bytes of a file that is read line by line
DEEPEST = 64  # lists and objects inside each other, in JSON
MOST_FILES = 1_000_000  # below a folder
NOWHERE = FileNotFoundError, NotADirectoryError
# A pipe that nobody writes to is not waited for
ANYWHERE = getattr(os, "O_NONBLOCK", 0) | os.O_CLOEXEC


def descriptor_of(folder: Path, name: str, flags: int = os.O_RDONLY, most: int = SMALL) -> int:
    """Open the file called `name`, perhaps of several parts, in a `folder`.

    Args:
      folder: where the file has to be. The path to it may lead through links.
      name: path below `folder`.
      flags: as for `os.open`; a file that is made must not be truncated by them.
      most: bytes that the file may have.

    Returns:
      A file descriptor, which the caller closes.

    Raises:
      UsageError: it is a link, has several, is no regular file, or is too large.
      OSError: it is not there, or cannot be opened.
    """
    *parents, last = Path(name).parts
    inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for place, part in enumerate(parents):
            refuse_link(folder.joinpath(*parents[: place + 1]))
            outer = inner
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
            os.close(outer)
        _refuse_odd(folder / name)
        file = os.open(last, flags | os.O_NOFOLLOW | ANYWHERE, 0o666, dir_fd=inner)
    finally:
        os.close(inner)
    try:
        check_regular(folder / name, os.fstat(file), most)
    except BaseException:
        os.close(file)
        raise
    return file


def check_regular(path: Path, found: os.stat_result, most: int = SMALL) -> None:
    """Raise UsageError unless a file of a run is a regular one with one link and at most so many
    bytes.
    """
    copying = "copy the run by cp -rL, and name the copy"
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(
            f"{path} is a symbolic link, which is not followed in a run directory: {copying}"
        )
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is not a regular file: delete it")
    if found.st_nlink > 1:
        links = f"{path} is the same file as {found.st_nlink - 1} elsewhere (a hard link)"
        raise UsageError(f"{links}, which a run would change too: {copying}")
    if found.st_size > most:
        raise UsageError(
            f"{path} has {found.st_size:,} bytes, and at most {most:,} are read: it is damaged"
        )


@contextmanager
def opened(path: Path, most: int = LARGE) -> Iterator[TextIO]:
    """The text of the file at `path` in a run directory. Raises as `descriptor_of`."""
    file = os.fdopen(descriptor_of(path.parent, path.name, most=most), errors="replace")
    with file:
        yield file


def read_bytes(folder: Path, name: str) -> bytes:
    """The content of a small file in a run directory. Raises as `descriptor_of`."""
    with os.fdopen(descriptor_of(folder, name), "rb") as file:
        return file.read(SMALL + 1)


def read_json(folder: Path, name: str) -> Any:
    """The value in a file of JSON in a run directory.

    Returns None where there is no such file, or a damaged one: what is cut off, is not UTF-8, or
    has more than DEEPEST lists and objects inside each other. Raises UsageError where the file is
    none of a run, as `descriptor_of` does.
    """
    try:
        text = read_bytes(folder, name).decode()
        value = json.loads(text)
    except UsageError:
        raise
    except (OSError, ValueError, RecursionError):
        return None
    return value if _is_flat(value) else None


def _is_flat(value: Any) -> bool:
    """Tell if nothing in a value of JSON lies deeper than DEEPEST."""
    level = [value]
    for _ in range(DEEPEST):
        inner = [part for part in level if isinstance(part, dict | list)]
        level = [x for part in inner for x in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return True
    return False


def entries_of(folder: Path) -> list[Path]:
    """The paths in a folder of a run; none where it is not there. Raises UsageError where it is a
    link.
    """
    refuse_link(folder)
    try:
        return list(folder.iterdir())
    except NOWHERE:
        return []


def size_of_tree(folder: Path, most: int) -> int:
    """The bytes of all files below a folder of a run.

    Raises UsageError where one is none of a run, as `descriptor_of` does, has over `most` bytes, or
    is a link to another folder, and where there are too many.
    """
    refuse_link(folder)
    waiting = [folder]
    size = count = 0
    while waiting:
        with os.scandir(waiting.pop()) as iterator:
            entries = list(iterator)
        count += len(entries)
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                waiting.append(Path(entry.path))
                continue
            check_regular(Path(entry.path), found, most)
            size += found.st_size
        if count > MOST_FILES:
            raise UsageError(f"{folder} has over {MOST_FILES:,} files: it is damaged")
    return size


def _refuse_odd(path: Path) -> None:
    """Raise UsageError where a device, a pipe or a link is at `path`: to open one may do
    something.
    """
    try:
        check_regular(path, os.lstat(path), most=sys.maxsize)
    except NOWHERE:
        return


def refuse_link(folder: Path) -> None:
    if os.path.islink(folder):
        moving = "move the run as a whole, and link its directory"
        raise UsageError(
            f"{folder} is a symbolic link, which is not followed in a run directory: {moving}"
        )
