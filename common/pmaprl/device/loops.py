"""Loops on the device that carry a tree of arrays as one vector.

A GPU then gets one kernel for the whole tree, not one for each array.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array


class Packed(struct.PyTreeNode):
    """The small arrays of a tree concatenated into one vector, and the large ones as they are."""

    vector: Array  # [..., V] floats if all arrays are, else bits; first the axes of loops
    others: tuple[Array, ...]
    # Structure of the tree, and for each array its shape and type, or None if it is in `others`
    layout: Any = struct.field(pytree_node=False)

    @classmethod
    def of(cls, tree: Any, largest: float = math.inf) -> "Packed":
        """Pack the arrays of 32 bits and bools that have up to `largest` numbers each."""
        arrays, structure = jax.tree.flatten(tree)
        inside = []
        others = []
        shapes = []
        for x in arrays:
            has_32_bits = x.dtype == bool or x.dtype.itemsize == 4
            is_small = x.size <= largest and has_32_bits
            (inside if is_small else others).append(x)
            shapes.append((x.shape, x.dtype) if is_small else None)
        all_floats = all(x.dtype == jnp.float32 for x in inside)
        parts = [(x if all_floats else _bits(x)).ravel() for x in inside]
        return cls(
            vector=jnp.concatenate(parts or [jnp.zeros(0)]),
            others=tuple(others),
            layout=(structure, tuple(shapes)),
        )

    @property
    def tree(self) -> Any:
        """The tree as it was, its arrays behind the axes of the loops."""
        structure, shapes = self.layout
        others = iter(self.others)
        ends = np.cumsum([math.prod(shape[0]) for shape in shapes if shape])
        parts = iter(jnp.split(self.vector, ends[:-1], axis=-1))
        arrays = []
        for shape in shapes:
            arrays.append(_shaped(next(parts), *shape) if shape else next(others))
        return jax.tree.unflatten(structure, arrays)


def _bits(x: Array) -> Array:
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _shaped(
    part: Array,
    shape: tuple[int, ...],
    dtype: Any,
) -> Array:
    part = part.reshape(*part.shape[:-1], *shape)
    if part.dtype == dtype:
        return part
    if jnp.issubdtype(dtype, bool):
        return part.astype(bool)
    return jax.lax.bitcast_convert_type(part, dtype)


def unrolled_scan(
    step: Callable,
    start: Any,
    inputs: Any,
    reverse: bool = False,
    on_cpu: int = 1,
) -> tuple[Any, Any]:
    """Scan steps of few operations, several of them in one turn of the loop.

    A turn has 32 steps on an accelerator, where launching a kernel costs more than such a step.

    Args:
        step: `step(carry, input)` returns the next carry and an output, as in `jax.lax.scan`.
        start: the first carry.
        inputs: tree of [T, ...].
        reverse: whether to begin with the last step.
        on_cpu: steps of a turn on a CPU.

    Returns:
        The last carry, and the outputs [T, ...].
    """
    unroll = on_cpu if jax.default_backend() == "cpu" else 32
    return jax.lax.scan(step, start, inputs, reverse=reverse, unroll=unroll)


def zeros_of(function: Callable, *args: Any) -> Any:
    """Zeros like the result of `function(*args)`; sums in a loop begin with them."""
    shapes = jax.eval_shape(function, *args)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def repeat(
    step: Callable,
    state: Any,
    count: Array,
    add: Callable = operator.add,
) -> tuple[Any, Any]:
    """Run `step` on a state `count` times, and add up the numbers that each step returns.

    `count` is traced: one executable serves every number of steps, and a resumed run executes the
    very same code.

    Args:
        step: `step(index, state)` returns the next state and a tree of numbers.
        state: the first state.
        count: [] number of steps.
        add: adds a step's numbers to the sum so far, which begins with zeros.

    Returns:
        The last state, and the sum of the numbers.
    """
    step = jax.jit(step)  # traced once, although its shapes are asked for too

    def body(index, carry):
        state, total = carry
        state, new = step(index, state)
        return state, Packed.of(add(total.tree, new))

    zeros = zeros_of(step, jnp.int32(0), state)[1]
    state, total = jax.lax.fori_loop(0, count, body, (state, Packed.of(zeros)))
    return state, total.tree
