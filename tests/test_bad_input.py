"""Bad input to PPO and to `common/cli`: exit code 2, one message that says what would work, and nothing damaged."""

import dataclasses
import json
import shlex
import shutil
import sys
import types
from pathlib import Path

import jax
import pytest
from cli_helpers import check_words, fingerprint, refusal

import common.device.footprint
import common.runs.run
from algos.ppo_pmap import Args, train
from algos.sac_pmap import Args as SacArgs
from algos.sac_pmap import train as sac_train
from common.cli.command import main, parse
from common.cli.errors import UsageError

TINY = "--total-timesteps 64 --num-envs 4 --num-steps 8 --num-minibatches 2 --hidden-sizes 4 --eval-episodes 2"

# The flags, and what the message must say. @x is the path of that name from `places`.
CASES = [
    # environments
    ("--env=", "environment"),
    ("--env LunarLander-v3", "algos/appo_pmap.py, gymnasium:LunarLander-v3"),
    ("--list-envs envpool", "--list-envs envpool, gymnax"),
    ("--env gymnax:Pendulum", "Pendulum-v1"),
    ("--env bad_envs:raises", "bad_envs:raises, the factory is broken"),
    ("--env bad_envs:none", "bad_envs:none, neither a gymnax-style environment nor a pair"),
    ("--env FrozenLake-misc --normalize-obs", "--normalize-obs needs arrays"),
    ("--env bad_envs:OddSpace", "bad_envs:OddSpace, space"),
    ("--env bad_envs:StepRaises", "bad_envs:StepRaises, cannot step"),
    ("--env bad_envs:WideReward", "bad_envs:WideReward, reward, (3,)"),
    ("--env bad_envs:a_class", "a class, Toy()"),
    ("--env broken_syntax:make", "broken_syntax:make, SyntaxError"),
    ("""--env-params '{"gravity": {"x": 1}}'""", "gravity"),
    ("""--env-params '{"max_steps_in_episode": Infinity}'""", "max_steps_in_episode"),
    ("""--env-params '{"max_steps_in_episode": 1.5}'""", "max_steps_in_episode"),
    ("""--env-params '{"max_steps_in_episode": 0}'""", "max_steps_in_episode, at least 1, 0"),
    ("""--env-params '{"max_steps_in_episode": "choice:0,5"}'""", "max_steps_in_episode, at least 1, 0"),
    (f"""--env-params '{{"gravity": {"9" * 5000}}}'""", "--env-params"),
    (f"""--env-params '{{"gravity": {"[" * 9999}{"]" * 9999}}}'""", "--env-params"),
    ("""--env bad_envs:no_params --env-params '{"a": 1}'""", "bad_envs:no_params"),
    *((f"--env bad_envs:{name}", f"bad_envs:{name}, action") for name in ("NoChoice", "NotANumber", "Reversed")),
    ("--env bad_envs:Unseen", "bad_envs:Unseen, observe"),
    ("--env bad_envs:ComplexObs", "bad_envs:ComplexObs, complex"),
    ("--env bad_envs:ComplexReward", "bad_envs:ComplexReward, reward, complex64"),
    ("--env bad_envs:HalfDone", "bad_envs:HalfDone, terminated, float32"),
    # words
    ("--num-envs many", "--num-envs, many"),
    ("--activation cubic", "--activation, tanh, relu"),
    ("--hidden-sizes wide", "--hidden-sizes, wide"),
    ("--hidden-sizes", "--hidden-sizes"),
    ("--total-timesteps inf", "--total-timesteps"),
    ("--total-timesteps 1e30", "--total-timesteps, at most"),
    ("--total-timesteps 1e18", "--total-timesteps, updates, 2,147,483,647"),
    ("--num-steps 1e9", "steps, 2,147,483,647"),
    ("--num-envs 1e12", "--num-envs, at most 2,147,483,647"),
    ("--eval-episodes 1e12", "--eval-episodes, at most 2,147,483,647"),
    ("--num-minibatches 7", "--num-minibatches 7, 4 or 8, --num-envs 28 or 35"),
    ("--num-minibatches 100 --num-envs 4 --num-steps 8", "--num-minibatches 32, --num-envs 25"),
    ("--num-env 8", "--num-env, --num-envs"),
    ("--resume", "--resume needs a value"),
    ("--resume --quiet", "--resume needs a value"),
    ("--list-envs --seed", "--seed needs a value"),
    ("--hidden-sizes --seed", "--seed needs a value"),
    ("--quiet yes", "'yes', no flag"),
    ("--unheard-of 3", "--unheard-of, --help"),
    ("--no-normalize-rewards", "--normalize-rewards, --normalize-returns"),
    ("--no-anneal-lr", "--anneal-lr, --lr-schedule constant"),
    *((f"{flag} 3", ours) for flag, ours in {"--lr": "--learning-rate?", "--n-steps": "--num-steps?"}.items()),
    *((f"{flag} 3", ours) for flag, ours in {"--N_ENVS": "--num-envs?", "--batch-size": "--num-minibatches"}.items()),
    ("--rnn gru", "--rnn, algos/ppo_rnn_pmap.py"),
    ("--ent-schedule linear", "--ent-schedule, --ent-fraction 1"),
    ("--desired-kl 0.05", "--desired-kl, --lr-schedule kl-adaptive"),
    # numbers
    *(
        (f"--{flag} 0", f"--{flag}, at least 1, 0")
        for flag in (
            *("num-envs", "num-steps", "num-minibatches", "update-epochs", "num-seeds", "total-timesteps"),
            *("log-interval", "eval-episodes"),
        )
    ),
    *(
        (f"--{flag}=-1", f"--{flag}, at least 0, -1")
        for flag in (
            *("num-devices", "eval-interval", "checkpoint-interval", "keep-checkpoints", "stop-after", "max-seconds"),
            *("seed", "vf-coef", "ent-coef", "max-grad-norm", "target-kl", "gamma", "gae-lambda", "ent-fraction"),
        )
    ),
    *((f"--{flag} 0", f"--{flag}, greater than 0") for flag in ("learning-rate", "clip-eps", "desired-kl")),
    ("--hidden-sizes 8 0", "--hidden-sizes, at least 1, 0"),
    ("--seed 2147483640 --num-seeds 100", "--seed, at most"),
    ("--learning-rate inf", "--learning-rate, finite"),
    ("--gamma nan", "--gamma, nan"),
    ("--gamma 1.1", "--gamma, at most 1, 1.1"),
    ("--ent-fraction 1.1", "--ent-fraction, at most 1, 1.1"),
    # what contradicts
    ("--resume @run --init-from @run", "--resume, --init-from"),
    ("--resume @run --overwrite", "--resume, --overwrite"),
    ("--resume-or-start", "--resume-or-start needs --run-dir"),
    ("--resume-or-start --run-dir @run --overwrite", "--overwrite, delete, --resume-or-start"),
    ("--resume-or-start --run-dir @foreign", "foreign exists already, no run directory"),
    ("--resume-or-start --run-dir @broken", "broken, config.json"),
    ("--resume-or-start --run-dir @run --seed 7", "--seed, 7 with these flags"),
    *(
        (f"--benchmark {flag}", f"--benchmark, {flag.split()[0]}")
        for flag in ("--resume @run", "--run-dir new", "--tensorboard", "--wandb", "--keep-best", "--gif")
    ),
    ("--benchmark --stop-at-return 0", "--benchmark, --stop-at-return"),
    ("--stop-at-return 475 --eval-interval 0", "--stop-at-return, --eval-interval 0"),
    ("--stop-at-return nan", "--stop-at-return, nan"),
    ("--wandb-group walking", "--wandb-group, --wandb"),
    ("--env Pendulum-v1 --exploration-loss symmetric-kl", "symmetric-kl, discrete"),
    # what to resume and to start from
    ("--resume @missing", "missing, does not exist"),
    *((f"--resume @{name}", f"{name}, config.json") for name in ("empty", "file", "broken", "list", "headless")),
    ("--resume @other", "other, ppo_pmap"),
    ("--resume @renamed", "sac_pmap, ppo_pmap"),
    ("--resume @choice", "activation, cubic"),
    (f"--resume {'x' * 300}", "xxx"),
    ("--resume @custom", "bad_envs:none, --env"),
    ("--resume @run --lr-schedule kl-adaptive --learning-rate 0.01", "--learning-rate"),
    ("--resume @run --num-envs 8", "32 steps per update, 64 with --num-envs: 4 then, 8 now"),
    ("--resume @run --num-envs 8 --num-steps 4", "--num-envs: 4 then, 8 now"),
    ("--resume @run --learning-rate 1 --hidden-sizes 8", "these flags: --hidden-sizes: [4] then, [8] now"),
    ("--resume @run --normalize-obs", "--normalize-obs: False then, True now"),
    (
        "--resume @run --env Acrobot-v1",
        "--env: CartPole-v1 then, 4 numbers there, 6 here, one of 2 there, one of 3 here",
    ),
    ("--resume @old", "--lr-schedule must be one of linear, None"),
    ("--resume @run --total-timesteps 10", "--total-timesteps 10, 64"),
    ("--init-from @missing", "missing, does not exist"),
    (f"{TINY} --hidden-sizes 8 --init-from @renamed", "renamed, made by sac_pmap, Dense_0 is 4 x 4 there, 4 x 8 here"),
    (f"{TINY} --hidden-sizes 4 5 --init-from @renamed", "MLP_0/Dense_1 is missing there, 4 x 5 here"),
    (f"{TINY} --hidden-sizes 8 --init-from @mislabelled", "Dense_0 is 4 x 4 there, 4 x 8 here"),
    ("--init-from @unsaved", "there are no checkpoints in, unsaved"),
    (f"{TINY} --gamma 0.5 --num-envs 8 --hidden-sizes 8 --init-from @run", "fit: --hidden-sizes: [4] then, [8] now"),
    (f"{TINY} --env Acrobot-v1 --init-from @run", "--env: CartPole-v1 then, 4 numbers there, 6 here"),
    (f"{TINY} --normalize-obs --init-from @run", "--normalize-obs: False then, True now"),
    (f"{TINY} --num-seeds 2 --init-from @run", "--num-seeds: 1 then, 2 now"),
    # where the run goes
    ("--run-dir @run", "run, --resume, --overwrite"),
    ("--run-dir @foreign", "foreign, exists"),
    ("--run-dir @foreign --overwrite", "foreign exists already, no run directory, config.json"),
    ("--run-dir @file", "file, exists, not a directory"),
    ("--run-dir gs://bucket/run", "gs://bucket/run, folder"),
    ("--run-dir new\udcff", "--run-dir, UTF-8"),
    ("--run-dir @file/run", "file/run, cannot be written"),
    (f"--run-dir {'x' * 300}", "xxx, cannot be written"),
]

