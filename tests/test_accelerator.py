"""Training speed: of two checkouts in turns, over environments, on a card, and how kernels are
counted.
"""

import gzip
import json

import jax
import pytest

from benchmarks import accelerator, card, kernels, report, speed
from benchmarks.trace import newest_trace, summary_of
from pmaprl.cli.command import parse
from pmaprl.cli.errors import TrainingError


@pytest.fixture
def speeds(monkeypatch):
    """Speed of each algorithm at each number of environments; what is not there does not fit into
    memory.
    """
    known = {
        "ppo_pmap": {64: 1000, 256: 2000, 1024: 2050, 4096: 9000},
        "sac_pmap": {16: 10, 64: 30},
    }

    def pretend(algorithm, env, num_envs):
        row = {"algorithm": algorithm, "env": env, "num_envs": num_envs}
        if num_envs not in known.get(algorithm, {}):
            return row | {"failed": "RESOURCE_EXHAUSTED: Out of memory"}
        row |= {"memory_bytes": 5_000_000, "kernels_per_update": 1234, "compile_seconds": 7.0}
        return row | {"steps_per_second": known[algorithm][num_envs]}

    monkeypatch.setattr(accelerator, "measurement", pretend)
    monkeypatch.setattr(accelerator, "machine_class", lambda: "toy-1")
    return known


def measured(folder, **flags) -> list[dict]:
    """The rows in the file after measurements."""
    args = accelerator.Args(envs=("CartPole-v1",), results=str(folder), **flags)
    accelerator.measure_all(args)
    return json.loads((folder / "toy-1" / "accelerator.json").read_text())["rows"]


def test_sizes_grow_until_they_bring_nothing_or_do_not_fit(speeds, tmp_path, capsys):
    rows = measured(tmp_path)
    of_ppo = [row["num_envs"] for row in rows if row["algorithm"] == "ppo_pmap"]
    assert of_ppo == [64, 256, 1024]
    of_sac = [row["num_envs"] for row in rows if row["algorithm"] == "sac_pmap"]
    assert of_sac == [16, 64, 256]
    assert (tmp_path / "toy-1" / "accelerator.png").stat().st_size > 1000
    assert "failed: RESOURCE_EXHAUSTED" in capsys.readouterr().out
    text = report.page_of(tmp_path)
    assert "| ppo_pmap | CartPole-v1 | 1,024 | 2,050 | 5 MB | 1,234 | 7 s |" in text
    assert "| sac_pmap | CartPole-v1 | 256 | failed: RESOURCE_EXHAUSTED" in text
    speeds["ppo_pmap"] = {64: 5000}
    speeds_then = [
        row["steps_per_second"]
        for row in measured(tmp_path, algos=("ppo_pmap",))
        if "failed" not in row
    ]
    assert speeds_then == [5000, 2050, 10, 30], (
        "what is measured again is replaced, and nothing else"
    )


def test_after_the_time_nothing_is_begun(speeds, tmp_path, monkeypatch):
    now = iter(range(0, 10_000, 50))
    monkeypatch.setattr(accelerator.time, "monotonic", lambda: next(now))
    rows_in_time = measured(tmp_path, minutes=2.5, algos=("ppo_pmap",))
    assert [row["num_envs"] for row in rows_in_time] == [
        64,
        256,
    ]


def test_two_checkouts_take_turns_and_their_ratio_is_the_median(monkeypatch, tmp_path):
    (tmp_path / "algos").mkdir()
    (tmp_path / "algos" / "ppo_pmap.py").touch()
    ran = []
    there = iter(range(100, 200))

    def pretend(words, env):
        steps = int(words[words.index("--stop-after") + 1])
        other = words[1].startswith(str(tmp_path))
        ran.append(("other" if other else "ours", steps))
        rate = 1000 if other else next(there) * 10
        return {
            "algorithm": "ppo_pmap",
            "env": "E",
            "compile_seconds": 2.0,
            "steps_per_second": rate,
        }

    monkeypatch.setattr(speed, "last_line", pretend)
    (row,) = speed.rows_of(
        speed.Args(against=str(tmp_path), envs=("E",), seconds=2.0),
        ["--num-envs", "8"],
    )
    sides = [side for side, _ in ran]
    assert sides == ["ours"] * 2 + ["other"] * 3 + ["ours"] * 2 + ["other"]
    assert {steps for _, steps in ran} == {1, 2000}, (
        "the first run compiles, the others take two seconds"
    )
    assert row["ratio"] == 1.02
    assert row["ratios"] == [1.01, 1.02, 1.03]
    assert row["compile_seconds"] == 2.0


