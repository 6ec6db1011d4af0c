"""Files of algorithms that the user has run, of which a run directory may name one.

A run directory is data, perhaps a stranger's, and does not decide which code is imported. Where it
names a file outside of `algos/`, such as a fork beside a paper, that file is imported only if the
user has trained with it on this machine.
"""

import json
from contextlib import suppress
from pathlib import Path

from pmaprl.cli.files import ALGOS, in_one_step
from pmaprl.device.programs import cache_directory

NAME = "scripts.json"  # in the cache; without it, such files have to be named again
MOST = 1_000  # files, of which the oldest are forgotten


def remember(script: Path) -> None:
    """Note that the user runs this file; nothing happens where the cache cannot be written."""
    path = script.resolve()
    if path.parent == ALGOS:
        return
    others = [other for other in _known() if other != str(path)]
    with suppress(OSError):
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        with in_one_step(folder / NAME) as temporary:
            temporary.write_text(json.dumps([*others, str(path)][-MOST:]))


def may_be_imported(path: Path) -> bool:
    """Tell if a run directory may name this file, a resolved path: one of the kit, or one that the
    user has run.
    """
    return path.suffix == ".py" and (path.parent == ALGOS or str(path) in _known())


def _known() -> list[str]:
    try:
        found = json.loads((cache_directory() / NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    return [path for path in found if isinstance(path, str)] if isinstance(found, list) else []
