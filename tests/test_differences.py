"""Differences between spaces: what a resumed run, parameters of another one, evaluations and games
with a stored policy refuse.
"""

import copy
import dataclasses
import json
from typing import Any

import gymnasium
import helpers
import host_toys  # noqa: F401  (registers the toys)
import numpy as np
import pytest
from gymnasium.spaces import Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from helpers import make_env, small_args, small_dqn_args, small_sac_args
from host_helpers import TOYS

from pmaprl import play
from pmaprl.actors.actor import inspect_env
from pmaprl.algos import appo_pmap, dqn_pmap, ppo_pmap, sac_pmap
from pmaprl.cli.errors import UsageError
from pmaprl.envs.custom import wrap
from pmaprl.envs.differences import difference, difference_from_run
from pmaprl.envs.environment import channels_in_front
from pmaprl.envs.registry import make
from pmaprl.envs.spaces import EnvSpec
from pmaprl.runs.directory import choose_directory, describe_run
from pmaprl.suites.tools.conversion import Conversion


def box(low: Any = 0, high: Any = 5, shape: Any = (2,), dtype: Any = np.uint8) -> Any:
    return gymnasium.spaces.Box(low, high, shape, dtype)


UNIT = box(-1, 1, dtype=np.float32)
PICTURE = box(0, 255, (3, 9, 9))


def spec(seen: Any = UNIT, done: Any = UNIT) -> EnvSpec:
    """A spec as a run stores it."""
    made = Conversion("odd", seen, done).spec
    return EnvSpec.from_json(json.loads(json.dumps(made.to_json())))


MASKED = Dict(action_mask=box(0, 1, (3,), np.int8), obs=UNIT)
MASKED_BY_BOOLS = Dict(action_mask=box(0, 1, (3,), np.bool_), obs=UNIT)
DIFFERENT = [
    (box(), box(0, 255), "bounds of the observation: 0.0 to 5.0 then, 0.0 to 255.0 now"),
    (box(), box(1, 5), "bounds of the observation: 0.0 to 5.0 then, 1.0 to 5.0 now"),
    (box(), box(dtype=np.float32), "type of the observation: uint8 then, float32 now"),
    (box(), box(shape=(1, 2)), r"shape of the observation: [2] then, [1, 2] now"),
    (box(shape=(2, 3)), box(shape=(3, 2)), "shape of the observation: [2, 3] then, [3, 2] now"),
    (PICTURE, box(0, 255, (9, 9, 4)), "shape of the observation: [9, 9, 3] then, [9, 9, 4] now"),
    (Dict(a=UNIT, b=UNIT), Dict(c=UNIT, d=UNIT), "parts of the observation: 'a', 'b' then, 'c'"),
    (Dict(a=UNIT), Tuple([UNIT]), "parts of the observation: 'a' then, 1 without names now"),
    (Dict(a=UNIT), UNIT, "kind of the observation: parts then, Box now"),
    (Tuple([UNIT, UNIT]), Tuple([UNIT]), "2 without names then, 1 without names now"),
    (Dict(a=Dict(b=box())), Dict(a=Dict(b=box(0, 9))), "bounds of the observation a/b: 0.0 to 5.0"),
    (Discrete(4), Discrete(5), "choices of the observation: 4 then, 5 now"),
    (Discrete(4), MultiDiscrete([4]), "kind of the observation: Discrete then, MultiDiscrete now"),
    (MASKED, UNIT, "kind of the observation: parts then, Box now"),
]
OTHER_ACTIONS = [
    (UNIT, box(-1, 10, dtype=np.float32), "bounds of the action: -1.0 to 1.0 then, -1.0 to 10.0"),
    (UNIT, box(-np.inf, np.inf, dtype=np.float32), "-1.0 to 1.0 then, -inf to inf now"),
    (
        UNIT,
        gymnasium.spaces.Box(np.float32([-1, -2]), np.float32([1, 1])),
        "bounds of the action, number 1: -1.0 to 1.0 then, -2.0 to 1.0 now",
    ),
    (UNIT, box(-1, 1, dtype=np.int32), "type of the action: float32 then, int32 now"),
    (UNIT, box(-1, 1, dtype=np.float16), "type of the action: float32 then, float16 now"),
    (MultiDiscrete([2, 3]), MultiDiscrete([3, 2]), "choices of the action: 2 then, 3 now"),
    (MultiDiscrete([2, 3]), MultiDiscrete([2, 2]), "choices of the action, number 1: 3 then, 2"),
    (MultiDiscrete([2, 2]), MultiBinary([2, 1]), "shape of the action: [2] then, [2, 1] now"),
    (Discrete(3), MultiDiscrete([3]), "kind of the action: Discrete then, MultiDiscrete now"),
    (
        Tuple([Discrete(3), UNIT]),
        Tuple([Discrete(3), box(-2, 1, dtype=np.float32)]),
        "bounds of the action 1: -1.0 to 1.0 then, -2.0 to 1.0 now",
    ),
]


