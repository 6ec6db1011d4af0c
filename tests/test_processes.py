"""Agreement between processes; here one process plays one of several."""

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp
from pmaprl.algos.ppo_pmap import Args

from algos import ppo_pmap as ppo
from pmaprl.cli.errors import ProcessEnded, TrainingError, UsageError
from pmaprl.envs.registry import make
from pmaprl.machine import multihost
from pmaprl.runs.checkpoints import Checkpoints, checksums
from pmaprl.runs.directory import agree_on_directory, describe_shared


@pytest.fixture
def beside(monkeypatch):
    """This is process 0 of two, of which the other says what the returned list has, the newest
    last.
    """
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
    looks = [multihost.UNDER_WAY, multihost.UNDER_WAY, multihost.FAILED]
    never = threading.Event()
    monkeypatch.setattr(multihost, "max_over_processes", lambda own: looks.pop(0))
    beside.append(("OSError", "No space left on device"))
    with pytest.raises(multihost.FailedElsewhere, match="No space left"):
        multihost.in_background(never.wait)
    never.set()
    assert not looks


@pytest.mark.parametrize(
    ("kind", "raised"),
    [("Damaged", UsageError), ("TrainingError", TrainingError)],
)
def test_a_checkpoint_that_is_damaged_for_another_process_is_skipped(
    kind, raised, tmp_path, monkeypatch
):
    def fail_elsewhere(function, *args):
        function(*args)
        raise multihost.FailedElsewhere(1, kind, "checkpoint 7")

    state = {"learner/a": np.float32([1, 2])}
    ocp.save(tmp_path / "7", state | checksums(state))
    assert Checkpoints(tmp_path).load(state)[0] == 7
    monkeypatch.setattr(multihost, "on_first", lambda function, *args: function(*args))
    monkeypatch.setattr(multihost, "all_or_none", fail_elsewhere)
    with pytest.raises(raised, match="process 1: checkpoint 7"):
        Checkpoints(tmp_path).load(state)


@pytest.mark.parametrize(("kind", "code"), [("UsageError", 2), ("OSError", 1)])
def test_all_processes_end_with_the_exit_code_of_the_one_that_failed(kind, code, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with (
        pytest.raises(ProcessEnded, match="process 1: no") as end,
        multihost.joined(SimpleNamespace(distributed="auto"), run={}),
    ):
        raise multihost.FailedElsewhere(1, kind, "no")
    assert end.value.code == code


def test_a_collective_alone_says_that_another_process_is_lost_be_it_behind_another_error(
    monkeypatch,
):
    error = TrainingError("checkpoint 7 could not be saved")
    error.__cause__ = RuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer\nmore")
    assert not multihost.has_lost(error), "there is no other"
    monkeypatch.setattr(multihost, "count", lambda: 2)
    assert multihost.has_lost(error) == "UNKNOWN: Gloo AllGather failed: Connection reset by peer"
    for text in ("Connection to the simulator lost", "no heartbeat of the robot"):
        assert not multihost.has_lost(RuntimeError(text))


def test_processes_that_have_met_compare_what_was_not_known_before(tmp_path, monkeypatch):
    """So do those that a cluster has started, which JAX lets meet by itself."""
    args = Args(run_dir=str(tmp_path / "run"))
    config = {
        "args": dataclasses.asdict(args),
        "algorithm": "ppo",
        "script_sha256": "a",
        "versions": {},
        "env_spec": make("CartPole-v1").spec.to_json(),
    }
    wider = make("Acrobot-v1").spec.to_json()
    for theirs, wanted in (
        ({"--seed": 7}, "--seed is 7 there, 0 here"),
        ({"env_spec": wider}, "shape of the observation: .6. there, .4. here"),
    ):
        monkeypatch.setattr(multihost, "allgather", lambda own, more=theirs: [own, own | more])
        with pytest.raises(UsageError, match=f"process 1 differs from process 0: {wanted}"):
            agree_on_directory(args, config)


def test_what_a_run_is_known_by_is_the_same_in_all_of_its_processes(tmp_path, monkeypatch):
    first = Args(distributed="a:1234,0/2", run_dir="runs/x")
    second = Args(distributed="a:1234,1/2", run_dir="runs/x", quiet=True)
    shared = describe_shared(first, ppo.__file__)
    assert shared == describe_shared(second, ppo.__file__)
    assert shared != describe_shared(Args(run_dir="runs/x", seed=1), ppo.__file__)
    assert shared != describe_shared(first, __file__)
    monkeypatch.chdir(tmp_path)
    assert shared != describe_shared(first, ppo.__file__)  # another folder by that name


def test_processes_tell_each_other_what_json_can_say(monkeypatch):
    monkeypatch.setattr(multihost, "count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda row: np.stack([row, row]))
    value = {
        "path": Path("a/ü"),
        "array": np.float32([0.1, -np.inf]),
        "number": np.int32(3),
        "pair": (1, None),
    }
    said = {
        "path": "a/ü",
        "array": [float(np.float32(0.1)), -np.inf],
        "number": 3,
        "pair": [1, None],
    }
    assert multihost.allgather(value) == [said, said]
    assert multihost.on_first(lambda: value) == said
