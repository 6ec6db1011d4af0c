"""`common/plot.py`, `common/compare.py` and what they use of `common/drawing`: runs and numbers made by hand."""

import csv
import json
import math

import numpy as np
import pytest
from cli_helpers import check_words, refusal, slow_imports

from common import compare, plot
from common.cli.command import main, parse
from common.drawing import figure
from common.drawing.curves import GRID, Curve, align, curves, overlapping
from common.drawing.figure import draw, draw_curve
from common.drawing.groups import LoggedRun, Selection, group, load, pooled
from common.drawing.statistics import estimate, interval
from common.drawing.table import texts
from common.runs.history import Log, read_log

RETURN, RECENT = "episode/return", "episode/return_last100"
EVALUATION = "eval/return_mean"
PROGRAMS = {"plot": (plot.Args, plot.plot), "compare": (compare.Args, compare.run_command)}


def rows(steps, values, wall=None, metric=RETURN, compiled=1.0):
    """Rows of one invocation, 100 steps/s; `wall` defaults to one second per 100 steps."""
    wall = [step / 100 for step in steps] if wall is None else wall
    times = ({"time/wall": seconds, "time/compile": compiled, "time/sps_total": 100.0} for seconds in wall)
    names = (RETURN, RECENT) if metric == RETURN else (metric,)
    returns = ({"env_steps": step} | dict.fromkeys(names, value) for step, value in zip(steps, values, strict=True))
    return [row | time for row, time in zip(returns, times, strict=True)]


def make_run(path, logged, algorithm="ppo_pmap", evaluation=None, **flags):
    """A run directory; `logged` are its rows, or the text of its metrics.jsonl. Returns its path as a word."""
    path.mkdir(parents=True)
    text = logged if isinstance(logged, str) else "".join(json.dumps(row) + "\n" for row in logged)
    (path / "metrics.jsonl").write_text(text)
    flags = {"env": "CartPole-v1", "seed": 0, "num_seeds": 1} | flags
    (path / "config.json").write_text(json.dumps({"algorithm": algorithm, "args": flags}))
    if evaluation is not None:
        result = {"status": "finished", "env_steps": logged[-1]["env_steps"], EVALUATION: evaluation}
        (path / "result.json").write_text(json.dumps(result))
    return str(path)


def call(program, *words):
    """The exit code of `python -m common.<program> WORDS`, in this process."""
    args_class, function = PROGRAMS[program]
    return main(function, parse(args_class, list(map(str, words))))


def figure_of(*runs, **flags):
    return plot.learning_curves(plot.Args(runs=runs, **flags))


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def line_data(line):
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


# ---------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([9, 1, 2], "iqm", 4),  # nothing to leave out
        ([100, 1, 2, 3], "iqm", 2.5),
        ([-50, 3, 1, 2, 90], "iqm", 2),
        ([1, 2, 3, 4, 5, 6, 7, 800], "iqm", 4.5),
        ([100, 1, 2, 3], "mean", 26.5),
    ],
)
def test_estimates(values, kind, expected):
    values = np.array(values, float)
    assert estimate(values, kind) == pytest.approx(expected)
    np.testing.assert_allclose(estimate(np.stack([values, values + 1], axis=1), kind), [expected, expected + 1])


def test_the_interval_of_few_seeds_is_known():
    """Two seeds: a resample's mean is the lower one, the middle or the upper one, with chances 1/4, 1/2, 1/4."""
    band = interval(np.array([3.0, 7.0]), "mean")
    assert (band.low, band.high) == (3, 7)
    assert interval(np.array([3.0]), "mean") is None
    same = interval(np.full((4, 2), 5.0), "iqm")
    np.testing.assert_array_equal([same.low, same.high], np.full((2, 2), 5.0))
    outlier = interval(np.array([5.0] * 11 + [1000.0]), "iqm")  # 4 times among 12 in 1 of 70 resamples only
    assert (outlier.low, outlier.high) == (5, 5)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(10, 2, size=200)
    band = interval(values, "mean")
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert band.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert band.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_the_interval_is_reproducible_and_resamples_whole_seeds():
    values = np.random.default_rng(3).normal(size=(6, 4))
    band = interval(values, "iqm")
    for i in range(4):
        alone = interval(values[:, i], "iqm")
        assert (band.low[i], band.high[i]) == (alone.low, alone.high)


# ----------------------------------------------------------------------------------------------- reading and grouping


