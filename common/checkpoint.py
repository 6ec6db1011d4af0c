"""Checkpoints of a whole run with orbax: plain arrays under path-like names, one folder per step.

A checkpoint holds data only: no pickled objects, no code. Arrays are global, so it loads on any number of devices.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common.errors import TrainingError, UsageError

Arrays = dict[str, np.ndarray]
CHECKSUM = "sha256"  # of the other arrays, stored beside them


class Checkpoints:
    """The `checkpoints/` folder of a run; saving is asynchronous, one save at a time."""

    def __init__(self, directory: Path, keep: int = 0, keep_best: bool = False, read_only: bool = False):
        """Keep the newest `keep` checkpoints (0 = all) and, with `keep_best`, the one with the best evaluation.

        With `read_only` nothing in `directory` is touched, not even the leftovers of a killed save.
        """
        from orbax.checkpoint import v1 as ocp

        logging.getLogger("absl").setLevel(logging.CRITICAL)
        policies = ocp.training.preservation_policies
        newest = policies.LatestN(keep) if keep else policies.PreserveAll()
        best = policies.BestN(
            get_metric_fn=lambda metrics: np.mean(metrics["returns"]), n=1, keep_checkpoints_without_metrics=False
        )
        policy = policies.AnyPreservationPolicy([newest, best] if keep_best else [newest])
        if read_only and not directory.is_dir():
            raise UsageError(f"there are no checkpoints: {directory} does not exist")
        for damaged in _unreadable_metrics(directory):  # orbax would refuse the whole folder for one of them
            if read_only:
                raise UsageError(f"{damaged} is damaged: delete it, the evaluation that it holds is not needed")
            shutil.rmtree(damaged.parent)
        self.directory = directory
        self._inner = ocp.training.Checkpointer(
            directory.absolute(),
            preservation_policy=policy,
            cleanup_tmp_directories=not read_only,
        )

    def steps(self) -> list[int]:
        """Steps that have a folder, oldest first; a damaged one is included."""
        return sorted(checkpoint.step for checkpoint in self._inner.checkpoints)

    def evaluations(self) -> dict[int, list[float]]:
        """The mean greedy return of each seed, by the step of every checkpoint that was evaluated."""
        stored = {checkpoint.step: checkpoint.metrics or {} for checkpoint in self._inner.checkpoints}
        return {step: metrics["returns"] for step, metrics in stored.items() if "returns" in metrics}

    def best(self) -> float:
        """Best evaluation stored with a checkpoint, the mean over seeds; -inf without any."""
        return max((float(np.mean(returns)) for returns in self.evaluations().values()), default=-np.inf)

    def save(self, step: int, arrays: Arrays, returns: list[float] | None) -> None:
        """Start saving, with the evaluation of each seed if there is one; waits for the previous save.

        Raises TrainingError where either fails.
        """
        metrics = None if returns is None else {"returns": returns}
        stored = {name: array for name, array in arrays.items() if array.size}  # orbax refuses empty arrays
        stored |= {CHECKSUM: np.frombuffer(bytes.fromhex(sha256(stored)), np.uint8)}
        try:
            self._inner.wait()  # orbax would delete a checkpoint to overwrite before it waits for its being written
            self._inner.save_async(step, stored, force=True, overwrite=step in self.steps(), metrics=metrics)
        except Exception as error:
            raise self._failure(step, error) from error

    def add_evaluation(self, step: int, returns: list[float]) -> None:
        """Store the evaluation of a checkpoint that was saved without one. Raises TrainingError where that fails."""
        self.wait()
        path = self.directory / str(step) / "metrics" / "metrics"
        try:
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".part").write_text(json.dumps({"returns": returns}))
            path.with_suffix(".part").rename(path)
        except OSError as error:
            raise self._failure(step, error) from error

    def wait(self) -> None:
        """Until the save under way is on disk. Raises TrainingError where it fails."""
        try:
            self._inner.wait()
        except Exception as error:
            raise self._failure("under way", error) from error

    def load(
        self,
        like: Arrays,
        groups: tuple[str, ...] = (),
        dispensable: tuple[str, ...] = (),
        step: int | None = None,
    ) -> tuple[int, Arrays, list[str]]:
        """The newest checkpoint that loads, as (step, arrays, warnings about those that do not); or that of `step`.

        With `groups`, just the arrays `learner/<group>/...`. All that begin as one of `dispensable` may be missing.
        Raises UsageError where none loads, or where names, shapes or types differ from those of `like`.
        """
        warnings = []
        for candidate in reversed(self.steps()) if step is None else [step]:
            try:
                arrays = {name: np.asarray(array) for name, array in self._inner.load(candidate).items()}
                if arrays.pop(CHECKSUM).tobytes().hex() != sha256(arrays):
                    raise ValueError("its content is not what was saved")
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                warnings.append(f"checkpoint {candidate} is damaged and was skipped ({reason})")
                continue
            empty = {name: array for name, array in like.items() if not array.size}
            arrays |= empty
            if groups:
                arrays = select(arrays, groups)
            missing = [part for part in dispensable if not any(name.startswith(part) for name in arrays)]
            check_match(arrays, without(like, missing), str(self.directory / str(candidate)))
            return candidate, arrays, warnings
        raise UsageError(f"no checkpoint in {self.directory} can be loaded" + "".join(f"; {text}" for text in warnings))

    def close(self) -> None:
        self._inner.close()

    def _failure(self, step: Any, error: Exception) -> TrainingError:
        text = f"{type(error).__name__}: {error}"
        known = re.search("No space left on device|File too large|Disk quota exceeded|Read-only file system", text)
        reason = known.group() if known else text.splitlines()[0][:300]
        kept = ", ".join(str(kept) for kept in self.steps() if kept != step) or "none"
        return TrainingError(f"checkpoint {step} could not be saved ({reason}); older checkpoints are intact: {kept}")


def _unreadable_metrics(directory: Path) -> Iterator[Path]:
    """The files with a checkpoint's evaluation that hold something else."""
    for path in list(directory.glob("*/metrics/metrics")):
        try:
            json.loads(path.read_text())["returns"]
        except (ValueError, KeyError, TypeError):
            yield path


def flatten(tree: Any) -> Arrays:
    """A tree of host arrays as named arrays, such as `learner/params/actor/params/Dense_0/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def unflatten(arrays: Arrays, like: Any) -> Any:
    """The inverse of `flatten`, with the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in flatten_names(like)])


def flatten_names(tree: Any) -> list[str]:
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def select(arrays: Arrays, groups: tuple[str, ...]) -> Arrays:
    """The arrays `learner/<group>/...` of each group."""
    return {name: array for name, array in arrays.items() if name.split("/")[1] in groups}


def without(arrays: Arrays, beginnings: Sequence[str]) -> Arrays:
    """The arrays whose names begin with none of `beginnings`."""
    return {name: array for name, array in arrays.items() if not name.startswith(tuple(beginnings))}


def sha256(arrays: Arrays) -> str:
    """Checksum over names, types, shapes and every byte."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def check_match(stored: Arrays, wanted: Arrays, where: str) -> None:
    """Raise UsageError, naming the first difference, unless both hold the same names, shapes and types."""
    # Parameters first: their shapes say most about the flags.
    for name in sorted(stored.keys() | wanted.keys(), key=lambda name: ("/params/" not in name, name)):
        found, expected = (
            f"{arrays[name].dtype}{list(arrays[name].shape)}" if name in arrays else "nothing"
            for arrays in (stored, wanted)
        )
        if found != expected:
            raise UsageError(f"{where} does not fit these flags: {name} is {found} there and {expected} here")
