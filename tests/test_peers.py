"""Other kits in the benchmark's tables: what is asked of them, what they write, and how they are evaluated."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from cli_helpers import ROOT, refusal

import benchmarks.peers.__main__ as peers
from benchmarks.sets import goals, goals_of_peer
from common.cli.errors import TrainingError

TRAINERS = ROOT / "benchmarks" / "peers" / "trainers"
TRAINER = f"""
import sys
sys.path.insert(0, {str(TRAINERS)!r})
from rows import evaluation_points, run_of

with run_of(sys.argv) as rows:
    rows.args["packages"] = ["numpy[extra]==1.0"]  # is there
    rows.describe(["cpu"])
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


def test_a_peer_fills_the_same_kind_of_file(args, tmp_path):
    peers.train(args)
    (path,) = (tmp_path / "results").glob("*/sb3_ppo/CartPole-v1.json")
    record = json.loads(path.read_text())
    assert record["command"] == (
        "python -m benchmarks.peers --peer sb3 --algos sb3_ppo --envs CartPole-v1 --seeds 2 --total-timesteps 100"
    )
    assert record["seeds"] == [100, 101]
    assert set(record["versions"]) == {"python", "numpy"}
    assert record["env_steps"] == list(range(5, 101, 5))
    assert record["returns"][-1] == [200, 201]
    assert record["flags"]["flags"]["n_steps"] == 32
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


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--peer nosuch", "--peer must be"),
        ("--peer purejaxrl", "--source has to name a checkout of PureJaxRL, with purejaxrl/ppo.py in it"),
        ("--peer purejaxrl --source nowhere", "nowhere is none"),
        ("--peer sbx --envs Pendulum-v1 --algos sbx_ppo", "which has flags for sbx_ppo: CartPole-v1, "),
        ("--peer sb3 --seeds 0", "--seeds must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(words, wanted):
    assert wanted in refusal(peers.train, peers.Args, words.split())


def test_peers_train_on_tasks_of_the_kit_with_flags_that_they_take():
    ours = {(goal.set, goal.env, goal.steps) for goal in goals()}
    found = {peer: goals_of_peer(peer) for peer in ("sb3", "sbx", "rejax", "purejaxrl")}
    assert all((goal.set, goal.env, goal.steps) in ours for several in found.values() for goal, _ in several)
    assert {goal.env for goal, _ in found["purejaxrl"]} >= {"CartPole-v1", "Asterix-MinAtar", "Freeway-MinAtar"}
    assert any("use_sde" in flags for _, flags in found["sb3"])
    assert not any("use_sde" in flags for _, flags in found["sbx"])
    assert {goal.algorithm for goal, _ in found["sbx"]} == {"sbx_ppo", "sbx_sac"}


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

    wanted = {"total_timesteps": 35, "eval_interval": 10, "seed": 5, "num_seeds": 2}
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


def test_only_training_counts_for_the_speed_of_a_peer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINERS))
    import rows

    now = iter([0.0, 1.0, 6.0, 10.0, 18.0, 20.0])  # compiling takes 5 s, evaluating 8 s
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    (tmp_path / "config.json").write_text(json.dumps({"args": {"total_timesteps": 70}}))
    run = rows.Rows(tmp_path)
    with run.compiling():
        pass
    with run.evaluating():
        pass
    run.write(70, [1.0])
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["time/wall"], row["time/compile"], row["time/sps_total"]) == (20, 5, 10)
