"""No dead flags: every flag of every algorithm has a case here, which shows that it changes
something.
"""

import dataclasses
import functools
import inspect
import json
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import appo_pmap as appo
import dqn_pmap as dqn
import jax
import jax.numpy as jnp
import numpy as np
import ppo_pmap as ppo
import ppo_rnn_pmap as ppo_rnn
import pqn_pmap as pqn
import pytest
import sac_pmap as sac
from cli_helpers import IN_NO_PROGRAM, checkpoint_steps, read_rows
from helpers import (
    driver_of,
    result_of,
    same_bits,
    small_args,
    small_dqn_args,
    small_pqn_args,
    small_rnn_args,
    small_sac_args,
)
from jax.interpreters.partial_eval import dce_jaxpr
from PIL import Image
from test_appo import small_args as small_appo_args
from test_sac_host import small_args as small_sac_host_args

from benchmarks import tune
from pmaprl import check_env, compare, export, play, plot
from pmaprl.actors.actor import inspect_env
from pmaprl.actors.batches import example_batch
from pmaprl.actors.host_drivers import host_driver
from pmaprl.cli.checks import kinds_of, sweepable
from pmaprl.cli.command import help_text, parse, read_code
from pmaprl.cli.device_flags import DeviceEnvArgs
from pmaprl.cli.errors import UsageError
from pmaprl.cli.host_flags import ActorArgs, HostEnvArgs
from pmaprl.cli.population_flags import PbtArgs
from pmaprl.cli.run_flags import RunArgs
from pmaprl.device.sharding import AXIS, MEMBERS
from pmaprl.envs.registry import make
from pmaprl.envs.variation import run_env
from pmaprl.runs import intervals
from pmaprl.runs.checkpoints import read
from pmaprl.runs.intervals import Intervals, describe_intervals, intervals_of


class Recorder:
    """Stands in for an optional package, and records the calls."""

    def __init__(self):
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs)) or self


SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("shared_programs")
UPDATE = 32
BASE = {
    "env": "helpers:Luck",
    "num_envs": 4,
    "num_minibatches": 2,
    "hidden_sizes": (4,),
    "total_timesteps": 3 * UPDATE,
}
BASE |= {"learning_rate": 0.05, "clip_eps": 0.02}

