"""Flags of algorithms that learn from a replay buffer, at an exact ratio to the environment steps."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

from common.cli.checks import LARGEST, Count, CountOrZero, Ratio, Steps, StepsOrZero, multiples_near, readable
from common.cli.errors import UsageError
from common.cli.host_flags import ActorArgs, Size
from common.cli.rollout_flags import DeviceEnvArgs


class UpdateRatio(NamedTuple):
    """Gradient updates per environment step, from the end of the warm-up on."""

    numerator: int
    denominator: int
    learning_starts: int  # steps of the warm-up

    @classmethod
    def of(cls, utd_ratio: float, learning_starts: int) -> "UpdateRatio":
        """The ratio as the fraction that was meant: 0.3 is 3/10."""
        return cls(*Fraction(str(utd_ratio)).as_integer_ratio(), learning_starts)

    def due(self, transitions: Any) -> Any:
        """Gradient updates due in all once so many `transitions` were stored; an integer or an array of them."""
        learned = transitions - self.learning_starts
        learned = learned * (learned > 0)
        whole, rest = learned // self.denominator, learned % self.denominator  # the product may not fit into 32 bits
        return whole * self.numerator + rest * self.numerator // self.denominator

    def check(self, transitions: int) -> None:
        """Raise UsageError where counting up to so many `transitions` needs more than the devices' 32 bit integers."""
        if self.numerator * self.denominator > LARGEST:
            raise UsageError(
                f"--utd-ratio {self.numerator / self.denominator} is too fine to count exactly: "
                "round it to four digits or fewer"
            )
        if transitions > LARGEST:
            raise UsageError(f"--total-timesteps must be at most {LARGEST:,}, got {readable(transitions)}")
        if self.due(transitions) > LARGEST:
            ratio = self.numerator / self.denominator
            raise UsageError(f"--utd-ratio {ratio} asks for more than {LARGEST:,} gradient updates")


