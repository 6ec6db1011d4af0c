"""Helpers of the tests that use the kit as a user does: the command line, run directories, tiny
environments.
"""

import atexit
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from pmaprl.cli.command import exit_code, parse

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "algos" / "ppo_pmap.py"
STEPS = 64  # environment steps per update with SMALL
SMALL_FLAGS = """
    --hidden-sizes 8 --num-envs 8 --num-steps 8 --num-minibatches 2 --update-epochs 2
    --eval-episodes 8 --num-devices 1 --lr-schedule constant --eval-interval 0
    --checkpoint-interval 0
"""
SMALL = SMALL_FLAGS.split()
"""A run that starts fast and whose program is the same whatever --total-timesteps is."""
# To import
SLOW = {"jax", "flax", "optax", "orbax", "gymnax", "gymnasium", "envpool", "matplotlib"}
# Later versions end at the unknown flag
HAS_EMITTERS = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
FAST_COMPILER = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
FAST_COMPILER += HAS_EMITTERS * " --xla_cpu_use_fusion_emitters=false"
"""Flags of XLA with which programs compile in a quarter of the time, and do the same more
slowly.
"""
IN_NO_PROGRAM = {
    "seed",
    "run_dir",
    "resume",
    "init_from",
    "overwrite",
    "quiet",
    "stop_after",
    "max_seconds",
    "gif",
}
IN_NO_PROGRAM |= {
    "stop_at_return",
    "log_interval",
    "eval_interval",
    "checkpoint_interval",
    "keep_checkpoints",
}
IN_NO_PROGRAM |= {
    "keep_best",
    "resume_or_start",
    "save_buffer",
    "save_envs",
    "tensorboard",
    "wandb",
    "log_each",
}
"""Flags that no compiled program depends on."""


CACHE_HOME = "CACHE_HOME_OF_THE_TESTS"
"""Names one cache folder for the child processes of all processes that test: only the first of them
compiles.
"""
if CACHE_HOME not in os.environ:
    os.environ[CACHE_HOME] = tempfile.mkdtemp(prefix="cache-home-")
    atexit.register(shutil.rmtree, os.environ[CACHE_HOME], ignore_errors=True)


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child process: a CPU, the shared cache, a fast compiler, no other
    setting of the tests.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))
    }
    fixed = {
        "PYTHONPATH": str(ROOT / "common"),
        "XDG_CACHE_HOME": os.environ[CACHE_HOME],
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "200",
    }
    return (
        inherited | fixed | {"XLA_FLAGS": FAST_COMPILER, "PYTHONDONTWRITEBYTECODE": "1"} | changes
    )


def command(*words: Any, script: Path = SCRIPT) -> list[str]:
    return [sys.executable, str(script), *map(str, words)]


def run_python(
    *words: Any, cwd: Path = ROOT, timeout: float = 240, **changes: str
) -> subprocess.CompletedProcess:
    """Run `python WORDS` and wait; its output is text."""
    words = [sys.executable, *map(str, words)]
    env = environment(**changes)
    return subprocess.run(
        words,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def slow_imports(*words: Any, **how: Any) -> tuple[subprocess.CompletedProcess, set[str]]:
    """Run `python WORDS`; returns the process, and which slow packages it has imported."""
    process = run_python("-X", "importtime", *words, **how)
    names = {
        line.rsplit("|", 1)[1].strip().split(".")[0]
        for line in process.stderr.splitlines()
        if "|" in line
    }
    assert "tyro" in names  # or this sees nothing
    return process, names & SLOW


def start_script(*words: Any, cwd: Path, script: Path = SCRIPT, **changes: str) -> subprocess.Popen:
    """Start the script in the background, stdout and stderr together in one pipe."""
    how = {
        "cwd": cwd,
        "env": environment(PYTHONUNBUFFERED="1", **changes),
        "text": True,
    }
    return subprocess.Popen(
        command(*words, script=script),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **how,
    )


def read_until(process: subprocess.Popen, start: str) -> str:
    """Read the output of a process up to the first line that starts with `start`; returns that
    line.
    """
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(
        f"no line starts with {start!r}; exit code {process.wait()}; output:\n{''.join(seen)}"
    )


def succeed(process: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    assert process.returncode == 0, (
        f"{process.args} exited with {process.returncode}:\n{process.stderr[-3000:]}"
    )
    return process


def in_process(*words: Any, algorithm: ModuleType | None = None) -> int:
    """The exit code of PPO, or of another algorithm, with these flags, trained in this process."""
    algorithm = algorithm or import_module("pmaprl.algos.ppo_pmap")  # starts JAX
    return exit_code(algorithm.train, parse(algorithm.Args, list(map(str, words))))


def refusal(command: Callable[[Any], Any], args_class: type, words: list[str]) -> str:
    """Why a command, run in this process, refuses these words: the one sentence on stderr, its exit
    code being 2.
    """
    stderr = io.StringIO()
    with redirect_stderr(stderr), redirect_stdout(io.StringIO()):
        try:
            code = exit_code(command, parse(args_class, words))
        except SystemExit as end:
            code = end.code
    assert code == 2, f"exit code {code}; stderr: {stderr.getvalue()}"
    return only_message(stderr.getvalue())


def only_message(stderr: str) -> str:
    """The one error in the output of a command, its lines joined; no traceback, and no second
    message.
    """
    assert "Traceback" not in stderr
    messages = re.findall(r"^error: .*", stderr, re.MULTILINE)
    assert len(messages) == 1, f"{len(messages)} messages: {stderr}"
    assert not set(stderr) & set("│╭╰─╮╯"), f"a box around it: {stderr}"
    return " ".join(stderr.split())


def check_words(message: str, wanted: str) -> None:
    """The words, with commas between them, are in the message, whatever line ends break them."""
    for word in wanted.split(", "):
        assert word.replace(" ", "") in message.replace(" ", ""), (
            f"{word!r} is missing in: {message}"
        )


def strict_json(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are errors, for no int is called so."""
    return json.loads(text, parse_constant=int)


def read_result(run_dir: Path) -> dict[str, Any]:
    return strict_json((run_dir / "result.json").read_text())


def read_config(run_dir: Path) -> dict[str, Any]:
    return strict_json((run_dir / "config.json").read_text())


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints, sorted; folders of an unfinished save are left out."""
    return sorted(int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdigit())


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below `folder` with a checksum of its content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
