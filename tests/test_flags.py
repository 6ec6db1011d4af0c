"""No dead flags: every flag of every algorithm has a case here, which shows that it changes something."""

import dataclasses
import functools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import appo_pmap as appo
import asac_pmap as asac
import jax
import jax.numpy as jnp
import numpy as np
import ppo_pmap as ppo
import ppo_rnn_pmap as ppo_rnn
import pytest
import sac_pmap as sac
from cli_helpers import IN_NO_PROGRAM, Recorder, checkpoint_steps, read_config, read_rows
from helpers import (
    make_env,
    relative_difference,
    result_of,
    same_bits,
    small_args,
    small_rnn_args,
    small_sac_args,
)
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.interpreters.partial_eval import dce_jaxpr
from PIL import Image
from test_appo import small_args as small_appo_args
from test_asac import small_args as small_asac_args

from common.actors.batches import example_batch
from common.actors.environments import inspect_env
from common.cli.device_flags import DeviceEnvArgs
from common.cli.errors import UsageError
from common.cli.host_flags import HostEnvArgs
from common.cli.pbt_flags import PbtArgs
from common.cli.process_flags import ProcessArgs
from common.device.programs import TrainState, shard_mapped
from common.device.schedules import schedule_notes
from common.device.seeds import MEMBERS
from common.device.sharding import AXIS, to_devices
from common.envs.registry import make
from common.runs.checkpoint_files import read
from common.runs.loading import Start, place
from common.runs.run import Run

pytestmark = pytest.mark.usefixtures("shared_programs")
UPDATE = 32
BASE = {"num_envs": 4, "num_minibatches": 2, "hidden_sizes": (4,), "total_timesteps": 3 * UPDATE}
BASE |= {"learning_rate": 0.05, "clip_eps": 0.02}

Cases = dict[str, tuple[Any, dict[str, Any]]]
"""Flags that change what is learned: the value to compare with, and other flags that both runs get."""

ALL: Cases = {"gamma": (0.5, {}), "hidden_sizes": ((5,), {}), "seed": (1, {})}
ON_POLICY: Cases = ALL | {
    "num_minibatches": (4, {}),
    "learning_rate": (0.01, {}),
    "lr_schedule": ("constant", {}),
    "gae_lambda": (0.5, {}),
    "vf_coef": (0.1, {}),
    "ent_coef": (0.5, {}),
    "ent_fraction": (0.75, {}),
    "exploration_loss": ("symmetric-kl", {}),
    "max_grad_norm": (0.01, {}),
    "adam_b1": (0.5, {}),
    "adam_b2": (0.9, {}),
    "norm_adv": (False, {}),
    "normalize_obs": (True, {}),
    "normalize_returns": (False, {}),
    "activation": ("relu", {}),
    "share_torso": (True, {}),
}
PPO: Cases = ON_POLICY | {
    "env": ("helpers:Blink", {"env": "helpers:Luck"}),
    "env_params": ('{"max_steps_in_episode": 3}', {"env": "helpers:Toy"}),
    "num_envs": (8, {}),
    "num_steps": (16, {}),
    "update_epochs": (3, {}),
    "total_timesteps": (128, {}),  # anneals more slowly
    "desired_kl": (1e-9, {"lr_schedule": "kl-adaptive", "learning_rate": 0.001}),
    "clip_eps": (0.3, {}),
    "clip_mode": ("symmetric", {"clip_eps": 0.2, "update_epochs": 4}),
    "clip_vloss": (True, {}),
    "target_kl": (1e-6, {}),
    "decorrelate": (True, {}),
    "reset_pool": (3, {}),
    "opponent": ("self", {"env": "pgx:tic_tac_toe"}),
    "opponent_interval": (1, {"env": "pgx:tic_tac_toe", "opponent": "self", "total_timesteps": 20 * UPDATE}),
    "matchmaking": ("members", {"env": "pgx:tic_tac_toe", "population": 2}),
    "precision": ("bfloat16", {}),
    "encoder": ("flat", {"env": "helpers:Pixels"}),
}
THE_SAME_CODE = {"env", "env_params", "total_timesteps"}
"""Flags of PPO with memory that only common/ uses."""
GAMES = {"opponent", "opponent_interval", "matchmaking"}
"""Flags that PPO with memory does not have."""

