"""Checkpoints of a whole run with orbax: plain arrays under names such as
`learner/params/actor/params/Dense_0/kernel`.

There is one folder per step. A checkpoint holds data only: no pickled objects, no code. Arrays are
global, so it loads on any number of devices and processes; of several each writes and reads the
rows of its own environments.
"""

import errno
import functools
import hashlib
import logging
import math
import os
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.files import write_json
from pmaprl.cli.stored import SMALL, entries_of, read_json, refuse_link, size_of_tree
from pmaprl.device import multihost
from pmaprl.device.sharding import Arrays
from pmaprl.envs.suite_tools import reason

ROWS = "actors"  # the part of arrays [S, N, ...] of environments; a process has its own N
CHECKSUM = "sha256/"  # what the names of checksums begin with
ADDED = "/count_high", "/mean_rest", "/m2_rest"
"""Ends of the names of arrays that older versions did not save; they begin with zeros."""
FOLDER = "checkpoints"  # in the directory of a run
DELETED = ".deleted"  # what the name of a checkpoint ends with while it is being deleted
DAMAGED = ".damaged"  # once it was found not to load: it does not count any more
UNFINISHED = ".orbax-checkpoint-tmp"  # while it is being written, as orbax has it
METADATA = "_CHECKPOINT_METADATA"  # orbax's file in the folder of a checkpoint, with its evaluation
EVALUATION = "metrics/metrics"  # likewise of an evaluation that came later, which counts
PATIENCE = 10  # seconds for a save that other processes may not go on with
KNOWN_FAILURES = (
    "No space left on device|File too large|Disk quota exceeded|Read-only file "
    "system|Permission denied"
)
# Of files that are not what they were
DAMAGE_ERRNOS = None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL


def part_of(name: str) -> str:
    """The part of a state that an array belongs to, or that it is a checksum of: `learner`,
    `actors` or `run`.
    """
    return name.removeprefix(CHECKSUM).split("/")[0]


def sha256(arrays: Arrays) -> str:
    """Checksum over names, types, shapes and every byte."""
    return _digest_rows({name: array[None] for name, array in arrays.items()}).tobytes().hex()


def checksums(arrays: Arrays) -> Arrays:
    """Checksums of the parts of a state: `sha256/learner` [1, 32] and so on, `sha256/actors` [1, N,
    32].

    The latter has one of each environment, so that every process can check its own, however many
    processes have saved.
    """
    rows = defaultdict(dict)  # [N, ...] by part; the other parts are one row each
    for name, x in arrays.items():
        rows[part_of(name)][name] = np.moveaxis(x, 1, 0) if part_of(name) == ROWS else x[None]
    digests = {part: _digest_rows(of_part) for part, of_part in rows.items()}
    return {
        f"{CHECKSUM}{part}": digest[None] if part == ROWS else digest
        for part, digest in digests.items()
    }


def _digest_rows(arrays: Arrays) -> np.ndarray:
    """SHA-256 [N, 32] of each row of arrays [N, ...]: over names, types, shapes and every byte."""
    kinds = hashlib.sha256()
    for name in sorted(arrays):
        kinds.update(f"{name} {arrays[name].dtype} {arrays[name].shape[1:]}\n".encode())
    digests = [kinds.copy() for _ in next(iter(arrays.values()))]
    for name in sorted(arrays):
        rows = np.ascontiguousarray(arrays[name])
        for digest, row in zip(digests, rows.reshape(len(rows), -1).view(np.uint8), strict=True):
            digest.update(row)
    return np.stack([np.frombuffer(digest.digest(), np.uint8) for digest in digests])


class Mismatch(UsageError):
    """Stored arrays are not those that are wanted."""


def overall(returns: Sequence[float], is_population: bool = False) -> float:
    """One number of returns [S]: the mean of seeds; of a population the best finite one. -inf
    without any.
    """
    if is_population:
        return max(filter(np.isfinite, returns), default=-np.inf)
    return float(np.mean(returns)) if len(returns) else -np.inf


class Damaged(Exception):
    """A checkpoint that does not load, whoever reads it."""

    def __init__(self, step: int, error: Exception):
        self.step = step
        super().__init__(f"checkpoint {step} is damaged and was skipped ({reason(error)})")


def step_of(name: str) -> int | None:
    """The step of the checkpoint whose folder has this `name`; None where one is unfinished or does
    not count.
    """
    return int(name) if re.fullmatch("0|[1-9][0-9]*", name) else None


