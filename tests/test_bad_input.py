"""Bad input: exit code 2, one message that names the flag and what would work, and nothing left
behind.
"""

import dataclasses
import json
import math
import shlex
import shutil
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, get_origin, get_type_hints

import jax
import pytest
from cli_helpers import check_words, fingerprint, refusal

import pmaprl.machine.devices
import pmaprl.runs.run
from algos import ppo_pmap as ppo
from algos import sac_pmap as sac
from pmaprl.cli.command import exit_code, parse
from pmaprl.cli.errors import UsageError

COMMANDS = {
    **{
        name: f"pmaprl.algos.{name}_pmap train"
        for name in ("ppo", "ppo_rnn", "pqn", "sac", "dqn", "appo")
    },
    **{name: f"pmaprl.{name} {name}" for name in ("play", "plot")},
    "compare": "pmaprl.compare run_command",
    "report": "benchmarks.report report",
}
TINY = (
    "--total-timesteps 64 --num-envs 4 --num-steps 8 --num-minibatches 2 --hidden-sizes 4 "
    "--eval-episodes 2"
)
NEW = [*TINY.split(), "--num-devices", "1", "--quiet", "--run-dir", "new"]
ON_HOST = "--env envpool:Pendulum-v1"
TWO = "--distributed a:1,0/2"
# Command, its words, and what the message must name. @x is the path of that name from `places`.
CASES = [
    # environments and their parameters
    ("ppo", "--env LunarLander-v3", "gymnasium:LunarLander-v3"),
    ("ppo", "--env mujoco:HalfCheetah-v5", "envpool:HalfCheetah-v5, gymnasium:HalfCheetah-v5"),
    ("appo", "--env envpool:CartPol-v1", "envpool:CartPol-v1, envpool:CartPole-v1"),
    ("ppo", "--env bad_envs:WideReward", "bad_envs:WideReward, reward, (3,)"),
    ("ppo", "--env bad_envs:HalfDone", "bad_envs:HalfDone, terminated, float32"),
    ("ppo", "--env FrozenLake-misc --normalize-obs", "--normalize-obs"),
    *(("pqn", flag, f"{flag}, CartPole-v1") for flag in ("--encoder nature", "--image-scale 0.1")),
    ("appo", "--env gymnasium:host_toys:TextToy-v0", "Text"),
    ("ppo", """--env-params '{"gravty": 5}'""", "gravty, gravity"),
    ("ppo", """--env-params '{"gravity": NaN}'""", "--env-params, NaN"),
    (
        "ppo",
        """--env-params '{"max_steps_in_episode": "choice:0,5"}'""",
        "max_steps_in_episode, at least 1, 0",
    ),
    ("ppo", """--env-params '{"gravity": [9, 8]}'""", "gravity, 9.8, [9, 8]"),
    ("ppo", "--log-info discount disc", "--log-info disc"),
    # words
    ("ppo", "--num-envs many", "--num-envs, many"),
    ("ppo", "--num-env 8", "--num-env, --num-envs"),
    ("ppo", "--clip-coef=0.1", "--clip-coef, --clip-eps"),
    ("ppo", "--env gymnasium:CartPole-v1 --no-save-envs", "on the device"),
    (
        "ppo",
        "--env gymnasium:CartPole-v1 --num-seeds 3",
        "on the device, for seed in, pmaprl.compare",
    ),
    ("ppo", "--hidden-sizes --seed", "--seed"),
    ("ppo", "--log-info discount --log_info=reward", "--log-info is there twice"),
    ("ppo", "--tuned=no", "--tuned"),
    ("ppo", "--quiet yes", "yes, --no-quiet"),
    ("ppo", "--normalize-obs=False", "--no-normalize-obs"),
    ("ppo", "--run-name mine", "--run-name, --run-dir"),
    ("ppo", "--sweep 'gamma=0.9,0.99 clip_eps=0.1,0.2'", "--sweep, leave the quotes off"),
    ("ppo", "--sweep num_steps=8,16", "--sweep num_steps, for, --num-steps"),
    ("ppo", "--log-each", "--log-each, --tensorboard"),
    ("ppo", f"{ON_HOST} --num-devices 2", "--num-devices, --learner-devices"),
    ("ppo", "--learner-devices 0,1", "--learner-devices, --num-devices"),
    (
        "appo",
        "--num-devices 2 --num-envs 8",
        "--num-devices, --learner-devices, --num-envs, --envs-per-actor",
    ),
    ("sac", "--env Pendulum-v1 --envs-per-actor 4", "--envs-per-actor, --num-envs"),
    (
        "sac",
        f"{ON_HOST} --num-envs 4 --num-seeds 2",
        "--num-seeds, --num-envs, --envs-per-actor, --seed $seed",
    ),
    # sizes
    ("ppo", "--total-timesteps 1e18", "--total-timesteps, 2,147,483,647"),
    ("ppo", "--num-minibatches 7", "--num-minibatches 7, 4 or 8, --num-envs 28 or 35"),
    ("ppo", "--num-devices 3 --num-envs 16", "--num-devices 3, --num-envs 16, 1, 2, 4, 8"),
    ("ppo_rnn", "--num-steps 64 --bptt-length 7", "--bptt-length 7, --num-steps 64, 8"),
    (
        "sac",
        "--num-envs 4 --batch-size 6 --num-devices 4",
        "--batch-size 6, --num-devices 4, 4 or 8",
    ),
    ("sac", "--buffer-size 259 --num-envs 5", "--buffer-size 259, --batch-size 256, 260"),
    ("sac", "--buffer-size 2e9 --num-seeds 10000", "--buffer-size, GB"),
    ("appo", f"{TWO} --rollouts-per-update 3", "--rollouts-per-update 3, 2 processes, 2 or 4"),
    (
        "sac",
        f"{ON_HOST} --learner-devices 0,1 --batch-size 7 --actor-threads 1",
        "--batch-size 7, 6 or 8",
    ),
    # flags that contradict each other, the environment or the algorithm
    ("ppo", "--desired-kl 0.05", "--desired-kl, --lr-schedule"),
    ("ppo", "--stop-at-return 475 --eval-interval 0", "--stop-at-return, --eval-interval 0"),
    ("ppo", "--benchmark --keep-best", "--benchmark, --keep-best"),
    ("ppo", "--opponent self", "--opponent self"),
    ("sac", "--log-std-min 2", "--log-std-min, at most 1"),
    ("sac", "--recipe simba --critic-hidden-sizes 8 9", "--residual, one width, (8, 9)"),
    ("sac", "--env CartPole-v1 --target-entropy-scale 1.5", "--target-entropy-scale 1.5"),
    ("sac", "--target-entropy-scale -0.7", "--target-entropy-scale -0.7, -0.693"),
    ("sac", "--env helpers:TwoDials", "MultiDiscrete, ppo_pmap.py"),
    ("dqn", "--distribution c51 --v-min 1 --v-max 1", "--v-min, --v-max"),
    ("dqn", "--n-steps 4 --learning-starts 3", "--n-steps 4, --learning-starts"),
    # what float32 does not hold, and networks that nothing compiles
    ("ppo", "--gamma 0.99999999999", "--gamma, 1 or further, float32, 0.99999999999"),
    ("dqn", "--distribution c51 --v-min -1e39", "--v-min, 3.4e+38, float32, -1e+39"),
    (
        "dqn",
        "--distribution c51 --v-min 1e8 --v-max 100000001",
        "--v-min, --num-atoms, 51, 100000001, 0.02",
    ),
    ("dqn", "--distribution c51 --v-min -3e38 --v-max 3e38", "--v-max, 3e+38, 8.51e+37"),
    ("sac", "--recipe xqc --critic-limit 3e38", "--critic-limit, --critic-bins, 3e+38"),
    ("pqn", "--reward-scale 1e39", "--reward-scale, 3.4e+38, 1e+39"),
    ("ppo", "--learning-rate 1e-46", "--learning-rate, 1.18e-38, 1e-46"),
    (
        "ppo",
        "--population 4 --sweep learning_rate=log:1e-46:1e-3",
        "--learning-rate, 1.18e-38, 1e-46",
    ),
    ("ppo", """--env-params '{"gravity": 1e39}'""", "gravity, 3.4e+38, 1e+39"),
    ("ppo", """--env-params '{"gravity": "uniform:1:1e39"}'""", "gravity, 3.4e+38, 1e+39"),
    ("ppo", "--sweep env.gravity=1e39,1", "gravity, 3.4e+38, 1e+39"),
    (
        "ppo",
        "--sweep env.max_steps_in_episode=9,16777217",
        "max_steps_in_episode, 16,777,216, 16,777,217",
    ),
    ("ppo_rnn", "--rnn-layers 1000000", "--rnn-layers, 200, 1,000,000"),
    ("pqn", f"--hidden-sizes {' 4' * 5000}", "--hidden-sizes, 5,000, 200"),
    ("sac", f"--critic-hidden-sizes {' 4' * 201}", "--critic-hidden-sizes, 201, 200"),
    ("pqn", "--env Pendulum-v1", "Pendulum-v1, Box, ppo_pmap.py"),
    ("appo", "--actor-devices 0,0", "--actor-devices"),
    # populations and processes
    ("ppo", "--sweep gamma=uniform:0.9:0.99", "--sweep, --population"),
    ("ppo", "--population 4 --num-seeds 2", "--population, --num-seeds"),
    ("ppo", "--distributed a:1", "--distributed a:1, HOST:PORT,ID/COUNT"),
    ("ppo", "--population 4 --sweep num_envs=choice:4,8", "--sweep num_envs, gamma"),
    ("ppo", "--population 4 --sweep gamma=uniform:0.9:1.1", "--gamma, at most 1, 1.1"),
    ("ppo", "--population 4 --sweep desired_kl=log:1e-3:1e-1", "--desired-kl, --lr-schedule"),
    ("ppo", "--pbt", "--pbt, --population"),
    ("ppo", "--population 4 --pbt --pbt-evolve ent_coef --ent-coef 0", "--ent-coef 0.0"),
    ("ppo", "--population 4 --pbt --sweep env.gravity=uniform:5:15", "--pbt, env.gravity"),
    ("ppo", "--population 4 --sharding members --num-devices 3", "--num-devices 3, 1, 2, 4"),
    # runs
    ("ppo", "--resume @run --overwrite", "--resume, --overwrite"),
    *(("ppo", f"--resume @{name}", f"{name}, config.json") for name in ("file", "broken")),
    ("sac", "--resume @run", "run, ppo_pmap, sac_pmap"),
    ("ppo", "--resume @custom", "bad_envs:raises, --env"),
    ("ppo", "--resume @run --learning-rate 1 --hidden-sizes 8", "--hidden-sizes, [4], [8]"),
    ("ppo", "--resume @run --total-timesteps 10", "--total-timesteps 10, 64"),
    ("ppo", f"{TINY} --init-from @mislabelled --hidden-sizes 8", "kernel, [1, 4, [1, 8"),
    ("ppo", f"{TINY} --init-from @run --env Acrobot-v1", "--env, CartPole-v1, 4, 6"),
    ("ppo", "--run-dir @run", "run, --resume, --overwrite"),
    *(
        ("ppo", f"{how} @run --activation swish", "--activation, swish")
        for how in ("--resume", f"{TINY} --init-from")
    ),
    *(("ppo", f"--run-dir @{name} --overwrite", name) for name in ("foreign", "broken")),
    # other commands
    ("play", "", "run"),
    ("play", "@run --env Pendulum-v1", "[4], [3]"),
    ("play", "@run --episodes 1 --gif x.png", ".gif"),
    ("compare", "@run nowhere", "nowhere"),
    ("compare", "@run --by clip_epz", "--by clip_epz, clip_eps"),
    ("plot", "@run --out picture.docx", ".pdf"),
    ("report", "--results nowhere", "nowhere"),
]

