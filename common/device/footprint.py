"""Whether the devices have memory for a run: known before anything is compiled."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from common.cli.errors import UsageError
from common.device.devices import memory_of

LARGE = 0.02
"""Share of the memory from which on observations of an update, or of an evaluation, are worth a closer look."""
MATERIALISED = "scan", "while", "dot_general", "conv_general_dilated"
"""Operations whose inputs and outputs are arrays in memory, whatever a compiler makes of the others."""


def shapes_of(programs: Any, members: Any) -> Any:
    """Shapes of the state of a run. Raises UsageError where there are none that large."""
    try:
        return jax.eval_shape(programs.init, members)
    except TypeError as error:
        if "every element be an integer type" not in str(error):  # JAX's words for over 2 ** 63
            raise
        raise UsageError("these sizes make arrays of more numbers than any memory has; take smaller ones") from error


def check_fits(args: Any, programs: Any, state: Any, example: Any, env: Any, devices: list[jax.Device]) -> None:
    """Raise UsageError where a run's `state`, or at some moment an update or an evaluation, takes more than there is.

    `example` has the shapes of what `update` takes beside the state. What programs hold is looked up only where
    observations of `env`, which has an `obs_like`, say that it may be much: it takes as long as to trace them.
    """
    available, episodes = memory_of(devices), 0 if args.benchmark else args.eval_episodes
    needs = {"the state and the batches of this run take": _size((state, example))}
    if max(args.steps_per_update, episodes) * args.num_agents * _size(env.obs_like) > LARGE * available:
        needs["an update takes at least"] = _peak_bytes(programs.update, state, example) * len(devices)
        if programs.evaluate and episodes:
            needs["an evaluation takes at least"] = _peak_bytes(programs.evaluate, state, np.int32(0)) * len(devices)
    for what, size in needs.items():
        if size > available:
            smaller = "fewer --eval-episodes" if "evaluation" in what else "fewer environments, steps or hidden units"
            raise UsageError(f"{what} {size / 1e9:,.1f} GB, and there are {available / 1e9:,.1f} GB: take {smaller}")


def _peak_bytes(program: Any, *inputs: Any) -> int:
    """Bytes that a program, on each device, has to have at once: inputs of one of its operations, or outputs, which
    may take their place.
    """
    traced = jax.make_jaxpr(program)(*inputs).jaxpr
    needed, _ = dce_jaxpr(traced, [True] * len(traced.outvars))
    operations = _operations(needed)
    return max((_size([x.aval for x in some]) for one in operations for some in (one.invars, one.outvars)), default=0)


def _operations(jaxpr: Any) -> Iterator[Any]:
    """Those in a program, and in what it calls, that hold what they take and give."""
    for operation in jaxpr.eqns:
        if operation.primitive.name in MATERIALISED:
            yield operation
        for inner in jax.tree.leaves(operation.params, is_leaf=_is_program):
            if _is_program(inner):
                yield from _operations(getattr(inner, "jaxpr", inner))


def _is_program(x: Any) -> bool:
    return hasattr(x, "eqns")


def _size(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