def is_checkpoint(name: str) -> bool:
    """Whether a folder with this `name` is a checkpoint, was one, or was to become one."""
    return (
        re.fullmatch(rf"(0|[1-9][0-9]*)(({DELETED}|{DAMAGED}|{UNFINISHED}).*)?", name) is not None
    )


class Checkpoints:
    """The `checkpoints/` folder of a run; saving is asynchronous, one save at a time."""

    def __init__(
        self,
        directory: Path | None,
        keep: int = 0,
        keep_best: bool = False,
        is_population: bool = False,
    ):
        """Keep the newest `keep` checkpoints (0 = all) and, with `keep_best`, the one with the best
        evaluation.

        Nothing in `directory` is touched before the first `save` or `wait`: another process may be
        writing there.
        """
        self.directory = directory
        self._keep = keep
        self._keep_best = keep_best
        self._is_population = is_population
        # Steps whose evaluation is under way, one of which may be the best
        self.under_evaluation: Iterable[int] = ()
        # The step whose save is under way, and a handle with its `result`
        self._saving: tuple[int, Any] | None = None

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first; also damaged ones that no resume has set
        aside.
        """
        return sorted(step for path in self._folders() if (step := step_of(path.name)) is not None)

    def path(self, step: int) -> Path:
        """The folder of a checkpoint, whether it is there or not."""
        return self.directory / str(step)

    def _folders(self) -> list[Path]:
        return entries_of(self.directory) if self.directory else []

    def evaluations(self) -> dict[int, list[float]]:
        """The mean greedy return of each seed, by the step of every checkpoint that was
        evaluated.
        """
        return {
            step: returns for step in self.steps() if (returns := _stored_returns(self.path(step)))
        }

    def by_return(self, agent: int | None = None) -> list[int]:
        """Steps of checkpoints with a finite return, the best one last, of equal ones the newest:
        for the `agent` at this place, or for all together.
        """
        known = {step: x for step, x in self.evaluations().items() if len(x) > (agent or 0)}
        returns = {
            step: overall(x, self._is_population) if agent is None else x[agent]
            for step, x in known.items()
        }
        return sorted(
            filter(lambda step: np.isfinite(returns[step]), returns),
            key=lambda step: (returns[step], step),
        )

    def best(self) -> tuple[int, list[float]]:
        """The step of the best evaluation stored with a checkpoint, and the return of each agent;
        (0, []) without.
        """
        best = self.by_return()[-1:]
        return (best[0], self.evaluations()[best[0]]) if best else (0, [])

    def load(
        self,
        like: Arrays,
        only: tuple[str, ...] = ("",),
        optional: tuple[str, ...] = (),
        candidates: Callable[[], list[int]] | None = None,
    ) -> tuple[int, Arrays, list[Damaged]]:
        """The last of the `candidates`, which are all steps if not given, that loads, and what does
        not.

        Returns (step, arrays, damaged ones). `candidates` is asked again after each that does not
        load, because a run that goes on deletes some and saves others. The rest is as in `read`.
        Raises UsageError where none loads.
        """
        damaged = []
        tried = set()
        while left := [
            step for step in multihost.on_first(candidates or self.steps) if step not in tried
        ]:
            step = left[-1]
            tried.add(step)
            try:
                return (
                    step,
                    multihost.all_or_none(read, self.path(step), like, only, optional),
                    damaged,
                )
            except Damaged as error:
                found = error
            except multihost.FailedElsewhere as error:
                if error.kind != Damaged.__name__:
                    raise
                found = Damaged(step, error)
            # Else the run that goes on has deleted it
            if multihost.on_first(self.path(step).exists):
                damaged.append(found)
        others = ", ".join(str(step) for step in self.steps() if step not in tried) or "none"
        raise UsageError(
            "; ".join(
                [*map(str, damaged), f"checkpoints in {self.directory} that may load: {others}"]
            )
        )

    def save(
        self, step: int, arrays: Arrays | Callable[[], Arrays], returns: list[float] | None
    ) -> None:
        """Start saving `arrays`, or what that gives, with the evaluation of each seed if there is
        one.

        Waits for the previous save; all the rest happens in the background, where this process is
        alone. Of several all
        save: each writes its own rows, and the first what all have too.
        """
        if self.directory is None:
            return
        self.wait()
        refuse_link(self.directory)  # it may have become one since the run began
        write = partial(self._write, step, arrays, returns)
        if multihost.count() > 1:
            try:
                self._saving = step, write()
            except Exception as error:
                raise self._failure(step, error) from error
            return
        background = ThreadPoolExecutor(1)
        self._saving = step, background.submit(lambda: write().result())
        background.shutdown(wait=False)

    def _write(
        self, step: int, arrays: Arrays | Callable[[], Arrays], returns: list[float] | None
    ) -> Any:
        """Start to write to the disk; returns orbax's handle of that."""
        from orbax.checkpoint import v1 as ocp

        arrays = arrays() if callable(arrays) else arrays
        # Orbax refuses empty ones
        stored = {name: array for name, array in arrays.items() if array.size}
        stored |= checksums(stored)
        if multihost.count() > 1:
            rows = {name: x for name, x in stored.items() if part_of(name) == ROWS}
            stored |= {
                name: jax.make_array_from_process_local_data(_over_processes(), x)
                for name, x in rows.items()
            }
        _hide_noise()
        # Where a folder could not be made in the background, threads would wait for it until a
        # timeout of minutes.
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        evaluation = {"returns": returns} if returns else None
        path = self.path(step).absolute()
        with ocp.Context(async_options=at_once):
            return ocp.save_async(path, stored, overwrite=True, custom_metadata=evaluation)

    def check_files(self) -> None:
        """Raise UsageError where a checkpoint here, or what is left of one, has links in it or
        leads elsewhere.
        """
        for path in self._folders():
            if is_checkpoint(path.name):
                size_of_tree(path, LARGEST_FILE)

    def add_evaluation(self, step: int, returns: list[float]) -> None:
        """Store the evaluation of a checkpoint, if that is still there."""

        def store() -> None:
            if step in self.steps():
                file = self.path(step) / EVALUATION
                file.parent.mkdir(exist_ok=True)
                write_json(file, {"returns": returns})

        self.wait()  # the checkpoint's save may be under way, and so may be its deletion
        multihost.on_first(store)

    def set_aside(self, damaged: Damaged) -> str:
        """Take a checkpoint out of all that follows: it gets another name. Returns what there is to
        say of that.
        """

        def rename() -> str:
            path = self.path(damaged.step)
            shutil.rmtree(path.with_suffix(DAMAGED), ignore_errors=True)
            try:
                return f"{damaged}; it is {path.rename(path.with_suffix(DAMAGED)).name} now"
            except OSError as error:
                return f"{damaged}; it could not be renamed ({error.strerror})"

        return multihost.on_first(rename)

    def wait(self) -> None:
        """Until the save under way is on disk, and old ones are gone. Raises TrainingError where it
        fails.
        """
        if self._saving:
            (step, saving), self._saving = self._saving, None
            try:
                multihost.in_background(saving.result)
            except Exception as error:
                raise self._failure(step, error) from error
        multihost.on_first(self._delete_old)

    def let_finish(self) -> None:
        """As `wait`, for a process that fails, perhaps alone: it asks no other one, and gives up
        after some seconds.
        """
        if multihost.count() == 1:
            self.wait()
        elif self._saving:
            self._saving[1].result(timeout=PATIENCE)

    def delete_leftovers(self, step: str = "[0-9]+") -> None:
        """Delete what a crash, or a failed save, has left of the checkpoint of a `step`, or of
        any.
        """
        for path in self._folders() if multihost.is_first() else ():
            if re.match(f"{step}({DELETED}|{UNFINISHED})", path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _delete_old(self) -> None:
        """Keep the newest by step, not by the time of saving (0: all), and the best by the
        evaluations on disk.
        """
        steps = self.steps()
        best = [*self.by_return()[-1:], *self.under_evaluation] if self._keep_best else []
        for step in set(steps).difference(steps[-self._keep :], best):
            path = self.path(step)
            with suppress(OSError):  # renamed first: half of a checkpoint must not look like one
                shutil.rmtree(path.rename(path.with_suffix(DELETED)))

    def _failure(self, step: int, error: Exception) -> TrainingError:
        """The reason in words; what there is of the checkpoint is deleted, for the disk may be
        full.
        """
        time.sleep(0.2)  # threads may be writing other arrays yet
        self.delete_leftovers(str(step))
        known = re.search(KNOWN_FAILURES, str(error))
        kept = ", ".join(str(kept) for kept in self.steps() if kept != step) or "none"
        why = known.group() if known else reason(error)
        return TrainingError(
            f"checkpoint {step} could not be saved ({why}); older checkpoints are intact: {kept}"
        )


def read(
    path: Path,
    like: Arrays | None = None,
    only: tuple[str, ...] = ("",),
    optional: tuple[str, ...] = (),
) -> Arrays:
    """The arrays of the checkpoint at `path` whose names begin as one of `only`; of environments
    this process's own.

    With `like`, nothing is read before their names, shapes and types are known to be those of
    `like`, of which arrays whose names begin as one of `optional` may be missing. Raises Mismatch
    where they are others, Damaged where the checkpoint does not load, and TrainingError where the
    disk or the memory is in the way.
    """
    from orbax.checkpoint import v1 as ocp

    _hide_noise()
    parts = {part_of(name) for name in only}
    empty = {name: x for name, x in (like or {}).items() if not x.size}
    partly = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
    this = jax.process_index()
    # Each process reads for itself, and waits for no other
    alone = ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes={this}, barrier_sync_key_prefix=f"process{this}"
    )
    try:
        size = _size_on_disk(path)
        with ocp.Context(pytree_options=partly, multiprocessing_options=alone):
            stored = ocp.metadata(path.absolute()).metadata
            _check_names(stored)
            stored = {
                name: x for name, x in stored.items() if parts == {""} or part_of(name) in parts
            }
            if like:
                there = {name: x for name, x in stored.items() if name.startswith(only)}
                _check_fit(
                    there, {name: x for name, x in like.items() if x.size}, optional, str(path)
                )
            _check_sizes(stored, like, size)
            loaded = ocp.load(
                path.absolute(), {name: _as_read(name, x) for name, x in stored.items()}
            )
        own = {
            name: x.addressable_data(0) if isinstance(x, jax.Array) else x
            for name, x in loaded.items()
        }
        arrays = {name: np.asarray(x) for name, x in own.items()}
        saved = {name: arrays.pop(name) for name in loaded if name.startswith(CHECKSUM)}
        if not jax.tree.all(jax.tree.map(np.array_equal, checksums(arrays), saved)):
            raise ValueError("its content is not what was saved")
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno not in DAMAGE_ERRNOS
        ):
            raise TrainingError(
                f"checkpoint {path.name} cannot be read ({reason(error)})"
            ) from error
        raise Damaged(int(path.name), error) from error
    wanted = {name: x for name, x in (like or {}).items() if name.startswith(only)}
    added = {name: np.zeros_like(x) for name, x in wanted.items() if name.endswith(ADDED)}
    # Orbax saves no empty ones
    return empty | added | {name: x for name, x in arrays.items() if name.startswith(only)}


