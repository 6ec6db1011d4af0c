"""What the benchmarks share: timing a training program, and the rate of a matrix product as a scale."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.device.compilation import compile_together
from common.device.programs import Algorithm, for_seeds, pmapped
from common.envs.environment import Env

REPEATS = 5


def time_training(
    algorithm: Algorithm, env: Env, devices: list[jax.Device], updates: int, skip: int = 0
) -> tuple[float, float]:
    """Seconds to compile, and seconds per update of one seed after the first `skip` ones."""
    programs = pmapped(for_seeds(algorithm, env, num_seeds=1, eval_episodes=128), devices)
    seeds = np.zeros((len(devices), 1), np.int32)
    began = time.perf_counter()
    programs = compile_together(programs, seeds, jax.eval_shape(programs.init, seeds), np.int32(0))
    compile_seconds = time.perf_counter() - began
    state, *_ = programs.update(programs.init(seeds), np.int32(skip))

    def run():
        nonlocal state
        state, *_ = programs.update(state, np.int32(updates))
        return state

    return compile_seconds, median_seconds(run) / updates


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
