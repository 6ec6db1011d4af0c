"""Eight virtual CPU devices for every test process, and compiled programs kept in pytest's cache between tests."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # starts the backend, so that no run can choose another number


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
