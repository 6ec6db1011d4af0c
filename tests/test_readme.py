"""README and docs/: their commands are understood, links lead somewhere, environments and an
algorithm train.
"""

import importlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import ROOT, SMALL, read_result
from PIL import Image

from pmaprl.cli.command import parse
from pmaprl.device.interface import Transition
from pmaprl.drawing.episodes import draw_gif, record
from pmaprl.envs.registry import make
from pmaprl.policy import load_policy

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
OWN = DOCS / "environments.md"  # which has two complete ones
# Module, words
COMMAND = re.compile(r"python (?:-m )?(algos/\w+|pmaprl(?:\.\w+)+)(?:\.py)? ((?:\\\n|[^\n`#])+)")
SMALL_ACTORS = """
    --vectorization sync --actor-threads 1 --envs-per-actor 4 --num-steps 8 --hidden-sizes 8
    --eval-episodes 2 --max-restarts 0
"""


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """The modules of all commands that a page shows, each with its words; every run in them is
    `runs/NAME`.

    Those of scripts, which have variables of the shell, are left out, and those of a file that the
    page itself has.
    """
    text = re.sub(r"runs/\S+", "runs/NAME", page.read_text())
    own = re.findall(r"Save this as `(\S+)\.py`", text)
    matches = [match for match in COMMAND.finditer(text) if match[1] not in own]
    found = [
        (match[1].replace("algos/", "pmaprl.algos."), match[2].replace("\\\n", ""))
        for match in matches
    ]
    whole = [
        (module, words[: -(words.count('"') % 2) or None])
        for module, words in found
        if "$" not in words
    ]
    # A quote at the end is that of a whole command
    return [(module, shlex.split(words)) for module, words in whole]


def anchors(page: Path) -> set[str]:
    """The names that links to headings of a page have."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/NAME").mkdir(parents=True)
    Path("runs/NAME/config.json").write_text(
        json.dumps({"algorithm": "ppo_pmap", "args": {"env": "CartPole-v1"}})
    )
    for module, words in (command for page in PAGES for command in commands(page)):
        if "--help" not in words:
            parse(importlib.import_module(module).Args, words)


def test_links_lead_somewhere():
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text())
    ]
    assert len(links) > 50
    for page, target in links:
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_the_pages_show_all_examples():
    shown = {
        name for page in PAGES for name in re.findall(r"<!-- include (\S+) -->", page.read_text())
    }
    assert shown == {f"examples/{path.name}" for path in EXAMPLES.glob("*.py")}


def test_the_pages_stay_short():
    # Bars of tables are none
    words = {page: len(re.findall(r"\S*\w\S*", page.read_text())) for page in PAGES}
    assert words.pop(README) <= 900
    assert sum(words.values()) <= 17_500


@pytest.mark.slow
def test_the_update_of_the_page_of_ppo_runs_under_shard_map():
    (code,) = re.findall(
        r"```python\n([^`]*shard_map.*?)```",
        (DOCS / "ppo.md").read_text(),
        re.DOTALL,
    )
    names = {}
    exec(code, names)
    leaves = jax.tree.leaves(names["state"].learner.params)
    assert all(np.isfinite(x).all() for x in leaves)


EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "small"),
    [("my_envs:Walk", SMALL), ("gymnasium:my_gym_envs:Walk-v0", SMALL_ACTORS.split())],
)
def test_the_environments_of_docs_train(env, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in EXAMPLES.glob("my_*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "suites.py").touch()  # the user's, not the kit's
    monkeypatch.setattr(sys, "path", [*sys.path])  # the working directory is put there
    ((module, words),) = [command for command in commands(OWN) if command[1] == ["--env", env]]
    algorithm = importlib.import_module(module)
    result = algorithm.train(
        parse(algorithm.Args, [*words, *small, "--total-timesteps", "64", "--quiet"])
    )
    assert result.status == "finished"
    assert 10 < result.evaluation["eval/length_mean"][0] <= 20


def test_the_documented_frame_draws_an_environment(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    env = make("my_envs:Drawn")
    recording = record(env, lambda obs: jnp.ones(1, jnp.int32), jax.random.key(0), env.max_steps)
    assert recording.obs_names == ("place",)
    warnings = []
    count = draw_gif(env, recording, tmp_path / "walk.gif", warnings.append)
    assert count == len(recording.rewards) + 1
    assert not warnings
    middles = []
    with Image.open(tmp_path / "walk.gif") as gif:
        for step in (0, count - 1):
            gif.seek(step)
            blue = np.argwhere(
                np.abs(np.asarray(gif.convert("RGB"), int) - [0, 114, 178]).max(axis=2) < 20
            )
            middles.append(blue.mean(axis=0)[1])
    distance = float(recording.obs[-1, 0] - recording.obs[0, 0])
    moved = 50 * distance
    assert middles[1] - middles[0] == pytest.approx(moved, abs=2)


NEW = DOCS / "new-algorithm.md"
SMALL_RUNS = {
    "a2c_pmap": {"num_steps": 8, "hidden_sizes": (8,)},
    "q_pmap": {"learning_starts": 32, "batch_size": 8, "buffer_size": 64},
}
FULL_RUNS = {"a2c_pmap": {}, "q_pmap": {"num_envs": 2, "total_timesteps": 20_000}}
REACHED = {"a2c_pmap": 500.0, "q_pmap": 100.0}  # at random it is 20


@pytest.fixture(params=["a2c_pmap", pytest.param("q_pmap", marks=pytest.mark.slow)])
def written(request, monkeypatch):
    """An algorithm of examples/, as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module(request.param)
    del sys.modules[request.param]


