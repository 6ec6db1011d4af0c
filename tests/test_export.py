"""`common/pmaprl/export.py` and `common/pmaprl/play.py`: policies that leave the repository, and
policies at play.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import ROOT, run_python
from flax import struct
from helpers import only_acts
from numpy.testing import assert_allclose
from PIL import Image

import pmaprl.export
import pmaprl.play
from pmaprl.cli.command import exit_code, parse
from pmaprl.cli.errors import UsageError
from pmaprl.envs.spaces import Discrete, EnvSpec, MultiDiscrete, box
from pmaprl.export_check import random_observations
from pmaprl.nets.normalizers import running_stats
from pmaprl.policies.policy import Policy
from pmaprl.policy import StoredPolicy, load_policy

DOCS = (ROOT / "docs" / "using-a-policy.md").read_text()


def observations(policy, size: int) -> Any:
    rng = np.random.default_rng(size)

    def draw(x):
        drawn = np.abs(rng.normal(0, 2, (size, *x.shape))).astype(x.dtype)
        return np.minimum(drawn, 2) if x.dtype.kind == "i" else drawn  # a Discrete(3) has 0 to 2

    return jax.tree.map(
        draw,
        policy.env.obs_like,
    )


def assert_same_actions(ours: Any, theirs: Any, atol: float) -> None:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    for one, other in pairs:
        assert_allclose(one, other, atol=atol)


def snippet(kind: str) -> str:
    """The code under `<!-- load KIND -->` in the documentation."""
    return re.search(rf"<!-- load {kind} -->\n```python\n(.*?)```", DOCS, re.DOTALL)[1]


@pytest.mark.parametrize(
    "name",
    ["normalized", "parts", "sac"],
)
def test_an_exported_policy_acts_like_the_loaded_one_for_every_batch_size(trained, tmp_path, name):
    out = tmp_path / "p.stablehlo"
    args = parse(pmaprl.export.Args, [str(trained(name)[0]), "--out", str(out)])
    assert (
        exit_code(
            pmaprl.export.export,
            args,
        )
        == 0
    )
    exported = jax.export.deserialize(bytearray(out.read_bytes()))
    assert set(exported.platforms) == {"cpu", "cuda"}
    policy = load_policy(trained(name)[0])
    leaves = jax.tree.leaves(policy._learner.params.actor)
    weights = sum(x.nbytes for x in leaves)
    assert out.stat().st_size < weights + 20_000, "neither critics nor optimizer belong there"
    for size in (1, 7):
        obs = observations(policy, size)
        assert_same_actions(exported.call(obs), policy(obs), atol=1e-6)
    about = json.loads((tmp_path / "p.stablehlo.json").read_text())
    assert about["step"] == policy.step
    assert about["seed"] == 0
    assert about["return"] == pytest.approx(policy.evaluation)
    assert about["versions"]["jax"] == jax.__version__


class Scores(struct.PyTreeNode):
    """A learner that takes the action with the largest score."""

    weights: jax.Array  # [F, n]
    params: Any = ()


def scoring_policy(weights: Any) -> StoredPolicy:
    """The policy of such scores, linear in observations [F]."""

    def act(learner, seen, key):
        best = jnp.argmax(
            seen.obs @ learner.weights,
            axis=-1,
        )
        return best.astype(jnp.int32)

    weights = jnp.asarray(weights, jnp.float32)
    num_features, num_actions = weights.shape
    spaces = box((num_features,)), np.dtype("float32"), Discrete(num_actions)
    env = EnvSpec("Scores-v0", *spaces)
    config = {"args": {"env": "Scores-v0", "env_params": ""}, "algorithm": "scores"}
    algorithm = only_acts(act)
    return StoredPolicy(
        algorithm=algorithm,
        learner=Scores(weights),
        env=env,
        run_dir=Path("run"),
        step=0,
        seed=0,
        evaluation=None,
        config=config,
        member=0,
    )


def export_instead(monkeypatch: Any, other: Policy) -> None:
    """Let exports hold another policy than they are asked for."""
    content = pmaprl.export.to_stablehlo(other)
    monkeypatch.setitem(pmaprl.export.FORMATS, ".stablehlo", lambda policy: content)


def test_rounding_decides_between_equal_actions_and_nothing_else(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 4))
    weights[:, 1] = weights[:, 0]
    policy = scoring_policy(weights)
    out = tmp_path / "p.stablehlo"
    export_instead(monkeypatch, scoring_policy(weights + [0, 1e-7, 0, 0]))
    _, checked = pmaprl.export.export_policy(policy, out)
    assert checked.varied
    before = out.read_bytes()
    swapped = weights[:, [0, 1, 3, 2]]
    export_instead(monkeypatch, scoring_policy(swapped))
    with pytest.raises(UsageError, match="acts otherwise"):
        pmaprl.export.export_policy(policy, out)
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"p.stablehlo", "p.stablehlo.json"}


def test_a_policy_that_always_does_the_same_is_said_to(tmp_path):
    policy = scoring_policy(np.zeros((3, 2)))
    _, checked = pmaprl.export.export_policy(policy, tmp_path / "p.stablehlo")
    assert "the same action" in str(checked)


@pytest.mark.parametrize("name", ["sac", "memory"])
def test_a_file_of_another_policy_is_refused(trained, tmp_path, monkeypatch, capsys, name):
    """Actions that are numbers, and memories, differ by more than rounding."""
    run = trained(name)[0]
    noisy = load_policy(run).with_noise(np.random.default_rng(0), 0.1)
    export_instead(monkeypatch, noisy)
    words = [str(run), "--out", str(tmp_path / "p.stablehlo")]
    args = parse(pmaprl.export.Args, words)
    assert exit_code(pmaprl.export.export, args) == 2
    said = capsys.readouterr()
    assert "acts otherwise" in said.err
    assert said.err.count("\n") == 1
    assert "saved" not in said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_file_that_the_runtime_refuses_is_not_written(tmp_path, monkeypatch, content):
    def make(policy):
        if content is None:
            raise NotImplementedError("no such operation")
        return content

    monkeypatch.setitem(pmaprl.export.FORMATS, ".stablehlo", make)
    said = "no such operation" if content is None else "refuses the file"
    with pytest.raises(UsageError, match=said):
        pmaprl.export.export_policy(scoring_policy(np.eye(2)), tmp_path / "p.stablehlo")
    assert not list(tmp_path.iterdir())


NO_TARGETS = "", "/", ".", "folder", "no/p.onnx", "file/p.onnx", "p", "p.txt", "p" * 250 + ".onnx"


@pytest.mark.parametrize("out", NO_TARGETS, ids=range(len(NO_TARGETS)))
def test_a_target_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch, capsys, out):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    args = pmaprl.export.Args(run="absent", out=out)
    assert exit_code(pmaprl.export.export, args) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "run directory" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_random_observations_are_legal_and_typed():
    space = {
        "action_mask": box((9,), 0, 1),
        "bytes": box((2, 2), 0, 5),
        "inner": (Discrete(3), box((2,), -1, 1)),
        "": box((), -1, 1),
        "/arm/left": box((2,), -1e30, np.inf),
        "wide": box((2,), -1e30, np.inf),
    }
    dtypes = {
        "action_mask": "int8",
        "bytes": "uint8",
        "inner": ("int32", "float32"),
        "": "float32",
        "/arm/left": "float32",
        "wide": "float32",
    }
    actions = {
        "box": box((2,), -1, 1),
        "one": Discrete(3),
        "two": MultiDiscrete((2, 4)),
    }
    stats = dict.fromkeys(space) | {"inner": (None, None)}
    mean = jnp.array([1e4, 0.0])
    stats["wide"] = running_stats((2,)).replace(mean=mean)
    mean = jnp.array([-1e4, 0.0])
    stats["/arm/left"] = running_stats((2,)).replace(mean=mean)
    env = EnvSpec(
        name="Parts-v0",
        observation_space=space,
        obs_dtype=jax.tree.map(np.dtype, dtypes),
        action_space=actions,
    )
    policy = SimpleNamespace(env=env, obs_stats=stats)
    obs = random_observations(policy, np.random.default_rng(0), 200)
    assert jax.tree.map(lambda x: str(x.dtype), obs) == dtypes
    assert set(np.unique(obs["bytes"])) == set(range(6))
    assert set(np.unique(obs["inner"][0])) == {0, 1, 2}
    assert abs(obs["/arm/left"][:, 0].mean() + 1e4) < 1
    assert np.abs(obs["inner"][1]).max() <= 1
    assert abs(obs["wide"][:, 0].mean() - 1e4) < 1
    for part in np.split(obs["action_mask"], [3, 5], axis=1):
        assert part.any(axis=1).all()
        assert not part.all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["normalized", "hybrid", "dqn"],
)
def test_onnx(trained, tmp_path, monkeypatch, name):
    pytest.importorskip("jax2onnx")
    import onnxruntime

    policy = load_policy(
        trained(name)[0],
        seed=int(name == "normalized"),
    )
    out = tmp_path / "policy.onnx"
    pmaprl.export.export_policy(policy, out)
    session = onnxruntime.InferenceSession(str(out))
    for size in (1, 7):
        obs = observations(policy, size)
        assert_same_actions(
            session.run(None, pmaprl.export.by_name({"obs": obs})),
            policy(obs),
            atol=1e-5,
        )
    if name == "normalized":
        monkeypatch.chdir(tmp_path)
        here = {}
        exec(snippet("onnx"), here)
        assert len(here["actions"]) == 3


def described(arrays: dict[str, Any]) -> list[Any]:
    """Arrays in a description, without the batch."""
    return [(name, x["dtype"], x["shape"][1:]) for name, x in arrays.items()]


def arrays_in(file: Path, about: dict[str, Any]) -> list[list[Any]]:
    """Inputs and outputs in an exported policy, in order; StableHLO's have no names."""
    if file.suffix == ".stablehlo":
        exported = jax.export.deserialize(bytearray(file.read_bytes()))
        return [
            [
                (
                    name,
                    str(x.dtype),
                    list(x.shape[1:]),
                )
                for name, x in zip(
                    about[what],
                    avals,
                    strict=True,
                )
            ]
            for what, avals in (
                ("inputs", exported.in_avals),
                ("outputs", exported.out_avals),
            )
        ]
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file))
    dtypes = {
        "tensor(float)": "float32",
        "tensor(bool)": "bool",
        "tensor(int32)": "int32",
    }
    return [
        [(x.name, dtypes[x.type], x.shape[1:]) for x in arrays]
        for arrays in (
            session.get_inputs(),
            session.get_outputs(),
        )
    ]


