"""Helpers of the tests that use the kit as a user does: the command line, run directories, tiny environments."""

import atexit
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "algos" / "ppo_pmap.py"
STEPS = 64  # environment steps per update with SMALL
SMALL_FLAGS = """
    --hidden-sizes 8 --num-envs 8 --num-steps 8 --num-minibatches 2 --update-epochs 2 --eval-episodes 8 --num-devices 1
    --no-anneal-lr --eval-interval 0 --checkpoint-interval 0
"""
SMALL = SMALL_FLAGS.split()
"""A run that starts fast and whose program is the same whatever --total-timesteps is."""
HAS_EMITTERS = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)  # later versions end at the unknown flag
FAST_COMPILER = "--xla_backend_optimization_level=0" + HAS_EMITTERS * " --xla_cpu_use_fusion_emitters=false"
"""Flags of XLA with which programs compile in a quarter of the time, and do the same more slowly."""


@functools.cache
def cache_home() -> Path:
    """One cache folder for all child processes of this test session, so that only the first of them compiles."""
    folder = Path(tempfile.mkdtemp(prefix="cache-home-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child process: a CPU, the shared cache, nothing of what the tests set for themselves."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    fixed = {"XDG_CACHE_HOME": str(cache_home()), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    return inherited | fixed | {"PYTHONDONTWRITEBYTECODE": "1"} | changes


def command(*words: Any, script: Path = SCRIPT) -> list[str]:
    return [sys.executable, str(script), *map(str, words)]


def run_script(*words: Any, cwd: Path, timeout: float = 240, script: Path = SCRIPT, **changes: str):
    """Run the script with these flags and wait; returns the CompletedProcess, output as text."""
    return subprocess.run(
        command(*words, script=script),
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_script(*words: Any, cwd: Path, script: Path = SCRIPT, **changes: str) -> subprocess.Popen:
    """Start the script in the background, stdout and stderr together in one pipe."""
    return subprocess.Popen(
        command(*words, script=script),
        cwd=cwd,
        env=environment(PYTHONUNBUFFERED="1", **changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(process: subprocess.Popen, start: str) -> str:
    """Read the output of a process up to the first line that starts with `start`; returns that line."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(f"no line starts with {start!r}; exit code {process.wait()}; output:\n{''.join(seen)}")


def succeed(process: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    assert process.returncode == 0, f"{process.args} exited with {process.returncode}:\n{process.stderr[-3000:]}"
    return process


def strict_json(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_result(run_dir: Path) -> dict[str, Any]:
    return strict_json((run_dir / "result.json").read_text())


def read_config(run_dir: Path) -> dict[str, Any]:
    return strict_json((run_dir / "config.json").read_text())


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints, sorted; folders of an unfinished save are left out."""
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below `folder` with a checksum of its content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# -------------------------------------------------------------------------------------------- tiny environments


def _toy_class() -> type:
    """Made on first use: importing gymnax starts JAX, which must not happen while tests are collected."""
    import jax
    import jax.numpy as jnp
    from flax import struct
    from gymnax.environments import spaces

    @struct.dataclass
    class ToyParams:
        max_steps_in_episode: int = 4
        bonus: float = 0.0
        poison: int = 0  # from this many steps on the reward is NaN; 0 is never
        fast: bool = False

    class Toy:
        """Episodes of 4 or 5 steps, ended at random by termination or truncation; the reward is the action's number."""

        name = "Toy"
        default_params = ToyParams()

        def observation_space(self, params):
            return spaces.Box(0.0, 8.0, (2,), jnp.float32)

        def action_space(self, params):
            return spaces.Discrete(3)

        def reset(self, key, params):
            position = jax.random.randint(key, (), 0, 2).astype(jnp.float32)
            return jnp.stack([position, 1.0]), (position, jnp.int32(0))

        def step(self, key, state, action, params):
            position, steps = state
            position, steps = position + 1.0, steps + 1
            poisoned = (params.poison > 0) & (steps > params.poison)
            noise = jax.random.uniform(key)
            reward = jnp.where(poisoned, jnp.nan, action + params.bonus + 0.1 * noise)
            done = position > params.max_steps_in_episode
            final = jnp.stack([position, 1.0])
            first, (start, _) = self.reset(key, params)
            obs = jnp.where(done, first, final)
            state = (jnp.where(done, start, position), steps)
            return obs, state, reward, done & (noise > 0.5), done & (noise <= 0.5), {"final_observation": final}

    return Toy


@functools.cache
def toy() -> Any:
    """A factory for --env cli_helpers:toy."""
    return _toy_class()()


def long_toy() -> Any:
    """The same with longer episodes, as a pair (environment, parameters)."""
    return toy(), toy().default_params.replace(max_steps_in_episode=6)


def poison() -> Any:
    """Its reward is NaN from step 41 of each environment on."""
    return toy(), toy().default_params.replace(poison=40)


class Recorder:
    """Stands in for an optional package: it records calls, and fails on call number `fail_at`."""

    def __init__(self, fail_at: int = 0):
        self.calls: list[tuple[str, tuple, dict]] = []
        self.fail_at = fail_at

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if len(self.calls) == self.fail_at:
                raise RuntimeError("the recorder was told to fail")
            return self

        return call

    def names(self) -> set[str]:
        return {name for name, _, _ in self.calls}
