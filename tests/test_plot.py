"""`pmaprl.plot`, `pmaprl.compare` and what they use of `pmaprl.drawing`: runs and numbers made by
hand.
"""

import csv
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli_helpers import ROOT
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl import compare, plot
from pmaprl.cli.command import exit_code, parse
from pmaprl.cli.errors import UsageError
from pmaprl.cli.files import read_config
from pmaprl.comparison.curves import align
from pmaprl.comparison.groups import group
from pmaprl.comparison.logged_runs import LoggedRun
from pmaprl.comparison.notes import with_notes
from pmaprl.drawing.figures import draw_curve, draw_population, side_by_side
from pmaprl.runs.clock import Clock
from pmaprl.runs.estimates import difference, estimate, interval, mean_over_steps, spread
from pmaprl.runs.metrics import (
    EVALUATION,
    RECENT,
    TRAINING,
    Log,
    LogWriter,
    Series,
    read_log,
    summarized,
)
from pmaprl.runs.reports import is_clearly_better, summary_of_seeds
from pmaprl.runs.results import EvaluationResult, ranked, training_returns


def rows(steps, values, wall=None, metric=TRAINING):
    """Rows of one invocation, 100 steps/s; `wall` defaults to one second per 100 steps."""
    wall = [step / 100 for step in steps] if wall is None else wall
    times = ({"time/wall": seconds, "time/sps_total": 100.0} for seconds in wall)
    names = (TRAINING, RECENT) if metric == TRAINING else (metric,)
    returns = (
        {"env_steps": step} | dict.fromkeys(names, value)
        for step, value in zip(steps, values, strict=True)
    )
    return [row | time for row, time in zip(returns, times, strict=True)]


def make_run(path, logged, algorithm="ppo_pmap", evaluation=None, **flags):
    """A run directory; `logged` are its rows, or the text of its metrics.jsonl. Returns its path as
    a word.
    """
    path.mkdir(parents=True)
    if evaluation is not None:
        last = {"env_steps": logged[-1]["env_steps"], EVALUATION: evaluation}
        logged = [*logged, last]
    text = logged if isinstance(logged, str) else "".join(json.dumps(row) + "\n" for row in logged)
    (path / "metrics.jsonl").write_text(text)
    flags = {"env": "CartPole-v1", "seed": 0, "num_seeds": 1} | flags
    config = json.dumps({"algorithm": algorithm, "args": flags})
    (path / "config.json").write_text(config)
    return str(path)


def test_the_interquartile_mean_is_exact_where_quarters_are_no_whole_numbers():
    examples = {
        4: [9, 1, 2],
        2.5: [100, 1, 2, 3],
        2: [-50, 3, 1, 2, 90],
        4.5: [1, 2, 3, 4, 5, 6, 7, 800],
    }
    for expected, values in examples.items():
        both = np.stack([values, np.add(values, 1.0)], axis=1)
        assert_allclose(estimate(both), [expected, expected + 1])
    returned = np.array([100.0, 1, 2, 3])
    assert estimate(returned, "mean") == 26.5


def test_few_seeds_have_a_range_and_no_interval():
    few = np.array([3.0, 7.0, 4.0])
    assert interval(few) is None
    assert spread(np.array([3.0])) is None
    found = spread(few)
    assert found.low == 3
    assert found.high == 7
    assert "95%" not in found.name


def test_the_interval_is_of_the_estimate():
    same = interval(np.full((4, 2), 5.0))
    fives = np.full((2, 2), 5.0)
    assert_array_equal([same.low, same.high], fives)
    outlier = np.array([5.0] * 11 + [1000.0])  # 4 times among 12 in 1 of 70 resamples only
    assert interval(outlier).high == 5
    assert interval(outlier, kind="mean").high > 5
    tasks = interval(np.zeros(5), np.ones(5), kind="mean")
    assert tasks.low == tasks.high == 0.5, "each task always has five of the ten"


def test_a_difference_is_paired_where_seeds_are_the_same():
    """Every seed gains one, in whatever order; without pairs the seeds' own spread is many times as
    large.
    """
    base = np.array([0.0, 100, 200, 300, 400])
    seeds = [1, 2, 3, 4, 5]
    shuffled = base[::-1] + 1
    paired = difference(shuffled, seeds[::-1], base, seeds)
    assert paired.value == 1
    assert paired.interval.low == 1
    assert paired.interval.high == 1
    assert paired.paired is True
    unlike = [6, 7, 8, 9, 10]
    apart = difference(base + 1, unlike, base, seeds)
    assert apart.value == 1
    assert apart.paired is False
    assert apart.interval.low < -50
    assert apart.interval.high > 50


def test_the_probability_of_improvement_counts_pairs():
    """A tie is half of one."""
    found = difference(
        np.array([1.0, 2, 3, 4]),
        range(4),
        np.array([0.0, 2, 3, 4]),
        range(4, 8),
    )
    pairs = [(x > y) + 0.5 * (x == y) for x in (1, 2, 3, 4) for y in (0, 2, 3, 4)]
    assert found.probability == np.mean(pairs)
    assert found.probability_interval.low < found.probability < found.probability_interval.high


def test_the_area_under_a_curve_is_its_mean_over_steps():
    steps = np.array([0.0, 10, 20, 40])
    curves = np.array([[0.0, 10, 10, 30], [np.nan, 5, 5, 5], [np.nan] * 4])
    # (5 to 10: 7.5 * 5) + 10 * 10 + (10 to 20: 15 * 10), over 25
    areas = mean_over_steps(steps, curves, 5, 30)
    wanted = [(37.5 + 100 + 150) / 25, np.nan, np.nan]
    assert_allclose(areas, wanted)
    means = mean_over_steps(steps, curves, 10, 20)
    assert_allclose(means[:2], [10, 5])


