"""What the benchmarks share: timing a training program, and the rate of a matrix product as a scale."""

import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.cli.members import Members
from common.device.compilation import compile_together
from common.device.programs import Algorithm, for_seeds, over_devices
from common.device.seeds import arrays_of
from common.envs.environment import Env
from common.runs.directory import versions

REPEATS = 5
NO_KERNELS = {"", "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}


class Timing(NamedTuple):
    """What training costs; None is what the compiler does not tell."""

    compile_seconds: float
    update_seconds: float
    memory: int | None  # bytes of a device: the state of training, and what an update needs beside it
    kernels: int | None  # operations that a device is given one by one in an update


class Cost(NamedTuple):
    """What an update of so many environment steps costs, beside what its networks alone would."""

    steps: int
    timing: Timing
    floor: float  # seconds


def time_training(
    algorithm: Algorithm,
    env: Env,
    devices: list[jax.Device],
    updates: int,
    skip: int = 0,
    members: Members | None = None,
    sharding: str = "pmap",
) -> Timing:
    """What `updates` updates cost after the first `skip` ones, of one agent or of all `members`."""
    members = members or Members([0], {})
    groups = len(devices) if sharding == "members" else 1
    functions = for_seeds(algorithm, env, len(members.seed) // groups, eval_episodes=128)
    seeds = arrays_of(members, len(devices), sharding)
    programs, _ = over_devices(functions, devices, sharding, seeds)
    began = time.perf_counter()
    programs = compile_together(programs, seeds, jax.eval_shape(programs.init, seeds), np.int32(0))
    compile_seconds = time.perf_counter() - began
    state, *_ = programs.update(programs.init(seeds), np.int32(skip))

    def run():
        nonlocal state
        state, *_ = programs.update(state, np.int32(updates))
        return state

    memory, text = programs.update.memory_analysis(), programs.update.as_text()
    return Timing(
        compile_seconds=compile_seconds,
        update_seconds=median_seconds(run) / updates,
        memory=memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        kernels=text and count_kernels(text),
    )


def record(benchmark: str, devices: list[jax.Device], sizes: dict[str, Any], cost: Cost, rate: float) -> dict[str, Any]:
    """What every benchmark of a training program prints; `rate` is that of matrix products."""
    timing = cost.timing
    return {
        "benchmark": benchmark,
        "versions": versions(),
        "devices": [str(device) for device in devices],
        "sizes": sizes,
        "compile_seconds": round(timing.compile_seconds, 2),
        "steps_per_second": round(cost.steps / timing.update_seconds, 1),
        "floor_steps_per_second": round(cost.steps / cost.floor, 1),
        "share_of_floor": round(cost.floor / timing.update_seconds, 3),
        "memory_bytes": timing.memory,
        "kernels_per_update": timing.kernels,
        "matmul_512_gflops": round(rate),
    }


def count_kernels(program: str) -> int:
    """Operations of a compiled program, in XLA's text, that the device is given one by one.

    What is in a loop counts as often as it runs; where XLA does not know how often, as in the loop over updates, once.
    """
    bodies, body = {}, []
    for line in program.splitlines():
        if heading := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            body = bodies["ENTRY" if heading[1] else heading[2]] = []
        elif " = " in line:
            body.append(line)

    def count(name: str) -> int:
        return sum(kernels_of(line) for line in bodies.get(name, []))

    def kernels_of(line: str) -> int:
        kind = (re.search(r" ([a-z][a-z0-9-]*)\(", line) or ["", ""])[1]
        called = re.findall(r"(?:body|to_apply|true_computation|false_computation)=%?([\w.-]+)", line)
        for names in re.findall(r"branch_computations=\{(.*?)\}", line):
            called += re.findall(r"[\w.-]+", names)
        if kind == "while":
            times = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            return int(times[1] if times else 1) * sum(map(count, called))
        if kind == "conditional":
            return max(map(count, called), default=0)
        if kind == "call":
            return sum(map(count, called))
        return kind not in NO_KERNELS and not kind.endswith("-done")  # the end of what `-start` began

    return count("ENTRY")


def matmul_rate() -> float:
    """GFLOP/s of a 512 x 512 float32 matrix product, the scale on which speeds of different machines compare."""
    product = jax.jit(lambda a, b: a @ b)
    matrix = jnp.ones((512, 512))

    def run():
        result = matrix
        for _ in range(100):
            result = product(matrix, matrix)
        return result

    return 100 * 2 * 512**3 / median_seconds(run) / 1e9


def median_seconds(run: Callable[[], Any]) -> float:
    """Median over warm runs, each until its result is ready."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)
