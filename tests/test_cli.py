"""The command line and run directories as a user meets them: a process, its output and the
directory it leaves.
"""

import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import socket
import sys
from pathlib import Path
from subprocess import PIPE, Popen, run

import jax
import numpy as np
import pytest
from cli_helpers import (
    ROOT,
    SCRIPT,
    SMALL,
    STEPS,
    checkpoint_steps,
    command,
    environment,
    fingerprint,
    in_process,
    read_config,
    read_result,
    read_rows,
    run_python,
    succeed,
)
from pmaprl.algos.ppo_pmap import Args, train

from pmaprl.cli.command import parse
from pmaprl.cli.errors import UsageError
from pmaprl.comparison.selection import Selection, load
from pmaprl.runs.checkpoints import UNFINISHED
from pmaprl.runs.directory import earlier_flags
from pmaprl.runs.lock import LOCK, check_free, locked
from pmaprl.runs.metrics import TRAINING
from pmaprl.runs.results import has_ended_at, stored_evaluation

pytestmark = pytest.mark.usefixtures("shared_programs")
TOTAL = 16 * STEPS


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A working directory outside the repository, with a space in its name."""
    folder = tmp_path_factory.mktemp("work") / "my experiments"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def finished(workplace):
    """A run by path from another directory: the process, and its run directory (which tests must
    not change).
    """
    words = [
        *SMALL,
        "--total-timesteps",
        f"{TOTAL - 10}",
        "--log-interval",
        2 * STEPS,
        "--run-dir",
        "some runs/first",
    ]
    process = succeed(
        run_python(
            SCRIPT,
            *words,
            "--eval-interval",
            512,
            "--checkpoint-interval",
            300,
            cwd=workplace,
        )
    )
    return process, workplace / "some runs" / "first"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished[1], tmp_path / "copy"))


def boundaries_passed(interval: int, total: int, update: int) -> list[int]:
    """The first update's end at or after each multiple of `interval`."""
    return [
        step
        for step in range(update, total + 1, update)
        if step // interval > (step - update) // interval
    ]


def test_numbers_of_a_flag_may_have_commas_between_them():
    wanted = (64, 32)
    for words in (
        "--hidden-sizes 64,32",
        "--hidden-sizes=64,32",
        "--hidden-sizes 64 32",
        "--hidden-sizes 64, 32",
    ):
        assert (
            parse(Args, ["--env", "CartPole-v1", "--no-tuned", *words.split()]).hidden_sizes
            == wanted
        )


def test_a_run_prints_its_progress_and_the_command_that_continues_it(finished):
    """The command can be copied into a shell, from the same working directory, although the path
    has a space.
    """
    process, run_dir = finished
    assert any(Path(environment()["XDG_CACHE_HOME"]).glob("pmaprl/*-cache"))
    lines = process.stdout.strip().splitlines()
    assert sum(line.startswith("step ") for line in lines) >= 8
    assert process.stderr == ""
    words = shlex.split(lines[-1][lines[-1].index("python ") :])
    assert words[0] == "python"
    assert Path(words[1]) == SCRIPT
    args = parse(Args, [word if word != "some runs/first" else str(run_dir) for word in words[2:]])
    assert Path(args.resume) == run_dir
    assert args.total_timesteps > TOTAL


