"""`common/export.py`, `common/play.py` and forks: policies that leave the repository, and what is refused."""

import json
import re
from typing import Any

import jax
import numpy as np
import pytest
from cli_helpers import ROOT, SMALL, refusal, run_python, run_script, succeed
from PIL import Image

import common.export
import common.play
from common.cli.command import main, parse
from common.policy import load_policy
from notebooks.refresh import copy_repository

DOCS = (ROOT / "docs" / "using-a-policy.md").read_text()
RUNS = "normalised", "one-hot", "bytes", "parts", "hybrid", "sac"


def observations(policy, size: int) -> Any:
    rng = np.random.default_rng(size)
    return jax.tree.map(lambda x: np.abs(rng.normal(0, 2, (size, *x.shape))).astype(x.dtype), policy.env.obs_like)


def assert_same_actions(ours: Any, theirs: Any, atol: float) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


def snippet(kind: str) -> str:
    """The code under `<!-- load KIND -->` in the documentation."""
    return re.search(rf"<!-- load {kind} -->\n```python\n(.*?)```", DOCS, re.DOTALL)[1]


@pytest.mark.parametrize("name", RUNS)
def test_an_exported_policy_acts_like_the_loaded_one_for_every_batch_size(trained, tmp_path, name):
    words = [str(trained(name)[0]), "--out", str(tmp_path / "p.stablehlo")]
    assert main(common.export.export, parse(common.export.Args, words)) == 0
    exported = jax.export.deserialize(bytearray((tmp_path / "p.stablehlo").read_bytes()))
    assert set(exported.platforms) == {"cpu", "cuda"}
    policy = load_policy(trained(name)[0])
    weights = sum(x.nbytes for x in jax.tree.leaves(policy._learner.params.actor))
    assert (tmp_path / "p.stablehlo").stat().st_size < weights + 20_000, "neither critics nor optimizer belong there"
    for size in (1, 2, 7):
        obs = observations(policy, size)
        assert_same_actions(exported.call(obs), policy(obs), atol=1e-6)


@pytest.mark.parametrize("kind", ["stablehlo", "onnx"])
def test_an_exported_policy_with_memory_acts_like_the_loaded_one_step_by_step(trained, tmp_path, kind):
    policy, out = load_policy(trained("memory")[0]), tmp_path / f"p.{kind}"
    if kind == "onnx":
        pytest.importorskip("jax2onnx")
    common.export.export_policy(policy, out)
    inputs = json.loads((tmp_path / f"p.{kind}.json").read_text())["inputs"]
    memory = {name: np.zeros((2, *x["shape"][1:]), x["dtype"]) for name, x in inputs.items() if "memory" in name}
    own, rng = policy.initial_memory(2), np.random.default_rng(0)
    for step in range(6):
        first, reward = np.array([step == 0, step in (0, 3)]), rng.normal(size=2).astype(np.float32)
        obs = observations(policy, 2) + step
        expected, own = policy(obs, own, first, reward=reward)
        if kind == "onnx":
            import onnxruntime

            session = onnxruntime.InferenceSession(str(out))
            action, *left = session.run(None, memory | {"obs": obs, "first": first, "reward": reward})
            memory = dict(zip(memory, left, strict=True))
        else:
            call = jax.export.deserialize(bytearray(out.read_bytes())).call
            action, left = call(obs, {name[7:]: x for name, x in memory.items()}, first, reward)
            memory = {f"memory/{name}": x for name, x in left.items()}
        np.testing.assert_allclose(action, expected, atol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(own), common.export.by_name(own), strict=True):
        np.testing.assert_allclose(memory[f"memory/{theirs}"], ours, atol=1e-5)


def test_the_documented_lines_load_it_without_the_repository(trained, tmp_path):
    out = tmp_path / "policy.stablehlo"
    main(common.export.export, common.export.Args(run=str(trained("normalised")[0]), out=str(out)))
    policy = load_policy(trained("normalised")[0])
    obs = observations(policy, 5)
    np.save(tmp_path / "obs.npy", obs)
    code = snippet("stablehlo") + 'np.save("actions.npy", policy(np.load("obs.npy")))\n'
    code += 'import sys; assert not {"common", "flax", "gymnax"} & sys.modules.keys()\n'
    done = run_python("-c", code, cwd=tmp_path, PYTHONPATH="")
    assert done.stdout in ("[0 0 0]\n", "[1 1 1]\n"), done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "actions.npy"), policy(obs), atol=1e-6)


