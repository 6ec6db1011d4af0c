"""Populations: sweeps and grids, from flags to what is left of a run."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from cli_helpers import check_words, refusal
from helpers import metric_rows, ppo, ppo_rnn, result_of, sac, small_args
from matplotlib.figure import Figure

import common.population.size
from common.cli.errors import UsageError
from common.cli.population_flags import PopulationArgs
from common.compare import Args as CompareArgs
from common.compare import compare
from common.device.programs import for_seeds, pmapped
from common.device.seeds import arrays_of
from common.drawing.population import _draw_curves, _draw_descent
from common.envs.registry import make
from common.policy import load_policy
from common.population.size import check_size
from common.runs.directory import claim_directory, describe_run
from common.runs.history import Series
from common.runs.ranking import _best

TINY = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "hidden_sizes": (4,)}
LONG = ",".join(map(str, range(400)))
TINY |= {"env": "CartPole-v1", "total_timesteps": 6 * 32, "log_interval": 32, "seed": 3, "eval_episodes": 16}


def train(folder, **flags):
    return ppo.train(small_args(**TINY | {"run_dir": str(folder)} | flags))


# ---------------------------------------------------------------------------------------------------------------- flags


def values(**flags):
    return small_args(**flags).members


def test_members_draw_what_is_asked_for():
    sweep = ("learning_rate=log:1e-4:1e-2", "gamma=uniform:0.9:0.99", "ent_coef=choice:0,0.01,0.1")
    seed, hyper = values(population=400, sweep=sweep, seed=7)
    assert seed == list(range(7, 407))
    rate, gamma = np.array(hyper["learning_rate"]), np.array(hyper["gamma"])
    assert 1e-4 <= rate.min() < 1.1e-4 and 0.95e-2 < rate.max() <= 1e-2
    assert np.median(rate) == pytest.approx(1e-3, rel=0.3)
    assert 0.9 <= gamma.min() < 0.901 and 0.989 < gamma.max() <= 0.99
    assert np.median(gamma) == pytest.approx(0.945, abs=0.01)
    assert {0, 0.01, 0.1} == set(hyper["ent_coef"])
    assert abs(np.corrcoef(np.log(rate), gamma)[0, 1]) < 0.2, "each flag draws by itself"


def test_a_flag_draws_the_same_whatever_others_are_swept():
    alone = values(population=5, sweep=("clip_eps=uniform:0.1:0.3",))
    more = values(population=9, sweep=("gamma=uniform:0.9:0.99", "clip_eps=uniform:0.1:0.3"))
    assert alone.hyper["clip_eps"] == more.hyper["clip_eps"][:5]
    assert alone.hyper != values(population=5, sweep=("clip_eps=uniform:0.1:0.3",), seed=1).hyper


def test_a_grid_has_all_combinations_with_every_seed():
    args = small_args(grid=("learning-rate=1e-4,1e-3", "clip_eps=0.1,0.2,0.3"), num_seeds=2, seed=5)
    flags = [*args.flags_of_members()]
    assert len({json.dumps(one) for one in flags}) == 12
    assert flags[3] == {"seed": 6, "learning_rate": 1e-4, "clip_eps": 0.2}
    assert {one["seed"] for one in flags} == {5, 6}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--sweep gamma=uniform:0.9:0.99", "--sweep needs --population N"),
        ("--population 4 --num-seeds 2", "leave out --num-seeds"),
        ("--population 4 --grid gamma=0.9,0.99", "leave out --population"),
        ("--population 4 --grid gamma=0.9 --sweep gamma=choice:1", "give only one of them"),
        ("--population 4 --sweep num_envs=choice:4,8", "--sweep num_envs, gamma, learning_rate, ent_coef only"),
        ("--grid hidden_sizes=4,8", "--grid hidden_sizes: members may differ in"),
        ("--population 4 --sweep gamma", "'gamma' is not of the form NAME=log:LOW:HIGH"),
        ("--population 4 --sweep gamma=0.9,0.99", "is not of the form log:LOW:HIGH"),
        ("--population 4 --sweep gamma=normal:0:1", "is not of the form log:LOW:HIGH"),
        ("--population 4 --sweep gamma=uniform:0.9", "needs the lowest number and then the highest"),
        ("--population 4 --sweep gamma=uniform:0.9:0.5", "needs the lowest number and then the highest"),
        ("--population 4 --sweep learning_rate=log:0:1", "begins above 0"),
        ("--population 4 --sweep gamma=choice:0.9,many", "no number"),
        ("--population 4 --sweep gamma=choice:0.9,nan", "not finite"),
        ("--population 4 --sweep gamma=choice:0.9 gamma=choice:0.8", "gamma twice"),
        ("--population 4 --sweep gamma=uniform:0.9:1.1", "--sweep gamma: --gamma must be, at most 1, got 1.1"),
        ("--population 4 --sweep adam_b2=uniform:0.9:1", "--adam-b2 must be, at most 0.999999, got 1"),
        ("--grid learning_rate=0,1", "--learning-rate must be, greater than 0"),
        ("--grid " + " ".join(f"{name}={LONG}" for name in ("vf_coef", "ent_coef")), "160,000 agents, at most 10,000"),
        ("--population 3e9", "--population must be, at most 10,000"),
        ("--grid gamma=0.9,0.9", "has a number twice"),
        ("--grid gamma=0.9,0.99 --grid clip_eps=0.1,0.2", "--grid is there twice"),
        ("--population 4 --sweep", "--sweep needs a value"),
        ("--sweep --population 4", "--sweep needs a value"),
        ("--population -1", "--population must be at least 0"),
        ("--grid desired_kl=0.01,0.02", "--desired-kl needs --lr-schedule kl-adaptive"),
        ("--population 3 --seed 2147483646", "--seed must be, at most 2,147,483,644"),
    ],
)
def test_refusals(words, wanted):
    check_words(refusal(ppo.train, ppo.Args, words.split()), wanted)


def test_more_members_than_fit_are_refused(monkeypatch):
    monkeypatch.setattr(common.population.size, "memory_of", lambda devices: 1e5)
    words = ["--population", "40", "--num-envs", "4", "--hidden-sizes", "16", "--num-devices", "1"]
    message = refusal(ppo.train, ppo.Args, words)
    fit = int(re.search(r"at most (\d+) members fit", message)[1])
    assert 1 < fit < 40
    check_size(*_prepared(population=fit))
    with pytest.raises(UsageError, match="members of"):
        check_size(*_prepared(population=fit + 1))


def test_a_batch_is_no_longer_split_where_each_device_has_members_of_its_own():
    flags = {"population": 6, "sweep": ("policy_lr=log:1e-4:1e-2",), "num_devices": 3}
    assert sac.Args(sharding="members", **flags).sizes(3)[0].endswith("with batches of 256 (256 per device)")
    with pytest.raises(UsageError, match="--batch-size 256 is split evenly over --num-devices 3"):
        sac.Args(**flags)


def test_devices_with_members_of_their_own_have_memory_for_an_exchange():
    """Members on two devices take as much as on one, but for the learners of all that each device then has."""
    flags = {"one": {}, "two": {"sharding": "members"}, "evolving": {"sharding": "members", "pbt": True}}
    said = {}
    for name, given in flags.items():
        args, state, devices = _prepared(population=2000, sweep=("gamma=uniform:0.9:0.99",), **given)
        said[name] = check_size(args, state, devices * (1 if name == "one" else 2))["members"]
    taken = {name: float(re.search("take ([0-9.]+) MB", text)[1]) for name, text in said.items()}
    assert taken["one"] == taken["two"] < taken["evolving"]


def _prepared(**flags):
    """What `check_size` takes: flags, the shapes of the state and the devices."""
    args = ppo.Args(num_envs=4, hidden_sizes=(16,), **flags)
    env, devices = make(args.env), jax.devices()[:1]
    programs = pmapped(for_seeds(ppo.make_ppo(args, env), env, args.num_agents, 4), devices)
    return args, jax.eval_shape(programs.init, arrays_of(args.members, 1)), devices


def test_entropy_that_no_policy_has_is_refused_in_a_sweep_too():
    words = "--env CartPole-v1 --grid target_entropy_scale=0.5,1.5"
    check_words(refusal(sac.train, sac.Args, words.split()), "--target-entropy-scale 1.5, no policy has more entropy")


def test_algorithms_without_populations_say_so():
    import appo_pmap as appo

    assert not issubclass(appo.Args, PopulationArgs)
    check_words(refusal(appo.train, appo.Args, ["--population", "4"]), "--population")


# ----------------------------------------------------------------------------------------------------------------- runs

SWEEP = {"population": 4, "sweep": ("learning_rate=log:1e-3:1e-1", "gamma=uniform:0.9:0.99"), "quiet": False}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("population") / "run"
    return train(folder, **SWEEP), folder


def test_what_is_left_of_a_population(finished, capsys):
    _, folder = finished
    config = json.loads((folder / "config.json").read_text())
    args = small_args(**TINY | SWEEP)
    assert config["members"] == args.flags_of_members()
    assert (folder / "population.png").read_bytes().startswith(b"\x89PNG")
    assert all(len(row["loss/total"]) == 4 for row in metric_rows(folder) if "loss/total" in row)


def test_the_best_member_is_loaded_and_quoted_by_other_episodes(finished):
    result, folder = finished
    returns = result.evaluation["eval/return_mean"]
    best = load_policy(folder)
    assert best.seed == 3 + int(np.argmax(returns))
    quoted = result_of(folder)["best/return_mean"]
    assert best.evaluation == pytest.approx(quoted[int(np.argmax(returns))])
    assert quoted != returns
    for member in range(4):
        assert load_policy(folder, member=member).seed == load_policy(folder, seed=3 + member).seed == 3 + member


def test_without_an_evaluation_of_its_step_a_best_member_is_named_with_a_warning(finished, tmp_path):
    result, folder = finished
    best, step = int(np.argmax(result.evaluation["eval/return_mean"])), result.env_steps
    saved = shutil.copytree(folder, tmp_path / "run") / "checkpoints"
    shutil.copytree(saved / str(step), saved / str(step + 64))
    shutil.rmtree(saved / str(step + 64) / "metrics")
    with pytest.warns(UserWarning, match=f"member {best}, the best one at step {step}"):
        assert load_policy(tmp_path / "run").member == best
    assert load_policy(tmp_path / "run", step).member == best
    for path in saved.glob("*/metrics"):
        shutil.rmtree(path)
    with pytest.warns(UserWarning, match="member 0"):
        assert load_policy(tmp_path / "run").member == 0


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"member": 4}, "no member 4: it trained members 0 to 3"),
        ({"member": -1}, "no member -1"),
        ({"member": "x"}, "no member 'x': it trained members 0 to 3"),
        ({"member": 1.0}, "no member 1.0"),
        ({"member": 1, "seed": 4}, "one of them only"),
        ({"step": 192.0}, "no checkpoint 192.0: choose .* 192"),
    ],
)
def test_members_that_are_not_there(choice, wanted, finished):
    with pytest.raises(UsageError, match=wanted):
        load_policy(finished[1], **choice)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda members: members[:3], "its config.json has 4 as population and lists 3"),
        (lambda members: [*members[:3], members[3] | {"gamma": "much"}], "does not list its members with a seed and"),
        (lambda members: [*members[:3], {"gamma": 0.9}], "does not list its members with a seed and"),
        (lambda members: "four", "does not list its members with a seed and"),
    ],
)
def test_damaged_members_are_told(change, wanted, finished, tmp_path):
    run = shutil.copytree(finished[1], tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"members": change(config["members"])}))
    check_words(refusal(compare, CompareArgs, [str(run)]), f"{run} is damaged, {wanted}")
    check_words(refusal(ppo.train, ppo.Args, ["--resume", str(run)]), f"{run} is damaged, {wanted}")


@pytest.mark.parametrize(("rows", "marker"), [(1, "o"), (2, "None")])
def test_a_single_row_is_drawn_as_points(rows, marker):
    axes, returns = Figure().subplots(), np.array([1.0, 3, 2])
    series = Series(np.arange(rows), np.arange(rows), np.ones((rows, 3)))
    _draw_curves(axes, series, returns)
    _draw_descent(axes, "gamma", series, np.tile([0, 1, 2], (rows, 1)), returns)
    assert [line.get_marker() for line in axes.lines] == [marker] * (3 + 2 + 3 + 2)


def test_a_population_resumes_to_the_last_bit(finished, tmp_path):
    result, _ = finished
    train(tmp_path / "run", **SWEEP, stop_after=64, checkpoint_interval=32)
    args = ppo.Args.from_run(tmp_path / "run")
    assert ppo.train(args).state_sha256 == result.state_sha256


@pytest.mark.parametrize("algorithm", [ppo, ppo_rnn, sac], ids=["ppo", "memory", "sac"])
def test_members_stay_when_a_run_is_resumed(algorithm, tmp_path):
    args = algorithm.Args(env="Pendulum-v1", population=2, sweep=("gamma=uniform:0.8:0.9",), run_dir=str(tmp_path))
    claim_directory(tmp_path, describe_run(args, algorithm.__file__, make("Pendulum-v1"), []), overwrite=False)
    words = ["--resume", str(tmp_path), "--sweep", "gamma=choice:0.5"]
    wanted = "a resumed run keeps its --sweep: gamma=uniform:0.8:0.9 in, gamma=choice:0.5 with these flags"
    check_words(refusal(algorithm.train, algorithm.Args, words), wanted)


def test_ranked_members_show_the_return_that_ranks_them_before_the_one_in_other_episodes():
    ranks, others = ({"eval/return_mean": x, "eval/return_std": [0.0] * 3} for x in ([1.5, 3.5, 2.5], [6.5, 4.5, 5.5]))
    for other, shown in ((others, [[3.5, 4.5], [2.5, 5.5], [1.5, 6.5]]), ({}, [[3.5], [2.5], [1.5]])):
        lines = _best([{}, {}, {}], ranks, other, "8 episodes", "their flags")[-3:]
        assert [[float(x) for x in re.findall(r"\d\.5", line)] for line in lines] == shown


@pytest.mark.filterwarnings("error")
def test_members_are_drawn_through_rows_in_which_no_episode_of_theirs_ended():
    axes, nan, steps = Figure().subplots(), np.nan, np.arange(4)
    series = Series(steps, steps, np.array([[nan, nan], [1, nan], [nan, 6], [3, 8]], float))
    _draw_curves(axes, series, np.array([3.0, 8]))
    first, second, median, best = ([*map(float, line.get_ydata())] for line in axes.lines)
    assert (first, second[1:], best[1:]) == ([1, 2, 3], [6, 8], [6, 8])
    assert median == [1, 4, 5.5]


def test_a_member_that_breaks_stops_no_other(tmp_path, capsys):
    grid = ("learning_rate=1e-3,1e30",)
    result = train(tmp_path / "run", grid=grid, quiet=False)
    out, err = capsys.readouterr()
    assert result.status == "finished"
    assert np.isfinite(result.evaluation["eval/return_mean"][0])
    assert re.search(r"warning: by step \d+ \S+ of member 1 is not finite; 1 go on", err)
    assert err.count("warning") == 1, "said once"
    assert "member 0: --seed 3 --learning-rate 0.001" in out
    assert load_policy(tmp_path / "run").seed == 3
    last = [row for row in metric_rows(tmp_path / "run") if "loss/total" in row][-1]
    assert last["loss/total"][0] is not None and last["loss/total"][1] is None


def test_a_member_that_breaks_is_not_the_best_whatever_it_earns(tmp_path, capsys):
    """What is not a number chooses the first action, and stays in MountainCar's valley as a policy does at first."""
    env = {"env": "MountainCar-v0", "env_params": '{"max_steps_in_episode": 20}'}
    result = train(tmp_path / "run", grid=("learning_rate=1e30,1e-3",), quiet=False, **env)
    assert [np.isfinite(x) for x in result.evaluation["eval/return_mean"]] == [False, True]
    assert "of 2 members, of which 1 broke," in capsys.readouterr().out
    assert load_policy(tmp_path / "run").member == 1


