"""Flags that every algorithm shares, and those of a run that is resumed."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from common.cli.checks import LARGEST, Suite, check, check_types
from common.cli.config import read_config
from common.cli.env_names import is_custom
from common.cli.errors import UsageError
from common.cli.members import Members
from common.cli.tuned import Entry, find_entry


@dataclass(kw_only=True)
class RunArgs:
    """Flags of every algorithm. Sizes and intervals count environment steps over all devices together."""

    num_agents: ClassVar[int] = 1
    """Agents trained together."""
    is_population: ClassVar[bool] = False
    """Whether they may differ in more than their seeds: then the best one counts, and one that breaks stops none."""
    exchange_interval: ClassVar[int] = 0
    """Environment steps after which members exchange something."""
    gif: ClassVar[bool] = False
    sharding: ClassVar[str] = "pmap"
    """How programs come to several devices."""
    dispensable: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of state arrays without which a checkpoint still loads; they start from zero."""
    renewed: ClassVar[tuple[str, ...]] = ()
    """Likewise; they are made anew."""

    env: str
    tuned: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: --tuned, where there are such flags)")] = False
    """The flags that algos/tuned/ has for the environment, in place of defaults; other flags given here win."""
    list_envs: Suite = ""
    """Only print the environments that can be trained, or those of one suite."""
    env_params: str = ""
    """Environment parameters to change, as a JSON object, such as '{"max_steps_in_episode": 200}'."""
    seed: int = 0
    """Random seed of the first agent."""
    total_timesteps: int = 500_000
    """Environment steps to train for, rounded up to whole updates."""
    log_interval: int = 10_000
    """Environment steps between log rows."""
    log_info: tuple[str, ...] = ()
    """Entries of the environment's info to log: ENTRY as a mean, or ENTRY_sum, ENTRY_max, ENTRY_min, ENTRY_last."""
    eval_interval: int = 100_000
    """Environment steps between greedy evaluations; 0 evaluates at the end only."""
    eval_episodes: int = 128
    """Episodes per evaluation."""
    checkpoint_interval: int = 100_000
    """Environment steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = 5
    """Newest checkpoints to keep; 0 keeps all."""
    keep_best: bool = False
    """Also save and keep the checkpoint with the best evaluation (mean over seeds, best member of a population)."""
    run_dir: str = ""
    """Directory of the run; default runs/<env>__<algo>__<seed>__<time>."""
    resume: str = ""
    """Continue the run in this directory exactly; its flags are taken over, flags given here override them."""
    resume_or_start: bool = False
    """Continue the run in --run-dir if there is one, else start it there: for jobs that are queued again."""
    init_from: str = ""
    """Start from the parameters and normaliser of this run, at step 0."""
    overwrite: bool = False
    """Delete an existing run in --run-dir first; files by other names than those of a run stay."""
    stop_after: int = 0
    """Stop, saved and resumable, once this many environment steps are done in all; 0 is off."""
    max_seconds: float = 0.0
    """Stop, saved and resumable, after this many seconds, but not before some training is done; 0 is off."""
    stop_at_return: float | None = None
    """Finish, saved, once an evaluation (mean over seeds, best member of a population) reaches this return."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run directory."""
    wandb: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str = "pmaprl"
    """The run's project there."""
    wandb_group: str = ""
    """The run's group there; default none."""
    wandb_name: str = ""
    """The run's name there; default that of its directory."""
    quiet: bool = False
    """Print warnings and errors only."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the hidden layers; parameters, losses and optimizer stay float32."""
    compile_cache: bool = True
    """Keep compiled programs in the user's cache folder for the next run."""
    benchmark: bool = False
    """Measure only: no run directory, evaluation or checkpoint, and one line of JSON at the end."""

    @property
    def fixed(self) -> tuple[str, ...]:
        """Flags that a resumed run cannot change; kl-adaptive has moved the learning rate, and goes on from there."""
        return ("seed", *["learning_rate"] * (getattr(self, "lr_schedule", "") == "kl-adaptive"))

    @property
    def members(self) -> Members:
        """Seeds of all agents, and what they differ in."""
        return Members([self.seed], {})

    def flags_of_members(self) -> list[dict[str, Any]]:
        """The flags by which agents differ, as for a run of each alone."""
        seeds, hyper = self.members
        return [{"seed": seed} | {name: x[member] for name, x in hyper.items()} for member, seed in enumerate(seeds)]

    def values_of(self, name: str) -> list[Any]:
        """A flag's value, or those of all members where they differ in it."""
        return self.members.hyper.get(name, [getattr(self, name)])

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; each algorithm's `steps_per_update` says how long one is.

        Raises UsageError where the devices cannot count them.
        """
        size = self.steps_per_update
        updates = -(-self.total_timesteps // size)
        if size > LARGEST or updates > LARGEST:
            raise UsageError(
                f"--total-timesteps {self.total_timesteps:,} makes {updates:,} updates of {size:,} steps: "
                f"at most {LARGEST:,} of each can be counted"
            )
        return updates

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Beginnings of the names of state arrays that checkpoints leave out."""
        return ()

    @property
    def dtype(self) -> str | None:
        """Type of the hidden layers' arithmetic, for flax."""
        return None if self.precision == "float32" else self.precision

    def __post_init__(self):
        check_types(self)
        check(self, "total_timesteps log_interval", at_least=1, at_most=10**18)
        check(self, "eval_interval checkpoint_interval stop_after", at_least=0, at_most=10**18)
        check(self, "eval_episodes", at_least=1)
        check(self, "keep_checkpoints max_seconds", at_least=0)
        check(self, "seed", at_least=0, at_most=max(LARGEST - self.num_agents, 0))
        check(self, "stop_at_return")
        self._check_together()

    def _check_together(self) -> None:
        """Raise UsageError for flags that contradict each other, or of which one does nothing without the other."""
        if self.resume and self.init_from and not self.resume_or_start:
            raise UsageError("--resume continues a run and --init-from starts one: give only one of them")
        if self.resume_or_start and not self.run_dir:
            raise UsageError("--resume-or-start needs --run-dir: where the run is, or is to be")
        going_on = self._given("resume_or_start resume")
        if going_on and self.overwrite:
            raise UsageError(f"--overwrite would delete what {going_on[0]} continues: give only one of them")
        keeping = self._given("resume run_dir tensorboard wandb keep_best gif stop_at_return")
        if self.benchmark and keeping:
            raise UsageError(f"--benchmark keeps and evaluates nothing: leave out {', '.join(keeping)}")
        details = self._given("wandb_project wandb_group wandb_name")
        if details and not self.wandb:
            raise UsageError(f"{details[0]} needs --wandb")
        if self.stop_at_return is not None and not self.eval_interval:
            raise UsageError("--stop-at-return needs evaluations on the way, and with --eval-interval 0 there are none")
        if self.resume and self.run_dir != self.resume:
            raise UsageError(
                f"--resume {self.resume} goes on in its own directory: leave out --run-dir; "
                f"from Python, take the run's flags with Args.from_run({self.resume!r})"
            )

    def _given(self, names: str) -> list[str]:
        """Those of the named flags that do not have their default."""
        changed = [name for name in names.split() if getattr(self, name) != getattr(type(self), name)]
        return ["--" + name.replace("_", "-") for name in changed]

    @classmethod
    def for_env(cls, env: str, **overrides: Any):
        """The flags that were tuned for `env`, if there are any, changed by `overrides`."""
        return cls(**cls.tuned_flags(env) | overrides)

    @classmethod
    def tuned_flags(cls, env: str) -> dict[str, Any]:
        """The environment, and what was tuned for it, if anything was: then `tuned` is set."""
        entry = cls.tuned_entry(env)
        return (entry.flags | {"tuned": True} if entry else {}) | {"env": env}

    @classmethod
    def tuned_entry(cls, env: str) -> Entry | None:
        """What was tuned for `env`. Raises UsageError where it has flags or values that the algorithm does not take."""
        entry = find_entry(cls._scripts()[0], env)
        if entry is None:
            return None
        tunable = {field.name for field in dataclasses.fields(cls)} - {"env", "seed", *ONE_TIME}
        for name in entry.flags:
            if name not in tunable:
                raise UsageError(f"{entry.path} has {name} for {entry.pattern}, which is no flag to be tuned")
        try:
            cls(**entry.flags | {"env": env})
        except UsageError as error:
            raise UsageError(f"{entry.path}, {entry.pattern}: {error}") from error
        return entry

    @classmethod
    def from_run(cls, run_dir: str | Path, **overrides: Any):
        """The flags to resume `run_dir` with, changed by `overrides`.

        Raises UsageError where there is no run, or where `overrides` does not name the environment again although it is
        the user's own code: a run directory is data, it does not decide which code is imported.
        """
        return cls(**cls.stored_flags(run_dir, **overrides))

    @classmethod
    def stored_flags(cls, run_dir: str | Path, **overrides: Any) -> dict[str, Any]:
        """The same as a dictionary, as it stands in `config.json`: whether the values will do is not checked."""
        config = read_config(run_dir)
        algorithms = [script.stem for script in cls._scripts()]
        if config["algorithm"] not in algorithms:
            raise UsageError(f"{run_dir} was made by {config['algorithm']}, not by {algorithms[0]}")
        stored = config["args"]
        known = {field.name for field in dataclasses.fields(cls)}
        stored = {name: value for name, value in stored.items() if name in known and name not in ONE_TIME}
        stored |= {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
        if is_custom(stored["env"]) and "env" not in overrides:
            raise UsageError(
                f"{run_dir} was trained on your own environment {stored['env']}; to resume, name it again: "
                f"--env {stored['env']}"
            )
        return stored | overrides | {"resume": str(run_dir), "run_dir": str(run_dir)}

    @classmethod
    def _scripts(cls) -> list[Path]:
        """The files whose flags these are: where they or those that they derive from are defined or taken."""
        defining = [sys.modules.get(base.__module__) for base in cls.__mro__]
        taking = [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get("Args") is cls]
        files = [getattr(module, "__file__", None) for module in (*defining, *taking)]
        return [Path(file).resolve() for file in files if file]


ONE_TIME = ("resume", "run_dir", "init_from", "overwrite", "stop_after", "max_seconds", "benchmark", "quiet")
ONE_TIME += ("resume_or_start", "list_envs", "tuned", "distributed", "coordinator", "num_processes", "process_id")
"""Flags of one invocation, not taken over by --resume."""