def logged_run(path="run", algorithm="ppo_pmap", **flags):
    log = Log({}, frozenset(), 0, 0.0, 0.0)
    return LoggedRun(path, algorithm, {"env": "CartPole-v1", "seed": 0, "num_seeds": 1} | flags, log)


def test_flags_split_groups_in_the_order_of_numbers():
    """A flag that an algorithm does not have is left out of its label."""
    runs = [logged_run(num_envs=n, hidden_sizes=[n, 2]) for n in (128, 16, 128)] + [logged_run(algorithm="sac_pmap")]
    groups = group(runs, ("num_envs", "hidden_sizes"))
    assert [one.label for one in groups] == [
        "ppo_pmap, num_envs 16, hidden_sizes 16,2",
        "ppo_pmap, num_envs 128, hidden_sizes 128,2",
        "sac_pmap",
    ]
    assert [len(one.runs) for one in groups] == [1, 2, 1]


def test_what_to_know_of_runs_that_are_no_repetitions():
    def notes(*runs):
        return [note.what for one in group(runs) for note in pooled(one)]

    assert notes(logged_run(), logged_run(seed=1)) == []
    assert "seed 1 is there more than once" in notes(logged_run(num_seeds=2), logged_run(seed=1))[0]
    different = notes(logged_run(clip_eps=0.1), logged_run(clip_eps=0.2, seed=1))
    assert different == ["runs with different clip_eps are put together, --by clip_eps tells them apart"]
    assert len(notes(logged_run(clip_eps=0.1), logged_run(clip_eps=0.2))) == 1, "--by tells the same seed apart too"
    for together in ({"pbt": True}, {"matchmaking": "members"}):
        assert "which makes the interval too narrow" in notes(logged_run(num_seeds=2, **together))[0]
    assert notes(logged_run(num_seeds=2, pbt=False, matchmaking="none")) == []
    assert "seed 0 is there more" in notes(logged_run(gamma=0.9), logged_run(gamma=0.9), logged_run(gamma=0.8))[1]


def test_by_takes_flags_as_they_are_written():
    assert Selection(runs=("a",), by=("--clip-eps,seed", "clip_eps")).split == ("clip_eps", "seed")
    args = parse(plot.Args, ["--by", "clip-eps", "a", "b", "--by", "seed"])
    assert (args.runs, args.split) == (("a", "b"), ("clip_eps", "seed"))


def test_a_run_given_twice_counts_once(tmp_path):
    run = make_run(tmp_path / "a", rows([100], [1.0]))
    (only,) = load(Selection(runs=(run, run + "/", str(tmp_path / "a" / ".." / "a"))), [RETURN])
    assert len(only.runs) == 1


def test_seconds_add_up_over_resumed_invocations(tmp_path):
    """The second invocation is seen by its clock alone, the third, whose clock is later, by its compilation alone."""
    logged = [
        *rows([100, 200], [1, 2], wall=[11.0, 12.0], compiled=10.0),
        *rows([300, 400], [3, 4], wall=[2.0, 3.0], compiled=10.0),
        *rows([500], [5], wall=[7.0], compiled=6.0),
    ]
    logged[3:3] = [{"env_steps": 300, EVALUATION: 9.0}]  # a row of an evaluation has no times
    for row in logged:
        row.update({"time/sps_total": 50.0} if row["env_steps"] == 500 else {})
    make_run(tmp_path / "a", logged)
    log = read_log(tmp_path / "a", [RETURN, EVALUATION])
    assert log.series[RETURN].wall.tolist() == [11, 12, 14, 15, 22]
    assert log.series[EVALUATION].wall.tolist() == [14]
    assert (log.steps, log.wall_seconds) == (500, 22)
    assert log.trained_seconds == pytest.approx(2 + 2 + 2)  # 200 steps at 100, 200 at 100, 100 at 50 steps/s


def test_damaged_lines_are_skipped(tmp_path):
    good = [json.dumps(row) for row in rows([100, 200], [[1, 2], [3, None]])]
    wrong = [{"env_steps": 150, RETURN: value} for value in ([1, 2, 3], [1, "high"], "high")]
    wrong.append({"env_steps": "x", RETURN: [1, 2]})
    damage = ["{", "null", "\0\0", *map(json.dumps, wrong)]
    make_run(tmp_path / "a", "\n".join([good[0], *damage, good[1], good[1][:20]]), num_seeds=2)
    series = read_log(tmp_path / "a", [RETURN]).series[RETURN]
    assert series.steps.tolist() == [100, 200]
    np.testing.assert_array_equal(series.values, [[1, 2], [3, np.nan]])