@pytest.mark.parametrize("words", ["", "--envs", "--envs E --against nowhere"])
def test_a_measurement_that_cannot_be_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(speed.Args, ["ppo_pmap", *words.split()])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_small_measurement_runs():
    words = "--env CartPole-v1 --num-envs 4 --num-steps 8 --bptt-length 4 --num-minibatches 2"
    training = speed.Training(
        checkout=speed.ROOT,
        algorithm="ppo_rnn_pmap",
        words=words.split(),
        seconds=0.1,
        kernels=True,
    )
    assert training.measure() > 0
    assert training.about["compile_seconds"] > 0
    assert training.about["memory_bytes"] > 4 * 5000 * 3, "parameters and both of Adam's moments"
    assert training.about["kernels_per_update"] > 8, "each step has some"


def test_kernels_of_a_loop_count_as_often_as_it_runs():
    def count(times):
        loop = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: x @ x, x))
        lowered = loop.lower(jax.numpy.ones((64, 64)))
        return kernels.count_kernels(lowered.compile().as_text())

    more = count(30) - count(20)
    assert more == 10 * (count(11) - count(10)) >= 10


@pytest.mark.parametrize(
    ("program", "most"),
    # Of an H100 they are 12 and 48, 1,421, 15 and 50, 88, and 54: benchmarks/results/kernels.json
    [
        ("ppo", {"rollout step": 165, "gradient step": 85}),
        pytest.param("ppo-gru", {"gradient step": 5_500}, marks=pytest.mark.slow),
        pytest.param("pqn", {"rollout step": 260, "gradient step": 90}, marks=pytest.mark.slow),
        pytest.param("sac", {"gradient step": 1_800}, marks=pytest.mark.slow),
        pytest.param("dqn", {"gradient step": 1_540}, marks=pytest.mark.slow),
    ],
)
def test_an_update_has_few_kernels(program, most):
    """Counts kernels of a CPU, for which anybody can compile; a step of PPO's rollout had 247 where
    it split its keys itself.
    """
    job = {"program": program, "function": "update", "num_envs": 64}
    lowered, sizes = kernels.lowered_program(job, jax.devices()[:1])
    compiled = lowered.compile(
        {"xla_cpu_use_fusion_emitters": True, "xla_backend_optimization_level": 1}
    )
    found = kernels.by_loop(
        list(kernels.kernels_of(kernels.computations(compiled.as_text()))),
        *sizes,
    )
    assert "all-gather" not in compiled.as_text(), "a single device has nobody to ask"
    too_many = {name: found[name] for name, limit in most.items() if found[name] > limit}
    assert too_many == {}


def test_on_an_accelerator_only_the_loop_over_updates_has_no_known_length(monkeypatch):
    """Loops of other lengths keep their neighbours out of CUDA graphs, and make the device ask the
    host.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lowered, _ = kernels.lowered_program(
        {"program": "ppo", "function": "update", "num_envs": 8},
        jax.devices()[:1],
    )
    lines = lowered.compile().as_text().splitlines()
    loops = [line for line in lines if " while(" in line]
    assert len(loops) > 4
    assert sum("known_trip_count" not in line for line in loops) == 1


def test_bytes_and_products_are_those_of_what_a_kernel_touches():
    program = """
%body (p: f32[128,64]) -> f32[64] {
  %p = f32[128,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %row = f32[1,64]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,64}
}