LARGEST_FILE = 2**44  # bytes of a file of a checkpoint, which may be a replay buffer
SLACK = 2**26  # bytes that a checkpoint may have beside its arrays
# Times as large as what is wanted may be what is read beside it, such as the state of an optimiser
OTHERS = 16


def _size_on_disk(path: Path) -> int:
    """The bytes of a checkpoint's files, in all.

    Raises UsageError where one is a link or the like, and ValueError where one of those with
    orbax's descriptions, which are read as a whole, is too large.
    """
    size = size_of_tree(path, LARGEST_FILE)
    descriptions = [
        *path.glob("*"),
        *path.glob("*/*"),
        *path.glob("*/ocdbt.process_*/*"),
        *path.glob("*/*metadata*/*"),
    ]
    for file in descriptions:
        if file.is_file() and file.stat().st_size > SMALL:
            raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes")
    return size


def _check_names(stored: dict[str, Any]) -> None:
    """Raise ValueError where a name of a stored array is none that `flatten` gives: orbax makes
    paths of some.
    """
    for name in stored:
        if (
            not isinstance(name, str)
            or name.startswith("/")
            or ".." in name
            or not name.isprintable()
        ):
            raise ValueError(f"{name!r} is no name of an array")


def _check_sizes(stored: dict[str, Any], like: Arrays | None, size_on_disk: int) -> None:
    """Raise ValueError where arrays that `_check_fit` has not compared claim more memory than such
    arrays take.

    Args:
      stored: orbax's metadata of all arrays that are to be read.
      like: arrays that are wanted, all of which are known to fit; None where nothing is known.
      size_on_disk: bytes of the checkpoint's files, which are hardly compressed.
    """
    envs = [
        x.shape[1]
        for name, x in stored.items()
        if part_of(name) == ROWS and not name.startswith(CHECKSUM)
    ]
    for name, x in stored.items():
        if name.startswith(CHECKSUM):
            wanted = (1, envs[0], 32) if part_of(name) == ROWS and envs else (1, 32)
            if (tuple(x.shape), str(x.dtype)) != (wanted, "uint8"):
                raise ValueError(f"{name} is {x.dtype}{list(x.shape)} and not uint8{list(wanted)}")
        chunk = getattr(x.storage_metadata, "chunk_shape", None) or x.shape
        if math.prod(chunk) > 2 * max(math.prod(x.shape), 1):
            raise ValueError(f"{name} has chunks of {list(chunk)}")
    known = sum(x.nbytes for x in like.values()) if like else size_on_disk
    unknown = [x for name, x in stored.items() if name not in (like or {})]
    claimed = sum(math.prod(x.shape) * x.dtype.itemsize for x in unknown)
    if claimed > OTHERS * known + SLACK:
        raise ValueError(f"it claims {claimed / 1e9:,.1f} GB of arrays that nobody has asked for")


