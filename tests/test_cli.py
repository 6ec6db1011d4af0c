"""`common/cli` and `common/runs` as a user meets them: a process, its output and the directory it leaves."""

import dataclasses
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import sys
from contextlib import suppress
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
    environment,
    fingerprint,
    in_process,
    read_config,
    read_result,
    read_rows,
    run_python,
    run_script,
    slow_imports,
    start_script,
    strict_json,
    succeed,
)

from algos.ppo_pmap import Args, train
from common.cli.command import parse
from common.cli.config import defaults_of, has_finished
from common.cli.console import Console
from common.cli.errors import UsageError
from common.runs import lock
from common.runs.checkpoint_files import UNFINISHED
from common.runs.lock import check_free, locked

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
    """A run by path from another directory: the process, and its run directory (which tests must not change)."""
    words = [*SMALL, "--total-timesteps", f"{TOTAL - 10}", "--log-interval", 2 * STEPS, "--run-dir", "some runs/first"]
    process = succeed(run_script(*words, "--eval-interval", 512, "--checkpoint-interval", 300, cwd=workplace))
    return process, workplace / "some runs" / "first"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished[1], tmp_path / "copy"))


def boundaries_passed(interval: int, total: int, update: int) -> list[int]:
    """The first update's end at or after each multiple of `interval`."""
    return [step for step in range(update, total + 1, update) if step // interval > (step - update) // interval]


def test_help_lists_every_flag_with_its_sentence(workplace):
    process = run_script("--help", cwd=workplace)
    text = " ".join(process.stdout.replace("│", " ").split())
    for field in dataclasses.fields(Args):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "All sizes are global" in text
    assert text.count("(default:") + text.count("(repeatable") >= len(dataclasses.fields(Args))


def test_a_usage_error_imports_nothing_slow(workplace):
    process, slow = slow_imports(SCRIPT, "--num-envs", "0", cwd=workplace)
    assert (process.returncode, slow) == (2, set())


def test_what_a_run_prints(finished):
    output = finished[0].stdout
    for words in (
        *("1 x cpu", "CartPole-v1", "8 envs (8 per device)", "16 updates", "minibatches of 32", "compiled in"),
        *("1,014 rounded up to 1,024", "greedy"),
        *("some runs/first/checkpoints/1024", "some runs/first/curve.png"),
    ):
        assert words in output
    assert sum(line.startswith("step ") and "steps/s" in line and "ETA" in line for line in output.splitlines()) >= 8
    assert finished[0].stderr == ""


def test_the_printed_command_continues_the_run(finished, tmp_path):
    """Copied into a shell, from the same working directory, although the path has a space."""
    process, run_dir = finished
    last = process.stdout.strip().splitlines()[-1]
    words = shlex.split(last[last.index("python ") :])
    assert words[0] == "python"
    assert Path(words[1]) == SCRIPT
    args = parse(Args, [word if word != "some runs/first" else str(run_dir) for word in words[2:]])
    assert Path(args.resume) == run_dir
    assert args.total_timesteps > TOTAL


def test_a_run_named_with_its_suite_is_resumed_by_its_directory_alone(tmp_path):
    args = parse(Args, [*SMALL, "--env", "gymnax:CartPole-v1", "--total-timesteps", str(STEPS), "--quiet"])
    train(dataclasses.replace(args, run_dir=str(tmp_path / "run")))
    assert Args.from_run(tmp_path / "run").env == "gymnax:CartPole-v1"


def test_the_run_directory_is_complete(finished):
    run_dir = finished[1]
    names = {path.name for path in run_dir.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "checkpoints", "curve.png", "result.json", "DONE"}
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (run_dir / "curve.png").stat().st_size > 5_000


def test_config_says_how_to_repeat_the_run(finished):
    config = read_config(finished[1])
    assert config["args"].keys() == {field.name for field in dataclasses.fields(Args)}
    assert (config["algorithm"], config["args"]["num_envs"], config["args"]["hidden_sizes"]) == ("ppo_pmap", 8, [8])
    assert {"pmaprl", "jax", "flax", "optax", "gymnax"} <= config["versions"].keys()
    git = run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert config["git"] == (git.stdout.strip() or None)
    (device,) = config["devices"]
    assert "cpu" in device.lower()
    assert config["command"][1:3] == ["--hidden-sizes", "8"]


def test_metrics_are_rows_of_json_with_the_documented_names(finished):
    rows = read_rows(finished[1])
    assert [row["env_steps"] for row in rows] == sorted(
        {step for interval in (128, 300, 512) for step in boundaries_passed(interval, TOTAL, STEPS)}
    )
    assert all(row["updates"] * STEPS == row["env_steps"] for row in rows)
    wanted = {
        *(f"episode/{name}{kind}" for name in ("return", "length") for kind in ("", "_min", "_max", "_last100")),
        *("loss/policy", "loss/value", "loss/exploration", "loss/total", "policy/entropy", "policy/approx_kl"),
        *("policy/clip_fraction", "value/explained_variance", "value/mean", "grad/norm", "learning_rate"),
        *("advantage/std", "params/norm", "time/sps", "time/sps_total", "time/sps_wall"),
        *("time/update", "time/eval", "time/checkpoint", "time/host"),
    }
    for row in rows:
        assert wanted <= row.keys(), wanted - row.keys()
        assert all(isinstance(row[name], (int, float)) or row[name] is None for name in wanted)
    evaluated = [row["env_steps"] for row in rows if "eval/return_mean" in row]
    assert evaluated == [512, 1024]
    assert {f"eval/return_{kind}" for kind in ("mean", "std", "min", "max")} <= rows[-1].keys()
    assert "eval/length_mean" in rows[-1]


def test_result_has_all_fields(finished):
    result = read_result(finished[1])
    assert (result["status"], result["env_steps"], result["updates"]) == ("finished", 1024, 16)
    (mean,) = result["eval/return_mean"]
    assert mean >= 1
    assert result["eval/episodes"] == 8
    assert result["wall_seconds"] > result["compile_seconds"] > 0
    assert result["steps_per_second"] > 0
    assert len(bytes.fromhex(result["state_sha256"])) == 32
    assert Path(result["checkpoint"]).parts[-2:] == ("checkpoints", "1024")


def test_nothing_in_the_run_directory_is_pickled(finished):
    names = fingerprint(finished[1])
    assert any(name.startswith("checkpoints/1024/") for name in names)
    for name in names:
        content = (finished[1] / name).read_bytes()
        assert not name.endswith((".pkl", ".pickle", ".npy", ".npz", ".py"))
        assert not content.startswith(b"\x80")  # the first byte of a pickle
        assert not any(word in content for word in (b"numpy.core", b"numpy._core", b"cbuiltins"))


def test_stop_and_resume_give_the_same_state(finished, workplace, monkeypatch, capsys):
    """In two processes, the second through a symbolic link to the script, with numbers written 1_024 and 5e2.

    The interval rule does not start anew on resuming.
    """
    monkeypatch.chdir(workplace)
    words = [*SMALL, "--total-timesteps", "1_014", "--log-interval", "1e2", "--run-dir", "sliced"]
    words += ["--checkpoint-interval", 100, "--keep-checkpoints", 0, "--eval-interval", 0]
    assert in_process(*words, "--stop-after", "5e2") == 0
    sliced = workplace / "sliced"
    result = read_result(sliced)
    assert (result["status"], result["env_steps"]) == ("stopped", 512)
    assert not (sliced / "DONE").exists()
    assert "--resume sliced" in capsys.readouterr().out

    (workplace / "link.py").symlink_to(SCRIPT)
    resumed = succeed(run_script("--resume", "sliced", cwd=workplace, script=workplace / "link.py"))
    assert "step 512" in resumed.stdout
    assert "changed" not in resumed.stdout
    result = read_result(sliced)
    assert (result["status"], result["env_steps"]) == ("finished", 1024)
    assert result["state_sha256"] == read_result(finished[1])["state_sha256"]
    assert (sliced / "DONE").exists()
    assert checkpoint_steps(sliced) == sorted({*boundaries_passed(100, TOTAL, STEPS), 512, TOTAL})
    steps = [row["env_steps"] for row in read_rows(sliced)]
    assert steps == sorted(set(steps))
    assert {*boundaries_passed(100, TOTAL, STEPS), 512} == set(steps)


def test_one_command_starts_a_run_goes_on_with_it_and_leaves_it_when_it_has_finished(finished, tmp_path, capsys):
    words = [*SMALL, "--total-timesteps", TOTAL - 10, "--checkpoint-interval", 300, "--run_dir", tmp_path / "run"]
    words += ["--resume_or_start", "--log-interval", 2 * STEPS]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.4711.json").touch()  # of a process that was killed while it began
    assert in_process(*words, "--stop-after", "500") == 0
    printed = capsys.readouterr().out
    assert "resumed" not in printed
    assert "stopped at step 512 of 1,024\n" in printed and "--resume " not in printed
    assert in_process(*words) == 0
    printed = capsys.readouterr().out
    assert f"resumed  {tmp_path / 'run'} at step 512" in printed
    assert "changed" not in printed
    assert read_result(tmp_path / "run")["state_sha256"] == read_result(finished[1])["state_sha256"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["args"]["ent_fraction"]  # as in a run from before that flag
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    flags, defaults = config["args"] | {"ent_fraction": 0.5}, defaults_of(Args)
    assert not has_finished(tmp_path / "run", flags, defaults)
    before = fingerprint(tmp_path / "run")
    assert in_process(*words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run'} has finished; a larger --total-timesteps trains longer\n"
    assert fingerprint(tmp_path / "run") == before
    words[words.index("--total-timesteps") + 1] = TOTAL + STEPS
    assert in_process(*words) == 0
    assert f"resumed  {tmp_path / 'run'} at step 1,024" in capsys.readouterr().out


def test_a_command_that_goes_on_takes_the_flags_of_its_run_and_begins_from_it(copy):
    words = "--run-dir", str(copy), "--resume-or-start", "--init-from", "elsewhere", "--gamma", "0.5"
    args = parse(Args, list(words))
    assert (args.resume, args.num_envs, args.gamma) == (str(copy), 8, 0.5)
    args = parse(Args, [*words, "--no-resume-or-start"])
    assert (args.resume, args.num_envs) == ("", Args.for_env(args.env).num_envs)


def test_a_resume_names_what_the_file_no_longer_knows(copy, capsys):
    config = read_config(copy)
    config["args"] |= {"kl_coef": 10.0, "\x1b[31mred\x07": "\x1b[5mblinks\u202e"}
    config["script_sha256"] = "of another file"
    (copy / "config.json").write_text(json.dumps(config))
    assert in_process("--resume", copy) == 0
    printed = capsys.readouterr().out
    assert "changed  --kl-coef: 10.0 then, no flag of this file now" in printed
    assert "changed  algos/ppo_pmap.py itself" in printed
    assert r"--\x1b[31mred\x07: \x1b[5mblinks\u202e then" in printed
    assert printed.replace("\n", "").isprintable(), "nothing in a file commands the terminal"
    assert in_process("--resume", copy, "--env", "\x1b[31mred") == 2
    assert capsys.readouterr().err.replace("\n", "").isprintable()


def test_resuming_a_finished_run_says_so_and_keeps_its_result(copy, capsys):
    before = read_result(copy)
    assert in_process("--resume", copy) == 0
    assert "finished" in capsys.readouterr().out
    assert (copy / "DONE").exists()
    after = read_result(copy)
    kept = "state_sha256", "status", "eval/return_mean", "compile_seconds"
    assert [after[name] for name in kept] == [before[name] for name in kept]
    assert after["steps_per_second"] == pytest.approx(before["steps_per_second"])
    assert read_rows(copy)[-1]["env_steps"] == TOTAL


@pytest.mark.parametrize("status", ["interrupted", "stopped"])
def test_a_run_that_ended_once_all_was_trained_has_finished_when_it_is_resumed(status, copy):
    result = read_result(copy)
    (copy / "result.json").write_text(json.dumps(result | {"status": status}))
    (copy / "DONE").unlink()
    assert in_process("--resume", copy) == 0
    assert (copy / "DONE").exists()
    again = read_result(copy)
    kept = "state_sha256", "env_steps", "eval/return_mean"
    assert again["status"] == "finished"
    assert [again[name] for name in kept] == [result[name] for name in kept]


def test_a_larger_total_extends_a_finished_run(copy, capsys):
    assert in_process("--resume", copy, "--total-timesteps", 2 * TOTAL, "--learning-rate", "0.002") == 0
    changed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    assert len(changed) == 2
    assert "--total-timesteps" in changed[0] + changed[1]
    assert "--learning-rate: 0.001 then, 0.002 now" in changed[0] + changed[1]
    result = read_result(copy)
    assert (result["status"], result["env_steps"]) == ("finished", 2 * TOTAL)
    assert read_rows(copy)[-1]["learning_rate"] == pytest.approx(0.002)
    assert read_config(copy)["args"]["learning_rate"] == 0.002


def test_stop_after_behind_the_present_step_ends_at_once(copy):
    assert in_process("--resume", copy, "--total-timesteps", 2 * TOTAL, "--stop-after", STEPS, "--quiet") == 0
    result = read_result(copy)
    assert (result["status"], result["env_steps"]) == ("stopped", TOTAL)


def test_a_run_without_checkpoints_is_resumed_from_step_0(copy, capsys):
    """As after a crash before the first checkpoint or within its save: with a warning, and to the same end."""
    wanted = read_result(copy)["state_sha256"]
    shutil.rmtree(copy / "checkpoints")
    before = fingerprint(copy)
    assert in_process("--resume", copy, "--quiet") == 2, "a finished run must not be run again"
    assert "checkpoints are gone" in capsys.readouterr().err
    assert fingerprint(copy) == before
    (copy / "DONE").unlink()
    for name in (f"{TOTAL // 2}{UNFINISHED}", f"{TOTAL}{UNFINISHED}", *(left := {f"{TOTAL}.damaged", "my.deleted"})):
        (copy / "checkpoints" / name / "state").mkdir(parents=True)
    assert in_process("--resume", copy, "--quiet") == 0
    assert "no checkpoint" in capsys.readouterr().err
    assert {path.name for path in (copy / "checkpoints").iterdir() if not path.name.isdigit()} == left
    assert read_result(copy)["state_sha256"] == wanted
    steps = [row["env_steps"] for row in read_rows(copy)]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("form", [["--resume={}"], ["--seed", "0", "--resume", "{}/"], ["--resume", "{}/../copy"]])
def test_a_resumed_run_keeps_its_flags_but_for_explicit_ones(form, copy):
    args = parse(Args, [*(word.format(copy) for word in form), "--gamma", "0.5", "--hidden-sizes", "4", "4"])
    assert (args.gamma, args.hidden_sizes) == (0.5, (4, 4))
    assert (args.num_envs, args.num_minibatches, args.overwrite) == (8, 2, False)
    assert Path(args.run_dir).resolve() == copy


def test_init_from_takes_the_parameters_and_starts_at_step_0(tmp_path):
    """With a learning rate too small to change any parameter, what comes out is what was taken."""

    def trained(name, *more):
        words = [*SMALL, "--quiet", "--no-normalize-returns", "--total-timesteps", STEPS, "--run-dir", tmp_path / name]
        return train(parse(Args, [str(word) for word in (*words, *more)]))

    def same(one, other):
        return all(map(np.array_equal, jax.tree.leaves(one.params), jax.tree.leaves(other.params)))

    still = "--learning-rate", "1e-30", "--seed", 5
    source, own = trained("source"), trained("own", *still)
    result = trained("new", *still, "--init-from", tmp_path / "source")
    assert result.env_steps == read_rows(result.run_dir)[0]["env_steps"] == STEPS
    assert same(result, source)
    assert not same(own, source)


def test_several_seeds(tmp_path, capsys):
    words = [*SMALL, "--num-seeds", 3, "--total-timesteps", 2 * STEPS, "--log-interval", 1]
    assert in_process(*words, "--run-dir", tmp_path / "seeds") == 0
    rows = read_rows(tmp_path / "seeds")
    assert [row["env_steps"] for row in rows] == [STEPS, 2 * STEPS]
    for name in ("loss/policy", "episode/return_last100", "grad/norm", "learning_rate", "eval/return_mean"):
        assert len(rows[-1][name]) == 3
    assert len(set(rows[-1]["loss/policy"])) == 3
    assert isinstance(rows[-1]["time/sps"], float)
    assert len(read_result(tmp_path / "seeds")["eval/return_mean"]) == 3
    printed = capsys.readouterr().out
    assert all(f"of seed {seed}" in printed for seed in range(3))


def test_as_a_module_with_the_default_directory(workplace, tmp_path):
    """`python -m algos.ppo_pmap` from the repository's root (here a link to it, so that `runs/` lands elsewhere)."""
    for name in ("algos", "common"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = [*SMALL, "--num-steps", "4", "--total-timesteps", "1e2", "--log-interval", "32", "--quiet"]
    process = succeed(run_python("-m", "algos.ppo_pmap", *words, cwd=tmp_path))
    assert process.stdout == process.stderr == ""
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("CartPole-v1__ppo_pmap__0__")
    assert read_result(run_dir)["env_steps"] == 128
    rows = read_rows(run_dir)
    assert rows[0]["episode/return"] is rows[0]["episode/return_last100"] is None  # none is over after 4 steps
    assert rows[-1]["episode/return"] is not None


def test_numbers_may_be_written_in_every_usual_form():
    for word in ("1e6", "1_000_000", "1000000", "1E6", "1.0e6", "1e+6", "1000000.0"):
        assert parse(Args, ["--total-timesteps", word]).total_timesteps == 1_000_000
    words = "--num-envs 1e3 --log-interval 1e4 --eval-interval 2.5e5 --checkpoint-interval 1e5 --stop-after 1_0"
    args = parse(Args, words.split())
    assert (args.num_envs, args.log_interval, args.eval_interval, args.stop_after) == (1000, 10_000, 250_000, 10)
    assert all(isinstance(value, int) for value in (args.num_envs, args.eval_interval))
    args = Args(total_timesteps=1e6, num_envs=64.0)
    assert [(type(value), value) for value in (args.total_timesteps, args.num_envs)] == [(int, 1_000_000), (int, 64)]
    exact = 9_007_199_254_740_993  # not a float
    assert parse(Args, ["--log-interval", str(exact)]).log_interval == exact


@pytest.mark.parametrize(
    ("returns", "counts", "shown"),
    [(12.5, 57.0, ["12.5", "57"]), ([10.0, None, 14.0], [3.0, 0.0, 4.0], ["12.0", "2.0", "2", "7"]), (None, 0.0, [])],
)
def test_the_console_shows_the_episodes_of_the_interval(returns, counts, shown, capsys):
    console = Console(quiet=False, total_steps=1000)
    row = {"episode/return": returns, "episode/count": counts, "episode/return_last100": -91.2}
    console.update(200, row | {"time/sps": 8000.0, "time/sps_wall": 900.0})
    assert re.findall(r"[\d.,]*\d", capsys.readouterr().out) == ["200", "1,000", *shown, "8,000", "1"]


def test_a_run_can_be_read_while_it_goes_on_and_does_not_mind_a_reader_that_leaves(workplace):
    """As in `python algos/ppo_pmap.py | head -3`: the run goes on, or stops saved; it never vanishes."""
    words = [*SMALL, "--total-timesteps", 100 * STEPS, "--log-interval", STEPS, "--checkpoint-interval", 4 * STEPS]
    process = start_script(*words, "--run-dir", "live", cwd=workplace)
    run_dir = workplace / "live"
    printed = (line for line in process.stdout if line.startswith("step "))
    for _ in range(6):
        next(printed)
    rows = [strict_json(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()[:5]]
    assert [row["env_steps"] for row in rows] == [STEPS * (i + 1) for i in range(5)]
    assert read_config(run_dir)["args"]["env"] == "CartPole-v1"
    assert not [*run_dir.glob("DONE"), *run_dir.glob("*.tmp")]
    process.stdout.close()
    process.wait(timeout=240)
    result = read_result(run_dir)
    assert result["checkpoint"] is not None
    assert result["env_steps"] == checkpoint_steps(run_dir)[-1] > 0


def test_a_closed_standard_output(workplace):
    words = [*SMALL, "--total-timesteps", STEPS, "--run-dir", "silent"]
    line = f"exec {shlex.join([sys.executable, str(SCRIPT), *map(str, words)])} >&-"
    done = run(["sh", "-c", line], cwd=workplace, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert os.path.exists(workplace / "silent" / "DONE")


def test_the_environments_are_listed_and_nothing_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["--list-envs"], ["--list-envs", "gymnax", "--num-envs", "8"]):
        assert in_process(*words) == 0
        assert {"CartPole-v1", "Breakout-MinAtar"} <= set(capsys.readouterr().out.splitlines())
    assert not any(tmp_path.iterdir())


HOLDER = """
import sys
from pathlib import Path
from common.runs.lock import locked

with locked(Path(sys.argv[1])):
    print("here", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_works_in_a_run_directory(copy, capsys):
    """The others are told who does, and change nothing; a holder that is killed is no longer one."""
    words = [sys.executable, "-c", HOLDER, str(copy)]
    holder = Popen(words, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
    try:
        assert holder.stdout.readline() == "here\n"
        before = fingerprint(copy)
        for how in (["--resume"], ["--run-dir"], ["--overwrite", "--run-dir"]):
            assert in_process(*SMALL, *how, copy) == 2
            message = capsys.readouterr().err
            assert f"in use by process {holder.pid} on {socket.gethostname()}" in message
        assert fingerprint(copy) == before
    finally:
        holder.kill()
        holder.communicate()
    assert (copy / lock.NAME).exists(), "or this does not show that a stale one is taken over"
    assert in_process("--resume", copy, "--total-timesteps", 2 * TOTAL, "--quiet") == 0
    assert read_result(copy)["env_steps"] == 2 * TOTAL
    assert not (copy / lock.NAME).exists()


def test_a_process_that_waited_for_the_lock_holds_the_one_that_others_see(tmp_path, monkeypatch):
    """Its file is deleted by the one that held it, just when it is locked."""
    flock, stale = fcntl.flock, []

    def locked_too_late(file, how):
        if not stale:
            stale.append((tmp_path / lock.NAME).unlink())
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", locked_too_late)
    with locked(tmp_path), pytest.raises(UsageError, match=f"in use by process {os.getpid()}"):
        check_free(tmp_path)
    check_free(tmp_path)


def test_a_run_leaves_the_directory_to_the_one_that_has_replaced_it(tmp_path):
    with locked(tmp_path / "run"):
        assert lock.is_ours(tmp_path / "run")
        (tmp_path / "run" / lock.NAME).unlink()
        (tmp_path / "run" / lock.NAME).write_text("process 1 elsewhere")
        assert not lock.is_ours(tmp_path / "run")
    assert (tmp_path / "run" / lock.NAME).exists()


def test_without_locks_of_the_system_directories_are_used_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    with locked(tmp_path / "run"):
        check_free(tmp_path / "run")


def test_a_new_directory_that_stays_empty_is_not_left_behind(tmp_path):
    with locked(tmp_path / "new"):
        assert (tmp_path / "new" / lock.NAME).exists()
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/1024", "metrics.jsonl", "curve.png", "notes"])
def test_nothing_is_written_or_deleted_through_links(name, copy, tmp_path, capsys):
    inside, outside = copy / name, tmp_path / "outside"
    if inside.exists():
        inside.rename(outside)
    inside.symlink_to(outside)
    before = fingerprint(tmp_path)
    assert in_process("--resume", copy, "--total-timesteps", 2 * TOTAL, "--quiet") == 2
    assert f"{inside} is a link" in capsys.readouterr().err
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
def test_nothing_is_written_through_other_names_of_a_file(how, copy, tmp_path):
    """Hard links, as in a directory that somebody else has packed."""
    names = ["metrics.jsonl", "result.json", "curve.png", "config.json", lock.NAME, "checkpoints/1024/metrics/metrics"]
    for number, name in enumerate(names):
        (copy / name).touch()
        os.link(copy / name, tmp_path / str(number))
    before = [(tmp_path / str(number)).read_bytes() for number in range(len(names))]
    words = ["--resume", copy] if how == "--resume" else [*SMALL, "--run-dir", copy, how]
    assert in_process(*words, "--total-timesteps", 2 * TOTAL, "--keep-checkpoints", 0, "--quiet") == 0
    assert [(tmp_path / str(number)).read_bytes() for number in range(len(names))] == before
    assert read_result(copy)["env_steps"] == 2 * TOTAL


@pytest.mark.parametrize(
    "config", ["{}", '{"model_type": "bert"}', '{"args": {"env": "a"}, "algorithm": "b"}', "damaged {"]
)
def test_overwrite_deletes_no_directory_of_others(config, tmp_path):
    (tmp_path / "work" / "checkpoints" / "1024").mkdir(parents=True)
    for name in ("metrics.jsonl", "thesis.tex"):
        (tmp_path / "work" / name).write_text("ten years of work")
    (tmp_path / "work" / "config.json").write_text(config)
    before = fingerprint(tmp_path)
    assert in_process(*SMALL, "--run-dir", tmp_path / "work", "--overwrite") == 2
    assert fingerprint(tmp_path) == before
    assert (tmp_path / "work" / "checkpoints" / "1024").exists()


def test_overwrite_deletes_what_a_run_has_written_says_so_and_leaves_the_rest(copy, capsys):
    gone = [".curve.12.png", "events.out.tfevents.1", f"checkpoints/512{UNFINISHED}/state", "checkpoints/512.damaged/a"]
    stays = ["notes.txt", "policy.onnx", "checkpoints/best.onnx", "plots/metrics.jsonl", "wandb/mine"]
    for name in (*gone, *stays):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("ten years of work")
    assert in_process(*SMALL, "--run-dir", copy, "--overwrite", "--total-timesteps", STEPS) == 0
    (deleted,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("deleted")]
    assert all(name in deleted for name in ("metrics.jsonl", "DONE", ".curve.12.png", " checkpoints"))
    assert not any((copy / name).exists() for name in gone)
    assert all((copy / name).read_text() == "ten years of work" for name in stays)
    assert checkpoint_steps(copy) == [STEPS]
    assert read_result(copy)["env_steps"] == STEPS


def test_links_that_wandb_keeps_for_itself_are_no_concern(copy):
    (copy / "wandb").mkdir()
    (copy / "wandb" / "latest-run").symlink_to("run-1")
    assert in_process("--resume", copy, "--quiet") == 0


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "result.json", "checkpoints/1024/state/_METADATA"])
def test_a_pipe_in_the_place_of_a_file_is_refused(name, copy, capsys):
    """Nobody writes into it: whoever reads it waits for ever."""
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with suppress(SystemExit):
        assert in_process("--resume", copy, "--quiet") == 2
    message = capsys.readouterr().err
    assert name in message
    assert message.count("error:") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "checkpoints"])
def test_a_file_and_a_folder_are_not_taken_for_each_other(name, copy, capsys):
    path = copy / name
    kind = "folder" if path.is_file() else "file"
    path.rename(copy / "other")
    path.mkdir() if kind == "folder" else path.touch()
    assert in_process("--resume", copy, "--quiet") == 2
    assert f"{path} is a {kind}" in capsys.readouterr().err


ODD_RESULTS = ["null", "[1]", "3", '{"eval/return_mean": 5}', '{"eval/return_mean": ["high"]}', "[" * 99_999]


def test_odd_rows_and_results_do_not_keep_a_run_from_going_on(copy, capsys):
    for result in ODD_RESULTS:
        (copy / "result.json").write_text(result)
        assert in_process("--resume", copy) == 0, result
        assert "finished at step" in capsys.readouterr().out
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('null\n[1]\n"a"\n{}\n{"env_steps": "many"}\n{"env_steps": [1]}\n{"env_steps": 5, "time/wall": {}}\n')
    assert in_process("--resume", copy, "--total-timesteps", 2 * TOTAL, "--quiet") == 0
    assert all(isinstance(row["env_steps"], int) for row in read_rows(copy))
    assert read_result(copy)["env_steps"] == 2 * TOTAL


def test_a_row_with_a_broken_number_is_not_shown_before_the_error(tmp_path, capsys):
    """The reward is NaN from update 6 on; the file has the row that shows it."""
    words = [*SMALL, "--env", "helpers:Poison", "--total-timesteps", 100 * STEPS, "--log-interval", 5 * STEPS]
    assert in_process(*words, "--run-dir", tmp_path / "run") == 1
    printed = capsys.readouterr()
    assert [line.split()[1] for line in printed.out.splitlines() if line.startswith("step ")] == ["320"]
    assert f"not finite at step {6 * STEPS}" in printed.err
    assert [row["env_steps"] for row in read_rows(tmp_path / "run")] == [5 * STEPS, 10 * STEPS]
