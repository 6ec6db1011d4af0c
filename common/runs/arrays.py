"""The state of a run as named arrays, such as `learner/params/actor/params/Dense_0/kernel`: what checkpoints hold.

A checkpoint's arrays `actors/...` [S, num_envs, ...] are of blocks, one of each process that has saved it: neighbouring
environments, whose rows of all arrays have one checksum. A process reads the blocks that its own environments are in,
array by array.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from common.cli.errors import UsageError
from common.device import multihost

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
    if multihost.count() == 1:
        return arrays

    def spread(x):
        return jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * multihost.count(), *x.shape[2:]), x.dtype)

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


SIZE = hashlib.sha256().digest_size  # bytes of a checksum


class Block(NamedTuple):
    """Neighbouring environments that one process has saved."""

    rows: range  # which they are
    checksum: np.ndarray  # uint8 [32], of their rows of all arrays

    def shared_with(self, others: range) -> range:
        """Those that are among `others` too."""
        return range(max(self.rows.start, others.start), min(self.rows.stop, others.stop))

    def compare(self, found: str) -> None:
        """Raise ValueError unless its checksum is the one `found`, in hexadecimal digits."""
        if found != self.checksum.tobytes().hex():
            raise ValueError("its content is not what was saved")


def check_blocks(arrays: Arrays, checksums: np.ndarray) -> None:
    """Raise ValueError unless whole arrays, of one part, have the `checksums` of their blocks, uint8 [K * 32].

    A part without environments is one block.
    """
    if len(checksums) == SIZE:
        Block(range(0), checksums).compare(sha256(arrays))
        return
    for block in _blocks(arrays, checksums):
        rows = slice(block.rows.start, block.rows.stop)
        block.compare(sha256({name: x[:, rows] for name, x in arrays.items()}))


def read_own_rows(path: Path, names: list[str], checksums: np.ndarray) -> Arrays:
    """This process's rows [S, N, ...] of the arrays of these `names`, of the checkpoint at `path`.

    Raises ValueError where a block has another checksum.
    """
    stored = {name: _open(path, name) for name in sorted(names)}
    blocks = _blocks(stored, checksums)
    mine = multihost.own_rows(blocks[-1].rows.stop)
    own = {name: np.empty((x.shape[0], len(mine), *x.shape[2:]), x.dtype.numpy_dtype) for name, x in stored.items()}
    for block in blocks:
        if both := block.shared_with(mine):
            _read_block(stored, block, own, mine, both)
    return own


def _read_block(stored: dict[str, Any], block: Block, own: Arrays, mine: range, both: range) -> None:
    """Into the `own` arrays, which have the rows `mine`, those of them that are in the block too."""
    digest = hashlib.sha256()
    for name, x in stored.items():
        found = x[:, block.rows.start : block.rows.stop].read().result()
        add_to(digest, name, found)
        own[name][:, _within(both, mine)] = found[:, _within(both, block.rows)]
    block.compare(digest.hexdigest())


def _open(path: Path, name: str) -> Any:
    """An array of a checkpoint, of which nothing is read yet."""
    import tensorstore

    folder = {"driver": "file", "path": f"{path.absolute()}/state/"}  # where orbax has them, and in this form
    base = {"driver": "ocdbt", "base": folder, "path": f"{name}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": base}, read=True, open=True).result()


def _blocks(arrays: dict[str, Any], checksums: np.ndarray) -> list[Block]:
    """The blocks of `arrays`, which all have as many rows. Raises ValueError where they cannot have these checksums."""
    counts = {x.shape[1] for x in arrays.values()}
    total, (count, rest) = max(counts, default=0), divmod(len(checksums), SIZE)
    if len(counts) > 1 or rest or not count or total % count:
        raise ValueError(f"{len(checksums)} bytes are no checksums of blocks of {sorted(counts)} environments")
    size = total // count
    return [Block(range(i * size, (i + 1) * size), checksums[i * SIZE :][:SIZE]) for i in range(count)]


def _within(rows: range, all_rows: range) -> slice:
    """Where in arrays of `all_rows` the `rows` are."""
    return slice(rows.start - all_rows.start, rows.stop - all_rows.start)
