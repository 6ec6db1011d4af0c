"""Speed over environments: which sizes are measured, what of a failure is kept, and how kernels are counted."""

import json

import jax
import pytest

from benchmarks import accelerator, report
from benchmarks.timing import count_kernels


@pytest.fixture
def speeds(monkeypatch):
    """Speed of each algorithm at each number of environments; what is not there does not fit into memory."""
    known = {"ppo_pmap": {64: 1000, 256: 2000, 1024: 2050, 4096: 9000}, "sac_pmap": {16: 10, 64: 30}}
    known["ppo_rnn_pmap"] = {}

    def pretend(algorithm, env, num_envs):
        row = {"algorithm": algorithm, "env": env, "num_envs": num_envs}
        if num_envs not in known[algorithm]:
            return row | {"failed": "RESOURCE_EXHAUSTED: Out of memory"}
        speed = {"steps_per_second": known[algorithm][num_envs], "floor_steps_per_second": 4000, "share_of_floor": 0.5}
        return row | speed | {"memory_bytes": 5_000_000, "kernels_per_update": 1234, "compile_seconds": 7.0}

    monkeypatch.setattr(accelerator, "measurement", pretend)
    monkeypatch.setattr(accelerator, "machine_class", lambda: "toy-1")
    return known


def test_sizes_grow_until_they_bring_nothing_or_do_not_fit(speeds, tmp_path, capsys):
    accelerator.measure_all(accelerator.Args(envs=("CartPole-v1",), results=str(tmp_path)))
    rows = json.loads((tmp_path / "toy-1" / "accelerator.json").read_text())["rows"]
    assert [row["num_envs"] for row in rows if row["algorithm"] == "ppo_pmap"] == [64, 256, 1024]
    assert [row["num_envs"] for row in rows if row["algorithm"] == "sac_pmap"] == [16, 64, 256]
    assert (tmp_path / "toy-1" / "accelerator.png").stat().st_size > 1000
    assert "failed: RESOURCE_EXHAUSTED" in capsys.readouterr().out
    text = report.page_of(tmp_path)
    assert "| ppo_pmap | CartPole-v1 | 1,024 | 2,050 | 50% | 5 MB | 1,234 | 7 s |" in text
    assert "| sac_pmap | CartPole-v1 | 256 | failed: RESOURCE_EXHAUSTED" in text
    speeds["ppo_pmap"] = {64: 5000}
    capsys.readouterr()
    accelerator.measure_all(accelerator.Args(algos=("ppo_pmap",), envs=("CartPole-v1",), results=str(tmp_path)))
    rows = json.loads((tmp_path / "toy-1" / "accelerator.json").read_text())["rows"]
    speeds_then = [row["steps_per_second"] for row in rows if "failed" not in row]
    assert speeds_then == [5000, 2050, 10, 30], "what is measured again is replaced, and nothing else"


def test_what_would_not_end_in_time_is_not_begun(speeds, tmp_path, monkeypatch):
    now = iter(range(0, 10_000, 20))  # a measurement takes 20 s, and the next size four times as long
    monkeypatch.setattr(accelerator.time, "monotonic", lambda: next(now))
    accelerator.measure_all(
        accelerator.Args(minutes=2.5, algos=("ppo_pmap",), envs=("CartPole-v1",), results=str(tmp_path))
    )
    rows = json.loads((tmp_path / "toy-1" / "accelerator.json").read_text())["rows"]
    assert [row["num_envs"] for row in rows] == [64, 256]


@pytest.mark.slow
def test_a_small_measurement_runs(monkeypatch):
    sizes = {"num_steps": 8, "bptt_length": 4, "num_minibatches": 2, "updates": 1}
    monkeypatch.setattr(accelerator, "sizes", lambda *_: sizes)
    row = accelerator.measurement("ppo_rnn_pmap", "CartPole-v1", 4)
    assert "failed" not in row, row
    assert row["steps_per_second"] > 0
    assert row["share_of_floor"] > 0
    assert row["memory_bytes"] > 4 * 5000 * 3, "parameters and both of Adam's moments"
    assert row["kernels_per_update"] > 8, "each step has some"


def test_kernels_of_a_loop_count_as_often_as_it_runs():
    def program(times):
        loop = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: x @ x, x))
        return loop.lower(jax.numpy.ones((64, 64))).compile().as_text()

    assert count_kernels(program(30)) - count_kernels(program(20)) == pytest.approx(
        10 * (one := count_kernels(program(11)) - count_kernels(program(10)))
    )
    assert one >= 1
