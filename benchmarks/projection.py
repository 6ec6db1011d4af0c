"""What many GPUs would do to the speed of training, by a formula: tables of docs/scaling.md, from assumptions.

python -m benchmarks.projection
python -m benchmarks.projection --latency-us 12 --gigabytes-per-second 20

Nothing here is measured. How much a GPU computes and exchanges in an update is read from the programs themselves; how
fast GPUs and links are is assumed below. benchmarks/collectives.py measures a link, which the flags then add.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from algos import ppo_pmap, sac_pmap
from benchmarks.work import Exchange, Work, work_of
from common.cli.checks import Count, NonNegative, Ratio, check_flags
from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.envs.registry import make

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
    """Project the speed of training on many GPUs."""

    teraflops: Ratio = 67.0
    """Peak of a GPU in float32, by default of NVIDIA's H100 SXM."""
    share: Ratio = 0.2
    """How much of the peak the products of such small networks reach."""
    kernel_us: Ratio = 5.0
    """Microseconds from the start of one operation of a GPU to that of the next, however small."""
    kernels: Count = 100
    """Operations of each step of the environments and of each gradient step; compiled for a CPU they are 200 to 300."""
    collective_us: NonNegative = 10.0
    """Microseconds to begin a collective; NCCL's tables have 6.6 to 14."""
    latency_us: NonNegative = 0.0
    """Of another link: microseconds of a hop, such as `hop_us` of benchmarks/collectives.py."""
    gigabytes_per_second: NonNegative = 0.0
    """Of another link: what each GPU sends, such as `gigabytes_per_second` there."""

    def __post_init__(self):
        check_flags(self)
        if bool(self.latency_us) != bool(self.gigabytes_per_second):
            raise UsageError("another link needs both --latency-us and --gigabytes-per-second")

    @property
    def links(self) -> dict[str, Link]:
        """Those of the table, and that of the flags."""
        own = {"yours": Link(1e-6 * self.latency_us, 1e9 * self.gigabytes_per_second)} if self.latency_us else {}
        return LINKS | own


class Case(NamedTuple):
    """Training that is projected, with sizes that grow with the number of GPUs."""

    name: str
    make: Callable[[Any, Any], Any]
    flags: Callable[[int], Any]  # of a number of GPUs
    num_envs: int  # on each GPU
    steps: int  # of environments in an update
    gradient_steps: int  # in an update
    samples: int  # of a gradient step, of each GPU


def ppo(env: str, num_envs: int) -> Case:
    """PPO's defaults, with so many environments on each GPU."""
    args = ppo_pmap.Args(env=env)
    return Case(
        f"PPO, {env}",
        ppo_pmap.make_ppo,
        lambda devices: ppo_pmap.Args(env=env, num_envs=num_envs * devices),
        num_envs,
        args.num_steps,
        args.update_epochs * args.num_minibatches,
        num_envs * args.num_steps // args.num_minibatches,
    )


def sac(num_envs: int, gradient_steps: int) -> Case:
    """SAC's defaults, with so many environments on each GPU, and so many gradient steps after each step of all."""
    args = sac_pmap.Args()
    return Case(
        f"SAC, {args.env}",
        sac_pmap.make_sac,
        lambda devices: sac_pmap.Args(
            num_envs=num_envs * devices,
            batch_size=args.batch_size * devices,
            utd_ratio=gradient_steps / (num_envs * devices),
            learning_starts=args.learning_starts * devices,
            total_timesteps=10**6 * devices,
        ),
        num_envs,
        1,
        gradient_steps,
        args.batch_size,
    )


CASES = ppo("CartPole-v1", 4096), ppo("Breakout-MinAtar", 1024), sac(64, 8)


@cache
def work(case: Case) -> Work:
    """What each GPU does in an update, whatever their number; its loops of unknown length are gradient steps."""
    args = case.flags(DEVICES[0])
    return work_of(case.make(args, make(args.env)), DEVICES[0], turns=case.gradient_steps)


def gradients(case: Case) -> list[Exchange]:
    """The exchanges of every gradient step."""
    return [one for one in work(case).exchanges if one.times >= case.gradient_steps]


