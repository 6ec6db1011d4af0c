"""Flags of algorithms whose environments step on the devices too."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from common.cli.checks import Count, CountOrZero
from common.cli.errors import UsageError
from common.cli.pbt_flags import PbtArgs
from common.cli.process_flags import ProcessArgs


@dataclass(kw_only=True)
class DeviceEnvArgs(ProcessArgs, PbtArgs):
    """Those of agents, devices and environments. Sizes and --num-devices count over all processes."""

    # environment
    env: str = "CartPole-v1"
    """Environment: a gymnax id, suite:id as brax:ant, or package.module:factory of your own."""
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
