"""One order for the collectives of a program, which XLA's runtime for CPUs does not keep by itself.

That runtime starts an operation as soon as its operands are ready. It only makes sure that the
collectives of one sequence begin in the order of the program, and a loop counts as begun while it
runs. Suppose that a collective follows a loop of collectives and does not depend on it. Then both
run at the same time, and devices reach their collectives in different orders. There are just enough
threads for one collective at a time, in which every device waits with one thread. With two under
way, devices may wait in different ones, no thread is left to finish either, and XLA ends the
process after 40 seconds. With more threads, two collectives of one kind may exchange each other's
numbers, as JAX gives all of them one channel.

`in_one_order` makes this impossible. It takes the program as JAX has traced it, and passes a flag
from every collective to the next one, through loops and branches: the operand of each depends on
the result of the one before it. No pass and no scheduler of XLA can change this order, because XLA
cannot know that the flag is false on every device. A device is then in at most one collective, the
same one as all other devices that are in one. While a device is in none, a thread is left for it.
Tests look for this order in the compiled program.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from pmaprl.machine.devices import Device

Results = tuple[list[Any], Array]
"""Results of an operation, and the flag after it."""


def in_one_order(
    program: Callable,
    devices: list[Device],
    axis_name: str,
) -> Callable:
    """Put the collectives of a program in one order, if its devices are several CPUs.

    Args:
        program: program of each device of the axis, under `pmap` or `shard_map`.
        devices: all devices of the program. Accelerators keep collectives in order themselves.
        axis_name: axis of those devices.

    Returns:
        A function of the same arguments, with the same results.
    """
    if len(devices) == 1 or devices[0].platform != "cpu":
        return program

    def ordered(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(program, return_shape=True)(*args)
        never = jax.lax.axis_index(axis_name) < 0
        results, _ = _run(traced, jax.tree.leaves(args), never)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def _run(
    program: ClosedJaxpr,
    inputs: list[Any],
    never: Array,
) -> Results:
    """Run a traced `program`, whose first collective waits for the flag `never`.

    The flag is false on every device, but XLA has to compute it from the results of the collectives
    before.
    """
    if not _communicates(program.jaxpr):
        return jaxpr_as_fun(program)(*inputs), never
    jaxpr = program.jaxpr
    names = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(names, [*program.consts, *inputs], strict=True))

    def value_of(name: Any) -> Any:
        return name.val if isinstance(name, Literal) else values[name]

    for operation in jaxpr.eqns:
        operands = [value_of(name) for name in operation.invars]
        results, never = _step(operation, operands, never)
        values.update(zip(operation.outvars, results, strict=True))
    return [value_of(name) for name in jaxpr.outvars], never


def _step(
    operation: JaxprEqn,
    operands: list[Any],
    never: Array,
) -> Results:
    """Run one operation, which may be a loop or a branch with collectives inside."""
    if _is_collective(operation):
        return _collective(operation, operands, never)
    inner = [program for program in _programs_of(operation) if _communicates(program.jaxpr)]
    if not inner:
        return _bind(operation, operands), never
    if rule := RULES.get(operation.primitive.name):
        return rule(operation.params, operands, never)
    (program,) = inner  # a function within the program, such as one of `jax.jit`
    return _run(program, operands, never)


def _collective(
    operation: JaxprEqn,
    operands: list[Any],
    never: Array,
) -> Results:
    """Exchange `operands` one by one, each behind the one before it."""
    if len(operands) > 1:
        results = []
        arguments = zip(operation.invars, operation.outvars, operands, strict=True)
        for source, target, operand in arguments:
            alone = operation.replace(invars=[source], outvars=[target])
            (result,), never = _collective(alone, [operand], never)
            results.append(result)
        return results, never
    (operand,) = map(jnp.asarray, operands)
    if not operand.size:
        return _bind(operation, operands), never
    # The ones are never taken, and the flag stays false whatever the result is: no number changes,
    # not even the sign of a zero. With zeros in place of the ones, XLA could compute the result of
    # an operand that is always zero. It would know that the flag after it is false, and the order
    # would end there.
    guarded = jnp.where(never, jnp.ones_like(operand), operand)
    (result,) = _bind(operation, [guarded])
    return [result], never & (result.ravel()[0] != 0)


def _scan(
    params: dict[str, Any],
    operands: list[Any],
    never: Array,
) -> Results:
    program = params["jaxpr"]
    constants, carry, inputs = _operands_of_scan(params, operands)
    count = len(carry)

    def step(carry: tuple, inputs: list) -> tuple:
        never, *carried = carry
        results, never = _run(program, [*constants, *carried, *inputs], never)
        return (never, *results[:count]), results[count:]

    (never, *carry), outputs = jax.lax.scan(
        step,
        (never, *carry),
        inputs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *outputs], never


def _operands_of_scan(
    params: dict[str, Any],
    operands: list[Any],
) -> tuple[list[Any], list[Any], list[Any]]:
    """Constants, carry and inputs of a scan."""
    if "ft_in" in params:  # from JAX 0.11 on
        constants, carry, inputs = params["ft_in"].update(operands).unpack()
        return list(constants), list(carry), list(inputs)
    start = params["num_consts"]
    end = start + params["num_carry"]
    return operands[:start], operands[start:end], operands[end:]


def _while(
    params: dict[str, Any],
    operands: list[Any],
    never: Array,
) -> Results:
    test_program = params["cond_jaxpr"]
    step_program = params["body_jaxpr"]
    start = params["cond_nconsts"]
    end = start + params["body_nconsts"]
    test_constants = operands[:start]
    step_constants = operands[start:end]
    carry = operands[end:]

    def test(never: Array, carry: list) -> tuple[Array, Array]:
        (goes_on,), never = _run(test_program, [*test_constants, *carry], never)
        return goes_on, never

    def step(never: Array, carry: list) -> tuple[Array, list]:
        carry, never = _run(step_program, [*step_constants, *carry], never)
        return never, carry

    if not _communicates(test_program.jaxpr):
        never, carry = jax.lax.while_loop(
            lambda state: test(*state)[0],
            lambda state: step(*state),
            (never, carry),
        )
        return carry, never

    def step_and_test(state: tuple) -> tuple:
        _, never, carry = state
        never, carry = step(never, carry)
        goes_on, never = test(never, carry)
        return goes_on, never, carry

    goes_on, never = test(never, carry)
    start_state = (goes_on, never, carry)
    _, never, carry = jax.lax.while_loop(lambda state: state[0], step_and_test, start_state)
    return carry, never


def _cond(
    params: dict[str, Any],
    operands: list[Any],
    never: Array,
) -> Results:
    index, *operands = operands
    branches = [partial(_run, branch) for branch in params["branches"]]
    return jax.lax.switch(index, branches, operands, never)


RULES = {"scan": _scan, "while": _while, "cond": _cond}


def _bind(operation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Run one operation as it is."""
    names = {}
    for name, operand in zip(operation.invars, operands, strict=True):
        if not isinstance(name, Literal):
            names[name] = operand
    alone = Jaxpr((), list(names), operation.outvars, [operation], operation.effects)
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*names.values())


def _communicates(jaxpr: Jaxpr) -> bool:
    for operation in jaxpr.eqns:
        if _is_collective(operation):
            return True
        if any(_communicates(inner.jaxpr) for inner in _programs_of(operation)):
            return True
    return False


def _is_collective(operation: JaxprEqn) -> bool:
    """True if devices exchange something: the operation has axes with names, and an operand."""
    params = operation.params
    axes = params.get("axes", params.get("axis_name", ()))
    names = axes if isinstance(axes, tuple | list) else (axes,)
    has_name = any(isinstance(name, str) for name in names)
    return bool(operation.invars) and has_name


def _programs_of(operation: JaxprEqn) -> Iterator[ClosedJaxpr]:
    """Find the programs within a loop, a branch or a function."""
    for value in operation.params.values():
        parts = value if isinstance(value, tuple | list) else (value,)
        for part in parts:
            if isinstance(part, ClosedJaxpr):
                yield part
            elif isinstance(part, Jaxpr):
                yield ClosedJaxpr(part, ())
