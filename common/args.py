"""Flags that every algorithm shares, their checks, and the step from a command line to an exit code.

Imports nothing slow, so that `--help` and usage errors answer at once.
"""

import dataclasses
import errno
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import tyro

from common.console import fail
from common.errors import TrainingError, UsageError
from common.suites import is_custom

MAX_DEVICES = 4096


def _parse_count(words: list[str]) -> int:
    value = float(words[0].replace("_", ""))
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{words[0]} is not a whole number")
    return int(value) if "e" in words[0].lower() or "." in words[0] else int(words[0])


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=_parse_count,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""An integer that may also be written 1e6 or 1_000_000."""


@dataclass(kw_only=True)
class RunArgs:
    """Flags of every algorithm. Sizes and intervals count environment steps over all devices together."""

    num_seeds: ClassVar[int] = 1
    gif: ClassVar[bool] = False

    env: str
    env_params: str = ""
    """Environment parameters to change, as a JSON object, such as '{"max_steps_in_episode": 200}'."""
    seed: int = 0
    """Random seed of the first agent."""
    total_timesteps: Count = 500_000
    """Environment steps to train for, rounded up to whole updates."""
    log_interval: Count = 10_000
    """Environment steps between log rows."""
    eval_interval: Count = 100_000
    """Environment steps between greedy evaluations; 0 evaluates at the end only."""
    eval_episodes: Count = 128
    """Episodes per evaluation."""
    checkpoint_interval: Count = 100_000
    """Environment steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = 5
    """Newest checkpoints to keep; 0 keeps all."""
    keep_best: bool = False
    """Also save and keep the checkpoint with the best evaluation (mean over seeds)."""
    run_dir: str = ""
    """Directory of the run; default runs/<env>__<algo>__<seed>__<time>."""
    resume: str = ""
    """Continue the run in this directory exactly; its flags are taken over, flags given here override them."""
    init_from: str = ""
    """Start from the parameters and normaliser of this run, at step 0."""
    overwrite: bool = False
    """Delete an existing run in --run-dir first."""
    stop_after: Count = 0
    """Stop, saved and resumable, once this many environment steps are done in all; 0 is off."""
    max_seconds: float = 0.0
    """Stop, saved and resumable, after this many seconds; 0 is off."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run directory."""
    wandb: bool = False
    """Also log to Weights & Biases."""
    quiet: bool = False
    """Print warnings and errors only."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the hidden layers; parameters, losses and optimizer stay float32."""
    compile_cache: bool = True
    """Keep compiled programs in the user's cache folder for the next run."""
    benchmark: bool = False
    """Measure only: no run directory, evaluation or checkpoint, and one line of JSON at the end."""

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; each algorithm's `steps_per_update` says how long one is."""
        return math.ceil(self.total_timesteps / self.steps_per_update)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Flags that a resumed run cannot change."""
        return ("seed",)

    @property
    def dispensable(self) -> tuple[str, ...]:
        """Beginnings of the names of state arrays without which a checkpoint still loads; they start from zero."""
        return ()

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Beginnings of the names of state arrays that checkpoints leave out."""
        return ()

    @property
    def dtype(self) -> str | None:
        """Type of the hidden layers' arithmetic, for flax."""
        return None if self.precision == "float32" else self.precision

    def __post_init__(self):
        _check_types(self)
        check(self, "total_timesteps log_interval eval_episodes", at_least=1)
        check(self, "eval_interval checkpoint_interval keep_checkpoints stop_after max_seconds", at_least=0)
        check(self, "seed", at_least=0, at_most=2**31 - 1 - self.num_seeds)
        if self.resume and self.init_from:
            raise UsageError("--resume continues a run and --init-from starts one: give only one of them")
        if self.resume and self.overwrite:
            raise UsageError("--overwrite would delete what --resume continues: give only one of them")
        keeping = "resume", "run_dir", "tensorboard", "wandb", "keep_best", "gif"
        if self.benchmark and any(getattr(self, name) for name in keeping):
            flags = ", ".join("--" + name.replace("_", "-") for name in keeping)
            raise UsageError(f"--benchmark keeps nothing: leave out {flags}")
        if self.resume and self.run_dir != self.resume:
            raise UsageError(
                f"--resume {self.resume} goes on in its own directory: leave out --run-dir; "
                f"from Python, take the run's flags with Args.from_run({self.resume!r})"
            )

    @classmethod
    def from_run(cls, run_dir: str | Path, **overrides: Any):
        """The flags to resume `run_dir` with, changed by `overrides`.

        Raises UsageError where there is no run, or where `overrides` does not name the environment again although it is
        the user's own code: a run directory is data, it does not decide which code is imported.
        """
        stored = read_config(run_dir)["args"]
        known = {field.name for field in dataclasses.fields(cls)}
        stored = {name: value for name, value in stored.items() if name in known and name not in ONE_TIME}
        stored |= {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
        if is_custom(stored["env"]) and "env" not in overrides:
            raise UsageError(
                f"{run_dir} was trained on your own environment {stored['env']}; to resume, name it again: "
                f"--env {stored['env']}"
            )
        return cls(**stored | overrides | {"resume": str(run_dir), "run_dir": str(run_dir)})


@dataclass(kw_only=True)
class DeviceEnvArgs(RunArgs):
    """Flags of algorithms whose environments step on the devices too."""

    num_seeds: int = 1
    """Independent agents trained together, with seeds seed, seed + 1, ..."""
    gif: bool = False
    """At the end, play an episode with the final policy and draw it to policy.gif in the run directory."""
    env: str = "CartPole-v1"
    """Environment: a gymnax id, or package.module:factory importable from the working directory."""
    num_devices: int = 0
    """Devices to train on; 0 is every accelerator, or on a CPU as many cores as pay off."""
    num_envs: Count = 32
    """Parallel environments."""

    def __post_init__(self):
        super().__post_init__()
        check(self, "num_seeds num_envs", at_least=1)
        check(self, "num_devices", at_least=0)


ONE_TIME = ("resume", "run_dir", "init_from", "overwrite", "stop_after", "max_seconds", "benchmark", "quiet")
"""Flags of one invocation, not taken over by --resume."""


def check(args: Any, names: str, at_least=-math.inf, at_most=math.inf, above=-math.inf) -> None:
    """Raise UsageError unless each of the named numbers (or each of its elements) is finite and within the bounds."""
    for name in names.split():
        value = getattr(args, name)
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if at_least <= number <= at_most and number > above and math.isfinite(number):
                continue
            bounds = [("at least", at_least), ("at most", at_most), ("greater than", above)]
            rules = [f"{words} {bound}" for words, bound in bounds if math.isfinite(bound)]
            rules += [] if math.isfinite(number) and rules else ["finite"]
            raise UsageError(f"--{name.replace('_', '-')} must be {' and '.join(rules)}, got {number}")


def read_config(run_dir: str | Path) -> dict[str, Any]:
    """`config.json` of a run. Raises UsageError where `run_dir` is not one."""
    path = Path(run_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
        names = config["args"]["env"] + config["algorithm"] + str(config.get("script"))
        if not names.isprintable():  # they are shown on terminals
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        missing = isinstance(error, OSError) and not os.path.exists(run_dir)
        reason = "does not exist" if missing else "has no readable config.json"
        raise UsageError(f"{run_dir} is not a run directory: it {reason}") from error
    return config


def parse(args_class: type, argv: list[str] | None = None) -> Any:
    """Arguments of a script from its command line. Prints and exits with 0 for --help, with 2 for a usage error."""
    program = None  # the name of the script
    if argv is None:
        argv = sys.argv[1:]
        module = sys.modules["__main__"].__spec__
        program = f"python -m {module.name}" if module else None
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it is closed
            stream.reconfigure(errors="replace")  # where it has no ±
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))  # nothing to save until a run begins
        if hasattr(signal, "SIGPIPE") and "--help" in argv:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in `--help | head`
    try:
        _refuse_old_spellings(args_class, argv)
        return tyro.cli(args_class, args=argv, default=_resume_defaults(args_class, argv), prog=program)
    except UsageError as error:
        raise SystemExit(fail(str(error), 2)) from None


