"""Other kits in the benchmark's tables: what is asked of them, what they write, and how they are evaluated."""

import copy
import importlib
import json
import sys
import time
import tomllib
from types import ModuleType, SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import ROOT, run_python
from helpers import over_devices

import benchmarks.peers.__main__ as peers
from benchmarks.peers.starts import STATES, same_starts, states_of
from benchmarks.records import returns_of
from benchmarks.sets import goals_of_peer
from common.cli.errors import TrainingError
from common.device.evaluation import SEED, episode_keys, run_episodes
from common.envs.registry import make, make_host
from common.runs.history import read_log

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
    return peers.Args(peer="sb3", algos=("sb3_ppo",), envs=("CartPole-v1",), seeds=2, total_timesteps=100, **folders)


def test_trainers_take_nothing_from_the_kit_that_peers_lack():
    code = f"import sys; sys.path.insert(0, {str(TRAINERS)!r}); before = set(sys.modules); import rows\n"
    code += "found = {name.partition('.')[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names\n"
    done = run_python("-c", code + "print(*sorted(found))")
    assert done.stdout == "common numpy rows\n", done.stdout + done.stderr


def test_a_peer_fills_the_same_kind_of_file(args, tmp_path):
    peers.train(args)
    (path,) = (tmp_path / "results").glob("*/sb3_ppo/CartPole-v1.json")
    record = json.loads(path.read_text())
    assert record["command"] == (
        "python -m benchmarks.peers --peer sb3 --algos sb3_ppo --envs CartPole-v1 --seeds 2 --total-timesteps 100"
    )
    assert record["seeds"] == [100, 101]
    assert (record["devices"], {"python", "numpy"} <= record["versions"].keys()) == (["cpu:0"], True)
    assert record["env_steps"] == list(range(5, 101, 5))
    assert record["returns"][-1] == [200, 201]
    assert record["flags"]["flags"]["n_steps"] == 32
    assert record["flags"]["eval_seed"] == SEED
    (config, _) = (json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/config.json"))
    assert config["starts"] == states_of("CartPole-v1", 128).tolist()
    assert record["env_steps_to_threshold"] == [None, None]
    before = [path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/metrics.jsonl")]
    assert len(before) == 2, "one run for each seed"
    peers.train(args)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/metrics.jsonl")] == before


def test_a_peer_that_fails_says_where_the_reason_is(args, tmp_path, capsys):
    args.envs = ("Acrobot-v1", "CartPole-v1")
    with pytest.raises(TrainingError, match="2 of 4 runs failed"):
        peers.train(args)
    assert "MemoryError: too large" in capsys.readouterr().out
    assert len(list((tmp_path / "results").glob("*/*/*.json"))) == 1


def test_every_table_of_flags_is_of_a_task_that_a_peer_trains_on():
    tables = tomllib.loads((ROOT / "benchmarks" / "peers" / "peers.toml").read_text())["flags"]
    published = [flags for envs in tables.values() for flags in envs.values()]
    trained = {peer: goals_of_peer(peer) for peer in ("sb3", "sbx", "rejax", "purejaxrl")}
    used = [goal.flags for several in trained.values() for goal in several]
    assert all(flags in used for flags in published)
    assert {goal.env for goal in trained["purejaxrl"]} >= {"CartPole-v1", "Asterix-MinAtar", "Freeway-MinAtar"}
    assert {goal.algorithm for goal in trained["sbx"]} == {"sbx_ppo", "sbx_sac"}


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
        "eval_episodes": 3,
        "eval_seed": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps({"args": wanted}))
    peer = on_device.Peer(
        init=lambda key: {"updates": jnp.int32(0), "key": jax.random.uniform(key)},
        update=lambda state: state | {"updates": state["updates"] + 1.0},  # an integer that goes on as a float
        act=lambda state, obs: state["updates"] + obs[0],  # 0 in the first observation, 1 in the others
        env=Countdown(),
        env_params=3,
        steps_per_update=4,
    )
    on_device.train(rows.Rows(tmp_path), peer)
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row["env_steps"] for row in written]
    assert steps == [8, 16, 28, 36], "whole updates, evenly, and the end"
    assert [row["eval/return_mean"] for row in written] == [[3 * step / 4 + 2] * 2 for step in steps]
    assert all(0 < row["time/compile"] < row["time/wall"] for row in written)