def test_the_run_directory_is_complete(finished):
    """And nothing in it is pickled."""
    run_dir = finished[1]
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "checkpoints",
        "curve.png",
        "result.json",
        "DONE",
    }
    config = read_config(run_dir)
    result = read_result(run_dir)
    assert config["args"].keys() == {field.name for field in dataclasses.fields(Args.at())}
    assert config["algorithm"] == "ppo_pmap"
    assert config["args"]["num_envs"] == 8
    assert config["args"]["hidden_sizes"] == [8]
    assert {"pmaprl", "jax", "flax", "optax", "gymnax"} <= config["versions"].keys()
    assert config["command"][1:3] == ["--hidden-sizes", "8"]
    assert result["status"] == "finished"
    assert result["env_steps"] == 1024
    assert result["updates"] == 16
    assert len(result["eval/return_mean"]) == 1
    assert result["eval/episodes"] == 8
    assert result["wall_seconds"] > result["compile_seconds"] > 0 < result["steps_per_second"]
    assert len(bytes.fromhex(result["state_sha256"])) == 32
    assert Path(result["checkpoint"]).parts[-2:] == ("checkpoints", "1024")
    assert [
        bool(stored_evaluation(run_dir, step).evaluation) for step in (TOTAL, TOTAL - STEPS)
    ] == [True, False]
    assert [has_ended_at(run_dir, step) for step in (TOTAL, TOTAL - STEPS)] == [True, False]
    for path in filter(Path.is_file, run_dir.rglob("*")):
        assert path.suffix not in (".pkl", ".pickle", ".npy", ".npz", ".py")
        assert not path.read_bytes().startswith(b"\x80")  # the first byte of a pickle


def test_metrics_are_rows_of_json_with_the_documented_names(finished):
    rows = read_rows(finished[1])
    due = {
        step for interval in (128, 300, 512) for step in boundaries_passed(interval, TOTAL, STEPS)
    }
    assert [row["env_steps"] for row in rows] == sorted(due)
    wanted = {
        f"episode/{name}{kind}"
        for name in ("return", "length")
        for kind in ("", "_min", "_max", "_last100")
    }
    wanted |= {
        "loss/policy",
        "loss/value",
        "policy/entropy",
        "policy/approx_kl",
        "grad/norm",
        "learning_rate",
    }
    wanted |= {
        f"time/{name}" for name in ("sps", "sps_total", "sps_wall", "update", "eval", "checkpoint")
    }
    for row in rows:
        assert row["updates"] * STEPS == row["env_steps"]
        assert wanted <= row.keys(), wanted - row.keys()
    assert [row["env_steps"] for row in rows if "eval/return_mean" in row] == [512, 1024]
    assert {f"eval/return_{kind}" for kind in ("mean", "std", "min", "max")} | {
        "eval/length_mean"
    } <= rows[-1].keys()


def test_stop_and_resume_give_the_same_state(finished, workplace, monkeypatch):
    """In two processes, the second through a symbolic link to the script, with numbers written
    1_024 and 5e2.

    The interval rule does not start anew on resuming. The command that started the run leaves it as
    it is at the end.
    """
    monkeypatch.chdir(workplace)
    words = [
        *SMALL,
        "--total-timesteps",
        "1_014",
        "--log-interval",
        "1e2",
        "--run_dir",
        "sliced",
        "--resume_or_start",
    ]
    words += ["--checkpoint-interval", 100, "--keep-checkpoints", 0, "--eval-interval", 0]
    sliced = workplace / "sliced"
    assert in_process(*words, "--stop-after", "5e2") == 0
    result = read_result(sliced)
    assert result["status"] == "stopped"
    assert result["env_steps"] == 512
    assert not (sliced / "DONE").exists()
    (workplace / "link.py").symlink_to(SCRIPT)
    resumed = succeed(run_python("link.py", "--resume", "sliced", cwd=workplace))
    assert "changed" not in resumed.stdout
    result = read_result(sliced)
    assert result["status"] == "finished"
    assert result["env_steps"] == 1024
    assert result["state_sha256"] == read_result(finished[1])["state_sha256"]
    assert (sliced / "DONE").exists()
    assert checkpoint_steps(sliced) == sorted({*boundaries_passed(100, TOTAL, STEPS), 512, TOTAL})
    steps = [row["env_steps"] for row in read_rows(sliced)]
    assert steps == sorted(set(steps)) == sorted({*boundaries_passed(100, TOTAL, STEPS), 512})
    config = read_config(sliced)
    del config["args"]["gae_lambda"]  # as in a run from before that flag
    (sliced / "config.json").write_text(json.dumps(config))
    before = fingerprint(sliced)
    assert in_process(*words) == 0
    assert fingerprint(sliced) == before