def test_seeds_sweeps_resume_and_policies_come_for_free(written, tmp_path):
    flags = SMALL_RUNS[written.__name__] | {
        "num_envs": 4,
        "total_timesteps": 256,
        "eval_episodes": 4,
    }
    flags |= {
        "population": 2,
        "sweep": ("learning_rate=choice:0.1,0.001",),
        "quiet": True,
        "num_devices": 1,
    }
    whole = written.train(written.Args(**flags, run_dir=str(tmp_path / "whole")))
    args = written.Args(**flags, run_dir=str(tmp_path / "half"), stop_after=128)
    written.train(args)
    half = written.train(written.Args.from_run(tmp_path / "half"))
    assert half.state_sha256 == whole.state_sha256
    policy = load_policy(tmp_path / "half", algorithm=written, member=1)
    assert policy([0.0, 0.1, 0.0, 0.1]) in (0, 1)


@pytest.mark.slow
def test_they_learn_cartpole_on_two_devices(written, tmp_path):
    flags = FULL_RUNS[written.__name__] | {
        "num_devices": 2,
        "quiet": True,
        "run_dir": str(tmp_path / "run"),
    }
    written.train(written.Args(**flags))
    assert read_result(tmp_path / "run")["eval/return_mean"][0] >= REACHED[written.__name__]


def test_the_page_names_all_that_algorithms_take_from_optim_and_nets():
    algorithms = [path.read_text() for path in (ROOT / "algos").glob("*.py")]
    taken = {name for text in algorithms for name in re.findall(r"\b(?:optim|nets)\.\w+", text)}
    assert len(taken) > 40
    lines = [line for line in NEW.read_text().splitlines() if line.startswith("| `")]
    assert taken - set(re.findall(r"`((?:optim|nets)\.\w+)`", "\n".join(lines))) == set()


def test_the_page_names_the_fields_of_a_batch_that_algorithms_use():
    texts = [(ROOT / "algos" / f"{name}_pmap.py").read_text() for name in ("dqn", "sac")]
    used = {name for text in texts for name in re.findall(r"\bbatch\.(\w+)", text)} & set(
        Transition._fields
    )
    (table,) = re.findall(r"\| field of a batch .*?\n\n", NEW.read_text(), re.DOTALL)
    first_column = " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_column)) == used


def test_the_table_of_places_names_what_their_files_have():
    """A name stands in one of the files of its row, or is a part of an algorithm."""
    algorithms = "".join(path.read_text() for path in sorted((ROOT / "algos").glob("*.py")))
    stale = []
    for row in (ROOT / "docs/architecture.md").read_text().splitlines():
        quoted = re.findall("`([^`]+)`", row.rpartition(" | ")[2])
        files = [ROOT / name for name in quoted if re.fullmatch("common/.*[.]py", name)]
        if not row.startswith("| ") or not files:
            continue
        text = algorithms + "".join(file.read_text() for file in files)
        words = [name for name in quoted if not name.endswith(".py")]
        names = [name for name in words if re.fullmatch(r"[A-Za-z_]\w+(\.\w+)?", name)]
        parts = [(name, part) for name in names for part in name.split(".")]
        for name, part in parts:
            definition = rf"(def|class) {part}\b|^ *{part}\b.*[:=]"
            if not re.search(definition, text, re.MULTILINE):
                stale.append(name)
    assert not stale