def test_a_peer_in_jax_plays_the_episodes_of_the_kit(monkeypatch):
    """By a policy of both, in a game with chance at its start and in its steps."""
    monkeypatch.syspath_prepend(str(TRAINERS))
    import environments
    import on_device

    def act(obs):
        return jnp.argmax(obs.sum((-1, -3))[..., :5], axis=-1)

    env, env_params = environments.make("Asterix-MinAtar")
    peer = on_device.Peer(None, None, lambda state, obs: act(obs), env, env_params, 1)
    earned, others = jax.jit(lambda: [on_device.returns(peer, 16, seed, None) for seed in (SEED, SEED + 1)])()
    ours = over_devices(lambda: run_episodes(make("Asterix-MinAtar"), act, 16), 1).ret
    np.testing.assert_array_equal(earned, ours[0])
    assert not np.array_equal(others, ours[0])


class Anything(ModuleType):
    """A module that is not installed here: what is imported from it is a class without anything in it."""

    def __getattr__(self, name):
        return type(name, (), {})


@pytest.fixture
def train_sb3(monkeypatch):
    """The trainer of SB3, without SB3."""
    monkeypatch.syspath_prepend(str(TRAINERS))
    of_sb3 = ("base_class", "callbacks", "env_util", "vec_env")
    for name in ("torch", "stable_baselines3", *(f"stable_baselines3.common.{one}" for one in of_sb3)):
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
    evaluation = SimpleNamespace(_envs=theirs, _starts=states_of(name, 2).tolist(), _rows=rows)
    seen = train_sb3.Evaluation._begin(evaluation)
    assert seeds == [7]
    assert not np.array_equal(*seen)
    np.testing.assert_allclose(seen[1], obs, atol=1e-6)
    action = env.action_space.low * 0.5 if hasattr(env.action_space, "low") else 0
    for _ in range(3):
        obs, state, reward, *_ = env.advance(key, state, action)
        seen, their_reward, *_ = theirs.envs[1].step(action)
        np.testing.assert_allclose(seen, obs, atol=1e-4)
        assert their_reward == pytest.approx(float(reward), abs=1e-4)


