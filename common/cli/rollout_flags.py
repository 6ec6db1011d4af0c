"""Flags of algorithms that learn from rollouts of environments on the devices."""

from dataclasses import dataclass

from common.cli.device_flags import DeviceEnvArgs


@dataclass(kw_only=True)
class DeviceRolloutArgs(DeviceEnvArgs):
    """An update takes a rollout, and goes over it in epochs of minibatches.

    The algorithm has the flags `num_steps`, `update_epochs` and `num_minibatches`.
    """

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.num_steps

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
