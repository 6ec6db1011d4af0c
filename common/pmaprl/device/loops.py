"""Loops on the device: trees of arrays carried as one vector, so that a GPU gets one kernel for all
of them.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


class Packed(struct.PyTreeNode):
    """The small arrays of a tree behind one another, and the others as they are."""

    # [K] floats where all are, else bits; behind the axes of the loops that collected it
    vector: jax.Array
    others: tuple[jax.Array, ...]
    # The tree's structure; shape and type of each array in the vector
    layout: Any = struct.field(pytree_node=False)

    @classmethod
    def of(cls, tree: Any, largest: float = math.inf) -> "Packed":
        """In the vector are arrays of 32 bits and bools, of up to `largest` numbers each."""
        arrays, structure = jax.tree.flatten(tree)
        small = [x.size <= largest and (x.dtype == bool or x.dtype.itemsize == 4) for x in arrays]
        inside = [x for x, is_small in zip(arrays, small, strict=True) if is_small]
        floats = all(x.dtype == jnp.float32 for x in inside)
        vector = jnp.concatenate(
            [(x if floats else _bits(x)).ravel() for x in inside] or [jnp.zeros(0)]
        )
        others = tuple(x for x, is_small in zip(arrays, small, strict=True) if not is_small)
        shapes = tuple(
            (x.shape, x.dtype) if is_small else None
            for x, is_small in zip(arrays, small, strict=True)
        )
        return cls(vector, others, (structure, shapes))

    @property
    def tree(self) -> Any:
        """The tree as it was, its arrays behind the axes of the loops."""
        (structure, shapes), others = self.layout, iter(self.others)
        ends = np.cumsum([math.prod(shape[0]) for shape in shapes if shape])
        parts = iter(jnp.split(self.vector, ends[:-1], axis=-1))
        arrays = [_shaped(next(parts), *shape) if shape else next(others) for shape in shapes]
        return jax.tree.unflatten(structure, arrays)


def _bits(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint32) if x.dtype == bool else jax.lax.bitcast_convert_type(x, jnp.uint32)


def _shaped(part: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    part = part.reshape(*part.shape[:-1], *shape)
    if part.dtype == dtype:
        return part
    return (
        part.astype(bool)
        if jnp.issubdtype(dtype, bool)
        else jax.lax.bitcast_convert_type(part, dtype)
    )


def unrolled_scan(
    step: Callable, start: Any, inputs: Any, reverse: bool = False, on_cpu: int = 1
) -> tuple[Any, Any]:
    """`jax.lax.scan` of steps of few operations: `on_cpu` of them in one turn on a CPU, else 32, as
    launches cost.
    """
    unroll = on_cpu if jax.default_backend() == "cpu" else 32
    return jax.lax.scan(step, start, inputs, reverse=reverse, unroll=unroll)


def zeros_of(function: Callable, *args: Any) -> Any:
    """Zeros shaped as what `function(*args)` returns: where a loop's sums begin."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))


def repeat(
    step: Callable, state: Any, count: jax.Array, add: Callable = operator.add
) -> tuple[Any, Any]:
    """`state, new = step(index, state)` for every index below `count` []: the last state, and the
    sum of what was new.

    `add` takes the sum so far, zeros at first, and what is new. `count` is traced: one executable
    serves every length, and a resumed run executes the very same code.
    """
    step = jax.jit(step)  # traced once, although its shapes are asked for too

    def body(index, carry):
        state, total = carry
        state, new = step(index, state)
        return state, Packed.of(add(total.tree, new))

    start = state, Packed.of(zeros_of(step, jnp.int32(0), state)[1])
    state, total = jax.lax.fori_loop(0, count, body, start)
    return state, total.tree
