"""Several processes that train together: equal to one process, exact resumes, and the end of one ends them all."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import appo_pmap as appo
import asac_pmap as asac
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

ACTORS = """
    --vectorization sync --actor-threads 1 --num-steps 8 --envs-per-actor 4 --hidden-sizes 8 --eval-episodes 4
    --eval-interval 0 --checkpoint-interval 0 --lockstep
"""


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


def test_x1_actors_of_two_processes_are_those_of_one_with_twice_the_devices(tmp_path):
    words = *ACTORS.split(), "--env", "gymnasium:CartPole-v1", "--num-minibatches", 2, "--total-timesteps", 512
    words += "--log-interval", 128, "--quiet"
    run_both(*words, "--run-dir", tmp_path / "two", algorithm=appo)
    both = "--actor-devices", "0,1", "--learner-devices", "0,1"
    assert not in_process(*words, *both, "--run-dir", tmp_path / "one", algorithm=appo)
    check_close(tmp_path / "two", tmp_path / "one", 512)
    for row, other in zip(*(read_rows(tmp_path / name) for name in ("two", "one")), strict=True):
        same = [name for name in row if name.startswith(("episode/", "lag/", "batch/", "rollouts/trained"))]
        assert {name: row[name] for name in same} == {name: other[name] for name in same}


def test_a_signal_stops_processes_with_actors_in_the_middle_of_a_chunk(tmp_path):
    words = *ACTORS.replace("--lockstep", "").split(), "--env", "gymnasium:Pendulum-v1", "--utd-ratio", 0.25
    words += "--batch-size", 16, "--learning-starts", 64, "--buffer-size", 512, "--total-timesteps", 10**8
    first, second = start_both(*words, "--log-interval", 1280, "--run-dir", tmp_path, algorithm=asac)
    read_until(first, "step ")
    second.send_signal(signal.SIGTERM)
    codes, said = ends([first, second])
    assert codes == [143, 143], said
    result, row = read_result(tmp_path), read_rows(tmp_path)[-1]
    steps = row["env_steps"]
    assert 1280 < steps < 2560
    assert checkpoint_steps(tmp_path) == [steps] == [result["env_steps"]]
    assert row["replay/stored"] == steps == 32 * row["rollouts/trained"]
    assert row["gradient_updates"] == max(steps - 64, 0) // 4
    assert result["rollouts/produced"] == result["rollouts/trained"] + result["rollouts/discarded"]
    goes_on = "--resume", tmp_path, "--actor-devices", "0,1", "--stop-after", steps + 320, "--quiet"
    assert not in_process(*goes_on, algorithm=asac)
    assert read_rows(tmp_path)[-2]["replay/stored"] == steps + 320


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
