"""How updates are given to the devices: ahead of those under way, and for no more than a few
seconds at a time.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import ppo_pmap as ppo
import pytest
from cli_helpers import checkpoint_steps, read_rows
from helpers import small_args
from numpy.testing import assert_allclose

import pmaprl.runs.evaluator
import pmaprl.runs.run
from pmaprl.cli.run_flags import RunArgs
from pmaprl.runs.run import CALL_SECONDS, Pace
from pmaprl.runs.saving import Saver

pytestmark = pytest.mark.usefixtures("shared_programs")
UPDATE = 32
FLAGS = {
    "env": "helpers:Luck",
    "num_envs": 4,
    "num_minibatches": 2,
    "hidden_sizes": (4,),
    "lr_schedule": "constant",
}
PATIENCE = 5  # seconds after which a device without work counts as one that waits for the host


def start(run_dir: Any, **flags: Any) -> Any:
    return ppo.train(
        small_args(**FLAGS | {"total_timesteps": 12 * UPDATE, "run_dir": str(run_dir)} | flags)
    )


def rows_without_times(run_dir: Any) -> list[dict[str, Any]]:
    return [
        {name: x for name, x in row.items() if not name.startswith("time/")}
        for row in read_rows(run_dir)
    ]


class Later:
    """Something that a device is to make: a state, what comes of updates, or episodes."""

    def __init__(self, future: Future, part: Any = None):
        self.future = future
        self.part = part

    def result(self) -> Any:
        made = self.future.result()
        return made if self.part is None else made[self.part]

    def replace(self, **parts: Any) -> "Later":
        return self

    def fetch(self, updates: int) -> Any:
        return self.result().fetch(updates)


class Device:
    """Runs programs one after another, as a card does; updates end only once the next ones are
    dispatched.
    """

    def __init__(self, monkeypatch: Any, num_updates: int):
        self.queue = ThreadPoolExecutor(1)
        self.starved = []  # updates that were done before others were there
        self.left = num_updates
        self.dispatched = 0
        self.changed = threading.Condition()
        compile_together = pmaprl.runs.run.compile_together
        copied = Saver.copied
        to_host = Saver.to_host
        episodes_of = pmaprl.runs.evaluator.episodes_of

        def compiled(*inputs):
            self.programs = compile_together(*inputs)
            return self.programs._replace(update=self.update, evaluate=self.evaluate)

        def copied_later(saver, state):
            copy = self.queue.submit(lambda: copied(saver, made(state)))
            return lambda: copy.result()()

        monkeypatch.setattr(pmaprl.runs.run, "compile_together", compiled)
        monkeypatch.setattr(Saver, "copied", copied_later)
        monkeypatch.setattr(Saver, "to_host", lambda saver, state: to_host(saver, made(state)))
        monkeypatch.setattr(
            pmaprl.runs.evaluator,
            "episodes_of",
            lambda later, args: episodes_of(made(later), args),
        )

    def update(self, state: Any, updates: Any) -> tuple[Later, Later]:
        with self.changed:
            self.dispatched += 1
            self.changed.notify_all()
        self.left -= int(updates)
        future = self.queue.submit(
            self.run,
            self.dispatched,
            self.left == 0,
            state,
            updates,
        )
        return Later(future, 0), Later(future, 1)

    def run(self, number: int, is_last: bool, state: Any, updates: Any) -> Any:
        results = jax.block_until_ready(self.programs.update(made(state), updates))
        with self.changed:
            if not is_last and not self.changed.wait_for(
                lambda: self.dispatched > number,
                PATIENCE,
            ):
                self.starved.append(number)
        return results

    def evaluate(self, state: Any, seed: Any) -> Later:
        return Later(
            self.queue.submit(
                lambda: jax.block_until_ready(self.programs.evaluate(made(state), seed))
            )
        )


def made(x: Any) -> Any:
    return x.result() if isinstance(x, Later) else x


def test_the_next_updates_are_dispatched_before_those_under_way_are_done(tmp_path, monkeypatch):
    """Across rows, evaluations and checkpoints, of which nothing changes."""
    flags = {
        "log_interval": UPDATE,
        "eval_interval": 3 * UPDATE,
        "checkpoint_interval": 2 * UPDATE,
    }
    flags |= {"keep_checkpoints": 0, "keep_best": True}
    plain = start(tmp_path / "plain", **flags)
    device = Device(monkeypatch, num_updates=12)
    result = start(tmp_path / "device", **flags)
    assert device.starved == []
    assert device.dispatched == 12
    assert result.state_sha256 == plain.state_sha256
    assert rows_without_times(tmp_path / "device") == rows_without_times(tmp_path / "plain")
    assert checkpoint_steps(tmp_path / "device") == [UPDATE * x for x in (2, 3, 4, 6, 8, 9, 10, 12)]


def test_the_host_waits_where_something_may_end_the_run(tmp_path, monkeypatch):
    """Else the state at which it ends would be overwritten."""
    monkeypatch.setattr("test_dispatch.PATIENCE", 0.01)
    device = Device(monkeypatch, num_updates=12)
    result = start(tmp_path, eval_interval=4 * UPDATE, stop_at_return=0.0)
    assert result.status == "finished"
    assert result.env_steps == 4 * UPDATE
    assert device.dispatched == 1


def test_a_long_row_is_dispatched_in_several_calls_and_is_the_same_row(tmp_path, monkeypatch):
    flags = {"log_interval": 6 * UPDATE, "num_seeds": 2}
    whole = start(tmp_path / "whole", **flags)
    monkeypatch.setattr(RunArgs, "least_log_interval", UPDATE)
    device = Device(monkeypatch, num_updates=12)
    monkeypatch.setattr(pmaprl.runs.run, "CALL_SECONDS", 0)
    parts = start(tmp_path / "parts", **flags)
    assert device.dispatched == 12
    assert device.starved == []
    assert parts.state_sha256 == whole.state_sha256
    together = zip(
        rows_without_times(tmp_path / "whole"),
        rows_without_times(tmp_path / "parts"),
        strict=True,
    )
    for wanted, found in together:
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            assert_allclose(
                found[name],
                x,
                rtol=1e-4,
                atol=1e-6,
                err_msg=name,
            )


def test_a_run_can_end_within_a_long_row(tmp_path, monkeypatch):
    monkeypatch.setattr(RunArgs, "least_log_interval", UPDATE)
    result = start(tmp_path, max_seconds=1e-6, log_interval=10**9)
    assert result.status == "stopped"
    assert result.env_steps == UPDATE
    assert [row["env_steps"] for row in read_rows(tmp_path)][:1] == [UPDATE]


def test_calls_grow_until_they_take_some_seconds():
    pace = Pace(first=5)
    sizes = []
    now = 0.0
    for seconds_per_update in (1e-3,) * 24 + (1.0,) * 4:
        sizes.append(pace.most_updates)
        pace.note(pace.most_updates, now)
        now += sizes[-1] * seconds_per_update
    fitting = int(CALL_SECONDS / 1e-3)
    assert sizes[:6] == [5, 5, 10, 10, 20, 20], "twice the largest that is known to be over"
    assert fitting - 1 <= sizes[23] <= fitting
    assert sizes[-1] == pytest.approx(CALL_SECONDS, abs=1), "a slower one"
