"""Other kits in the benchmark's tables: what is asked of them, what they write, and how they are
evaluated.
"""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import ROOT
from helpers import over_devices
from numpy.testing import assert_allclose, assert_array_equal

import benchmarks.peers.__main__ as peers
from benchmarks.peers.starts import STATES, states_of
from pmaprl.cli.errors import TrainingError
from pmaprl.device.evaluation import SEED, episode_keys, run_episodes
from pmaprl.envs.registry import make, make_host

pytestmark = pytest.mark.slow

TRAINERS = ROOT / "benchmarks" / "peers" / "trainers"
TRAINER = f"""
import sys
sys.path.insert(0, {str(TRAINERS)!r})
from rows import evaluation_points, run_of

with run_of(sys.argv) as rows:
    rows.begin("cpu", ["cpu:0"])
    if rows.args["flags"]["n_envs"] == 16:
        raise MemoryError("too large")
    for point in evaluation_points(rows.args["total_timesteps"], rows.args["eval_interval"]):
        rows.write(point, [point + seed for seed in rows.seeds])
"""


@pytest.fixture
def args(tmp_path, monkeypatch):
    """A peer that is installed already, and whose trainer takes no time."""
    (tmp_path / "train_sb3.py").write_text(TRAINER)
    monkeypatch.setattr(peers, "TRAINERS", tmp_path)
    monkeypatch.setattr(peers, "install", lambda *_: None)
    monkeypatch.setattr(peers, "python_of", lambda *_: sys.executable)
    folders = {"folder": str(tmp_path / "runs"), "results": str(tmp_path / "results")}
    return peers.Args(
        peer="sb3",
        algos=("sb3_ppo",),
        envs=("CartPole-v1",),
        seeds=2,
        total_timesteps=100,
        **folders,
    )


def test_a_peer_fills_the_same_kind_of_file(args, tmp_path):
    peers.train(args)
    (path,) = (tmp_path / "results").glob("*/sb3_ppo/CartPole-v1.json")
    record = json.loads(path.read_text())
    assert record["seeds"] == [100, 101]
    assert record["devices"] == ["cpu:0"]
    assert record["flags"]["eval_seed"] == SEED
    assert {"python", "numpy"} <= record["versions"].keys()
    assert record["flags"]["flags"]["n_steps"] == 32
    assert record["env_steps"] == list(range(5, 101, 5))
    assert record["returns"][-1] == [200, 201]
    (config, _) = (
        json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/config.json")
    )
    assert config["starts"] == states_of("CartPole-v1", 128).tolist()
    assert record["env_steps_to_threshold"] == [None, None]
    logs = (tmp_path / "runs").glob("*/metrics.jsonl")
    before = {path: path.stat().st_mtime_ns for path in logs}
    peers.train(args)
    assert {path: path.stat().st_mtime_ns for path in before} == before and len(before) == 2, (
        "one run for each seed"
    )


def test_a_peer_that_fails_says_where_the_reason_is(args, tmp_path, capsys):
    args.envs = ("Acrobot-v1", "CartPole-v1")
    with pytest.raises(TrainingError, match="2 of 4 runs failed"):
        peers.train(args)
    assert "MemoryError: too large" in capsys.readouterr().out
    assert len(list((tmp_path / "results").glob("*/*/*.json"))) == 1


class Countdown:
    """Episodes of as many steps as the parameters say; each rewards the action."""

    def reset(self, key, params):
        return jnp.zeros(2), jnp.int32(0)

    def step(self, key, state, action, params):
        return jnp.ones(2), state + 1, action, state + 1 >= params, {}


def test_a_peer_in_jax_is_evaluated_between_updates_with_its_greedy_actions(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINERS))
    import on_device
    import rows

    wanted = {
        "total_timesteps": 35,
        "eval_interval": 10,
        "seed": 5,
        "num_seeds": 2,
        "platform": "cpu",
    }
    wanted |= {"eval_episodes": 3, "eval_seed": 0}
    (tmp_path / "config.json").write_text(json.dumps({"args": wanted}))
    peer = on_device.Peer(
        init=lambda key: {"updates": jnp.int32(0), "key": jax.random.uniform(key)},
        # An integer that goes on as a float
        update=lambda state: state | {"updates": state["updates"] + 1.0},
        # Obs: 0 first, then 1
        act=lambda state, obs, memory: (state["updates"] + obs[0] + memory, memory + 10),
        env=Countdown(),
        env_params=3,
        steps_per_update=4,
        memory=0.0,
    )
    on_device.train(rows.Rows(tmp_path), peer)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    steps = [row["env_steps"] for row in written]
    assert steps == [8, 16, 28, 36], "whole updates, evenly, and the end"
    assert [row["eval/return_mean"] for row in written] == [
        [3 * step / 4 + 2 + 30] * 2 for step in steps
    ]
    assert all(0 < row["time/compile"] < row["time/wall"] for row in written)