def test_the_description_beside_it(trained, tmp_path):
    run_dir = trained("normalised")[0]
    common.export.export(common.export.Args(run=str(run_dir), out=str(tmp_path / "p.stablehlo"), agent=1))
    about = json.loads((tmp_path / "p.stablehlo.json").read_text())
    assert about["env_spec"]["action_space"] == {"type": "Discrete", "shape": [], "n": 2}
    assert (about["env"], about["algorithm"], about["step"], about["seed"]) == ("CartPole-v1", "ppo_pmap", 256, 1)
    assert about["return"] == load_policy(run_dir, seed=1).evaluation
    assert about["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("name", [*RUNS, "residual"])
def test_onnx(trained, tmp_path, monkeypatch, name):
    pytest.importorskip("jax2onnx")
    import onnxruntime

    policy, out = load_policy(trained(name)[0]), tmp_path / "policy.onnx"
    common.export.export_policy(policy, out)
    session = onnxruntime.InferenceSession(str(out))
    for size in (1, 7):
        obs = observations(policy, size)
        inputs = common.export.by_name({"obs": obs})
        assert_same_actions(session.run(None, inputs), policy(obs), atol=1e-5)
    if name in ("parts", "hybrid"):
        return
    monkeypatch.chdir(tmp_path)
    here = {}
    exec(snippet("onnx"), here)
    assert len(here["actions"]) == 3


def test_playing_prints_the_returns_and_draws_an_episode(trained, tmp_path, capsys):
    gif = tmp_path / "episode.gif"
    words = [str(trained("normalised")[0]), "--episodes", "3", "--gif", str(gif), "--stochastic"]
    episodes = common.play.play(parse(common.play.Args, words))
    lines = capsys.readouterr().out.splitlines()
    printed = [re.split(r"\s+", line) for line in lines if line.startswith("episode ")]
    assert [float(words[3]) for words in printed] == pytest.approx(episodes.ret.tolist(), abs=0.01)
    assert len(printed) == 3
    assert len(set(episodes.ret)) > 1
    with Image.open(gif) as picture:
        assert picture.n_frames == episodes.length[0] + 1


def test_stochastic_play_differs_from_greedy_play_and_repeats_with_its_seed(trained):
    def returns(**flags):
        return common.play.play(common.play.Args(run=str(trained("sac")[0]), episodes=2, **flags)).ret.tolist()

    assert returns(stochastic=True) == returns(stochastic=True)
    assert returns(stochastic=True) != returns()
    assert returns(stochastic=True) != returns(stochastic=True, seed=1)


def test_play_in_a_changed_environment(trained):
    args = common.play.Args(run=str(trained("sac")[0]), episodes=2, env_params='{"max_steps_in_episode": 5}')
    assert common.play.play(args).length.tolist() == [5, 5]


PLAY, EXPORT = (common.play.play, common.play.Args), (common.export.export, common.export.Args)


@pytest.mark.parametrize(
    ("command", "words", "wanted"),
    [
        (PLAY, "{run} --episodes 200000", "--episodes must be at least 1 and at most 100,000"),
        (PLAY, "{run} --seed -1", "--seed must be at least 0"),
        (PLAY, "{run} --step 5", "no checkpoint 5"),
        (PLAY, "{run} --step newest", "--step must be a whole number or one of best, latest, got 'newest'"),
        (PLAY, "", "name a run directory"),
        (PLAY, "{run} --agent 5", "no seed 5"),
        (PLAY, "{run} --env CartPole-v1", "the policy's observations are Box[3], those of CartPole-v1 are Box[4]"),
        (PLAY, "{run} --gif {tmp}/x.png", "must end in .gif"),
        (PLAY, "{run} --gif /dev/null", "is not a file"),
        (PLAY, "{run} --episodes 1 --gif {tmp}/" + 300 * "x" + ".gif", "File name too long"),
        (EXPORT, "{run} --out {tmp}/nowhere/p.stablehlo", "there is no folder"),
        (EXPORT, "{run} --out {tmp}/p.txt", "must end in .stablehlo or .onnx"),
        (EXPORT, "{run} --algorithm {tmp}/x.py", "x.py does not exist"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(trained, tmp_path, command, words, wanted):
    assert wanted in refusal(*command, words.format(run=trained("sac")[0], tmp=tmp_path).split())


@pytest.mark.slow
def test_a_fork_in_another_project_trains_resumes_plays_and_loads(tmp_path):
    """Three changed lines: a flag, its use in the network, and another loss."""
    clone = copy_repository(tmp_path / "clone")  # without pyproject.toml, as another project has it
    fork = clone / "algos" / "my_ppo.py"
    code = (clone / "algos" / "ppo_pmap.py").read_text()
    flag = "    vf_coef: float = 0.5\n"
    for old, new in {
        flag: '    shrink: float = 0.5\n    """Factor of the features."""\n' + flag,
        "PolicyHead(self.action_space)(x, ": "PolicyHead(self.action_space)(self.args.shrink * x, ",
        "error = jnp.square(value - target)\n": "error = 2 * optax.huber_loss(value, target)\n",
    }.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    fork.write_text(code)

    flags = [*SMALL, "--shrink", "0.25", "--total-timesteps", "512", "--run-dir", "run"]
    succeed(run_script(*flags, "--stop-after", "256", cwd=tmp_path, script=fork))
    done = succeed(run_script("--resume", "run", cwd=tmp_path, script=fork))
    assert "finished at step 512" in done.stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["script"] == "algos/my_ppo.py"

    play = "-m", "common.play", str(tmp_path / "run"), "--episodes", "2", "--step", "best"
    played = succeed(run_python(*play, cwd=clone))
    assert played.stdout.count("episode ") == 2
    assert played.stderr == ""
