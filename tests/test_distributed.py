"""Several processes that train together: equal to one process, exact resumes, and the end of one ends them all."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import ppo_pmap as ppo
import ppo_rnn_pmap as ppo_rnn
import pytest
import sac_pmap as sac
from cli_helpers import (
    ROOT,
    SMALL_FLAGS,
    STEPS,
    check_words,
    checkpoint_steps,
    environment,
    in_process,
    read_result,
    read_rows,
    read_until,
    refusal,
    start_script,
)
from helpers import relative_difference

from common.runs.checkpoint_files import read

FLAGS = f"{SMALL_FLAGS} --num-devices 4 --log-interval {4 * STEPS} --quiet"
RUNS = {
    ppo_rnn: f"{FLAGS} --rnn-size 8",
    sac: """
        --env Pendulum-v1 --num-envs 4 --hidden-sizes 8 --batch-size 16 --learning-starts 40 --buffer-size 400
        --utd-ratio 0.25 --eval-episodes 4 --eval-interval 0 --checkpoint-interval 0 --log-interval 200 --num-devices 4
        --quiet
    """,
}


def start_both(
    *words: Any, algorithm: ModuleType = ppo, own: Callable[[int], tuple] = lambda i: ()
) -> list[subprocess.Popen]:
    """Two processes with these flags, and each with its `own`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    which = ("--coordinator", address, "--num-processes", 2, "--process-id")
    script = ROOT / "algos" / f"{algorithm.__name__}.py"
    return [start_script(*words, *which, i, *own(i), cwd=ROOT, script=script) for i in range(2)]


