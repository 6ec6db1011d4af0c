"""Checkpoints of a whole run with orbax, one folder per step.

A checkpoint holds data only, no pickled objects and no code: plain arrays under names such as
`learner/params/actor/params/Dense_0/kernel`. Arrays are global, so it loads on any number of
devices and processes. Each of several processes writes and reads the rows of its own environments.
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
from pmaprl.device.state import Arrays
from pmaprl.envs.foreign_code import reason
from pmaprl.machine import multihost

ROWS = "actors"  # part of a state with arrays [S, N, ...]; a process has its own N environments
CHECKSUM = "sha256/"  # beginning of the names of checksums
ADDED = "/count_high", "/mean_rest", "/m2_rest"
"""Ends of the names of arrays that older versions did not save; they begin with zeros."""
FOLDER = "checkpoints"  # folder in the directory of a run
DELETED = ".deleted"  # end of a checkpoint's name while it is being deleted
DAMAGED = ".damaged"  # end of its name once it has failed to load, and does not count any more
UNFINISHED = ".orbax-checkpoint-tmp"  # orbax's end of its name while it is being written
METADATA = "_CHECKPOINT_METADATA"  # orbax's file in a checkpoint, with its evaluation
EVALUATION = "metrics/metrics"  # file of an evaluation that came later, and has priority
PATIENCE = 10  # seconds to wait for a save that other processes may have given up
KNOWN_FAILURES = (
    "No space left on device|File too large|Disk quota exceeded|Read-only file "
    "system|Permission denied"
)
# Errors of files that have changed since they were written
DAMAGE_ERRNOS = None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL


def part_of(name: str) -> str:
    """Part of a state, `learner`, `actors` or `run`, that an array or checksum belongs to."""
    return name.removeprefix(CHECKSUM).split("/")[0]


def sha256(arrays: Arrays) -> str:
    """Checksum over names, types, shapes and every byte."""
    digests = _digest_rows({name: array[None] for name, array in arrays.items()})
    return digests.tobytes().hex()


def checksums(arrays: Arrays) -> Arrays:
    """Checksums of the parts of a state.

    `sha256/actors` has one for each environment, so that every process can check its own, however
    many processes have saved.

    Returns:
        `sha256/actors` [1, N, 32], and `sha256/learner` [1, 32] and so on for the other parts.
    """
    rows = defaultdict(dict)  # arrays [N, ...] by part; parts without environments are one row
    for name, x in arrays.items():
        part = part_of(name)
        rows[part][name] = np.moveaxis(x, 1, 0) if part == ROWS else x[None]
    sums = {}
    for part, arrays_of_part in rows.items():
        digests = _digest_rows(arrays_of_part)
        sums[f"{CHECKSUM}{part}"] = digests[None] if part == ROWS else digests
    return sums


def _digest_rows(arrays: Arrays) -> np.ndarray:
    """SHA-256 [N, 32] of each row of arrays [N, ...]: over names, types, shapes and every byte."""
    kinds = hashlib.sha256()
    for name in sorted(arrays):
        kinds.update(f"{name} {arrays[name].dtype} {arrays[name].shape[1:]}\n".encode())
    digests = [kinds.copy() for _ in next(iter(arrays.values()))]
    for name in sorted(arrays):
        rows = np.ascontiguousarray(arrays[name])
        in_bytes = rows.reshape(len(rows), -1).view(np.uint8)
        for digest, row in zip(digests, in_bytes, strict=True):
            digest.update(row.data)
    return np.stack([np.frombuffer(digest.digest(), np.uint8) for digest in digests])


class Mismatch(UsageError):
    """Error of stored arrays that do not fit the flags."""


def overall(returns: Sequence[float], is_population: bool = False) -> float:
    """Reduce returns [S] to the mean of seeds, or the best finite one of a population.

    Returns:
        The number; -inf if there is none.
    """
    if is_population:
        return max(filter(np.isfinite, returns), default=-np.inf)
    return float(np.mean(returns)) if len(returns) else -np.inf


class Damaged(Exception):
    """Error of a checkpoint that does not load for anybody."""

    def __init__(self, step: int, error: Exception):
        self.step = step
        super().__init__(f"checkpoint {step} is damaged and was skipped ({reason(error)})")


def step_of(name: str) -> int | None:
    """Step of the checkpoint whose folder has this name; None if it is unfinished or damaged."""
    return int(name) if re.fullmatch("0|[1-9][0-9]*", name) else None


def is_checkpoint(name: str) -> bool:
    """True for the name of a checkpoint's folder, also while it is written or deleted."""
    pattern = rf"(0|[1-9][0-9]*)(({DELETED}|{DAMAGED}|{UNFINISHED}).*)?"
    return re.fullmatch(pattern, name) is not None


