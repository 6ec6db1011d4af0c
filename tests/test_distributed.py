"""Several processes that train together: equal to one process, exact resumes, and the end of one
ends them all.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import appo_pmap as appo
import numpy as np
import ppo_pmap as ppo
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
    only_message,
    read_result,
    read_rows,
    read_until,
    run_python,
    start_script,
)
from helpers import relative_difference

from pmaprl.runs.checkpoints import read

pytestmark = pytest.mark.slow
FLAGS = f"{SMALL_FLAGS} --num-devices 4 --log-interval {4 * STEPS} --quiet"
SAVED = 10 * STEPS  # steps between two checkpoints of a run that is killed
KILLED = (*FLAGS.replace("--quiet", "").split(), "--num-devices", 2, "--total-timesteps", 10**8)
KILLED += ("--log-interval", SAVED, "--checkpoint-interval", SAVED, "--keep-checkpoints", 0)
SAC = """
    --env Pendulum-v1 --num-envs 4 --hidden-sizes 8 --batch-size 16 --learning-starts 40
    --buffer-size 400 --utd-ratio 0.25 --eval-episodes 4 --eval-interval 0 --checkpoint-interval
    0 --log-interval 200 --num-devices 4 --quiet --total-timesteps 200
"""
ACTORS = """
    --vectorization sync --actor-threads 1 --num-steps 8 --envs-per-actor 4 --hidden-sizes 8
    --eval-episodes 4 --eval-interval 0 --checkpoint-interval 0 --lockstep