BAD_ENVS = """
import jax.numpy as jnp
from helpers import Toy


def raises():
    raise RuntimeError("the factory is broken")


class WideReward(Toy):
    def reward(self, *_):
        return 3 * [2.5]


class HalfDone(Toy):
    def is_terminated(self, *_):
        return jnp.float32(0.5)
"""


def refused(command: str, words: list[str]) -> str:
    """The one message with which a command refuses these words."""
    module, function = COMMANDS[command].split()
    found = import_module(module)
    return refusal(getattr(found, function), found.Args, words)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A folder with a finished run and with damaged ones, named as in CASES; tests use copies of
    it.
    """
    folder = tmp_path_factory.mktemp("places")
    assert exit_code(ppo.train, parse(ppo.Args, [*NEW[:-1], str(folder / "run")])) == 0
    (folder / "bad_envs.py").write_text(BAD_ENVS)
    (folder / "file").write_text("text")
    (folder / "foreign" / "checkpoints" / "64").mkdir(parents=True)
    (folder / "foreign" / "metrics.jsonl").write_text("ten years of work")
    config = json.loads((folder / "run" / "config.json").read_text())
    configs = {
        "broken": '{"args": {',
        "foreign": '{"args": {"env": "a"}, "algorithm": "b"}',
        "custom": json.dumps(config | {"args": config["args"] | {"env": "bad_envs:raises"}}),
        "mislabelled": json.dumps(config | {"args": config["args"] | {"hidden_sizes": [8]}}),
    }
    for name, text in configs.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(text)
    shutil.copytree(folder / "run" / "checkpoints", folder / "mislabelled" / "checkpoints")
    return folder


@pytest.fixture
def places(tmp_path, template, monkeypatch):
    """The working directory: a copy of the template."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "bad_envs", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "flags", "wanted"),
    CASES,
    ids=[f"{row[0]} {row[1][:60]}" for row in CASES],
)
def test_bad_input_is_refused(command, flags, wanted, places):
    words = shlex.split(flags.replace("@", f"{places}/"))
    # A directory left behind would stand in the way of the same command, corrected
    before = fingerprint(places)
    alone = command == "ppo" and not {"--resume", "--num-devices", "--distributed"} & set(words)
    check_words(refused(command, [*alone * ["--num-devices", "1"], *words]), wanted)
    assert "--resume" not in words or "bad_envs" not in sys.modules, (
        "a run does not decide which code is imported"
    )
    assert fingerprint(places) == before
    assert (places / "foreign" / "checkpoints" / "64").exists()


