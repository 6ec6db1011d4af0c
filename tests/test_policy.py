"""`common/pmaprl/policy.py`, a trained policy: loading it, acting with it, and the trust that a run
directory gets.
"""

import json
import re
import shutil
from pathlib import Path

import appo_pmap as appo
import gymnasium
import host_toys  # noqa: F401  (registers the toys)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TRAINED, only_acts, over_devices, ppo, sac, same_bits, small_args
from numpy.testing import assert_allclose, assert_array_equal
from orbax.checkpoint import v1 as orbax

from pmaprl.actors.host_evaluation import run_host_episodes
from pmaprl.actors.threads import Worker
from pmaprl.cli.command import PolicyArgs
from pmaprl.cli.errors import UsageError
from pmaprl.cli.files import read_config
from pmaprl.device.agents import Player
from pmaprl.device.evaluation import SEED, run_episodes
from pmaprl.device.optim import hparams_of
from pmaprl.envs.registry import make_host
from pmaprl.envs.spaces import Box, Discrete, EnvSpec, MultiDiscrete, box, map_leaves
from pmaprl.export import export_policy
from pmaprl.machine.devices import choose_devices
from pmaprl.policies.policy import Policy
from pmaprl.policy import StoredPolicy, load_named, load_policy
from pmaprl.runs.checkpoints import Checkpoints
from pmaprl.runs.console import Console
from pmaprl.suites.tools.conversion import Conversion


@pytest.fixture
def run_copy(trained, tmp_path) -> Path:
    return shutil.copytree(trained("normalized")[0], tmp_path / "run")


SOON = "normalized", "memory", "parts", "sac"


@pytest.mark.parametrize(
    "name",
    [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in TRAINED],
)
def test_a_loaded_policy_earns_exactly_what_the_evaluation_of_its_run_did(trained, name):
    run_dir, env, result = trained(name)
    policy = load_policy(run_dir)
    # The policy's own shapes: actions are the environment's, neither flat nor without bounds.
    obs = jax.tree.map(np.asarray, env.spec.example_obs(3))
    actions, _ = policy(
        obs,
        policy.initial_memory(3),
        np.ones(3, bool),
        reward=np.zeros(3),
    )

    def has_shape(leaf, x):
        return x.shape == (3, *leaf.shape)

    shapes = map_leaves(has_shape, env.action_space, actions)
    assert all(jax.tree.leaves(shapes))
    episodes = over_devices(lambda: run_episodes(env, policy, 4), 1)
    assert float(episodes.ret.mean()) == pytest.approx(
        result.evaluation["eval/return_mean"][0],
        abs=1e-4,
        rel=1e-6,
    )


ON_THE_HOST = {
    "vectorization": "sync",
    "num_steps": 8,
    "hidden_sizes": (8,),
    "quiet": True,
}
ON_THE_HOST |= {
    "total_timesteps": 512,
    "eval_episodes": 4,
    "eval_interval": 0,
    "checkpoint_interval": 0,
}
BUFFER = {
    "envs_per_actor": 4,
    "batch_size": 16,
    "buffer_size": 512,
    "learning_starts": 64,
}


