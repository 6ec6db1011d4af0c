"""Flags that were tuned for an environment: what the command line takes of them, and the tables of the kit."""

import importlib
import sys
import tomllib

import pytest
from cli_helpers import ROOT, in_process, read_config, refusal

from common.cli.command import parse
from common.cli.errors import UsageError

TABLE = """
["CartPole-*"]
num_envs = 8
num_steps = 4
hidden_sizes = [3, 5]

["CartPole-v1"]
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
        "from dataclasses import dataclass\n"
        "from algos import ppo_pmap\n"
        "@dataclass(kw_only=True)\n"
        "class Args(ppo_pmap.Args):\n"
        "    pass\n"
        "train = ppo_pmap.train\n"
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
        ("--env CartPole-v1 --num-envs 2 --no-normalize-obs --hidden-sizes 7 7", (2, 8, (7, 7), False)),
        ("--num-steps=16", (4, 16, (4,), True)),
        ("--env CartPole-v1 --no-tuned", (32, 64, (64, 64), False)),
        ("--tuned --no_tuned", (32, 64, (64, 64), False)),
        ("--no-tuned --tuned", (4, 8, (4,), True)),
        ("--env Acrobot-v1", (32, 64, (64, 64), False)),
    ],
)
def test_explicit_flags_win_over_the_table_and_the_table_over_defaults(words, wanted, algorithm):
    args = parse(algorithm.Args, words.split())
    assert (args.num_envs, args.num_steps, args.hidden_sizes, args.normalize_obs) == wanted


def test_a_flag_given_against_the_table_is_shown_though_it_is_the_default(algorithm, tmp_path, capsys):
    words = ["--num-steps", 64, "--total-timesteps", 256, "--eval-episodes", 4, "--run-dir", tmp_path / "run"]
    assert in_process(*words, algorithm=algorithm) == 0
    header = capsys.readouterr().out
    assert "tuned    --num-envs 4 --hidden-sizes 4 --normalize-obs (from " in header
    assert "flags    --total-timesteps 256 --eval-episodes 4 --num-steps 64\n" in header


def test_a_refusal_says_that_flags_came_from_the_table(algorithm, tmp_path):
    table = f"(flags that were tuned come from {tmp_path.name}/tuned/my_ppo.toml for CartPole-v1; --no-tuned leaves "
    asked = {"--num-minibatches 999": True, "--num-minibatches 999 --no-tuned": False, "--init-from nowhere": False}
    for words, told in asked.items():
        assert (table in refusal(algorithm.train, algorithm.Args, words.split())) == told


def test_the_help_says_that_a_command_begins_with_the_table(algorithm, capsys):
    with pytest.raises(SystemExit):
        parse(algorithm.Args, ["--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    told = words[words.index("--tuned, --no-tuned") : words.index("--list-envs")]
    assert "default: --tuned" in told and "False" not in told


def test_python_takes_the_table_where_it_is_asked_for(algorithm):
    assert algorithm.Args(env="CartPole-v1").num_envs == 32
    assert not algorithm.Args(env="CartPole-v1").tuned
    args = algorithm.Args.for_env("CartPole-v1", num_steps=2)
    assert (args.num_envs, args.num_steps, args.hidden_sizes) == (4, 2, (4,))


def test_the_header_says_where_flags_come_from_and_a_resume_ignores_the_table(algorithm, tmp_path, capsys):
    words = ["--env", "CartPole-v1", "--num-envs", 2, "--num-minibatches", 1, "--total-timesteps", 64]
    words += ["--eval-episodes", 4, "--run-dir", tmp_path / "run"]
    assert in_process(*words, "--stop-after", 32, algorithm=algorithm) == 0
    header = capsys.readouterr().out
    assert (
        "tuned    --num-steps 8 --hidden-sizes 4 --normalize-obs "
        f"(from {tmp_path.name}/tuned/my_ppo.toml for CartPole-v1; --no-tuned leaves them out)"
    ) in header
    assert "flags    --total-timesteps 64 --eval-episodes 4 --num-envs 2 --num-minibatches 1\n" in header
    used = "num_envs", "num_steps", "hidden_sizes", "normalize_obs"
    assert [read_config(tmp_path / "run")["args"][name] for name in used] == [2, 8, [4], True]
    (tmp_path / "tuned" / "my_ppo.toml").write_text(TABLE.replace("num_steps = 8", "num_steps = 16"))
    assert in_process("--resume", tmp_path / "run", algorithm=algorithm) == 0
    assert "tuned" not in capsys.readouterr().out
    same = {"total_timesteps": 64, "num_envs": 4, "num_minibatches": 1, "eval_episodes": 4}
    algorithm.train(algorithm.Args(**same, run_dir=str(tmp_path / "from python")))
    assert "tuned" not in capsys.readouterr().out, "these are not from the table, though some are in it"
    assert [read_config(tmp_path / "run")["args"][name] for name in used] == [2, 8, [4], True]


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ('["CartPole-v1"]\nnum_env = 3', "my_ppo.toml has num_env for CartPole-v1, which is no flag"),
        ('["CartPole-v1"]\nenv = "Acrobot-v1"', "has env for CartPole-v1, which is no flag"),
        ('["CartPole-v1"]\noverwrite = true', "has overwrite for CartPole-v1, which is no flag to be tuned"),
        ('["CartPole-*"]\nnum_envs = "many"', "my_ppo.toml, CartPole-*: --num-envs must be a whole number, got 'many'"),
        ('["CartPole-v1"]\ngamma = 2', "--gamma must be at least 0 and at most 1, got 2.0"),
        ('["CartPole-v1"', "my_ppo.toml cannot be read"),
        ("num_envs = 3", "num_envs stands outside"),
        ('["CartPole-v1"]\nhidden_sizes = [[1]]', "--hidden-sizes"),
    ],
)
def test_a_table_that_will_not_do_is_refused(table, wanted, algorithm, tmp_path):
    (tmp_path / "tuned" / "my_ppo.toml").write_text(table)
    with pytest.raises(UsageError) as refused:
        algorithm.Args.for_env("CartPole-v1")
    assert wanted in str(refused.value)


ENTRIES = [
    (path, pattern)
    for path in sorted((ROOT / "algos" / "tuned").glob("*.toml"))
    for pattern in tomllib.loads(path.read_text())
]


@pytest.mark.parametrize(("path", "pattern"), ENTRIES, ids=lambda part: getattr(part, "stem", part))
def test_entries_of_the_kit_fit_and_differ_from_the_defaults(path, pattern):
    algorithm = importlib.import_module(f"algos.{path.stem}").Args
    flags = algorithm.tuned_entry(pattern).flags
    defaults = algorithm(env=pattern)
    assert not [name for name, value in flags.items() if value == getattr(defaults, name)]
    above = path.read_text().split(f'["{pattern}"]')[0].rsplit("\n\n", 1)[-1]
    assert "# python " in above, "how it was found"