MAY_BE_NEGATIVE = {"stop_at_return", "target_entropy_scale", "v_min", "v_max", "log_std_min"}
MAY_BE_0 = MAY_BE_NEGATIVE | {
    "seed",
    "eval_interval",
    "checkpoint_interval",
    "keep_checkpoints",
    "stop_after",
}
MAY_BE_0 |= {
    "max_seconds",
    "population",
    "pbt_start",
    "num_devices",
    "reset_pool",
    "rollouts_per_update",
    "gamma",
}
MAY_BE_0 |= {
    "target_kl",
    "max_grad_norm",
    "adam_b1",
    "adam_b2",
    "vf_coef",
    "ent_coef",
    "ent_fraction",
    "bptt_length",
}
MAY_BE_0 |= {
    "rnn_span",
    "max_restarts",
    "max_policy_lag",
    "learning_starts",
    "gae_lambda",
    "q_lambda",
}
MAY_BE_0 |= {"epsilon_start", "epsilon_end", "epsilon_fraction", "weight_decay", "byte_max"}


@pytest.mark.parametrize(
    "name",
    ["ppo", "ppo_rnn", "pqn", "sac", "dqn", "appo", "ppo host", "sac host"],
)
def test_every_number_and_choice_refuses_what_it_cannot_be(name):
    """Also from Python, with the flag's name: what is no number, what is below 0, and 0 for
    most.
    """
    name, _, host = name.partition(" ")
    args_class = import_module(f"pmaprl.algos.{name}_pmap").Args.at(
        "envpool:Pendulum-v1" if host else ""
    )
    kinds = get_type_hints(args_class)
    bad = {
        "env": [5],
        "quiet": ["no"],
        "adam_b2": [1.0],
        "hidden_sizes": [("wide",), (8.5,), 8, (), (0,)],
    }
    for flag in [field.name for field in dataclasses.fields(args_class)]:
        if get_origin(kinds[flag]) is Literal:
            bad[flag] = ["x", math.nan]
        elif kinds[flag] not in (str, bool) and get_origin(kinds[flag]) is not tuple:
            bad[flag] = [
                "x",
                True,
                math.nan,
                math.inf,
                *bad.get(flag, []),
            ]
            bad[flag] += [] if flag in MAY_BE_NEGATIVE else [-2] if flag in MAY_BE_0 else [-2, 0]
    assert len(bad) > 30
    for flag, value in [(flag, value) for flag, values in bad.items() for value in values]:
        with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')} "):
            pytest.fail(f"accepted: {flag}={value} {args_class(**{flag: value}).env}")


