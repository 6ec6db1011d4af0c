"""No dead flags: every flag of PPO has a case here, which shows that it changes something."""

import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Recorder, checkpoint_steps, read_config, read_result, read_rows, run_script, toy
from PIL import Image

from algos.ppo_pmap import Args, train
from common.cli.command import main
from common.runs.run import Run

BASE = {
    "num_devices": 1,
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "hidden_sizes": (4,),
    "total_timesteps": 96,  # 3 updates
    "eval_episodes": 4,
    "learning_rate": 0.05,
    "clip_eps": 0.02,
    "quiet": True,
}
UPDATE = 32

# Flags that change what is learned: the value to compare with, and other flags that both runs get.
LEARNING: dict[str, tuple[Any, dict[str, Any]]] = {
    "env": ("cli_helpers:long_toy", {"env": "cli_helpers:toy"}),
    "env_params": ('{"bonus": 1.0}', {"env": "cli_helpers:toy"}),
    "seed": (1, {}),
    "num_envs": (8, {}),
    "num_steps": (16, {}),
    "update_epochs": (3, {}),
    "num_minibatches": (4, {}),
    "total_timesteps": (128, {}),  # anneals more slowly
    "learning_rate": (0.01, {}),
    "lr_schedule": ("constant", {}),
    "desired_kl": (1e-9, {"lr_schedule": "kl-adaptive", "learning_rate": 0.001}),
    "gamma": (0.5, {}),
    "gae_lambda": (0.5, {}),
    "clip_eps": (0.3, {}),
    "clip_mode": ("symmetric", {"clip_eps": 0.2}),
    "vf_coef": (0.1, {}),
    "clip_vloss": (True, {}),
    "ent_coef": (0.5, {}),
    "exploration_loss": ("symmetric-kl", {}),
    "max_grad_norm": (0.0, {}),
    "norm_adv": (False, {}),
    "target_kl": (1e-6, {}),
    "normalize_obs": (True, {}),
    "normalize_returns": (False, {}),
    "activation": ("relu", {}),
    "hidden_sizes": ((5,), {}),
    "decorrelate": (True, {}),
    "precision": ("bfloat16", {}),
}


def start(run_dir: Path | None = None, **flags: Any):
    """Train the toy (or what `env` names) with BASE and these flags."""
    where = {} if flags.get("benchmark") or flags.get("resume") else {"run_dir": str(run_dir or tempfile.mkdtemp())}
    return train(Args(**BASE | where | flags), None if "env" in flags else toy())


@functools.cache
def checksum(**flags: Any) -> str:
    return start(**flags).state_sha256


def learning_case(name: str):
    def case(tmp_path, **_):
        value, others = LEARNING[name]
        assert getattr(Args(**BASE | others), name) != value
        assert checksum(**others) != start(tmp_path, **others | {name: value}).state_sha256

    return case


def num_seeds(tmp_path, **_):
    result = start(tmp_path, num_seeds=2)
    assert len(result.evaluation["eval/return_mean"]) == 2
    assert len(read_rows(tmp_path)[-1]["loss/policy"]) == 2


def num_devices(tmp_path, **_):
    import jax

    assert len(jax.devices()) >= 2
    start(tmp_path / "one")
    start(tmp_path / "two", num_devices=2)
    assert [len(read_config(tmp_path / name)["devices"]) for name in ("one", "two")] == [1, 2]


def log_interval(tmp_path, **_):
    start(tmp_path / "often", log_interval=UPDATE)
    start(tmp_path / "rarely", log_interval=1000)
    assert [row["env_steps"] for row in read_rows(tmp_path / "often")] == [32, 64, 96]
    assert [row["env_steps"] for row in read_rows(tmp_path / "rarely")] == [96]


def eval_interval(tmp_path, **_):
    for interval, wanted in ((UPDATE, [32, 64, 96]), (2 * UPDATE, [64, 96]), (0, [96])):
        run_dir = tmp_path / str(interval)
        start(run_dir, log_interval=UPDATE, eval_interval=interval)
        assert [row["env_steps"] for row in read_rows(run_dir) if "eval/return_mean" in row] == wanted


def eval_episodes(tmp_path, **_):
    few, many = start(tmp_path / "few"), start(tmp_path / "many", eval_episodes=9)
    assert read_result(tmp_path / "many")["eval/episodes"] == 9
    assert few.evaluation["eval/return_std"] != many.evaluation["eval/return_std"]


