"""Benchmarks of many devices: what an update is, the projection that docs/scaling.md shows, collectives, layouts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks import collectives, layouts, projection
from benchmarks.work import Exchange, work_of
from common.cli.errors import TrainingError
from common.device.programs import Algorithm, TrainState
from common.device.sharding import AXIS

ASSUMED = projection.Assumptions()


@pytest.mark.slow
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


@pytest.mark.slow
def test_collectives_are_measured_and_fitted():
    latency, slope, error = collectives.fit([10, 1000, 10**6], [3e-4 + 2e-9 * size for size in (10, 1000, 10**6)])
    assert (latency, slope) == pytest.approx((3e-4, 2e-9))
    assert error < 1e-6 < collectives.fit([10, 1000, 10**6], [1e-3, 2e-3, 4e-3])[2]
    record = collectives.measure(collectives.Sizes(num_devices=2, largest=1, seconds=0.01), num_processes=0)
    assert [row["bytes"] for row in record["rows"]] == collectives.sizes_of(1)
    assert all(row["seconds"] > 0 for row in record["rows"])
    assert record["hop_us"] == pytest.approx(record["latency_us"] / 2, abs=0.01)
    assert (record["processes"], record["num_devices"], record["functional_only"]) == (1, 2, True)


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
    assert first["words"][:3] == ["--num-devices", "4", "--distributed"]
    assert first["words"][3].startswith("127.0.0.1:") and first["words"][3].endswith(",0/2")
    with pytest.raises(TrainingError, match="2 processes with .*--fail --num-devices 2 failed"):
        layouts.run_in("2x1", script, {"fail": True})
