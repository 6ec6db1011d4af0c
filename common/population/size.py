"""How large a population is, and whether the devices have memory for it."""

from typing import Any

import jax

from common.cli.errors import UsageError
from common.device.devices import memory_of


def check_size(args: Any, state: Any, devices: list[jax.Device]) -> dict[str, str]:
    """How many members a population has, and what they take. Raises UsageError where the devices do not have that.

    `state` has the shapes of theirs.
    """
    if not args.is_population:
        return {}
    groups = args.groups(len(devices))
    size, available = _bytes(state) * args.sharing(len(devices)), memory_of(devices)
    if groups > 1 and args.pbt:  # each device has all learners during an exchange
        size += _bytes((state.learner, state.run)) * groups
    if size > available:
        raise UsageError(
            f"{args.num_agents:,} members of {size / args.num_agents / 1e6:,.1f} MB are {size / 1e9:,.1f} GB, and "
            f"there are {available / 1e9:,.1f} GB: at most {int(args.num_agents * available / size):,} members fit"
        )
    differ = f", which differ in {', '.join(args.members.hyper)}" if args.members.hyper else ""
    return {"members": f"{args.num_agents:,}{differ}; their states take {size / 1e6:,.1f} MB"}


def _bytes(state: Any) -> int:
    """Of what a device has, or of what devices share between them."""
    return sum(x.size // len(x) * x.dtype.itemsize for x in jax.tree.leaves(state))
