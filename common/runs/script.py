"""The file of the algorithm that a run was made with: which one it is, and its module."""

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from common.cli.errors import UsageError
from common.runs.directory import ROOT

ALGOS = (ROOT / "algos").resolve()


def find(config: dict[str, Any], run_dir: Path, algorithm: str | Path | None) -> Path:
    """The algorithm's file: what the caller names, else the file in `algos/` that the run says it was made with."""
    try:
        path = Path(algorithm or ROOT / str(config.get("script"))).resolve()
        is_file = path.is_file()
    except (OSError, ValueError):  # such as a name that is too long
        path, is_file = Path(), False
    if algorithm is None and (path.parent != ALGOS or path.suffix != ".py"):
        raise UsageError(
            f"{run_dir} was made by {str(config.get('script'))[:200]}, which is not a file of {ALGOS}: "
            "if you trust that code, name it, as algorithm= or --algorithm"
        )
    if not is_file:
        raise UsageError(f"the algorithm of {run_dir} is not there: {str(algorithm or path)[:200]} does not exist")
    return path


def import_file(path: Path) -> ModuleType:
    """The module of a file as it is now; the same one again, as long as the file is the same."""
    name = f"algorithm_{digest(path)[:16]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UsageError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
