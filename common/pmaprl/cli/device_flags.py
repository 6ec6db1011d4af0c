"""Flags of rollouts and of replay buffers, and of environments that step on the devices."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from pmaprl.cli.checks import (
    LARGEST,
    Count,
    CountOrZero,
    Ratio,
    Steps,
    check_atoms,
    check_multiple,
    divisors_near,
    flag_of,
    multiples_near,
)
from pmaprl.cli.errors import UsageError
from pmaprl.cli.population_flags import PbtArgs


@dataclass(kw_only=True)
class DeviceEnvArgs(PbtArgs):
    """Flags of agents, devices and environments. Sizes and --num-devices count over all
    processes.
    """

    # environment
    env: str = "CartPole-v1"
    """Environment: a gymnax id, suite:id as brax:ant, or package.module:factory of your own; or
    envpool:ID, gymnasium:ID, stepped on the CPU; put --env before --help to see their flags.
    """
    num_envs: Count = 32
    """Environments stepped together, over all devices."""

    # evaluation and checkpoints
    save_envs: bool = True
    """Save environments in checkpoints; without them a resumed run begins new episodes, and is not
    an exact one.
    """

    # devices and machines
    num_devices: CountOrZero = 0
    """Devices to train on; 0: choose: all accelerators that divide --num-envs, or on a CPU as many
    cores as help.
    """
    sharding: Literal["pmap", "members"] = "pmap"
    """pmap: split each agent's environments over devices; members: give each device whole
    agents."""

    opponent: ClassVar[str] = "random"  # where there is no flag for it
    # Below, another one costs more than it brings (docs/ppo.md, "Devices")
    envs_per_cpu_device: ClassVar[float] = 8

    def __post_init__(self):
        super().__post_init__()
        if self.distributed and self.sharding != "pmap":
            raise UsageError(
                f"several processes train with --sharding pmap only, it is {self.sharding}"
            )
        if self.sharding == "members" and self.num_agents == 1:
            raise UsageError(
                "--sharding members shares agents between devices, and there is one: see "
                "--population"
            )


def block_width(samples_per_env: int, num_minibatches: int) -> int:
    """Neighbouring environments that are shuffled together, so that all minibatches get equal parts
    of them.
    """
    return num_minibatches // math.gcd(samples_per_env, num_minibatches)


class RolloutArgs:
    """An update takes a rollout, and goes over it in epochs of minibatches; goes before a class of
    environments.

    The algorithm has the flag `num_steps`, and `update_epochs` and `num_minibatches` where it takes
    several steps.
    """

    update_epochs = num_minibatches = 1

    def check_divides(self, name: str, of: str) -> None:
        """Raise UsageError unless the flag called `name` is 0 or divides the one called `of`."""
        part = getattr(self, name)
        whole = getattr(self, of)
        if part and whole % part:
            given = f"{flag_of(name)} {part}"
            near = divisors_near(part, whole)
            raise UsageError(f"{given} does not divide {flag_of(of)} {whole}; nearest: {near}")

    @property
    def samples_per_env(self) -> int:
        """Parts of a rollout of an environment that minibatches may get."""
        return self.num_steps

    @property
    def block(self) -> int:
        return block_width(self.samples_per_env, self.num_minibatches)

    def __post_init__(self):
        super().__post_init__()
        self.check_needed("desired_kl", "lr_schedule", "kl-adaptive")
        if self.num_updates and self.num_envs % self.block:
            samples = self.num_envs * self.samples_per_env
            steps = (
                f" x --num-steps {self.num_steps} = {samples:,}" if self.samples_per_env > 1 else ""
            )
            raise UsageError(
                f"--num-minibatches {self.num_minibatches} does not divide --num-envs "
                f"{self.num_envs}{steps}: take "
                f"--num-minibatches {divisors_near(self.num_minibatches, samples)}, or "
                f"--num-envs {multiples_near(self.num_envs, self.block)}"
            )

    def sizes(self, num_devices: int) -> list[str]:
        minibatch = self.steps_per_update // self.num_minibatches
        learning = (
            f"{self.update_epochs} epochs x {self.num_minibatches} minibatches of {minibatch:,}"
        )
        return [*super().sizes(num_devices), learning]


@dataclass(kw_only=True)
class DeviceRolloutArgs(RolloutArgs, DeviceEnvArgs):
    """Flags of environments on the devices that are collected in rollouts."""

    # environment
    decorrelate: bool = False
    """Take random actions before the first update, so that episodes do not end in lockstep."""
    reset_pool: CountOrZero = 0
    """For slow resets: make this many initial states per update, from which all resets draw; 0:
    each reset makes its own.
    """


@dataclass(kw_only=True)
class GameArgs(DeviceRolloutArgs):
    """Flags of games: who plays the others."""

    # games and teams
    opponent: Literal["random", "self", "members"] = "random"
    """Opponents in games, drawn anew for each update: random, one of eight past policies (self), or
    another member of the --population (members), in teams as a partner; evaluations are against
    random ones."""
    opponent_interval: Count = 30
    """Updates after which --opponent self adds the current policy to the past ones."""

    def __post_init__(self):
        super().__post_init__()
        self.check_needed("opponent_interval", "opponent", "self")
        if self.opponent == "members" and self.population < 2:
            raise UsageError(
                "--opponent members needs a --population of 2 or more members, not "
                f"{self.population}"
            )
        # Where devices see their own members alone
        if self.opponent == "members" and self.sharding != "pmap":
            raise UsageError(f"--opponent members needs --sharding pmap, it is {self.sharding}")


@dataclass(kw_only=True)
class ReplayArgs:
    """Flags of the buffer, to go before a class that says where the environments step."""

    least_log_interval: ClassVar[int] = 1_000
    least_eval_interval: ClassVar[int] = 5_000

    # evaluation and checkpoints
    save_buffer: bool = True
    """Save the replay buffer in checkpoints; without it a resumed run first refills it up to
    --learning-starts.
    """

    # replay buffer
    buffer_size: Count = 1_000_000
    """Transitions in the replay buffer."""
    batch_size: Count = 256
    """Transitions per gradient update."""
    learning_starts: CountOrZero = 1_000
    """Environment steps with uniformly random actions before learning starts."""
    hold_random: Count = 1
    """Steps for which an environment repeats each random action before --learning-starts; more
    explore further."""
    utd_ratio: Ratio = 1.0
    """Gradient updates per environment step (update-to-data ratio), such as 0.25 or 2."""

    normalize_rewards = False  # flags of algorithms that have them
    n_steps = 1

    @property
    def block(self) -> int:
        """Neighbouring environments that contribute to a batch together; no device boundary cuts
        them.
        """
        envs = self.envs_per_update // self.batch_rollouts
        return envs // math.gcd(envs, self.batch_size // self.replay_partitions)

    @property
    def capacity(self) -> int:
        """Slots of each of the buffer's rings; a ring has transitions of one environment at a
        time.
        """
        return self.buffer_size // self.envs_per_update

    def __post_init__(self):
        super().__post_init__()
        if self.capacity * self.envs_per_update < self.batch_size:
            least = -(-self.batch_size // self.envs_per_update) * self.envs_per_update
            raise UsageError(
                f"--buffer-size {self.buffer_size} does not hold --batch-size "
                f"{self.batch_size}: at least {least}"
            )
        if math.prod(Fraction(str(self.utd_ratio)).as_integer_ratio()) > LARGEST:
            raise UsageError(
                f"--utd-ratio {self.utd_ratio} is too fine to count exactly: round it to "
                "four digits"
            )
        transitions = self.num_updates * self.steps_per_update
        if transitions > LARGEST:
            raise UsageError(f"--total-timesteps must be at most {LARGEST:,}, got {transitions:,}")
        if not 0 < (due := self.updates_due(transitions)) <= LARGEST:
            steps = (
                f"{self.learning_starts:,} (--learning-starts) to {transitions:,} "
                "(--total-timesteps)"
            )
            raise UsageError(
                f"--utd-ratio {self.utd_ratio} makes {due:,} gradient updates in the steps "
                f"from {steps}: "
                f"at least 1, at most {LARGEST:,} can be counted"
            )
        shares = (
            f"--num-devices {self.num_devices}"
            if self.num_devices
            else f"{self.processes} processes"
        )
        check_multiple(
            "--batch-size",
            self.batch_size,
            self.sharing(self.num_devices or self.processes),
            shares,
        )
        least = self.n_steps * self.envs_per_update
        if self.n_steps > 1 and min(self.learning_starts, self.buffer_size) < least:
            raise UsageError(
                f"--n-steps {self.n_steps} needs --learning-starts and --buffer-size of at "
                f"least {least}"
            )
        if self.num_steps > self.capacity:
            raise UsageError(
                f"--num-steps {self.num_steps} is more than --buffer-size holds of each: "
                f"{self.capacity}"
            )

    def check_atoms(self, low: float, high: float, count: int, flags: str) -> None:
        """Raise UsageError, naming the `flags`, unless float32 tells so many returns from `low` to
        `high` apart.
        """
        check_atoms(low, high, count, flags)

    def sizes(self, num_devices: int) -> list[str]:
        batches = (
            f"batches of {self.batch_size} "
            f"({self.batch_size // self.sharing(num_devices)} per device)"
        )
        updates = self.updates_due(self.num_updates * self.steps_per_update)
        return [*super().sizes(num_devices), f"{updates:,} gradient updates with {batches}"]

    def updates_due(self, transitions: Any) -> Any:
        """Gradient updates due in all once so many `transitions` were stored; an integer or an
        array of them.
        """
        # 0.3 means exactly 3 per 10
        numerator, denominator = Fraction(str(self.utd_ratio)).as_integer_ratio()
        learned = transitions - self.learning_starts
        learned = learned * (learned > 0)
        whole = learned // denominator  # the product may not fit into 32 bits
        rest = learned % denominator
        return whole * numerator + rest * numerator // denominator


@dataclass(kw_only=True)
class DeviceReplayArgs(ReplayArgs, DeviceEnvArgs):
    """An update is one step of every environment and the gradient updates that belong to it."""

    total_timesteps: Steps = 15_000
    num_envs: Count = 1

    num_steps = batch_rollouts = replay_partitions = 1  # of one rollout, see `HostReplayArgs`
    envs_per_cpu_device: ClassVar[float] = math.inf  # one uses all cores for large networks
