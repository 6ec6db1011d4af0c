"""What many GPUs would do to the speed of training, by the formula of docs/scaling.md: a table.

    python -m benchmarks.projection --update-ms 45 --all-reduces 16x36600 7x64 --all-gathers 1x1230
    python -m benchmarks.projection --update-ms 45 --all-reduces 16x36600 --latency-us 12 --gigabytes-per-second 20

Nothing here is measured, and links are assumed; benchmarks.speed measures updates, and benchmarks/collectives.py a link.
"""

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

from common.cli.checks import check, check_types
from common.cli.command import main, parse
from common.cli.errors import UsageError

DEVICES = 8, 64, 512


class Link(NamedTuple):
    """How any two GPUs are connected, as if each had a machine of its own; those that share one do better."""

    seconds: float  # of one hop, however little is sent
    bytes_per_second: float  # of each GPU, one way


LINKS = {
    "NVLink": Link(1e-6, 450e9),  # NVIDIA's H100: 900 GB/s both ways; NCCL's tables have 0.6 to 1.9 us
    "InfiniBand": Link(5e-6, 50e9),  # 400 Gb/s, as ConnectX-7 has; NCCL's tables have 2.7 to 8.5 us
    "Ethernet": Link(30e-6, 12.5e9),  # 100 Gb/s; TCP through the kernel takes 10 to 30 us
}


@dataclass(kw_only=True)
class Assumptions:
    """Project the speed of training on many GPUs, each with the sizes of one (weak scaling)."""

    update_ms: float
    """Milliseconds of an update of one GPU alone: its steps, over the steps/s of benchmarks.speed."""
    all_reduces: tuple[str, ...]
    """All-reduces of an update, times x bytes: one for each gradient step, of 4 bytes for each parameter."""
    all_gathers: tuple[str, ...] = ()
    """All-gathers of an update likewise, with the bytes that each GPU puts in: of the episodes that ended."""
    collective_us: float = 10.0
    """Microseconds to begin a collective; NCCL's tables have 6.6 to 14."""
    latency_us: float = 0.0
    """Of another link: microseconds of a hop, such as `hop_us` of benchmarks/collectives.py."""
    gigabytes_per_second: float = 0.0
    """Of another link: what each GPU sends, such as `gigabytes_per_second` there."""

    def __post_init__(self):
        check_types(self)
        check(self, "update_ms", above=0)
        check(self, "collective_us latency_us gigabytes_per_second", at_least=0)
        if bool(self.latency_us) != bool(self.gigabytes_per_second):
            raise UsageError("another link needs both --latency-us and --gigabytes-per-second")
        for word in self.all_reduces + self.all_gathers:
            if not all(part.isascii() and part.isdigit() for part in word.split("x", 1)) or "x" not in word:
                raise UsageError(f"{word} is not times x bytes, such as 16x36600")


def all_reduce_seconds(size: int, devices: int, link: Link) -> float:
    """Of one, once it has begun: around a ring or up and down a tree, as is faster."""
    ring, sent = devices - 1, size / link.bytes_per_second
    around, levels = 2 * ring * link.seconds + 2 * ring / devices * sent, math.ceil(math.log2(devices))
    return min(around, 2 * levels * link.seconds + 2 * sent)


def all_gather_seconds(size: int, devices: int, link: Link) -> float:
    """Of one, once it has begun: around a ring."""
    return (devices - 1) * (link.seconds + size / link.bytes_per_second)


def exchange_seconds(assumed: Assumptions, devices: int, link: Link) -> float:
    """Of all exchanges of an update."""
    total = 0.0
    for words, seconds in (assumed.all_reduces, all_reduce_seconds), (assumed.all_gathers, all_gather_seconds):
        for times, size in (map(int, word.split("x")) for word in words):
            total += times * (1e-6 * assumed.collective_us + seconds(size, devices, link))
    return total


def table(assumed: Assumptions) -> str:
    """Efficiency and the time of an update's exchanges over links and numbers of GPUs, as Markdown."""
    own = {"yours": Link(1e-6 * assumed.latency_us, 1e9 * assumed.gigabytes_per_second)} if assumed.latency_us else {}
    lines = [f"| link | {' | '.join(f'{count} GPUs' for count in DEVICES)} |", "|---" * (1 + len(DEVICES)) + "|"]
    for name, link in (LINKS | own).items():
        times = [1e3 * exchange_seconds(assumed, count, link) for count in DEVICES]
        cells = [f"{assumed.update_ms / (assumed.update_ms + took):.0%}, {took:,.3g} ms" for took in times]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(lambda assumed: print(table(assumed)), parse(Assumptions)))
