"""Benchmarks of learning: jobs that go on where they were cut short, records, the page made of
them, the search.
"""

import dataclasses
import json
import tomllib
from collections import deque
from contextlib import closing
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import ROOT, SMALL, STEPS, in_process, read_rows
from gymnax.environments.misc import frozen_lake
from numpy.testing import assert_allclose

import benchmarks.records
from benchmarks import learning, many_seeds, parity_sac, report, tune
from benchmarks.jobs import Job, run
from benchmarks.learning import Goal, goals
from benchmarks.optimum import optimum_of, table_of
from benchmarks.records import record_of
from pmaprl.cli.errors import UsageError
from pmaprl.device.evaluation import SEED


def job(folder: Path, *flags: object) -> Job:
    return Job("ppo_pmap", ("--env", "CartPole-v1", *map(str, flags)), folder)


@pytest.mark.slow
def test_what_is_compared_with_the_authors_code_is_an_update():
    _, before, after = parity_sac.ours("crossq")
    assert all(np.any(before[name] != x) for name, x in after.items())


@pytest.mark.slow
def test_a_job_goes_on_where_it_was_cut_short_and_is_not_run_again(tmp_path, capsys):
    one = job(tmp_path, *SMALL, "--total-timesteps", 8 * STEPS, "--log-interval", STEPS)
    assert (
        in_process(*one.flags, "--run-dir", one.run_dir, "--stop-after", 4 * STEPS, "--quiet") == 0
    )
    assert one.done is False
    assert one.steps() == 4 * STEPS
    failing = job(tmp_path, *SMALL, "--total-timesteps", STEPS, "--init-from", "nowhere")
    capsys.readouterr()
    assert run([one, failing]) == [failing]
    assert "--init-from nowhere ended with 2: error: " in capsys.readouterr().out
    assert one.done is True
    assert one.steps() == 8 * STEPS
    assert [row["env_steps"] for row in read_rows(one.run_dir)] == list(
        range(STEPS, 9 * STEPS, STEPS)
    )
    ended = one.log.stat().st_mtime_ns
    assert run([one]) == []
    assert one.log.stat().st_mtime_ns == ended
    capsys.readouterr()
    # The same program again
    args = many_seeds.What(algorithm="ppo_pmap", flags=one.flags, threshold=1, runs=2)
    many_seeds.main(args)
    record = json.loads(capsys.readouterr().out)
    assert record["seeds"] == 2
    assert record["learned"] == 2
    assert record["lost"] == 0
    assert len(record["final"]) == 2
    assert record["mean_by_step"].keys() == {str(8 * STEPS)}
    assert record["final"][0] != record["final"][1]