# Flags that change what is learned, each with the value that is compared with that of the small
# runs
MATHS = {"gamma": 0.5, "adam_b1": 0.5, "adam_b2": 0.9}
ALL = {
    "hidden_sizes": (5,),
    "seed": 1,
    "normalize_obs": True,
    "byte_max": 20,
}
ON_POLICY = ALL | {
    "num_minibatches": 4,
    "lr_schedule": "constant",
    "ent_fraction": 0.75,
    "share_torso": True,
}
ON_POLICY |= {
    "exploration_loss": "symmetric-kl",
    "norm_adv": False,
    "normalize_returns": False,
    "activation": "relu",
}
ON_POLICY_MATHS = MATHS | {
    "learning_rate": 0.01,
    "gae_lambda": 0.5,
    "vf_coef": 0.1,
    "ent_coef": 0.5,
}
ON_POLICY_MATHS |= {"max_grad_norm": 0.01}
PPO_MATHS = ON_POLICY_MATHS | {"clip_eps": 0.3, "target_kl": 1e-6}
GAMES = {"opponent": "self", "opponent_interval": 1}
OF_ENVS = {
    "env": "helpers:Blink",
    "env_params": '{"max_steps_in_episode": 3}',
    "total_timesteps": 128,
} | GAMES
"""Flags that PPO with memory does not have, or that only common/ uses."""
PPO = ON_POLICY | OF_ENVS | {"num_envs": 8, "num_steps": 16, "update_epochs": 3, "desired_kl": 1e-9}
PPO |= {
    "clip_mode": "symmetric",
    "clip_vloss": True,
    "decorrelate": True,
    "reset_pool": 3,
    "precision": "bfloat16",
}
PPO |= {"encoder": "flat"}
MEMORY = {flag: value for flag, value in PPO.items() if flag not in OF_ENVS} | {
    "share_torso": False,
    "rnn": "lstm",
}
MEMORY |= {
    "rnn_size": 5,
    "rnn_layers": 2,
    "rnn_span": 9,
    "bptt_length": 2,
    "obs_prev_action_reward": True,
}
PQN_MATHS = MATHS | {
    "q_lambda": 0.5,
    "reward_scale": 2.0,
    "learning_rate": 0.01,
    "max_grad_norm": 0.01,
}
PQN = ALL | {
    "num_steps": 16,
    "update_epochs": 3,
    "num_minibatches": 4,
    "epsilon_start": 0.5,
    "epsilon_end": 0.3,
}
PQN |= {
    "epsilon_fraction": 1.0,
    "optimizer": "adam",
    "lr_schedule": "constant",
    "activation": "tanh",
}
PQN |= {
    "layer_norm": False,
    "encoder": "flat",
    "image_scale": 0.5,
    **dict.fromkeys(("rnn_size", "rnn_layers"), 2),
}
PQN |= {"rnn": "lstm", "rnn_span": 9, "bootstrap_truncated": False}
SAC_MATHS = MATHS | {
    "policy_lr": 0.01,
    "q_lr": 0.01,
    "tau": 0.1,
    "alpha": 0.5,
    "target_entropy_scale": 0.5,
}
SAC = ALL | {
    "buffer_size": 160,
    "learning_starts": 64,
    "hold_random": 2,
    "utd_ratio": 0.25,
    "batch_size": 32,
}
SAC |= {
    "policy_frequency": 2,
    "target_frequency": 2,
    "autotune": False,
    "recipe": "crossq",
    "lr_schedule": "linear",
}
SAC |= {
    "critic_norm": "layer",
    "actor_norm": "batch",
    "weight_norm": True,
    "residual": True,
    "critic_bins": 5,
}
SAC |= {
    "critic_limit": 2.0,
    "critic_hidden_sizes": (5,),
    "log_std_min": -7.0,
    "squash_log_std": False,
}
SAC |= {
    "target_networks": False,
    "weight_decay": 0.1,
    "normalize_rewards": True,
    "activation": "tanh",
}
DQN_MATHS = MATHS | {"learning_rate": 0.01, "max_grad_norm": 0.01, "tau": 0.5}
OF_SAC = {
    "policy_frequency",
    "autotune",
    "recipe",
    "critic_norm",
    "actor_norm",
    "weight_norm",
    "residual",
}
OF_SAC |= {
    "critic_bins",
    "critic_limit",
    "critic_hidden_sizes",
    "log_std_min",
    "squash_log_std",
    "target_networks",
}
DQN = {name: SAC[name] for name in SAC.keys() - OF_SAC - {"weight_decay", "normalize_rewards"}}
DQN |= {
    "epsilon_start": 0.5,
    "epsilon_end": 0.3,
    "epsilon_fraction": 1.0,
    "lr_schedule": "constant",
    "double": False,
}
DQN |= {
    "huber": True,
    "n_steps": 2,
    "distribution": "qr",
    "num_atoms": 3,
    "v_min": -5.0,
    "v_max": 5.0,
}
DQN |= {"normalize_obs": False, "dueling": True, "layer_norm": True, "encoder": "flat"}
SAC_HOST = {
    "buffer_size": 64,
    "learning_starts": 128,
    "utd_ratio": 0.5,
    "batch_size": 8,
    "normalize_obs": True,
}
SAC_HOST |= {"num_steps": 4, "seed": 1}
APPO = (
    ON_POLICY
    | ON_POLICY_MATHS
    | {"num_steps": 4, "envs_per_actor": 4, "rollouts_per_update": 1, "update_epochs": 2}
)
APPO |= {
    "loss": "impala",
    "advantage": "gae",
    "rho_clip": 0.5,
    "c_clip": 0.5,
    "pg_rho_clip": 0.5,
    "clip_eps": 0.001,
}
APPO |= {
    "clip_mode": "symmetric",
    "ratio_clamp": 1.001,
    "clip_vloss": True,
    "encoder": "nature",
    "rnn": "gru",
}
APPO |= {"rnn_size": 5, "rnn_layers": 2, "rnn_span": 9, "max_policy_lag": 1}
SAC_ON_HOST = ModuleType("sac_on_host")
SAC_ON_HOST.make_algorithm = sac.make_algorithm
CASES = {
    "ppo": (ppo, {flag: PPO[flag] for flag in PPO if flag not in GAMES}),
    "games": (ppo, GAMES),
    "sac": (sac, SAC),
    "memory": (ppo_rnn, MEMORY),
    "pqn": (pqn, PQN),
    "dqn": (dqn, DQN),
    "appo": (appo, APPO),
    "sac on the host": (SAC_ON_HOST, SAC_HOST),
}
LONG = {"update_epochs": 4, "learning_rate": 0.1, "clip_eps": 0.01}
GAME = {"env": "pgx:tic_tac_toe"}
IMAGES_ON_HOST = {"env": "gymnasium:host_toys:ImageToy-v0", "normalize_obs": False}
OTHERS = {  # by algorithm and flag, or by flag: what both runs get besides
    ("ppo", "env_params"): {"env": "helpers:Toy"},
    "critic_limit": {"critic_bins": 5},
    "desired_kl": {"lr_schedule": "kl-adaptive", "learning_rate": 0.001},
    "opponent": GAME,
    "opponent_interval": GAME | {"opponent": "self", "total_timesteps": 20 * UPDATE},
    **dict.fromkeys(("encoder", "image_scale"), {"env": "helpers:Pixels"}),
    "byte_max": {"env": "helpers:Pixels", "normalize_obs": False},
    **dict.fromkeys((("appo", "byte_max"), ("sac on the host", "byte_max")), IMAGES_ON_HOST),
    **{
        ("memory", flag): {"share_torso": False}
        for flag in MEMORY
        if flag[:3] in ("rnn", "bpt", "obs")
    },
    **{("pqn", flag): {"rnn": "gru"} for flag in ("rnn_size", "rnn_layers", "rnn_span")},
    ("appo", "encoder"): {"env": "gymnasium:host_toys:ImageToy-v0"},
    ("appo", "advantage"): {"update_epochs": 2},
    ("appo", "pg_rho_clip"): {"loss": "impala"},
    ("dqn", "num_atoms"): {"distribution": "qr"},
    **{("dqn", flag): {"distribution": "c51"} for flag in ("v_min", "v_max")},
    **{("appo", flag): LONG for flag in ("clip_eps", "clip_mode", "ratio_clamp", "clip_vloss")},
    **{("appo", flag): {"rnn": "gru"} for flag in ("rnn_size", "rnn_layers", "rnn_span")},
}


