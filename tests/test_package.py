"""The package as it is installed: a wheel, a fork anywhere, and which files a run directory may
name.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from cli_helpers import ROOT, SMALL, STEPS, environment

from pmaprl import commands
from pmaprl.runs import scripts

PACKAGE = ROOT / "common" / "pmaprl"
FLAG = '    gamma: Discount = 0.99\n    """Discount factor."""\n'
OWN_FLAG = '    own_flag: Count = 3\n    """A flag of the fork."""\n'


def run(*words, cwd, **variables):
    """Output of a command that has to succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_the_project_lists_all_folders_of_the_package():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")}
    assert set(setuptools["packages"]) == {".".join(folder.parts) for folder in folders}


def test_each_command_is_a_module():
    for name in commands.COMMANDS:
        assert (PACKAGE / f"{name.replace('-', '_')}.py").exists()


def test_a_run_may_name_files_that_the_user_has_run_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fork, other, text = (tmp_path / name for name in ("fork.py", "other.py", "fork.txt"))
    for path in (fork, other, text):
        path.write_text("gamma = 0.9")
    assert not scripts.may_be_imported(fork)
    for path in (text, fork, fork):
        scripts.remember(path)
    assert scripts.may_be_imported(fork)
    assert not scripts.may_be_imported(other)
    assert not scripts.may_be_imported(text), "only Python is imported"
    assert scripts.may_be_imported(ROOT / "algos" / "ppo_pmap.py")


def test_a_file_that_has_changed_since_it_was_run_is_another_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fork = tmp_path / "fork.py"
    fork.write_text("gamma = 0.9")
    scripts.remember(fork)
    fork.write_text("import stranger")
    assert not scripts.may_be_imported(fork)


def test_a_file_that_was_never_run_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(scripts, "_digest", lambda path: pytest.fail("it was read"))
    (tmp_path / "endless.py").touch()
    assert not scripts.may_be_imported(tmp_path / "endless.py")


@pytest.mark.parametrize("content", ["", "[", "{}", "[1, null, [1]]", "[" * 100_000])
def test_a_damaged_list_of_files_names_none(content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "pmaprl").mkdir()
    (tmp_path / "pmaprl" / scripts.NAME).write_text(content)
    fork = tmp_path / "fork.py"
    fork.touch()
    assert not scripts.may_be_imported(fork)
    scripts.remember(fork)
    assert scripts.may_be_imported(fork)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment that has the wheel, and beside it what the tests have
    installed.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files beside what it reads
    for name in ("common", "algos"):
        shutil.copytree(
            ROOT / name,
            source / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder,
        source,
    ]
    subprocess.run(
        [str(word) for word in words],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("pmaprl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"pmaprl"}
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")],
        check=True,
    )
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    installed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "tests.pth").write_text("\n".join(installed))
    return folder / "venv" / "bin" / "python"


@pytest.mark.slow
def test_a_wheel_trains_and_its_runs_load(python, tmp_path):
    words = [
        "-m",
        "pmaprl.algos.ppo_pmap",
        "--env",
        "CartPole-v1",
        *SMALL,
        "--total-timesteps",
        STEPS,
    ]
    run(python, *words, "--run-dir", "run", cwd=tmp_path, PYTHONPATH="")
    code = (
        "import pmaprl; from pmaprl.policy import load_policy; print(pmaprl.__file__, "
        "load_policy('run')([0.0] * 4))"
    )
    told = run(python, "-c", code, cwd=tmp_path, PYTHONPATH="")
    assert str(python.parents[1]) in told
    assert told.split()[-1] in ("0", "1")


@pytest.mark.slow
def test_a_fork_outside_of_the_repository_trains_resumes_and_plays(tmp_path):
    (tmp_path / "paper").mkdir()
    (tmp_path / "elsewhere").mkdir()
    fork = tmp_path / "paper" / "my_ppo.py"
    text = (ROOT / "algos" / "ppo_pmap.py").read_text()
    assert text.count(FLAG) == 1
    fork.write_text(text.replace(FLAG, FLAG + OWN_FLAG))
    run_dir = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    words = [
        *SMALL,
        "--total-timesteps",
        2 * STEPS,
        "--stop-after",
        STEPS,
        "--own-flag",
        5,
        "--run-dir",
        run_dir,
    ]
    run(sys.executable, fork, "--env", "CartPole-v1", *words, cwd=tmp_path)
    assert "finished" in run(sys.executable, fork, "--resume", run_dir, cwd=elsewhere)
    play = [sys.executable, "-m", "pmaprl.play", run_dir, "--episodes", 2]
    assert run(*play, cwd=elsewhere) == run(*play, "--algorithm", fork, cwd=elsewhere)


@pytest.mark.slow
def test_an_algorithm_runs_through_a_link_in_any_folder(tmp_path):
    (tmp_path / "linked.py").symlink_to(ROOT / "algos" / "ppo_pmap.py")
    words = ["--env", "CartPole-v1", *SMALL, "--total-timesteps", STEPS, "--run-dir", "run"]
    run(sys.executable, "linked.py", *words, cwd=tmp_path)
    assert "return" in run(
        sys.executable,
        "-m",
        "pmaprl.play",
        "run",
        "--episodes",
        2,
        cwd=tmp_path,
    )


def test_the_kit_is_found_without_a_path(tmp_path):
    code = "import pmaprl.algos.ppo_pmap as ppo; print(ppo.__file__)"
    told = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH="")
    assert Path(told.strip()).name == "ppo_pmap.py"
    assert os.path.isabs(told.strip())