@pytest.mark.parametrize(
    ("algorithm", "toy", "flags"),
    [
        (appo, "Dict", {"envs_per_actor": 4, "rnn": "gru", "rnn_size": 8, "normalize_obs": True}),
        pytest.param(ppo, "Dict", {"num_minibatches": 1}, marks=pytest.mark.slow),
        pytest.param(sac, "Secretive", BUFFER | {"normalize_obs": True}, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", x) if not isinstance(x, dict) else "",
)
def test_a_loaded_policy_earns_exactly_what_the_evaluation_on_the_host_did(
    algorithm, toy, flags, tmp_path
):
    env = f"gymnasium:host_toys:{toy}Toy-v0"
    args = algorithm.Args(env=env, run_dir=str(tmp_path), **ON_THE_HOST | flags)
    result = algorithm.train(args)
    envs = make_host(env, 4, SEED, vectorization="sync")
    policy = load_policy(tmp_path)
    player = Player(
        policy.initial_memory,
        lambda seen, memory, keys: policy(seen.obs, memory, seen.first),
    )
    episodes = run_host_episodes(Worker("test", envs=envs), envs, player, 4)
    assert float(episodes.ret.mean()) == pytest.approx(
        result.evaluation["eval/return_mean"][0],
        abs=1e-4,
    )


def test_actions_are_best_and_drawn_by_the_logits_of_normalized_observations(trained):
    run_dir, env, _ = trained("normalized")
    policy = load_policy(run_dir)
    actor = ppo.Actor(ppo.Args.from_run(run_dir), env.spec)
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(500, 4)).astype(np.float32)
    normalized = policy._learner.obs_stats.normalize(raw)
    right, wrong = (
        actor.apply(policy._learner.params.actor, obs)[0].logits for obs in (normalized, raw)
    )
    assert_array_equal(policy(raw), right.argmax(axis=1))
    differs = policy(raw) != wrong.argmax(axis=1)
    assert np.mean(differs) > 0.01, "else this shows nothing"
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.vmap(lambda key: policy(raw[0], key=key))(keys)
    probability = float(jax.nn.softmax(right[0])[1])
    assert float(jnp.mean(drawn)) == pytest.approx(
        probability,
        abs=4 * np.sqrt(probability * (1 - probability) / 4000),
    )


def test_observations_of_every_kind_of_array_and_in_every_batch(trained):
    policy = load_policy(trained("sac")[0])
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(2, 3, 3))  # float64, as numpy makes it
    actions = policy(obs)
    assert type(actions) is np.ndarray
    assert actions.shape == (2, 3, 1)
    assert actions.dtype == np.float32
    one = policy(obs[1, 2])
    assert_allclose(one, actions[1, 2], rtol=1e-5)
    assert policy(obs[0, 0].tolist()).shape == (1,)
    assert isinstance(policy(jnp.asarray(obs)), jax.Array)
    assert policy(np.zeros((0, 3))).shape == (0, 1)
    compiled = jax.jit(lambda: policy(obs))
    assert_allclose(compiled(), actions, rtol=1e-5)
    actions += 1  # its own, not a view of a device's memory
    for wrong, word in (
        (np.zeros(4), "(3,)"),
        (1.0, "(3,)"),
        (["a", "b", "c"], "float32"),
    ):
        with pytest.raises(UsageError, match=re.escape(word)):
            policy(wrong)


def test_with_a_key_actions_are_drawn_anew_for_every_observation(trained):
    policy = load_policy(trained("sac")[0])
    obs = np.zeros((50, 3))
    drawn = policy(obs, key=jax.random.key(1))
    assert len(np.unique(drawn)) == 50
    assert same_bits(drawn, policy(obs, key=jax.random.key(1)))
    others = policy(obs, key=jax.random.key(2))
    assert not same_bits(drawn, others)
    assert np.all(np.abs(drawn) <= 2)
    assert len(np.unique(policy(obs))) == 1
    keys = jax.random.split(jax.random.key(0), 5)
    many = jax.vmap(lambda key: policy(obs, key=key))(keys)
    one = policy(obs, key=keys[2])
    assert_allclose(many[2], one, rtol=1e-5)


@pytest.mark.slow
def test_actions_are_within_the_bounds_of_a_box_and_of_the_kind_that_gymnasium_wants(trained):
    policy = load_policy(trained("box")[0])
    drawn = policy(np.ones((200, 2)), key=jax.random.key(0))
    assert drawn.min() == -1.0
    assert drawn.max() == 0.5
    assert isinstance(load_policy(trained("one-hot")[0])(3), np.integer)