"""


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_both(
    *words: Any, algorithm=ppo, own=lambda i: (), where=lambda i: ROOT, address: str = ""
) -> list[subprocess.Popen]:
    """Two processes of an algorithm with these flags, and each with its `own`, in the folder that
    is its `where`.
    """
    address = address or free_address()
    script = ROOT / "algos" / f"{algorithm.__name__}.py"
    meet = [("--distributed", f"{address},{i}/2") for i in range(2)]
    return [start_script(*words, *meet[i], *own(i), cwd=where(i), script=script) for i in range(2)]


def ends(processes: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    """Exit codes and output of processes that end."""
    said = [process.communicate(timeout=240)[0] for process in processes]
    return [process.returncode for process in processes], said


def run_both(*words: Any, **how: Any) -> list[str]:
    codes, said = ends(start_both(*words, **how))
    assert codes == [0, 0], "\n".join(said)
    return said


def saved(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    return read(run_dir / "checkpoints" / str(step))


def test_x1_two_processes_with_two_devices_equal_one(tmp_path):
    run_both(*SAC.split(), "--run-dir", tmp_path / "two", algorithm=sac)
    assert not in_process(
        *SAC.split(),
        "--num-devices",
        1,
        "--run-dir",
        tmp_path / "one",
        algorithm=sac,
    )
    check_close(tmp_path / "two", tmp_path / "one", 200)


def test_runs_go_on_with_as_many_processes_to_the_bit_and_with_one(tmp_path):
    half = 4 * STEPS
    whole = 8 * STEPS
    words = *FLAGS.split(), "--total-timesteps", whole, "--checkpoint-interval", half
    words += "--stop-at-return", 1e9, "--eval-interval", half
    run_both(*words, "--run-dir", tmp_path / "two")
    for name in ("again", "one by one"):
        shutil.copytree(tmp_path / "two", tmp_path / name)
        for file in (tmp_path / name / "checkpoints" / str(whole)).rglob("d/*"):
            file.write_bytes(b"damaged")
        (tmp_path / name / "DONE").unlink()
    first, second = run_both("--resume", tmp_path / "again", "--quiet")
    assert f"checkpoint {whole} " in first
    assert "warning" not in second  # the first alone speaks
    again, two = (read_result(tmp_path / name) for name in ("again", "two"))
    assert again["state_sha256"] == two["state_sha256"]
    assert not in_process("--resume", tmp_path / "one by one", "--num-devices", 1, "--quiet")
    check_close(tmp_path / "one by one", tmp_path / "two", whole)


def test_a_signal_or_a_kill_at_one_process_ends_both(tmp_path):
    """The second process is stopped within a save, the first one in training; then the same command
    goes on, to the bit.
    """
    whole = tmp_path / "whole"
    disturbed = tmp_path / "disturbed"
    first, second = start_both(*KILLED, "--run-dir", whole)
    read_until(first, "step ")
    wait_for_checkpoint(whole, after=8 * SAVED)
    second.send_signal(signal.SIGTERM)
    codes, said = ends([first, second])
    stopped = read_result(whole)
    assert codes == [143, 143]
    assert stopped["status"] == "interrupted"
    assert checkpoint_steps(whole)[-1] == stopped["env_steps"]
    assert "step " not in said[1]  # the first alone speaks
    shutil.copytree(whole, disturbed)
    for step in checkpoint_steps(disturbed)[1:]:
        shutil.rmtree(disturbed / "checkpoints" / str(step))
    for victim in (1, 0):
        processes = start_both("--resume", disturbed)
        wait_for_checkpoint(
            disturbed,
            after=checkpoint_steps(disturbed)[-1],
            unfinished=victim == 1,
        )
        processes[victim].kill()
        codes, said = ends(processes)  # soon; without the first process JAX ends the others itself
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] in (1, -signal.SIGABRT), said
        assert "error: " in said[1 - victim] or "another task died" in said[1 - victim]
        assert "Traceback" not in said[1 - victim]
    common = set(checkpoint_steps(whole)) & set(checkpoint_steps(disturbed))
    assert len(common) > 2
    for step in common:
        ours = saved(disturbed, step)
        wanted = saved(whole, step)
        assert ours.keys() == wanted.keys()
        assert all(np.array_equal(x, wanted[name]) for name, x in ours.items())


def wait_for_checkpoint(run_dir: Path, after: int, unfinished: bool = False) -> None:
    """Until there is a newer one, and where `unfinished` another one is being saved."""
    until = time.monotonic() + 240
    while max(checkpoint_steps(run_dir), default=0) <= after:
        assert time.monotonic() < until
        time.sleep(0.01)
    while unfinished and all(path.name.isdigit() for path in (run_dir / "checkpoints").iterdir()):
        assert time.monotonic() < until
        time.sleep(0.001)


ALONE = (
    "SLURM_STEP_NODELIST=localhost SLURM_NTASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_PROCID=0 "
    "SLURM_LOCALID=0"
)


def test_the_script_for_slurm_runs_a_job_in_slices_until_it_has_finished(tmp_path):
    """Its own text, with stand-ins for `srun` and `scontrol`, and a smaller run."""
    (script,) = re.findall(
        r"```bash\n(#!/bin/bash.*?)```",
        (ROOT / "docs" / "scaling.md").read_text(),
        re.DOTALL,
    )
    for old, new in {
        "RUN=runs/ant": f"RUN={tmp_path / 'run'}",
        "--env brax:ant --num-envs 8192": f"{' '.join(FLAGS.split())} --num-devices 2 "
        f"--total-timesteps {8 * STEPS}",
        "--max-seconds 13500": "--max-seconds 0.1",
        "python algos": f"{sys.executable} algos",
    }.items():
        assert old in script
        script = script.replace(old, new)
    srun = f'#!/bin/bash\nshift  # a flag of its own\n{ALONE} exec "$@"'
    queue = f'#!/bin/bash\necho "$@" >> {tmp_path}/queued'
    for name, text in {"srun": srun, "scontrol": queue, "job.sh": script}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID=str(os.getpid()))
    slices = 0
    while not (tmp_path / "run" / "DONE").exists() and slices < 3:
        job = subprocess.run(
            ["bash", tmp_path / "job.sh"],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
        )
        assert job.returncode == 0, job.stdout + job.stderr
        slices += 1
    assert read_result(tmp_path / "run")["env_steps"] == 8 * STEPS
    assert slices > 1
    assert (tmp_path / "queued").read_text() == f"requeue {os.getpid()}\n" * (slices - 1)


def test_x1_actors_of_two_processes_are_those_of_one_with_twice_the_devices(tmp_path):
    words = (
        *ACTORS.split(),
        "--env",
        "gymnasium:InvertedPendulum-v5",
        "--num-minibatches",
        2,
        "--total-timesteps",
        512,
    )
    words += "--log-interval", 128, "--quiet", "--log-info", "reward_survive", "reward_survive_last"
    run_both(*words, "--run-dir", tmp_path / "two", algorithm=appo)
    both = "--actor-devices", "0,1", "--learner-devices", "0,1"
    assert not in_process(*words, *both, "--run-dir", tmp_path / "one", algorithm=appo)
    check_close(tmp_path / "two", tmp_path / "one", 512)
    assert read_rows(tmp_path / "two")[0]["env/reward_survive"] < 1  # it is 0 where an episode ends
    same = "episode/", "policy/lag", "batch/", "env/", "rollouts/trained"
    for row, other in zip(*(read_rows(tmp_path / name) for name in ("two", "one")), strict=True):
        assert all(row[name] == other[name] for name in row if name.startswith(same))


def test_a_signal_stops_processes_with_actors_at_the_same_update(tmp_path):
    words = (
        *ACTORS.replace("--lockstep", "").split(),
        "--env",
        "gymnasium:Pendulum-v1",
        "--utd-ratio",
        0.25,
    )
    words += (
        "--batch-size",
        16,
        "--learning-starts",
        64,
        "--buffer-size",
        512,
        "--total-timesteps",
        10**8,
    )
    first, second = start_both(*words, "--log-interval", 1280, "--run-dir", tmp_path, algorithm=sac)
    read_until(first, "step ")
    second.send_signal(signal.SIGTERM)
    codes, said = ends([first, second])
    assert codes == [143, 143], said
    result = read_result(tmp_path)
    row = read_rows(tmp_path)[-1]
    steps = row["env_steps"]
    assert steps >= 1280
    assert checkpoint_steps(tmp_path) == [steps] == [result["env_steps"]]
    assert row["replay/stored"] == steps == 32 * row["rollouts/trained"]
    assert row["gradient_updates"] == max(steps - 64, 0) // 4
    assert result["rollouts/produced"] == result["rollouts/trained"] + result["rollouts/discarded"]
    goes_on = "--resume", tmp_path, "--actor-devices", "0,1", "--stop-after", steps + 320, "--quiet"
    assert not in_process(*goes_on, algorithm=sac)
    assert read_rows(tmp_path)[-2]["replay/stored"] == steps + 320


@pytest.mark.parametrize("flag", ["--seed", "--run-dir"])
def test_a_process_with_a_different_flag_is_refused(flag, tmp_path):
    """A folder by one name may be two, and all processes have to write into one."""
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    first, second = start_both(
        *FLAGS.split(),
        "--run-dir",
        "run",
        own=lambda i: ("--seed", i * (flag == "--seed")),
        where=lambda i: tmp_path / str(i * (flag == "--run-dir")),
    )
    codes, said = ends([second])
    assert codes == [2]
    assert flag in only_message(said[0])
    assert flag in read_until(first, "warning: ")
    assert first.poll() is None  # one with the right flags can still come
    first.terminate()
    assert ends([first])[0] == [-signal.SIGTERM]
    assert not list(tmp_path.glob("*/run"))


def test_a_second_run_at_the_address_of_one_that_trains_ends_alone(tmp_path):
    address = free_address()
    train = *KILLED, "--run-dir", tmp_path / "first"
    first, second = start_both(*train, address=address)
    read_until(first, "step ")
    another = *KILLED, "--run-dir", tmp_path / "second"
    newcomers = [
        start_script(*words, "--distributed", f"{address},{place}", cwd=ROOT)
        for words, place in ((another, "0/2"), (another, "1/2"), (train, "1/2"), (train, "2/4"))
    ]
    codes, said = ends(newcomers)
    assert codes == [2] * len(newcomers)
    reasons = "cannot listen", "--run-dir", "already", "processes is 2 there"
    for text, reason in zip(said, reasons, strict=True):
        check_words(only_message(text), reason)
    steps = checkpoint_steps(tmp_path / "first")[-1]
    wait_for_checkpoint(tmp_path / "first", after=steps)
    second.send_signal(signal.SIGTERM)
    codes, said = ends([first, second])
    assert codes == [143, 143], said
    assert not (tmp_path / "second").exists()


def test_a_signal_between_the_meeting_and_the_run_is_not_lost():
    code = f"""
        import signal
        from pmaprl.algos.ppo_pmap import Args
        from pmaprl.machine import multihost
        with multihost.joined(Args(distributed="{free_address()},0/1"), run=dict()):
            signal.raise_signal(signal.SIGTERM)
    """
    assert run_python("-c", textwrap.dedent(code)).returncode == -signal.SIGTERM


def check_close(run_dir: Path, other: Path, step: int) -> None:
    """Both runs have saved the same state but for rounding, evaluated it alike and written as many
    rows.
    """
    ours = saved(run_dir, step)
    others = saved(other, step)
    assert ours.keys() == others.keys()
    close = [name for name in ours if name.startswith(("learner/", "run/", "actors/"))]
    assert (
        relative_difference(
            {name: ours[name] for name in close},
            {name: others[name] for name in close},
        )
        < 1e-4
    )
    assert [row["env_steps"] for row in read_rows(run_dir)] == [
        row["env_steps"] for row in read_rows(other)
    ]
    returns = [read_result(path)["eval/return_mean"] for path in (run_dir, other)]
    assert returns[0] == pytest.approx(returns[1], rel=1e-3)