def test_each_seed_has_its_curve_of_finite_numbers(tmp_path):
    logged = rows([100, 200, 200, 300], [[None, 1, None], [2, 3, None], [4, 5, None], [6, None, None]])
    run = make_run(tmp_path / "a", logged, num_seeds=3)
    (only,) = load(Selection(runs=(run,)), [RETURN])
    found = curves(only, RETURN, "env_steps")
    assert [(one.x.tolist(), one.y.tolist()) for one in found] == [([200, 300], [4, 6]), ([100, 200], [1, 5])]
    assert [one.x.tolist() for one in curves(only, RETURN, "wall")] == [[2, 3], [1, 2]]


def curve(x, y):
    return Curve(logged_run(), np.array(x, float), np.array(y, float))


def test_curves_are_interpolated_where_all_of_them_are():
    aligned = align([curve([0, 10, 20, 40], [0, 10, 20, 40]), curve([5, 15, 30], [100, 200, 350])])
    assert aligned.x.tolist() == [5, 10, 15, 20, 30]
    assert aligned.values.tolist() == [[5, 10, 15, 20, 30], [100, 150, 200, 250, 350]]


def test_long_curves_are_thinned_without_losing_their_ends():
    x = np.arange(10 * GRID)
    aligned = align([curve(x, 2 * x), curve(x, 3 * x)])
    assert (len(aligned.x), aligned.x[0], aligned.x[-1]) == (GRID, 0, x[-1])
    np.testing.assert_allclose(aligned.values, [2 * aligned.x, 3 * aligned.x])


def test_curves_that_end_before_another_begins_are_left_out():
    early, middle, late = curve([0, 10], [1, 2]), curve([0, 25], [1, 2]), curve([20, 30], [1, 2])
    assert [one.x[-1] for one in overlapping([early, middle, late])] == [25, 30]
    assert overlapping([]) == []


# ------------------------------------------------------------------------------------------------------------- picture


def test_a_panel_for_each_environment_and_a_line_for_each_algorithm(tmp_path):
    runs = [
        make_run(tmp_path / "a", rows([100, 200], [7, 8]), algorithm="sac_pmap"),
        make_run(tmp_path / "b", rows([100, 200], [[0, 2], [4, 6]]), num_seeds=2),
        make_run(tmp_path / "c", rows([100, 150, 200], [9, 1, 11]), seed=2),
        make_run(tmp_path / "d", rows([100, 200], [5, 6]), algorithm="sac_pmap", env="Acrobot-v1"),
    ]
    figure = figure_of(*runs)
    acrobot, cartpole = (axes for axes in figure.axes if axes.axison)
    assert acrobot.get_legend().get_title().get_text() == "Acrobot-v1"
    assert labels(cartpole) == ["ppo_pmap (3 seeds, mean)", "sac_pmap (1 seed)"]
    ppo, sac = cartpole.lines
    assert line_data(ppo) == ([100, 150, 200], pytest.approx([11 / 3, 7 / 3, 7]))  # seeds 0 2 9, 2 4 1, 4 6 11
    assert line_data(sac) == ([100, 200], [7, 8])
    assert (sac.get_color(), sac.get_linestyle()) == (acrobot.lines[0].get_color(), acrobot.lines[0].get_linestyle())
    assert ppo.get_color() != sac.get_color()
    assert ppo.get_linestyle() != sac.get_linestyle()
    assert (len(cartpole.collections), len(acrobot.collections)) == (1, 0)  # one seed has no band
    assert cartpole.xaxis.get_major_formatter()(200_000) == "200k"