MEMORY: Cases = {
    **{flag: case for flag, case in PPO.items() if flag not in THE_SAME_CODE | GAMES},
    "share_torso": (False, {}),
    "rnn": ("lstm", {"share_torso": False}),
    "rnn_size": (5, {"share_torso": False}),
    "rnn_layers": (2, {"share_torso": False}),
    "rnn_span": (9, {"share_torso": False}),
    "bptt_length": (2, {"share_torso": False}),
    "obs_prev_action_reward": (True, {"share_torso": False}),
}
SAC: Cases = ALL | {
    "buffer_size": (160, {}),
    "learning_starts": (64, {}),
    "hold_random": (2, {}),
    "utd_ratio": (0.25, {}),
    "batch_size": (32, {}),
    "policy_lr": (0.01, {}),
    "q_lr": (0.01, {}),
    "tau": (0.1, {}),
    "adam_b1": (0.5, {}),
    "adam_b2": (0.9, {}),
    "policy_frequency": (2, {}),
    "target_frequency": (2, {}),
    "autotune": (False, {}),
    "alpha": (0.5, {"autotune": False}),
    "target_entropy_scale": (0.5, {}),
    "critic_layer_norm": (True, {}),
    "activation": ("tanh", {}),
    "normalize_obs": (True, {}),
}
ASAC: Cases = {
    "buffer_size": (64, {}),
    "learning_starts": (128, {}),
    "utd_ratio": (0.5, {}),
    "batch_size": (8, {}),
    "normalize_obs": (True, {}),
    "num_steps": (4, {}),
    "seed": (1, {}),
}
APPO: Cases = ON_POLICY | {
    "env_params": ('{"limit": 3}', {}),
    "num_steps": (4, {}),
    "envs_per_actor": (4, {}),
    "actor_threads": (1, {}),
    "rollouts_per_update": (1, {}),
    "publish_interval": (2, {}),
    "num_epochs": (2, {}),
    "loss": ("impala", {}),
    "advantage": ("gae", {"num_epochs": 2}),
    "rho_clip": (0.5, {}),
    "c_clip": (0.5, {}),
    "pg_rho_clip": (0.5, {"loss": "impala"}),
    "max_policy_lag": (1, {"publish_interval": 3}),
    "clip_eps": (0.001, {"num_epochs": 4, "learning_rate": 0.1}),
    "clip_mode": ("symmetric", {"num_epochs": 8, "learning_rate": 0.05, "clip_eps": 0.3}),
    "ratio_clamp": (1.001, {"num_epochs": 4, "learning_rate": 0.1}),
    "clip_vloss": (True, {"num_epochs": 4, "learning_rate": 0.1, "clip_eps": 0.01}),
    "encoder": ("nature", {"env": "gymnasium:host_toys:ImageToy-v0"}),
    "rnn": ("gru", {}),
    "rnn_size": (5, {"rnn": "gru"}),
    "rnn_layers": (2, {"rnn": "gru", "rnn_size": 5}),
    "rnn_span": (9, {"rnn": "gru"}),
}


def start(run_dir: Path | None = None, **flags: Any):
    """Train the toy (or what `env` names) with BASE and these flags."""
    where = {} if flags.get("benchmark") else {"run_dir": str(run_dir or tempfile.mkdtemp())}
    return ppo.train(small_args(**BASE | where | flags), None if "env" in flags else make_env("Luck"))


ACTORS = {(appo, flag) for flag in ("env_params", "actor_threads", "publish_interval", "max_policy_lag")}
"""What actors do by these flags is not in the program of an update."""