@dataclass(kw_only=True)
class ReplayArgs:
    """Those of the buffer, to go before a class that says where the environments step."""

    log_interval: Steps = 1_000
    eval_interval: StepsOrZero = 5_000
    checkpoint_interval: StepsOrZero = 5_000

    # evaluation and checkpoints
    save_buffer: bool = True
    """Replay buffer in checkpoints; without it a resumed run first refills it up to --learning-starts."""

    # replay buffer
    buffer_size: Count = 1_000_000
    """Transitions in the replay buffer."""
    batch_size: Count = 256
    """Transitions per gradient update."""
    learning_starts: CountOrZero = 1_000
    """Environment steps with uniformly random actions before learning starts."""
    hold_random: Count = 1
    """Steps for which an environment repeats a random action before --learning-starts; more explore further."""
    utd_ratio: Ratio = 1.0
    """Gradient updates per environment step (update-to-data ratio), exactly; fractions too."""

    dispensable: ClassVar[tuple[str, ...]] = ("actors/replay/",)

    @property
    def fixed(self) -> tuple[str, ...]:
        return (*super().fixed, "learning_starts")

    @property
    def unsaved(self) -> tuple[str, ...]:
        return super().unsaved + (() if self.save_buffer else self.dispensable)

    @property
    def num_rings(self) -> int:
        """Rings of the buffer, each with transitions of one environment at a time."""
        raise NotImplementedError

    @property
    def ratio(self) -> UpdateRatio:
        return UpdateRatio.of(self.utd_ratio, self.learning_starts)

    @property
    def capacity(self) -> int:
        """Slots of each ring."""
        return self.buffer_size // self.num_rings

    def __post_init__(self):
        super().__post_init__()
        if self.capacity * self.num_rings < self.batch_size:
            least = -(-self.batch_size // self.num_rings) * self.num_rings
            raise UsageError(
                f"--buffer-size {self.buffer_size} does not hold a batch: for --batch-size {self.batch_size} and "
                f"{self.num_rings} environments it takes at least {least}"
            )
        self.ratio.check(self.num_updates * self.steps_per_update)
        if self.learning_starts >= self.total_timesteps:
            raise UsageError(
                f"--learning-starts {self.learning_starts} leaves nothing of --total-timesteps {self.total_timesteps}"
            )
        if not self.ratio.due(self.num_updates * self.steps_per_update):
            steps = f"the steps from --learning-starts {self.learning_starts} to {self.total_timesteps}"
            raise UsageError(f"--utd-ratio {self.utd_ratio} makes no gradient update in {steps}")


@dataclass(kw_only=True)
class DeviceReplayArgs(ReplayArgs, DeviceEnvArgs):
    """An update is one step of every environment and the gradient updates that belong to it."""

    total_timesteps: Steps = 15_000
    num_envs: Count = 1

    envs_per_cpu_device: ClassVar[float] = math.inf  # one uses all cores for large networks

    @property
    def num_rings(self) -> int:
        return self.num_envs

    @property
    def steps_per_update(self) -> int:
        return self.num_envs

    @property
    def block(self) -> int:
        """Neighbouring environments that contribute to a batch together; no device boundary cuts them."""
        return self.num_envs // math.gcd(self.num_envs, self.batch_size)

    def __post_init__(self):
        super().__post_init__()
        name, parts = ("devices", self.num_devices) if self.num_devices else ("processes", self.num_processes)
        if parts > 0 and self.batch_size % self.sharing(parts):
            raise UsageError(
                f"--batch-size {self.batch_size} is split evenly over --num-{name} {parts}: take "
                f"{multiples_near(self.batch_size, parts)}"
            )

    def sizes(self, num_devices: int) -> list[str]:
        """The derived sizes, for the header of a run."""
        updates, sharing = self.ratio.due(self.num_updates * self.num_envs), self.sharing(num_devices)
        return [
            f"{self.num_envs} envs ({self.num_envs // sharing} per device), {updates:,} gradient updates "
            f"with batches of {self.batch_size} ({self.batch_size // sharing} per device)"
        ]


@dataclass(kw_only=True)
class HostReplayArgs(ReplayArgs, ActorArgs):
    """An update takes some rollouts of actors, and makes the gradient updates that belong to them."""

    total_timesteps: Steps = 30_000
    num_steps: Size = 8
    envs_per_actor: Size = 4

    # actors
    max_ahead: CountOrZero = 0
    """Environment steps under way until their update ends; 0: of two updates, or of one and a rollout per actor."""

    @property
    def num_rings(self) -> int:
        return self.batch_envs

    @property
    def rollouts_ahead(self) -> float:
        if self.fixed_order:
            return math.inf
        enough = self.batch_rollouts + max(self.batch_rollouts, self.num_actors)
        return (self.max_ahead // (self.envs_per_actor * self.num_steps) or enough) // self.processes

    def __post_init__(self):
        super().__post_init__()
        if self.max_ahead and self.fixed_order:
            raise UsageError("--lockstep and --serial fix how far actors are ahead: leave --max-ahead out")
        if self.max_ahead and self.max_ahead < self.steps_per_update:
            raise UsageError(
                f"--max-ahead {self.max_ahead} is less than an update learns from: at least {self.steps_per_update}"
            )
        if self.batch_size % self.processes:
            raise UsageError(
                f"--batch-size {self.batch_size} is split evenly over {self.processes} processes: take "
                f"{multiples_near(self.batch_size, self.processes)}"
            )
        if self.num_steps > self.capacity:
            raise UsageError(
                f"--num-steps {self.num_steps} does not fit into --buffer-size {self.buffer_size}, which has "
                f"{self.capacity} transitions of each of {self.num_rings} environments"
            )

    def check_split(self, num_learners: int) -> None:
        if self.batch_size // self.parts % num_learners:
            unit = num_learners * math.gcd(self.num_actor_devices, self.batch_rollouts)
            raise UsageError(
                f"--batch-size {self.batch_size} is split evenly over {num_learners} learner devices, each with a part "
                f"of what comes from each actor device: take {multiples_near(self.batch_size, unit)}"
            )
        super().check_split(num_learners)

    @property
    def parts(self) -> int:
        """Parts of the rollouts of an update, such as those from each actor device, that batches draw from apart.

        No boundary of processes cuts them.
        """
        return math.gcd(self.num_actor_devices, self.batch_rollouts, self.batch_size)

    @property
    def block(self) -> int:
        """Neighbouring environments that contribute to a batch together; no device boundary cuts them."""
        return self.envs_per_actor // math.gcd(self.envs_per_actor, self.batch_size // self.parts)

    def sizes(self, num_devices: int) -> list[str]:
        """The derived sizes, for the header of a run."""
        each = f"{self.envs_per_actor} envs x {self.num_steps} steps"
        rollouts = f"{self.batch_rollouts} rollouts of {each}" if self.batch_rollouts > 1 else f"a rollout of {each}"
        gradient_updates = self.ratio.due(self.num_updates * self.steps_per_update)
        return [
            f"{self.num_actors} actors x {self.envs_per_actor} envs = {self.num_envs} envs",
            f"{rollouts} = {self.steps_per_update:,} per update, {self.num_updates:,} updates",
            f"up to {gradient_updates:,} gradient updates with batches of {self.batch_size}",
        ]
