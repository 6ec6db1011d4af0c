"""Bad input: exit code 2, one clear message that says what would work, no traceback, and nothing damaged."""

import io
import json
import re
import shlex
import shutil
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from cli_helpers import fingerprint, run_script

from algos.ppo_pmap import Args, train
from common.cli.command import main, parse
from common.cli.errors import UsageError

TINY = "--total-timesteps 64 --num-envs 4 --num-steps 8 --num-minibatches 2 --hidden-sizes 4 --eval-episodes 2"

# What is wrong, the flags, and what the message must say. @x is the path of that name from `places`.
CASES = [
    # environments
    ("unknown env", "--env CartPol-v1", "CartPol-v1, CartPole-v1"),
    ("unknown env, wrong case", "--env cartpole-V1", "CartPole-v1"),
    ("unknown env, nothing near", "--env qqqqqqqq", "qqqqqqqq, CartPole-v1"),
    ("empty env", "--env=", "environment"),
    ("unknown gymnax id", "--env gymnax:Pendulum", "Pendulum-v1"),
    ("custom module missing", "--env no_such_module:make", "no_such_module, package.module:factory"),
    ("custom attribute missing", "--env bad_envs:nothing", "bad_envs:nothing, nothing"),
    ("custom attribute not callable", "--env bad_envs:NUMBER", "bad_envs:NUMBER"),
    ("custom factory raises", "--env bad_envs:raises", "bad_envs:raises, the factory is broken"),
    ("custom factory returns None", "--env bad_envs:none", "bad_envs:none"),
    ("custom factory returns junk", "--env bad_envs:junk", "bad_envs:junk"),
    ("custom factory returns three things", "--env bad_envs:three", "bad_envs:three"),
    ("custom factory needs arguments", "--env bad_envs:needs", "bad_envs:needs"),
    ("custom env of the old API", "--env bad_envs:old_api", "bad_envs:old_api, 5, 6"),
    ("custom env without final observation", "--env bad_envs:no_final", "final_observation"),
    ("custom env with an unknown space", "--env bad_envs:odd_space", "bad_envs:odd_space, space"),
    ("custom env whose step raises", "--env bad_envs:step_raises", "bad_envs:step_raises, cannot step"),
    ("custom env with a reward per dimension", "--env bad_envs:wide", "bad_envs:wide, reward, (1,)"),
    ("custom factory returns a class", "--env bad_envs:a_class", "a class, Changed()"),
    ("custom module with a syntax error", "--env broken_syntax:make", "broken_syntax:make, SyntaxError"),
    # environment parameters
    ("env params not JSON", "--env-params {max}", "--env-params, JSON"),
    ("env params a list", "--env-params [1]", "--env-params, object"),
    ("env params a number", "--env-params 5", "--env-params, object"),
    ("env params unknown", """--env-params '{"gravityy": 1.0}'""", "gravityy, gravity"),
    ("env params text", """--env-params '{"gravity": "strong"}'""", "gravity, strong"),
    ("env params bool", """--env-params '{"gravity": true}'""", "gravity"),
    ("env params null", """--env-params '{"gravity": null}'""", "gravity"),
    ("env params nested", """--env-params '{"gravity": {"x": 1}}'""", "gravity"),
    ("env params infinite", """--env-params '{"max_steps_in_episode": Infinity}'""", "max_steps_in_episode"),
    ("env params fraction", """--env-params '{"max_steps_in_episode": 1.5}'""", "max_steps_in_episode"),
    ("env params without params", """--env bad_envs:no_params --env-params '{"a": 1}'""", "bad_envs:no_params"),
    # wrong types
    ("text for a count", "--num-envs many", "--num-envs, many"),
    ("text for an integer", "--seed first", "--seed, first"),
    ("text for a float", "--learning-rate fast", "--learning-rate, fast"),
    ("text for a choice", "--activation cubic", "--activation, tanh, relu"),
    ("unknown precision", "--precision float64", "--precision, bfloat16"),
    ("unknown schedule", "--lr-schedule cosine", "--lr-schedule, linear"),
    ("unknown clip mode", "--clip-mode both", "--clip-mode, symmetric"),
    ("text for sizes", "--hidden-sizes wide", "--hidden-sizes, wide"),
    ("half an environment", "--num-envs 1.5", "--num-envs, 1.5"),
    ("half a step", "--total-timesteps 10.5", "--total-timesteps, 10.5"),
    ("infinite steps", "--total-timesteps inf", "--total-timesteps"),
    ("infinite interval", "--log-interval inf", "--log-interval"),
    ("interval beyond floats", "--log-interval 1e400", "--log-interval"),
    ("interval nan", "--log-interval nan", "--log-interval"),
    ("unknown flag", "--num-env 8", "--num-env, --num-envs"),
    ("stray word", "CartPole-v1", "CartPole-v1"),
    ("flag without value", "--seed", "--seed"),
    ("resume without value", "--resume", "--resume"),
    ("value for a switch", "--quiet=yes", "yes"),
    # sizes
    *(
        (f"{flag} {value}", f"--{flag}={value}", f"--{flag}, at least 1, {value}")
        for flag in ("num-envs", "num-steps", "num-minibatches", "update-epochs", "num-seeds", "total-timesteps")
        for value in (0, -4)
    ),
    ("log interval zero", "--log-interval 0", "--log-interval, at least 1"),
    ("no evaluation episodes", "--eval-episodes 0", "--eval-episodes, at least 1"),
    ("hidden size zero", "--hidden-sizes 0", "--hidden-sizes, at least 1"),
    ("one hidden size negative", "--hidden-sizes 8 -8", "--hidden-sizes, -8"),
    *(
        (f"{flag} negative", f"--{flag}=-1", f"--{flag}, at least 0, -1")
        for flag in (
            *("num-devices", "eval-interval", "checkpoint-interval", "keep-checkpoints", "stop-after", "max-seconds"),
            *("seed", "vf-coef", "ent-coef", "max-grad-norm", "target-kl", "gamma", "gae-lambda"),
        )
    ),
    ("seed too large", "--seed 2147483648", "--seed, at most"),
    ("last seed too large", "--seed 2147483640 --num-seeds 100", "--seed, at most"),
    *(
        (f"{flag} zero", f"--{flag} 0", f"--{flag}, greater than 0")
        for flag in ("learning-rate", "clip-eps", "desired-kl")
    ),
    *(
        (f"{flag} {value}", f"--{flag} {value}", f"--{flag}, {value}")
        for flag in ("learning-rate", "gamma", "ent-coef", "max-seconds")
        for value in ("nan", "inf")
    ),
    ("gamma over 1", "--gamma 1.1", "--gamma, at most 1, 1.1"),
    ("lambda over 1", "--gae-lambda 2", "--gae-lambda, at most 1"),
    # sizes that do not divide
    ("envs over devices", "--num-envs 30 --num-devices 4", "--num-devices 4, --num-envs 30, 1, 2, 3, 5"),
    ("more devices than envs", "--num-envs 2 --num-devices 4", "--num-devices 4, --num-envs 2, 1, 2"),
    ("minibatches", "--num-envs 6 --num-steps 5 --num-minibatches 4 --num-devices 1", "--num-envs 6, 4, 8"),
    ("blocks over devices", "--num-envs 8 --num-steps 5 --num-minibatches 4 --num-devices 4", "--num-devices 4, 1, 2"),
    ("more devices than exist", "--num-envs 64 --num-devices 64", "--num-devices 64, device"),
    # what contradicts
    ("resume and init-from", "--resume @run --init-from @run", "--resume, --init-from"),
    ("resume and overwrite", "--resume @run --overwrite", "--resume, --overwrite"),
    ("resume and benchmark", "--resume @run --benchmark", "--benchmark, --resume"),
    ("benchmark and run-dir", "--benchmark --run-dir new", "--benchmark, --run-dir"),
    ("benchmark and tensorboard", "--benchmark --tensorboard", "--benchmark, --tensorboard"),
    ("benchmark and wandb", "--benchmark --wandb", "--benchmark, --wandb"),
    ("benchmark and keep-best", "--benchmark --keep-best", "--benchmark, --keep-best"),
    ("two schedules", "--no-anneal-lr --lr-schedule linear", "--no-anneal-lr, --lr-schedule linear"),
    ("no uniform policy", "--env Pendulum-v1 --exploration-loss symmetric-kl", "symmetric-kl, discrete"),
    ("flags of old", "--no-normalize-rewards", "--normalize-rewards, --normalize-returns"),
    # what to resume and to start from
    ("resume nothing", "--resume @missing", "missing, does not exist"),
    ("resume an empty directory", "--resume @empty", "empty, config.json"),
    ("resume a file", "--resume @file", "file, config.json"),
    ("resume a foreign directory", "--resume @foreign", "foreign, config.json"),
    ("resume broken JSON", "--resume @broken", "broken, config.json"),
    ("resume JSON of another kind", "--resume @list", "list, config.json"),
    ("resume a binary config", "--resume @binary", "binary, config.json"),
    ("resume another algorithm", "--resume @other", "other, ppo_pmap"),
    ("resume another algorithm with the same flags", "--resume @renamed", "sac_pmap, ppo_pmap"),
    ("resume a config without algorithm", "--resume @headless", "headless"),
    ("resume a config with a number for env", "--resume @numeric", "numeric"),
    ("resume a config with a wrong choice", "--resume @choice", "activation, cubic"),
    ("resume a name that is too long", f"--resume {'x' * 300}", "xxx"),
    ("resume with other envs", "--resume @run --num-envs 8", "steps per update, 32, 64"),
    ("resume with other steps", "--resume @run --num-steps 16", "steps per update, 32, 64"),
    ("resume with the same batch cut otherwise", "--resume @run --num-envs 8 --num-steps 4", "does not fit"),
    ("resume with other sizes", "--resume @run --hidden-sizes 8", "does not fit, 4, 8"),
    ("resume with more seeds", "--resume @run --num-seeds 2", "does not fit"),
    ("resume with a normaliser", "--resume @run --normalize-obs", "does not fit, obs_stats"),
    ("resume with another env", "--resume @run --env Acrobot-v1", "does not fit"),
    ("resume another user's code", "--resume @custom", "bad_envs:none, --env"),
    ("init from nothing", "--init-from @missing", "missing, does not exist"),
    ("init from an empty directory", "--init-from @empty", "empty, config.json"),
    ("init from a foreign directory", "--init-from @foreign", "foreign, config.json"),
    ("init from what does not fit", "--init-from @renamed", "renamed, does not fit"),
    ("init from no checkpoints", "--init-from @unsaved", "unsaved, checkpoint"),
    ("init from other sizes", f"{TINY} --hidden-sizes 8 --init-from @run", "does not fit, 4, 8"),
    ("init from another env", f"{TINY} --env Acrobot-v1 --init-from @run", "does not fit, --env: CartPole-v1 then"),
    ("init from a run without normaliser", f"{TINY} --normalize-obs --init-from @run", "does not fit, obs_stats"),
    # where the run goes
    ("existing run", "--run-dir @run", "run, --resume, --overwrite"),
    ("existing foreign directory", "--run-dir @foreign", "foreign, exists"),
    ("overwrite what is no run", "--run-dir @foreign --overwrite", "foreign, --overwrite, config.json"),
    ("run directory is a file", "--run-dir @file", "file, exists, not a directory"),
    ("fewer steps than are done", "--resume @run --total-timesteps 10", "--total-timesteps 10, 64"),
    ("no hidden layer", "--hidden-sizes", "--hidden-sizes"),
    ("infinite learning rate", "--learning-rate inf", "--learning-rate, finite"),
    ("overwrite a file", "--run-dir @file --overwrite", "file"),
    ("run directory below a file", "--run-dir @file/run", "file/run, cannot be written"),
    ("run directory with too long a name", f"--run-dir {'x' * 300}", "xxx, cannot be written"),
]