@pytest.mark.parametrize(("then", "now", "words"), DIFFERENT)
def test_the_first_difference_of_observations_is_named(then, now, words):
    assert words in difference(spec(then), spec(now))
    assert difference(spec(then), spec(then), exact=True) == ""


@pytest.mark.parametrize(("then", "now", "words"), OTHER_ACTIONS)
def test_the_first_difference_of_actions_is_named(then, now, words):
    assert words in difference(spec(done=then), spec(done=now))
    assert difference(spec(done=then), spec(done=then), exact=True) == ""


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (UNIT, box(-9, 9, dtype=np.float32), "bounds of the observation: -1.0 to 1.0 then"),
        (PICTURE, box(0, 255, (9, 9, 3)), "channels of the observation: first then, last now"),
        (MASKED, MASKED_BY_BOOLS, "type of the observation action_mask: int8 then, bool now"),
    ],
)
def test_networks_see_nothing_of_other_bounds_masks_and_channels(then, now, words):
    assert difference(spec(then), spec(now)) == ""
    assert words in difference(spec(then), spec(now), exact=True)


def test_parameters_of_an_environment_that_keep_its_spaces_are_no_difference():
    wide = make("CartPole-v1", '{"x_threshold": 4.8, "gravity": 3.7}').spec
    assert difference(make("CartPole-v1").spec, wide) == ""
    on_host = Conversion("host", *_spaces_of("CartPole-v1")).spec
    assert difference(make("CartPole-v1").spec, on_host) == ""


def _spaces_of(name: str) -> tuple[Any, Any]:
    env = gymnasium.make(name)
    return env.observation_space, env.action_space


def test_of_an_older_run_only_what_it_has_stored_is_compared():
    old = spec(box(), box(-1, 1, dtype=np.float64)).to_json()
    config = {"env_spec": old, "args": {}}
    whole = spec(box(), box(-1, 1, dtype=np.int32))
    wide = spec(box(), box(-2, 2, dtype=np.float32))
    assert difference_from_run("runs/x", config, whole).startswith("type of the action")
    del old["channels_first"]
    assert difference_from_run("runs/x", config, whole) == ""
    assert difference_from_run("runs/x", config, wide).startswith("bounds of the action")
    assert difference_from_run("runs/x", {"args": {}}, wide) == ""
    with pytest.raises(UsageError, match="runs/x does not say what its observations"):
        difference_from_run("runs/x", {"env_spec": {}, "args": {}}, wide)


def test_bytes_are_compared_by_what_a_run_divides_them_by():
    config = {"env_spec": spec(box()).to_json(), "args": {"byte_max": 9}}
    assert difference_from_run("runs/x", config, spec(box(0, 9))) == ""
    assert "0.0 to 9.0 then" in difference_from_run("runs/x", config, spec(box()))


