"""Flags that every algorithm shares, and the ways to make flags: from a table of tuned ones, or
from a run.
"""

import copy
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from tyro.constructors import PrimitiveConstructorSpec

from pmaprl.cli.checks import (
    LARGEST,
    Bounds,
    Count,
    CountOrZero,
    Finite,
    Seconds,
    Steps,
    StepsOrZero,
    check_flags,
    flag_of,
)
from pmaprl.cli.env_flags import is_custom, named_by_text
from pmaprl.cli.errors import UsageError, shortened
from pmaprl.cli.files import ALGOS, Entry, find_entry, read_config

ONE_TIME = (
    "resume",
    "run_dir",
    "init_from",
    "overwrite",
    "stop_after",
    "max_seconds",
    "benchmark",
    "quiet",
)
ONE_TIME += ("resume_or_start", "list_envs", "tuned", "distributed")
"""Flags of one invocation, not taken over by --resume."""
MEANING = (
    "activation",
    "image_scale",
    "weight_norm",
    "squash_log_std",
    "log_std_min",
    "critic_limit",
)
MEANING += (
    "byte_max",
    "distribution",
    "v_min",
    "v_max",
)  # flags that decide what parameters mean, but not their shapes
MAX_PROCESSES = 4096  # more are a slip of the finger, for which the first one would take gigabytes


def optional_word(metavar: str, bare: str) -> Any:
    """The type of a text that may be left out behind its flag, which is `bare` then."""

    def read(words: list[str]) -> str:
        return " ".join(words) or bare

    return Annotated[
        str, PrimitiveConstructorSpec("*", f"[{metavar}]", read, lambda value: True, lambda x: [x])
    ]


Suite = optional_word("SUITE", bare="all")
Meeting = optional_word("HOST:PORT,ID/COUNT", bare="auto")


def read_meeting(text: str) -> tuple[str, int, int]:
    """Read --distributed HOST:PORT,ID/COUNT: the address of process 0, their number, the own ID."""
    flag = f"--distributed {shortened(text)}"
    found = re.fullmatch(r"(.+):([0-9]{1,5}),([0-9]{1,9})/([0-9]{1,9})", text)
    host, port, own, count = (found[1], *map(int, found.groups()[1:])) if found else ("", 0, 0, 0)
    if not 0 < port < 2**16:
        raise UsageError(f"{flag} is not of the form HOST:PORT,ID/COUNT, such as 10.0.0.1:1234,0/2")
    if not own < count <= MAX_PROCESSES:
        raise UsageError(
            f"{flag}: the last ID is COUNT - 1, and COUNT is at most {MAX_PROCESSES:,}"
        )
    return f"{host}:{port}", count, own


class Members(NamedTuple):
    """Seeds and swept values of the agents, an entry for each."""

    seed: Any  # list or array of whole numbers
    member_values: dict[str, Any]  # lists or arrays of the flags in which they differ


