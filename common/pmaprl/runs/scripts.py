"""Files of algorithms that the user has run, which run directories may name.

A run directory is data, perhaps a stranger's, and does not decide which code is imported. If it
names a file outside of `algos/`, such as a fork beside a paper, that file is imported only if the
user has trained with it on this machine.
"""

import json
from contextlib import suppress
from pathlib import Path

from pmaprl.cli.files import ALGOS, in_one_step
from pmaprl.device.programs import cache_directory

NAME = "scripts.json"  # file in the cache; without it, users have to name such files again
MOST = 1_000  # most files that are remembered


def remember(script: Path) -> None:
    """Note that the user runs this file; nothing happens if the cache cannot be written."""
    path = script.resolve()
    if path.parent == ALGOS:
        return
    paths = [known for known in _known() if known != str(path)]
    paths.append(str(path))
    with suppress(OSError):
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        with in_one_step(folder / NAME) as temporary:
            temporary.write_text(json.dumps(paths[-MOST:]))


def may_be_imported(path: Path) -> bool:
    """True for a file, a resolved path, that is the kit's or that the user has run."""
    if path.suffix != ".py":
        return False
    return path.parent == ALGOS or str(path) in _known()


def _known() -> list[str]:
    try:
        paths = json.loads((cache_directory() / NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(paths, list):
        return []
    return [path for path in paths if isinstance(path, str)]
