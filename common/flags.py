"""What the flags of an algorithm are written with: their types, and the flags that algorithms share.

Imports nothing slow, so that --help answers at once.
"""

from common.cli.startup import imports_of_a_script

with imports_of_a_script():  # most of the time until a command has read its flags
    from common.cli.checks import (
        AdamBeta,
        Bounds,
        Count,
        CountOrZero,
        Counts,
        Discount,
        Finite,
        Fraction,
        Layers,
        NonNegative,
        Positive,
        Ratio,
        Scale,
        Share,
        Steps,
        Temperature,
    )
    from common.cli.command import main, parse
    from common.cli.device_flags import DeviceReplayArgs, DeviceRolloutArgs, GameArgs
    from common.cli.errors import UsageError
    from common.cli.host_flags import ActorArgs, FlagsByPlace, HostReplayArgs, HostRolloutArgs


class OnPolicyArgs(FlagsByPlace):
    """Flags of an algorithm that learns from rollouts."""

    on_device, on_host = GameArgs, HostRolloutArgs


class RecurrentArgs(FlagsByPlace):
    """Flags of an algorithm with memory that learns from rollouts."""

    on_device, on_host = DeviceRolloutArgs, HostRolloutArgs


class OffPolicyArgs(FlagsByPlace):
    """Flags of an algorithm that learns from a replay buffer."""

    on_device, on_host = DeviceReplayArgs, HostReplayArgs