def test_what_to_know_of_runs_that_are_no_repetitions():
    def run(seeds=(0,), **flags):
        log = Log(series={}, names=frozenset(), steps=0, wall_seconds=0.0, trained_seconds=0.0)
        return LoggedRun(
            path="run",
            algorithm="ppo_pmap",
            flags={"env": "CartPole-v1"} | flags,
            seeds=[*seeds],
            log=log,
        )

    def notes(*runs):
        return [note for line in with_notes(group(runs)) for note in line.notes]

    alike = notes(run([0, 1], pbt=False, opponent="random"))
    assert notes(run(), run([1], gif=True)) == alike == []
    (different,) = notes(run(clip_eps=0.1), run([1], clip_eps=0.2))
    assert "--by clip_eps" in different


def test_versions_of_a_file_are_lines_of_their_own(tmp_path):
    """Also where one run was resumed with another version."""
    paths = [
        Path(make_run(tmp_path / name, rows([100, 200], [1.0, 2.0]), seed=seed))
        for seed, name in enumerate("ab")
    ]
    for changes, told in (
        (({"script_sha256": "x"}, {"script_sha256": "x"}), ["ppo_pmap"]),
        (
            ({"script_sha256": "x"}, {"script_sha256": "y"}),
            ["ppo_pmap [file x]", "ppo_pmap [file y]"],
        ),
        (
            ({"script_sha256": "x", "earlier_scripts": ["y"]}, {"script_sha256": "x"}),
            ["ppo_pmap [file x after y]", "ppo_pmap [file x]"],
        ),
    ):
        for path, change in zip(paths, changes, strict=True):
            config = json.loads((path / "config.json").read_text())
            config = {name: config[name] for name in ("algorithm", "args")} | change
            (path / "config.json").write_text(json.dumps(config))
        assert [row["algorithm"] for row in compared(*map(str, paths))] == told


def test_seconds_add_up_over_resumes(tmp_path):
    logged = rows([100, 200, 300], [1, 2, 3], wall=[11.0, 12.0, 14.0])
    make_run(tmp_path / "a", logged)
    args = SimpleNamespace(is_population=False, tensorboard=False, wandb=False)
    writer = LogWriter(tmp_path / "a", args, {}, resume_at=200)
    clock = Clock()
    clock.add_earlier(read_log(tmp_path / "a", ()))
    assert 12 <= clock.wall < 100
    assert clock.trained_before == 2
    writer.close()


def test_charts_have_the_mean_of_seeds_or_the_median_and_best_of_members():
    row = {
        "env_steps": 8,
        "eval/return_mean": [1.0, None, 5.0],
        "loss/value": [2.0, 4.0, 6.0],
        "time/sps": 9.0,
    }
    alone = {"env_steps": 8, "time/sps": 9.0}
    assert summarized(row, False) == alone | {"eval/return_mean": 3, "loss/value": 4}
    members = {"eval/return_mean/median": 3, "eval/return_mean/best": 5, "loss/value/median": 4}
    assert summarized(row, True) == alone | members
    each = {"eval/return_mean/seed_0": 1, "eval/return_mean/seed_2": 5, "loss/value/seed_1": 4}
    assert summarized(row, False, each=True).items() >= each.items()
    nothing = {"eval/return_mean": [None, None]}
    assert summarized(nothing, False, each=True) == {}


def test_late_evaluations_keep_their_time(tmp_path):
    late = {"env_steps": 150, EVALUATION: 9.0, "time/wall": 11.5}
    logged = [*rows([100, 200, 300], [1, 2, 3], wall=[11.0, 12.0, 14.0]), late]
    logged[2]["time/sps_total"] = 50.0
    make_run(tmp_path / "a", logged)
    log = read_log(tmp_path / "a", [TRAINING, EVALUATION])
    assert log.series[TRAINING].wall.tolist() == [11, 12, 14]
    assert log.series[EVALUATION].steps.tolist() == [150]
    assert log.series[EVALUATION].wall.tolist() == [11.5]
    assert log.steps == 300
    assert log.wall_seconds == 14
    assert log.trained_seconds == 6


def test_damaged_lines_are_skipped(tmp_path):
    returned = rows([100, 200], [[1, 2], [3, None]])
    good = [json.dumps(row) for row in returned]
    damage = ["{", "null", "\0\0", '{"env_steps": "x"}']
    lines = "\n".join([good[0], *damage, good[1], good[1][:20]])
    make_run(tmp_path / "a", lines, num_seeds=2)
    series = read_log(tmp_path / "a", [TRAINING]).series[TRAINING]
    assert series.steps.tolist() == [100, 200]
    assert_array_equal(series.values, [[1, 2], [3, np.nan]])


