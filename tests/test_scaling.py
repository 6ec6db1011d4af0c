"""Benchmarks of many devices: what an update is, the projection that docs/scaling.md shows, collectives, layouts."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from cli_helpers import ROOT, refusal

from benchmarks import collectives, layouts, projection, scaling, sharding_picture
from benchmarks.work import Exchange, work_of
from common.cli.errors import TrainingError
from common.device.programs import Algorithm, TrainState
from common.device.sharding import AXIS

ASSUMED = projection.Assumptions()


def test_the_tables_of_the_docs_are_what_the_projection_prints():
    page = (ROOT / "docs" / "scaling.md").read_text()
    for table in projection.tables(ASSUMED):
        assert table in page, f"python -m benchmarks.projection prints for docs/scaling.md:\n\n{table}"


def test_gradients_are_reduced_at_every_gradient_step_in_as_few_arrays_as_there_are_losses():
    """And each has 4 bytes for every parameter that it is of, and a few metrics."""
    for case in projection.CASES[:2]:
        (one,) = projection.gradients(case)
        assert one.times == case.gradient_steps == 16
        assert 0 < one.size - 4 * projection.work(case).parameters < 64
    sac = projection.CASES[2]
    critics, actor = projection.gradients(sac)
    assert {critics.times, actor.times} == {sac.gradient_steps}
    assert 0 <= 2 * critics.size + actor.size - 4 * projection.work(sac).parameters < 256  # the targets have none


class Weights(NamedTuple):
    params: jax.Array


def toy(seed: jax.Array) -> TrainState:
    return TrainState(Weights(jnp.ones((8, 3))), jnp.ones((4, 8)) * jax.lax.axis_index(AXIS))


def step_of_toy(state: TrainState):
    """Per device: 3 products, in a loop of unknown length 1, in one branch of two another; a convolution."""
    weights, x = state.learner.params, state.shard
    product = 0.0 * jnp.sum(x @ weights)
    start = jax.lax.scan(lambda total, _: (total + jnp.sum(x @ weights), None), product, length=2)[0]
    start = jax.lax.fori_loop(0, jnp.int32(start) * 0, lambda _, total: total + jnp.sum(x @ weights), start)
    branches = (lambda total, rows=rows: total + jnp.sum(x[:rows] @ weights) for rows in (4, 2))
    start = jax.lax.cond(start > 0, *branches, start)
    image, kernel = jnp.ones((1, 5, 5, 2)) * start, jnp.ones((3, 3, 2, 7))
    start += jnp.sum(jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=IMAGES))
    jax.lax.all_gather(x, AXIS)
    total = jax.lax.scan(lambda carry, _: (carry, jax.lax.psum(jnp.stack([start, start]), AXIS)), 0, length=5)[1]
    return state, jnp.sum(total), jnp.sum(total)


IMAGES = ("NHWC", "HWIO", "NHWC")


def test_products_and_exchanges_count_as_often_as_they_happen():
    algorithm = Algorithm(toy, step_of_toy, new_learner=None, act=None)
    product, convolution = 2 * 4 * 8 * 3, 2 * (3 * 3 * 7) * (3 * 3 * 2)
    for turns in (1, 10):
        work = work_of(algorithm, num_devices=2, turns=turns)
        assert work.parameters == 24
        assert work.flops == (4 + turns) * product + convolution
        assert sorted(work.exchanges) == [Exchange("all-gather", 4 * 4 * 8, 1), Exchange("all-reduce", 8, 5)]


def test_an_all_reduce_takes_the_faster_way():
    link = projection.Link(seconds=1.0, bytes_per_second=100.0)

    def seconds(kind: str, size: int, devices: int) -> float:
        return projection.exchange_seconds(Exchange(kind, size, 3), devices, link, begin=0.5) / 3

    assert seconds("all-reduce", 800, 2) == 0.5 + 2 + 8, "2 hops, and half of the bytes twice"
    assert seconds("all-reduce", 80_000, 8) == 0.5 + 14 + 1400, "around a ring"
    assert seconds("all-reduce", 100, 8) == 0.5 + 6 + 2, "up and down a tree of 3 levels"
    assert seconds("all-gather", 100, 8) == 0.5 + 7 + 7


def test_faster_links_and_fewer_devices_are_more_efficient():
    for case in projection.CASES:
        found = [
            [projection.efficiency(case, devices, link, ASSUMED)[1] for devices in projection.DEVICES]
            for link in projection.LINKS.values()
        ]
        assert all(row == sorted(row, reverse=True) for row in found)
        assert all(list(row) == sorted(row, reverse=True) for row in zip(*found, strict=True))
    (episodes,) = (one for one in projection.work(projection.CASES[0]).exchanges if one.kind == "all-gather")
    assert episodes.size < 2_000, "as the docs say, of however many environments"
    own = projection.Assumptions(latency_us=7, gigabytes_per_second=3)
    assert "| yours | 7 us | 3 GB/s |" in projection.link_table(own)


def test_collectives_are_measured_and_fitted():
    latency, slope, error = collectives.fit([10, 1000, 10**6], [3e-4 + 2e-9 * size for size in (10, 1000, 10**6)])
    assert (latency, slope) == pytest.approx((3e-4, 2e-9))
    assert error < 1e-6 < collectives.fit([10, 1000, 10**6], [1e-3, 2e-3, 4e-3])[2]
    assert collectives.sizes_of(64) == [1024 * 4**i for i in range(9)]
    record = collectives.measure(collectives.Sizes(num_devices=2, largest=1, seconds=0.01), num_processes=0)
    assert [row["bytes"] for row in record["rows"]] == collectives.sizes_of(1)
    assert all(row["seconds"] > 0 for row in record["rows"])
    assert record["hop_us"] == pytest.approx(record["latency_us"] / 2, abs=0.01)
    assert (record["processes"], record["num_devices"], record["functional_only"]) == (1, 2, True)
    assert "| 1 x 2 | " in collectives.table([record])


SCRIPT = """
import json, os, sys
print(json.dumps({"words": sys.argv[1:], "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}))
sys.exit(3 if "--fail" in sys.argv and "1" == sys.argv[-1] else 0)
"""


def test_processes_of_a_layout_know_each_other_and_share_the_devices(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    alone = layouts.run_in("1x4", script, {"steps": 5})
    assert alone == {"words": ["--steps", "5", "--num-devices", "4"], "visible": "4,5,6,7"}
    first = layouts.run_in("2x2", script, {})
    assert first["visible"] == "4,5"
    assert first["words"][:3] == ["--num-devices", "4", "--coordinator"]
    assert first["words"][4:] == ["--num-processes", "2", "--process-id", "0"]
    with pytest.raises(TrainingError, match="2 processes with .*--fail --num-devices 2 failed"):
        layouts.run_in("2x1", script, {"fail": True})


@pytest.fixture
def speeds(monkeypatch):
    """What was run; a device makes 10,000 steps/s, and a process costs half of them."""
    ran = []

    def pretend(layout: str, script: Path, flags: dict[str, Any]) -> dict[str, Any]:
        processes, devices = layouts.parts_of(layout)
        ran.append((layout, flags["num_envs"], flags["total_timesteps"]))
        speed = {"steps_per_second": 10_000 * processes * devices / processes**2, "compile_seconds": 2.0}
        return speed | {"versions": {"jax": "0"}, "devices": ["cpu:0"]}

    monkeypatch.setattr(scaling, "run_in", pretend)
    return ran


def test_both_kinds_of_scaling_are_told_and_drawn(speeds, tmp_path, capsys):
    path = tmp_path / "scaling.png"
    scaling.scale(scaling.Sizes(layouts=("1x1", "1x2", "2x1"), num_envs=8, steps=100, plot=str(path)))
    strong, weak = [("1x1", 8, 100), ("1x2", 8, 100), ("2x1", 8, 100)], [("1x2", 16, 200), ("2x1", 16, 200)]
    assert speeds == strong + weak, "one device is measured once"
    assert path.stat().st_size > 1000
    *lines, last = capsys.readouterr().out.splitlines()
    assert "| weak | 2 x 1 | 16 | 5 k | 0.50 | 2.0 s |" in lines
    assert lines[-1].startswith("functional only: all layouts share ")
    record = json.loads(last)
    assert record["functional_only"]
    assert [row["speedup"] for row in record["rows"]] == [1, 2, 0.5] * 2


def test_the_picture_shows_all_environments_once():
    (axes,) = sharding_picture.picture().axes
    words = " ".join(text.get_text() for text in axes.texts)
    assert [f"environments {first} to {first + 15}" in words for first in (0, 16, 32, 48)] == [True] * 4


@pytest.mark.parametrize(
    ("command", "args", "words", "wanted"),
    [
        (scaling.scale, scaling.Sizes, "--layouts 2", "--layouts 2: a layout is processes x devices of each"),
        (scaling.scale, scaling.Sizes, "--layouts 0x2", "--layouts 0x2: a layout is processes x devices of each"),
        (scaling.scale, scaling.Sizes, "--scaling strange", "--scaling strange is not among strong, weak"),
        (scaling.scale, scaling.Sizes, "--layouts", "--layouts and --scaling need at least one each"),
        (scaling.scale, scaling.Sizes, f"--plot {ROOT}", "is a directory: name a file in it"),
        (collectives.measure_all, collectives.Sizes, "--layouts 1", "--layouts 1: a layout is processes x devices"),
        (collectives.measure_all, collectives.Sizes, "--layouts 1x1", "one device has nobody to average with"),
        (collectives.measure_all, collectives.Sizes, "--num-devices 1", "--num-devices must be at least 2"),
        (collectives.measure_all, collectives.Sizes, "--seconds 0", "--seconds must be greater than 0"),
        (collectives.measure_all, collectives.Sizes, "--process-id 1", "--process-id needs --coordinator"),
        (collectives.measure_all, collectives.Sizes, "--num-devices 9", "--num-devices 9: JAX has 8 cpu device(s)"),
        (print, projection.Assumptions, "--latency-us 3", "needs both --latency-us and --gigabytes-per-second"),
        (print, projection.Assumptions, "--share 0", "--share must be greater than 0"),
    ],
)
def test_bad_input_is_one_sentence(command, args, words, wanted):
    assert wanted in refusal(command, args, words.split())
