"""Populations: sweeps and grids, from flags to what is left of a run."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from helpers import metric_rows, ppo, small_args

import pmaprl.machine.devices
from pmaprl.cli.errors import UsageError
from pmaprl.compare import Args as CompareArgs
from pmaprl.compare import compare
from pmaprl.device.programs import for_seeds, over_devices
from pmaprl.device.state import members_on_devices
from pmaprl.envs.registry import make
from pmaprl.machine.devices import check_fits
from pmaprl.policy import load_policy
from pmaprl.runs.checkpoints import Checkpoints, read

TINY = {
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 1,
    "hidden_sizes": (4,),
}
TINY |= {
    "env": "CartPole-v1",
    "total_timesteps": 6 * 32,
    "log_interval": 32,
    "seed": 3,
    "eval_episodes": 16,
}


def train(folder, **flags):
    return ppo.train(small_args(**TINY | {"run_dir": str(folder)} | flags))


def test_members_draw_what_is_asked_for():
    sweep = ("learning_rate=log:1e-4:1e-2", "gamma=uniform:0.9:0.99", "ent_coef=choice:0,0.01,0.1")
    seed, member_values = small_args(population=400, sweep=sweep, seed=7).members
    assert seed == list(range(7, 407))
    rate = np.array(member_values["learning_rate"])
    gamma = np.array(member_values["gamma"])
    assert 1e-4 <= rate.min() < np.median(rate) < rate.max() <= 1e-2
    assert 0.9 <= gamma.min() < gamma.max() <= 0.99
    assert np.median(rate) == pytest.approx(1e-3, rel=0.3)
    assert np.median(gamma) == pytest.approx(0.945, abs=0.01)
    assert {0, 0.01, 0.1} == set(member_values["ent_coef"])
    assert abs(np.corrcoef(np.log(rate), gamma)[0, 1]) < 0.2, "each flag draws by itself"


def test_a_flag_draws_the_same_whatever_others_are_swept():
    alone = ("clip_eps=uniform:0.1:0.3",)
    more = ("gamma=uniform:0.9:0.99", "clip_eps=uniform:0.1:0.3")
    drawn = small_args(population=5, sweep=alone).members.member_values
    assert (
        drawn["clip_eps"]
        == small_args(population=9, sweep=more).members.member_values["clip_eps"][:5]
    )
    assert drawn != small_args(population=5, sweep=alone, seed=1).members.member_values


def test_a_grid_has_all_combinations_with_every_seed():
    args = small_args(
        sweep=("learning-rate=1e-4,1e-3", "clip_eps=0.1,0.2,0.3"),
        num_seeds=2,
        seed=5,
    )
    flags = [*args.flags_of_members()]
    assert len({json.dumps(one) for one in flags}) == 12
    assert flags[3] == {"seed": 6, "learning_rate": 1e-4, "clip_eps": 0.2}
    assert {one["seed"] for one in flags} == {5, 6}


def test_as_many_members_run_as_fit_and_fewer_where_devices_exchange_those_of_their_own(
    monkeypatch,
):
    """An exchange needs the learners of all members on each device."""
    monkeypatch.setattr(pmaprl.machine.devices, "memory_of", lambda devices: 1e5)
    fit = []
    for count, flags in (
        (1, {}),
        (2, {"sharding": "members"}),
        (2, {"sharding": "members", "pbt": True}),
    ):
        with pytest.raises(UsageError, match=r"at most \d+ members fit") as told:
            check_fits(*_prepared(count, population=40, **flags))
        fit.append(int(re.search(r"at most (\d+) members fit", str(told.value))[1]))
        check_fits(*_prepared(count, population=fit[-1] // count * count, **flags))
    with pytest.raises(UsageError):
        check_fits(*_prepared(1, population=fit[0] + 1))
    assert 1 < fit[2] < fit[1] == fit[0] < 40


def _prepared(count, **flags):
    """Make what `check_fits` takes: flags, shapes, the environment and `count` devices."""
    small = {
        "num_envs": 4,
        "num_steps": 4,
        "eval_episodes": 1,
        "hidden_sizes": (16,),
    }
    args = ppo.Args(
        **small,
        sweep=("gamma=uniform:0.9:0.99",),
        **flags,
    )
    env = make(args.env)
    devices = jax.devices()[:1]
    programs = over_devices(for_seeds(ppo.PPO(args, env.spec), args, env), devices)
    return (
        args,
        jax.eval_shape(programs.init, members_on_devices(args.members, 1)),
        np.int32(0),
        env.spec,
        devices * count,
    )


SWEEP = {
    "population": 4,
    "sweep": ("learning_rate=log:1e-3:1e-1", "gamma=uniform:0.9:0.99"),
    "quiet": False,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("population") / "run"
    return train(folder, **SWEEP), folder


def test_a_finished_population_has_a_picture_and_is_compared_by_its_members_values(
    finished,
):
    result, folder = finished
    members = json.loads((folder / "config.json").read_text())["members"]
    assert members == small_args(**TINY | SWEEP).flags_of_members()
    assert (folder / "population.png").read_bytes().startswith(b"\x89PNG")
    assert all(len(row["loss/total"]) == 4 for row in metric_rows(folder) if "loss/total" in row)
    table = compare(CompareArgs(runs=(str(folder),), by=("learning_rate",)))
    returns = np.array(result.evaluation["eval/return_mean"])[
        np.argsort([x["learning_rate"] for x in members])
    ]
    assert table["seeds"].tolist() == [1] * 4
    assert table["return"].tolist() == pytest.approx(returns.tolist())


def test_the_best_member_is_loaded(finished):
    result, folder = finished
    returns = result.evaluation["eval/return_mean"]
    best = load_policy(folder)
    assert best.seed == 3 + int(np.argmax(returns))
    assert best.evaluation == pytest.approx(max(returns))
    for member in range(4):
        assert (
            load_policy(folder, member=member).seed
            == load_policy(folder, seed=3 + member).seed
            == 3 + member
        )


def test_without_an_evaluation_of_its_step_a_best_member_is_named_with_a_warning(
    finished, tmp_path
):
    result = finished[0]
    step = finished[0].env_steps
    saved = shutil.copytree(finished[1], tmp_path / "run") / "checkpoints"
    checkpoints = Checkpoints(saved)
    checkpoints.save(step + 64, read(saved / str(step)), None)
    checkpoints.wait()
    best = int(np.argmax(result.evaluation["eval/return_mean"]))
    with pytest.warns(UserWarning, match=f"member {best}, the best one at step {step}"):
        assert load_policy(tmp_path / "run").member == best


def test_a_population_resumes_to_the_last_bit(finished, tmp_path):
    train(
        tmp_path / "run",
        **SWEEP,
        stop_after=64,
        checkpoint_interval=32,
    )
    assert ppo.train(ppo.Args.from_run(tmp_path / "run")).state_sha256 == finished[0].state_sha256


def test_members_that_break_stop_no_other_and_are_not_the_best_whatever_they_earn(tmp_path, capsys):
    """A policy that is not a number chooses the first action, and stays in MountainCar's valley as
    one does at first.
    """
    env = {"env": "MountainCar-v0", "env_params": '{"max_steps_in_episode": 20}'}
    result = train(
        tmp_path / "run",
        sweep=("learning_rate=1e30,1e-3",),
        num_seeds=2,
        quiet=False,
        **env,
    )
    assert result.status == "finished"
    assert [np.isfinite(x) for x in result.evaluation["eval/return_mean"]] == [
        False,
        False,
        True,
        True,
    ]
    printed, warnings = capsys.readouterr()
    ranked = [float(x) for x in re.findall(r"\d\.  return (\S+) ±", printed)]
    assert len(ranked) == 2
    assert ranked == sorted(ranked, reverse=True)
    (warning,) = [line for line in warnings.splitlines() if "warning" in line]
    assert "members 0, 1" in warning
    assert load_policy(tmp_path / "run").member >= 2
    last = [row for row in metric_rows(tmp_path / "run") if "loss/total" in row][-1]
    assert [x is None for x in last["loss/total"]] == [True, True, False, False]
    table = compare(CompareArgs(runs=(str(tmp_path / "run"),), by=("learning_rate",)))
    assert table["seeds"].tolist() == [2, 2]


@pytest.mark.slow
def test_a_population_of_which_all_break_fails(tmp_path):
    with pytest.raises(Exception, match="is not finite at step"):
        train(tmp_path / "run", sweep=("learning_rate=1e30,1e31",))
