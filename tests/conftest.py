"""Eight virtual CPU devices and a fast compiler for every test process, compiled programs kept in
pytest's cache.
"""

import functools
import gc
import os
from pathlib import Path
from typing import Any

import jax
import pytest
from cli_helpers import FAST_COMPILER, HAS_EMITTERS, IN_NO_PROGRAM
from xdist.scheduler import LoadFileScheduling

import pmaprl.device.programs

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILER}"
options_of_users = pmaprl.device.programs._options
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # starts the backend, so that no run can choose another number
# Programs are many small objects: looking for cycles took a sixth of Python's time
gc.set_threshold(50_000, 20, 20)

LONGEST_FIRST = (
    "invariants",
    "flags",
    "faults",
    "sac",
    "envs",
    "host",
    "appo",
    "cli",
    "export",
    "policy",
)
LONGEST_FIRST += ("render", "common", "bad_input", "maths", "plot", "distributed", "notebooks")
# Their tests start processes and share nothing
IN_ANY_PROCESS = {"tests/test_distributed.py", "tests/test_notebooks.py"}
SAME_PROCESS = dict.fromkeys(
    ["tests/test_policy.py", "tests/test_strangers.py"],
    "tests/test_export.py",
)  # they share what `trained` trains


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long start first, those that are not listed before all others: both processes
    end together.
    """
    names = {item: item.path.stem.removeprefix("test_") for item in items}
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(names[item], -1))


class WholeFiles(LoadFileScheduling):
    """A scheduler that gives most files to one process each, for their tests share what they have
    trained and compiled.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return nodeid if file in IN_ANY_PROCESS else SAME_PROCESS.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeFiles:
    return WholeFiles(config, log)


@pytest.fixture
def users_compiler(monkeypatch):
    """Compile the programs of a run as they are compiled outside the tests: for what compilers may
    break.
    """
    monkeypatch.delenv("XLA_FLAGS")  # XLA has read them
    emitters = {"xla_cpu_use_fusion_emitters": True} if HAS_EMITTERS else {}
    monkeypatch.setattr(
        pmaprl.device.programs,
        "_options",
        lambda level: options_of_users(level) | emitters,
    )


COMPILED = {}  # the newest of `shared_programs`


@pytest.fixture
def shared_programs(monkeypatch):
    """Runs that differ only in what no program depends on share their programs: tracing is most of
    a small run.

    Environments are the same if their names are. What a test patches inside a program may have no
    effect.
    """
    from pmaprl.runs import run, setup

    begin = setup.Setup.__init__
    compile_together = run.compile_together
    key = ()

    def noting(self, args, script, env, devices, *more):
        nonlocal key
        constant = vars(args).get("lr_schedule") == "constant" and not vars(args).get(
            "ent_fraction"
        )
        without = IN_NO_PROGRAM | ({"total_timesteps"} if constant else set())
        flags = {name: value for name, value in vars(args).items() if name not in without}
        key = (
            script,
            type(args),
            env.name,
            len(devices),
            repr(flags),
            repr(pmaprl.device.programs._options(1)),
        )
        begin(self, args, script, env, devices, *more)

    def sharing(*algorithm_and_shapes):
        if key not in COMPILED:
            while len(COMPILED) > 3:
                del COMPILED[next(iter(COMPILED))]
            COMPILED[key] = compile_together(*algorithm_and_shapes)
        return COMPILED[key]

    monkeypatch.setattr(setup.Setup, "__init__", noting)
    monkeypatch.setattr(run, "compile_together", sharing)


@pytest.fixture(autouse=True)
def bounded_mappings():
    """Every compiled program maps memory; a process has 65,530 mappings, and crashes without a word
    beyond them.
    """
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Run directory, environment and result of each of TRAINED, trained when first asked for."""
    from helpers import train_tiny  # starts JAX, which must have eight devices by then

    return functools.cache(
        lambda name: train_tiny(name, tmp_path_factory.mktemp("trained") / name.replace(" ", "-"))
    )
