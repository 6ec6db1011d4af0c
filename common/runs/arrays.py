"""The state of a run as named arrays, such as `learner/params/actor/params/Dense_0/kernel`: what checkpoints hold."""

import hashlib
from typing import Any

import jax
import numpy as np

from common.cli.errors import UsageError

Arrays = dict[str, np.ndarray]
COUNTERS = "counters"  # the first part of the names of numbers beside the state
ROWS = "actors"  # that of arrays [S, N, ...] with the environments, or what is theirs; a process has its own N
CHECKSUM = "sha256"  # that of the checksums of each part


def flatten(tree: Any, left_out: tuple[str, ...] = ()) -> Arrays:
    """A tree of host arrays as named arrays, without those whose names begin as one of `left_out`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
    return {name: array for name, array in named.items() if not name.startswith(left_out)}


def unflatten(arrays: Arrays, like: Any) -> Any:
    """The inverse of `flatten`, with the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in flatten(like)])


def first_part(name: str) -> str:
    """The first part of an array's name: `learner`, `actors`, `run`, `counters` or `sha256`."""
    return name.split("/")[0]


def sha256(arrays: Arrays) -> str:
    """Checksum over names, types, shapes and every byte."""
    return _digest_rows({name: array[None] for name, array in arrays.items()}).tobytes().hex()


def checksums(arrays: Arrays) -> Arrays:
    """Checksums of the parts of a state: `sha256/learner` [1, 32] and so on, `sha256/actors` [1, N, 32].

    The latter has one of each environment, so that every process can check its own, however many processes have saved.
    """
    found = {}
    for part in {first_part(name) for name in arrays}:
        of_part = {name: x for name, x in arrays.items() if first_part(name) == part}
        if part == ROWS:
            found[part] = _digest_rows({name: np.moveaxis(x, 1, 0) for name, x in of_part.items()})[None]
        else:
            found[part] = _digest_rows({name: x[None] for name, x in of_part.items()})
    return {f"{CHECKSUM}/{part}": digests for part, digests in found.items()}


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
    """Stored arrays are not those that are wanted; `first` is the name of the first one that differs."""

    def __init__(self, where: str, first: str, stored: str, wanted: str):
        super().__init__(f"{where} does not fit these flags: {first} is {stored} there and {wanted} here")
        self.first = first


def check_match(stored: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raise Mismatch unless both hold the same names, shapes and types; arrays may be anything that has the latter."""
    # Parameters first: their shapes say most about the flags.
    for name in sorted(stored.keys() | wanted.keys(), key=lambda name: ("/params/" not in name, name)):
        kinds = [
            f"{arrays[name].dtype}{list(arrays[name].shape)}" if name in arrays else "missing"
            for arrays in (stored, wanted)
        ]
        if kinds[0] != kinds[1]:
            raise Mismatch(where, name, *kinds)