def test_the_band_is_the_bootstrap_interval(tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 5))
    run = make_run(tmp_path / "a", rows([100, 200], values.tolist()), num_seeds=5)
    (axes,) = figure_of(run).axes
    (band,) = axes.collections
    expected = interval(values.T, "iqm")
    corners = band.get_paths()[0].vertices
    for i, step in enumerate((100, 200)):
        heights = corners[corners[:, 0] == step][:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((expected.low[i], expected.high[i]))
    np.testing.assert_allclose(axes.lines[0].get_ydata(), np.sort(values, axis=1)[:, 1:4].mean(axis=1))
    (mean,) = figure_of(run, estimate="mean").axes
    np.testing.assert_allclose(mean.lines[0].get_ydata(), values.mean(axis=1))


def test_a_single_point_shows_its_interval(tmp_path):
    run = make_run(tmp_path / "a", rows([100], [[3.0, 7.0]], metric=EVALUATION), num_seeds=2)
    (axes,) = figure_of(run, y=EVALUATION).axes
    (bars,) = axes.collections
    assert np.sort(bars.get_segments()[0][:, 1]).tolist() == [3, 7]


def test_a_late_evaluation_is_of_the_time_at_which_its_policy_existed(tmp_path):
    def late(step, wall, compiled):
        return {"env_steps": step, EVALUATION: float(step), "time/wall": wall, "time/compile": compiled}

    first = [*rows([100, 200, 300], [1, 2, 3]), late(100, 0.9, 1.0), late(300, 2.9, 1.0)]
    resumed = [*rows([400, 500], [4, 5], wall=[1.5, 2.5], compiled=2.0), late(400, 1.4, 2.0)]
    make_run(tmp_path / "run", first + resumed)
    log = read_log(tmp_path / "run", [EVALUATION, RETURN])
    np.testing.assert_allclose(log.series[EVALUATION].steps, [100, 300, 400])
    np.testing.assert_allclose(log.series[EVALUATION].wall, [0.9, 2.9, 4.4])
    np.testing.assert_allclose(log.series[RETURN].wall, [1, 2, 3, 4.5, 5.5])
    assert (log.steps, log.wall_seconds, log.trained_seconds) == (500, 5.5, 5)


def test_wall_time_continues_over_a_resume_and_ended_runs_keep_their_value(tmp_path):
    resumed = [*rows([100], [1], wall=[2.0], compiled=2.0), *rows([200], [3], wall=[4.0], compiled=1.0)]
    other = rows([100, 200], [10, 20], wall=[1.0, 3.0])
    figure = figure_of(make_run(tmp_path / "a", resumed), make_run(tmp_path / "b", other, seed=1), x="wall")
    assert line_data(figure.axes[0].lines[0]) == ([2, 3, 6], pytest.approx([8, 10.75, 11.5]))  # 1 1.5 3, 15 20 20


def test_what_cannot_be_shown_is_left_out(tmp_path, capsys):
    runs = [
        make_run(tmp_path / "a", rows([100, 1000], [[1, None], [2, None]]), num_seeds=2),
        make_run(tmp_path / "b", rows([100, 200], [1, 2]), seed=2),
        *(make_run(tmp_path / name, rows([1], [1], metric="loss/q"), algorithm=f"sac_{name}") for name in "cd"),
    ]
    (axes,) = figure_of(*runs).axes
    assert labels(axes) == ["ppo_pmap (2 seeds, mean)"]
    assert line_data(axes.lines[0])[0] == [100, 200]
    assert len(capsys.readouterr().err.splitlines()) == 3  # a note of each


def test_more_lines_than_colours_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / str(i), rows([1, 2], [i, i]), seed=i) for i in range(28)]
    (axes,) = figure_of(*runs, by=("seed",)).axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 28