class Checkpoints:
    """The `checkpoints/` folder of a run; saving is asynchronous, one save at a time."""

    def __init__(
        self,
        directory: Path | None,
        keep: int = 0,
        keep_best: bool = False,
        is_population: bool = False,
    ):
        """Prepare a folder, without touching it before the first `save` or `wait`.

        Until then another process may be writing there.

        Args:
            directory: the folder; None: save nothing.
            keep: number of newest checkpoints to keep; 0: all.
            keep_best: keep the checkpoint with the best evaluation too.
            is_population: the agents are members, not seeds.
        """
        self.directory = directory
        self._keep = keep
        self._keep_best = keep_best
        self._is_population = is_population
        # Steps whose evaluation is under way, one of which may be the best
        self.under_evaluation: Iterable[int] = ()
        # Step whose save is under way, and a handle with its `result`
        self._saving: tuple[int, Any] | None = None

    def steps(self) -> list[int]:
        """Steps that have a folder, oldest first; damaged ones too, until a resume renames them."""
        steps = [step_of(path.name) for path in self._folders()]
        return sorted(step for step in steps if step is not None)

    def path(self, step: int) -> Path:
        """The folder of a checkpoint, which need not exist."""
        assert self.directory, "only a run with a directory has checkpoints"
        return self.directory / str(step)

    def _folders(self) -> list[Path]:
        return entries_of(self.directory) if self.directory else []

    def evaluations(self) -> dict[int, list[float]]:
        """The mean greedy return of each seed, by step of the checkpoints that were evaluated."""
        returns = {step: _stored_returns(self.path(step)) for step in self.steps()}
        return {step: numbers for step, numbers in returns.items() if numbers}

    def by_return(self, agent: int | None = None) -> list[int]:
        """Sort the steps of evaluated checkpoints by return, the best last, and the newer of two.

        Args:
            agent: index of an agent; None: compare all agents together.

        Returns:
            The steps with a finite return.
        """
        ranks = []
        for step, returns in self.evaluations().items():
            if agent is None:
                number = overall(returns, self._is_population)
            else:
                number = returns[agent] if agent < len(returns) else -np.inf
            if np.isfinite(number):
                ranks.append((number, step))
        return [step for _, step in sorted(ranks)]

    def best(self) -> tuple[int, list[float]]:
        """Find the best evaluation that is stored with a checkpoint.

        Returns:
            Its step, and the return of each agent; (0, []) if there is none.
        """
        steps = self.by_return()
        if not steps:
            return 0, []
        return steps[-1], self.evaluations()[steps[-1]]

    def load(
        self,
        like: Arrays,
        only: tuple[str, ...] = ("",),
        optional: tuple[str, ...] = (),
        candidates: Callable[[], list[int]] | None = None,
    ) -> tuple[int, Arrays, list[Damaged]]:
        """Load the last candidate that loads.

        Args:
            like: see `read`.
            only: see `read`.
            optional: see `read`.
            candidates: returns steps, the preferred one last; None: all steps. It is called again
                after each step that does not load, because a run that goes on deletes some
                checkpoints and saves others.

        Returns:
            The step, its arrays, and the damaged checkpoints.

        Raises:
            UsageError: none loads.
        """
        damaged = []
        tried = set()
        while True:
            steps = multihost.on_first(candidates or self.steps)
            untried = [step for step in steps if step not in tried]
            if not untried:
                break
            step = untried[-1]
            tried.add(step)
            try:
                arrays = multihost.all_or_none(read, self.path(step), like, only, optional)
                return step, arrays, damaged
            except Damaged as error:
                damage = error
            except multihost.FailedElsewhere as error:
                if error.kind != Damaged.__name__:
                    raise
                damage = Damaged(step, error)
            # A run that goes on may have deleted it, which is no damage
            if multihost.on_first(self.path(step).exists):
                damaged.append(damage)
        rest = ", ".join(str(step) for step in self.steps() if step not in tried) or "none"
        hint = f"checkpoints in {self.directory} that may load: {rest}"
        raise UsageError("; ".join([*map(str, damaged), hint]))

    def save(
        self, step: int, arrays: Arrays | Callable[[], Arrays], returns: list[float] | None
    ) -> None:
        """Start to save, once the previous save has ended.

        A single process saves in the background. Several processes all save: each writes its own
        rows, and the first one also the arrays that all have.

        Args:
            step: environment steps.
            arrays: the arrays, or a function that returns them.
            returns: the evaluation of each seed, if there is one.
        """
        if self.directory is None:
            return
        self.wait()
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
        """Start to write to the disk, and return orbax's handle."""
        from orbax.checkpoint import v1 as ocp

        arrays = arrays() if callable(arrays) else arrays
        # Orbax refuses empty arrays
        stored = {name: array for name, array in arrays.items() if array.size}
        stored |= checksums(stored)
        if multihost.count() > 1:
            for name, x in stored.items():
                if part_of(name) == ROWS:
                    stored[name] = jax.make_array_from_process_local_data(_over_processes(), x)
        _hide_noise()
        # If a folder could not be made in the background, threads would wait for it for minutes
        at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        evaluation: Any = {"returns": returns} if returns else None  # JSON
        path = self.path(step)
        refuse_link(path.parent)  # it may have become one since the save began
        with ocp.Context(async_options=at_once):
            return ocp.save_async(
                str(path.absolute()), stored, overwrite=True, custom_metadata=evaluation
            )

    def check_files(self) -> None:
        """Raise UsageError if a checkpoint, or the rest of one, is a link or has links in it."""
        for path in self._folders():
            if is_checkpoint(path.name):
                size_of_tree(path, LARGEST_FILE)

    def add_evaluation(self, step: int, returns: list[float]) -> None:
        """Store the evaluation of a checkpoint, if it still exists."""

        def store() -> None:
            if step in self.steps():
                file = self.path(step) / EVALUATION
                file.parent.mkdir(exist_ok=True)
                write_json(file, {"returns": returns})

        self.wait()  # the checkpoint's save may be under way, and so may be its deletion
        multihost.on_first(store)

    def set_aside(self, damaged: Damaged) -> str:
        """Rename a damaged checkpoint, so that it does not count any more.

        Returns:
            A sentence on that.
        """

        def rename() -> str:
            path = self.path(damaged.step)
            renamed = path.with_suffix(DAMAGED)
            shutil.rmtree(renamed, ignore_errors=True)
            try:
                path.rename(renamed)
            except OSError as error:
                return f"{damaged}; it could not be renamed ({error.strerror})"
            return f"{damaged}; it is {renamed.name} now"

        return multihost.on_first(rename)

    def wait(self) -> None:
        """Wait until the save under way is on disk, and delete old checkpoints.

        Raises:
            TrainingError: the save has failed.
        """
        if self._saving:
            step, saving = self._saving
            self._saving = None
            try:
                multihost.in_background(saving.result)
            except Exception as error:
                raise self._failure(step, error) from error
        multihost.on_first(self._delete_old)

    def let_finish(self) -> None:
        """Wait in a process that fails, perhaps alone: ask no other one, and give up soon."""
        if multihost.count() == 1:
            self.wait()
        elif self._saving:
            self._saving[1].result(timeout=PATIENCE)

    def delete_leftovers(self, step: str = "[0-9]+") -> None:
        """Delete the rests that a crash, or a failed save, has left of checkpoints.

        Args:
            step: a pattern of their steps.
        """
        if not multihost.is_first():
            return
        for path in self._folders():
            if re.match(f"{step}({DELETED}|{UNFINISHED})", path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _delete_old(self) -> None:
        """Delete all but the newest checkpoints, by step, and the best, by stored evaluations."""
        steps = self.steps()
        to_keep = steps[-self._keep :]  # all for 0
        if self._keep_best:
            to_keep += [*self.by_return()[-1:], *self.under_evaluation]
        for step in set(steps).difference(to_keep):
            path = self.path(step)
            with suppress(OSError):
                # Renamed first, because half of a checkpoint must not look like one
                shutil.rmtree(path.rename(path.with_suffix(DELETED)))

    def _failure(self, step: int, error: Exception) -> TrainingError:
        """Describe a failed save, and delete its rests, because the disk may be full."""
        time.sleep(0.2)  # threads may still be writing other arrays
        self.delete_leftovers(str(step))
        known = re.search(KNOWN_FAILURES, str(error))
        why = known.group() if known else reason(error)
        intact = ", ".join(str(saved) for saved in self.steps() if saved != step) or "none"
        return TrainingError(
            f"checkpoint {step} could not be saved ({why}); older checkpoints are intact: {intact}"
        )


def read(
    path: Path,
    like: Arrays | None = None,
    only: tuple[str, ...] = ("",),
    optional: tuple[str, ...] = (),
) -> Arrays:
    """Read a checkpoint.

    Args:
        path: its folder.
        like: arrays with the names, shapes and types that the flags lead to. Nothing is read unless
            the stored arrays have the same.
        only: beginnings of the names of arrays to return.
        optional: beginnings of the names of arrays that may be missing.

    Returns:
        The arrays, with this process's own environments.

    Raises:
        Mismatch: names, shapes or types are not those of `like`.
        Damaged: the checkpoint does not load.
        TrainingError: the disk or the memory prevents reading.
    """
    from orbax.checkpoint import v1 as ocp

    _hide_noise()
    parts = {part_of(name) for name in only}
    loading = ocp.options.PyTreeOptions.Loading(partial_load=True)
    this = jax.process_index()
    # Each process reads for itself, and waits for no other
    alone = ocp.options.MultiprocessingOptions(
        primary_host=this,
        active_processes={this},
        barrier_sync_key_prefix=f"process{this}",
    )
    context = ocp.Context(
        pytree_options=ocp.options.PyTreeOptions(loading=loading),
        multiprocessing_options=alone,
    )
    try:
        size = _size_on_disk(path)
        with context:
            stored = ocp.metadata(str(path.absolute())).metadata
            _check_names(stored)
            if parts != {""}:
                stored = {name: x for name, x in stored.items() if part_of(name) in parts}
            if like:
                returned = {name: x for name, x in stored.items() if name.startswith(only)}
                expected = {name: x for name, x in like.items() if x.size}
                _check_fit(returned, expected, optional, str(path))
            _check_sizes(stored, like, size)
            targets = {name: _restore_target(name, x) for name, x in stored.items()}
            loaded = ocp.load(str(path.absolute()), targets)
        arrays = {}
        for name, x in loaded.items():
            local = x.addressable_data(0) if isinstance(x, jax.Array) else x
            arrays[name] = np.asarray(local)
        saved = {name: arrays.pop(name) for name in loaded if name.startswith(CHECKSUM)}
        if not jax.tree.all(jax.tree.map(np.array_equal, checksums(arrays), saved)):
            raise ValueError("its content is not what was saved")
    except UsageError:
        raise
    except Exception as error:
        is_of_disk = isinstance(error, OSError) and error.errno not in DAMAGE_ERRNOS
        if is_of_disk or isinstance(error, MemoryError):
            raise TrainingError(
                f"checkpoint {path.name} cannot be read ({reason(error)})"
            ) from error
        raise Damaged(int(path.name), error) from error
    result = {}
    for name, x in (like or {}).items():
        if not x.size:  # orbax saves no empty arrays
            result[name] = x
        elif name.startswith(only) and name.endswith(ADDED):
            result[name] = np.zeros_like(x)
    return result | {name: x for name, x in arrays.items() if name.startswith(only)}


LARGEST_FILE = 2**44  # most bytes of a checkpoint's file, which may be a replay buffer
SLACK = 2**26  # bytes that a checkpoint may have beside its arrays
# Arrays that are read without being wanted, such as an optimizer's state, may be so much larger
OTHERS = 16


def _size_on_disk(path: Path) -> int:
    """Sum of the bytes of a checkpoint's files.

    Raises:
        UsageError: a file is a link or the like.
        ValueError: a file with orbax's descriptions, which are read as a whole, is too large.
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
    """Raise ValueError for names that `flatten` never gives, because orbax makes paths of them."""
    for name in stored:
        is_printable = isinstance(name, str) and name.isprintable()
        if not is_printable or name.startswith("/") or ".." in name:
            raise ValueError(f"{name!r} is no name of an array")


def _check_sizes(stored: dict[str, Any], like: Arrays | None, size_on_disk: int) -> None:
    """Raise ValueError if arrays that `_check_fit` has not compared would take too much memory.

    Args:
        stored: orbax's metadata of all arrays that are to be read.
        like: the wanted arrays, which `_check_fit` has compared; None: it has not run.
        size_on_disk: bytes of the checkpoint's files, which are hardly compressed.
    """
    num_envs = None
    for name, x in stored.items():
        if part_of(name) == ROWS and not name.startswith(CHECKSUM):
            num_envs = x.shape[1]
            break
    for name, x in stored.items():
        if name.startswith(CHECKSUM):
            has_rows = part_of(name) == ROWS and num_envs is not None
            shape = (1, num_envs, 32) if has_rows else (1, 32)
            if tuple(x.shape) != shape or str(x.dtype) != "uint8":
                raise ValueError(f"{name} is {x.dtype}{list(x.shape)} and not uint8{list(shape)}")
        chunk = getattr(x.storage_metadata, "chunk_shape", None) or x.shape
        if math.prod(chunk) > 2 * max(math.prod(x.shape), 1):
            raise ValueError(f"{name} has chunks of {list(chunk)}")
    known = sum(x.nbytes for x in like.values()) if like else size_on_disk
    unknown = [x for name, x in stored.items() if name not in (like or {})]
    claimed = sum(math.prod(x.shape) * x.dtype.itemsize for x in unknown)
    if claimed > OTHERS * known + SLACK:
        raise ValueError(f"it claims {claimed / 1e9:,.1f} GB of arrays that nobody has asked for")


def _check_fit(stored: dict[str, Any], like: Arrays, optional: tuple[str, ...], where: str) -> None:
    """Raise Mismatch unless names, shapes and types are those of `like`.

    Args:
        stored: orbax's metadata of the arrays.
        like: arrays that the flags lead to.
        optional: beginnings of the names of arrays that may be missing.
        where: name of the checkpoint in messages.
    """
    in_checkpoint = {
        name: f"{x.dtype}{list(x.shape)}"
        for name, x in stored.items()
        if not name.startswith(CHECKSUM)
    }
    absent = tuple(
        part for part in optional if not any(name.startswith(part) for name in in_checkpoint)
    )
    by_flags = {
        name: f"{x.dtype}{list(_global_shape(name, x))}"
        for name, x in like.items()
        if not name.startswith(absent)
    }
    names = in_checkpoint.keys() | by_flags.keys()
    # Parameters first, because their shapes say most about the flags
    for name in sorted(names, key=lambda name: ("/params/" not in name, name)):
        theirs = in_checkpoint.get(name, "missing")
        ours = by_flags.get(name, "missing")
        if theirs == "missing" and name.endswith(ADDED):
            continue
        if theirs != ours:
            raise Mismatch(
                f"{where} does not fit these flags: {name} is {theirs} there and {ours} here"
            )


def _global_shape(name: str, x: np.ndarray) -> tuple[int, ...]:
    """Shape of a process's array `x` with the environments of all processes."""
    if part_of(name) != ROWS:
        return x.shape
    seeds, envs, *rest = x.shape
    return seeds, envs * multihost.count(), *rest


def _restore_target(name: str, stored: Any) -> Any:
    """Restore target: host arrays; with several processes, only the local rows."""
    if multihost.count() > 1 and part_of(name) == ROWS:
        return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=_over_processes())
    return np.broadcast_to(np.zeros((), stored.dtype), stored.shape)  # takes no memory


def _over_processes() -> jax.NamedSharding:
    """Sharding of arrays [S, num_envs, ...] by rows over processes, for which nothing is sent.

    The arrays lie where the host can read them, on one CPU device of each process, if JAX has CPU
    devices.
    """
    try:
        devices = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves them out
        devices = jax.devices()
    by_process = {device.process_index: device for device in reversed(devices)}
    first_devices = [by_process[process] for process in range(multihost.count())]
    mesh = jax.sharding.Mesh(first_devices, ("processes",))
    return jax.NamedSharding(mesh, jax.P(None, "processes"))


def _stored_returns(path: Path) -> list[float]:
    """The evaluation of the checkpoint at `path`; empty if there is none, or a damaged one."""
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
    """Hide tracebacks that orbax's threads and event loops print: the errors are raised anyway."""

    def is_of_orbax(record: logging.LogRecord) -> bool:
        text = logging.Formatter().format(record)  # with the files of its traceback
        return "orbax" in text or "tensorstore" in text

    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not is_of_orbax(record))
    hook = sys.unraisablehook

    def report(event: Any) -> None:
        if str(event.exc_value) != "Event loop is closed":
            hook(event)

    sys.unraisablehook = report