BAD_ENVS = """
import gymnax
from gymnax.environments import environment

NUMBER = 5


def raises():
    raise RuntimeError("the factory is broken")


def none():
    return None


def junk():
    return object()


def three():
    return (*gymnax.make("CartPole-v1"), "more")


def needs(argument):
    return gymnax.make("CartPole-v1")


def no_params():
    return gymnax.make("CartPole-v1")[0], None


class Changed:
    def __init__(self):
        self.inner, self.default_params = gymnax.make("CartPole-v1")

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, *inputs):
        return self.change(*self.inner.step(*inputs))


class OldAPI(Changed):
    def change(self, obs, state, reward, terminated, truncated, info):
        return obs, state, reward, terminated | truncated, info


class NoFinal(Changed):
    def change(self, *outputs):
        return (*outputs[:-1], {})


class WideReward(Changed):
    def change(self, obs, state, reward, *rest):
        return obs, state, reward[None], *rest


def a_class():
    return Changed


class StepRaises(Changed):
    def change(self, *outputs):
        raise RuntimeError("cannot step")


class OddSpace(Changed):
    def action_space(self, params):
        return "up or down"


old_api, no_final, step_raises, odd_space, wide = OldAPI, NoFinal, StepRaises, OddSpace, WideReward
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
    configs = {
        "broken": '{"args": {',
        "list": "[1, 2]",
        "other": json.dumps({"algorithm": "other", "args": {"env": "CartPole-v1", "tau": 0.1}}),
        "renamed": json.dumps(config | {"algorithm": "sac_pmap"}),
        "headless": json.dumps({"args": args}),
        "numeric": json.dumps(config | {"args": args | {"env": 5}}),
        "choice": json.dumps(config | {"args": args | {"activation": "cubic"}}),
        "custom": json.dumps(config | {"args": args | {"env": "bad_envs:none"}}),
        "unsaved": json.dumps(config),
    }
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    shutil.copytree(trained / "checkpoints", tmp_path / "renamed" / "checkpoints")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "config.json").write_bytes(b"\xff\xfe\x00\x81")
    return tmp_path


def words_of(flags: str, places: Path) -> list[str]:
    return [word.replace("@", f"{places}/") if word.startswith("@") else word for word in shlex.split(flags)]


def refuse(words: list[str]) -> str:
    """Run the script's main part in this process; asserts exit code 2 and returns stderr."""
    stderr = io.StringIO()
    with redirect_stderr(stderr), redirect_stdout(io.StringIO()):
        try:
            code = main(train, parse(Args, words))
        except SystemExit as end:
            code = end.code
    text = stderr.getvalue()
    assert code == 2, f"exit code {code}; stderr: {text}"
    return text