def test_step_seed_and_path_choose_the_parameters(trained, run_copy, monkeypatch):
    """Also while the run goes on, and where the newest checkpoint is damaged."""
    run_dir, _, result = trained("normalized")
    name = "learner/params/actor/params/PolicyHead_0/Dense_0/kernel"
    kernels = {step: orbax.load(run_dir / "checkpoints" / str(step))[name] for step in (128, 256)}

    def kernel(params):
        return params.actor["params"]["PolicyHead_0"]["Dense_0"]["kernel"]

    assert same_bits(kernel(result.params), kernels[256])
    for choice in (
        {"seed": 0},
        {"seed": 1},
        {"step": np.int64(128), "seed": 1},
    ):
        wanted = kernels[choice.get("step", 256)][choice["seed"]]
        assert same_bits(kernel(load_policy(run_dir, **choice)._learner.params), wanted)
    unfinished = run_copy / "checkpoints" / "384.orbax-checkpoint-tmp" / "metrics"
    unfinished.mkdir(parents=True)
    (unfinished / "metrics").touch()
    assert load_policy(run_copy, step="best").step in (128, 256)
    assert load_policy(run_copy).step == 256
    for choice, told in (
        ({"step": 7}, "128, 256"),
        ({"seed": 2}, "2"),
        ({"member": "x"}, "x"),
    ):
        with pytest.raises(UsageError, match=told):
            load_policy(run_dir, **choice)
    shutil.copytree(run_dir, run_copy / "checkpoints" / "7")
    assert load_policy(run_copy / "checkpoints" / "7").step == 256, (
        "a run with such a name is a run"
    )
    monkeypatch.chdir(run_copy / "checkpoints")
    assert load_policy("128").step == 128
    shutil.rmtree(run_copy / "checkpoints" / "256" / "state")
    with pytest.warns(UserWarning, match="checkpoint 256 "):
        assert load_policy(run_copy).step == 128
    with pytest.warns(UserWarning, match="checkpoint 256 "):
        assert load_policy(run_copy, step="best").step == 128


def test_the_best_checkpoint_is_that_of_the_agent(run_copy):
    for step, returns in ((128, [9.0, 1.0]), (256, [5.0, 2.0])):
        Checkpoints(run_copy / "checkpoints").add_evaluation(step, returns)
    first, second = (load_policy(run_copy, step="best", seed=seed) for seed in (0, 1))
    assert first.step == 128
    assert first.evaluation == 9.0
    assert second.step == 256
    assert second.evaluation == 2.0
    Checkpoints(run_copy / "checkpoints").add_evaluation(128, [np.nan, 1.0])
    assert load_policy(run_copy, step="best").step == 256


def test_a_damaged_evaluation_is_none(run_copy):
    Checkpoints(run_copy / "checkpoints").add_evaluation(256, [9.0, 9.0])
    for damage in ("", "{", "[]", '{"returns": null}', '{"returns": [1]}'):
        (run_copy / "checkpoints" / "256" / "metrics" / "metrics").write_text(damage)
        assert load_policy(run_copy).evaluation is None, damage
        assert load_policy(run_copy, step="best", seed=1).step == 128, damage


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_damaged(
    run_copy, monkeypatch, recwarn
):
    """A run that goes on deletes it, and saves another one."""
    folder = run_copy / "checkpoints"
    metadata = orbax.metadata

    def deleting(path):
        if Path(path).name == "256":
            Path(path).rename(folder / "384")
        return metadata(path)

    shutil.rmtree(folder / "128")
    monkeypatch.setattr(orbax, "metadata", deleting)
    with pytest.raises(UsageError, match="that may load: 384"):
        load_policy(run_copy, step=256)
    for step in ("latest", "best"):
        (folder / "384").rename(folder / "256")
        assert load_policy(run_copy, step).step == 384
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


def test_a_policy_keeps_its_evaluation_where_its_checkpoint_is_deleted(run_copy, monkeypatch):
    load = orbax.load
    folder = run_copy / "checkpoints"

    def deleting(path, *more):
        loaded = load(path, *more)
        shutil.rmtree(folder)
        return loaded

    Checkpoints(folder).add_evaluation(128, [9.0, 1.0])
    Checkpoints(folder).add_evaluation(256, [5.0, 2.0])
    monkeypatch.setattr(orbax, "load", deleting)
    policy = load_policy(run_copy, step="best")
    assert policy.step == 128
    assert policy.evaluation == 9.0
    with pytest.raises(UsageError, match="no checkpoint"):
        load_policy(run_copy, step="best")


