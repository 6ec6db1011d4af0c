"""Checkpoints of a whole run with orbax: plain arrays under path-like names, one folder per step.

A checkpoint holds data only: no pickled objects, no code. Arrays are global, so it loads on any number of devices.
"""

import functools
import json
import logging
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.errors import TrainingError, UsageError
from common.runs.arrays import COUNTERS, Arrays, check_match, first_part, select, sha256, without

CHECKSUM = "sha256"  # `sha256/learner` is that of all arrays `learner/...`, stored beside them
DELETED = ".deleted"  # what a folder's name ends with while it is being deleted
UNFINISHED = ".orbax-checkpoint-tmp"  # the same while it is being written, as orbax has it
METRICS = "metrics/metrics"  # in the folder of a step, as orbax has it
KNOWN_FAILURES = "No space left on device|File too large|Disk quota exceeded|Read-only file system|Permission denied"


class Checkpoints:
    """The `checkpoints/` folder of a run; saving is asynchronous, one save at a time."""

    def __init__(self, directory: Path, keep: int = 0, keep_best: bool = False, read_only: bool = False):
        """Keep the newest `keep` checkpoints (0 = all) and, with `keep_best`, the one with the best evaluation.

        With `read_only` nothing in `directory` is touched: another process may be writing there.
        """
        _hide_noise()
        if read_only and not directory.is_dir():
            raise UsageError(f"there are no checkpoints: {directory} does not exist")
        self.directory = directory
        self._keep, self._keep_best = keep, keep_best
        self._writer = None if read_only else _writer(directory)
        self._saving: tuple[int, Any] | None = None  # the step whose save is under way, and orbax's handle of it

    def steps(self) -> list[int]:
        """Steps that have a folder, oldest first; a damaged one is included."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def evaluations(self) -> dict[int, list[float]]:
        """The mean greedy return of each seed, by the step of every checkpoint that was evaluated."""
        stored = {step: _stored_returns(self.directory / str(step) / METRICS) for step in self.steps()}
        return {step: returns for step, returns in stored.items() if returns}

    def best(self) -> float:
        """Best evaluation stored with a checkpoint, the mean over seeds; -inf without any."""
        return max((float(np.mean(returns)) for returns in self.evaluations().values()), default=-np.inf)

    def save(self, step: int, arrays: Arrays, returns: list[float] | None) -> None:
        """Start saving, with the evaluation of each seed if there is one; waits for the previous save.

        Raises TrainingError where either fails.
        """
        metrics = None if returns is None else {"returns": returns}
        stored = {name: array for name, array in arrays.items() if array.size}  # orbax refuses empty arrays
        for part in {first_part(name) for name in stored}:
            digest = sha256({name: array for name, array in stored.items() if first_part(name) == part})
            stored[f"{CHECKSUM}/{part}"] = np.frombuffer(bytes.fromhex(digest), np.uint8)
        self.wait()  # orbax would delete a checkpoint to overwrite before it waits for its being written
        try:
            again = step in self.steps()
            self._saving = step, self._writer.save_async(step, stored, force=True, overwrite=again, metrics=metrics)
        except Exception as error:
            raise self._failure(step, error) from error

    def add_evaluation(self, step: int, returns: list[float]) -> bool:
        """Store the evaluation of a checkpoint that was saved without one; returns whether there is such a checkpoint.

        Raises TrainingError where storing fails.
        """
        self.wait()  # the checkpoint's save may be under way, and so may be its deletion
        if step not in self.steps():
            return False
        path = self.directory / str(step) / METRICS
        try:
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".part").write_text(json.dumps({"returns": returns}))
            path.with_suffix(".part").rename(path)
        except OSError as error:
            raise TrainingError(f"the evaluation of checkpoint {step} could not be saved ({error})") from error
        return True

    def wait(self) -> None:
        """Until the save under way is on disk, and old ones are gone. Raises TrainingError where it fails."""
        if self._saving:
            (step, saving), self._saving = self._saving, None
            try:
                saving.result()  # ends its thread, which the writer's own `wait` leaves behind
            except Exception as error:
                raise self._failure(step, error) from error
        self._delete_old()

    def load(
        self,
        like: Arrays,
        groups: tuple[str, ...] = (),
        dispensable: tuple[str, ...] = (),
        step: int | None = None,
    ) -> tuple[int, Arrays, list[str]]:
        """The newest checkpoint that loads, as (step, arrays, warnings about those that do not); or that of `step`.

        With `groups`, just the arrays `learner/<group>/...`, and only `learner` is read. All that begin as one of
        `dispensable` may be missing. Raises UsageError where none loads, or where names, shapes or types differ from
        those of `like`.
        """
        warnings = []
        for candidate in reversed(self.steps()) if step is None else [step]:
            path = self.directory / str(candidate)
            try:
                arrays = _read(path, "learner" if groups else None)
            except Exception as error:
                if path.exists() or step is not None:  # else the run that goes on has deleted it meanwhile
                    reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                    warnings.append(f"checkpoint {candidate} is damaged and was skipped ({reason})")
                continue
            empty = {name: array for name, array in like.items() if not array.size}
            arrays |= empty
            if groups:
                arrays = select(arrays, groups)
            missing = [part for part in dispensable if not any(name.startswith(part) for name in arrays)]
            check_match(without(arrays, [f"{COUNTERS}/"]), without(like, missing), str(path))
            return candidate, arrays, warnings
        raise UsageError(f"no checkpoint in {self.directory} can be loaded" + "".join(f"; {text}" for text in warnings))

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _delete_old(self) -> None:
        """Keep the newest by step, not by the time of saving, and the best as the evaluations on disk have it now."""
        steps, evaluations = self.steps(), self.evaluations() if self._keep_best else {}
        kept = steps[-self._keep :]  # 0 keeps all
        if evaluations:
            kept = [*kept, max(evaluations, key=lambda step: np.mean(evaluations[step]))]
        unwanted = set(steps).difference(kept)
        for step in unwanted:
            path = self.directory / str(step)
            with suppress(OSError):  # renamed first: half of a checkpoint must not look like one
                shutil.rmtree(path.rename(path.with_suffix(DELETED)))
        if unwanted:
            self._writer.reload()

    def _failure(self, step: int, error: Exception) -> TrainingError:
        """The reason in words; what there is of the checkpoint is deleted, for the disk may be full."""
        for path in list(self.directory.glob(f"{step}{UNFINISHED}*")):
            shutil.rmtree(path, ignore_errors=True)
        text = f"{type(error).__name__}: {error}"
        known = re.search(KNOWN_FAILURES, text)
        reason = known.group() if known else text.splitlines()[0][:300]
        kept = ", ".join(str(kept) for kept in self.steps() if kept != step) or "none"
        return TrainingError(f"checkpoint {step} could not be saved ({reason}); older checkpoints are intact: {kept}")


@functools.cache
def _hide_noise() -> None:
    """Errors of a save are raised; orbax's threads and event loops would also print them, as tracebacks."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    hook = sys.unraisablehook
    sys.unraisablehook = lambda event: None if str(event.exc_value) == "Event loop is closed" else hook(event)


