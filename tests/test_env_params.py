"""Parameters of environments that differ between members of a population, evolve, or are drawn for every episode."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import check_words, refusal
from helpers import (
    Bribe,
    BribeParams,
    make_env,
    metric_rows,
    module_of,
    ppo,
    small_args,
    small_rnn_args,
    small_sac_args,
)

from common.cli.errors import UsageError
from common.device.stepping import reset_envs, step_envs
from common.drawing.groups import Selection, load
from common.envs.registry import make
from common.envs.spaces import Box, Discrete
from common.envs.varied import check_number, for_member, for_run
from common.play import Args as PlayArgs
from common.play import play
from common.policy import load_policy


def test_every_episode_draws_its_own_numbers():
    draws = {"gravity": "uniform:5:15", "force_mag": "log:1:100", "max_steps_in_episode": "choice:3,7"}
    env = make("CartPole-v1", json.dumps(draws))
    obs, state = reset_envs(env, jax.random.split(jax.random.key(0), 400))
    numbers = [state[1]]
    step = jax.jit(functools.partial(step_envs, env))
    lengths, time = [], np.zeros(400)
    for t in range(8):
        before, out = state, step(jax.random.split(jax.random.key(t + 1), 400), state, jnp.zeros(400, int))
        state, time = out.state, time + 1
        over = np.array(out.terminated | out.truncated)
        for name, values in state[1].items():
            np.testing.assert_array_equal(np.array(values)[~over], np.array(before[1][name])[~over])
        limits = np.array(before[1]["max_steps_in_episode"])
        cut = np.array(out.truncated & ~out.terminated)
        np.testing.assert_array_equal(time[cut], limits[cut])
        lengths, time = [*lengths, *time[cut]], np.where(over, 0, time)
        numbers.append(state[1])
    assert set(lengths) == {3, 7}
    gravity, force = (np.concatenate([x[name] for x in numbers]) for name in ("gravity", "force_mag"))
    assert 5 <= gravity.min() < 5.1 and 14.9 < gravity.max() <= 15
    assert 1 <= force.min() < 1.1 and 90 < force.max() <= 100.01 and np.median(numbers[0]["force_mag"]) < 20
    assert env.max_steps == 7


def test_what_is_drawn_is_what_steps():
    env, base = make("CartPole-v1", '{"force_mag": "uniform:1:30"}'), make("CartPole-v1")
    _, (state, numbers) = env.reset(jax.random.key(3))
    own = make("CartPole-v1", json.dumps({"force_mag": float(numbers["force_mag"])}))
    reached, alone, given = (
        x.step(jax.random.key(4), s, jnp.int32(1)) for x, s in ((env, (state, numbers)), (own, state), (base, state))
    )
    np.testing.assert_allclose(reached.obs, alone.obs, rtol=1e-6)
    assert np.abs(reached.obs - given.obs).max() > 1e-3


SHORT = {"total_timesteps": 128, "benchmark": True}
EVOLVING = {"pbt": True, "pbt_interval": 128, "pbt_env_params": ("bonus",), "env_params": '{"bonus": 2.0}'}


@pytest.mark.parametrize("kind", ["Bribe", "Telling"])
def test_who_pays_more_is_not_judged_by_it(kind, tmp_path):
    """Weights of rewards evolve: the objective is what the environment as given would have paid, or what it tells."""
    more = {"population": 6, "pbt_mutation_rate": 1.0, "log_interval": 128, "hidden_sizes": (4,)}
    ppo.train(small_args(env=f"helpers:{kind}", run_dir=str(tmp_path), **EVOLVING | more))
    rows = metric_rows(tmp_path)
    exchanges = [json.loads(line) for line in (tmp_path / "population.jsonl").read_text().splitlines()]
    assert len(exchanges) > 5
    returns = np.array([row["episode/return_last100"] for row in rows])
    lengths = np.array([row["episode/length_last100"] for row in rows])
    objective = np.array([row["episode/objective_last100"] for row in rows])
    assert np.ptp(returns / lengths, axis=1).max() > 0.5, "members pay themselves what they like"
    expected = 100 + lengths if kind == "Telling" else 2 * lengths
    np.testing.assert_allclose(objective, expected, rtol=1e-4)
    np.testing.assert_allclose(exchanges[0]["objective"], objective[0], rtol=1e-5)
    assert not any("from" in x for row in exchanges for x in row["members"]), "nobody is better by a tenth"


def test_parameters_that_are_only_swept_do_not_win_by_what_they_pay(tmp_path):
    """For who takes over weights takes over all that differs."""
    flags = {"pbt": True, "pbt_interval": 128, "pbt_evolve": ("learning_rate",), "env_params": '{"bonus": [2, 1, 9]}'}
    args = small_args(env="helpers:Bribe", population=6, run_dir=str(tmp_path), hidden_sizes=(4,), **flags)
    ppo.train(args)
    last = metric_rows(tmp_path)[-1]
    assert last["hyper/env.bonus"] == args.members.hyper["env.bonus"]
    assert len(set(last["hyper/env.bonus"])) > 1, "else the test shows nothing"
    assert set(last["episode/objective_last100"]) == {14.0}


def test_a_resumed_run_keeps_what_members_differ_in(tmp_path):
    flags = {"env": "CartPole-v1", "population": 2, "run_dir": str(tmp_path), "stop_after": 256}
    ppo.train(small_args(env_params='{"gravity": [9.8, 3.0]}', pbt=True, pbt_evolve=("gamma",), **flags))
    for change in ({"env_params": '{"gravity": [9.8, 30.0]}'}, {"gamma": 0.9}):
        with pytest.raises(UsageError, match=f"keeps its --{next(iter(change)).replace('_', '-')}: "):
            ppo.train(ppo.Args.from_run(str(tmp_path), **change))


def test_runs_are_told_apart_by_parameters(tmp_path):
    flags = {"env": "CartPole-v1", "population": 4, "run_dir": str(tmp_path), "seed": 1}
    args = small_args(env_params='{"gravity": [9.8, 3.0]}', **flags)
    ppo.train(args)
    groups = load(Selection(runs=(str(tmp_path),), by=("env.gravity",)), ["eval/return_mean"])
    assert sorted(group.runs[0].flags["env.gravity"] for group in groups) == [3.0, 9.8]


def test_evaluations_are_in_the_environment_as_given(tmp_path):
    lists = '{"max_steps_in_episode": [4, 9, 7]}'
    args = small_args(env="Pendulum-v1", population=3, env_params=lists, seed=1, run_dir=str(tmp_path), quiet=False)
    result = ppo.train(args)
    assert len(set(args.members.hyper["env.max_steps_in_episode"])) > 1, "else the test shows nothing"
    assert result.evaluation["eval/length_mean"] == [4.0] * 3
    assert metric_rows(tmp_path)[-1]["episode/length"] == args.members.hyper["env.max_steps_in_episode"]
    assert load_policy(tmp_path).config["args"]["env_params"] == lists
    assert set(play(PlayArgs(str(tmp_path), episodes=3)).length.tolist()) == {4}


def test_evolution_of_parameters_resumes_to_the_last_bit(tmp_path, shared_programs):
    flags = EVOLVING | {"population": 4, "pbt_mutation_rate": 0.5, "hidden_sizes": (4,), "env": "helpers:Bribe"}
    whole = ppo.train(small_args(run_dir=str(tmp_path / "a"), **flags))
    ppo.train(small_args(run_dir=str(tmp_path / "b"), stop_after=512, **flags))
    assert ppo.train(ppo.Args.from_run(str(tmp_path / "b"), env="helpers:Bribe")).state_sha256 == whole.state_sha256


def test_the_best_members_are_told_with_their_parameters(tmp_path, capsys):
    flags = {"env_params": '{"gravity": [9.8, 3.0], "length": 0.6}', "population": 2, "seed": 4, "quiet": False}
    args = small_args(env="CartPole-v1", run_dir=str(tmp_path), **flags)
    ppo.train(args)
    own = json.dumps({"gravity": args.members.hyper["env.gravity"][1], "length": 0.6})
    assert f"member 1: --seed 5 --env-params '{own}'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--env-params", '{"gravity": [9, 8]}'],
            "must be like 9.8, got [9, 8]; members of a --population draw from a list",
        ),
        (["--population", "2", "--env-params", '{"gravty": [9, 8]}'], "has no parameter 'gravty'"),
        (["--population", "2", "--sweep", "env.max_torque=log:1:2"], "has no parameter 'max_torque'"),
        (["--population", "2", "--sweep", "env.gravity=log:0:2"], "begins at 0"),
        (
            ["--population", "2", "--env-params", '{"gravity": [9, 8]}', "--sweep", "env.gravity=log:1:2"],
            "both say what members draw for env.gravity",
        ),
        (["--env-params", '{"gravity": "uniform:9"}'], "needs the lowest number and then the highest"),
        (["--env-params", '{"gravty": "uniform:8:9"}'], "has no parameter 'gravty'"),
        (["--population", "2", "--env-params", '{"gravity": [9, NaN]}'], "must be like 9.0, got nan"),
        (["--population", "2", "--sweep", "env.max_steps_in_episode=log:9:20"], "is a whole number, not "),
        (
            ["--population", "2", "--pbt", "--pbt-env-params", "max_steps_in_episode", "--env-params"]
            + ['{"max_steps_in_episode": [200, 500]}'],
            "env.max_steps_in_episode cannot evolve: it is a whole number",
        ),
        (["--env-params", '{"max_steps_in_episode": "uniform:8:9"}'], "is a whole number: let it be one of some"),
        (["--log-info", "discount", "disc"], "--log-info disc: "),
        (["--pbt-env-params", "gravity"], "--pbt-env-params needs --pbt"),
        (
            ["--population", "2", "--pbt", "--pbt-env-params", "gravity"],
            "env.gravity needs the number that member 0 keeps, as in --env-params '{\"gravity\": NUMBER}'",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refusals(words, said):
    check_words(refusal(ppo.train, ppo.Args, ["--env", "CartPole-v1", *words]), said)


def test_parameters_on_which_actions_depend_are_the_same_for_all():
    pendulum = make("Pendulum-v1")
    assert "g" in pendulum.numbers and "max_torque" not in pendulum.numbers
    with pytest.raises(UsageError, match="has no parameter 'max_torque' that members or episodes can differ in"):
        check_number(pendulum, "max_torque", [1.0])
    assert not {"min_action", "max_action"} & make("MountainCarContinuous-v0").numbers.keys()


def test_whole_numbers_stay_whole():
    own = for_member(make("CartPole-v1"), {"env.max_steps_in_episode": jnp.float32(3), "gamma": jnp.float32(0.9)})
    assert own.params.max_steps_in_episode == 3
    assert own.params.max_steps_in_episode.dtype == jnp.int32


class Growing:
    """Steps and resets by itself, and its observations are as long as its parameter says."""

    default_params = BribeParams()

    def observation_space(self, params):
        return Box(0.0, 1.0, (int(params.bonus),))

    def action_space(self, params):
        return Discrete(2)

    def reset(self, key, params):
        return jnp.zeros(int(params.bonus)), jnp.int32(0)

    def step(self, key, state, action, params):
        obs, over = jnp.zeros(int(params.bonus)), state >= 5
        return obs, jnp.where(over, 0, state + 1), 1.0, over, False, {"final_observation": obs}


def test_a_parameter_that_decides_a_shape_is_the_same_for_all():
    assert ppo.train(small_args(**SHORT), Growing()).status == "finished"
    with pytest.raises(UsageError) as refused:
        ppo.train(small_args(population=2, env_params='{"bonus": [2, 3]}', **SHORT), Growing())
    said = "Growing cannot differ in 'bonus', --env-params '{\"bonus\": 2.0}', others are max_steps_in_episode"
    check_words(str(refused.value), said)


def test_an_object_gets_parameters_too():
    args = small_args(population=2, env_params='{"bonus": [5.0, 1.0], "max_steps_in_episode": "choice:2,4"}')
    result = ppo.train(args, Bribe())
    assert 10.0 <= min(result.evaluation["eval/return_mean"]) <= max(result.evaluation["eval/return_mean"]) <= 20.0
    with pytest.raises(UsageError, match="cannot change an object, CartPole-v1"):
        ppo.train(small_args(env_params='{"gravity": 5.0}'), make("CartPole-v1"))


LOGGED = {"time": 59 / 16, "time_sum": 16 * 59, "time_max": 7, "time_min": 1, "time_last": 2, "end": 70, "end_last": 1}


@pytest.mark.parametrize("make_args", [small_args, small_rnn_args, small_sac_args])
def test_numbers_in_the_info_are_logged(make_args, tmp_path):
    """Sixteen steps of episodes of seven: over environments, devices and updates, of each seed by itself."""
    flags = {"num_seeds": 2, "num_devices": 2, "hidden_sizes": (4,), "total_timesteps": 256}
    args = make_args(env="helpers:Chatty", run_dir=str(tmp_path), log_info=tuple(LOGGED), **flags)
    module_of(args).train(args)
    (row,) = metric_rows(tmp_path)
    for name, value in LOGGED.items():
        np.testing.assert_allclose(row[f"env/{name}"], [value, value], rtol=1e-6, err_msg=name)
    assert "env/all" not in row


@pytest.mark.parametrize("name", ["Chatty", "ChattyReset"])
def test_environments_tell_which_numbers_their_info_has(name):
    env = make_env(name)
    assert {"time", "end", "end_last"} <= set(env.info_numbers) and "all" not in env.info_numbers
    env.inner.log_info = ("end_last",)  # as the environment wants it
    run = for_run(small_args(log_info=("time_max",)), env)
    _, state = run.reset(jax.random.key(0))
    assert run.step(jax.random.key(1), state, jnp.int32(0)).info == {"time_max": 1.0, "end_last": 0.0}
    assert env.step(jax.random.key(1), state, jnp.int32(0)).info == {}, "unless it is asked for"
