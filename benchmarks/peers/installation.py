"""An environment of its own for each peer, in the user's cache folder: peers want other versions than the kit has."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.jobs import ends_with_us
from common.cli.errors import TrainingError
from common.cli.files import writing
from common.device.compilation import cache_directory
from common.runs.lock import locked

COMPLETE = "COMPLETE"  # a file in the environment, once everything is installed


def python_of(peer: str, packages: list[str]) -> Path:
    """The interpreter of a peer's environment, whose name has these packages and the version of Python in it."""
    digest = hashlib.sha256(" ".join([sys.version, *packages]).encode()).hexdigest()[:8]
    folder = cache_directory() / "peers" / f"{peer}-{digest}"
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(peer: str, packages: list[str]) -> None:
    """Install the packages, unless they are.

    Raises TrainingError where that fails, UsageError where another process is installing them.
    """
    python = python_of(peer, packages)
    folder = python.parents[1]
    if (folder / COMPLETE).exists():
        return
    print(f"installing {peer} into {folder}, some minutes: {' '.join(packages)}", flush=True)
    with locked(folder.with_name(f"{folder.name}-installing")):
        with writing(f"folder {folder}"):
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation left
            folder.parent.mkdir(parents=True, exist_ok=True)
        for words in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", *packages],
        ):
            if code := subprocess.run(ends_with_us(words)).returncode:
                raise TrainingError(f"{peer} is not installed: {' '.join(words[:4])} ... ended with {code}, see above")
        (folder / COMPLETE).touch()