def start(run_dir: Path | None = None, **flags: Any):
    """Train with BASE and these flags."""
    where = {} if flags.get("benchmark") else {"run_dir": str(run_dir or tempfile.mkdtemp())}
    return ppo.train(small_args(**BASE | where | flags))


def resume(run_dir: Path, **flags: Any):
    return ppo.train(ppo.Args.from_run(run_dir, **{"env": "helpers:Luck"} | flags))


def make_args(algorithm: Any, flags: dict[str, Any]) -> Any:
    """Arguments of a small run."""
    if algorithm is sac:
        return small_sac_args(**{"hidden_sizes": (4,)} | flags)
    if algorithm is ppo:
        return small_args(**BASE | flags)
    if algorithm is dqn:
        return small_dqn_args(**{"env": "helpers:Luck", "hidden_sizes": (4,)} | flags)
    if algorithm is pqn:
        return small_pqn_args(**{x: BASE[x] for x in BASE if x != "clip_eps"} | flags)
    if algorithm is ppo_rnn:
        return small_rnn_args(**BASE | {"share_torso": True} | flags)
    return (small_appo_args if algorithm is appo else small_sac_host_args)(**flags)


def trace(function: Callable, agents: int, *inputs: Any) -> tuple[list[Any], Any, list[bool]]:
    """Trace what `function` of one of so many agents computes on a device, less what nothing needs;
    shapes; needed inputs.
    """
    for axis, size in ((AXIS, 1), (MEMBERS, agents)):
        function = jax.vmap(
            function,
            in_axes=None,
            axis_size=size,
            axis_name=axis,
        )
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)
    needed, used = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return [written(needed), *map(written, traced.consts)], strip(shapes, 2), used