def main(train: Callable[[Any], Any], args: Any) -> int:
    """Train and return the exit code: 0 finished or stopped, 1 failed, 2 bad usage, 130 SIGINT, 143 SIGTERM."""
    try:
        train(args)
    except UsageError as error:
        return fail(str(error), 2)
    except TrainingError as error:
        return fail(str(error), 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS):
            raise
        return fail(f"{error}; saved checkpoints are intact", 1)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return fail(f"the device has not enough memory for these sizes: {str(error).splitlines()[0]}", 1)
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code
    return 0


OLD_SPELLINGS = {
    "normalize-rewards": "--normalize-returns, which is on by default, takes its place",
    "reward-scale": "with --normalize-returns, which is on by default, the scale of rewards does not matter",
}
"""Flags that algorithms once had, and what to do instead."""


def _refuse_old_spellings(args_class: type, argv: list[str]) -> None:
    for word in argv:
        name = word.split("=")[0].replace("_", "-").removeprefix("--").removeprefix("no-")
        if word.startswith("--") and name in OLD_SPELLINGS and not hasattr(args_class, name.replace("-", "_")):
            raise UsageError(f"--{name} is gone: {OLD_SPELLINGS[name]}")


def _resume_defaults(args_class: type, argv: list[str]) -> Any:
    """The resumed run's flags, as defaults that explicit flags override; None without --resume."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = dict(zip(words, words[1:], strict=False))  # of a repeated flag the last counts
    if "--resume" not in given or not issubclass(args_class, RunArgs):
        return None
    explicit_env = {"env": given["--env"]} if "--env" in given else {}
    return args_class.from_run(given["--resume"], **explicit_env)


def _check_types(args: Any) -> None:
    """Raise UsageError where a value does not have its field's type; whole floats become integers (`1e6`)."""
    for field in dataclasses.fields(args):
        flag = "--" + field.name.replace("_", "-")
        setattr(args, field.name, _typed(flag, getattr(args, field.name), field.type))


def _typed(flag: str, value: Any, kind: Any) -> Any:
    if type(None) in get_args(kind):
        return None if value is None else _typed(flag, value, get_args(kind)[0])
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{flag} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if kind in (int, Count):
        return _whole(flag, value)
    if get_origin(kind) is tuple:
        if not isinstance(value, (tuple, list)):
            raise UsageError(f"{flag} must be a sequence of whole numbers, got {value!r}")
        if not value:
            raise UsageError(f"{flag} needs at least one number")
        return tuple(_whole(flag, number) for number in value)
    if kind is float and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise UsageError(f"{flag} must be a number, got {value!r}")
    if kind in (bool, str) and not isinstance(value, kind):
        raise UsageError(f"{flag} must be a {kind.__name__}, got {value!r}")
    return value


def _whole(flag: str, value: Any) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value != int(value)
    ):
        raise UsageError(f"{flag} must be a whole number, got {value!r}")
    return int(value)