class ArgsFactory:
    """The ways to make the flags of an algorithm other than by naming each."""

    # Algorithm of the kit whose tuned flags and recipes serve a file without its own
    tuned_like: ClassVar[str] = ""
    # What stands behind an environment's name in algos/tuned/, of flags of a recipe
    variant: ClassVar[str] = ""

    @classmethod
    def at(cls, env: str = "", recipe: str = "") -> type:
        """The class of the flags for `env` and a recipe."""
        return cls

    @classmethod
    def for_env(cls, env: str, **overrides: Any):
        """The flags that were tuned for `env`, if there are any, changed by `overrides`."""
        args_class = cls.at(env, overrides.get("recipe", ""))
        entry = args_class.tuned_entry(env)
        return args_class(
            **(entry.flags | {"tuned": True} if entry else {}) | {"env": env} | overrides
        )

    @classmethod
    def from_run(cls, run_dir: str | Path, **overrides: Any):
        """The flags to resume `run_dir` with, changed by `overrides`."""
        config = read_config(run_dir)
        args_class = cls.at(overrides.get("env") or config["args"]["env"])
        flags = args_class.stored_flags(run_dir, **overrides)
        try:
            return args_class(**flags)
        except UsageError as error:
            raise UsageError(f"{run_dir}, which {config['algorithm']} has made: {error}") from error

    @classmethod
    def tuned_entry(cls, env: str) -> Entry | None:
        """Find what was tuned for `env`, in the table beside the algorithm's file or beside the one
        it was copied from.

        Raises UsageError where its own table has flags or values that the algorithm does not take.
        """
        known = cls.lasting_flags() - {"env", "seed"}
        entry = cls.entry_in("tuned", env + cls.variant, known)
        if entry:
            try:
                cls(**entry.flags | {"env": env})
            except UsageError as error:
                raise UsageError(f"{entry.path}, {entry.pattern}: {error}") from error
        return entry

    @classmethod
    def entry_in(cls, folder: str, name: str, known: set[str]) -> Entry | None:
        """Find the table for `name` in a `folder` beside the files with these flags, else beside
        those of the kit.

        Of the latter only the `known` flags are taken: a copy of an algorithm may have lost some.
        """
        for script in cls.scripts():
            if (script.parent / folder / f"{script.stem}.toml").exists():
                return find_entry(script, folder, name, known)
        return find_entry(ALGOS / f"{cls.tuned_like}.py", folder, name, known, are_all_known=False)

    @classmethod
    def stored_flags(cls, run_dir: str | Path, **overrides: Any) -> dict[str, Any]:
        """Read the flags of a run, unchecked, whichever algorithm has made it."""
        known = cls.lasting_flags()
        stored = read_config(run_dir)["args"]
        if is_custom(stored["env"]) and "env" not in overrides:
            raise UsageError(
                f"{run_dir} was trained on your own environment: name it again, --env "
                f"{stored['env']}"
            )
        check_params_of_run(run_dir, stored, overrides)
        kept = {
            name: tuple(x) if isinstance(x, list) else x
            for name, x in stored.items()
            if name in known
        }
        return kept | overrides | {"resume": str(run_dir), "run_dir": str(run_dir)}

    @classmethod
    def lasting_flags(cls) -> set[str]:
        """The names of all flags but those of one invocation."""
        return {field.name for field in dataclasses.fields(cls)}.difference(ONE_TIME)

    @classmethod
    def scripts(cls) -> list[Path]:
        """The files with these flags: where they and those that they derive from are defined, and
        the one that runs.
        """
        names = [*(base.__module__ for base in cls.__mro__), "__main__"]
        files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
        return [Path(file).resolve() for file in files if file]


