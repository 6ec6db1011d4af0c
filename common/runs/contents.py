"""What runs write in their directories, and what may be in one that is written into again: no links, say."""

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from common.cli.config import NAME, read_config
from common.cli.errors import UsageError
from common.cli.files import final_name
from common.runs import lock
from common.runs.checkpoint_files import is_checkpoint, step_of
from common.runs.checkpoints import FOLDER

FILES = NAME, "metrics.jsonl", "curve.png", "policy.gif", "result.json", "wandb_id", "DONE"
FILES += "population.jsonl", "population.png", "elo.json", "teams.json"
EVENTS = "events.out.tfevents."  # what the names of TensorBoard's files begin with
KINDS = dict.fromkeys((*FILES, lock.NAME), "file") | {FOLDER: "folder"}


def check_contents(run_dir: Path) -> None:
    """Raise UsageError where something in there would make a run write, delete or wait elsewhere."""
    for folder, folders, files in os.walk(run_dir):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # it is gone by now
                _check(Path(folder, name), run_dir)
        if "wandb" in folders:
            folders.remove("wandb")  # it keeps links of its own there, and nothing of ours is


def delete_run(run_dir: Path) -> str:
    """Delete what a run has written there, by its name; of that `config.json` is left, for the next run to replace.

    Returns lines that say what was deleted, and what else is there and stays.
    """
    folder = run_dir / FOLDER
    inside = sorted(path.name for path in run_dir.iterdir() if path.name not in (NAME, FOLDER, lock.NAME))
    saved = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    of_run = [*filter(is_of_run, inside)]
    if "wandb" in of_run and not read_config(run_dir)["args"].get("wandb"):
        of_run.remove("wandb")
    checkpoints = [name for name in saved if step_of(name) is not None or is_checkpoint(name)]
    for path in (*(run_dir / name for name in of_run), *(folder / name for name in checkpoints)):  # DONE first
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with suppress(OSError):  # it is not there, or has something else in it
        folder.rmdir()
    names = [NAME, *of_run, *[f"{len(checkpoints)} checkpoints"] * bool(checkpoints)]
    left = [name for name in inside if name not in of_run]
    left += [f"{FOLDER}/{name}" for name in saved if name not in checkpoints]
    stays = f"\nleft     {', '.join(left)} in {run_dir}: no run has written that" if left else ""
    return f"deleted  the run in {run_dir}: {', '.join(names)}{stays}"


def is_of_run(name: str) -> bool:
    """Whether a run writes a file or folder of this name into its directory."""
    return final_name(name) in FILES or name.startswith(EVENTS) or name == "wandb"


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
