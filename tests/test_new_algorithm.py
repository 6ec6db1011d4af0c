"""The algorithm that docs/new-algorithm.md writes from nothing: the page's own code, run."""

import importlib
import re
import sys

import pytest
from cli_helpers import ROOT
from helpers import result_of

from common.policy import load_policy


@pytest.fixture
def a2c(tmp_path, monkeypatch):
    """The page's file as a module."""
    page = (ROOT / "docs" / "new-algorithm.md").read_text()
    (code,) = re.findall(r"```python\n(\"\"\"Advantage.*?)```", page, re.DOTALL)
    assert len(code.splitlines()) <= 150
    (tmp_path / "a2c_pmap.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("a2c_pmap")
    del sys.modules["a2c_pmap"]


def test_seeds_sweeps_resume_and_policies_come_for_free(a2c, tmp_path):
    flags = {"num_envs": 4, "num_steps": 8, "total_timesteps": 256, "hidden_sizes": (8,), "eval_episodes": 4}
    flags |= {"population": 2, "sweep": ("learning_rate=choice:0.1,0.001",), "quiet": True, "num_devices": 1}
    whole = a2c.train(a2c.Args(**flags, run_dir=str(tmp_path / "whole")))
    a2c.train(a2c.Args(**flags, run_dir=str(tmp_path / "half"), stop_after=128))
    half = a2c.train(a2c.Args.from_run(tmp_path / "half"))
    assert half.state_sha256 == whole.state_sha256
    policy = load_policy(tmp_path / "half", algorithm=a2c, member=1)
    assert policy([0.0, 0.1, 0.0, 0.1]) in (0, 1)


@pytest.mark.slow
def test_it_solves_cartpole_on_two_devices(a2c, tmp_path):
    a2c.train(a2c.Args(num_devices=2, quiet=True, run_dir=str(tmp_path / "run")))
    assert result_of(tmp_path / "run")["eval/return_mean"] == [500.0]