def _check_fit(stored: dict[str, Any], like: Arrays, optional: tuple[str, ...], where: str) -> None:
    """Raise Mismatch unless names, shapes and types are those of `like`, without what is `optional`
    and not there.
    """
    there = {
        name: f"{x.dtype}{list(x.shape)}"
        for name, x in stored.items()
        if not name.startswith(CHECKSUM)
    }
    absent = tuple(part for part in optional if not any(name.startswith(part) for name in there))
    here = {
        name: f"{x.dtype}{list(_global_shape(name, x))}"
        for name, x in like.items()
        if not name.startswith(absent)
    }
    # Parameters first: their shapes say most about the flags
    for name in sorted(there.keys() | here.keys(), key=lambda name: ("/params/" not in name, name)):
        theirs = there.get(name, "missing")
        ours = here.get(name, "missing")
        if theirs == "missing" and name.endswith(ADDED):
            continue
        if theirs != ours:
            raise Mismatch(
                f"{where} does not fit these flags: {name} is {theirs} there and {ours} here"
            )


def _global_shape(name: str, x: np.ndarray) -> tuple[int, ...]:
    """The shape with the environments of all processes of the array of which this one has `x`."""
    return (
        (x.shape[0], x.shape[1] * multihost.count(), *x.shape[2:])
        if part_of(name) == ROWS
        else x.shape
    )


