"""Flags of algorithms whose environments step on the devices too, and of those that learn from rollouts of them."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from common.cli.checks import Count, CountOrZero, divisors_near, flag_of, multiples_near
from common.cli.errors import UsageError
from common.cli.population_flags import PbtArgs
from common.cli.run_flags import ProcessArgs


@dataclass(kw_only=True)
class DeviceEnvArgs(ProcessArgs, PbtArgs):
    """Those of agents, devices and environments. Sizes and --num-devices count over all processes."""

    # environment
    env: str = "CartPole-v1"
    """Environment: a gymnax id, suite:id as brax:ant, or package.module:factory of your own; or on the host
    envpool:id or gymnasium:id, whose flags --help shows behind --env."""
    num_envs: Count = 32
    """Parallel environments, over all devices together."""

    # evaluation and checkpoints
    save_envs: bool = True
    """Environments in checkpoints; without them a resumed run begins new episodes, and is not an exact one."""
    gif: bool = False
    """Picture of an episode with the final policy: policy.gif in the run directory."""

    # devices and machines
    num_devices: CountOrZero = 0
    """Devices to train on; 0: every accelerator, or on a CPU as many cores as pay off."""
    sharding: Literal["pmap", "members"] = "pmap"
    """What devices share: the environments of every agent (pmap), or the agents (members). Both compute the same, up to
    rounding; members wait for those of other devices only to exchange weights."""

    envs_per_cpu_device: ClassVar[float] = 8
    """Environments per device below which another CPU device costs more than it brings (docs/ppo.md, "Devices")."""
    renewed: ClassVar[tuple[str, ...]] = tuple(f"actors/{x}" for x in ("env_state", "seen", "memory", "tracker"))

    @property
    def unsaved(self) -> tuple[str, ...]:
        return () if self.save_envs else self.renewed

    def __post_init__(self):
        super().__post_init__()
        if self.is_distributed and self.sharding != "pmap":
            raise UsageError(f"several processes train with --sharding pmap only, it is {self.sharding}")
        if self.sharding == "members" and self.num_agents == 1:
            raise UsageError(
                "--sharding members gives each device agents of its own, and there is one: see --population"
            )

    def sharing(self, num_devices: int) -> int:
        """How many of the devices share the environments of an agent."""
        return 1 if self.sharding == "members" else num_devices

    def groups(self, num_devices: int) -> int:
        """How many shares of the agents there are, one for each device, or one for all of them."""
        return num_devices if self.sharding == "members" else 1


def block_width(samples_per_env: int, num_minibatches: int) -> int:
    """Neighbouring environments that are shuffled together, so that all minibatches get equal parts of them."""
    return num_minibatches // math.gcd(samples_per_env, num_minibatches)


class RolloutArgs:
    """An update takes a rollout, and goes over it in epochs of minibatches; goes before a class of environments.

    The algorithm has the flag `num_steps`, and `update_epochs` and `num_minibatches` where it takes several steps.
    """

    update_epochs = num_minibatches = 1

    def check_divides(self, name: str, of: str) -> None:
        """Raise UsageError unless the flag called `name` is 0 or divides the one called `of`."""
        part, whole = getattr(self, name), getattr(self, of)
        if part and whole % part:
            near = ", ".join(divisors_near(part, whole, each=6))
            raise UsageError(f"{flag_of(name)} {part} does not divide {flag_of(of)} {whole}; nearest: {near}")

    @property
    def samples_per_env(self) -> int:
        """Parts of a rollout of an environment that minibatches may get."""
        return self.num_steps

    @property
    def block(self) -> int:
        """See `block_width`."""
        return block_width(self.samples_per_env, self.num_minibatches)

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.num_steps

    def __post_init__(self):
        super().__post_init__()
        if hasattr(self, "desired_kl"):
            self.check_needed("desired_kl", "lr_schedule", "kl-adaptive")
        if self.num_updates and self.num_envs % self.block:
            samples = self.num_envs * self.samples_per_env
            steps = f" x --num-steps {self.num_steps} = {samples:,}" if self.samples_per_env > 1 else ""
            raise UsageError(
                f"--num-minibatches {self.num_minibatches} does not divide --num-envs {self.num_envs}{steps}: take "
                f"--num-minibatches {' or '.join(divisors_near(self.num_minibatches, samples, each=1))}, or "
                f"--num-envs {multiples_near(self.num_envs, self.block)}"
            )

    def sizes(self, num_devices: int) -> list[str]:
        """The derived sizes, for the header of a run."""
        samples = (
            f"{self.num_envs} envs ({self.num_envs // self.sharing(num_devices)} per device) x {self.num_steps} steps"
        )
        minibatch = self.steps_per_update // self.num_minibatches
        return [
            f"{samples} = {self.steps_per_update:,} per update, {self.num_updates:,} updates",
            f"{self.update_epochs} epochs x {self.num_minibatches} minibatches of {minibatch:,}",
        ]


@dataclass(kw_only=True)
class DeviceRolloutArgs(RolloutArgs, DeviceEnvArgs):
    """Flags of environments on the devices that are collected in rollouts."""

    # environment
    decorrelate: bool = False
    """Start of every environment at a random phase of its episode, by random actions before the first update."""
    reset_pool: CountOrZero = 0
    """Initial states shared by all resets of an update, for environments with slow resets; 0: each makes its own."""


@dataclass(kw_only=True)
class GameArgs(DeviceRolloutArgs):
    """Who plays the others in games of several players."""

    # games and teams
    opponent: Literal["random", "self", "members"] = "random"
    """Opponents in games: random, self-play against one of eight past policies, or another member of the --population,
    in teams as a partner. Each update draws anew; evaluations are against random opponents."""
    opponent_interval: Count = 30
    """Updates between two policies that --opponent self adds to the past ones."""

    def __post_init__(self):
        super().__post_init__()
        self.check_needed("opponent_interval", "opponent", "self")
        if self.opponent == "members" and self.population < 2:
            raise UsageError(f"--opponent members needs a --population of 2 or more members, not {self.population}")
        if self.opponent == "members" and self.sharding != "pmap":  # where devices see their own members alone
            raise UsageError(f"--opponent members needs --sharding pmap, it is {self.sharding}")
