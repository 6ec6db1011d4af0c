"""The files of one checkpoint, written and read with orbax: arrays with checksums, and its evaluation beside them."""

import errno
import functools
import json
import logging
import math
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common.cli.errors import TrainingError, UsageError
from common.cli.files import check_file, in_one_step, read_text
from common.device import multihost
from common.device.sharding import over_processes
from common.runs.arrays import COUNTERS, ROWS, SIZE, Arrays, check_blocks, first_part, read_own_rows, sha256

DELETED = ".deleted"  # what the name of a checkpoint ends with while it is being deleted
DAMAGED = ".damaged"  # once it was found not to load: it does not count any more
UNFINISHED = ".orbax-checkpoint-tmp"  # the same while it is being written, as orbax has it
ENDINGS = DELETED, DAMAGED, UNFINISHED
CHECKSUM = "sha256"  # `sha256/learner` is that of all arrays `learner/...`, stored beside them; see `own_rows`
METRICS = "metrics/metrics"  # in the folder of a checkpoint, as orbax has it
SMALL = {COUNTERS: 32, CHECKSUM: SIZE * 2**14}  # numbers at most, in an array beside those of the state
LARGEST_METADATA = 2**22  # bytes; those of a state of a hundred arrays are 50 kB
NOISY = "orbax", "tensorstore"
OF_DAMAGE = None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL  # errors of files that are not what they were


class Damaged(Exception):
    """A checkpoint that does not load, whoever reads it."""

    def __init__(self, step: int, error: Exception):
        self.step, self.error = step, error
        super().__init__(f"checkpoint {step} is damaged and was skipped ({_reason(error)})")


class CheckpointDeleted(UsageError):
    """A checkpoint was deleted while it was read, as a run that goes on does."""


def step_of(name: str) -> int | None:
    """The step of the checkpoint whose folder has this `name`; None where one is unfinished or does not count."""
    return int(name) if re.fullmatch("0|[1-9][0-9]*", name) else None


def is_checkpoint(name: str, endings: tuple[str, ...] = ENDINGS) -> bool:
    """Whether a folder with this `name` was a checkpoint, or was to become one: a step with one of these `endings`."""
    step, dot, ending = name.partition(".")
    return step_of(step) is not None and f"{dot}{ending}".startswith(endings)