@pytest.mark.parametrize("kind", ["stablehlo", pytest.param("onnx", marks=pytest.mark.slow)])
def test_an_exported_policy_with_memory_acts_like_the_loaded_one_step_by_step(
    trained, tmp_path, kind
):
    policy = load_policy(trained("memory")[0])
    out = tmp_path / f"p.{kind}"
    if kind == "onnx":
        pytest.importorskip("jax2onnx")
    pmaprl.export.export_policy(policy, out)
    about = json.loads((tmp_path / f"p.{kind}.json").read_text())
    inputs = about["inputs"]
    assert [*inputs][0] == "obs"
    assert arrays_in(out, about) == [
        described(inputs),
        described(about["outputs"]),
    ]
    memory = {
        name: np.zeros((2, *x["shape"][1:]), x["dtype"])
        for name, x in inputs.items()
        if "memory" in name
    }
    own = policy.initial_memory(2)
    rng = np.random.default_rng(0)
    for step in range(6):
        first = np.array([step == 0, step in (0, 3)])
        reward = rng.normal(size=2).astype(np.float32)
        obs = observations(policy, 2) + step
        expected, own = policy(obs, own, first, reward=reward)
        if kind == "onnx":
            import onnxruntime

            session = onnxruntime.InferenceSession(str(out))
            action, *left = session.run(
                None,
                memory | {"obs": obs, "first": first, "reward": reward},
            )
            memory = dict(zip(memory, left, strict=True))
        else:
            call = jax.export.deserialize(bytearray(out.read_bytes())).call
            action, left = call(
                obs,
                {name[7:]: x for name, x in memory.items()},
                first,
                reward,
            )
            memory = {f"memory/{name}": x for name, x in left.items()}
        assert_allclose(action, expected, atol=1e-6)
    pairs = zip(jax.tree.leaves(own), pmaprl.export.by_name(own), strict=True)
    for ours, theirs in pairs:
        assert_allclose(memory[f"memory/{theirs}"], ours, atol=1e-5)