@pytest.mark.slow
def test_learning_writes_what_came_of_all_seeds(tmp_path, monkeypatch):
    names = "ppo_pmap (wide)", "CartPole-v1 (64 of them)"
    goal = Goal(
        "classic",
        *names,
        4096,
        475,
        None,
        {"num_envs": 64, "num_steps": 32},
    )
    for module in (learning, report):
        monkeypatch.setattr(module, "goals", lambda: [*goals(), goal])
    folders = {"folder": str(tmp_path / "runs"), "results": str(tmp_path / "results")}
    args = learning.Args(
        envs=(names[1],),
        algos=(names[0],),
        seeds=2,
        **folders,
    )
    learning.learn(args)
    (path,) = (tmp_path / "results").glob("*/ppo_pmap-wide/CartPole-v1-64-of-them.json")
    record = json.loads(path.read_text())
    assert (record["algorithm"], record["env"]) == names
    (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    rows = [row for row in read_rows(run_dir) if "eval/return_mean" in row]
    assert record["returns"] == [row["eval/return_mean"] for row in rows]
    assert record["env_steps"] == [2048, 4096]
    assert record["seeds"] == [100, 101]
    assert record["threshold"] == 475
    assert len(record["env_steps_to_threshold"]) == 2
    assert record["flags"]["num_envs"] == 64
    assert {"jax", "python"} <= record["versions"].keys()
    learning.learn(args)
    assert json.loads(path.read_text()) == record
    with pytest.raises(
        UsageError,
        match=r"has 2 seeds x 4,096 steps, and this would replace it by 1 seeds x 4,096",
    ):
        learning.learn(dataclasses.replace(args, seeds=1))
    report.report(report.Args(results=args.results, page=str(tmp_path / "page.md")))
    assert f"| {np.mean(record['returns'][-1]):.4g} |" in (tmp_path / "page.md").read_text()


def test_every_task_has_flags_that_its_algorithm_takes():
    sets = {goal.set for goal in goals()}
    tasks = [
        task
        for name in sorted(sets)
        for task in learning.tasks_of(learning.Args(set=name, seeds=2))
    ]
    paths = {task.path(Path()) for task in tasks}
    assert len(paths) == len(tasks) == len(goals())
    assert all(job.args.total_timesteps == task.steps for task in tasks for job in task.jobs)
    agents = {sum(job.args.num_agents for job in task.jobs) for task in tasks}
    assert agents == {2}


def record(algorithm: str, env: str, returns: list[list[float]], threshold: float) -> dict:
    steps = [1000 * (1 + index) for index in range(len(returns))]
    there = [
        next((s for s, row in zip(steps, returns, strict=True) if row[i] >= threshold), None)
        for i in range(8)
    ]
    return dict.fromkeys(benchmarks.records.NAMES) | {
        "env": env,
        "algorithm": algorithm,
        "flags": {"total_timesteps": steps[-1]},
        "seeds": list(range(8)),
        "threshold": threshold,
        "env_steps": steps,
        "seconds": [step / 100 for step in steps],
        "returns": returns,
        "env_steps_to_threshold": there,
        "steps_per_second": [123_456.0],
    }


@pytest.fixture
def results(tmp_path):
    """Two tasks: the first one's last returns are 0, 1, ..., 7, and 4 is its threshold."""
    records = [
        record("ppo_pmap", "CartPole-v1", [[0.0] * 8, list(map(float, range(8)))], 4),
        record("ppo_pmap", "Acrobot-v1", [[-500.0] * 8, [-100.0] * 8], -100),
        record("sb3_ppo", "Acrobot-v1", [[-900.0] * 8, [-300.0] * 8], -100),
    ]
    for one in records:
        path = tmp_path / "results" / "cpu-2" / one["algorithm"] / f"{one['env']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))
    return tmp_path / "results"


def test_the_page_has_the_figures_of_the_files(results):
    text = report.page_of(results)
    assert "## classic, cpu-2" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| [CartPole-v1]"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[0] == "[CartPole-v1](../benchmarks/results/cpu-2/ppo_pmap/CartPole-v1.json)"
    assert cells[2].startswith("3.5 [")  # the mean of 2, 3, 4 and 5
    assert cells[3:] == ["4/8 ≥4", ""]
    assert text.index("| ppo_pmap | -100 |") < text.index("| sb3_ppo | -300 |")
    beside = "| Acrobot-v1 | ppo_pmap | -100 | -300 {} |"

    def others(page):
        lines = page.split("## classic")[0].splitlines()
        return [line for line in lines if line.startswith("| A")]

    assert others(text) == [beside.format("below¹")]
    path = results / "cpu-2" / "sb3_ppo" / "Acrobot-v1.json"
    one = json.loads(path.read_text())
    for seed, wanted in ((SEED, "below"), (SEED + 1, "below¹")):
        flags = one["flags"] | {"eval_seed": seed}
        path.write_text(json.dumps(one | {"flags": flags}))
        assert others(report.page_of(results)) == [beside.format(wanted)]


def test_a_machine_that_only_adds_an_algorithm_has_no_chapter(results):
    path = results / "gpu-1" / "dqn_pmap" / "Acrobot-v1.json"
    path.parent.mkdir(parents=True)
    other = record("dqn_pmap", "Acrobot-v1", [[-200.0] * 8, [-90.0] * 8], -100)
    path.write_text(json.dumps(other))
    text = report.page_of(results)
    assert "(../benchmarks/results/gpu-1/dqn_pmap/Acrobot-v1.json) | dqn_pmap | -90 |" in text
    assert ", gpu-1" not in text
    path.with_name("CartPole-v1.json").write_text(
        json.dumps(record("dqn_pmap", "CartPole-v1", [[1.0] * 8], 4))
    )
    assert "## classic, gpu-1" in report.page_of(results), "not only some of its environments"


def test_the_best_possible_return_stands_in_the_table_and_in_the_picture(results):
    path = results / "cpu-2" / "ppo_pmap" / "CartPole-v1.json"
    one = json.loads(path.read_text())
    assert "optimum" not in report.page_of(results).split("## classic")[1]
    known = one | {"optimum": {"all_starts": 7.5, "evaluated": 7.25}}
    path.write_text(json.dumps(known))
    table = report.page_of(results).split("## classic")[1]
    (row,) = (line for line in table.splitlines() if line.startswith("| [CartPole-v1]"))
    assert row.split("|")[-2].strip().startswith("7.25 (7.5 ")
    (other,) = (line for line in table.splitlines() if "Acrobot" in line and "| ppo_pmap" in line)
    assert other.split("|")[-2].strip() == ""
    records = benchmarks.records.load_records(path.parents[1])
    panels = {panel.title: panel for panel in report._curves(records, "seconds")}
    drawn = panels["CartPole-v1"].lines[-1]
    assert drawn.label == "optimum"
    assert set(drawn.y) == {7.25}
    assert max(drawn.x) == 20
    assert "optimum" not in {line.label for line in panels["Acrobot-v1"].lines}


def newest(name: str) -> str:
    """The id of the newest version that is registered."""
    gymnasium = pytest.importorskip("gymnasium")
    return max(env_id for env_id in gymnasium.registry if env_id.startswith(f"{name}-v"))


@pytest.mark.parametrize(
    ("name", "params", "wanted"),
    [
        ("Taxi", "", 7.93),  # 20 - 1 for each step before the last, over all 300 starts
        ("CliffWalking", "", -13),
        ("CliffWalking", '{"max_episode_steps": 12}', -12),  # too few for the way, but no fall
        ("FrozenLake", '{"is_slippery": false}', 1),
        ("FrozenLake", '{"is_slippery": false, "max_episode_steps": 5}', 0),
        ("FrozenLake", "", 0.7442),  # within 100 steps
        ("FrozenLake", '{"max_episode_steps": 10000}', 14 / 17),  # without a limit
    ],
)
def test_dynamic_programming_finds_the_best_return(name, params, wanted):
    best = optimum_of(f"gymnasium:{newest(name)}", params, 128)
    assert_allclose(best.all_starts, wanted, atol=5e-5)


def test_a_game_of_gymnax_has_the_best_return_of_the_equal_one_of_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")
    assert optimum_of("FrozenLake-misc", "", 4) == optimum_of("gymnasium:FrozenLake-v1", "", 4)
    shorter = '{"max_steps_in_episode": 20}', '{"max_episode_steps": 20}'
    assert optimum_of("FrozenLake-misc", shorter[0], 4) == optimum_of(
        "gymnasium:FrozenLake-v1",
        shorter[1],
        4,
    )
    game, params = gymnax.make("FrozenLake-misc")
    with closing(gymnasium.make("FrozenLake-v1")) as other:
        assert params.max_steps_in_episode == other.spec.max_episode_steps
        table = table_of(other)
    keys = jax.random.split(jax.random.key(0), 4096)

    def often(state, action):
        """How often each state follows without an end, and the mean reward."""
        there = frozen_lake.EnvState(position=state, time=0)
        obs, _, reward, ends, _ = jax.vmap(lambda key: game.step_env(key, there, action, params))(
            keys
        )
        seen = jax.nn.one_hot(obs, 16)
        return jnp.mean(seen * ~ends[:, None], axis=0), jnp.mean(reward)

    # Neither holes nor the goal
    is_over = np.isin(np.arange(16), (5, 7, 11, 12, 15))
    alive = np.flatnonzero(~is_over)
    by_action = jax.vmap(often, (None, 0))
    of_all = jax.vmap(by_action, (0, None))
    onward, reward = jax.jit(of_all)(alive, np.arange(4))
    assert_allclose(onward, table.onward[alive], atol=0.04)
    assert_allclose(reward, table.reward[alive], atol=0.04)
    start, _ = game.reset_env(keys[0], params)
    assert table.starts[start] == 1


def test_the_best_return_of_an_evaluation_is_that_of_its_own_starts():
    """Taxi's way is counted here: to the passenger, from there to the goal, and a step for each of
    both.
    """
    gymnasium = pytest.importorskip("gymnasium")
    best = optimum_of(f"gymnasium:{newest('Taxi')}", "", 16)
    with closing(gymnasium.make(newest("Taxi"))) as game:
        ways = [_way(game.unwrapped, game.reset(seed=SEED + index)[0]) for index in range(16)]
    assert_allclose(best.evaluated, 21 - np.mean(ways))
    assert abs(best.evaluated - best.all_starts) > 0.01


def _way(taxi, start: int) -> int:
    """Steps to the end, by a search in breadth."""
    ways = {start: 0}
    edge = deque([start])
    while True:
        state = edge.popleft()
        for action in range(6):
            ((_, reached, _, ends),) = taxi.P[state][action]
            if ends:
                return ways[state] + 1
            if reached not in ways:
                ways[reached] = ways[state] + 1
                edge.append(reached)


@pytest.mark.parametrize(
    ("suite", "name", "params"),
    [
        ("gymnasium:", "CartPole", ""),
        ("gymnasium:", "Blackjack", ""),
        # Whose probabilities are not all in the table
        ("gymnasium:", "Taxi", '{"fickle_passenger": true}'),
        ("envpool:", "FrozenLake", ""),
    ],
)
def test_no_best_return_is_told_where_probabilities_are_not_known(suite, name, params):
    assert optimum_of(suite + newest(name), params, 4) is None


def test_a_damaged_result_is_named(results):
    path = results / "cpu-2" / "ppo_pmap" / "CartPole-v1.json"
    one = json.loads(path.read_text())
    ragged = [*one["returns"][:-1], one["returns"][-1][1:]]
    lacking = {"optimum": {"evaluated": 1.0}}
    for damage in (
        {"returns": ragged},
        {"threshold": None},
        {"steps_per_second": []},
        lacking,
    ):
        path.write_text(json.dumps(one | damage))
        with pytest.raises(UsageError, match=r"CartPole-v1.json .* damaged \(\w+\)"):
            report.page_of(results)


def test_scores_lie_between_the_worst_return_and_the_threshold(results):
    tasks = report.scores(
        [json.loads(path.read_text()) for path in sorted(results.glob("*/*/*.json"))]
    )["ppo_pmap"]
    assert_allclose(
        [sorted(tasks["CartPole-v1"]), tasks["Acrobot-v1"]],
        [np.arange(8) / 4, np.ones(8)],
    )


@pytest.fixture
def searched(monkeypatch):
    """Runs that earn what their entropy bonus says, and nothing where they cannot be run."""
    ran = []

    def pretend(jobs, *_):
        for one in (one for one in jobs if not one.done):
            ran.append(one)
            if one.args.clip_eps == 0.3:
                continue
            one.run_dir.mkdir(parents=True, exist_ok=True)
            worth = -abs(one.args.ent_coef - 0.03) + 1e-3 * one.args.seed
            value = [worth] * one.args.num_seeds
            end = one.args.total_timesteps
            rows = [
                {"env_steps": step, "eval/return_mean": value, "time/compile": 1.0}
                for step in (1, end - 1, end)
            ]
            (one.run_dir / "metrics.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
            (one.run_dir / "DONE").touch()
        return [one for one in jobs if not one.done]

    monkeypatch.setattr(tune, "run", pretend)
    return ran


def test_the_search_finds_the_best_candidate_and_gives_more_steps_to_fewer(
    searched, tmp_path, capsys
):
    args = tune.Args(
        env=("CartPole-v1",),
        candidates=27,
        total_timesteps=90_000,
        folder=str(tmp_path / "tune"),
    )
    tune.tune(args)
    sizes = [(one.args.total_timesteps, one.args.num_seeds, one.args.seed) for one in searched]
    halves = [
        ((10_000, 3, 2000), 27),
        ((30_000, 3, 2000), 9),
        ((90_000, 3, 2000), 3),
        ((90_000, 10, 1000), 2),
    ]
    assert [(size, sizes.count(size)) for size in dict.fromkeys(sizes)] == halves
    entry = (tmp_path / "tune" / "ppo_pmap__CartPole-v1.toml").read_text()
    assert tomllib.loads(entry)["CartPole-v1"]["ent_coef"] == 0.03
    assert entry in capsys.readouterr().out


@pytest.mark.parametrize("space", tomllib.loads((ROOT / "benchmarks" / "spaces.toml").read_text()))
def test_every_space_has_candidates_that_differ(space):
    algorithm = space.split("-")[0]
    env = "envpool:Pendulum-v1" if algorithm == "appo_pmap" else "Pendulum-v1"
    args = tune.Args(
        env=(env,),
        algo=algorithm,
        space=space,
        candidates=20,
    )
    candidates = tune.draw(args)
    assert candidates == tune.draw(args)
    assert candidates[0] == {}
    assert len({json.dumps(flags) for flags in candidates}) == 20


def test_a_seed_keeps_its_own_curve_where_others_have_more_evaluations(tmp_path, monkeypatch):
    jobs = [
        job(tmp_path, "--total-timesteps", 100, "--eval-interval", 25, "--seed", seed)
        for seed in (3, 4)
    ]
    for one, steps in zip(jobs, ((20, 50, 80, 100), (20, 100)), strict=True):
        one.run_dir.mkdir()
        moments = [
            {"time/wall": step / 10, "time/compile": 2.0, "time/sps_total": 5.0} for step in steps
        ]
        rows = [
            {"env_steps": x, "eval/return_mean": x**2 / 100} | y
            for x, y in zip(steps, moments, strict=True)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (one.run_dir / "metrics.jsonl").write_text(lines)
    config = {
        "versions": {},
        "git": None,
        "devices": [],
        "args": {"total_timesteps": 100, "eval_interval": 25},
    }
    monkeypatch.setattr(benchmarks.records, "read_config", lambda _: config)
    one = record_of("appo_pmap", "CartPole-v1", jobs, 50)
    assert one["env_steps"] == [20, 50, 80, 100]
    assert one["evaluations"] == [4, 2]
    wanted = [[4, 4], [25, 40], [64, 76], [100, 100]]
    assert_allclose(one["returns"], wanted, rtol=1e-6)
    assert_allclose(one["seconds"], [2, 5, 8, 10])
    assert "(2 of 4 evaluations)" in " ".join(report._row(one, []))
    evaluated = one | {"evaluations": [4, 4]}
    row = report._row(evaluated, [30, 70, 101])
    assert "evaluations" not in " ".join(row)
    assert row[-3:] == ["4", "70", ""], "of the nearest evaluation, none after the end"