def with_config(run_dir: Path, copy: Path, **changes) -> Path:
    """A copy of a run whose `config.json` says something else."""
    shutil.copytree(run_dir, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("script", ["{outside}", "algos/../{outside}", "algos/link.py", 3])
def test_a_run_directory_does_not_decide_which_code_is_run(trained, tmp_path, monkeypatch, script):
    marker = tmp_path / "executed"
    outside = tmp_path / "outside.py"
    outside.write_text(f"open({str(marker)!r}, 'w').close()\n")
    algos = tmp_path / "algos"
    algos.mkdir()
    (algos / "link.py").symlink_to(outside)
    monkeypatch.setattr("pmaprl.policy.ROOT", tmp_path)
    monkeypatch.setattr("pmaprl.runs.scripts.ALGOS", algos)
    script = script.format(outside=outside) if isinstance(script, str) else script
    run_dir = with_config(trained("normalized")[0], tmp_path / "run", script=script)
    with pytest.raises(UsageError, match="--algorithm|algorithm="):
        load_policy(run_dir)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("env_spec/observation_space/shape", [10**400], "does not say"),
        ("args/num_seeds", 10**9, "at most 10,000"),
        ("args/hidden_sizes", [10**7], "there and .* here"),
        ("args", [], "not a run directory"),
    ],
)
def test_hostile_configurations_take_no_memory(
    trained, tmp_path, monkeypatch, path, value, message
):
    """A small file may hold an array of gigabytes: its shape is known before it is read."""
    run_dir = trained("normalized")[0]
    monkeypatch.setattr(orbax, "load", lambda *_: pytest.fail("it was read"))
    config = json.loads((run_dir / "config.json").read_text())
    *parents, name = path.split("/")
    inner = config
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    with pytest.raises(UsageError, match=message):
        load_policy(with_config(run_dir, tmp_path / "run", **config))


def test_code_from_elsewhere_is_run_when_it_is_named_and_imported_anew_when_it_changes(
    trained, tmp_path
):
    mine = tmp_path / "mine.py"
    code = Path(ppo.__file__).read_text() + "# mine\n"
    source = trained("normalized")[0]
    run_dir = with_config(source, tmp_path / "run", script=str(mine))
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(20, 4))
    actions = []
    for best in ("policy.mode()", "1 - policy.mode()"):
        mine.write_text(code.replace("return policy.mode() if key", f"return {best} if key"))
        with pytest.warns(UserWarning, match="mine.py has changed since"):
            actions.append(load_policy(run_dir, algorithm=mine)(obs))
    assert_array_equal(actions[0], load_policy(run_dir, algorithm=ppo)(obs))
    assert_array_equal(actions[0], 1 - actions[1])


def image_policy() -> StoredPolicy:
    """A policy of an environment on the host that stacks frames in front, which chooses by its
    first corner.
    """
    frames = gymnasium.spaces.Box(0, 255, (2, 12, 13), np.uint8)
    numbers = gymnasium.spaces.Box(-1, 1, (2, 12, 13))
    space = gymnasium.spaces.Dict({"frames": frames, "numbers": numbers})
    env = Conversion("frames", space, gymnasium.spaces.Discrete(9)).spec
    stored = json.loads(json.dumps(env.to_json()))
    env = EnvSpec.from_json(stored)

    def act(learner, seen, key):
        return seen.obs["frames"][:, 1, 0, 1].astype(jnp.int32)

    config = {"args": {"env": "frames", "env_params": ""}, "algorithm": "none"}
    return StoredPolicy(
        algorithm=only_acts(act),
        learner=(),
        env=env,
        run_dir=Path("run"),
        step=0,
        seed=0,
        evaluation=None,
        config=config,
        member=0,
    )


def test_a_policy_takes_images_as_their_environment_gives_them(tmp_path):
    """Or with channels last; the exported one takes the former."""
    policy = image_policy()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 9, (4, 5, 2, 12, 13))
    frames = pixels.astype(np.uint8)
    obs = {"frames": frames, "numbers": np.zeros(frames.shape, np.float32)}

    def last_axis(x):
        return np.moveaxis(x, -3, -1)

    last = jax.tree.map(last_axis, obs)
    wanted = frames[:, :, 1, 1, 0].tolist()
    assert policy(obs).tolist() == policy(last).tolist() == wanted
    compiled = jax.jit(lambda obs: policy(obs))
    assert compiled(obs).tolist() == wanted
    one = policy(jax.tree.map(lambda x: x[0, 0], obs))
    assert one == wanted[0][0]
    with pytest.raises(UsageError, match=re.escape("(2, 12, 13)")):
        turned = np.zeros((12, 2, 13), np.uint8)
        policy(obs | {"frames": turned})
    export_policy(policy, tmp_path / "p.stablehlo")
    exported = jax.export.deserialize(bytearray((tmp_path / "p.stablehlo").read_bytes()))
    actions = exported.call(jax.tree.map(lambda x: x[0], obs))
    assert actions.tolist() == wanted[0]
    inputs = json.loads((tmp_path / "p.stablehlo.json").read_text())["inputs"]
    assert inputs["obs/frames"]["shape"][1:] == [2, 12, 13]


