"""README and docs/: their commands are understood, links lead somewhere, environments and an algorithm train."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cli_helpers import ROOT, SMALL, read_result

from common.cli.command import parse
from common.policy import load_policy

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
OWN = DOCS / "environments.md"  # which has two complete ones
COMMAND = re.compile(r"python (?:-m )?((?:algos|common)[/.]\w+)(?:\.py)? ((?:\\\n|[^\n`#])+)")  # module, words
SMALL_ACTORS = """
    --vectorization sync --actor-threads 1 --envs-per-actor 4 --num-steps 8 --hidden-sizes 8 --eval-episodes 2
    --max-restarts 0
"""


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """The modules of all commands that a page shows, each with its words; every run in them is `runs/NAME`.

    Those of scripts, which have variables of the shell, are left out, and those of a file that the page itself has.
    """
    text = re.sub(r"runs/\S+", "runs/NAME", page.read_text())
    own = re.findall(r"Save this as `(\S+)\.py`", text)
    matches = [match for match in COMMAND.finditer(text) if match[1] not in own]
    found = [(match[1].replace("/", "."), match[2].replace("\\\n", "")) for match in matches]
    whole = [(module, words[: -(words.count('"') % 2) or None]) for module, words in found if "$" not in words]
    return [(module, shlex.split(words)) for module, words in whole]  # a quote at the end is that of a whole command


def anchors(page: Path) -> set[str]:
    """The names that links to headings of a page have."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/NAME").mkdir(parents=True)
    Path("runs/NAME/config.json").write_text(json.dumps({"algorithm": "ppo_pmap", "args": {"env": "CartPole-v1"}}))
    for module, words in (command for page in PAGES for command in commands(page)):
        if "--help" not in words:
            parse(importlib.import_module(module).Args, words)


def test_links_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text())]
    assert len(links) > 50
    for page, target in links:
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_the_pages_stay_short():
    words = {page: len(re.findall(r"\S*\w\S*", page.read_text())) for page in PAGES}  # bars of tables are none
    assert words.pop(README) <= 900 and sum(words.values()) <= 16_480


@pytest.mark.slow
def test_the_update_of_the_page_of_ppo_runs_under_shard_map():
    (code,) = re.findall(r"```python\n([^`]*shard_map.*?)```", (DOCS / "ppo.md").read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(names["state"].learner.params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "small"), [("my_envs:Walk", SMALL), ("gymnasium:my_gym_envs:Walk-v0", SMALL_ACTORS.split())]
)
def test_the_environments_of_docs_train(env, small, tmp_path, monkeypatch):
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", OWN.read_text(), re.DOTALL):
        (tmp_path / name).write_text(code)
    (tmp_path / "suites.py").touch()  # the user's, not the kit's
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the working directory is put there
    ((module, words),) = [command for command in commands(OWN) if command[1] == ["--env", env]]
    algorithm = importlib.import_module(module)
    result = algorithm.train(parse(algorithm.Args, [*words, *small, "--total-timesteps", "64", "--quiet"]))
    assert result.status == "finished"
    assert 10 < result.evaluation["eval/length_mean"][0] <= 20


@pytest.fixture
def a2c(tmp_path, monkeypatch):
    """The algorithm that new-algorithm.md writes from nothing, as a module."""
    (code,) = re.findall(r"```python\n(\"\"\"Advantage.*?)```", (DOCS / "new-algorithm.md").read_text(), re.DOTALL)
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
    assert read_result(tmp_path / "run")["eval/return_mean"] == [500.0]