SPACED = f"{TOYS}SpacedToy-v0"
CHOOSING = f"{TOYS}ChoosingToy-v0"
PUSHER = "helpers:Pusher"
SHORT = {"total_timesteps": 2_048}
ON_HOST = SHORT | {"vectorization": "sync", "quiet": True, "hidden_sizes": (8,)}
RUNS = {
    "ppo": small_args(env=PUSHER, **SHORT),
    "sac": small_sac_args(env=PUSHER, **SHORT),
    "dqn": small_dqn_args(env="helpers:Toy", **SHORT),
    "ppo on the host": ppo_pmap.Args.at(SPACED)(env=SPACED, **ON_HOST),
    "appo on the host": appo_pmap.Args(env=SPACED, **ON_HOST),
    "sac on the host": sac_pmap.Args.at(SPACED)(env=SPACED, **ON_HOST),
    "dqn on the host": dqn_pmap.Args.at(CHOOSING)(env=CHOOSING, **ON_HOST),
}
CHANGED = {
    PUSHER: "bounds of the action: -1.0 to 0.5 then, -2.0 to 2.0 now",
    "helpers:Toy": "type of the observation: float32 then, int32 now",
    SPACED: "type of the observation: uint8 then, float32 now",
    CHOOSING: "bounds of the observation: 0.0 to 5.0 then, 0.0 to 9.0 now",
}
PARAMS = {SPACED: '{"dtype": "float32"}', CHOOSING: '{"high": 9}'}


MODULES = {"ppo": ppo_pmap, "appo": appo_pmap, "sac": sac_pmap, "dqn": dqn_pmap}


def begun(name: str, folder: Any, **changes: Any) -> Any:
    """The directory of a run that seems to have trained."""
    args = dataclasses.replace(RUNS[name], **changes)
    env = inspect_env(args) if "host" in name else make(args.env)
    script = MODULES[name.split()[0]].__file__
    folder.mkdir()
    config = describe_run(args, script, env, [])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def change_toys(monkeypatch: Any) -> None:
    """Change the spaces of environments on the device, as if their file had changed."""
    wide = copy.copy(helpers.Pusher.actions)
    wide.low, wide.high = -2.0, 2.0
    monkeypatch.setattr(helpers.Pusher, "actions", wide)
    get_obs = helpers.Toy.get_obs
    monkeypatch.setattr(helpers.Toy, "get_obs", lambda *args: get_obs(*args).astype(np.int32))
    monkeypatch.setattr(helpers.Pusher, "get_obs", get_obs, raising=False)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_does_not_go_on_or_begin_from_one_of_other_spaces(name, tmp_path, monkeypatch):
    args = RUNS[name]
    run_dir = begun(name, tmp_path / "run")
    change_toys(monkeypatch)
    params = {"env": args.env, "env_params": PARAMS.get(args.env, "")}
    module = MODULES[name.split()[0]]
    with pytest.raises(UsageError, match="a new run could: .*" + CHANGED[args.env]):
        module.train(type(args).from_run(run_dir, **params))
    changes = params | {"run_dir": str(tmp_path / "new"), "init_from": str(run_dir)}
    with pytest.raises(UsageError, match="--init-from.*needs the spaces.*" + CHANGED[args.env]):
        module.train(dataclasses.replace(args, **changes))
    assert not (tmp_path / "new").exists()
    changes |= {"run_dir": "", "benchmark": True}
    with pytest.raises(UsageError, match="--init-from.*needs the spaces.*" + CHANGED[args.env]):
        module.train(dataclasses.replace(args, **changes))


def test_a_resumed_run_notes_other_bounds_of_what_networks_see_as_it_is(tmp_path):
    run_dir = begun("ppo on the host", tmp_path / "run", env_params='{"dtype": "float32"}')
    args = RUNS["ppo on the host"]
    params = '{"dtype": "float32", "high": 7}'
    resumed = type(args).from_run(run_dir, env=SPACED, env_params=params)
    config = describe_run(resumed, ppo_pmap.__file__, inspect_env(resumed), [])
    _, changes = choose_directory(resumed, config)
    assert "bounds of the observation: 0.0 to 5.0 then, 0.0 to 7.0 now" in changes


