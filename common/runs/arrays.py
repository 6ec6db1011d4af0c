"""The state of a run as named arrays, such as `learner/params/actor/params/Dense_0/kernel`: what checkpoints hold."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from common.cli.errors import UsageError
from common.device import cluster

Arrays = dict[str, np.ndarray]
COUNTERS = "counters"  # the first part of the names of numbers beside the state
ROWS = "actors"  # that of arrays [S, N, ...] with the environments, or what is theirs; a process has its own N


def flatten(tree: Any) -> Arrays:
    """A tree of host arrays as named arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def unflatten(arrays: Arrays, like: Any) -> Any:
    """The inverse of `flatten`, with the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in flatten_names(like)])


def flatten_names(tree: Any) -> list[str]:
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def select(arrays: Arrays, groups: tuple[str, ...]) -> Arrays:
    """The arrays `learner/<group>/...`, or `learner/<group>`, of each group."""
    wanted = [["learner", group] for group in groups]
    return {name: array for name, array in arrays.items() if name.split("/")[:2] in wanted}


def first_part(name: str) -> str:
    """The first part of an array's name: `learner`, `actors`, `run` or `counters`."""
    return name.split("/")[0]


def counter_arrays(counters: dict[str, int]) -> Arrays:
    """Numbers that are saved beside a state, whatever their names."""
    return {f"{COUNTERS}/{name}": np.int64([count]) for name, count in counters.items()}


def counters_of(arrays: Arrays) -> dict[str, int]:
    """The inverse of `counter_arrays`."""
    return {name.removeprefix(f"{COUNTERS}/"): int(x[0]) for name, x in arrays.items() if first_part(name) == COUNTERS}


def without(arrays: Arrays, beginnings: Sequence[str]) -> Arrays:
    """The arrays whose names begin with none of `beginnings`."""
    return {name: array for name, array in arrays.items() if not name.startswith(tuple(beginnings))}


def whole(arrays: Arrays) -> dict[str, Any]:
    """What has the shapes and types of the arrays that all processes together have, where this one has `arrays`."""
    if cluster.count() == 1:
        return arrays

    def spread(x):
        return jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * cluster.count(), *x.shape[2:]), x.dtype)

    return {name: spread(array) if first_part(name) == ROWS else array for name, array in arrays.items()}


def sha256(arrays: Arrays) -> str:
    """Checksum over names, types, shapes and every byte."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        add_to(digest, name, arrays[name])
    return digest.hexdigest()


def add_to(digest: Any, name: str, array: np.ndarray) -> None:
    """Into a checksum; those of several arrays come in the order of their names."""
    array = np.ascontiguousarray(array)
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8))


class Mismatch(UsageError):
    """Stored arrays are not those that are wanted."""

    def __init__(self, where: str, first: str, stored: Arrays, wanted: Arrays):
        """`first` is the name of the first one that differs."""
        found, expected = (
            f"{arrays[first].dtype}{list(arrays[first].shape)}" if first in arrays else "nothing"
            for arrays in (stored, wanted)
        )
        super().__init__(f"{where} does not fit these flags: {first} is {found} there and {expected} here")
        self.first, self.stored, self.wanted = first, stored, wanted


def check_match(stored: Arrays, wanted: Arrays, where: str) -> None:
    """Raise Mismatch unless both hold the same names, shapes and types; arrays may be anything that has the latter."""
    # Parameters first: their shapes say most about the flags.
    for name in sorted(stored.keys() | wanted.keys(), key=lambda name: ("/params/" not in name, name)):
        kinds = {name in arrays and (arrays[name].dtype, tuple(arrays[name].shape)) for arrays in (stored, wanted)}
        if len(kinds) > 1:
            raise Mismatch(where, name, stored, wanted)