def make_args(algorithm: Any, flags: dict[str, Any]) -> Any:
    """Arguments of a small run."""
    if algorithm is sac:
        return small_sac_args(**{"hidden_sizes": (4,)} | flags)
    if algorithm is ppo:
        return small_args(**BASE | {"env": "helpers:Luck"} | flags)
    if algorithm is ppo_rnn:
        return small_rnn_args(**BASE | {"env": "helpers:Luck", "share_torso": True} | flags)
    return (small_appo_args if algorithm is appo else small_asac_args)(**flags)


def trace(function: Callable, agents: int, *inputs: Any) -> tuple[list[Any], Any]:
    """What `function` of one of so many agents computes on a device, without what nothing needs, and output shapes."""
    for axis, size in ((AXIS, 1), (MEMBERS, agents)):
        function = jax.vmap(function, in_axes=None, axis_size=size, axis_name=axis)
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)
    needed, _ = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return [written(needed), *map(written, traced.consts)], strip(shapes, 2)


def written(x: Any) -> Any:
    """A program, or a part of one, such that the same ones are equal: without addresses and chosen names."""
    if hasattr(x, "jaxpr"):
        return written(x.jaxpr), [written(constant) for constant in x.consts]
    if hasattr(x, "eqns"):
        numbers = {}
        places = [[*x.constvars, *x.invars], *([*one.invars, *one.outvars] for one in x.eqns), x.outvars]
        values = [[str(v) if hasattr(v, "val") else numbers.setdefault(v, len(numbers)) for v in row] for row in places]
        return values, [(one.primitive.name, written(one.params), str([v.aval for v in one.outvars])) for one in x.eqns]
    if isinstance(x, dict):
        return {name: written(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [written(value) for value in x]
    return (x.shape, x.tobytes()) if isinstance(x, np.ndarray) else re.sub("0x[0-9a-f]+", "", str(x))


def strip(shapes: Any, axes: int) -> Any:
    """The shapes without their leading axes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[axes:], x.dtype), shapes)


@functools.cache
def program(algorithm: Any, **flags: Any) -> list[Any]:
    """All that decides what a run with these flags learns: its first state and its update, which is not compiled."""
    args, batch = make_args(algorithm, flags), ()
    if algorithm in (appo, asac):
        env = inspect_env(args)
        functions = algorithm.make_algorithm(args, env.spec)
        batch = (strip(example_batch(args, env, functions, 1).rollouts, 1),)
    else:
        functions = algorithm.make_algorithm(args, make(args.env, args.env_params))
    init, state = trace(functions.init, args.num_agents, jnp.int32(0))
    update, _ = trace(functions.update, args.num_agents, state, *batch)
    return [init, update, args.members]


CASES = (ppo, PPO), (ppo_rnn, MEMORY), (sac, SAC), (appo, APPO), (asac, ASAC)
LEARNING = [(one, flag, *case) for one, cases in CASES for flag, case in cases.items() if (one, flag) not in ACTORS]


@pytest.mark.parametrize(("algorithm", "flag", "value", "others"), LEARNING, ids=lambda x: getattr(x, "__name__", None))
def test_every_flag_changes_what_is_learned(algorithm, flag, value, others):
    assert program(algorithm, **others) != program(algorithm, **others | {flag: value})


@pytest.mark.parametrize("flag", sorted(flag for _, flag in ACTORS))
def test_every_flag_of_actors_changes_what_is_learned(flag):
    value, others = APPO[flag]

    def learned(**flags):
        return appo.train(small_appo_args(serial=True, benchmark=True, total_timesteps=512, **others | flags)).params

    assert not same_bits(learned(), learned(**{flag: value}))


@pytest.mark.parametrize("algorithm", [ppo, sac, appo], ids=lambda module: module.__name__)
def test_the_same_flags_are_the_same_program(algorithm):
    """Otherwise the cases above would show nothing."""
    assert program(algorithm) == program.__wrapped__(algorithm)


def num_devices(tmp_path, **_):
    assert len(jax.devices()) >= 2
    start(tmp_path / "one")
    start(tmp_path / "two", num_devices=2)
    assert [len(read_config(tmp_path / name)["devices"]) for name in ("one", "two")] == [1, 2]


def sharding(tmp_path, monkeypatch, **_):
    """What is learned is the same, and a resumed run goes on with what it had, exactly, or with the other one."""
    used, flags = [], {"num_devices": 2, "eval_interval": UPDATE, "env": "helpers:Luck"}

    def watched(*args, **how):
        used.append(args)
        return shard_mapped(*args, **how)

    monkeypatch.setattr("common.device.programs.shard_mapped", watched)
    pmap = start(tmp_path / "pmap", **flags)
    assert not used
    whole = start(tmp_path / "whole", **flags, sharding="shard_map")
    part = start(tmp_path / "part", **flags, sharding="shard_map", stop_after=UPDATE)
    shutil.copytree(part.run_dir, tmp_path / "other")
    resumed = ppo.train(ppo.Args.from_run(part.run_dir, env="helpers:Luck"))
    assert resumed.state_sha256 == whole.state_sha256 != part.state_sha256
    assert len(used) == 3
    other = ppo.train(ppo.Args.from_run(tmp_path / "other", env="helpers:Luck", sharding="pmap"))
    assert len(used) == 3
    assert relative_difference(pmap.params, whole.params) < 1e-6
    assert relative_difference(pmap.params, other.params) < 1e-6


def keep_checkpoints(tmp_path, **_):
    for keep, wanted in ((1, [96]), (2, [64, 96]), (0, [32, 64, 96])):
        start(tmp_path / str(keep), checkpoint_interval=UPDATE, keep_checkpoints=keep)
        assert checkpoint_steps(tmp_path / str(keep)) == wanted


def keep_best(tmp_path, **_):
    flags = {"checkpoint_interval": UPDATE, "eval_interval": UPDATE, "log_interval": UPDATE, "keep_checkpoints": 1}
    flags |= {"env": "CartPole-v1", "total_timesteps": 8 * UPDATE, "seed": 3}
    flags["learning_rate"] = 0.1  # so large that it gets worse again
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


def save_envs(tmp_path, capsys, **_):
    """Without them a checkpoint holds what is learned, and a resumed run begins new episodes."""
    flags = {"num_seeds": 2, "checkpoint_interval": UPDATE, "env": "helpers:Toy", "normalize_obs": True}
    whole = start(tmp_path / "with", **flags)
    part = start(tmp_path / "without", **flags, save_envs=False, stop_after=2 * UPDATE)
    stored = read(part.run_dir / "checkpoints" / str(2 * UPDATE), None, lambda shapes: None)
    assert {name.split("/")[0] for name in stored} == {"learner"}
    resumed = ppo.train(ppo.Args.from_run(part.run_dir, env="helpers:Toy", quiet=False))
    assert "without its environments, which are not in the checkpoint: new episodes begin" in capsys.readouterr().out
    assert (resumed.status, resumed.env_steps) == ("finished", whole.env_steps)
    assert resumed.state_sha256 != whole.state_sha256
    zeros, ones = (TrainState({"w": x((1, 2))}, {"obs": x((1, 2)), "replay": x((1, 2))}) for x in (np.zeros, np.ones))
    shapes = jax.eval_shape(lambda x: jax.tree.map(lambda x: x[None], x), zeros)
    devices = jax.devices()[:1]
    state = place(Start(host=zeros, renewed=("shard/obs",)), lambda: to_devices(ones, shapes, devices), shapes, devices)
    assert [float(x.sum()) for x in (state.learner["w"], state.shard["obs"], state.shard["replay"])] == [0, 2, 0]


def overwrite(tmp_path, **_):
    start(tmp_path, seed=1)
    start(tmp_path, seed=2, overwrite=True)
    assert read_config(tmp_path)["args"]["seed"] == 2
    assert len(read_rows(tmp_path)) == 1


def max_seconds(tmp_path, **_):
    result = start(tmp_path, max_seconds=1.0, total_timesteps=10**9, log_interval=10_000)
    assert result.status == "stopped"
    assert result.env_steps < 10**9
    assert not (tmp_path / "DONE").exists()


def stop_at_return(tmp_path, capsys, **_):
    """At the first evaluation that reaches it; a resumed run knows, and goes on for a higher one."""
    flags = {"env": "helpers:Luck", "eval_interval": UPDATE, "quiet": False}
    result = start(tmp_path, **flags, stop_at_return=0.0)
    assert (result.status, result.env_steps) == ("finished", UPDATE)
    assert result.evaluation["eval/return_mean"][0] > 0
    assert (tmp_path / "DONE").exists()
    assert checkpoint_steps(tmp_path) == [UPDATE]
    assert "finished at step 32 of 96" in capsys.readouterr().out
    again = ppo.train(ppo.Args.from_run(tmp_path, **flags))
    assert (again.status, again.env_steps, again.state_sha256) == ("finished", UPDATE, result.state_sha256)
    assert "--stop-at-return None" in capsys.readouterr().out
    longer = ppo.train(ppo.Args.from_run(tmp_path, **flags, stop_at_return=1e6))
    assert (longer.status, longer.env_steps) == ("finished", 96)


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


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize(
    "broken",
    ["endings.draw_curve", "training.rate_members", "runs.reports.footer", "runs.companion.Nobody.remarks", ""],
)
def test_what_is_drawn_or_told_at_the_end_warns_where_it_fails(broken, tmp_path, monkeypatch, capsys):
    """Without a name it is the writer of TensorBoard's files that fails when it is closed."""

    def fail(*_):
        raise RuntimeError("no paint left")

    recorder = Recorder()
    recorder.close = fail
    monkeypatch.setitem(sys.modules, "tensorboardX", recorder)
    if broken:
        monkeypatch.setattr(f"common.{broken}", fail)
    result = start(tmp_path, tensorboard=not broken, total_timesteps=UPDATE)
    stored = json.loads((tmp_path / "result.json").read_text())
    assert (result.status, stored["status"], stored["state_sha256"]) == ("finished", "finished", result.state_sha256)
    assert (tmp_path / "DONE").exists()
    assert capsys.readouterr().err.count("no paint left") == 1


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
    where = {"project": "walking", "group": "long legs", "name": "third try"}
    start(tmp_path, wandb=True, **{f"wandb_{name}": value for name, value in where.items()})
    assert recorder.calls[0][0] == "init"
    assert recorder.calls[0][2]["config"]["args"]["num_envs"] == 4
    assert recorder.calls[0][2].items() >= where.items()
    logged = [(args, kwargs) for name, args, kwargs in recorder.calls if name == "log"]
    assert "loss/policy" in logged[-1][0][0]
    assert logged[-1][1] == {"step": 96}
    assert recorder.calls[-1][0] == "finish"
    start(tmp_path / "defaults", wandb=True)
    (defaults,) = [kwargs for name, _, kwargs in recorder.calls if name == "init" and kwargs["project"] == "pmaprl"]
    assert (defaults["name"], defaults["group"]) == ("defaults", None)


@contextmanager
def without_cache():
    """JAX as it is before a run has named a directory for compiled programs."""
    names = "jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    kept = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    try:
        yield
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)
        reset_cache()


def compile_cache(tmp_path, monkeypatch, **_):
    for enabled, size in ((True, 6), (False, 7)):  # two programs, that no other test has
        home = tmp_path / str(enabled)
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        with without_cache():
            start(tmp_path / f"run {enabled}", compile_cache=enabled, hidden_sizes=(size,))
        assert home.exists() is enabled
        assert any((home / "pmaprl").glob("*-cache")) is enabled


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


def test_a_resumed_run_is_not_judged_by_a_state_that_is_gone(tmp_path):
    """Of all checkpoints only the first one loads, which was evaluated lower than what result.json says of the last."""
    flags = {"env": "helpers:Luck", "eval_interval": UPDATE, "checkpoint_interval": UPDATE, "eval_episodes": 8}
    result = start(tmp_path, **flags)
    for step in (64, 96):
        (tmp_path / "checkpoints" / str(step) / "state" / "_METADATA").unlink()
    first, *_ = [row["eval/return_mean"] for row in read_rows(tmp_path) if "eval/return_mean" in row]
    goal = max(first, result.evaluation["eval/return_mean"][0]) + 1
    record = result_of(tmp_path) | {"eval/return_mean": [goal + 1]}
    (tmp_path / "result.json").write_text(json.dumps(record))
    flags |= {"stop_at_return": goal, "stop_after": 64}
    again = ppo.train(ppo.Args.from_run(tmp_path, **flags))
    assert (again.status, again.env_steps) == ("stopped", 64)


def test_flags_of_a_resume_that_trains_nothing_are_not_noted(tmp_path):
    start(tmp_path, env="helpers:Luck")
    before = (tmp_path / "config.json").read_text()
    assert ppo.train(ppo.Args.from_run(tmp_path, env="helpers:Luck", gamma=0.5)).status == "finished"
    assert (tmp_path / "config.json").read_text() == before
    assert (tmp_path / "DONE").exists()


def test_a_run_that_was_killed_before_its_last_evaluation_is_evaluated_on_resume(tmp_path):
    result = start(tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "checkpoints" / "96" / "metrics" / "metrics").unlink()
    again = ppo.train(ppo.Args.from_run(tmp_path, env="helpers:Luck"))
    assert (again.status, again.state_sha256) == ("finished", result.state_sha256)
    assert again.evaluation == result.evaluation
    assert read_rows(tmp_path)[-1]["eval/return_mean"] == pytest.approx(result.evaluation["eval/return_mean"][0])
    assert (tmp_path / "checkpoints" / "96" / "metrics" / "metrics").exists()


@pytest.mark.parametrize("ended", ["by a signal", "without a word"])
def test_a_run_that_was_cut_short_before_its_best_was_confirmed_confirms_it_on_resume(ended, tmp_path):
    start(tmp_path, env="helpers:Luck", eval_interval=UPDATE, checkpoint_interval=UPDATE, eval_episodes=8)
    before, rows = result_of(tmp_path), read_rows(tmp_path)
    cut = {name: x for name, x in before.items() if not name.startswith("best/")} | {"status": "interrupted"}
    (tmp_path / "result.json").write_text(json.dumps(cut))
    if ended != "by a signal":
        (tmp_path / "result.json").unlink()
    for path in (tmp_path / "checkpoints").glob("*/metrics/metrics"):
        path.write_text(json.dumps({"returns": json.loads(path.read_text())["returns"]}))
    again = ppo.train(ppo.Args.from_run(tmp_path, env="helpers:Luck"))
    assert (again.status, bool(before["best/return_mean"])) == ("finished", True)
    assert all(result_of(tmp_path)[name] == before[name] for name in before if name[:5] in ("best/", "eval/"))
    assert len(read_rows(tmp_path)) == len(rows) + (ended != "by a signal"), "it was evaluated again"


def test_what_cannot_be_confirmed_is_not_tried_again_on_resume(tmp_path, capfd):
    start(tmp_path, env="helpers:Luck", eval_interval=UPDATE, checkpoint_interval=UPDATE, eval_episodes=8)
    for path in (tmp_path / "checkpoints").glob("*/metrics/metrics"):
        path.write_text(json.dumps({"returns": json.loads(path.read_text())["returns"]}))
    rows = read_rows(tmp_path)
    assert ppo.train(ppo.Args.from_run(tmp_path, env="helpers:Luck", quiet=False)).status == "finished"
    assert "compiling" not in capfd.readouterr().out
    assert read_rows(tmp_path) == rows


@pytest.mark.parametrize("algorithm", [ppo, appo], ids=lambda module: module.__name__)
def test_a_callback_sees_every_row_and_ends_the_run(algorithm, tmp_path):
    """At the second row, saved and evaluated; what a resumed run learns from there is what it would have learned."""
    seen = []

    def end_at_the_second(row):
        seen.append(dict(row))
        row.clear()
        return len(seen) == 2

    toy = {"env": "helpers:Luck", "log_interval": UPDATE}
    args = small_args(**BASE | toy) if algorithm is ppo else small_appo_args(serial=True, log_interval=128)
    args.run_dir, args.quiet, update = str(tmp_path), False, args.steps_per_update  # the console shows the row, too
    result = algorithm.train(args, callback=end_at_the_second)
    assert (result.status, result.env_steps) == ("stopped", 2 * update)
    assert seen == read_rows(tmp_path)
    assert [row["env_steps"] for row in seen] == [update, 2 * update, 2 * update]
    assert "eval/return_mean" in seen[-1]
    assert checkpoint_steps(tmp_path) == [2 * update]
    if algorithm is ppo:  # APPO's environments begin anew
        resumed = ppo.train(ppo.Args.from_run(tmp_path, env=args.env))
        assert (resumed.status, resumed.state_sha256) == ("finished", start(**toy).state_sha256)


def test_a_callback_that_raises_fails_the_run_which_resumes_as_if_it_had_not(tmp_path):
    """Who has called `train` gets the very error; what was saved before is whole, and the end is the same."""

    def fail_at_the_third(row):
        if row["env_steps"] == 3 * UPDATE:
            raise LookupError("a mistake of the user's")

    toy = {"env": "helpers:Luck", "log_interval": UPDATE, "checkpoint_interval": UPDATE}
    with pytest.raises(LookupError, match="a mistake of the user's"):
        ppo.train(small_args(**BASE | toy, run_dir=str(tmp_path)), callback=fail_at_the_third)
    assert (result_of(tmp_path)["status"], result_of(tmp_path)["reason"][:11]) == ("failed", "LookupError")
    assert checkpoint_steps(tmp_path) == [UPDATE, 2 * UPDATE]
    resumed = ppo.train(ppo.Args.from_run(tmp_path, env=toy["env"]))
    assert (resumed.status, resumed.state_sha256) == ("finished", start(**toy).state_sha256)
    assert [row["env_steps"] for row in read_rows(tmp_path)] == [UPDATE, 2 * UPDATE, 3 * UPDATE]


def test_a_longer_run_says_where_what_falls_to_zero_begins_again(tmp_path, capsys):
    flags = {"env": "helpers:Luck", "log_interval": UPDATE, "quiet": False}
    start(tmp_path, **flags, ent_coef=0.2, ent_fraction=1.0)
    printed = capsys.readouterr().out
    assert all(re.search(words, printed) for words in ("learning rate .* 0.025\n", "entropy coefficient .* 0.1\n"))
    ppo.train(ppo.Args.from_run(tmp_path, **flags, total_timesteps=2 * 96))
    assert re.search("at step 96 .*learning rate 0.025 .*entropy coefficient 0.1\n", capsys.readouterr().out)
    for name, first in (("learning_rate", 0.05), ("ent_coef", 0.2)):
        sizes = [row[name] / first for row in read_rows(tmp_path)]
        assert sizes == pytest.approx([1, 2 / 3, 1 / 3, 1 / 2, 1 / 3, 1 / 6])


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"ent_coef": 0.0, "ent_fraction": 1.0}, ["learning rate .* 0.025"]),
        ({"ent_fraction": 0.4}, ["learning rate .* 0.025"]),
        ({"ent_fraction": 0.5, "lr_schedule": "constant"}, []),
        ({"ent_fraction": 0.8, "lr_schedule": "constant"}, ["entropy coefficient .* 0.0375"]),
        ({"ent_fraction": 0.8, "grid": ("ent_coef=0.1,0.2",)}, ["learning rate .* 0.025", "entropy .* 0.38 times"]),
    ],
)
def test_only_what_is_above_zero_halfway_begins_again(flags, wanted):
    args = ppo.Args(**{"learning_rate": 0.05, "ent_coef": 0.1} | flags)
    assert all(re.search(words, found) for words, found in zip(wanted, schedule_notes(args), strict=True))


