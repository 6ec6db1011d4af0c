"""Compilation: the persistent cache, and compiling a run's programs side by side."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jaxlib.utils
import numpy as np

from common.device import cluster

FATAL = 3  # among absl's levels of what is logged


def cache_directory() -> Path:
    """Where compiled programs are kept between runs: `$XDG_CACHE_HOME/pmaprl` or `~/.cache/pmaprl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pmaprl"


def set_up_cache() -> None:
    """Use the persistent cache for every program that takes over a tenth of a second.

    A cache directory that the user has configured for JAX (JAX_COMPILATION_CACHE_DIR) is left in place, and with
    JAX_ENABLE_COMPILATION_CACHE=false there is no cache.
    """
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@contextmanager
def without_alarms() -> Iterator[None]:
    """Inside, XLA's C++ says nothing but what it dies of: its alarms about slow compiling help nobody who trains."""
    set_level = getattr(jaxlib.utils, "absl_set_min_log_level", lambda level: None)  # not in early versions
    set_level(FATAL)
    try:
        yield
    finally:
        before = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
        set_level(int(before) if before.isdigit() else 1)


@without_alarms()
def compile_together(algorithm: Any, members: Any, state: Any, example: Any) -> Any:
    """The record `algorithm` with its programs compiled in parallel, from the shapes of its `state` and of what
    `update` takes beside it. An `evaluate` that is no program stays as it is, and so do all where there are several
    processes: `pmap` puts their arrays together in a call only. See `compile_by_call`; an update that takes a batch is
    called here, with zeros and a state of its own.
    """
    if cluster.count() > 1:
        if not _is_number(example):
            batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), example)
            jax.block_until_ready(algorithm.update(algorithm.init(members), batch))
        return algorithm
    # The longest compilation first: tracing the others overlaps with it.
    jobs = {"update": ((state, example), 1), "init": ((members,), 0), "evaluate": ((state, np.int32(0)), 1)}
    jobs = {name: job for name, job in jobs.items() if hasattr(getattr(algorithm, name), "lower")}
    with ThreadPoolExecutor(len(jobs)) as pool:
        compiled = {
            name: pool.submit(getattr(algorithm, name).lower(*example).compile, _options(level))
            for name, (example, level) in jobs.items()
        }
        return algorithm._replace(**{name: program.result() for name, program in compiled.items()})


@without_alarms()
def compile_by_call(update: Any, state: Any, example: Any) -> Any:
    """With several processes, compile an `update` that takes a number of updates by a call of none.

    Returns `state`, which is not changed.
    """
    return update(state, np.zeros_like(example))[0] if cluster.count() > 1 and _is_number(example) else state


def _is_number(example: Any) -> bool:
    return isinstance(example, np.integer)


def _options(level: int) -> dict[str, int]:
    """LLVM's optimization level on a CPU, unless XLA_FLAGS name one.

    1 runs as fast as the default and compiles a quarter sooner.
    """
    flag = "xla_backend_optimization_level"
    named = flag in os.environ.get("XLA_FLAGS", "")
    return {flag: level} if jax.default_backend() == "cpu" and not named else {}
