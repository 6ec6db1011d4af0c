"""Files of algorithms that the user has run, which run directories may name.

A run directory is data, perhaps a stranger's, and does not decide which code is imported. If it
names a file outside of `algos/`, such as a fork beside a paper, that file is imported only if the
user has trained with it, as it is now, on this machine.
"""

import json
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from pmaprl.cli.files import ALGOS, in_one_step
from pmaprl.device.programs import cache_directory

NAME = "scripts.json"  # in the cache; without it, such files have to be named again
MOST = 1_000  # contents of files, of which the oldest are forgotten


def remember(script: Path) -> None:
    """Note that the user runs this file as it is, where the cache can be written."""
    path = script.resolve()
    if path.parent == ALGOS:
        return
    entry = [str(path), _digest(path)]
    older = [other for other in _known() if other != entry]
    with suppress(OSError):
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        with in_one_step(folder / NAME) as temporary:
            temporary.write_text(json.dumps([*older, entry][-MOST:]))


def may_be_imported(path: Path) -> bool:
    """Tell if a run directory may name a file: one of the kit, or one that the user has run.

    A file that has changed since it was run does not count. A file that was never run is not even
    read: a stranger may name an endless one.

    Args:
        path: resolved path.
    """
    if path.suffix != ".py":
        return False
    if path.parent == ALGOS:
        return True
    digests = [digest for known, digest in _known() if known == str(path)]
    return bool(digests) and path.is_file() and _digest(path) in digests


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _known() -> list[list[str]]:
    """Paths and digests of files that were run, the newest last."""
    try:
        stored = json.loads((cache_directory() / NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(stored, list):
        return []
    return [entry for entry in stored if isinstance(entry, list) and len(entry) == 2]
