"""Checkpoints of a whole run with orbax: plain arrays under path-like names, one folder per step.

A checkpoint holds data only: no pickled objects, no code. Arrays are global, so it loads on any number of devices.
"""

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.errors import TrainingError, UsageError
from common.device import multihost
from common.runs.arrays import COUNTERS, Arrays, Mismatch, check_match, flatten, select, unflatten, whole, without
from common.runs.checkpoint_files import (
    DELETED,
    UNFINISHED,
    CheckpointDeleted,
    Damaged,
    make_writer,
    read_together,
    rename_damaged,
    saved_steps,
    stored_returns,
    to_save,
    write_returns,
)
from common.runs.ranking import Overall, best_step, mean_of_seeds

FOLDER = "checkpoints"  # in the directory of a run
CONFIRMED = "confirmed"  # the name of the evaluation in episodes by which a checkpoint was not chosen
ATTEMPTS = 10  # to delete what a save has left, or to read one while a run deletes them
PATIENCE = 10  # seconds for a save that other processes may not go on with
KNOWN_FAILURES = "No space left on device|File too large|Disk quota exceeded|Read-only file system|Permission denied"


class Checkpoints:
    """The `checkpoints/` folder of a run; saving is asynchronous, one save at a time."""

    def __init__(
        self,
        directory: Path,
        keep: int = 0,
        keep_best: bool = False,
        read_only: bool = False,
        overall: Overall = mean_of_seeds,
    ):
        """Keep the newest `keep` checkpoints (0 = all) and, with `keep_best`, the one with the best evaluation.

        `overall` makes one number of the returns of several agents. With `read_only` nothing in `directory` is touched:
        another process may be writing there.
        """
        if read_only and not directory.is_dir():
            raise UsageError(f"there are no checkpoints: {directory} does not exist")
        self.directory = directory
        self._keep, self._keep_best, self._overall = keep, keep_best, overall
        self._writer = None if read_only else make_writer(directory)
        self._saving: tuple[int, Any] | None = None  # the step whose save is under way, and orbax's handle of it

    def steps(self) -> list[int]:
        """As `saved_steps`."""
        return saved_steps(self.directory)

    def path(self, step: int) -> Path:
        """The folder of a checkpoint, whether it is there or not."""
        return self.directory / str(step)

    def evaluations(self) -> dict[int, list[float]]:
        """The mean greedy return of each seed, by the step of every checkpoint that was evaluated."""
        stored = {step: stored_returns(self.path(step)) for step in self.steps()}
        return {step: returns for step, returns in stored.items() if returns}

    def agreed_evaluations(self) -> dict[int, list[float]]:
        """Those that the first process finds, in all processes."""
        return {int(step): returns for step, returns in multihost.on_first(self.evaluations).items()}

    def quoted(self, step: int) -> list[float]:
        """The mean greedy return of each seed, of the episodes by which it was not chosen if there are any; else []."""
        return stored_returns(self.path(step), CONFIRMED) or stored_returns(self.path(step)) or []

    def best(self) -> float:
        """Best evaluation stored with a checkpoint, over all agents; -inf without any."""
        evaluations = self.evaluations()
        best = best_step(evaluations, overall=self._overall)
        return -np.inf if best is None else self._overall(evaluations[best])

    def damaged_best(self, sound: int, like: Arrays, dispensable: tuple[str, ...]) -> list[Damaged]:
        """The checkpoints that do not load although their evaluations are the best; that of step `sound` has loaded."""
        found, evaluations = [], self.agreed_evaluations()
        while (step := best_step(evaluations, overall=self._overall)) not in (None, sound):
            try:
                self._load(step, like, None, (), dispensable)
                break
            except Damaged as damaged:
                found.append(damaged)
            del evaluations[step]
        return found

    def set_aside(self, damaged: Damaged) -> str:
        """Take a checkpoint out of all that follows: it gets another name. Returns what there is to say of that."""
        words = multihost.on_first(rename_damaged, self.path(damaged.step), damaged)
        self._writer.reload()
        return words

    def save(self, step: int, arrays: Arrays, returns: list[float] | None) -> None:
        """Start saving, with the evaluation of each seed if there is one; waits for the previous save.

        Raises TrainingError where either fails.
        """
        metrics = None if returns is None else {"returns": returns}
        stored = to_save(arrays)
        self.wait()  # orbax would delete a checkpoint to overwrite before it waits for its being written
        try:
            again = step in multihost.on_first(self.steps)
            self._saving = step, self._writer.save_async(step, stored, force=True, overwrite=again, metrics=metrics)
        except Exception as error:
            raise self._failure(step, error) from error

    def add_evaluation(self, step: int, returns: list[float], **more: list[float]) -> bool:
        """Store the evaluation of a checkpoint that was saved without one, and `more` of it by name.

        Returns whether there is such a checkpoint. Raises TrainingError where storing fails.
        """
        self.wait()  # the checkpoint's save may be under way, and so may be its deletion
        return multihost.on_first(self._store, step, {"returns": returns} | more)

    def confirm(self, step: int, returns: list[float]) -> None:
        """Store an evaluation in other episodes, unless the checkpoint is gone. Raises TrainingError as above."""
        self.add_evaluation(step, stored_returns(self.path(step)) or [], **{CONFIRMED: returns})

    def wait(self) -> None:
        """Until the save under way is on disk, and old ones are gone. Raises TrainingError where it fails."""
        if self._saving:
            (step, saving), self._saving = self._saving, None
            try:
                multihost.in_background(saving.result)  # ends its thread, which the writer's own `wait` leaves behind
            except Exception as error:
                raise self._failure(step, error) from error
        if multihost.on_first(self._delete_old):
            self._writer.reload()

    def let_finish(self) -> None:
        """As `wait`, for a process that fails, perhaps alone: it asks no other one, and gives up after some seconds."""
        if multihost.count() == 1:
            self.wait()
        elif self._saving:
            self._saving[1].result(timeout=PATIENCE)

    def load(
        self,
        like: Arrays,
        part: str | None = None,
        groups: tuple[str, ...] = (),
        dispensable: tuple[str, ...] = (),
        step: int | None = None,
    ) -> tuple[int, Arrays, list[Damaged]]:
        """The newest checkpoint that loads, as (step, arrays, those that do not); or that of `step`.

        With a `part`, only that is read; with `groups`, the arrays `learner/<group>/...` of it are all that counts. All
        that begin as one of `dispensable` may be missing. Raises UsageError where none loads, Gone where the one of
        `step` was deleted, Mismatch where that is because names, shapes or types differ from those of `like`.
        """
        damaged, tried = [], set()
        while left := [x for x in (multihost.on_first(self.steps) if step is None else [step]) if x not in tried]:
            candidate = left[-1]
            tried.add(candidate)
            try:
                return candidate, self._load(candidate, like, part, groups, dispensable), damaged
            except Damaged as error:
                if multihost.on_first(self.path(candidate).exists):  # else the run that goes on has deleted it
                    damaged.append(error)
            if len(tried) - len(damaged) == ATTEMPTS:
                raise CheckpointDeleted(
                    f"checkpoints in {self.directory} are deleted before they can be read: try it again"
                )
        for one in damaged:
            if isinstance(one.error, Mismatch):
                raise one.error
        if not damaged and step is not None:
            raise CheckpointDeleted(
                f"checkpoint {step} in {self.directory} is gone: the run that goes on has deleted it"
            )
        if not damaged:
            raise UsageError(f"there are no checkpoints in {self.directory}")
        others = ", ".join(str(other) for other in self.steps() if other != step)
        none = f"no checkpoint in {self.directory} can be loaded" if step is None else f"other checkpoints: {others}"
        raise UsageError("; ".join([*map(str, damaged), none]))

    def load_learner(self, like: Any, step: int | None = None) -> tuple[int, Any, list[Damaged]]:
        """The learner alone, with the structure of `like`, in place of all arrays; see `load`."""
        step, arrays, damaged = self.load(flatten({"learner": like}), "learner", step=step)
        return step, unflatten(arrays, {"learner": like})["learner"], damaged

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _load(
        self, step: int, like: Arrays, part: str | None, groups: tuple[str, ...], dispensable: tuple[str, ...]
    ) -> Arrays:
        """What `load` returns of one checkpoint. Nothing is read before its shapes are known to be those of `like`."""
        all_rows, empty = whole(like), [name for name, array in like.items() if not array.size]

        def wanted(arrays: Arrays, like: Arrays) -> Arrays:
            arrays = arrays | {name: like[name] for name in empty}
            return select(arrays, groups) if groups else arrays

        def check(shapes: Arrays) -> None:
            there = without(wanted(shapes, all_rows), [f"{COUNTERS}/"])
            missing = [part for part in dispensable if not any(name.startswith(part) for name in there)]
            check_match(there, without(all_rows, missing), str(self.path(step)))

        return wanted(read_together(self.path(step), part, check), like)

    def _store(self, step: int, evaluations: dict[str, list[float]]) -> bool:
        if there := step in self.steps():
            write_returns(self.path(step), **evaluations)
        return there

    def _delete_old(self) -> bool:
        """Keep the newest by step, not by the time of saving, and the best as the evaluations on disk have it now.

        Returns whether any is gone: writers, of all processes, know those that were there when they looked.
        """
        steps, evaluations = self.steps(), self.evaluations() if self._keep_best else {}
        kept = steps[-self._keep :]  # 0 keeps all
        unwanted = set(steps).difference(kept, [best_step(evaluations, overall=self._overall)])
        for step in unwanted:
            path = self.path(step)
            with suppress(OSError):  # renamed first: half of a checkpoint must not look like one
                shutil.rmtree(path.rename(path.with_suffix(DELETED)))
        return bool(unwanted)

    def _failure(self, step: int, error: Exception) -> TrainingError:
        """The reason in words; what there is of the checkpoint is deleted, for the disk may be full."""
        for _ in range(ATTEMPTS if multihost.is_first() else 0):  # threads that have not noticed yet may write on
            for path in (unfinished := list(self.directory.glob(f"{step}{UNFINISHED}*"))):
                shutil.rmtree(path, ignore_errors=True)
            if not unfinished:
                break
            time.sleep(0.1)
        text = f"{type(error).__name__}: {error}"
        known = re.search(KNOWN_FAILURES, text)
        reason = known.group() if known else text.splitlines()[0][:300]
        kept = ", ".join(str(kept) for kept in self.steps() if kept != step) or "none"
        return TrainingError(f"checkpoint {step} could not be saved ({reason}); older checkpoints are intact: {kept}")