@dataclass(kw_only=True)
class RunArgs(ArgsFactory):
    """Flags of every algorithm. Sizes and intervals count environment steps over all devices
    together.
    """

    # Intervals where no flag names one, in a run that is not long: see
    # common/pmaprl/runs/intervals.py
    least_log_interval: ClassVar[int] = 10_000
    least_eval_interval: ClassVar[int] = 100_000  # and that of checkpoints
    # Of the run, each with the same command, as far as is known: see `among`
    processes: ClassVar[int] = 1
    coordinator = ""  # where they meet, and which one this is, if --distributed says it
    process_id = -1
    sharding = "pmap"  # a flag of environments on the devices

    # environment
    env: str
    env_params: str = ""
    """Change parameters of the environment: a JSON object, such as '{"max_steps_in_episode":
    200}'.
    """
    byte_max: Annotated[int, Bounds(at_least=0, at_most=255)] = 0
    """Largest value of bytes in observations, by which networks divide them; 0: the bound of their
    space."""
    tuned: bool = False
    """Start from the flags tuned for this environment in algos/tuned/, if there are any (default:
    on).
    """
    list_envs: Suite = ""
    """List the environments, or those of one suite, and train nothing."""

    # run
    seed: CountOrZero = 0
    """Random seed of the first agent."""
    total_timesteps: Steps = 500_000
    """Environment steps to train for, rounded up to whole updates."""
    run_dir: str = ""
    """Directory of the run (default: runs/<env>__<algo>__<seed>__<time>)."""
    resume: str = ""
    """Continue the run in this directory exactly, with its flags; flags given here override
    them.
    """
    resume_or_start: bool = False
    """Continue the run in --run-dir, or start it if there is none (for requeued cluster jobs)."""
    init_from: str = ""
    """Start a new run from the parameters and normalizers of this run."""
    overwrite: bool = False
    """Delete an existing run in --run-dir first; files that are not a run's stay."""
    stop_after: StepsOrZero = 0
    """Stop, saved and resumable, once the run has this many steps; schedules still run to
    --total-timesteps; 0: off."""
    max_seconds: Seconds = 0.0
    """Stop, saved and resumable, after this many seconds, but not before some training is done; 0:
    off."""
    stop_at_return: Finite | None = None
    """End training once an evaluation reaches this return (mean over seeds, best member of a
    population).
    """
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the hidden layers; parameters, losses and optimizer stay float32."""
    benchmark: bool = False
    """Measure the speed only: no run directory, evaluation or checkpoint, and one line of JSON at
    the end.
    """

    # evaluation and checkpoints
    eval_interval: StepsOrZero | None = None
    """Environment steps between greedy evaluations; 0: at the end only; None: 100,000 (5,000 with a
    replay buffer), in long runs a hundredth of the run.
    """
    eval_episodes: Count = 128
    """Episodes per evaluation."""
    checkpoint_interval: StepsOrZero | None = None
    """Environment steps between checkpoints; 0: at the end only; None: chosen as for
    evaluations.
    """
    keep_checkpoints: CountOrZero = 5
    """Newest checkpoints to keep; 0: all."""
    keep_best: bool = False
    """Save every state that is evaluated, and keep the one with the best evaluation (mean over
    seeds, best member of a population) beside the newest.
    """
    gif: bool = False
    """Draw an episode with the final policy: policy.gif in the run directory."""

    # logging
    log_interval: Steps | None = None
    """Environment steps between rows of the log; None: 10,000 (1,000 with a replay buffer), in long
    runs a 500th of the run, and on an accelerator at least eight updates.
    """
    log_info: tuple[str, ...] = ()
    """Log these entries of the environment's info: ENTRY as a mean, or ENTRY_sum, ENTRY_max,
    ENTRY_min, ENTRY_last."""
    tensorboard: bool = False
    """Write TensorBoard files to the run directory."""
    wandb: bool = False
    """Log to Weights & Biases, as its variables WANDB_PROJECT (default: pmaprl), WANDB_RUN_GROUP,
    WANDB_NAME ... say."""
    log_each: bool = False
    """Log every seed and member to TensorBoard and Weights & Biases too, beside their mean, or
    median and best.
    """
    quiet: bool = False
    """Print nothing but warnings and errors."""

    # devices and machines
    distributed: Meeting = ""
    """Train in several processes: those that Slurm, Open MPI, Kubernetes or a TPU pod has started,
    or, where no such system has, this one as process ID (from 0) of COUNT, which meet at HOST:PORT
    of process 0."""

    @property
    def fixed(self) -> tuple[str, ...]:
        """Flags that a resumed run keeps, as it does its batch; kl-adaptive has moved the learning
        rate.
        """
        adaptive = getattr(self, "lr_schedule", "") == "kl-adaptive"
        own = [name for name in ("recipe", "learning_starts", *MEANING) if name in vars(self)]
        return ("seed", *own, *["learning_rate"] * adaptive)

    @property
    def members(self) -> Members:
        """Seeds of all agents, and what they differ in."""
        return Members([self.seed], {})

    def flags_of_members(self) -> list[dict[str, Any]]:
        """The flags by which agents differ, as for a run of each alone."""
        seeds, member_values = self.members
        return [
            {"seed": seed} | {name: x[member] for name, x in member_values.items()}
            for member, seed in enumerate(seeds)
        ]

    def values_of(self, name: str) -> list[Any]:
        """A flag's value, or those of all members where they differ in it."""
        return self.members.member_values.get(name, [getattr(self, name)])

    @property
    def envs_per_update(self) -> int:
        """Environments that an update takes `num_steps` steps of; each has a ring of the replay
        buffer.
        """
        return self.num_envs

    @property
    def steps_per_update(self) -> int:
        """Environment steps of an update, over all devices."""
        return self.envs_per_update * self.num_steps

    @property
    def num_updates(self) -> int:
        size = self.steps_per_update
        updates = -(-self.total_timesteps // size)
        if size > LARGEST or updates > LARGEST:
            raise UsageError(
                f"--total-timesteps {self.total_timesteps:,}: at most {LARGEST:,} updates "
                "can be counted"
            )
        return updates

    @property
    def dtype(self) -> str | None:
        """Type of the hidden layers' arithmetic, for flax."""
        return None if self.precision == "float32" else self.precision

    def sizes(self, num_devices: int) -> list[str]:
        """The derived sizes, for the header of a run."""
        envs = f"{self.num_envs} envs ({self.num_envs // self.sharing(num_devices)} per device)"
        if self.num_steps == 1:
            return [f"{envs}, {self.num_updates:,} steps of each"]
        return [
            f"{envs} x {self.num_steps} steps = {self.steps_per_update:,} per update, "
            f"{self.num_updates:,} updates"
        ]

    def sharing(self, num_devices: int) -> int:
        """How many of the devices, or of a process's learner devices, share the environments of an
        agent.
        """
        return 1 if self.sharding == "members" else num_devices

    def among(self, count: int):
        """These flags for so many processes, which are known only once they have met."""
        args = copy.copy(self)
        args.processes = count
        args.__post_init__()
        return args

    def __post_init__(self):
        check_flags(self)
        if self.distributed not in ("", "auto"):
            self.coordinator, self.processes, self.process_id = read_meeting(self.distributed)
        if self.seed > (most := max(LARGEST - self.num_agents, 0)):
            raise UsageError(f"--seed must be at most {most:,}, got {self.seed:,}")
        if self.resume and self.init_from and not self.resume_or_start:
            raise UsageError(
                "--resume continues a run and --init-from starts one: give only one of them"
            )
        if self.resume_or_start and not self.run_dir:
            raise UsageError("--resume-or-start needs --run-dir: where the run is, or is to be")
        if self.overwrite and (going_on := self.non_default("resume_or_start resume")):
            raise UsageError(
                f"--overwrite would delete what {going_on[0]} continues: give only one of them"
            )
        keeping = self.non_default("resume run_dir tensorboard wandb keep_best gif stop_at_return")
        if self.benchmark and keeping:
            raise UsageError(
                f"--benchmark keeps and evaluates nothing: leave out {', '.join(keeping)}"
            )
        if self.log_each and not (self.tensorboard or self.wandb):
            raise UsageError(
                "--log-each needs --tensorboard or --wandb: metrics.jsonl has every seed anyway"
            )
        if self.stop_at_return is not None and self.eval_interval == 0:
            raise UsageError(
                "--stop-at-return needs evaluations on the way, and with --eval-interval 0 "
                "there are none"
            )
        if self.resume and self.run_dir != self.resume:
            raise UsageError(
                f"--resume {self.resume} goes on where it is; in Python: "
                f"Args.from_run({self.resume!r})"
            )

    def non_default(self, names: str) -> list[str]:
        """List those of the named flags, as they are typed, that do not have their default."""
        given = [
            name
            for name in names.split()
            if getattr(self, name, None) != getattr(type(self), name, None)
        ]
        return list(map(flag_of, given))

    def check_needed(self, names: str, of: str, *values: str) -> None:
        """Raise UsageError for a flag of `names` that does nothing, as the one called `of` has none
        of the `values`, or without `values` is a switch that is off.
        """
        given = self.non_default(names) + [
            flag_of(name) for name in names.split() if name in self.members.member_values
        ]
        if given and getattr(self, of) not in (values or (True,)):
            what = f" {' or '.join(values)}, it is {getattr(self, of)}" if values else ""
            raise UsageError(f"{given[0]} needs {flag_of(of)}{what}")


LONGEST_VALUE = 300  # characters
PARAMS = "env_params", "eval_env_params"


def check_params_of_run(
    run_dir: str | Path, stored: dict[str, Any], given: Iterable[str] = (), flag: str = ""
) -> None:
    """Raise UsageError where the flags that a run has stored name files or code that its
    environment would load.

    Nobody but the user names those.

    Args:
      run_dir: where the flags are stored.
      stored: the flags.
      given: flags that the user has named again.
      flag: the flag by which the user can do that, where it is not the same one.
    """
    for name in PARAMS:
        text = stored.get(name, "")
        if name not in given and (odd := named_by_text(stored["env"], text)):
            why = (
                f"says {flag_of(name)} {shortened(text)}, where {shortened(odd)!r} may "
                "name a file or code"
            )
            again = f"{flag or flag_of(name)} {shlex.quote(text)}"
            raise UsageError(f"{run_dir} {why}: if you trust that, name it again, {again}")


def differences(then: dict[str, Any], now: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Say which of the flags `names` differ between two runs."""
    then, now = (json.loads(json.dumps(x)) for x in (then, now))  # tuples are lists there
    changed = [name for name in names if name in then and name in now and now[name] != then[name]]
    both = {name: (brief_value(then[name]), brief_value(now[name])) for name in changed}
    return [f"{flag_of(name)}: {old} then, {new} now" for name, (old, new) in both.items()]


def brief_value(value: Any) -> str:
    """A flag's value in a sentence, or the beginning of a long one."""
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def flag_words(flags: dict[str, Any]) -> list[str]:
    """Names and values of flags as words, switches as `--name` or `--no-name`."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(flag_of(name if value else f"no_{name}"))
        else:
            words += [
                flag_of(name),
                *map(str, value if isinstance(value, tuple | list) else (value,)),
            ]
    return words


def as_command_line(flags: dict[str, Any]) -> str:
    """The same as one line for a shell."""
    return shlex.join(flag_words(flags))