def written(x: Any) -> Any:
    """A program, or a part of one, such that the same ones are equal: without addresses and chosen
    names.
    """
    if getattr(x, "jaxpr", x) is not x:  # since jax 0.11 a program is its own
        return written(x.jaxpr), [written(constant) for constant in x.consts]
    if hasattr(x, "eqns"):
        numbers = {}
        places = [
            [*x.constvars, *x.invars],
            *([*one.invars, *one.outvars] for one in x.eqns),
            x.outvars,
        ]
        values = [
            [str(v) if hasattr(v, "val") else numbers.setdefault(v, len(numbers)) for v in row]
            for row in places
        ]
        return values, [
            (one.primitive.name, written(one.params), str([v.aval for v in one.outvars]))
            for one in x.eqns
        ]
    if isinstance(x, dict):
        return {name: written(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [written(value) for value in x]
    return (
        (x.shape, x.tobytes()) if isinstance(x, np.ndarray) else re.sub("0x[0-9a-f]+", "", str(x))
    )


def strip(shapes: Any, axes: int) -> Any:
    """The shapes without their leading axes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[axes:], x.dtype), shapes)


@functools.cache
def program(algorithm: Any, **flags: Any) -> list[Any]:
    """All that decides what a run with these flags learns: its first state and its update, which is
    not compiled.
    """
    args = make_args(algorithm, flags)
    batch = ()
    if algorithm in (appo, SAC_ON_HOST):
        env = inspect_env(args)
        driver = host_driver(algorithm.make_algorithm(args, env.spec), args, env.spec)
        batch = (strip(example_batch(args, env, driver, 1).rollouts, 1),)
    else:
        driver = driver_of(args, run_env(args, make(args.env, args.env_params)))
    init, state, _ = trace(driver.init, args.num_agents, jnp.int32(0))
    update, *_ = trace(driver.update, args.num_agents, state, *batch)
    return [init, update, args.members]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_flag_changes_what_is_learned(name):
    """Flags without an effect are named; the same flags are the same program, or this would show
    nothing.
    """
    algorithm, cases = CASES[name]
    assert program(algorithm) == program.__wrapped__(algorithm)
    dead = []
    for flag, value in cases.items():
        others = OTHERS.get((name, flag), OTHERS.get(flag, {}))
        if program(algorithm, **others) == program(algorithm, **others | {flag: value}):
            dead.append(flag)
    assert not dead


CLIPPED = {"clip_vloss": True}


def program_of_members(
    algorithm: Any, swept: dict[str, float], **flags: Any
) -> tuple[list[Any], set[str]]:
    """An update of a member in which these flags are inputs, and which of them the new parameters
    depend on.
    """
    args = make_args(algorithm, flags)
    driver = driver_of(args, make(args.env))

    def learned(member_values):
        return driver.update(driver.init(jnp.int32(0), member_values))[0].learner.params

    traced, _, used = trace(learned, 2, {name: jnp.float32(0.5) for name in swept})
    return traced, {name for name, is_used in zip(sorted(swept), used, strict=True) if is_used}


@pytest.mark.parametrize(
    ("algorithm", "swept", "others"),
    [
        (ppo, PPO_MATHS, CLIPPED),
        (ppo_rnn, PPO_MATHS, CLIPPED),
        (pqn, PQN_MATHS, {}),
        (sac, SAC_MATHS, {}),
        (dqn, DQN_MATHS, {}),
    ],
    ids=["ppo", "memory", "pqn", "sac", "dqn"],
)
def test_x8_members_learn_by_every_flag_that_can_be_swept_and_from_their_own_values_alone(
    algorithm, swept, others
):
    """The run's own values of those flags do not change the program."""
    assert swept.keys() | {"desired_kl"} >= sweepable(algorithm.Args).keys() >= swept.keys()
    one, used = program_of_members(algorithm, swept, **others)
    other, _ = program_of_members(algorithm, swept, **others | swept)
    assert used == swept.keys()
    assert one == other


@pytest.mark.parametrize("algorithm", [ppo, ppo_rnn, pqn], ids=["ppo", "memory", "pqn"])
def test_an_update_draws_by_the_key_of_its_seed_and_by_its_own_number(algorithm):
    """Else seeds, or updates, would share their random numbers; SAC's are written down again in
    test_sac.py.
    """
    args = make_args(algorithm, {"lr_schedule": "constant"})
    driver = driver_of(args, make(args.env))
    _, state, _ = trace(driver.init, 1, jnp.int32(0))

    def learned(key, number, state):
        run = state.run.replace(key=key, updates=number)
        return driver.update(state.replace(run=run))[0].learner.params

    *_, used = trace(
        learned,
        1,
        state.run.key,
        state.run.updates,
        state,
    )
    assert used[:2] == [True, True]


@pytest.mark.slow
def test_the_number_of_actors_changes_what_is_learned():
    """The number is not in the program of an update."""
    flags = {"lockstep": True, "benchmark": True, "total_timesteps": 512}
    some, one = (
        appo.train(small_appo_args(**flags | more)).params for more in ({}, {"actor_threads": 1})
    )
    assert not same_bits(some, one)


# --------------------------------------------------------------------------------------------------
# flags of a run


def keep_checkpoints(tmp_path, **_):
    for keep, wanted in (
        (1, [96]),
        (2, [64, 96]),
        (0, [32, 64, 96]),
    ):
        start(
            tmp_path / str(keep),
            checkpoint_interval=UPDATE,
            keep_checkpoints=keep,
        )
        assert checkpoint_steps(tmp_path / str(keep)) == wanted


def keep_best(tmp_path, **_):
    """It is saved when it is found, with and without --checkpoint-interval; the learning rate makes
    it worse again.
    """
    flags = {
        "checkpoint_interval": UPDATE,
        "eval_interval": UPDATE,
        "log_interval": UPDATE,
        "keep_checkpoints": 1,
    }
    flags |= {"env": "CartPole-v1", "total_timesteps": 8 * UPDATE, "seed": 3, "learning_rate": 0.1}
    start(tmp_path / "best", **flags, keep_best=True)
    returns = {row["env_steps"]: row["eval/return_mean"] for row in read_rows(tmp_path / "best")}
    best = [step for step, value in returns.items() if value == max(returns.values())]
    assert max(best) < 8 * UPDATE, "the best is not the newest, or this shows nothing"
    start(
        tmp_path / "saves",
        **flags | {"checkpoint_interval": 0},
        keep_best=True,
    )
    for name in ("best", "saves"):
        assert checkpoint_steps(tmp_path / name) == [max(best), 8 * UPDATE]


def save_envs(tmp_path, **_):
    """Without them a checkpoint holds what is learned; a resumed run begins new episodes."""
    whole = start(tmp_path / "with")
    part = start(
        tmp_path / "without",
        save_envs=False,
        stop_after=2 * UPDATE,
    )
    stored = read(part.run_dir / "checkpoints" / str(2 * UPDATE))
    assert {name.split("/")[0] for name in stored} == {"learner", "run"}
    resumed = resume(part.run_dir)
    assert resumed.status == "finished"
    assert resumed.env_steps == whole.env_steps
    assert resumed.state_sha256 != whole.state_sha256


def max_seconds(tmp_path, **_):
    """The time is up before anything is trained: slices shorter than compiling get on all the
    same.
    """
    sliced = {"max_seconds": 1e-6, "log_interval": UPDATE}
    for result in (start(tmp_path, **sliced), resume(tmp_path, **sliced)):
        assert result.status == "stopped"
        assert not (tmp_path / "DONE").exists()
    assert result.env_steps == 2 * UPDATE


def stop_at_return(tmp_path, **_):
    """At the first evaluation that reaches it; a resumed run knows, and goes on for a higher
    one.
    """
    result = start(tmp_path, eval_interval=UPDATE, stop_at_return=0.0)
    assert result.status == "finished"
    assert result.env_steps == UPDATE
    assert result.evaluation["eval/return_mean"][0] > 0
    assert (tmp_path / "DONE").exists()
    assert checkpoint_steps(tmp_path) == [UPDATE]
    again = resume(tmp_path)
    assert again.status == "finished"
    assert again.env_steps == UPDATE
    assert again.state_sha256 == result.state_sha256
    longer = resume(tmp_path, stop_at_return=1e6)
    assert longer.status == "finished"
    assert longer.env_steps == 96


def gif(tmp_path, **_):
    start(tmp_path, gif=True)
    with Image.open(tmp_path / "policy.gif") as picture:
        assert picture.n_frames > 1


def tensorboard(tmp_path, monkeypatch, **_):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "tensorboardX", recorder)
    start(tmp_path, tensorboard=True)
    scalars = {args[0]: args[1:] for name, args, _ in recorder.calls if name == "add_scalar"}
    assert scalars["learning_rate"][1] == 96
    assert isinstance(scalars["time/sps_total"][0], float)
    ((_, (name, text, step), _),) = [call for call in recorder.calls if call[0] == "add_text"]
    assert name == "config"
    assert step == 0
    assert '"num_envs": 4' in text
    assert recorder.calls[-1][0] == "close"


def wandb(tmp_path, monkeypatch, **_):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    monkeypatch.setenv("WANDB_NAME", "third try")
    start(tmp_path, wandb=True)
    (begin, _, about), *logged, (end, *_) = recorder.calls
    assert begin == "init"
    assert end == "finish"
    assert about["config"]["args"]["num_envs"] == 4
    assert about.items() >= {"project": "pmaprl", "name": "third try"}.items()
    name, (row,), where = logged[-1]
    assert name == "log"
    assert "loss/policy" in row
    assert where == {"step": 96}


def benchmark(tmp_path, monkeypatch, capsys, **_):
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert start(benchmark=True, quiet=False).run_dir is None
    assert [*tmp_path.iterdir()] == []
    measured = json.loads(capsys.readouterr().out)
    assert measured["algorithm"] == "ppo_pmap"
    assert measured["command"] == sys.argv
    assert measured["num_envs"] == 4
    assert measured["steps_per_second"] > 0 < measured["compile_seconds"]


RUN = (
    keep_checkpoints,
    keep_best,
    save_envs,
    max_seconds,
    stop_at_return,
    gif,
    tensorboard,
    wandb,
    benchmark,
)
BY_CASE = [pytest.param(case, marks=[SLOW] * (case is keep_best), id=case.__name__) for case in RUN]


@pytest.mark.parametrize("case", BY_CASE)
def test_every_flag_of_a_run_changes_something(case, tmp_path, monkeypatch, capsys):
    case(tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


ELSEWHERE = {  # flags by the file that tests them
    "cli": "checkpoint_interval eval_interval init_from list_envs log_interval "
    "resume_or_start run_dir stop_after",
    "cli, too": "quiet overwrite",
    "common": "eval_episodes",
    "plot": "log_each",
    "tuned": "tuned",
    "invariants": "num_seeds num_devices resume",
    "population": "population sweep",
    "pbt": "sharding "
    + " ".join(x.name for x in dataclasses.fields(PbtArgs) if x.name.startswith("pbt")),
    "env_params": "log_info",
    "distributed": "distributed",
}
IN_TEST_APPO = {
    "actor_devices",
    "env",
    "eval_episodes",
    "learner_devices",
    "lockstep",
    "vectorization",
}
IN_TEST_HOST = {
    "env_params",
    "eval_env_params",
    "learner_timeout",
    "max_restarts",
    "reset_timeout",
    "step_timeout",
}
HOST = "envpool:Pendulum-v1"


def names(args_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(args_class)}


def test_every_flag_has_a_case():
    assert IN_NO_PROGRAM & (PPO | SAC | APPO).keys() == {"seed"}, "which `init` takes as a number"
    of_runs = {case.__name__ for case in RUN} | {
        x for flags in ELSEWHERE.values() for x in flags.split()
    }
    assert PPO.keys() | PPO_MATHS.keys() | of_runs == names(ppo.Args.at())
    assert names(sac.Args.at()) - names(DeviceEnvArgs) <= SAC.keys() | SAC_MATHS.keys() | {
        "save_buffer"
    }
    assert (
        names(appo.Args) - names(RunArgs)
        <= APPO.keys() | {"actor_threads"} | IN_TEST_APPO | IN_TEST_HOST
    )
    assert names(sac.Args.at(HOST)) - names(sac.Args.at()) <= names(ActorArgs)
    assert names(ppo.Args.at(HOST)) - names(ppo.Args.at()) <= names(HostEnvArgs)
    assert names(dqn.Args.at()) - names(DeviceEnvArgs) <= DQN.keys() | DQN_MATHS.keys() | {
        "save_buffer"
    }
    assert names(pqn.Args.at()) - names(DeviceEnvArgs) <= PQN.keys() | PQN_MATHS.keys() | PPO.keys()
    assert (
        names(ppo_rnn.Args.at()) - names(DeviceEnvArgs)
        <= MEMORY.keys() | PPO_MATHS.keys() | OF_ENVS.keys()
    )


def test_a_recipe_is_a_set_of_defaults():
    own = sac.Args(recipe="crossq", adam_b1=0.9)
    assert own.recipe == "crossq"
    assert own.adam_b1 == 0.9
    assert own.critic_norm == "renorm"
    assert sac.Args().critic_norm == "none"
    for same in (
        pickle.loads(pickle.dumps(own)),
        sac.Args.at(own.env)(**vars(own)),
        dataclasses.replace(own),
    ):
        assert type(same) is type(own)
        assert vars(same) == vars(own)
    typed = parse(sac.Args, ["--recipe", "xqc", "--env", HOST, "--critic-hidden-sizes", "8", "9"])
    assert typed.critic_bins == 101
    assert typed.critic_hidden_sizes == (8, 9)
    assert isinstance(typed, sac.Args.at(HOST))
    assert all(
        f"(default: {value})" in help_text(type(own), None, "program")
        for value in ("crossq", "1024 1024")
    )
    tuned = [
        sac.Args.for_env("MountainCarContinuous-v0", **flags).hold_random
        for flags in ({}, {"recipe": "xqc"})
    ]
    assert tuned == [16, 1], "flags tuned for SAC are of no use to another recipe"
    for flags in {"tau": 0.1}, {"recipe": "soup"}:
        with pytest.raises(UsageError, match=next(iter(flags))):
            sac.Args(**{"recipe": "crossq"} | flags)


ALL_ARGS = [module.Args.at() for module in (ppo, ppo_rnn, pqn, sac, dqn)]
ALL_ARGS += [ppo.Args.at(HOST), sac.Args.at(HOST), appo.Args]


@pytest.mark.parametrize("args_class", ALL_ARGS, ids=lambda args: args.__module__)
def test_help_has_every_flag_once(args_class):
    flags = re.findall(r"^  --(?:\[no-\])?([\w-]+)", help_text(args_class, None, "program"), re.M)
    assert {flag.replace("-", "_") for flag in flags} == names(args_class)
    assert len(set(flags)) == len(flags)


COMMANDS = [module.Args for module in (check_env, compare, export, play, plot, tune)]
VERBS = """
    Apply Bootstrap Clip Continue Delete Divide Draw Feed Let Log Make Measure Normalize Print
    Sample Save Scale Share Squash Start Take Tune Use Write
"""  # in the imperative, by which switches begin; a new switch may need another
NO_NOUNS = "A All Also An As How If Of Only Over The Those What When Where Whether Which Who"


@pytest.mark.parametrize("args_class", ALL_ARGS + COMMANDS, ids=lambda args: args.__module__)
def test_help_texts_are_one_sentence_of_what_a_switch_does_or_a_number_is(args_class):
    _, texts = read_code(args_class)
    for name, kind in kinds_of(args_class).items():
        text = " ".join(texts.get(name, "").split())
        first = re.split(r"[ ,.;:]", text)[0]
        assert re.fullmatch(r"[^.].*\.", text), f"{name} has no sentence: {text}"
        assert not re.search(r"\. ([A-Z]|0:)", text), f"{name} has more than one: {text}"
        assert first in VERBS.split() if kind is bool else first not in NO_NOUNS.split(), (
            f"{name}: {text}"
        )


@pytest.mark.parametrize("args_class", COMMANDS, ids=lambda args: args.__module__)
def test_help_texts_that_tyro_prints_are_one_line(args_class):
    """It keeps the ends of lines."""
    for part in args_class.__mro__[:-1]:
        assert not re.search(r'^    """.*[^"\n]$', inspect.getsource(part), re.MULTILINE)


# ------------------------------------------------------------------------- rows, evaluations and
# checkpoints in a run

SIZES = {"num_envs": 1024, "num_steps": 128}  # of an update of 131,072 steps


@pytest.mark.parametrize(
    ("flags", "on_accelerator", "log", "rare"),
    [
        pytest.param({}, False, 10_000, 100_000, id="a short run"),
        pytest.param({"total_timesteps": 5_000_000}, False, 10_000, 100_000, id="of 500 rows"),
        pytest.param({"total_timesteps": 10**9}, False, 2 * 10**6, 10**7, id="a long run"),
        pytest.param({}, True, 10_000, 100_000, id="of small updates on an accelerator"),
        pytest.param(SIZES, True, 2**20, 2**20, id="of large updates on an accelerator"),
        pytest.param(SIZES, False, 10_000, 100_000, id="of large updates on a CPU"),
        pytest.param(
            {"log_interval": 3, "total_timesteps": 10**9},
            True,
            3,
            10**7,
            id="with rows as told",
        ),
    ],
)
def test_intervals_follow_from_the_length_of_a_run(flags, on_accelerator, log, rare):
    """A long run has 500 rows and 100 evaluations; an accelerator makes eight updates or more
    without the host.
    """
    size = {"num_envs": 8, "num_steps": 125, "num_minibatches": 1}  # of an update of 1,000 steps
    chosen = intervals_of(ppo.Args(**size | flags), on_accelerator)
    assert chosen == Intervals(log=log, eval=rare, checkpoint=rare)
    assert flags.get("log_interval") or rare % log == 0, "else an evaluation is a row more"


@pytest.mark.parametrize(
    "args_class",
    [
        sac.Args.at(),
        dqn.Args.at(),
        sac.Args.at(HOST),
    ],
    ids=["sac", "dqn", "sac host"],
)
def test_intervals_of_algorithms_with_a_replay_buffer_are_shorter(args_class):
    assert intervals_of(args_class(), on_accelerator=False) == Intervals(
        log=1_000,
        eval=5_000,
        checkpoint=5_000,
    )
    longer = args_class(total_timesteps=2 * 10**6)
    assert intervals_of(longer, on_accelerator=False) == Intervals(
        log=4_000,
        eval=20_000,
        checkpoint=20_000,
    )


@pytest.mark.parametrize(
    "args_class",
    [
        ppo_rnn.Args.at(),
        pqn.Args.at(),
        ppo.Args.at(HOST),
        appo.Args,
    ],
)
def test_intervals_are_alike_wherever_environments_step(args_class):
    at_least = intervals_of(args_class(), on_accelerator=False)
    assert at_least == Intervals(log=10_000, eval=100_000, checkpoint=100_000)
    several = intervals_of(args_class(total_timesteps=10**8), on_accelerator=False)
    assert 190_000 < several.log < 210_000
    assert several.eval == several.checkpoint == 5 * several.log


def test_intervals_that_flags_name_hold():
    args = ppo.Args(
        total_timesteps=10**9,
        log_interval=7,
        eval_interval=0,
        checkpoint_interval=11,
    )
    assert intervals_of(args, on_accelerator=True) == Intervals(log=7, eval=0, checkpoint=11)
    assert (
        describe_intervals(intervals_of(args, on_accelerator=True)).split("; ")[1]
        == "evaluation at the end"
    )


def test_intervals_of_a_run_that_goes_on_follow_from_its_length(tmp_path, monkeypatch, capsys):
    """Wherever it was stopped they stay, and a longer run has longer ones."""
    monkeypatch.setattr(RunArgs, "least_log_interval", UPDATE)
    monkeypatch.setattr(RunArgs, "least_eval_interval", UPDATE)
    monkeypatch.setattr(intervals, "MOST_ROWS", 4)
    monkeypatch.setattr(intervals, "MOST_EVALUATIONS", 2)
    flags = dict.fromkeys(("log_interval", "eval_interval", "checkpoint_interval"))
    flags |= {
        "total_timesteps": 8 * UPDATE,
        "lr_schedule": "constant",
        "keep_checkpoints": 0,
        "quiet": False,
    }
    whole = start(tmp_path / "whole", **flags)
    told = f"row every {2 * UPDATE} steps; evaluation and checkpoint every {4 * UPDATE} steps"
    assert told in capsys.readouterr().out

    part = tmp_path / "part"
    start(part, **flags, stop_after=3 * UPDATE)
    assert resume(part).state_sha256 == whole.state_sha256
    assert [row["env_steps"] // UPDATE for row in read_rows(tmp_path / "whole")] == [2, 4, 6, 8]
    assert [row["env_steps"] // UPDATE for row in read_rows(part)] == [2, 3, 4, 6, 8]
    assert checkpoint_steps(part) == [3 * UPDATE, 4 * UPDATE, 8 * UPDATE]

    resume(part, total_timesteps=16 * UPDATE)
    assert [row["env_steps"] // UPDATE for row in read_rows(part)] == [2, 3, 4, 6, 8, 12, 16]
    assert checkpoint_steps(part)[-2:] == [8 * UPDATE, 16 * UPDATE]


# -------------------------------------------------------------------------------------------- how
# runs end and go on


def test_flags_of_a_run_do_not_change_what_is_learned(tmp_path):
    again = {"log_interval": UPDATE, "eval_interval": 2 * UPDATE, "checkpoint_interval": UPDATE}
    assert start(tmp_path, **again).state_sha256 == start().state_sha256


def test_what_is_drawn_or_told_at_the_end_warns_where_it_fails(tmp_path, monkeypatch, capsys):
    """A picture, an episode, and the writer of TensorBoard's files, which fails when it is
    closed.
    """

    def fail(*_):
        raise RuntimeError("no paint left")

    recorder = Recorder()
    recorder.close = fail
    monkeypatch.setitem(sys.modules, "tensorboardX", recorder)
    for drawing in ("training.draw_curve", "drawing.episodes.draw_gif"):
        monkeypatch.setattr(f"pmaprl.{drawing}", fail)
    result = start(
        tmp_path,
        gif=True,
        tensorboard=True,
        total_timesteps=UPDATE,
    )
    stored = result_of(tmp_path)
    assert result.status == "finished"
    assert stored["status"] == "finished"
    assert stored["state_sha256"] == result.state_sha256
    assert (tmp_path / "DONE").exists()
    assert capsys.readouterr().err.count("no paint left") == 3


def test_a_run_that_was_cut_short_before_its_last_evaluation_is_evaluated_on_resume(tmp_path):
    """Flags of a resume that trains nothing are not noted."""
    result = start(tmp_path, eval_interval=UPDATE, checkpoint_interval=UPDATE)
    before = result_of(tmp_path)
    rows = read_rows(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "result.json").unlink()
    again = resume(tmp_path, gamma=0.5)
    assert again.status == "finished"
    assert again.state_sha256 == result.state_sha256
    assert all(
        result_of(tmp_path)[name] == before[name]
        for name in before
        if name[:5] in ("best/", "eval/")
    )
    assert len(read_rows(tmp_path)) == len(rows) + 1, "it was evaluated again"
    assert (tmp_path / "config.json").read_text() == config


def test_a_callback_sees_every_row_and_ends_the_run(tmp_path):
    """At the second row, saved and evaluated; what a resumed run learns from there is what it would
    have learned.
    """
    seen = []

    def end_at_the_second(row):
        seen.append(dict(row))
        assert read_rows(tmp_path)[: len(seen)] == seen, "rows are read while the run goes on"
        row.clear()
        return len(seen) == 2

    # The console shows it, too
    flags = BASE | {"log_interval": UPDATE, "run_dir": str(tmp_path), "quiet": False}
    result = ppo.train(small_args(**flags), callback=end_at_the_second)
    assert result.status == "stopped"
    assert result.env_steps == 2 * UPDATE
    assert seen == read_rows(tmp_path)
    assert [row["env_steps"] for row in seen] == [UPDATE, 2 * UPDATE, 2 * UPDATE]
    assert "eval/return_mean" in seen[-1]
    assert checkpoint_steps(tmp_path) == [2 * UPDATE]
    resumed = resume(tmp_path)
    assert resumed.status == "finished"
    assert resumed.state_sha256 == start().state_sha256


def test_a_callback_that_raises_fails_the_run_which_resumes_as_if_it_had_not(tmp_path):
    """The caller of `train` gets the very error; what was saved before is whole, and the end is the
    same.
    """

    def fail_at_the_third(row):
        if row["env_steps"] == 3 * UPDATE:
            raise LookupError("a mistake of the user's")

    flags = BASE | {"log_interval": UPDATE, "checkpoint_interval": UPDATE, "run_dir": str(tmp_path)}
    with pytest.raises(LookupError, match="a mistake of the user's"):
        ppo.train(small_args(**flags), callback=fail_at_the_third)
    assert result_of(tmp_path)["status"] == "failed"
    assert result_of(tmp_path)["reason"][:11] == "LookupError"
    assert checkpoint_steps(tmp_path) == [UPDATE, 2 * UPDATE]
    resumed = resume(tmp_path)
    assert resumed.status == "finished"
    assert resumed.state_sha256 == start().state_sha256
    assert [row["env_steps"] for row in read_rows(tmp_path)] == [UPDATE, 2 * UPDATE, 3 * UPDATE]


@pytest.mark.slow
def test_what_falls_to_zero_begins_again_in_a_longer_run(tmp_path):
    start(
        tmp_path,
        log_interval=UPDATE,
        ent_coef=0.2,
        ent_fraction=1.0,
    )
    resume(tmp_path, total_timesteps=2 * 96)
    for name, first in (("learning_rate", 0.05), ("ent_coef", 0.2)):
        sizes = [row[name] / first for row in read_rows(tmp_path)]
        assert sizes == pytest.approx([1, 2 / 3, 1 / 3, 1 / 2, 1 / 3, 1 / 6])