def exchange_seconds(one: Exchange, devices: int, link: Link, begin: float) -> float:
    """Of all its times. An all-reduce goes around a ring or up and down a tree, as is faster; an all-gather around."""
    ring, size = devices - 1, one.size / link.bytes_per_second
    if one.kind == "all-gather":
        return one.times * (begin + ring * (link.seconds + size))
    around = 2 * ring * link.seconds + 2 * ring / devices * size
    tree = 2 * math.ceil(math.log2(devices)) * link.seconds + 2 * size
    return one.times * (begin + min(around, tree))


def product_seconds(case: Case, assumed: Assumptions) -> float:
    """Of the products of an update."""
    return work(case).flops / (1e12 * assumed.teraflops * assumed.share)


def launch_seconds(case: Case, assumed: Assumptions) -> float:
    """What the operations of an update take however little they do."""
    return 1e-6 * assumed.kernel_us * assumed.kernels * (case.steps + case.gradient_steps)


def efficiency(case: Case, devices: int, link: Link, assumed: Assumptions) -> tuple[float, float]:
    """Seconds of all exchanges of an update, and the speed of each GPU beside that of one alone."""
    begin = 1e-6 * assumed.collective_us
    exchanged = sum(exchange_seconds(one, devices, link, begin) for one in work(case).exchanges)
    alone = product_seconds(case, assumed) + launch_seconds(case, assumed)
    return exchanged, alone / (alone + exchanged)


def break_even(case: Case, devices: int, link: Link, assumed: Assumptions) -> int:
    """Samples of each GPU in a gradient step whose products take as long as the exchange of their gradient."""
    begin = 1e-6 * assumed.collective_us
    exchanged = sum(exchange_seconds(one, devices, link, begin) for one in gradients(case))
    return round(case.samples * exchanged / product_seconds(case, assumed))


def work_table(assumed: Assumptions) -> str:
    """What an update is, of each GPU."""
    columns = [_work_column(case, assumed) for case in CASES]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return _table(["an update, of each GPU", *(case.name for case in CASES)], rows)


def _work_column(case: Case, assumed: Assumptions) -> dict[str, str]:
    found, reduced = work(case), gradients(case)
    others = [one for one in found.exchanges if one not in reduced]
    small, given = ([one for one in others if one.kind == kind] for kind in ("all-reduce", "all-gather"))
    return {
        "environments": f"{case.num_envs:,}",
        "samples of a gradient step": f"{case.samples:,}",
        "gradient steps": f"{case.gradient_steps}",
        "parameters": f"{found.parameters:,}",
        "all-reduces of gradients": " + ".join(f"{one.times} x {_bytes(one.size)}" for one in reduced),
        "other all-reduces": f"{sum(one.times for one in small)} of up to {_bytes(max(one.size for one in small))}",
        "all-gathers": f"{sum(one.times for one in given)} of {_bytes(sum(x.times * x.size for x in given))} together",
        "products": f"{found.flops / 1e9:,.3g} GFLOP",
        "*their time*": _time(product_seconds(case, assumed)),
        "*time between operations*": _time(launch_seconds(case, assumed)),
    }


def speed_table(assumed: Assumptions) -> str:
    """Efficiency over links and numbers of GPUs."""
    middle = DEVICES[1]
    rows = []
    for case in CASES:
        for name, link in assumed.links.items():
            found = [efficiency(case, devices, link, assumed) for devices in DEVICES]
            cells = [f"{share:.0%}, {_time(exchanged)}" for exchanged, share in found]
            rows.append([case.name, name, *cells, f"{break_even(case, middle, link, assumed):,}"])
    heads = [f"{devices} GPUs" for devices in DEVICES]
    return _table(["", "link", *heads, f"break-even samples, {middle} GPUs"], rows)


def link_table(assumed: Assumptions) -> str:
    """What is assumed of links."""
    rows = [
        [name, f"{1e6 * link.seconds:g} us", f"{link.bytes_per_second / 1e9:,.3g} GB/s"]
        for name, link in assumed.links.items()
    ]
    return _table(["assumed link", "a hop", "of each GPU, one way"], rows)


def tables(assumed: Assumptions) -> list[str]:
    """All of them, as Markdown."""
    return [work_table(assumed), link_table(assumed), speed_table(assumed)]


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def _bytes(size: float) -> str:
    return next(f"{size / scale:,.3g} {unit}" for scale, unit in ((1e6, "MB"), (1e3, "kB"), (1, "B")) if size >= scale)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"


if __name__ == "__main__":
    sys.exit(main(lambda assumed: print("\n\n".join(tables(assumed))), parse(Assumptions)))