def test_a_resume_names_what_the_file_no_longer_knows(copy, capsys):
    config = read_config(copy)
    config["args"]["kl_coef"] = 10.0
    config["script_sha256"] = "of another file"
    (copy / "config.json").write_text(json.dumps(config))
    assert in_process("--resume", copy) == 0
    printed = capsys.readouterr().out
    assert "--kl-coef" in printed
    assert "algos/ppo_pmap.py" in printed
    assert "earlier_scripts" not in read_config(copy), "nothing was trained with the file of now"
    assert in_process("--resume", copy, "--total-timesteps", 2 * TOTAL, "--quiet") == 0
    assert read_config(copy)["earlier_scripts"] == ["of another file"]


def test_a_flag_that_a_resume_changes_keeps_its_earlier_value_with_the_step(copy):
    more = (
        "--resume",
        copy,
        "--quiet",
    )
    rate = read_config(copy)["args"]["learning_rate"]
    assert in_process(*more, "--learning-rate", 1e-4) == 0
    assert read_config(copy)["args"]["learning_rate"] == rate, "nothing was trained with it"
    assert in_process(*more, "--learning-rate", 1e-4, "--total-timesteps", 2 * TOTAL) == 0
    config = read_config(copy)
    assert config["args"]["learning_rate"] == 1e-4
    earlier = config["earlier_flags"]
    assert earlier.keys() == {
        "learning_rate",
        "total_timesteps",
    }
    assert earlier["learning_rate"] == [
        [rate, TOTAL],
    ]
    (group,) = load(
        Selection(runs=(str(copy),), by=("learning_rate",)),
        [TRAINING],
    )
    assert f"{rate} until step {TOTAL:,}, then 0.0001" in group.label


@pytest.mark.parametrize(
    (
        "stored",
        "now",
        "step",
        "wanted",
    ),
    [
        (
            {"rate": 1},
            {"rate": 1, "new": 3},
            100,
            {},
        ),
        (
            {"rate": 1},
            {"rate": 2},
            0,
            {},
        ),
        (
            {
                "rate": 2,
                "sizes": [3],
            },
            {
                "rate": 3,
                "sizes": (3,),
            },
            200,
            {
                "rate": [[1, 100], [2, 200]],
            },
        ),
        (
            {"rate": 2},
            {"rate": 2},
            200,
            {"rate": [[1, 100]]},
        ),
        (
            {"rate": 2},
            {"rate": 1},
            100,
            {},
        ),
        (
            {"rate": 2},
            {"rate": 3},
            50,
            {"rate": [[1, 50]]},
        ),
        (
            {"rate": 1, "quiet": True},
            {"rate": 1, "quiet": False},
            200,
            {},
        ),
    ],
)
def test_earlier_flags_are_those_that_something_was_trained_with(stored, now, step, wanted):
    """The run had a rate of 1 until step 100 where it has 2 now; checkpoints after `step` are
    lost.
    """
    config = {"args": stored}
    if stored["rate"] == 2:
        config["earlier_flags"] = {
            "rate": [[1, 100]],
        }
    assert earlier_flags(config, now, step) == wanted


def test_a_run_without_checkpoints_is_resumed_from_step_0(copy, capsys):
    """A crash before the first checkpoint, or within its save, leaves such a run: it goes on with a
    warning, and to the same end.
    """
    wanted = read_result(copy)["state_sha256"]
    shutil.rmtree(copy / "checkpoints")
    before = fingerprint(copy)
    assert in_process("--resume", copy, "--quiet") == 2, "a finished run must not be run again"
    capsys.readouterr()
    assert fingerprint(copy) == before
    (copy / "DONE").unlink()
    for name in (
        f"{TOTAL // 2}{UNFINISHED}",
        f"{TOTAL}{UNFINISHED}",
        *(left := {f"{TOTAL}.damaged", "my.deleted"}),
    ):
        (copy / "checkpoints" / name / "state").mkdir(parents=True)
    assert in_process("--resume", copy, "--quiet") == 0
    assert "warning:" in capsys.readouterr().err
    assert {
        path.name for path in (copy / "checkpoints").iterdir() if not path.name.isdigit()
    } == left
    assert read_result(copy)["state_sha256"] == wanted
    steps = [row["env_steps"] for row in read_rows(copy)]
    assert steps == sorted(set(steps))


