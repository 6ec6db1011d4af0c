"""This process's rows of a checkpoint's arrays over the environments, read and checked without those of the others.

A checkpoint's arrays `actors/...` [S, num_envs, ...] are of blocks, one of each process that has saved it: neighbouring
environments, whose rows of all arrays have one checksum. A process reads the blocks that its own environments are in,
array by array.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.device import cluster
from common.runs.arrays import Arrays, add_to, sha256

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
    mine = cluster.own_rows(blocks[-1].rows.stop)
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
