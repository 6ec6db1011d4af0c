"""Compilation: the persistent cache, and compiling a run's programs side by side."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np


def cache_directory() -> Path:
    """Where compiled programs are kept between runs: `$XDG_CACHE_HOME/pmaprl` or `~/.cache/pmaprl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pmaprl"


def set_up_cache(enabled: bool) -> None:
    """Use the persistent cache for every program that takes over a tenth of a second, or no cache at all.

    A cache directory that the user has configured for JAX is left in place.
    """
    jax.config.update("jax_enable_compilation_cache", enabled)
    if enabled and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def compile_together(init: Any, update: Any, evaluate: Any, seeds: np.ndarray) -> tuple[Any, Any, Any]:
    """The three programs of an algorithm, compiled in parallel from the shapes alone."""
    state = jax.eval_shape(init, seeds)
    arguments = (init, (seeds,)), (update, (state, np.int32(0))), (evaluate, (state,))
    # Tracing holds the interpreter's lock, so the longest compilation starts first.
    with ThreadPoolExecutor(len(arguments)) as pool:
        jobs = {}
        for function, example in sorted(arguments, key=lambda job: job[0] is not update):
            jobs[function] = pool.submit(function.lower(*example).compile)
        return tuple(jobs[function].result() for function, _ in arguments)