@pytest.mark.parametrize("flags", [{"population": 1}, {"grid": ("gamma=0.9",)}])
def test_a_population_of_one(flags, tmp_path):
    assert train(tmp_path / "run", quiet=False, **flags).status == "finished"
    assert load_policy(tmp_path / "run").member == 0


def test_a_population_of_which_all_break_fails(tmp_path):
    with pytest.raises(Exception, match="is not finite at step"):
        train(tmp_path / "run", grid=("learning_rate=1e30,1e31",))


def test_the_best_member_reaches_the_goal(tmp_path):
    """Returns of a random CartPole are above 8 for all of them, and their mean is below that of the best."""
    first = train(tmp_path / "a", **SWEEP, eval_interval=32)
    rows = [row["eval/return_mean"] for row in metric_rows(tmp_path / "a") if "eval/return_mean" in row]
    assert first.status == "finished"
    goal = max(rows[0])
    assert np.mean(rows[0]) < goal
    result = train(tmp_path / "b", **SWEEP, eval_interval=32, stop_at_return=goal)
    assert result.env_steps == 32


def test_members_are_compared_by_their_values(tmp_path):
    flags = {"grid": ("learning_rate=1e-3,1e-2", "clip_eps=0.1,0.2"), "num_seeds": 2}
    result = train(tmp_path / "run", **flags)
    rows = compare(CompareArgs(runs=(str(tmp_path / "run"),), by=("learning_rate",), estimate="mean"))
    returns = result.evaluation["eval/return_mean"]
    assert [row.flags["learning_rate"] for row in rows] == [1e-3, 1e-2]
    assert [row.seeds for row in rows] == [4, 4]
    assert [row.return_ for row in rows] == pytest.approx([np.mean(returns[:4]), np.mean(returns[4:])])
