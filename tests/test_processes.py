"""What processes agree on, and the rows of a checkpoint that each reads; here one process plays one of several."""

import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import same_bits
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from common.cli.errors import ProcessEnded, TrainingError, UsageError
from common.device import multihost
from common.runs import checkpoints
from common.runs.arrays import Arrays, checksums
from common.runs.checkpoints import Checkpoints, Damaged, read
from common.runs.console import Console
from common.runs.run import Run
from common.runs.signals import Interruption

ENVS = 8


@pytest.fixture
def beside(monkeypatch):
    """This is process 0 of two, of which the other says what the returned list has, the newest last."""
    said: list[tuple[str, str] | None] = [None]
    monkeypatch.setattr(multihost, "count", lambda: 2)
    monkeypatch.setattr(multihost, "allgather", lambda own: [own, said[-1]])
    return said


def fail() -> None:
    raise ValueError("no room")


def test_what_fails_in_one_process_fails_in_all(beside):
    assert multihost.all_or_none(lambda x: x + 1, 1) == multihost.on_first(lambda x: x + 1, 1) == 2
    with pytest.raises(ValueError, match="no room"):
        multihost.all_or_none(fail)
    beside.append(("OSError", "the disk is full"))
    with pytest.raises(multihost.FailedElsewhere, match="process 1: the disk is full") as failure:
        multihost.all_or_none(lambda: 1)
    assert failure.value.kind == "OSError"


def test_a_save_is_not_waited_for_where_another_process_has_failed_in_it(beside, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(multihost, "max_over_processes", lambda own: own)  # the other one is done
        assert multihost.in_background(lambda: 3) == 3
        with pytest.raises(ValueError, match="no room"):
            multihost.in_background(fail)
    looks, never = [multihost.UNDER_WAY, multihost.UNDER_WAY, multihost.FAILED], threading.Event()
    monkeypatch.setattr(multihost, "max_over_processes", lambda own: looks.pop(0))
    beside.append(("OSError", "No space left on device"))
    with pytest.raises(multihost.FailedElsewhere, match="No space left"):
        multihost.in_background(never.wait)
    never.set()
    assert not looks


@pytest.mark.parametrize(("kind", "raised"), [("Damaged", UsageError), ("TrainingError", TrainingError)])
def test_a_checkpoint_that_is_damaged_for_another_process_is_skipped(kind, raised, tmp_path, monkeypatch):
    def fail_elsewhere(function, *args):
        function(*args)
        raise multihost.FailedElsewhere(1, kind, "checkpoint 7")

    save(tmp_path)
    assert Checkpoints(tmp_path, read_only=True).load(state())[0] == 7
    monkeypatch.setattr(multihost, "all_or_none", fail_elsewhere)
    with pytest.raises(raised, match="process 1: checkpoint 7"):
        Checkpoints(tmp_path, read_only=True).load(state())


@pytest.mark.parametrize(("kind", "code"), [("UsageError", 2), ("OSError", 1)])
def test_all_processes_end_with_the_exit_code_of_the_one_that_failed(kind, code, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ProcessEnded, match="process 1: no") as end, multihost.joined(SimpleNamespace(is_distributed=1)):
        raise multihost.FailedElsewhere(1, kind, "no")
    assert end.value.code == code


def state() -> Arrays:
    """A state of two seeds and eight environments."""
    numbers = np.arange(2 * ENVS * 3, dtype=np.float32).reshape(2, ENVS, 3)
    return {"learner/a": np.float32([1, 2]), "actors/x": numbers, "actors/y": numbers[..., 0] > 9}


def save(folder: Path, change: Callable[[np.ndarray], None] = lambda x: None) -> Path:
    """A checkpoint; after its checksums were made, `change` gets `actors/x`."""
    stored = state() | checksums(state())
    change(stored["actors/x"])
    ocp.save(folder / "7", stored)
    return folder / "7"


@pytest.fixture
def become(monkeypatch):
    """A function that makes this process one of several which read a checkpoint."""

    def set_process(process: int, processes: int) -> None:
        sharding = NamedSharding(Mesh(np.array(jax.devices()[:processes]), "p"), P(None, "p"))
        monkeypatch.setattr(multihost, "count", lambda: processes)
        monkeypatch.setattr(checkpoints, "_over_processes", lambda: sharding)
        monkeypatch.setattr(
            checkpoints,
            "_on_host",
            lambda x: np.asarray(x.addressable_shards[process].data if isinstance(x, jax.Array) else x),
        )

    monkeypatch.setattr(checkpoints, "_alone", ocp.options.MultiprocessingOptions)
    return set_process


def test_every_process_reads_its_own_rows_and_finds_what_is_not_as_it_was_saved(tmp_path, become):
    def change(x):
        x[1, 5] += 1

    path, changed = save(tmp_path), save(tmp_path / "changed", change)
    for process, processes in ((0, 1), (0, 2), (1, 2), (0, 4), (2, 4)):
        become(process, processes)
        size = ENVS // processes
        own = slice(process * size, (process + 1) * size)
        found = read(path)
        wanted = {name: x[:, own] if "actors" in name else x for name, x in state().items()}
        assert same_bits(found, wanted)
        if 5 in range(ENVS)[own]:
            with pytest.raises(Damaged):
                read(changed)
        else:
            assert same_bits(read(changed), wanted)


def test_a_collective_alone_says_that_another_process_is_lost_be_it_behind_another_error(monkeypatch):
    error = TrainingError("checkpoint 7 could not be saved")
    error.__cause__ = RuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer\nmore")
    assert not multihost.has_lost(error), "there is no other"
    monkeypatch.setattr(multihost, "count", lambda: 2)
    assert multihost.has_lost(error) == "UNKNOWN: Gloo AllGather failed: Connection reset by peer"
    for text in ("Connection to the simulator lost", "no heartbeat of the robot"):
        assert not multihost.has_lost(RuntimeError(text))


def test_a_run_stops_where_any_process_wants_it(monkeypatch):
    monkeypatch.setattr(multihost, "max_over_processes", lambda own: max(int(own), signal.SIGTERM))
    assert Interruption(Console(quiet=True, total_steps=1)).received() == signal.SIGTERM
    run = SimpleNamespace(leaving=False, _interruption=SimpleNamespace(received=lambda: 0))
    assert Run.stopping.fget(run)


def test_processes_tell_each_other_what_json_can_say_and_take_nothing_else(monkeypatch):
    monkeypatch.setattr(multihost, "count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda row: np.stack([row, row]))
    value = {"path": Path("a/ü"), "array": np.float32([0.1, -np.inf]), "number": np.int32(3), "pair": (1, None)}
    said = {"path": "a/ü", "array": [float(np.float32(0.1)), -np.inf], "number": 3, "pair": [1, None]}
    assert multihost.allgather(value) == [said, said]
    assert multihost.on_first(lambda: value) == said
    monkeypatch.setattr(multihost, "max_over_processes", lambda number: number)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda row: [row, np.frombuffer(pickle.dumps({1}), np.uint8)]
    )
    for ask in (lambda: multihost.allgather(1), lambda: multihost.on_first(int)):
        with pytest.raises(TrainingError):
            ask()
