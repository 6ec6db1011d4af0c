"""Flags of algorithms that learn from a replay buffer, at an exact ratio to the environment steps."""

import math
from dataclasses import dataclass
from typing import ClassVar

from common.cli.checks import check
from common.cli.device_flags import DeviceEnvArgs
from common.cli.errors import UsageError
from common.cli.update_ratio import UpdateRatio


@dataclass(kw_only=True)
class ReplayArgs(DeviceEnvArgs):
    """An update is one step of every environment and the gradient updates that belong to it."""

    log_interval: int = 1_000
    """Environment steps between log rows."""
    eval_interval: int = 5_000
    """Environment steps between greedy evaluations; 0 evaluates at the end only."""
    checkpoint_interval: int = 5_000
    """Environment steps between checkpoints; 0 saves at the end only."""
    buffer_size: int = 1_000_000
    """Transitions that the replay buffer holds."""
    save_buffer: bool = True
    """Save the replay buffer in checkpoints; without it a resumed run first refills to --learning-starts."""
    learning_starts: int = 1_000
    """Environment steps with uniformly random actions before learning starts."""
    utd_ratio: float = 1.0
    """Gradient updates per environment step, exactly; fractions too."""
    batch_size: int = 256
    """Transitions per gradient update."""

    fixed: ClassVar[tuple[str, ...]] = ("seed", "learning_starts")
    dispensable: ClassVar[tuple[str, ...]] = ("shard/replay/",)

    @property
    def unsaved(self) -> tuple[str, ...]:
        return super().unsaved + (() if self.save_buffer else self.dispensable)

    @property
    def steps_per_update(self) -> int:
        return self.num_envs

    @property
    def block(self) -> int:
        """Neighbouring environments that contribute to a batch together; no device boundary cuts them."""
        return self.num_envs // math.gcd(self.num_envs, self.batch_size)

    @property
    def ratio(self) -> UpdateRatio:
        return UpdateRatio.of(self.utd_ratio, self.learning_starts)

    @property
    def capacity(self) -> int:
        """Slots of the replay buffer for each environment."""
        return self.buffer_size // self.num_envs

    def sizes(self, num_devices: int) -> list[str]:
        """The derived sizes, for the header of a run."""
        updates = self.ratio.due(self.num_updates * self.num_envs)
        return [
            f"{self.num_envs} envs ({self.num_envs // num_devices} per device), {updates:,} gradient updates "
            f"with batches of {self.batch_size} ({self.batch_size // num_devices} per device)"
        ]

    def __post_init__(self):
        super().__post_init__()
        check(self, "batch_size buffer_size", at_least=1)
        check(self, "learning_starts", at_least=0)
        check(self, "utd_ratio", above=0)
        if self.capacity * self.num_envs < self.batch_size:
            least = -(-self.batch_size // self.num_envs) * self.num_envs
            raise UsageError(
                f"--buffer-size {self.buffer_size} does not hold a batch: for --batch-size {self.batch_size} and "
                f"--num-envs {self.num_envs} it takes at least {least}"
            )
        self.ratio.check(self.num_updates * self.num_envs)
        if self.learning_starts >= self.total_timesteps:
            raise UsageError(
                f"--learning-starts {self.learning_starts} leaves nothing of --total-timesteps {self.total_timesteps}"
            )