@pytest.mark.parametrize(
    ("flag", "module"),
    [("--tensorboard", "tensorboardX"), ("--wandb", "wandb")],
)
def test_a_missing_package_is_named(flag, module, places, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    check_words(refused("ppo", [flag, *NEW]), f"{flag}, {module}, pip install")
    assert not (places / "new").exists()


@dataclasses.dataclass(kw_only=True)
class Fork(ppo.Args):
    """Flags of kinds that none of ours has."""

    scales: list[float] = dataclasses.field(default_factory=lambda: [1.0])
    order: Literal[1, 2] = 1
    limit: Annotated[int, "up to"] | None = None


@pytest.mark.parametrize(
    ("algorithm", "words", "meant"),
    [
        (
            ppo,
            "--lerning-rate 1",
            "--learning-rate",
        ),
        (
            ppo,
            "--no-normalise-obs",
            "--no-normalize-obs",
        ),
        (
            sac,
            "--actor-lr 1",
            "--policy-lr",
        ),
        (
            sac,
            "--critic-lr=1",
            "--q-lr",
        ),
    ],
)
def test_an_unknown_flag_is_refused_with_the_one_that_was_meant(algorithm, words, meant):
    message = refusal(
        algorithm.train,
        algorithm.Args,
        words.split(),
    )
    assert {word.rstrip("?") for word in message.split() if word.startswith("-")} == {
        words.split("=")[0].split()[0],
        meant,
    }


def test_forks_may_have_flags_of_other_kinds_which_are_checked():
    args = parse(Fork, ["--scales", "1", "2.5", "--order", "2", "--limit", "1e3"])
    assert args == Fork(scales=[1.0, 2.5], order=2, limit=1000)
    assert type(args.scales[0]) is float
    assert type(args.limit) is int
    for bad in ("--scales 1 much", "--order 3", "--limit 1.5"):
        assert bad.split()[0] in refusal(ppo.train, Fork, bad.split())


@pytest.mark.parametrize(
    "flags",
    ["--hidden-sizes 10000000 10000000", "--num-steps 2e8", "--eval-episodes 2e9"],
)
def test_sizes_beyond_all_memory_are_refused_before_anything_is_compiled(
    flags, places, monkeypatch
):
    monkeypatch.setattr(pmaprl.machine.devices, "memory_of", lambda devices: 25e9)
    monkeypatch.delattr(pmaprl.runs.run, "compile_together")
    check_words(refused("ppo", [*NEW, *flags.split()]), "GB, 25.0 GB")
    assert not (places / "new").exists()


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        assert port in refused("ppo", ["--distributed", f"127.0.0.1:{port},0/2"])


@pytest.mark.slow
def test_a_run_that_came_to_nothing_does_not_stand_in_the_way_of_the_next(places, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(NameError):
        patch.delattr(pmaprl.runs.run, "compile_together")
        exit_code(ppo.train, parse(ppo.Args, NEW))
    assert json.loads((places / "new" / "result.json").read_text())["status"] == "failed"
    (places / "new" / "notes.txt").write_text("ten years of work")
    (places / "new" / ".metrics.123.jsonl").touch()
    assert exit_code(ppo.train, parse(ppo.Args, NEW)) == 0
    assert (places / "new" / "notes.txt").read_text() == "ten years of work"
    shutil.rmtree(places / "new" / "checkpoints")
    assert "--overwrite" in refused("ppo", NEW), "it has rows of metrics"


def test_a_run_may_be_of_a_file_that_takes_its_flags_from_another(places, monkeypatch):
    words = ["--resume", str(places / "run")]
    path = places / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"algorithm": "mine"}))
    check_words(refused("ppo", words), "mine, ppo_pmap")
    with pytest.raises(UsageError, match="mine"):
        ppo.train(ppo.Args.from_run(places / "run"))
    monkeypatch.setattr(
        sys.modules["__main__"],
        "__file__",
        "mine.py",
        raising=False,
    )
    assert parse(ppo.Args, words).hidden_sizes == (4,)


SETTINGS = {
    "numpy_rank_promotion": "raise",
    "numpy_dtype_promotion": "strict",
    "enable_x64": True,
    "disable_jit": True,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_jax_that_training_does_not_work_with_is_named(name, places, monkeypatch):
    with getattr(jax, name)(SETTINGS[name]):
        assert f"JAX_{name.upper()}" in refusal(ppo.train, ppo.Args, NEW)
