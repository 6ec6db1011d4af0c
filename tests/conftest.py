"""Eight virtual CPU devices for every test process, and compiled programs kept in pytest's cache between tests."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # starts the backend, so that no run can choose another number


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


@pytest.fixture(autouse=True)
def bounded_mappings():
    """Every compiled program maps memory; a process has 65,530 mappings, and crashes without a word beyond them."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