@pytest.mark.slow
def test_the_documented_lines_load_it_without_the_repository(trained, tmp_path):
    out = tmp_path / "policy.stablehlo"
    args = pmaprl.export.Args(
        run=str(trained("normalized")[0]),
        out=str(out),
    )
    exit_code(
        pmaprl.export.export,
        args,
    )
    policy = load_policy(trained("normalized")[0])
    obs = observations(policy, 5)
    np.save(tmp_path / "obs.npy", obs)
    code = snippet("stablehlo") + 'np.save("actions.npy", policy(np.load("obs.npy")))\n'
    code += 'import sys; assert not {"common", "flax", "gymnax"} & sys.modules.keys()\n'
    done = run_python("-c", code, cwd=tmp_path, PYTHONPATH="")
    assert done.stdout in ("[0 0 0]\n", "[1 1 1]\n"), done.stderr
    assert_allclose(np.load(tmp_path / "actions.npy"), policy(obs), atol=1e-6)


def test_playing_prints_the_returns_and_draws_an_episode(trained, tmp_path, capsys):
    gif = tmp_path / "episode.gif"
    words = [
        str(trained("normalized")[0]),
        "--episodes",
        "3",
        "--gif",
        str(gif),
        "--stochastic",
    ]
    episodes = pmaprl.play.play(parse(pmaprl.play.Args, words))
    lines = capsys.readouterr().out.splitlines()
    printed = [re.split(r"\s+", line) for line in lines if line.startswith("episode ")]
    returns = [float(words[3]) for words in printed]
    assert returns == pytest.approx(episodes.ret.tolist(), abs=0.01)
    assert len(printed) == 3
    assert len(set(episodes.ret)) > 1
    with Image.open(gif) as picture:
        assert picture.n_frames == episodes.length[0] + 1


def test_stochastic_play_repeats_with_its_seed_in_a_changed_environment(trained):
    def returns(**flags):
        short = {"episodes": 2, "env_params": '{"max_steps_in_episode": 5}'}
        args = pmaprl.play.Args(run=str(trained("sac")[0]), **short, **flags)
        played = pmaprl.play.play(args)
        assert played.length.tolist() == [5, 5]
        return played.ret.tolist()

    first = returns(stochastic=True)
    assert first == returns(stochastic=True)
    assert first != returns()
    assert first != returns(stochastic=True, seed=1)