def checkpoint_interval(tmp_path, **_):
    for interval, wanted in ((UPDATE, [32, 64, 96]), (2 * UPDATE, [64, 96]), (0, [96])):
        start(tmp_path / str(interval), checkpoint_interval=interval)
        assert checkpoint_steps(tmp_path / str(interval)) == wanted


def keep_checkpoints(tmp_path, **_):
    for keep, wanted in ((1, [96]), (2, [64, 96]), (0, [32, 64, 96])):
        start(tmp_path / str(keep), checkpoint_interval=UPDATE, keep_checkpoints=keep)
        assert checkpoint_steps(tmp_path / str(keep)) == wanted


def keep_best(tmp_path, **_):
    flags = {"checkpoint_interval": UPDATE, "eval_interval": UPDATE, "log_interval": UPDATE, "keep_checkpoints": 1}
    flags |= {"total_timesteps": 8 * UPDATE, "seed": 1, "learning_rate": 0.1}  # so large that it gets worse again
    start(tmp_path / "newest", **flags)
    assert checkpoint_steps(tmp_path / "newest") == [8 * UPDATE]
    start(tmp_path / "best", **flags, keep_best=True)
    returns = {row["env_steps"]: row["eval/return_mean"] for row in read_rows(tmp_path / "best")}
    best = [step for step, value in returns.items() if value == max(returns.values())]
    assert max(best) < 8 * UPDATE, "the best is not the newest, or this shows nothing"
    first, newest = checkpoint_steps(tmp_path / "best")
    assert newest == 8 * UPDATE
    assert first in best

    # without --checkpoint-interval the best is saved all the same, when it is found
    start(tmp_path / "saves", **flags | {"checkpoint_interval": 0}, keep_best=True)
    assert min(best) in checkpoint_steps(tmp_path / "saves")


def run_dir(tmp_path, **_):
    result = start(tmp_path / "here" / "and there")
    assert result.run_dir == tmp_path / "here" / "and there"
    assert (result.run_dir / "DONE").exists()


def resume(tmp_path, **_):
    start(tmp_path, stop_after=64)
    resumed = train(Args.from_run(tmp_path, env="cli_helpers:toy", quiet=True))
    assert [row["env_steps"] for row in read_rows(tmp_path)][-1] == 96
    assert resumed.state_sha256 == checksum()


def init_from(tmp_path, **_):
    start(tmp_path / "source", seed=3)
    result = start(tmp_path / "new", init_from=str(tmp_path / "source"))
    assert result.env_steps == 96
    assert result.state_sha256 != checksum()


def overwrite(tmp_path, **_):
    start(tmp_path, seed=1)
    start(tmp_path, seed=2, overwrite=True)
    assert read_config(tmp_path)["args"]["seed"] == 2
    assert len(read_rows(tmp_path)) == 1


def stop_after(tmp_path, **_):
    result = start(tmp_path, stop_after=33)
    assert (result.status, result.env_steps) == ("stopped", 64)
    assert not (tmp_path / "DONE").exists()


def max_seconds(tmp_path, **_):
    result = start(tmp_path, max_seconds=3.0, total_timesteps=10**9, lr_schedule="constant")
    assert result.status == "stopped"
    assert result.env_steps < 10**9
    assert not (tmp_path / "DONE").exists()


def gif(tmp_path, monkeypatch, capsys):
    start(tmp_path / "without")
    assert not (tmp_path / "without" / "policy.gif").exists()
    start(tmp_path / "with", gif=True, num_seeds=2)
    with Image.open(tmp_path / "with" / "policy.gif") as picture:
        assert picture.n_frames > 1

    def fail(*_):
        raise RuntimeError("no paint left")

    monkeypatch.setattr("common.play.draw_gif", fail)
    assert start(tmp_path / "failing", gif=True).status == "finished"
    assert "no paint left" in capsys.readouterr().err


def tensorboard(tmp_path, monkeypatch, **_):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "tensorboardX", recorder)
    start(tmp_path, tensorboard=True, num_seeds=2)
    scalars = {args[0]: args[1:] for name, args, _ in recorder.calls if name == "add_scalar"}
    assert scalars["learning_rate/seed_0"][1] == 96
    assert isinstance(scalars["time/sps"][0], float)
    assert "close" in recorder.names()