BAD_ENVS = """
import gymnax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces

from helpers import Toy


def raises():
    raise RuntimeError("the factory is broken")


def none():
    return None


def no_params():
    return gymnax.make("CartPole-v1")[0], None


def a_class():
    return Toy


class WideReward(Toy):
    def reward(self, *_):
        return 3 * [2.5]


class StepRaises(Toy):
    def step_env(self, *_):
        raise RuntimeError("cannot step")


class NoChoice(Toy):
    def action_space(self, params):
        return spaces.Discrete(0)


class NotANumber(Toy):
    bounds = np.nan, 1.0

    def action_space(self, params):
        return spaces.Box(*map(np.float32, self.bounds), (1,))


class Reversed(NotANumber):
    bounds = 1.0, -1.0


class Unseen(Toy):
    def get_obs(self, state, params=None, key=None):
        return jnp.zeros((0,))


class ComplexObs(Toy):
    def get_obs(self, state, params=None, key=None):
        return super().get_obs(state) + 1j


class ComplexReward(Toy):
    def reward(self, *_):
        return jnp.complex64(1j)


class HalfDone(Toy):
    def is_terminated(self, *_):
        return jnp.float32(0.5)


class OddSpace(Toy):
    def action_space(self, params):
        return "up or down"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished run; tests use copies of it."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    args = parse(Args, [*TINY.split(), "--num-devices", "1", "--quiet", "--run-dir", str(run_dir)])
    assert main(train, args) == 0
    return run_dir


@pytest.fixture
def places(tmp_path, trained, monkeypatch):
    """A working directory with good and bad files, named as in CASES."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "bad_envs", raising=False)
    (tmp_path / "bad_envs.py").write_text(BAD_ENVS)
    (tmp_path / "broken_syntax.py").write_text("def make(:\n")
    (tmp_path / "file").write_text("text")
    for name in ("empty", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("ten years of work")
    shutil.copytree(trained, tmp_path / "run")
    config = json.loads((trained / "config.json").read_text())
    args = config["args"]
    earlier = {name: value for name, value in args.items() if name != "ent_fraction"}
    configs = {
        "broken": '{"args": {',
        "list": "[1, 2]",
        "other": json.dumps({"algorithm": "other", "args": {"env": "CartPole-v1", "tau": 0.1}}),
        "renamed": json.dumps(config | {"algorithm": "sac_pmap"}),
        "headless": json.dumps({"args": args}),
        "choice": json.dumps(config | {"args": args | {"activation": "cubic"}}),
        "custom": json.dumps(config | {"args": args | {"env": "bad_envs:none"}}),
        "unsaved": json.dumps(config),
        "old": json.dumps(config | {"args": earlier | {"lr_schedule": None, "anneal_lr": True}}),
        "mislabelled": json.dumps(config | {"args": args | {"hidden_sizes": [8]}}),
    }
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    for name in ("renamed", "mislabelled", "old"):
        shutil.copytree(trained / "checkpoints", tmp_path / name / "checkpoints")
    (tmp_path / "unsaved" / "checkpoints").mkdir()
    return tmp_path


def words_of(flags: str, places: Path) -> list[str]:
    return [word.replace("@", f"{places}/") if word.startswith("@") else word for word in shlex.split(flags)]


@pytest.mark.parametrize(("flags", "wanted"), CASES, ids=[flags[:60] for flags, _ in CASES])
def test_bad_input_is_refused(flags, wanted, places):
    words = words_of(flags, places)
    before = fingerprint(places)  # a directory left behind would stand in the way of the same command, corrected
    base = [] if "--resume" in words else ["--num-devices", "1", *(["--total-timesteps", "64"] * ("--init" in flags))]
    check_words(refusal(train, Args, [*base, *words]), wanted)
    assert "--resume" not in words or "bad_envs" not in sys.modules, "a run does not decide which code is imported"
    assert fingerprint(places) == before


@pytest.mark.parametrize(("flag", "module"), [("--tensorboard", "tensorboardX"), ("--wandb", "wandb")])
def test_a_missing_package_is_named(flag, module, places, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    words = [flag, "--num-devices", "1", "--run-dir", "new"]
    check_words(refusal(train, Args, words), f"{flag}, {module}, pip install")
    assert not (places / "new").exists()


WRONG = {
    "num_envs": ("8", 8.5, True, None, float("inf"), float("nan")),
    "gamma": ("0.9", None),
    "hidden_sizes": (("wide",), (8.5,), 8, ()),
    "env": (5,),
    "activation": ("cubic",),
    "lr_schedule": ("cosine",),
    "clip_mode": ("both",),
    "exploration_loss": ("curiosity",),
    "precision": ("float64",),
    "norm_adv": ("no",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_python_arguments_are_checked_too(name, value):
    """`Args(...)` refuses what the command line refuses, with the flag's name."""
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} "):
        Args(**{name: value})


FORK = """
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from algos.ppo_pmap import Args
from common.cli.checks import check


@dataclass(kw_only=True)
class Fork(Args):
    kappa: float = 0.5
    switch: bool = False
    scales: list[float] = field(default_factory=lambda: [1.0])
    weights: dict[str, float] = field(default_factory=dict)
    mixed: tuple[int, str] = (1, "a")
    order: Literal[1, 2] = 1
    data: Path = Path()
    maybe: Path | None = None
    sizes: tuple[int, ...] | None = None
    limit: Annotated[int, "up to"] | None = None

    def __post_init__(self):
        super().__post_init__()
        check(self, "scales", at_least=0)
"""


@pytest.fixture(scope="module")
def fork() -> type:
    """The flags of a copied algorithm, of kinds that none of ours has, and with annotations that are texts."""
    module = types.ModuleType("fork")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fork", module)
        exec(FORK, module.__dict__)
        yield module.Fork


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--kappa 1", 1.0),
        ("--switch", True),
        ("--scales 1 2.5", [1.0, 2.5]),
        ("--weights a 1 b 2e3", {"a": 1.0, "b": 2000.0}),
        ("--mixed 2e3 3", (2000, "3")),
        ("--order 2", 2),
        ("--data some/where", Path("some/where")),
        ("--maybe some/where", Path("some/where")),
        ("--sizes 1e1 2", (10, 2)),
        ("--limit 1e3", 1000),
        ("--num-envs 1e1", 10),
    ],
)
def test_forks_may_have_flags_of_other_kinds(words, value, fork):
    name = words.split()[0].strip("-").replace("-", "_")
    for args in (parse(fork, words.split()), fork(**{name: value})):
        found = getattr(args, name)
        assert (found, type(found)) == (value, type(value))
    assert fork(data="a text") == fork(data="a text", order=1)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--kappa much", "--kappa must be a number, got 'much'"),
        ("--scales 1 much", "--scales must be a number, got 'much'"),
        ("--scales -1", "--scales must be at least 0, got -1"),
        ("--weights a much", "--weights must be a number, got 'much'"),
        ("--order 3", "--order must be one of 1, 2, got '3'"),
        ("--sizes 1 many", "--sizes must be a whole number, got 'many'"),
        ("--limit 1.5", "--limit must be a whole number or None, got '1.5'"),
        ("--switch --kappa", "--kappa needs a value"),
    ],
)
def test_flags_of_other_kinds_are_checked(words, wanted, fork):
    assert wanted in refusal(train, fork, words.split())


