"""Parameters of environments that differ between members of a population, evolve, or are drawn for
every episode.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Bribe, make_env, metric_rows, ppo, small_args
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl.cli.errors import UsageError
from pmaprl.comparison.selection import Selection, load
from pmaprl.device.rollout import step_envs
from pmaprl.envs.registry import make
from pmaprl.envs.variation import check_number, run_env
from pmaprl.play import Args as PlayArgs
from pmaprl.play import play
from pmaprl.policy import load_policy


def test_every_episode_draws_its_own_numbers():
    draws = {
        "gravity": "uniform:5:15",
        "force_mag": "log:1:100",
        "max_steps_in_episode": "choice:3,7",
    }
    env = make("CartPole-v1", json.dumps(draws))
    obs, state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 400))
    numbers = [state[1]]
    step = jax.jit(functools.partial(step_envs, env))
    lengths = []
    time = np.zeros(400)
    for t in range(8):
        before = state
        out = step(jax.random.split(jax.random.key(t + 1), 400), state, jnp.zeros(400, int))
        state = out.state
        time = time + 1
        over = np.array(out.terminated | out.truncated)
        for name, values in state[1].items():
            assert_array_equal(np.array(values)[~over], np.array(before[1][name])[~over])
        limits = np.array(before[1]["max_steps_in_episode"])
        cut = np.array(out.truncated & ~out.terminated)
        assert_array_equal(time[cut], limits[cut])
        lengths = [*lengths, *time[cut]]
        time = np.where(over, 0, time)
        numbers.append(state[1])
    assert set(lengths) == {3, 7}
    gravity, force = (
        np.concatenate([x[name] for x in numbers]) for name in ("gravity", "force_mag")
    )
    assert 5 <= gravity.min() < 5.1
    assert 14.9 < gravity.max() <= 15
    assert 1 <= force.min() < 1.1
    assert 90 < force.max() <= 100.01
    assert np.median(numbers[0]["force_mag"]) < 20
    assert env.max_steps == 7


@pytest.mark.slow
def test_members_train_in_their_environments_and_are_evaluated_in_the_one_given(tmp_path, capsys):
    """Differences between members are shown, kept by a resume, and tell runs apart."""
    name = "env.max_steps_in_episode"
    given = '{"max_steps_in_episode": 4}'
    flags = {
        "env_params": given,
        "sweep": (f"{name}=choice:4,9,7",),
        "population": 3,
        "seed": 1,
        "quiet": False,
    }
    args = small_args(
        env="Pendulum-v1",
        run_dir=str(tmp_path),
        **flags,
    )
    result = ppo.train(args)
    own = args.members.member_values[name]
    assert len(set(own)) > 1, "else the test shows nothing"
    assert result.evaluation["eval/length_mean"] == [4.0] * 3
    assert metric_rows(tmp_path)[-1]["episode/length"] == own
    told = re.search(rf"member (\d): --seed (\d) .*{name}=(\d)", capsys.readouterr().out)
    member, seed, value = map(int, told.groups())
    assert seed == 1 + member
    assert value == own[member]
    assert load_policy(tmp_path).config["args"]["env_params"] == given
    assert set(play(PlayArgs(str(tmp_path), episodes=3)).length.tolist()) == {4}
    groups = load(Selection(runs=(str(tmp_path),), by=(name,)), ["eval/return_mean"])
    assert sorted(group.runs[0].flags[name] for group in groups) == sorted(set(own))
    for change in ({"env_params": given.replace("4", "5")}, {"total_timesteps": 9999, "seed": 2}):
        with pytest.raises(UsageError, match=f"--{list(change)[-1].replace('_', '-')}"):
            ppo.train(ppo.Args.from_run(str(tmp_path), **change))


def test_parameters_on_which_actions_depend_are_the_same_for_all():
    pendulum = make("Pendulum-v1")
    assert "g" in pendulum.numbers
    assert "max_torque" not in pendulum.numbers
    with pytest.raises(
        UsageError,
        match="has no parameter 'max_torque' that members or episodes can differ in",
    ):
        check_number(pendulum, "max_torque", [1.0])
    assert not {"min_action", "max_action"} & make("MountainCarContinuous-v0").numbers.keys()


@pytest.mark.slow
def test_an_object_gets_parameters_too():
    result = ppo.train(
        small_args(env_params='{"bonus": 5, "max_steps_in_episode": "choice:2,4"}'),
        Bribe(),
    )
    assert 10.0 <= result.evaluation["eval/return_mean"][0] <= 20.0
    with pytest.raises(UsageError, match="cannot change an object, CartPole-v1"):
        ppo.train(small_args(env_params='{"gravity": 5.0}'), make("CartPole-v1"))


LOGGED = {
    "time": 59 / 16,
    "time_sum": 16 * 59,
    "time_max": 7,
    "time_min": 1,
    "time_last": 2,
    "end": 70,
    "end_last": 1,
}


@pytest.mark.slow
def test_numbers_in_the_info_are_logged(tmp_path):
    """Sixteen steps of episodes of seven: over environments, devices and updates, of each seed by
    itself.
    """
    flags = {
        "num_seeds": 2,
        "num_devices": 2,
        "hidden_sizes": (4,),
        "total_timesteps": 256,
    }
    ppo.train(
        small_args(env="helpers:Chatty", run_dir=str(tmp_path), log_info=tuple(LOGGED), **flags)
    )
    (row,) = metric_rows(tmp_path)
    for name, value in LOGGED.items():
        assert_allclose(
            row[f"env/{name}"],
            [value, value],
            rtol=1e-6,
            err_msg=name,
        )
    assert "env/all" not in row


@pytest.mark.parametrize("name", ["Chatty", "ChattyReset"])
def test_environments_tell_which_numbers_their_info_has(name):
    env = make_env(name)
    assert {"time", "end", "end_last"} <= set(env.info_numbers)
    assert "all" not in env.info_numbers
    env.inner.log_info = ("end_last",)  # as the environment wants it
    run = run_env(small_args(log_info=("time_max",)), env)
    _, state = run.reset(jax.random.key(0))
    assert run.step(jax.random.key(1), state, jnp.int32(0)).info == {
        "time_max": 1.0,
        "end_last": 0.0,
    }
    assert env.step(jax.random.key(1), state, jnp.int32(0)).info == {}, "unless it is asked for"