HOLDER = """
import sys
from pathlib import Path
from pmaprl.runs.lock import locked

with locked(Path(sys.argv[1])):
    print("here", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_works_in_a_run_directory(copy, capsys):
    """The others are told who does, and change nothing; a holder that is killed is no longer
    one.
    """
    holder = Popen(
        [sys.executable, "-c", HOLDER, str(copy)],
        cwd=ROOT,
        stdin=PIPE,
        stdout=PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "here\n"
        before = fingerprint(copy)
        for how in (["--resume"], ["--overwrite", "--run-dir"]):
            assert in_process(*SMALL, *how, copy) == 2
            assert f"process {holder.pid} on {socket.gethostname()}" in capsys.readouterr().err
        assert fingerprint(copy) == before
    finally:
        holder.kill()
        holder.communicate()
    assert (copy / LOCK).exists(), "or this does not show that a stale one is taken over"
    assert in_process("--resume", copy, "--total-timesteps", 2 * TOTAL, "--quiet") == 0
    assert read_result(copy)["env_steps"] == 2 * TOTAL
    assert not (copy / LOCK).exists()


def test_a_process_that_waited_for_the_lock_holds_the_one_that_others_see(tmp_path, monkeypatch):
    """Its file is deleted by the one that held it, just when it is locked."""
    flock = fcntl.flock
    stale = []

    def locked_too_late(file, how):
        if not stale:
            stale.append((tmp_path / LOCK).unlink())
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", locked_too_late)
    with locked(tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()}"):
        check_free(tmp_path)
    check_free(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_overwrite_deletes_what_a_run_has_written_says_so_and_leaves_the_rest(copy, capsys):
    gone = [
        "events.out.tfevents.1",
        f"checkpoints/512{UNFINISHED}/state",
        "checkpoints/512.damaged/a",
    ]
    stays = ["notes.txt", "policy.onnx", "checkpoints/best.onnx", "plots/metrics.jsonl"]
    for name in (*gone, *stays):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("ten years of work")
    assert in_process(*SMALL, "--run-dir", copy, "--overwrite", "--total-timesteps", STEPS) == 0
    (deleted,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("deleted")
    ]
    assert all(name in deleted for name in ("metrics.jsonl", "DONE", " checkpoints"))
    assert not any((copy / name).exists() for name in gone)
    assert all((copy / name).read_text() == "ten years of work" for name in stays)
    assert checkpoint_steps(copy) == [read_result(copy)["env_steps"]] == [STEPS]


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_a_run_that_has_trained_everything_has_finished_and_goes_on_with_a_larger_total(
    status, copy, capsys
):
    before = read_result(copy)
    if status != "finished":
        (copy / "result.json").write_text(json.dumps(before | {"status": status}))
        (copy / "DONE").unlink()
    assert in_process("--resume", copy) == 0
    assert (copy / "DONE").exists()
    after = read_result(copy)
    kept = "state_sha256", "env_steps", "eval/return_mean"
    assert after["status"] == "finished"
    assert [after[name] for name in kept] == [before[name] for name in kept]
    assert status != "finished" or after["steps_per_second"] == pytest.approx(
        before["steps_per_second"]
    )
    longer = "--resume", copy, "--total-timesteps", 2 * TOTAL, "--keep-checkpoints", 7
    assert in_process(*longer, "--stop-after", STEPS) == 0
    changed = sorted(
        line.split()[1]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("changed")
    )
    assert changed == ["--keep-checkpoints:", "--total-timesteps:"]
    result = read_result(copy)
    assert (result["status"], result["env_steps"]) == ("stopped", TOTAL), (
        "it is behind the present step"
    )
    assert in_process(*longer) == 0
    assert read_result(copy)["status"] == "finished"
    assert read_result(copy)["env_steps"] == 2 * TOTAL


def test_a_resumed_run_keeps_its_flags_but_for_explicit_ones(copy):
    config = read_config(copy)
    config["args"]["env"] = "gymnax:CartPole-v1"
    (copy / "config.json").write_text(json.dumps(config))
    args = parse(Args, [f"--resume={copy}/../copy", "--gamma", "0.5", "--hidden-sizes", "4", "4"])
    assert args.env == "gymnax:CartPole-v1"
    assert args.gamma == 0.5
    assert args.hidden_sizes == (4, 4)
    assert args.num_envs == 8
    assert args.num_minibatches == 2
    assert args.overwrite is False
    assert Path(args.run_dir).resolve() == copy
    words = (
        "--run-dir",
        str(copy),
        "--resume-or-start",
        "--init-from",
        "elsewhere",
        "--gamma",
        "0.5",
    )
    args = parse(Args, list(words))
    assert args.resume == str(copy)
    assert args.num_envs == 8
    assert args.gamma == 0.5
    args = parse(Args, [*words, "--no-resume-or-start"])
    assert args.resume == ""
    assert args.num_envs == Args.for_env(args.env).num_envs


@pytest.mark.parametrize(
    "flags",
    ["--run-dir {} --resume-or-start", "--resume {}"],
)
def test_a_finished_run_is_left_as_it_is(flags, copy):
    drawn = (copy / "curve.png").stat().st_mtime_ns
    assert in_process(*(word.format(copy) for word in flags.split())) == 0
    assert (copy / "curve.png").stat().st_mtime_ns == drawn


def test_the_last_evaluation_of_a_slice_is_shown_once(tmp_path, capsys):
    words = *SMALL, "--total-timesteps", TOTAL, "--run-dir", tmp_path / "run"
    assert in_process(*words, "--stop-after", STEPS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("greedy")]) == 1


def test_init_from_takes_the_parameters_and_starts_at_step_0(tmp_path):
    """With a learning rate too small to change any parameter, what comes out is what was taken."""

    def trained(name, *more):
        words = [
            *SMALL,
            "--quiet",
            "--no-normalize-returns",
            "--total-timesteps",
            STEPS,
            "--run-dir",
            tmp_path / name,
        ]
        return train(
            parse(Args, [str(word) for word in (*words, "--learning-rate", "1e-30", *more)])
        )

    def same(one, other):
        pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
        return all(np.allclose(x, y, atol=1e-20) for x, y in pairs)

    source = trained("source")
    own = trained("own", "--seed", 5)
    result = trained("new", "--seed", 5, "--init-from", tmp_path / "source")
    assert result.env_steps == read_rows(result.run_dir)[0]["env_steps"] == STEPS
    assert same(result, source)
    assert not same(own, source)


def test_numbers_may_be_written_in_every_usual_form():
    for word in ("1e6", "1_000_000", "1.0e+6", "1000000.0"):
        assert parse(Args, ["--total-timesteps", word]).total_timesteps == 1_000_000
    args = Args(total_timesteps=1e6, num_envs=64.0)
    assert [(type(value), value) for value in (args.total_timesteps, args.num_envs)] == [
        (int, 1_000_000),
        (int, 64),
    ]
    exact = 9_007_199_254_740_993  # not a float
    assert parse(Args, ["--log-interval", str(exact)]).log_interval == exact


@pytest.mark.slow
@pytest.mark.parametrize("end", [">&-", "| head -1"])
def test_a_run_does_not_mind_that_nobody_reads_its_output(end, tmp_path):
    """Programs that it compiles are kept where the user has told JAX to, not in the user's
    cache.
    """
    words = command(*SMALL, "--total-timesteps", 20 * STEPS, "--log-interval", STEPS)
    line = f"{shlex.join(words)} {end}"
    keep = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "told"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    env = environment(XDG_CACHE_HOME=str(tmp_path / "home")) | keep
    done = run(
        ["sh", "-c", line],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert len([*tmp_path.glob("runs/CartPole-v1__*/DONE")]) == 1
    assert any((tmp_path / "told").glob("*-cache"))
    assert not (tmp_path / "home" / "pmaprl").exists()
