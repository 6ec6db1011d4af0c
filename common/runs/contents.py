"""What may be in a run directory that is written into again: files and folders where they belong, and no links."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from common.cli.errors import UsageError
from common.runs import lock

FILES = "config.json", "metrics.jsonl", "metrics.tmp", "curve.png", "policy.gif", "result.json", "wandb_id", "DONE"
FILES += "population.jsonl", "population.png", "elo.json", "teams.json"
KINDS = dict.fromkeys((*FILES, lock.NAME), "file") | {"checkpoints": "folder"}


def check_contents(run_dir: Path) -> None:
    """Raise UsageError where something in there would make a run write, delete or wait elsewhere."""
    for folder, folders, files in os.walk(run_dir):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # it is gone by now
                _check(Path(folder, name), run_dir)
        if "wandb" in folders:
            folders.remove("wandb")  # it keeps links of its own there, and nothing of ours is


def _check(path: Path, run_dir: Path) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise UsageError(f"{path} is a link: a run writes and deletes in its own directory only, put a copy there")
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is neither a file nor a folder: a run directory has nothing else")
    kind = "folder" if stat.S_ISDIR(mode) else "file"
    wanted = KINDS.get(str(path.relative_to(run_dir)), kind)
    if kind != wanted:
        raise UsageError(f"{path} is a {kind}, and a run has a {wanted} of this name")