def ends(processes: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    """Exit codes and output of processes that end."""
    said = [process.communicate(timeout=240)[0] for process in processes]
    return [process.returncode for process in processes], said


def run_both(*words: Any, algorithm: ModuleType = ppo) -> list[str]:
    codes, said = ends(start_both(*words, algorithm=algorithm))
    assert codes == [0, 0], "\n".join(said)
    return said


def saved(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    return read(run_dir / "checkpoints" / str(step))


@pytest.mark.parametrize(("algorithm", "steps"), [(ppo_rnn, 4 * STEPS), (sac, 200)])
def test_x1_two_processes_with_two_devices_equal_one(algorithm, steps, tmp_path):
    words = *RUNS[algorithm].split(), "--total-timesteps", steps
    run_both(*words, "--run-dir", tmp_path / "two", algorithm=algorithm)
    assert not in_process(*words, "--num-devices", 1, "--run-dir", tmp_path / "one", algorithm=algorithm)
    check_close(tmp_path / "two", tmp_path / "one", steps)


def test_runs_go_on_with_as_many_processes_to_the_bit_and_with_one(tmp_path):
    half, whole = 4 * STEPS, 8 * STEPS
    words = *FLAGS.split(), "--total-timesteps", whole, "--checkpoint-interval", half, "--stop-at-return", 1e9
    words += "--eval-interval", half
    said = run_both(*words, "--run-dir", tmp_path / "two")
    assert not in_process(*words, "--num-devices", 1, "--run-dir", tmp_path / "one")
    check_close(tmp_path / "two", tmp_path / "one", whole)
    assert [text for text in said if "return" in text] == []  # both are quiet
    for name in ("again", "alone"):
        shutil.copytree(tmp_path / "two", tmp_path / name)
        for file in (tmp_path / name / "checkpoints" / str(whole)).rglob("d/*"):
            file.write_bytes(b"damaged")
        (tmp_path / name / "DONE").unlink()
    first, second = run_both("--resume", tmp_path / "again", "--quiet")
    assert f"checkpoint {whole} is damaged and was skipped" in " ".join(first.split())
    assert "warning" not in second
    again, two = (read_result(tmp_path / name) for name in ("again", "two"))
    assert again["state_sha256"] == two["state_sha256"]
    assert not in_process("--resume", tmp_path / "alone", "--num-devices", 1, "--quiet")
    check_close(tmp_path / "alone", tmp_path / "two", whole)


def test_a_signal_and_a_kill_at_one_process_end_both(tmp_path):
    words = *FLAGS.replace("--quiet", "").split(), "--total-timesteps", 10**8, "--log-interval", 10 * STEPS
    run_dir = tmp_path / "run"
    first, second = start_both(*words, "--run-dir", run_dir)
    read_until(first, "step ")
    second.send_signal(signal.SIGTERM)
    codes, said = ends([first, second])
    assert codes == [143, 143]
    stopped = read_result(run_dir)
    assert stopped["status"] == "interrupted"
    assert checkpoint_steps(run_dir) == [stopped["env_steps"]]
    assert "step " not in said[1]  # the first alone speaks
    first, second = start_both("--resume", run_dir)
    read_until(first, "step ")
    second.kill()
    codes, said = ends([first, second])
    assert codes[1] == -signal.SIGKILL
    assert codes[0] in (1, -signal.SIGABRT)  # JAX's runtime may notice first
    reasons = {1: "error: process 0 of 2 has lost another one", -signal.SIGABRT: "another task died"}
    check_words(said[0], reasons[codes[0]])
    assert "Traceback" not in said[0]
    assert checkpoint_steps(run_dir) == [stopped["env_steps"]]
    assert not in_process("--resume", run_dir, "--stop-after", stopped["env_steps"] + STEPS, "--num-devices", 1)


SRUN = """#!/bin/bash
shift  # a flag of its own
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"
code=$?
wait $! || exit $?
exit $code
"""
"""Starts two tasks on this machine."""


def test_the_script_for_slurm_runs_a_job_in_slices_until_it_has_finished(tmp_path):
    """Its own text, with stand-ins for `srun` and `scontrol`, and a smaller run."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.DOTALL)
    small = " ".join(f"{FLAGS} --num-devices 2 --total-timesteps {8 * STEPS}".split())
    for old, new in {
        "RUN=runs/ant": f"RUN={tmp_path / 'run'}",
        "--env brax:ant --num-envs 8192": small,
        "--max-seconds 13500": "--max-seconds 0.1",
        "python algos": f"{sys.executable} algos",
    }.items():
        assert old in script
        script = script.replace(old, new)
    for name, text in {"srun": SRUN, "scontrol": f'#!/bin/bash\necho "$@" >> {tmp_path}/queued'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script)
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID=str(os.getpid()))
    said, queued = "", tmp_path / "queued"
    for times in range(1, 4):
        job = subprocess.run(["bash", tmp_path / "job.sh"], cwd=ROOT, env=env, capture_output=True, text=True)
        said += job.stdout + job.stderr
        assert job.returncode == 0, said
        if (tmp_path / "run" / "DONE").exists():
            break
        assert queued.read_text() == f"requeue {env['SLURM_JOB_ID']}\n" * times
    assert read_result(tmp_path / "run")["env_steps"] == 8 * STEPS
    assert times > 1
    assert len(queued.read_text().splitlines()) == times - 1


def test_processes_with_different_flags_are_refused(tmp_path):
    codes, said = ends(start_both(*FLAGS.split(), "--run-dir", tmp_path / "run", own=lambda i: ("--seed", i)))
    assert codes == [2, 2]
    assert "error: the command or the code of process 1 is not that of process 0" in said[0]
    assert "error: process 1 of 2: the command or the code of process 1 is not that of process 0" in said[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--process-id 1", "--process-id needs --coordinator"),
        ("--coordinator here --num-processes 2 --process-id 0", "--coordinator here, host:port"),
        ("--coordinator a:1", "--coordinator needs --num-processes and --process-id"),
        ("--coordinator a:1 --num-processes 2 --process-id 2", "--process-id 2, numbered from 0 to 1"),
        ("--distributed --sharding shard_map", "several processes train with --sharding pmap only, it is shard_map"),
        ("--distributed", "JAX has started already, --distributed has to come before"),
    ],
)
def test_processes_that_cannot_meet_are_refused(flags, words):
    check_words(refusal(ppo.train, ppo.Args, flags.split()), words)


def check_close(run_dir: Path, other: Path, step: int) -> None:
    """Both runs have saved the same state but for rounding, evaluated it alike and written as many rows."""
    ours, others = saved(run_dir, step), saved(other, step)
    assert ours.keys() == others.keys()
    close = [name for name in ours if name.startswith(("learner/", "shard/"))]
    assert relative_difference({name: ours[name] for name in close}, {name: others[name] for name in close}) < 1e-4
    assert [row["env_steps"] for row in read_rows(run_dir)] == [row["env_steps"] for row in read_rows(other)]
    returns = [read_result(path)["eval/return_mean"] for path in (run_dir, other)]
    assert returns[0] == pytest.approx(returns[1], rel=1e-3)
