"""The files of one checkpoint, written and read with orbax: arrays with checksums, and its evaluation beside them."""

import functools
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from common.runs.arrays import Arrays, first_part, sha256

CHECKSUM = "sha256"  # `sha256/learner` is that of all arrays `learner/...`, stored beside them
METRICS = "metrics/metrics"  # in the folder of a checkpoint, as orbax has it


def make_writer(directory: Path) -> Any:
    """Orbax's writer for the checkpoints in a folder."""
    from orbax.checkpoint import v1 as ocp

    _hide_noise()
    for path in list(directory.glob(f"*/{METRICS}")):  # orbax would refuse the whole folder for one of them
        if stored_returns(path.parents[1]) is None:
            shutil.rmtree(path.parent)
    # Where a folder could not be made in the background, threads would wait for it until a timeout of minutes.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.training.Checkpointer(
        directory.absolute(),
        context=ocp.Context(async_options=at_once),
        preservation_policy=ocp.training.preservation_policies.PreserveAll(),
        cleanup_tmp_directories=True,
    )


def with_checksums(arrays: Arrays) -> Arrays:
    """What is to be saved of `arrays`: orbax refuses empty ones."""
    stored = {name: array for name, array in arrays.items() if array.size}
    for part in {first_part(name) for name in stored}:
        stored[f"{CHECKSUM}/{part}"] = np.frombuffer(bytes.fromhex(_digest(stored, part)), np.uint8)
    return stored


def read(path: Path, part: str | None = None) -> Arrays:
    """The arrays of a checkpoint, or only those of one part. Raises whatever orbax does where it is damaged."""
    from orbax.checkpoint import v1 as ocp

    _hide_noise()
    stored = ocp.metadata(path.absolute()).metadata
    if part:
        stored = {name: x for name, x in stored.items() if first_part(name) == part or name == f"{CHECKSUM}/{part}"}
    partly = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
    with ocp.Context(pytree_options=partly):
        arrays = {name: np.asarray(array) for name, array in ocp.load(path.absolute(), stored).items()}
    checksums = {name: arrays.pop(name) for name in list(arrays) if first_part(name) == CHECKSUM}
    for part in {first_part(name) for name in arrays}:
        if checksums[f"{CHECKSUM}/{part}"].tobytes().hex() != _digest(arrays, part):
            raise ValueError("its content is not what was saved")
    return arrays


def write_returns(path: Path, **returns: list[float]) -> None:
    """Store evaluations of the checkpoint at `path` by their names. Raises OSError where that fails."""
    path = path / METRICS
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(returns))
    path.with_suffix(".part").rename(path)


def stored_returns(path: Path, name: str = "returns") -> list[float] | None:
    """An evaluation of the checkpoint at `path`; None where it is not there or something else."""
    try:
        returns = json.loads((path / METRICS).read_text())[name]
        return [float(x) for x in returns] if isinstance(returns, list) and returns else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def _digest(arrays: Arrays, part: str) -> str:
    return sha256({name: array for name, array in arrays.items() if first_part(name) == part})


@functools.cache
def _hide_noise() -> None:
    """Errors of a save are raised; orbax's threads and event loops would also print them, as tracebacks."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    hook = sys.unraisablehook
    sys.unraisablehook = lambda event: None if str(event.exc_value) == "Event loop is closed" else hook(event)
