"""Flags of algorithms that learn from rollouts of environments on the devices."""

import math
from dataclasses import dataclass

from common.cli.checks import check, divisors_near, multiples_near
from common.cli.device_flags import DeviceEnvArgs
from common.cli.errors import UsageError


def block_width(samples_per_env: int, num_minibatches: int) -> int:
    """Neighbouring environments that are shuffled together, so that all minibatches get equal parts of them."""
    return num_minibatches // math.gcd(samples_per_env, num_minibatches)


@dataclass(kw_only=True)
class DeviceRolloutArgs(DeviceEnvArgs):
    """An update takes a rollout, and goes over it in epochs of minibatches.

    The algorithm has the flags `num_steps`, `update_epochs` and `num_minibatches`.
    """

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
        check(self, "num_steps update_epochs num_minibatches", at_least=1)
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