@pytest.mark.parametrize("words", [f"--seed {'9' * 4000}", f"--seed {'9' * 5000}", "x" * 5000, f"--{'x' * 5000}"])
def test_messages_do_not_repeat_endless_words(words):
    assert len(refusal(train, Args, words.split())) < 200


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--hidden-sizes 10000000 10000000", "GB, 25.0 GB"),
        ("--hidden-sizes 2147483647 2147483647", "memory"),
        ("--num-steps 1e8", "update, GB, 25.0 GB"),
        ("--eval-episodes 2e9", "--eval-episodes, GB, 25.0 GB"),
    ],
)
def test_sizes_beyond_all_memory_are_refused_before_anything_is_compiled(flags, wanted, places, monkeypatch):
    monkeypatch.setattr(common.device.footprint, "memory_of", lambda devices: 25e9)
    monkeypatch.delattr(common.runs.run, "compile_together")
    words = [*TINY.split(), "--num-devices", "1", "--quiet", "--run-dir", "new", *flags.split()]
    check_words(refusal(train, Args, words), wanted)
    assert not (places / "new").exists()


@pytest.mark.parametrize("switch", ["jax_enable_x64", "jax_disable_jit"])
def test_settings_of_jax_that_no_run_works_with_are_refused(switch, places):
    jax.config.update(switch, True)
    try:
        check_words(refusal(train, Args, [*TINY.split(), "--run-dir", "new"]), switch.upper())
    finally:
        jax.config.update(switch, False)
    assert not (places / "new").exists()