def wandb(tmp_path, monkeypatch, **_):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    start(tmp_path, wandb=True)
    assert recorder.calls[0][0] == "init"
    assert recorder.calls[0][2]["config"]["args"]["num_envs"] == 4
    logged = [(args, kwargs) for name, args, kwargs in recorder.calls if name == "log"]
    assert "loss/policy" in logged[-1][0][0]
    assert logged[-1][1] == {"step": 96}
    assert recorder.calls[-1][0] == "finish"


def quiet(tmp_path, capsys, **_):
    capsys.readouterr()
    start(tmp_path / "quiet")
    silent = capsys.readouterr()
    assert silent.out == silent.err == ""
    start(tmp_path / "loud", quiet=False)
    assert "finished" in capsys.readouterr().out


def compile_cache(tmp_path, **_):
    words = ["--hidden-sizes", 2, "--num-envs", 2, "--num-steps", 4, "--num-minibatches", 1, "--total-timesteps", 8]
    words += ["--eval-episodes", 1, "--quiet", "--num-devices", 1]
    for flag in ("--compile-cache", "--no-compile-cache"):
        home = tmp_path / flag
        home.mkdir()
        done = run_script(*words, flag, "--run-dir", flag.strip("-"), cwd=tmp_path, XDG_CACHE_HOME=str(home))
        assert done.returncode == 0, done.stderr
        programs = [path for path in home.rglob("*") if path.is_file() and path.is_relative_to(home / "pmaprl")]
        assert bool(programs) is (flag == "--compile-cache")


def benchmark(tmp_path, monkeypatch, capsys, **_):
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    result = start(benchmark=True, quiet=False)
    assert result.run_dir is None
    assert list(tmp_path.iterdir()) == []
    (line,) = capsys.readouterr().out.splitlines()
    measured = json.loads(line)
    assert measured["algorithm"] == "ppo_pmap"
    assert measured["steps_per_second"] > 0
    assert measured["compile_seconds"] > 0
    assert measured["num_envs"] == 4


def test_an_evaluation_after_the_last_row_gets_a_row_of_its_own(tmp_path, monkeypatch):
    """The time is up just after a checkpoint: what was evaluated then is in the metrics, and the best is kept."""
    monkeypatch.setattr(Run, "stopping", property(lambda run: run.steps > 0))
    flags = {"checkpoint_interval": UPDATE, "eval_interval": 0, "keep_best": True}
    result = start(tmp_path, **flags)
    assert (result.status, result.env_steps) == ("stopped", UPDATE)
    row, evaluation = read_rows(tmp_path)
    assert "eval/return_mean" not in row
    assert [evaluation["eval/return_mean"]] == pytest.approx(result.evaluation["eval/return_mean"])
    assert evaluation["env_steps"] == row["env_steps"] == UPDATE
    assert json.loads((tmp_path / "checkpoints" / str(UPDATE) / "metrics" / "metrics").read_text())


RUN = (num_seeds, num_devices, log_interval, eval_interval, eval_episodes, checkpoint_interval, keep_checkpoints)
RUN += (keep_best, run_dir, resume, init_from, overwrite, stop_after, max_seconds, gif, tensorboard, wandb, quiet)
RUN += (compile_cache, benchmark)
CASES = {case.__name__: case for case in RUN} | {name: learning_case(name) for name in LEARNING}


@pytest.mark.parametrize("flag", [field.name for field in dataclasses.fields(Args)])
def test_every_flag_changes_something(flag, tmp_path, monkeypatch, capsys):
    assert flag in CASES, f"--{flag.replace('_', '-')} is new: add a case that shows what it does"
    CASES[flag](tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


def test_no_case_is_left_over():
    assert CASES.keys() == {field.name for field in dataclasses.fields(Args)}


def test_without_a_change_nothing_differs(tmp_path):
    """Otherwise the cases above would show nothing. Nor do the flags of a run change what is learned."""
    again = {"log_interval": UPDATE, "eval_interval": 2 * UPDATE, "checkpoint_interval": UPDATE, "eval_episodes": 3}
    assert start(tmp_path, **again).state_sha256 == checksum()


def test_tensorboard_files_are_written(tmp_path):
    pytest.importorskip("tensorboardX")
    start(tmp_path, tensorboard=True)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss/policy" in events.read_bytes()


def test_wandb_works_through_the_command_line_entry(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    args = Args(**BASE, env="cli_helpers:toy", wandb=True, run_dir=str(tmp_path / "run"))
    assert main(train, args) == 0
    assert {"init", "log", "finish"} <= recorder.names()