def test_the_command_writes_the_picture_and_says_where(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", rows([100, 200], [1, 2]))
    assert call("plot", "a") == 0
    assert capsys.readouterr().out.split() == ["saved", "curves.png"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert call("plot", "a", "--out", "vector.svg", "--title", "my title") == 0
    assert "my title" in (tmp_path / "vector.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "curves.png", "vector.svg"]


@pytest.mark.filterwarnings("error")
def test_the_curve_of_a_run_shows_each_seed_and_the_mean(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figure, "draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    logged = rows([100, 200, 300, 400, 500], [[None, None], [1, None], [2, 4], [None, 6], [4, 8]])
    logged[2] |= {EVALUATION: [10, 20], RECENT: [-50, -50]}  # what it was since the beginning is not drawn
    make_run(tmp_path / "a", logged, num_seeds=2)
    assert draw_curve(tmp_path / "a", "CartPole-v1, ppo_pmap") == tmp_path / "a" / "curve.png"
    assert (tmp_path / "a" / "curve.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    first, second, mean, *_, evaluation = axes.lines
    steps, nothing = [200, 300, 400, 500], pytest.approx(math.nan, nan_ok=True)
    assert line_data(first) == (steps, [1, 2, 3, 4])
    assert line_data(second) == (steps, [nothing, 4, 6, 8])
    assert line_data(mean) == (steps, [nothing, 3, 4.5, 6])
    assert line_data(evaluation) == ([300], [15])
    assert len(axes.lines) == 6
    one = rows([100, 200, 300], [1, None, 2])
    for name, logged, lines in (("b", one, [([100, 300], [1, 2])]), ("c", "", [])):
        make_run(tmp_path / name, logged)
        draw_curve(tmp_path / name, "one seed, or no numbers")
        assert [line_data(line) for line in drawn[-1].axes[0].lines] == lines


# --------------------------------------------------------------------------------------------------------------- table


def compared(*runs, **flags):
    return compare.compare(compare.Args(runs=runs, **flags))


def test_a_row_holds_what_the_runs_hold(tmp_path):
    runs = [
        make_run(tmp_path / "a", rows([100, 200], [[0, 50], [80, 90]]), num_seeds=2, evaluation=[70, 80]),
        make_run(tmp_path / "b", rows([100, 200, 300], [10, 95, 100]), seed=2, evaluation=[99]),
    ]
    (row,) = compared(*runs)
    assert (row.env, row.algorithm, row.seeds, row.steps, row.steps_max) == ("CartPole-v1", "ppo_pmap", 3, 200, 300)
    assert (row.estimate, row.return_, row.training_seeds) == ("mean", 83, 0)
    assert (row.return_low, row.return_high) == pytest.approx((70, 99), abs=4)
    assert (row.steps_per_second, row.wall_seconds) == (100, 2.5)
    assert (row.threshold, row.reached, row.seconds_to_threshold) == (90, 2, 2)  # seeds after never, 2 and 2 s


def test_the_threshold_is_of_the_environment_and_can_be_given(tmp_path):
    runs = [
        make_run(tmp_path / "a", rows([100, 200], [-10, 40])),
        make_run(tmp_path / "b", rows([100, 200], [0, 90]), algorithm="sac_pmap"),
        make_run(tmp_path / "c", rows([100, 200], [-1000, -500]), env="Pendulum-v1"),
    ]
    assert [row.threshold for row in compared(*runs)] == [80, 80, -550]
    assert [row.threshold for row in compared(*runs, threshold=40.0)] == [40, 40, 40]
    assert [row.reached for row in compared(*runs, threshold=40.0)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("highest", "text"),
    [([9, 9, 9], "2 s"), ([9, 9, 1], "2 s (2 of 3)"), ([9, 1, 1], "1 of 3"), ([1, 1, 1], "-"), ([9, 1], "1 of 2")],
)
def test_time_to_the_threshold_is_the_median_over_seeds(tmp_path, highest, text):
    seeds = len(highest)
    run = make_run(tmp_path / "a", rows([100, 200, 300], [[0] * seeds, highest, highest]), num_seeds=seeds)
    (row,) = compared(run, threshold=5.0)
    assert texts(row, ())["to threshold"] == text


def test_an_unfinished_run_counts_with_its_training_return(tmp_path, capsys):
    runs = [
        make_run(tmp_path / "a", rows([100, 200, 300], [[1, 2], [3, 4], [None, 5]]), num_seeds=2),
        make_run(tmp_path / "b", rows([100], [6.0]), seed=2, evaluation=[9.0]),
    ]
    (row,) = compared(*runs)
    assert (row.return_, row.training_seeds) == (pytest.approx((3 + 5 + 9) / 3), 2)
    assert texts(row, ())["return [95% CI]"].endswith(" *")
    assert f"note: {runs[0]}: no evaluation in result.json, the last {RETURN}" in capsys.readouterr().err
    (tmp_path / "b" / "result.json").write_text("{")
    (row,) = compared(runs[1])
    assert (row.return_, row.training_seeds) == (6, 1)


@pytest.mark.filterwarnings("error")
def test_a_run_without_returns_is_in_the_table(tmp_path):
    (row,) = compared(make_run(tmp_path / "a", rows([100], [None])))
    assert [texts(row, ())[name] for name in ("return [95% CI]", "threshold", "to threshold")] == ["-"] * 3


@pytest.fixture
def two_groups(tmp_path):
    return [
        make_run(
            tmp_path / f"{i}",
            rows([100_000, 200_704], [[1] * 5, [x] * 4 + [400]]),
            num_seeds=5,
            clip_eps=x,
            env="an_environment:with_a_long_name",
            evaluation=[1000 * x + seed for seed in range(5)],
        )
        for i, x in enumerate((0.125, 0.25))
    ]


def test_a_narrow_terminal_gets_a_list(two_groups, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    assert call("compare", *two_groups, "--by", "clip_eps") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "env              an_environment:with_a_long_name" in lines
    assert [line.split()[1] for line in lines if line.startswith("clip_eps")] == ["0.125", "0.25"]
    assert max(map(len, lines)) <= 60


def test_a_pipe_gets_the_whole_table_and_the_csv_file_full_numbers(two_groups, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = tmp_path / "table.csv"
    assert call("compare", *two_groups, "--by", "clip_eps", "--csv", path) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "0.125" in line)
    assert "an_environment:with_a_long_name" in line
    for words in ("ppo_pmap", " 5 ", "200,704", "IQM 127.0 [125.", "100 ", "2,007.0 s", "360.0", "1 of 5"):
        assert words in line
    assert "…" not in "".join(lines)
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["env"], first["clip_eps"], second["clip_eps"]) == ("an_environment:with_a_long_name", "0.125", "0.25")
    assert (first["seeds"], first["steps"], first["return"], first["estimate"]) == ("5", "200704", "127.0", "IQM")
    assert float(first["wall_seconds"]) == 2007.04
    assert float(first["threshold"]) == pytest.approx(360, abs=0.2)
    assert (first["reached"], first["seconds_to_threshold"]) == ("1", "")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("compare", "name at least one run directory, such as runs/NAME or runs/*"),
        ("compare good nowhere", "nowhere is not a run directory: it does not exist"),
        ("compare words", "words is not a run directory: its config.json has no sensible number for num_seeds"),
        ("compare silent", "silent has no metrics yet"),
        ("compare unreadable", "unreadable/metrics.jsonl cannot be read: it is not a file"),
        ("compare good --by clip_epz", "--by clip_epz: none of the runs has this flag; did you mean clip_eps?"),
        ("compare good --by zzzzz", "there are clip_eps, env, gamma"),
        ("compare good --threshold nan", "--threshold must be finite"),
        ("compare good --threshold high", "--threshold must be a number, got 'high'"),
        ("compare good --csv nowhere/x.csv", "nowhere/x.csv cannot be written: there is no folder nowhere"),
        ("plot good --y return", f"none of the runs has this metric; did you mean {RETURN} or {RECENT}?"),
        ("plot null", f"{RETURN} is null in all rows of the runs"),
        ("plot good --out picture.docx", "its ending must be one of, .pdf"),
    ],
)
def test_bad_input_is_refused(tmp_path, monkeypatch, line, wanted):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "good", rows([100, 200], [1, 2]), clip_eps=0.2, gamma=0.9)
    make_run(tmp_path / "silent", "")
    make_run(tmp_path / "null", rows([100], [None]))
    make_run(tmp_path / "words", rows([100], [1]), num_seeds="three")
    make_run(tmp_path / "unreadable", "")
    (tmp_path / "unreadable" / "metrics.jsonl").unlink()
    (tmp_path / "unreadable" / "metrics.jsonl").mkdir()
    program, *words = line.split()
    args_class, function = PROGRAMS[program]
    check_words(refusal(function, args_class, words), wanted)


def test_a_comparison_needs_neither_jax_nor_matplotlib(tmp_path):
    process, slow = slow_imports("-m", "common.compare", make_run(tmp_path / "a", rows([100], [1.0])))
    assert "CartPole-v1" in process.stdout
    assert not slow


@pytest.mark.parametrize("program", ["plot", "compare"])
def test_a_run_without_metrics_is_left_out_and_different_lengths_are_said(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "short", rows([100, 200], [1, 2]))
    make_run(tmp_path / "long", rows([100, 2000], [1, 2]), seed=1)
    make_run(tmp_path / "silent", "", seed=2)
    make_run(tmp_path / "tiny", rows([10], [1]), seed=3)
    (tmp_path / "curves.png").touch()
    assert call(program, "short", "long", "silent", "tiny", "curves.png") == 0
    notes = capsys.readouterr().err
    assert "note: silent: no metrics yet, left out" in notes
    assert "note: curves.png: no run directory, left out" in notes
    assert ("10 to 2,000 steps" if program == "compare" else "go on to 2,000") in notes
    assert ("note: tiny: ends before another run begins, left out" in notes) == (program == "plot")