def test_a_run_that_came_to_nothing_does_not_stand_in_the_way_of_the_next(places, monkeypatch, capsys):
    words = [*TINY.split(), "--num-devices", "1", "--quiet", "--run-dir", "new"]
    with monkeypatch.context() as patch:
        patch.delattr(common.runs.run, "compile_together")
        with pytest.raises(NameError):
            main(train, parse(Args, words))
    assert json.loads((places / "new" / "result.json").read_text())["status"] == "failed"
    (places / "new" / "notes.txt").write_text("ten years of work")
    assert "--overwrite" in refusal(train, Args, words)
    (places / "new" / "notes.txt").unlink()
    for of_the_run in ("events.out.tfevents.1.host", ".metrics.123.jsonl"):
        (places / "new" / of_the_run).touch()
    assert main(train, parse(Args, words)) == 0
    shutil.rmtree(places / "new" / "checkpoints")
    assert "--overwrite" in refusal(train, Args, words), "it has rows of metrics"


def test_a_run_of_another_algorithm_is_refused_before_its_flags_are(places):
    assert "run was made by ppo_pmap, not by sac_pmap" in refusal(sac_train, SacArgs, ["--resume", str(places / "run")])


def test_an_old_run_goes_on_once_its_old_flags_are_replaced(places, capsys):
    words = ["--resume", str(places / "old"), "--lr-schedule", "constant", "--total-timesteps", "96"]
    assert main(train, parse(Args, words)) == 0
    printed = capsys.readouterr().out
    assert "changed  --lr-schedule: None then, constant now" in printed
    assert "--ent-fraction" not in printed, "a flag that came later was as it is by default"
    assert "changed  --anneal-lr: True then, no flag of this file now: --lr-schedule linear anneals" in printed


def test_a_file_that_takes_its_flags_from_another_resumes_its_own_runs(places, monkeypatch):
    config = json.loads((places / "run" / "config.json").read_text())
    (places / "unsaved" / "config.json").write_text(json.dumps(config | {"algorithm": "mine"}))
    words = ["--resume", str(places / "unsaved")]
    assert "unsaved was made by mine, not by ppo_pmap" in refusal(train, Args, words)
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(Args=Args, __file__="mine.py"))
    assert parse(Args, words).hidden_sizes == (4,)


def test_a_run_may_be_older_than_a_flag_whose_default_is_made_each_time(places):
    @dataclasses.dataclass(kw_only=True)
    class Newer(Args):
        layers: list[int] = dataclasses.field(default_factory=list)

    assert parse(Newer, ["--resume", str(places / "run")]).layers == []
