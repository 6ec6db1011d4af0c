"""Types and base classes from which an algorithm's file builds its flags.

This module imports nothing slow, so that --help answers at once.
"""

from pmaprl.cli.startup import imports_of_a_script

# These imports take most of the time until a command has read its flags
with imports_of_a_script():
    from pmaprl.cli.checks import (
        AdamBeta,
        Bounds,
        Count,
        CountOrZero,
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
    from pmaprl.cli.command import main, parse
    from pmaprl.cli.device_flags import DeviceReplayArgs, DeviceRolloutArgs, GameArgs
    from pmaprl.cli.errors import UsageError
    from pmaprl.cli.host_flags import ActorArgs, FlagsByPlace, HostReplayArgs, HostRolloutArgs


class OnPolicyArgs(FlagsByPlace):
    """Flags of an algorithm that learns from rollouts."""

    on_device = GameArgs
    on_host = HostRolloutArgs


class RecurrentArgs(FlagsByPlace):
    """Flags of an algorithm with memory that learns from rollouts."""

    on_device = DeviceRolloutArgs
    on_host = HostRolloutArgs


class OffPolicyArgs(FlagsByPlace):
    """Flags of an algorithm that learns from a replay buffer."""

    on_device = DeviceReplayArgs
    on_host = HostReplayArgs