def test_a_peer_in_jax_plays_the_episodes_of_the_kit(monkeypatch):
    """By a policy of both, with chance at the start and in the steps."""
    monkeypatch.syspath_prepend(str(TRAINERS))
    import on_device

    def act(obs):
        return jnp.int32(jnp.zeros(obs.shape[:-1]))

    env, env_params = on_device.make("BernoulliBandit-misc")
    peer = on_device.Peer(
        init=None,
        update=None,
        act=lambda state, obs, memory: (act(obs), memory),
        env=env,
        env_params=env_params,
        steps_per_update=1,
    )
    earned, others = jax.jit(
        lambda: [on_device.returns(peer, 16, seed, None) for seed in (SEED, SEED + 1)]
    )()
    game = make("BernoulliBandit-misc")  # outside of the program: its space is made of arrays
    ours = over_devices(lambda: run_episodes(game, act, 16), 1).ret
    assert_array_equal(earned, ours[0])
    assert not np.array_equal(others, ours[0])


def test_a_convolution_that_a_peer_gets_is_that_of_flax(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINERS))
    from train_pure import convolved

    def outputs(how, strides=1):  # of two seeds
        layer = nn.Conv(
            16,
            kernel_size=(3, 3),
            strides=strides,
            padding="VALID",
            conv_general_dilated=how,
        )
        keys = jax.random.split(jax.random.key(1), 2)
        return jax.vmap(
            lambda key: layer.init_with_output(key, jax.random.normal(key, (5, 10, 9, 4)))[0]
        )(keys)

    assert_allclose(outputs(convolved), outputs(None), atol=1e-5)
    with pytest.raises(NotImplementedError):
        outputs(convolved, strides=2)


class Anything(ModuleType):
    """A module that is not installed here: what is imported from it is a class without anything in
    it.
    """

    def __getattr__(self, name):
        return type(name, (), {})


@pytest.fixture
def train_sb3(monkeypatch):
    """The trainer of SB3, without SB3."""
    monkeypatch.syspath_prepend(str(TRAINERS))
    of_sb3 = ("base_class", "callbacks", "env_util", "vec_env")
    for name in (
        "torch",
        "stable_baselines3",
        *(f"stable_baselines3.common.{one}" for one in of_sb3),
    ):
        monkeypatch.setitem(sys.modules, name, Anything(name))
    yield importlib.import_module("train_sb3")
    sys.modules.pop("train_sb3")


@pytest.mark.parametrize("name", STATES)
def test_episodes_of_gymnasium_begin_where_those_of_the_kit_do(name, train_sb3):
    """And go on as those do: by the same actions they see the same."""
    env = make(name)
    key = jax.random.fold_in(jax.random.key(SEED), 1)
    obs, state = env.reset(episode_keys(key)[0])
    seeds = []
    theirs = SimpleNamespace(envs=[gymnasium.make(name) for _ in range(2)])
    theirs.reset = lambda: np.stack([one.reset(seed=3)[0] for one in theirs.envs])
    theirs.seed = seeds.append
    rows = SimpleNamespace(args={"eval_seed": 7})
    evaluation = SimpleNamespace(
        _envs=theirs,
        _starts=states_of(name, 2).tolist(),
        _rows=rows,
    )
    seen = train_sb3.Evaluation._begin(evaluation)
    assert seeds == [7]
    assert not np.array_equal(*seen)
    assert_allclose(seen[1], obs, atol=1e-6)
    action = env.action_space.low * 0.5 if hasattr(env.action_space, "low") else 0
    for _ in range(3):
        obs, state, reward, *_ = env.advance(key, state, action)
        seen, their_reward, *_ = theirs.envs[1].step(action)
        assert_allclose(seen, obs, atol=1e-4)
        assert their_reward == pytest.approx(float(reward), abs=1e-4)


def test_episodes_on_the_host_begin_where_those_of_the_kit_do():
    angles, speeds = states_of("gymnasium:Pendulum-v1", 5).T
    for begun, count in ((0, 3), (3, 2)):
        envs = make_host("gymnasium:Pendulum-v1", count, SEED + begun, vectorization="sync")
        seen = envs.reset()
        those = slice(begun, begun + count)
        envs.close()
        columns = [np.cos(angles[those]), np.sin(angles[those]), speeds[those]]
        starts = np.stack(columns, axis=-1)
        assert_allclose(seen, starts, atol=1e-6)