def test_seeds_are_interpolated_within_what_they_have():
    def series(steps, *seeds):
        return Series(np.array(steps, float), np.array(steps, float) / 10, np.array(seeds, float).T)

    nan = np.nan
    growing = series([0, 10, 20, 20, 40], [0, nan, 5, 20, 40], [nan] * 5)
    reversed_steps = series([30, 15, 5], [350, 200, 100])
    logged = [
        growing,
        reversed_steps,
    ]
    places, values = align(logged)
    assert places.tolist() == [0, 5, 10, 15, 20, 30, 40]
    wanted = [
        [0, 5, 10, 15, 20, 30, 40],
        [nan] * 7,
        [nan, 100, 150, 200, 250, 350, nan],
    ]
    assert_array_equal(
        values,
        wanted,
        "of equal places the last counts, and late ones are put in order",
    )
    places, values = align(logged, "wall", hold=True)
    assert places[-1] == 4
    assert values[2, -1] == 350


def test_an_environment_has_a_panel_and_an_algorithm_a_line_where_all_its_seeds_are(tmp_path):
    two = make_run(tmp_path / "b", rows([100, 200], [[0, 2], [4, 6]]), num_seeds=2)
    third = make_run(tmp_path / "c", rows([100, 150, 200], [9, 1, 11]), seed=2)
    runs = [
        two,
        third,
        make_run(tmp_path / "d", rows([100, 200], [5, 6]), algorithm="sac_pmap", env="Acrobot-v1"),
    ]
    drawn_axes = plot.learning_curves(plot.Args(runs=tuple(runs))).axes
    panels = [axes for axes in drawn_axes if axes.axison]
    (sac,), (ppo,) = (
        [(x.get_xdata().tolist(), x.get_ydata().tolist()) for x in axes.lines] for axes in panels
    )
    means = pytest.approx([11 / 3, 7 / 3, 7])
    assert ppo == ([100, 150, 200], means)  # seeds 0 2 9, 2 4 1, 4 6 11
    assert sac == ([100, 200], [5, 6])
    assert [len(axes.collections) for axes in panels] == [0, 1], "one seed has no band"


@pytest.mark.parametrize("program", ["plot", "compare"])
def test_the_commands_write_files_and_leave_out_what_cannot_be_shown(
    program, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "short", rows([100, 200], [1, 2]))
    make_run(tmp_path / "long", rows([100, 2000], [1, 2]), seed=1)
    make_run(tmp_path / "silent", "", seed=2)
    make_run(tmp_path / "null", rows([100], [None]), seed=3)
    (tmp_path / "some.png").touch()

    def call(*words):
        parts = {"plot": (plot.Args, plot.plot), "compare": (compare.Args, compare.run_command)}
        args_class, function = parts[program]
        return exit_code(function, parse(args_class, [*words]))

    runs = "short", "long", "silent", "null", "some.png"
    to_table = ["--csv", "table.csv"] if program == "compare" else []
    assert call(*runs, *to_table) == 0
    notes = capsys.readouterr().err
    assert all(f"note: {name}" in notes for name in ("silent", "some.png"))
    if program == "plot":
        assert call("null") == 2, "nothing to draw"
        assert "the line ends at 200 with the shortest run, not at 2,000" in notes
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    else:
        table = (tmp_path / "table.csv").read_text()
        (row,) = csv.DictReader(table.splitlines())
        assert row["env"] == "CartPole-v1"
        assert row["seeds"] == "3"
        assert row["steps_max"] == "2000"
        assert row["return_max"] == "2.0"


def test_a_run_without_wall_times_is_left_out_of_a_plot_over_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "timeless", rows([100, 200], [1, 2], wall=[None, None]))
    # The wall time of a row without the metric is none of its curve
    apart = [{"env_steps": 100, "time/wall": 1.0}, {"env_steps": 200, TRAINING: 2.0}]
    make_run(tmp_path / "apart", apart, seed=1)
    make_run(tmp_path / "timed", rows([100, 200], [1, 2]), seed=2)

    def call(*runs):
        return exit_code(plot.plot, parse(plot.Args, [*runs, "--x", "wall"]))

    assert call("timeless") == 2
    assert call("timeless", "apart") == 2
    assert not Path("curves.png").exists()
    assert call("timeless", "apart", "timed") == 0
    notes = capsys.readouterr().err.splitlines()
    assert {f"note: {name}" for name in ("timeless", "apart")} <= {
        line.partition(": no time/wall")[0] for line in notes
    }


