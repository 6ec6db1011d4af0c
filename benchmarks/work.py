"""What an update makes each device do, read from the program that JAX traces: products, and what devices exchange."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from common.device.programs import Algorithm, TrainState
from common.device.sharding import AXIS

COLLECTIVES = {"psum": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce", "all_gather": "all-gather"}


class Exchange(NamedTuple):
    """One collective of a program."""

    kind: str  # "all-reduce" or "all-gather"
    size: int  # bytes that each device puts in
    times: int


class Work(NamedTuple):
    """What one device does in an update."""

    parameters: int
    flops: int  # multiplications and additions of matrix products and convolutions
    exchanges: list[Exchange]


def work_of(algorithm: Algorithm, num_devices: int, turns: int) -> Work:
    """The work of each of so many devices, none of which has to be there.

    Loops whose length only the program's data tell count as `turns` times; of branches the one with the most products
    counts.
    """
    parts = TrainState(P(), P(AXIS))
    over_devices = partial(jax.shard_map, mesh=AbstractMesh((num_devices,), (AXIS,)))
    init = over_devices(algorithm.init, in_specs=P(), out_specs=parts)
    update = over_devices(algorithm.update, in_specs=(parts,), out_specs=(parts, P(), P()))
    state = jax.eval_shape(init, np.int32(0))
    flops, exchanges = _count(jax.make_jaxpr(update)(state).jaxpr, turns)
    return Work(sum(x.size for x in jax.tree.leaves(state.learner.params)), flops, exchanges)


def _count(jaxpr: Any, turns: int) -> tuple[int, list[Exchange]]:
    """Products and exchanges of a program and of all that it calls."""
    flops, exchanges = 0, []
    for equation in jaxpr.eqns:
        inner = [_count(called, turns) for called in _called(equation)]
        if equation.primitive.name == "cond":
            inner = [max(inner, key=lambda counted: counted[0])]
        times = {"scan": equation.params.get("length"), "while": turns}.get(equation.primitive.name, 1)
        flops += _products(equation) + times * sum(more for more, _ in inner)
        exchanges += _exchange(equation)
        exchanges += [one._replace(times=times * one.times) for _, found in inner for one in found]
    return flops, exchanges


def _called(equation: Any) -> Iterator[Any]:
    """The programs inside of an operation, such as a loop's body."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            program = getattr(one, "jaxpr", one)
            if hasattr(program, "eqns"):
                yield program


def _products(equation: Any) -> int:
    """Multiplications and additions of a matrix product or a convolution; 0 of anything else."""
    kind = equation.primitive.name
    if kind not in ("dot_general", "conv_general_dilated"):
        return 0
    (left, right), out = (x.aval for x in equation.invars[:2]), equation.outvars[0].aval
    if kind == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * out.size * math.prod(left.shape[axis] for axis in contracted)
    features = right.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * out.size * right.size // features


def _exchange(equation: Any) -> list[Exchange]:
    """The operation as an exchange, in a list; an empty one if it is none."""
    name = equation.primitive.name.removesuffix("_invariant").removesuffix("2")  # the names under JAX's checks
    if name not in COLLECTIVES:
        return []
    return [Exchange(COLLECTIVES[name], sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars), 1)]
