"""Flags that were tuned for an environment: what the command line takes of them, and the tables of
the kit.
"""

import importlib
import re
import sys
import tomllib

import pytest
from cli_helpers import ROOT, check_words, in_process, read_config, refusal

from pmaprl.cli.command import parse
from pmaprl.cli.errors import UsageError
from pmaprl.runs.reports import flag_lines

TABLE = """
["Pendulum-*, CartPole-*"]
num_envs = 8
num_steps = 4
hidden_sizes = [3, 5]

["CartPole-v1, MyEnv-v0"]
num_envs = 4
num_steps = 8
hidden_sizes = [4]
normalize_obs = true
"""


@pytest.fixture
def algorithm(tmp_path, monkeypatch):
    """A file with an algorithm and the table beside it."""
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "my_ppo.toml").write_text(TABLE)
    (tmp_path / "my_ppo.py").write_text(
        "from dataclasses import dataclass\nfrom algos import ppo_pmap\ntrain = ppo_pmap.train\n"
        "@dataclass(kw_only=True)\nclass Args(ppo_pmap.Args):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_ppo")
    del sys.modules["my_ppo"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--env CartPole-v1", (4, 8, (4,), True)),
        ("", (4, 8, (4,), True)),  # the default environment
        ("--env=gymnax:CartPole-v1", (4, 8, (4,), True)),
        ("--env CartPole-swing", (8, 4, (3, 5), False)),
        (
            "--env CartPole-v1 --num-envs 2 --no-normalize-obs --hidden-sizes 7 7",
            (2, 8, (7, 7), False),
        ),
        ("--tuned --no_tuned", (32, 64, (64, 64), False)),
        ("--no-tuned --tuned", (4, 8, (4,), True)),
        ("--env Acrobot-v1", (32, 64, (64, 64), False)),
    ],
)
def test_explicit_flags_win_over_the_table_and_the_table_over_defaults(words, wanted, algorithm):
    args = parse(algorithm.Args, words.split())
    assert (args.num_envs, args.num_steps, args.hidden_sizes, args.normalize_obs) == wanted


def test_a_refusal_says_that_flags_came_from_the_table_and_python_takes_it_where_asked(algorithm):
    for words, told in {
        "--num-minibatches 999": True,
        "--num-minibatches 999 --no-tuned": False,
    }.items():
        assert (
            "tuned/my_ppo.toml" in refusal(algorithm.train, algorithm.Args, words.split())
        ) == told
    assert algorithm.Args(env="CartPole-v1").num_envs == 32
    args = algorithm.Args.for_env("CartPole-v1", num_steps=2)
    assert args.num_envs == 4
    assert args.num_steps == 2
    assert args.hidden_sizes == (4,)


@pytest.mark.slow
def test_the_header_says_where_flags_come_from_and_a_resume_ignores_the_table(
    algorithm, tmp_path, capsys
):
    words = [
        "--env",
        "CartPole-v1",
        "--num-envs",
        2,
        "--num-minibatches",
        1,
        "--total-timesteps",
        64,
    ]
    words += ["--eval-episodes", 4, "--run-dir", tmp_path / "run"]
    assert in_process(*words, "--stop-after", 32, algorithm=algorithm) == 0
    assert "tuned    --num-steps 8 --hidden-sizes 4 --normalize-obs" in capsys.readouterr().out
    (tmp_path / "tuned" / "my_ppo.toml").write_text(
        TABLE.replace("num_steps = 8", "num_steps = 16")
    )
    assert in_process("--resume", tmp_path / "run", algorithm=algorithm) == 0
    assert "tuned" not in capsys.readouterr().out
    args = read_config(tmp_path / "run")["args"]
    assert args["num_envs"] == 2
    assert args["num_steps"] == 8
    assert args["hidden_sizes"] == [4]
    assert args["normalize_obs"] is True


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ('["CartPole-v1"]\nnum_env = 3', "my_ppo.toml, num_env, CartPole-v1"),
        ('["CartPole-v1"]\noverwrite = true', "overwrite, CartPole-v1"),
        ('["CartPole-*"]\nnum_envs = "many"', "my_ppo.toml, CartPole-*, --num-envs, many"),
        ('["CartPole-v1"]\ngamma = 2', "--gamma, at most 1, 2.0"),
        ('["CartPole-v1"', "my_ppo.toml"),
        ("num_envs = 3", "num_envs"),
    ],
)
def test_a_table_that_will_not_do_is_refused(table, wanted, algorithm, tmp_path):
    (tmp_path / "tuned" / "my_ppo.toml").write_text(table)
    with pytest.raises(UsageError) as refused:
        algorithm.Args.for_env("CartPole-v1")
    check_words(str(refused.value), wanted)


def test_entries_of_the_kit_fit_and_differ_from_the_defaults():
    folder = ROOT / "algos" / "tuned"
    tables = {path: tomllib.loads(path.read_text()) for path in folder.glob("*.toml")}
    entries = [
        (path, name.strip())
        for path, table in tables.items()
        for key in table
        for name in key.split(",")
    ]
    assert len(entries) > 10
    for path, pattern in entries:
        env, _, recipe = pattern.removesuffix(")").partition(" (")
        algorithm = importlib.import_module(f"pmaprl.algos.{path.stem}").Args.at(env, recipe)
        flags = algorithm.tuned_entry(env).flags
        defaults = algorithm(env=env)
        same = [name for name, value in flags.items() if value == getattr(defaults, name)]
        assert not same, f"{path.stem} {pattern} repeats the defaults of {same}"


def test_a_copy_of_an_algorithm_starts_from_the_same_tuned_flags(tmp_path, monkeypatch):
    """In any folder, also where it has lost a flag of the table."""
    text = (ROOT / "algos" / "ppo_pmap.py").read_text()
    lost = re.sub(r'    normalize_obs: bool = False\n    """.*?"""\n', "", text)
    assert lost != text
    for name, code in {"copied_ppo": text, "shorter_ppo": lost}.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    original = parse(importlib.import_module("pmaprl.algos.ppo_pmap").Args, ["--env", "Acrobot-v1"])
    copied = parse(importlib.import_module("copied_ppo").Args, ["--env", "Acrobot-v1"])
    shorter = parse(importlib.import_module("shorter_ppo").Args, ["--env", "Acrobot-v1"])
    assert vars(copied) == vars(original)
    assert original.num_envs == shorter.num_envs != 32
    assert vars(original).keys() - vars(shorter).keys() == {"normalize_obs"}


def test_a_copy_keeps_recipes(tmp_path, monkeypatch):
    (tmp_path / "copied_sac.py").write_text((ROOT / "algos" / "sac_pmap.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--recipe", "crossq", "--no-tuned"]
    original = parse(importlib.import_module("pmaprl.algos.sac_pmap").Args, words)
    assert vars(parse(importlib.import_module("copied_sac").Args, words)) == vars(original)


def test_the_header_says_where_flags_come_from():
    args_class = importlib.import_module("pmaprl.algos.ppo_pmap").Args
    for args, told in (
        (args_class.for_env("Acrobot-v1"), "ppo_pmap.toml for Acrobot-v1; --no-tuned"),
        (args_class(env="Acrobot-v1"), "not taken"),
        (args_class(env="CartPole-v1"), "none"),
    ):
        assert told in next(line for line in flag_lines(args) if line.startswith("tuned"))
