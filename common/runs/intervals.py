"""What is due when: how far to run next, and what to do then. All numbers are environment steps."""

import math
from typing import Any, NamedTuple


class Intervals(NamedTuple):
    """Steps from one time to the next; 0 is never."""

    log: int
    eval: int
    checkpoint: int
    exchange: int = 0

    @classmethod
    def of(cls, args: Any) -> "Intervals":
        """Those of the flags; --benchmark neither evaluates nor saves."""
        saving = (0, 0) if args.benchmark else (args.eval_interval, args.checkpoint_interval)
        return cls(args.log_interval, *saving, args.exchange_interval)

    def next_due(self, step: int) -> float:
        """The first step after `step` at which anything is due; infinite where nothing is."""
        return min(next_boundary(step, interval) for interval in self)

    def due(self, before: int, step: int) -> set[str]:
        """What is due at `step`, and was not `before`."""
        return {name for name, interval in self._asdict().items() if step >= next_boundary(before, interval)}


def next_boundary(step: int, interval: int) -> float:
    """First multiple of `interval` after `step`; infinite for interval 0."""
    return step + interval - step % interval if interval else math.inf