RUN = (
    num_devices,
    sharding,
    save_envs,
    keep_checkpoints,
    keep_best,
    overwrite,
    max_seconds,
    stop_at_return,
    gif,
    tensorboard,
    wandb,
)
RUN += (compile_cache, benchmark)
IN_TEST_CLI = {"checkpoint_interval", "eval_interval", "init_from", "log_interval", "quiet", "run_dir", "stop_after"}
IN_TEST_CLI |= {"list_envs", "resume_or_start"}
OF_WANDB = {"wandb_project", "wandb_group", "wandb_name"}
IN_TEST_COMMON = {"eval_episodes"}
IN_TEST_TUNED = {"tuned"}
IN_TEST_INVARIANTS = {"num_seeds", "resume"}
IN_TEST_POPULATION = {"population", "sweep", "grid"}
IN_TEST_PBT = {field.name for field in dataclasses.fields(PbtArgs) if field.name.startswith("pbt")} - {"pbt_env_params"}
IN_TEST_ENV_PARAMS = {"pbt_env_params", "log_info"}
IN_TEST_DISTRIBUTED = {"distributed", "coordinator", "num_processes", "process_id"}
IN_TEST_SAC = {"save_buffer"}
IN_TEST_APPO = {"actor_devices", "env", "eval_episodes", "learner_devices", "lockstep", "on_full", "queue_size"}
IN_TEST_APPO |= {"sampler_only", "serial", "vectorization"}
IN_TEST_ASAC = {"max_ahead"}
IN_TEST_HOST = {"eval_env_params"}
IN_TEST_HOST |= {"learner_timeout", "max_restarts", "reset_timeout", "restart_interval", "step_timeout"}