def _as_read(name: str, stored: Any) -> Any:
    """As what orbax is to read an array: on the host, of the environments of several processes this
    one's rows.
    """
    if multihost.count() > 1 and part_of(name) == ROWS:
        return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=_over_processes())
    return np.broadcast_to(np.zeros((), stored.dtype), stored.shape)  # takes no memory


def _over_processes() -> jax.NamedSharding:
    """The sharding of arrays [S, num_envs, ...] of which each process has its own rows; nothing is
    sent for that.

    They lie where the host can read them, on one CPU device of each process, if JAX has those.
    """
    try:
        devices = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves them out
        devices = jax.devices()
    of_each = {device.process_index: device for device in reversed(devices)}
    mesh = jax.sharding.Mesh(
        [of_each[process] for process in range(multihost.count())], ("processes",)
    )
    return jax.NamedSharding(mesh, jax.P(None, "processes"))


def _stored_returns(path: Path) -> list[float]:
    """The evaluation of the checkpoint at `path`; empty where there is none, or a damaged one."""
    is_late = os.path.lexists(path / EVALUATION)
    stored = read_json(path, EVALUATION if is_late else METADATA)
    if not is_late and isinstance(stored, dict):
        stored = stored.get("custom_metadata")
    returns = stored.get("returns") if isinstance(stored, dict) else None
    if not isinstance(returns, list) or not all(map(_is_return, returns)):
        return []
    return [float(x) for x in returns]


def _is_return(value: Any) -> bool:
    return type(value) is float or type(value) is int and abs(value) < 2**63


@functools.cache
def _hide_noise() -> None:
    """Errors of a save are raised; orbax's threads and event loops would also print them, as
    tracebacks.
    """

    def is_of_orbax(record: logging.LogRecord) -> bool:
        text = logging.Formatter().format(record)  # with the files of its traceback
        return "orbax" in text or "tensorstore" in text

    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not is_of_orbax(record))
    hook = sys.unraisablehook
    sys.unraisablehook = lambda event: (
        None if str(event.exc_value) == "Event loop is closed" else hook(event)
    )
