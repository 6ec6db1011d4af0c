"""The order of collectives on CPU devices: the same numbers, one after another, in runs that used
to wait for ever.
"""

from functools import partial
from subprocess import TimeoutExpired

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import ROOT, run_python
from helpers import collectives_beside_each_other
from numpy.testing import assert_array_equal

from pmaprl.device.collectives import in_one_order
from pmaprl.device.sharding import AXIS

DEVICES = jax.devices()[:4]


def of_every_kind(x):
    """Collectives of all kinds and types that need nothing of each other."""
    whole = (x * 8).astype(jnp.int32)
    return {
        "sums": jax.lax.psum({"a": x, "b": whole, "c": jnp.float32(3)}, AXIS),
        "largest": jax.lax.pmax(x - 1, AXIS),
        "smallest": jax.lax.pmin(whole, AXIS),
        "any": jax.lax.pmax(x > 0.9, AXIS),
        "gathered": jax.lax.all_gather(x, AXIS, tiled=True),
        "passed on": jax.lax.ppermute(x, AXIS, [(i, (i + 1) % 4) for i in range(4)]),
        "exchanged": jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        "scattered": jax.lax.psum_scatter(x + 1, AXIS, tiled=True),
        "nothing": jax.lax.psum(x[:0], AXIS),
    }


def of_constants(x):
    """Collectives of numbers that XLA knows, between those of numbers that it does not."""
    results = []
    for dtype in (jnp.float32, jnp.int32, jnp.uint8, jnp.bool_):
        for number in (0, 1):
            constant = jnp.full(3, number, dtype)
            results.append(jax.lax.all_gather(constant, AXIS, tiled=True))
            results.append(jax.lax.pmax(constant, AXIS))
            results.append(jax.lax.all_gather(x + len(results), AXIS))
    return results


def in_a_scan(x):
    def step(carry, number):
        carry = carry + jax.lax.pmean(jnp.sin(x + number), AXIS)
        return carry, jax.lax.pmax(x * number, AXIS)

    gathered = jax.lax.all_gather(
        x,
        AXIS,
    )
    return jax.lax.scan(step, x, jnp.arange(5.0), reverse=True, unroll=2), gathered


def in_a_loop(x):
    """A loop whose condition communicates, beside one that is counted."""

    def goes_on(carry):
        return jax.lax.pmax(jnp.max(carry), AXIS) < 9

    def step(carry):
        return 1.5 * carry + jax.lax.pmean(x, AXIS)

    def counted(index, total):
        return total + jax.lax.psum(x * index, AXIS)

    counted_up = jax.lax.fori_loop(0, jnp.int32(x.size), counted, x)
    return jax.lax.while_loop(goes_on, step, x), counted_up


def in_a_branch(x):
    index = jax.lax.pmin(jnp.int32(x.size), AXIS) - 7
    branches = [
        lambda x: x,
        lambda x: jax.lax.psum(x, AXIS),
        lambda x: x + jax.lax.pmax(x, AXIS),
    ]
    return jax.lax.switch(index, branches, x), jax.lax.psum(2 * x, AXIS)


@jax.custom_jvp
def doubled(x):
    return 2 * jax.lax.pmean(x, AXIS)


doubled.defjvps(lambda tangent, result, x: 2 * tangent)


def in_functions(x):
    """Functions of JAX around collectives: compiled, differentiated, mapped, computed again."""
    compiled = jax.jit(lambda x: jax.lax.psum(x, AXIS) / 3)

    def total(x):
        return jnp.sum(jnp.cos(jax.lax.pmean(x, AXIS)))

    gradient = jax.grad(total)(x)

    def over_both(y):
        return jax.lax.pmean(y, AXIS) + jax.lax.psum(y, "rows")

    mapped = jax.vmap(over_both, axis_name="rows")(x)
    again = jax.checkpoint(lambda x: jnp.tanh(jax.lax.psum(x, AXIS)))
    return compiled(x), compiled(x + 1), gradient, mapped, again(x), doubled(x)


@pytest.mark.parametrize(
    "program",
    [of_every_kind, of_constants, in_a_scan, in_a_loop, in_a_branch, in_functions],
)
def test_a_program_in_one_order_gives_the_same_bits(program):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8)).astype(np.float32)
    x[0, :4] = 0.0, -0.0, np.inf, np.nan
    if program is in_a_loop:
        x = np.abs(np.nan_to_num(x, posinf=1)) + 0.1
    pmap = partial(jax.pmap, axis_name=AXIS, devices=DEVICES)
    ordered = pmap(in_one_order(program, DEVICES, AXIS)).lower(x).compile()
    assert not collectives_beside_each_other(ordered)
    want = pmap(program)(x)
    got = ordered(x)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        assert_array_equal(one, other)


def test_one_device_needs_no_order():
    assert in_one_order(in_a_scan, DEVICES[:1], AXIS) is in_a_scan


WAITED = """
--env CartPole-v1 --num-envs 16 --num-steps 8 --num-minibatches 4 --hidden-sizes 8 --rnn gru
--rnn-size 8
"""
SMALL = "--num-envs 16 --hidden-sizes 8 --total-timesteps"
RUNS = {
    "pqn, memory": ("pqn", f"{WAITED} --total-timesteps 12800"),
    "pqn": ("pqn", f"--num-steps 8 --num-minibatches 4 {SMALL} 12800"),
    "ppo": (
        "ppo",
        f"--num-steps 8 --num-minibatches 4 --reset-pool 8 --normalize-obs {SMALL} 12800",
    ),
    "memory": ("ppo_rnn", f"--num-steps 8 --num-minibatches 4 --rnn-size 8 {SMALL} 12800"),
    "dqn": ("dqn", f"--batch-size 64 --learning-starts 64 {SMALL} 3200"),
    "sac": ("sac", f"--batch-size 64 --learning-starts 64 {SMALL} 1600"),
    "crossq": (
        "sac",
        "--recipe crossq --batch-size 64 --learning-starts 64 --critic-hidden-sizes 8 "
        f"{SMALL} 1600",
    ),
    "members": (
        "ppo",
        f"--num-steps 8 --num-minibatches 4 --population 4 --sharding members --pbt {SMALL} 6400",
    ),
}


def cases():
    for name in RUNS:
        for count in (2, 4):
            fast = (name, count) == ("pqn, memory", 2)
            yield pytest.param(
                name,
                count,
                id=f"{name}, {count} devices",
                marks=[] if fast else [pytest.mark.slow],
            )


@pytest.mark.parametrize(("name", "num_devices"), cases())
def test_a_run_on_cpu_devices_ends(name, num_devices, tmp_path):
    """In a process with no more threads than devices, and as XLA compiles for users."""
    algorithm, words = RUNS[name]
    script = ROOT / "algos" / f"{algorithm}_pmap.py"
    words = f"{words} --num-devices {num_devices} --eval-episodes 4 --quiet --run-dir".split()
    try:
        process = run_python(
            script,
            *words,
            tmp_path / "run",
            timeout=400,
            XLA_FLAGS="",
        )
    except TimeoutExpired:
        pytest.fail(
            f"{name} on {num_devices} devices did not end: do its devices wait for each other?"
        )
    assert process.returncode == 0, process.stderr[-2000:]