def saved_steps(directory: Path) -> list[int]:
    """The steps that have a folder in a `checkpoints/` folder, oldest first; a damaged one is included."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(step for step in map(step_of, names) if step is not None)


def make_writer(directory: Path) -> Any:
    """Orbax's writer for the checkpoints in a folder.

    All processes have one: each writes its own rows, and the first what all have too.
    """
    from orbax.checkpoint import v1 as ocp

    _hide_noise()
    inside = [*directory.iterdir()] if directory.is_dir() and multihost.is_first() else []
    for path in (path for path in inside if is_checkpoint(path.name, (DELETED, UNFINISHED))):  # a crash has left it
        shutil.rmtree(path, ignore_errors=True)
    for path in list(directory.glob(f"*/{METRICS}")):  # orbax would refuse the whole folder for one of them
        if multihost.is_first() and stored_returns(path.parents[1]) is None:
            shutil.rmtree(path.parent)
    # Where a folder could not be made in the background, threads would wait for it until a timeout of minutes.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.training.Checkpointer(
        directory.absolute(),
        context=ocp.Context(async_options=at_once),
        preservation_policy=ocp.training.preservation_policies.PreserveAll(),
        cleanup_tmp_directories=True,
    )


def rename_damaged(path: Path, damaged: Damaged) -> str:
    """Give the checkpoint at `path` another name. Returns what there is to say of that."""
    aside = path.with_suffix(DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        path.rename(aside)
    except OSError as error:
        return f"{damaged}; it could not be renamed ({error.strerror})"
    return f"{damaged}; it is {aside.name} now"


def to_save(arrays: Arrays) -> dict[str, Any]:
    """What orbax gets to save of this process's `arrays`, with checksums: it refuses empty ones.

    Of several processes each has its rows of the arrays over environments, and a checksum of those.
    """
    stored = {name: array for name, array in arrays.items() if array.size}
    parts = sorted({first_part(name) for name in stored})
    digests = {part: _digest(stored, part) for part in parts}
    if ROWS in digests and multihost.count() > 1:
        digests[ROWS] = "".join(multihost.allgather(digests[ROWS]))
        stored |= {name: over_processes(array) for name, array in stored.items() if first_part(name) == ROWS}
    checksums = {f"{CHECKSUM}/{part}": np.frombuffer(bytes.fromhex(x), np.uint8) for part, x in digests.items()}
    return stored | checksums


def read(path: Path, part: str | None = None, check: Callable[[dict[str, Any]], None] = lambda shapes: None) -> Arrays:
    """The arrays of the checkpoint at `path`, or only those of one part; a process gets its own environments' rows.

    `check` gets what has their names, shapes and types, before any is read: it may refuse what takes more memory than
    there is. Raises Damaged, or TrainingError where something else is in the way.
    """
    try:
        return _read(path, part, check)
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in OF_DAMAGE):
            raise TrainingError(f"checkpoint {path.name} cannot be read ({_reason(error)})") from error
        raise Damaged(int(path.name), error) from error


def read_together(path: Path, part: str | None, check: Callable[[dict[str, Any]], None]) -> Arrays:
    """As `read`, for all processes: what is damaged for one of them is so for all."""
    try:
        return multihost.all_or_none(read, path, part, check)
    except multihost.FailedElsewhere as failure:
        raise (Damaged(int(path.name), failure) if failure.kind == Damaged.__name__ else failure) from failure


def write_returns(path: Path, **returns: list[float]) -> None:
    """Store evaluations of the checkpoint at `path` by their names. Raises TrainingError where that fails."""
    file = path / METRICS
    try:
        file.parent.mkdir(exist_ok=True)
        with in_one_step(file) as temporary:
            temporary.write_text(json.dumps(returns))
    except OSError as error:
        raise TrainingError(f"the evaluation of checkpoint {path.name} could not be saved ({error})") from error


def stored_returns(path: Path, name: str = "returns") -> list[float] | None:
    """An evaluation of the checkpoint at `path`; None where it is not there or something else."""
    try:
        returns = json.loads(read_text(path / METRICS))[name]
        return [float(x) for x in returns] if isinstance(returns, list) and returns else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def _read(path: Path, part: str | None, check: Callable[[dict[str, Any]], None]) -> Arrays:
    """What `read` returns. Raises whatever orbax does where it is damaged."""
    from orbax.checkpoint import v1 as ocp

    _hide_noise()
    for file in filter(lambda file: not file.is_dir(), path.rglob("*")):
        check_file(file, LARGEST_METADATA if file.name == "_METADATA" else math.inf)
    with ocp.Context(multiprocessing_options=_alone()):
        stored = ocp.metadata(path.absolute()).metadata
    if part:
        stored = {name: x for name, x in stored.items() if first_part(name) == part or name == f"{CHECKSUM}/{part}"}
    if any(math.prod(x.shape) > SMALL.get(first_part(name), math.inf) for name, x in stored.items()):
        raise ValueError("its numbers beside the state are too many")
    check({name: x for name, x in stored.items() if first_part(name) != CHECKSUM})
    split = [name for name in stored if first_part(name) == ROWS and multihost.count() > 1]
    whole = {name: _on_host(x) for name, x in stored.items() if name not in split}
    partly = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
    with ocp.Context(pytree_options=partly, multiprocessing_options=_alone()):
        arrays = {name: np.asarray(array) for name, array in ocp.load(path.absolute(), whole).items()}
    checksums = {name: arrays.pop(name) for name in list(arrays) if first_part(name) == CHECKSUM}
    for part in {first_part(name) for name in arrays}:
        of_part = {name: array for name, array in arrays.items() if first_part(name) == part}
        check_blocks(of_part, checksums[f"{CHECKSUM}/{part}"])
    return arrays | (read_own_rows(path, split, checksums[f"{CHECKSUM}/{ROWS}"]) if split else {})


def _on_host(stored: Any) -> Any:
    """As which orbax is to read an array: on the host, also where several processes have saved it from theirs."""
    if not hasattr(stored, "sharding_metadata"):
        return stored
    return np.broadcast_to(np.zeros((), stored.dtype), stored.shape)  # takes no memory


def _alone() -> Any:
    """Orbax's options with which a process does not wait for the others: each reads for itself."""
    from orbax.checkpoint import v1 as ocp

    if multihost.count() == 1:
        return ocp.options.MultiprocessingOptions()
    this = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"process{this}"
    )


def _digest(arrays: Arrays, part: str) -> str:
    return sha256({name: array for name, array in arrays.items() if first_part(name) == part})


@functools.cache
def _hide_noise() -> None:
    """Errors of a save are raised; orbax's threads and event loops would also print them, as tracebacks."""
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not _is_of_orbax(record))
    hook = sys.unraisablehook
    sys.unraisablehook = lambda event: None if str(event.exc_value) == "Event loop is closed" else hook(event)


def _is_of_orbax(record: logging.LogRecord) -> bool:
    frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
    return any(name in text for text in (record.getMessage(), *(frame.filename for frame in frames)) for name in NOISY)


def _reason(error: Exception) -> str:
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return line if len(line) <= 160 else f"{line[:157]}..."