def _writer(directory: Path) -> Any:
    from orbax.checkpoint import v1 as ocp

    for path in list(directory.glob(f"*{DELETED}")):
        shutil.rmtree(path, ignore_errors=True)
    for path in list(directory.glob(f"*/{METRICS}")):  # orbax would refuse the whole folder for one of them
        if _stored_returns(path) is None:
            shutil.rmtree(path.parent)
    # Where a folder could not be made in the background, threads would wait for it until a timeout of minutes.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.training.Checkpointer(
        directory.absolute(),
        context=ocp.Context(async_options=at_once),
        preservation_policy=ocp.training.preservation_policies.PreserveAll(),
        cleanup_tmp_directories=True,
    )


def _stored_returns(path: Path) -> list[float] | None:
    """What `save` stored of an evaluation; None where it is not there or something else."""
    try:
        returns = json.loads(path.read_text())["returns"]
        return [float(x) for x in returns] if isinstance(returns, list) and returns else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def _read(path: Path, part: str | None) -> Arrays:
    """The arrays of a checkpoint, or only those of one part. Raises whatever orbax does where it is damaged."""
    from orbax.checkpoint import v1 as ocp

    stored = ocp.metadata(path.absolute()).metadata
    if part:
        stored = {name: x for name, x in stored.items() if first_part(name) == part or name == f"{CHECKSUM}/{part}"}
    partly = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
    with ocp.Context(pytree_options=partly):
        arrays = {name: np.asarray(array) for name, array in ocp.load(path.absolute(), stored).items()}
    checksums = {name: arrays.pop(name) for name in list(arrays) if first_part(name) == CHECKSUM}
    for part in {first_part(name) for name in arrays}:
        digest = sha256({name: array for name, array in arrays.items() if first_part(name) == part})
        if checksums[f"{CHECKSUM}/{part}"].tobytes().hex() != digest:
            raise ValueError("its content is not what was saved")
    return arrays