ENTRY %main (a: f32[128,64], b: f32[64,32], i: s32[]) -> f32[128,32] {
  %a = f32[128,64]{1,0} parameter(0)
  %b = f32[64,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%body
  ROOT %ab = f32[128,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    row, product = kernels.kernels_of(kernels.computations(program))
    assert row.kind == "fusion"
    assert row.bytes == 2 * 256 + 4
    assert product.flops == 2 * 128 * 64 * 32
    assert product.bytes == 4 * (128 * 64 + 64 * 32 + 128 * 32)


# ------------------------------------------------------------------------------------------------ a
# card in one script


def metadata(kind: str, name: str, **where: int) -> dict:
    return {"ph": "M", "name": kind, "args": {"name": name}} | where


def span(name: str, begin: float, length: float, pid: int = 1, tid: int = 7, **more: str) -> dict:
    return {
        "ph": "X",
        "name": name,
        "ts": begin,
        "dur": length,
        "pid": pid,
        "tid": tid,
        "args": more,
    }


def test_a_trace_says_what_kernels_take_and_how_long_the_device_is_idle(tmp_path):
    """Two updates of 50 microseconds, in which kernels run for 30; on the host three launches, one
    of a graph.
    """
    events = [
        metadata("process_name", "/device:GPU:0", pid=1),
        metadata("thread_name", "Stream #13(Compute)", pid=1, tid=7),
        metadata("thread_name", "XLA Ops", pid=1, tid=8),
        metadata("process_name", "/host:CPU", pid=2),
        *(span("gemm", begin, 20) for begin in (0, 60)),
        # The first one begins while another one runs
        *(span("fusion", begin, 10) for begin in (15, 90)),
        span("gemm", 0, 1000, tid=8),
        *(
            span(name, 0, 1, pid=2)
            for name in ("cuLaunchKernelEx", "cuLaunchKernel", "cuGraphLaunch", "other")
        ),
    ]
    (tmp_path / "deep").mkdir()
    with gzip.open(tmp_path / "deep" / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = summary_of(newest_trace(tmp_path), updates=2)
    assert found["kernels_per_update"] == 2
    assert found["microseconds_per_update"] == 50
    assert found["idle_share"] == pytest.approx(1 - 55 / 100)
    assert found["launches_per_update"] == 1
    assert found["graphs_per_update"] == 0.5
    gemm, fusion = found["most_expensive"]
    assert gemm["name"] == "gemm"
    assert gemm["times_per_update"] == 1
    assert gemm["microseconds_each"] == 20
    assert fusion["share"] == pytest.approx(1 / 3, abs=1e-4)


def test_a_trace_without_kernels_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="no trace"):
        newest_trace(tmp_path)
    with pytest.raises(TrainingError, match="no kernels"):
        summary_of([span("python", 0, 5)], updates=1)


class PretendedWorker:
    """A process of the card, whose speed depends on XLA's options; some of those XLA does not
    know.
    """

    def __init__(self, job, options="", cache="", python=""):
        self.job = job
        self.options = options
        self.about = {"compile_seconds": 3.0}

    def built(self, timeout=0.0):
        if "scheduling_mode" in self.options:
            raise TrainingError("Unknown flag in XLA_FLAGS (exit code 1)")
        return self

    def ask(self, **request):
        graphs = "min_graph_size=1" in self.options
        unrolled = "unroll_loops" in self.options
        return {"steps_per_second": 100.0 * (1 + 0.1 * graphs) * (1 + 0.5 * unrolled)}

    def close(self):
        pass


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_options_that_help_are_measured_together(monkeypatch, tmp_path):
    monkeypatch.setattr(card, "Worker", PretendedWorker)
    monkeypatch.setattr(card, "machine_class", lambda: "toy-1")
    path = tmp_path / "card.jsonl"
    one = card.Card(card.Args(parts=("options",), rounds=1), path)
    one.run()
    lines = lines_of(path)
    ratios = {line["name"]: line["times_the_first"] for line in lines if "name" in line}
    assert ratios["defaults"] == 1.0
    assert ratios["small graphs"] == 1.1
    assert ratios["unrolled loops"] == 1.5
    assert ratios["best"] == 1.65
    assert one.best_options.count("--xla") == 3
    assert any(
        line.get("program") == "concurrent graphs" and "Unknown flag" in line["failed"]
        for line in lines
    )


def test_a_part_without_time_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(card, "Worker", PretendedWorker)
    monkeypatch.setattr(card, "machine_class", lambda: "toy-1")
    path = tmp_path / "card.jsonl"
    args = card.Args(parts=("calls", "others"), minutes=1e-9)
    card.Card(args, path).run()
    left_out = [line["left out"] for line in lines_of(path)[1:]]
    assert left_out == [["ppo"], ["sac", "dqn", "ppo-gru"]]


@pytest.mark.slow
def test_the_script_for_a_card_runs_in_small_on_a_cpu(tmp_path):
    path = tmp_path / "card.jsonl"
    parts = ("calls", "profile", "resume")
    sizes = {
        "num_envs": (4,),
        "num_steps": 8,
        "seconds": 0.05,
        "rounds": 1,
        "minutes": 20.0,
    }
    card.measure(card.Args(parts=parts, out=str(path), **sizes))
    lines = lines_of(path)
    assert not [line for line in lines if "failed" in line]
    calls = [line["updates_per_call"] for line in lines if line["part"] == "calls"]
    assert calls == [1, 10, 100]
    (profile, of_sac) = (line for line in lines if line["part"] == "profile")
    assert profile["kernels_per_update"] > 100
    assert len(of_sac["most_expensive"]) > 5
    assert [line["is_exact"] for line in lines if line["part"] == "resume"] == [True]


@pytest.mark.slow
def test_the_cost_of_a_row_is_measured():
    found = speed.cost_of_rows(
        speed.Args(rows=True, rounds=1, envs=("CartPole-v1",)),
        [],
        count=200,
    )
    assert found["rows"] == 200
    assert found["processor_ms"] < 50