def test_cells_that_a_spreadsheet_would_compute_are_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["-2+3+cmd|' /C calc'!A0", "=1+1", "\t=1+1", "-0.5", "text"]
    runs = [
        make_run(tmp_path / f"{index}", rows([100], [-7.0]), seed=index, flag=flag)
        for index, flag in enumerate(flags)
    ]
    make_run(tmp_path / "\r=1", rows([100], [-7.0]), seed=9, flag="of a path")
    runs.append("\r=1")
    words = [*runs, "--by", "flag", "--csv", "table.csv"]
    assert exit_code(compare.run_command, parse(compare.Args, words)) == 0
    with (tmp_path / "table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    found = {row["flag"] for row in table}
    assert {"'" + flags[0], "'" + flags[1], "-0.5", "text"} <= found
    assert {row["return"] for row in table} == {"-7.0"}
    assert not [x for row in table for x in row.values() if x.lstrip().startswith("=")]


@pytest.mark.parametrize("evolved", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_run_and_a_population_have_a_picture_although_nobody_earned_anything(tmp_path, evolved):
    more = {
        "pbt/source": [0, 1, 1],
        "hyper/gamma": [0.9, 0.8, 0.7],
        "hyper/rate": [1e-4, 1e-3, 1e-2],
    }
    logged = [row | (more if evolved else {}) for row in rows([100], [[None] * 3])]
    make_run(tmp_path / "run", logged, num_seeds=3)
    searched = {"gamma": [0.9, 0.8, 0.7], "rate": [1e-4, 1e-3, 1e-2]}
    drawn = draw_population(
        tmp_path / "run",
        "title",
        searched,
    )
    for path in (drawn, draw_curve(tmp_path / "run", "title")):
        assert path.read_bytes().startswith(b"\x89PNG")


def compared(*runs, **flags):
    table = compare.compare(compare.Args(runs=runs, **flags))
    return [row for _, row in table.iterrows()]


def test_a_row_holds_what_the_runs_hold(tmp_path):
    two = rows([100, 200], [[0, 50], [80, 90]])
    third = rows([100, 200, 300], [10, 95, 100])
    runs = [
        make_run(
            tmp_path / "a",
            two,
            num_seeds=2,
            evaluation=[70, 80],
        ),
        make_run(tmp_path / "b", third, seed=2, evaluation=[99]),
    ]
    (row,) = compared(*runs)
    wanted = {
        "env": "CartPole-v1",
        "algorithm": "ppo_pmap",
        "seeds": 3,
        "steps": 200,
        "steps_max": 300,
    }
    wanted |= {
        "estimate": "mean",
        "return": 83,
        "training_seeds": 0,
        "steps_per_second": 100,
        "wall_seconds": 2.5,
    }
    wanted |= {"threshold": 90, "reached": 2}  # seeds after never, 200 steps and 200 steps
    wanted |= {
        "steps_to_threshold": 200,
        "seconds_to_threshold": 2,
        "return_min": 70,
        "return_max": 99,
    }
    area = pytest.approx((40 + 70 + 52.5) / 3)
    wanted |= {"auc": area, "auc_from": 100, "auc_to": 200}
    assert {name: row[name] for name in wanted} == wanted
    bounds = [row["return_low"], row["return_high"]]
    assert np.isnan(bounds).all(), "three seeds have no interval"
    (row,) = compared(*runs, threshold=97.0)
    assert row["threshold"] == 97
    assert row["reached"] == 1
    assert np.isnan(row["seconds_to_threshold"]), "most never reach it"


def test_without_an_evaluation_the_training_return_counts(tmp_path):
    two = rows([100, 200, 300], [[1, 2], [3, 4], [None, 5]])
    others = rows([100], [[6.0, 7.0]])
    runs = [
        make_run(tmp_path / "a", two, num_seeds=2),
        make_run(
            tmp_path / "b",
            others,
            seed=2,
            num_seeds=2,
            evaluation=[9.0, None],
        ),
    ]
    (row,) = compared(*runs)
    mean = pytest.approx((3 + 5 + 9) / 3)
    assert row["return"] == mean
    assert row["training_seeds"] == 2


def test_rows_are_split_by_flags_in_the_order_of_numbers(tmp_path):
    """A flag that an algorithm does not have is left out of its label."""
    sizes = [{"num_envs": n, "hidden_sizes": [n, 2]} for n in (128, 16, 128)]
    flags = sizes + [{"algorithm": "sac", "recipe": "xqc"}]
    runs = [
        make_run(tmp_path / str(i), rows([100], [i]), seed=i, **some)
        for i, some in enumerate(flags)
    ]
    by = {"by": ("num_envs", "hidden_sizes")}
    found = [
        tuple(row[["algorithm", *by["by"], "seeds", "return"]]) for row in compared(*runs, **by)
    ]
    assert found == [
        ("ppo_pmap", "16", "16,2", 1, 1),
        ("ppo_pmap", "128", "128,2", 2, 1),
        ("sac (xqc)", "", "", 1, 3),
    ]
    args = parse(plot.Args, ["--by", "num-envs", *runs, "--by", "hidden_sizes"])
    assert (args.runs, args.by) == (tuple(runs), by["by"]), "as they are written"
    legend = plot.learning_curves(args).axes[0].get_legend()
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[1:] == [
        "ppo_pmap, num_envs 128, hidden_sizes 128,2 (2 seeds, mean)",
        "sac (xqc) (1 seed)",
    ]


def test_equal_runs_count_once(tmp_path, capsys):
    """Equal in flags, seeds and the checksum of the end; another directory, log interval or picture
    does not matter.
    """
    others = {"a": {"log_interval": 1}, "copy": {"gif": True}, "other": {}}
    runs = [
        make_run(tmp_path / name, rows([100], [[1, 2]]), num_seeds=2, evaluation=[1, 2], **flags)
        for name, flags in others.items()
    ]
    for run, checksum in zip(runs, ("one", "one", "two"), strict=True):
        Path(run, "result.json").write_text(json.dumps({"state_sha256": checksum}))
    (row,) = compared(*runs[:2])
    assert row["seeds"] == 2
    (note,) = capsys.readouterr().err.splitlines()
    assert "copy" in note
    assert "equal" in note
    with Path(runs[1], "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"env_steps": 200, TRAINING: [3, 4]}) + "\n")
    (row,) = compared(*runs[:2])
    assert row["seeds"] == 4, "with other metrics it is no copy"
    capsys.readouterr()
    (row,) = compared(*runs[::2])
    assert row["seeds"] == 4, "the same seeds with another result, on another machine perhaps"
    assert any("seeds 0, 1 count more than once" in note for note in row["notes"])


def test_a_baseline_is_compared_with_by_seeds(tmp_path):
    flags = {"gamma": {"seed": 3, "gamma": 0.9}, "default": {"seed": 3, "gamma": 0.99}}
    returns = {"gamma": [11, 21, 31, 41], "default": [10, 20, 30, 40]}
    runs = [
        make_run(
            tmp_path / name,
            rows([100], [[0] * 4]),
            num_seeds=4,
            evaluation=returns[name],
            **flags[name],
        )
        for name in flags
    ]
    other, baseline = compared(*runs, by=("gamma",), baseline=runs[1:])
    found = [
        other[name]
        for name in ("difference", "difference_low", "difference_high", "paired", "better")
    ]
    assert found == [1, 1, 1, True, 10 / 16]
    assert np.isnan(baseline["difference"])
    with pytest.raises(UsageError, match="baseline"):
        compared(runs[0], baseline=runs[1:])


def of_lines(row):
    """The notes of a row on what differs."""
    return [note for note in row["notes"] if "AUC" not in note]


def test_flags_that_differ_between_lines_are_named(tmp_path):
    """Also those of two algorithms that both have; not those of --by, and none that decides
    nothing.
    """
    flags = {"gamma": 0.9, "num_envs": 16, "seed": 1}
    unlike = flags | {"gamma": 0.99, "gif": True, "num_envs": 32}
    runs = [
        make_run(tmp_path / "a", rows([100], [1]), **flags),
        make_run(
            tmp_path / "b",
            rows([100], [1]),
            **unlike,
        ),
        make_run(tmp_path / "c", rows([100], [1]), algorithm="my_ppo", **flags | {"clip_eps": 0.1}),
    ]
    fork = make_run(tmp_path / "d", rows([100], [1]), algorithm="my_ppo", **flags)
    assert [of_lines(row) for row in compared(*runs[:1], fork)] == [[], []]
    ((note,), *_) = map(of_lines, compared(*runs, by=("gamma",)))
    assert "num_envs 16 (my_ppo; ppo_pmap, gamma 0.9) or 32 (ppo_pmap, gamma 0.99)" in note
    assert "gif" not in note


def test_a_note_on_many_groups_is_told_once(tmp_path):
    runs = [
        make_run(tmp_path / f"{gamma} {lr}", rows([100], [1]), gamma=gamma, learning_rate=lr)
        for gamma in (0.9, 0.95, 0.99)
        for lr in (0.1, 0.2)
    ]
    table = compare.compare(compare.Args(runs=tuple(runs), by=("gamma",)))
    notes = [note for note in compare.numbered_notes(table) if "--by learning_rate" in note]
    assert len(notes) == 1


def make_grid(folder):
    """Runs over two flags."""
    return [
        make_run(
            folder / f"{gamma} {lr}",
            rows([100, 200], [1, 100 * gamma + lr]),
            gamma=gamma,
            learning_rate=lr,
        )
        for gamma in (0.99, 0.9, 0.95)
        for lr in (0.1, 0.2)
    ]


def test_two_factors_have_a_short_legend(tmp_path):
    args = parse(
        plot.Args,
        [*make_grid(tmp_path), "--by", "gamma,learning_rate", "--logx", "--ylim", "-1", "50"],
    )
    (axes,) = plot.learning_curves(args).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        "gamma 0.9",
        "gamma 0.95",
        "gamma 0.99",
        "learning_rate 0.1",
        "learning_rate 0.2",
    ]
    drawn = {
        (line.get_color(), line.get_linestyle()) for line in axes.lines if len(line.get_xdata())
    }
    assert len(drawn) == 6
    assert axes.get_xscale() == "log"
    assert axes.get_ylim() == (-1, 50)


def test_two_factors_have_a_heat_map(tmp_path):
    args = parse(
        plot.Args,
        [*make_grid(tmp_path), "--by", "gamma,learning_rate", "--kind", "heatmap"],
    )
    axes = plot.learning_curves(args).axes[0]
    wanted = [[90.1, 95.1, 99.1], [90.2, 95.2, 99.2]]
    assert_allclose(axes.images[0].get_array(), wanted)
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ["0.9", "0.95", "0.99"]
    with pytest.raises(SystemExit):
        parse(plot.Args, ["runs", "--by", "gamma", "--kind", "heatmap"])


def test_a_reader_that_leaves_ends_no_command_with_a_traceback(tmp_path):
    run = make_run(tmp_path / "a", rows([100], [1]))
    command = f"{shlex.quote(sys.executable)} -m pmaprl.compare {shlex.quote(run)} | true"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


def test_equal_members_are_ranked_by_what_they_earned_while_training():
    """First by the last training return, then by who came earlier near the best that any
    member had.
    """
    steps = np.array([100.0, 200, 300])
    values = np.array([[0.0, 0, 0, 99], [0, 100, 0, 99], [130, 500, 500, 500]])
    training = Series(
        steps,
        steps,
        values,
    )
    assert ranked([500, 500, 500, 9], training) == [1, 2, 0, 3]
    values = np.array([[0.0, 0], [100, 500], [500, 500]])
    early = Series(steps, steps, values)
    assert ranked([500, 500], early) == [1, 0]
    assert ranked([1, math.nan, 2]) == [2, 0, 1]
    assert ranked([7, 7], None) == [0, 1]
    silent = Series(steps, steps, np.array([[1.0, 5], [2, 6], [3, np.nan]]))
    assert ranked([7, 7], silent) == [1, 0], "no episode has ended since"


def test_members_are_ranked_by_the_curves_that_are_drawn(tmp_path):
    """Not by the mean of 100 episodes, in which the second one's fall is not yet seen."""
    logged = [
        {"env_steps": 100, TRAINING: [300, 500], RECENT: [300, 500]},
        {"env_steps": 200, TRAINING: [490, 40], RECENT: [400, 450], EVALUATION: [500, 500]},
    ]
    path = Path(make_run(tmp_path / "run", logged, num_seeds=2))
    assert ranked([500, 500], training_returns(path, 200)) == [0, 1]


@pytest.mark.parametrize(
    ("best", "newest", "episodes", "is_population", "is_better"),
    [
        (([-81.0], [12.0]), ([-83.0], [12.0]), 128, False, False),
        (([-81.0], [12.0]), ([-90.0], [12.0]), 128, False, True),
        (([-81.0], [12.0]), ([-90.0], [12.0]), 4, False, False),
        (([-110.0], [9.0]), ([-200.0], [0.0]), 4, False, True),
        (([10.0, 20.0], [9.0, 0.0]), ([12.0, 16.0], [9.0, 9.0]), 9, False, False),
        (([10.0, 30.0], [99.0, 0.0]), ([12.0, 16.0], [9.0, 9.0]), 9, True, True),
        (([5.0], [1.0]), ([], []), 9, False, False),
    ],
)
def test_an_earlier_state_is_better_beyond_the_noise_of_episodes_only(
    best, newest, episodes, is_population, is_better
):
    names = EVALUATION, "eval/return_std"
    before = EvaluationResult(100, dict(zip(names, best, strict=True)))
    after = EvaluationResult(200, dict(zip(names, newest, strict=True)))
    assert is_clearly_better(before, after, episodes, is_population) == is_better
    assert not is_clearly_better(before._replace(step=200), after, episodes, is_population)


def test_many_seeds_are_toldsummary_of_seeds():
    returns = np.arange(30.0)
    returns[[3, 7]] = np.nan
    text = summary_of_seeds(returns, first_seed=100)
    assert "IQM 15.5 [" in text
    assert "over 28 seeds" in text
    assert "best 29.0 (seed 129), worst 0.0 (seed 100), 2 of 30 seeds broke" in text
    assert "interval" not in summary_of_seeds(np.array([1.0, 2, 3]), 0)


def test_a_baseline_is_one_line_also_where_its_run_is_a_copy(tmp_path):
    gammas = (("a", 0.9), ("copy", 0.9), ("b", 0.99))
    runs = [
        make_run(
            tmp_path / name,
            rows([100], [[1, 2]]),
            num_seeds=2,
            evaluation=[1, 2],
            gamma=gamma,
        )
        for name, gamma in gammas
    ]
    for run, checksum in zip(runs, ("one", "one", "two"), strict=True):
        Path(run, "result.json").write_text(json.dumps({"state_sha256": checksum}))
    same, other = compared(*runs, by=("gamma",), baseline=(runs[1],))
    assert np.isnan(same["difference"])
    assert other["difference"] == 0
    members = [{"seed": 0, "gamma": 0.9}, {"seed": 0, "gamma": 0.99}]
    sweep = make_run(tmp_path / "sweep", rows([100], [[1, 2]]))
    config = json.loads(Path(sweep, "config.json").read_text())
    text = json.dumps(config | {"members": members})
    Path(sweep, "config.json").write_text(text)
    with pytest.raises(UsageError, match="no other line"):
        compared(sweep, by=("gamma",), baseline=(sweep,))


def test_values_that_look_alike_once_shortened_are_told_apart(tmp_path):
    long = [json.dumps({"parameter": "x" * 60 + end}) for end in "ab"]
    runs = [
        make_run(
            tmp_path / f"{index} {gamma}",
            rows([100], [index]),
            env_params=params,
            gamma=gamma,
        )
        for index, params in enumerate(long)
        for gamma in (0.9, 0.99)
    ]
    args = plot.Args(
        runs=tuple(runs),
        by=("env_params", "gamma"),
        kind="heatmap",
    )
    image = plot.learning_curves(args).axes[0].images[0]
    assert_allclose(image.get_array(), [[0, 1], [0, 1]])
    figure = plot.learning_curves(plot.Args(runs=tuple(runs), by=("env_params",)))
    colors = {line.get_color() for line in figure.axes[0].lines}
    assert len(colors) == 2


def test_runs_of_a_baseline_count_as_one_group(tmp_path):
    """Two lines with seeds of their own, beside a third one and another environment; by paths,
    label and algorithm.
    """
    kinds = [("ppo", 0.9, [1]), ("ppo", 0.99, [3]), ("sac", 0.9, [7])]
    runs = [
        make_run(
            tmp_path / f"{algorithm} {gamma}",
            rows([100], [0]),
            algorithm,
            returned,
            gamma=gamma,
            seed=seed,
        )
        for seed, (algorithm, gamma, returned) in enumerate(kinds)
    ]
    elsewhere = make_run(
        tmp_path / "elsewhere",
        rows([100], [0]),
        evaluation=[9],
        env="Acrobot-v1",
        gamma=0.9,
    )
    by = {"by": ("gamma",)}
    both = runs[0], runs[1]
    for baseline, expected in {
        both: [5, None, None],
        ("ppo",): [5, None, None],
        ("ppo, gamma 0.9",): [6, 2, None],
    }.items():
        found = compared(*runs, elsewhere, baseline=baseline, **by)
        told = {
            (row["algorithm"], row["gamma"]): row["difference"]
            for row in found
            if row["env"] == "CartPole-v1"
        }
        labels = [("sac", "0.9"), ("ppo", "0.99"), ("ppo", "0.9")]
        wanted = dict(zip(labels, expected, strict=True))
        assert {key: None if math.isnan(value) else value for key, value in told.items()} == wanted
    assert parse(compare.Args, [*runs, "--baseline", *both]).baseline == both


def test_points_that_would_hide_each_other_are_side_by_side():
    """By height, each where it is on average, and away from the points of other places."""
    x = np.array([1.0, 1, 1, 1, 2, 2])
    y = np.array([500.0, 499, 100, 500, 300, 200])
    moved = side_by_side(x, y)
    assert moved[2] == 1
    assert moved[4:].tolist() == [2, 2]
    assert moved[1] < moved[0] < moved[3] < 1.3
    apart = moved[[0, 1, 3]]
    assert apart.mean() == pytest.approx(1)
    rates = np.array([1e-4, 1e-4, 1e-2])
    decades = side_by_side(rates, np.zeros(3), is_log=True)
    assert decades[0] < 1e-4 < decades[1]
    assert decades[0] * decades[1] == pytest.approx(1e-8)
    ones = side_by_side(np.ones(3), np.zeros(3))
    assert len(set(ones)) == 3


@pytest.mark.parametrize("words", [[], ["--logx"]])
def test_single_points_of_lines_are_side_by_side_in_the_order_of_the_legend(words, tmp_path):
    runs = [
        make_run(tmp_path / str(gamma), rows([100], [7]), gamma=gamma, seed=1)
        for gamma in (0.9, 0.99)
    ]
    args = parse(plot.Args, [*runs, "--by", "gamma", *words])
    (axes,) = plot.learning_curves(args).axes
    first, second = (line.get_xdata()[0] for line in axes.lines)
    assert first < 100 < second
    assert "side by side" in axes.get_xlabel()
    assert list(axes.get_xticks()) == [100]
    curve = make_run(tmp_path / "curve", rows([100, 300], [1, 2]), gamma=0.5)
    axes = plot.learning_curves(parse(plot.Args, [*runs, curve, "--by", "gamma", *words])).axes[0]
    places = sorted(line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1)
    assert 90 < places[0] < 100 < places[1] < 110
    assert len(axes.get_xticks()) > 1


def test_a_line_that_begins_late_is_told(tmp_path, capsys):
    """It is where all runs of a group have numbers."""
    logged = rows([100, 900, 1000], [1, 2, 3])
    early = make_run(tmp_path / "early", logged)
    late = make_run(tmp_path / "late", rows([900, 1000], [1, 2]), seed=1)
    plot.learning_curves(plot.Args(runs=(early, late)))
    assert "begins at 900" in capsys.readouterr().err
    plot.learning_curves(plot.Args(runs=(early,)))
    assert "begins" not in capsys.readouterr().err


def test_a_flag_that_only_a_fork_has_is_named_and_not_those_of_another_algorithm(tmp_path):
    flags = {"gamma": 0.9, "seed": 1}
    original = make_run(tmp_path / "original", rows([100], [1]), **flags)
    fork = make_run(
        tmp_path / "fork",
        rows([100], [1]),
        algorithm="my_ppo",
        **flags,
        bonus=0.2,
    )
    ((note,), _) = map(of_lines, compared(original, fork))
    assert "bonus 0.2 (my_ppo only)" in note
    others = dict.fromkeys(("tau", "buffer_size", "batch_size", "alpha"), 1)
    other = make_run(tmp_path / "other", rows([100], [1]), algorithm="sac", **flags, **others)
    assert [of_lines(row) for row in compared(original, other)] == [[], []]


def test_runs_of_different_tasks_are_lines_of_their_own(tmp_path):
    """However the same parameters are written; a heat map has a grid for each task."""
    params = ['{"length": 2, "g": 1}', '{"g":1,"length":2}', "", "{}"]
    runs = []
    for seed, text in enumerate(params):
        logged = rows([100], [seed])
        run = make_run(
            tmp_path / str(seed),
            logged,
            seed=seed,
            gamma=0.9,
            env_params=text,
        )
        runs.append(run)
    old = make_run(tmp_path / "old", rows([100], [4]), seed=4, gamma=0.9)
    runs.append(old)
    found = compared(*runs)
    assert [row["seeds"] for row in found] == [3, 2]
    assert [row["env_params"] for row in found] == ["default", '{"g": 1, "length": 2}']
    assert any("env_params" in note for note in found[0]["notes"])
    (whole,) = compared(*runs[2:])
    assert "env_params" not in whole
    args = plot.Args(runs=tuple(runs), by=("gamma", "seed"), kind="heatmap")
    images = [axes.images for axes in plot.learning_curves(args).axes if axes.images]
    assert len(images) == 2


def test_what_qualifies_a_line_is_told_wherever_the_line_is(tmp_path, capsys):
    """In the table, its file and the picture: flags that are put together, and seeds that count
    twice.
    """
    runs = []
    for coef in (0.1, 1.0):
        for seed in (0, 1):
            name = f"{seed} {coef}"
            logged = rows([100, 200], [1, 2])
            run = make_run(tmp_path / name, logged, seed=seed, kl_coef=coef)
            runs.append(run)
    table = tmp_path / "table.csv"
    args = parse(compare.Args, [*runs, "--csv", str(table)])
    assert exit_code(compare.run_command, args) == 0
    figure = plot.learning_curves(plot.Args(runs=tuple(runs)))
    told = capsys.readouterr()
    foot = figure.get_supxlabel().replace("\n", " ")
    for text in (told.out, told.err, table.read_text(), foot):
        assert "kl_coef (0.1 or 1.0)" in text
        assert "seeds 0, 1 count more than once" in text


def test_both_values_of_a_flag_that_only_a_fork_has_are_named(tmp_path):
    original = make_run(tmp_path / "a", rows([100], [1]))
    forks = [
        make_run(tmp_path / str(seed), rows([100], [1]), "my_ppo", seed=seed, bonus=bonus)
        for seed, bonus in enumerate((0.1, 1.0))
    ]
    row, _ = compared(original, *forks)
    assert "bonus 0.1 and 1.0 (my_ppo only)" in " ".join(row["notes"])


def test_the_area_under_few_evaluations_is_that_of_training(tmp_path):
    steps = [100, 200, 300, 400, 500]
    training = rows(steps, [1, 2, 3, 4, 5])
    for count, metric, area in ((5, EVALUATION, 7), (4, TRAINING, 3)):
        logged = [*training]
        for place in range(count):
            logged[place] = training[place] | {EVALUATION: 7.0}
        run = make_run(tmp_path / str(count), logged)
        (row,) = compared(run)
        assert row["auc_of"] == metric
        assert row["auc"] == area
        assert row["auc_points"] == 5
        assert row["notes"] == []
    (row,) = compared(make_run(tmp_path / "few", training[:2]))
    assert row["auc_points"] == 2
    assert any("AUC" in note for note in row["notes"])
    # Training may have no returns at all
    unknown = [row | {TRAINING: None, EVALUATION: 7.0} for row in training[:4]]
    (row,) = compared(make_run(tmp_path / "unknown", unknown))
    assert row["auc_of"] == EVALUATION
    assert row["auc"] == 7


def test_earlier_runs_of_appo_keep_their_epochs(tmp_path):
    run = make_run(tmp_path / "run", rows([100], [1]), algorithm="appo_pmap", num_epochs=10)
    args = read_config(run)["args"]
    assert args["update_epochs"] == 10
    assert "num_epochs" not in args


@pytest.mark.parametrize(("first_seed", "is_paired"), [(0, True), (3, False)])
def test_the_legend_of_a_baseline_says_pairs_where_there_are_some(tmp_path, first_seed, is_paired):
    for name, seed in (("a", 0), ("b", first_seed)):
        make_run(
            tmp_path / name,
            rows([100], [[0] * 4]),
            name,
            evaluation=[1, 2, 3, 4],
            num_seeds=4,
            seed=seed,
        )
    runs = str(tmp_path / "a"), str(tmp_path / "b")
    table = compare.compare(compare.Args(runs=runs, baseline=("a",)))
    assert ("by pairs" in compare.legend(table)) == is_paired


def test_seeds_of_one_run_are_split_truly(tmp_path):
    run = make_run(tmp_path / "a", rows([100], [[7, 8]]), evaluation=[1, 2], num_seeds=2, seed=3)
    first, second = compared(run, by=("seed",))
    assert first["seed"] == "3"
    assert second["seed"] == "4"
    assert first["seeds"] == 1
    assert first["return"] == 1
    assert second["return"] == 2


def test_flags_that_evolve_are_not_called_by_their_first_value(tmp_path):
    run = Path(make_run(tmp_path / "a", rows([100], [[7, 8]]), gamma=0.9, pbt=True))
    config = json.loads((run / "config.json").read_text())
    config["members"] = [{"seed": 0, "gamma": 0.9}, {"seed": 1, "gamma": 0.8}]
    (run / "config.json").write_text(json.dumps(config))
    (row,) = compared(str(run), by=("gamma",))
    assert row["gamma"] == "evolved"


def test_flags_changed_at_a_resume_are_not_told_as_those_of_the_whole_run(tmp_path):
    run = Path(make_run(tmp_path / "a", rows([100, 200], [1, 2]), gamma=0.99, gif=True))
    config = json.loads((run / "config.json").read_text())
    config["earlier_flags"] = {"gamma": [[0.9, 120]], "gif": [[False, 120]]}
    (run / "config.json").write_text(json.dumps(config))
    other = make_run(tmp_path / "b", rows([100, 200], [1, 2]), gamma=0.99, seed=1)
    (row,) = compared(str(run), other)
    assert any("gamma was 0.9 until step 120, then 0.99" in note for note in row["notes"])
    assert "gif" not in " ".join(row["notes"])
    assert len(compared(str(run), other, by=("gamma",))) == 2


def test_members_that_are_evaluated_elsewhere_than_they_train_are_noted(tmp_path):
    run = Path(make_run(tmp_path / "a", rows([100], [[7, 8]])))
    config = json.loads((run / "config.json").read_text())
    config["members"] = [{"seed": 0, "env.far": 1.0}, {"seed": 0, "env.far": 2.0}]
    (run / "config.json").write_text(json.dumps(config))
    found = compared(str(run))
    assert [row["env.far"] for row in found] == ["1.0", "2.0"]
    assert all("env.far" in row["notes"][0] for row in found)


@pytest.mark.parametrize("kind", ["curves", "heatmap"])
def test_labels_are_no_longer_than_their_axes(tmp_path, kind):
    runs = make_grid(tmp_path)
    figure = plot.learning_curves(
        plot.Args(runs=tuple(runs), by=("gamma", "learning_rate"), kind=kind)
    )
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.yaxis.label.get_window_extent().height <= axes.get_window_extent().height