def test_episodes_on_the_host_begin_where_those_of_the_kit_do():
    angles, speeds = states_of("gymnasium:Pendulum-v1", 5).T
    for begun, count in ((0, 3), (3, 2)):
        envs = make_host("gymnasium:Pendulum-v1", count, SEED + begun, vectorization="sync")
        seen, those = envs.reset(), slice(begun, begun + count)
        envs.close()
        starts = np.stack([np.cos(angles[those]), np.sin(angles[those]), speeds[those]], axis=-1)
        np.testing.assert_allclose(seen, starts, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "env", "same"),
    [
        ("sb3_ppo", "Pendulum-v1", True),
        ("sbx_sac", "gymnasium:Pendulum-v1", True),
        ("sbx_ppo", "gymnasium:Pendulum-v1", True),
        ("sb3_sac", "envpool:Hopper-v4", False),
        ("sb3_sac", "gymnasium:Hopper-v4", False),
        ("rejax_ppo", "Breakout-MinAtar", True),
    ],
)
def test_it_is_known_whose_evaluations_begin_where_the_kit_begins(algorithm, env, same):
    assert same_starts(algorithm, env) is same


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The module with which trainers write, and a run that it is to write."""
    monkeypatch.syspath_prepend(str(TRAINERS))
    import rows

    (tmp_path / "config.json").write_text(json.dumps({"args": {"total_timesteps": 70, "platform": "cpu"}}))
    return rows


def test_only_training_counts_for_the_speed_of_a_peer(rows, tmp_path, monkeypatch):
    now = iter([100.0, 101.0, 106.0, 110.0, 118.0, 120.0])  # compiling takes 5 s, evaluating 8 s
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    run = rows.Rows(tmp_path)
    run.begin("cpu", [])
    with run.compiling():
        pass
    with run.evaluating():
        pass
    run.write(70, [1.0])
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["time/wall"], row["time/compile"], row["time/sps_total"]) == (12, 5, 10)


def test_a_return_that_is_not_finite_costs_the_others_nothing(rows, tmp_path):
    run = rows.Rows(tmp_path)
    run.begin("cpu", [])
    run.write(10, [1.0, float("nan"), 3.0])
    values = read_log(tmp_path, ["eval/return_mean"]).series["eval/return_mean"].values
    np.testing.assert_array_equal(values, [[1, np.nan, 3]])
    record = {"returns": [[1, None, 3], [2, 5, 4]]}
    np.testing.assert_array_equal(returns_of(record), [[1, 1, 3], [2, 5, 4]])


def test_a_peer_that_finds_other_devices_than_the_kit_does_not_train(rows, tmp_path):
    (tmp_path / "DONE").touch()
    refused = pytest.raises(SystemExit, match="error: the peer runs on a gpu, where the kit has a cpu")
    with refused, rows.run_of(["", str(tmp_path)]) as run:
        run.begin("gpu", [])
    assert not (tmp_path / "DONE").exists()


def test_the_environments_of_peers_end_episodes_at_the_time_limit_too(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINERS))
    import environments

    env, env_params = environments.make("CartPole-v1")
    env_params = env_params.replace(max_steps_in_episode=3)
    obs, state = env.reset(jax.random.key(0), env_params)
    dones = []
    for _ in range(6):
        obs, state, reward, done, info = env.step(jax.random.key(1), state, 0, env_params)
        dones.append(bool(done))
    assert dones == [False, False, True] * 2
    assert info == {}
    assert copy.deepcopy(env).name == env.name == "CartPole-v1"


PUREJAXRL = """
import gymnax
import jax
import jax.numpy as jnp

class FlattenObservationWrapper:
    def __init__(self, env):
        self.env = env
        self.action_space = env.action_space

class ActorCritic:
    def __init__(self, num_actions, activation):
        assert (num_actions, activation) == (2, "tanh")

def make_train(config):
    env, params = gymnax.make(config["ENV_NAME"])

    def train(key):
        def _update_step(carry, unused):
            counted, _ = jax.lax.scan(lambda x, _: (x + 1, None), carry[0], None, 3)
            return (counted, carry[1]), counted
        two, _ = jax.lax.scan(lambda x, _: (x + 1, None), jnp.int32(0), None, 2)  # not the one that trains
        carry, _ = jax.lax.scan(_update_step, (two, key), None, config["TOTAL_TIMESTEPS"] // 8)
        return {"runner_state": carry}
    return train
"""


def test_one_update_is_taken_out_of_purejaxrl(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINERS))
    (tmp_path / "purejaxrl").mkdir()
    (tmp_path / "purejaxrl" / "ppo.py").write_text(f"import brax.envs, navix\n{PUREJAXRL}")
    import train_purejaxrl

    brax = sys.modules.get("brax")
    flags = {"NUM_ENVS": 4, "NUM_STEPS": 2, "ACTIVATION": "tanh"}
    peer = train_purejaxrl.peer_of(str(tmp_path), {"env": "CartPole-v1", "total_timesteps": 100, "flags": flags})
    sys.path.remove(f"{tmp_path}/purejaxrl")
    before = jax.jit(peer.init)(jax.random.key(0))
    assert before[0] == 2
    assert jax.jit(peer.update)(jax.jit(peer.update)(before))[0] == 8
    assert peer.steps_per_update == 8
    assert sys.modules.get("brax") is brax, "what stands in for it is gone"
    assert jax.lax.scan(lambda x, _: (x + 1, None), 0, None, 2)[0] == 2