def names(args_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(args_class)}


def test_every_flag_has_a_case():
    assert IN_NO_PROGRAM & (PPO | SAC | APPO).keys() == {"seed"}, "which `init` takes as a number"
    elsewhere = IN_TEST_TUNED | OF_WANDB | IN_TEST_CLI | IN_TEST_COMMON | IN_TEST_INVARIANTS
    elsewhere |= IN_TEST_POPULATION | IN_TEST_PBT | IN_TEST_ENV_PARAMS | IN_TEST_DISTRIBUTED
    of_runs = {case.__name__ for case in RUN} | elsewhere
    assert PPO.keys() | of_runs == names(ppo.Args)
    assert names(sac.Args) - names(DeviceEnvArgs) <= SAC.keys() | IN_TEST_SAC
    assert names(appo.Args) - names(ProcessArgs) <= APPO.keys() | IN_TEST_APPO | IN_TEST_HOST
    assert names(asac.Args) - names(sac.Args) - names(HostEnvArgs) == IN_TEST_ASAC
    assert names(ppo_rnn.Args) - names(DeviceEnvArgs) <= MEMORY.keys() | THE_SAME_CODE


@pytest.mark.parametrize("case", RUN, ids=lambda case: case.__name__)
def test_every_flag_of_a_run_changes_something(case, tmp_path, monkeypatch, capsys):
    case(tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize("algorithm", [ppo, ppo_rnn, sac, appo, asac], ids=lambda module: module.__name__)
@pytest.mark.parametrize("flag", ["adam_b1", "adam_b2"])
def test_adam_forgets_some_of_its_averages(algorithm, flag):
    """Else it would divide by 0."""
    with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')} must be .* at most 0.999999, got 1.0"):
        algorithm.Args(**{flag: 1.0})


def test_without_a_change_nothing_differs(tmp_path):
    """Otherwise the cases above would show nothing. Nor do the flags of a run change what is learned."""
    again = {"log_interval": UPDATE, "eval_interval": 2 * UPDATE, "checkpoint_interval": UPDATE, "eval_episodes": 3}
    assert start(tmp_path, **again).state_sha256 == start().state_sha256


def test_tensorboard_files_are_written(tmp_path):
    pytest.importorskip("tensorboardX")
    start(tmp_path, tensorboard=True)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss/policy" in events.read_bytes()