def test_a_run_that_has_trained_nothing_may_change_its_spaces(tmp_path, monkeypatch):
    run_dir = begun("ppo", tmp_path / "run")
    (run_dir / "metrics.jsonl").unlink()
    change_toys(monkeypatch)
    resumed = type(RUNS["ppo"]).from_run(run_dir, env=PUSHER)
    config = describe_run(resumed, ppo_pmap.__file__, make(PUSHER), [])
    path, _ = choose_directory(resumed, config)
    assert path == run_dir


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ('{"dtype": "float32"}', "type of the observation: uint8 in the training, float32 in eval"),
        ('{"high": 9}', "bounds of the observation: 0.0 to 5.0 in the training, 0.0 to 9.0 in"),
        ('{"reach": 2}', "bounds of the action: -1.0 to 1.0 in the training, -2.0 to 2.0 in eval"),
        ('{"acts": "int32"}', "type of the action: float32 in the training, int32 in evaluations"),
        ('{"limit": 3}', ""),
    ],
)
def test_evaluations_keep_the_spaces_of_the_training(params, words):
    args = appo_pmap.Args(env=SPACED, eval_env_params=params, **ON_HOST)
    if not words:
        inspect_env(args)
        return
    with pytest.raises(UsageError, match="--eval-env-params must keep the spaces.*" + words):
        inspect_env(args)


@pytest.mark.parametrize("name", ["box", "memory"])
def test_a_policy_does_not_play_in_other_spaces(name, trained, monkeypatch):
    run_dir, env, _ = trained(name)
    args = play.Args(run=str(run_dir), env=env.name, episodes=1)
    change_toys(monkeypatch)
    with pytest.raises(UsageError, match="the policy needs the spaces of its training.* there"):
        play.play(args)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ('{"dtype": "float32"}', "type of the observation: float32 in its training"),
        ('{"reach": 2}', "bounds of the action: -1.0 to 0.5 in its training, -2.0 to 2.0 there"),
    ],
)
def test_a_policy_does_not_play_in_other_spaces_on_the_host(params, words, trained):
    run_dir, _, _ = trained("box")
    args = play.Args(run=str(run_dir), env=SPACED, env_params=params, episodes=1)
    with pytest.raises(UsageError, match="the policy needs the spaces of its training"):
        play.play(args)


class InfoMask(helpers.Toy):
    """Has a mask in its info, where nobody looks."""

    def step_env(self, key, state, action, params):
        *outputs, _ = super().step_env(key, state, action, params)
        return *outputs, {"action_mask": np.ones(3, bool)}


class InfoMaskOfItsOwnStep(InfoMask):
    """The same, and it resets itself."""

    def reset(self, key, params=None):
        return self.reset_env(key, params)

    def step(self, key, state, action, params=None):
        obs, state, reward, terminated, info = self.step_env(key, state, action, params)
        info = info | {"final_observation": obs}
        return obs, state, reward, terminated, np.bool_(False), info


@pytest.mark.parametrize("kind", [InfoMask, InfoMaskOfItsOwnStep])
def test_a_mask_in_an_info_on_the_device_is_refused(kind):
    with pytest.raises(UsageError, match="an action_mask in its info.*let observations be"):
        wrap(kind())


def test_a_mask_of_no_choices_is_no_matter(monkeypatch):
    monkeypatch.setattr(InfoMask, "actions", helpers.Pusher.actions)
    wrap(InfoMask())


def test_images_with_channels_in_front_are_told_of(monkeypatch):
    assert channels_in_front(make_env("Pixels")) == ""
    monkeypatch.setattr(helpers.Pixels, "observations", PICTURE)
    monkeypatch.setattr(helpers.Pixels, "get_obs", lambda *_: np.zeros((3, 9, 9), np.uint8))
    assert "Box[3, 9, 9] seems to have its channels first" in channels_in_front(make_env("Pixels"))