def check_message(stderr: str, wanted: str) -> None:
    """Exactly one message, on stderr, that holds the wanted words; no traceback."""
    assert "Traceback" not in stderr
    messages = len(re.findall(r"^error:", stderr, re.MULTILINE)) + stderr.count("For full helptext")
    assert messages == 1, f"{messages} messages: {stderr}"
    plain = re.sub(r"\s+", " ", re.sub("[│╭╰─╮╯]", " ", stderr))
    joined = plain.replace(" ", "")  # words may be broken at line ends
    for word in wanted.split(", "):
        assert word.replace(" ", "") in joined, f"{word!r} is missing in: {plain}"


def test_the_table_is_long_enough():
    assert len({name for name, _, _ in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize(("flags", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_is_refused(flags, wanted, places):
    import jax

    jax.devices()  # the number of devices is settled from here on
    words = words_of(flags, places)
    before = fingerprint(places)
    base = [] if "--resume" in words else ["--num-devices", "1", *(["--total-timesteps", "64"] * ("--init" in flags))]
    check_message(refuse([*base, *words]), wanted)
    after = {name: digest for name, digest in fingerprint(places).items() if "__pycache__" not in name}
    changed = sorted(name for name in before if after.get(name) != before[name])
    assert not changed, f"a refused command changed {changed}"


@pytest.mark.parametrize(("flag", "module"), [("--tensorboard", "tensorboardX"), ("--wandb", "wandb")])
def test_a_missing_package_is_named(flag, module, places, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    check_message(refuse([flag, "--num-devices", "1", "--run-dir", "new"]), f"{flag}, {module}, pip install")
    assert not (places / "new").exists()


@pytest.mark.parametrize("source", ["@missing", "@foreign", "@unsaved"])
def test_a_refused_start_leaves_no_run_directory(source, places):
    """Or the same command with the mistake corrected would be refused because the directory exists."""
    refuse([*TINY.split(), "--num-devices", "1", "--run-dir", "new", *words_of(f"--init-from {source}", places)])
    assert not (places / "new").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_envs": "8"},
        {"num_envs": 8.5},
        {"num_envs": True},
        {"num_envs": None},
        {"gamma": "0.9"},
        {"gamma": None},
        {"total_timesteps": float("inf")},
        {"total_timesteps": float("nan")},
        {"hidden_sizes": ("wide",)},
        {"hidden_sizes": (8.5,)},
        {"hidden_sizes": 8},
        {"env": 5},
        {"activation": "cubic"},
        {"lr_schedule": "cosine"},
        {"clip_mode": "both"},
        {"exploration_loss": "curiosity"},
        {"precision": "float64"},
        {"anneal_lr": "no"},
    ],
    ids=str,
)
def test_python_arguments_are_checked_too(wrong):
    """`Args(...)` refuses what the command line refuses, with the flag's name."""
    with pytest.raises(UsageError) as error:
        Args(**wrong)
    assert f"--{next(iter(wrong)).replace('_', '-')}" in str(error.value)


def test_whole_floats_are_counts():
    args = Args(total_timesteps=1e6, num_envs=64.0)
    assert (args.total_timesteps, args.num_envs) == (1_000_000, 64)
    assert isinstance(args.total_timesteps, int)


def test_a_wrong_environment_object_is_refused():
    for wrong in (object(), 5, (1, 2, 3), "CartPole-v1"):
        with pytest.raises(UsageError):
            train(Args(num_devices=1, quiet=True, benchmark=True), wrong)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--num-envs 0", "--num-envs, at least 1"),
        ("--env CartPol-v1", "CartPole-v1"),
        ("--resume @missing", "missing, does not exist"),
        ("--run-dir @file/run --total-timesteps 64", "file/run, cannot be written"),
        ("--no-such-flag", "--no-such-flag"),
    ],
)
def test_bad_input_in_a_process_of_its_own(flags, wanted, places):
    done = run_script(*words_of(flags, places), cwd=places)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout
    check_message(done.stderr, wanted)


def test_the_environments_above_are_bad_for_one_reason_each(places):
    """Without its change the wrapper is fine, so that the cases above test what they say."""
    good = textwrap.dedent(
        """
        class Good(Changed):
            def change(self, *outputs):
                return outputs
        """
    )
    (places / "good_envs.py").write_text(BAD_ENVS + good)
    words = [*TINY.split(), "--num-devices", "1", "--env", "good_envs:Good", "--quiet", "--run-dir", "good"]
    assert main(train, parse(Args, words)) == 0