def test_spaces_survive_a_config_file():
    odd = MultiDiscrete((2, 3), (2, 1), np.dtype("int8"))
    assert (
        EnvSpec.from_json(
            json.loads(
                json.dumps(
                    EnvSpec(
                        name="E",
                        observation_space=odd,
                        obs_dtype=np.dtype("int8"),
                        action_space=odd,
                    ).to_json()
                )
            )
        )[3]
        == odd
    )
    open_box = Box(np.float32([-1, -np.inf]), np.float32([np.inf, 3.4e38]), (2,))
    for space in (
        MultiDiscrete((2, 3)),
        open_box,
    ):
        text = json.dumps(
            EnvSpec(
                name="E",
                observation_space=space,
                obs_dtype=np.dtype("uint8"),
                action_space=Discrete(2),
            ).to_json(),
            allow_nan=False,
        )
        back = EnvSpec.from_json(json.loads(text))
        assert back.name == "E"
        assert back.obs_dtype == np.uint8
        assert back.action_space == Discrete(2)
        assert type(back.observation_space) is type(space)
        pairs = zip(back.observation_space, space, strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_observations_that_the_type_does_not_hold_are_refused():
    args = small_args(hidden_sizes=(4,))
    spec = EnvSpec(
        name="E",
        observation_space=box((1,), 0, 9),
        obs_dtype=np.dtype(np.int32),
        action_space=Discrete(2),
    )
    algorithm = ppo.PPO(args, spec)
    learner = algorithm.init(jax.random.key(0), hparams_of(args))
    policy = Policy(algorithm, learner, spec)
    assert policy(np.int64([7])) == policy(jnp.uint32([7]))
    for obs in (
        np.int64([5_000_000_000]),
        np.uint64([2**64 - 1]),
        jnp.uint32([2**31]),
    ):
        with pytest.raises(UsageError, match=str(obs[0])):
            policy(obs)


@pytest.mark.parametrize(("high", "wanted"), [(5.0, 255), (255.0, None)])
def test_bytes_of_a_run_before_their_bounds_counted_are_divided_by_255_still(
    tmp_path, high, wanted
):
    """A run of today says what its --byte-max is, and needs no guess."""
    space = {"codes": box((2,), 0, high), "other": (box((1,), 0, 1),)}
    spec = EnvSpec(
        name="E",
        observation_space=space,
        obs_dtype=None,
        action_space=Discrete(2),
    )
    dtypes = {"codes": np.dtype(np.uint8), "other": (np.dtype(np.float32),)}
    spec = spec._replace(obs_dtype=dtypes)
    config = {
        "algorithm": "ppo_pmap",
        "args": {"env": "E"},
        "env_spec": spec.to_json(),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path)["args"].get("byte_max") == wanted
    config["args"]["byte_max"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path)["args"]["byte_max"] == 0
    config["env_spec"] = {"observation_space": [3], "obs_dtype": {"codes": []}}  # of a stranger
    text = json.dumps({**config, "args": {"env": "E"}})
    (tmp_path / "config.json").write_text(text)
    assert "byte_max" not in read_config(tmp_path)["args"]


def test_jax_that_cannot_start_is_said_with_the_reason(trained, monkeypatch):
    """JAX itself gives none where a platform is known and has no device."""

    def fails(*_):
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fails)
    with pytest.raises(UsageError, match="no such device"):
        load_policy(trained("normalized")[0])
    with pytest.raises(UsageError, match="no such device"):
        choose_devices(1, 4)


def test_commands_for_policies_name_a_setting_of_jax_that_they_do_not_work_with(trained):
    with jax.numpy_rank_promotion("raise"), pytest.raises(UsageError, match="RANK_PROMOTION=raise"):
        args = PolicyArgs(str(trained("normalized")[0]))
        load_named(args, Console(quiet=True, total_steps=0))
