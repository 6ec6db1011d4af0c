"""How long devices take to average arrays, as they do with every gradient; ends with one line of JSON.

    python benchmarks/collectives.py --num-devices 8
    python benchmarks/collectives.py --layouts 1x2 1x4 2x1 2x2
    srun python benchmarks/collectives.py --num-devices 16 --distributed

Sizes grow by four from 1 kB on. The latency a and the slope b of t = a + b * bytes are those with the least sum of
squared relative errors, so that small arrays count as much as large ones. An all-reduce around a ring of D devices
sends 2 (D - 1) / D of its bytes through every link: that many over b is the bandwidth of a link. Up and down a tree it
makes 2 log2(D) hops: a over these is what a hop takes, with its share of the beginning.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from algos.ppo_pmap import Args
from benchmarks.layouts import machine, note, parts_of, run_in
from benchmarks.timing import REPEATS, median_seconds
from common.cli.checks import Bounds, Count, Timeout, check_flags
from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.cli.process_flags import Meeting
from common.device import cluster
from common.device.devices import choose_devices
from common.device.sharding import AXIS, flat_pmean
from common.runs.directory import versions

SMALLEST, GROWTH = 1024, 4  # bytes, and how many times as many come next


@dataclass(kw_only=True)
class Sizes:
    """What to measure."""

    layouts: tuple[str, ...] = ()
    """Layouts to measure on this machine, one after the other: processes x devices of each, such as 1x2 2x2."""
    num_devices: Annotated[int, Bounds(at_least=2)] = 2
    """Devices of all processes together, without --layouts."""
    largest: Count = 64
    """Megabytes of the largest array."""
    seconds: Timeout = 0.5
    """How long to measure each size; where one average takes longer, it is that of a few of them."""
    distributed: Meeting = ""
    """As in training: measure with other processes."""

    def __post_init__(self):
        check_flags(self)
        if self.layouts and self.distributed:
            raise UsageError("--layouts starts its own processes: leave out --distributed")
        for layout in self.layouts:
            if parts_of(layout) == (1, 1):
                raise UsageError(f"--layouts {layout}: one device has nobody to average with")


def measure_all(sizes: Sizes) -> None:
    """What the command does."""
    if not sizes.layouts:
        with cluster.joined(args := Args(distributed=sizes.distributed, quiet=True)):
            record = measure(sizes, args.num_processes)
            if cluster.is_first():
                print(json.dumps(record))
        return
    flags = {"largest": sizes.largest, "seconds": sizes.seconds}
    records = [run_in(layout, Path(__file__), flags) for layout in sizes.layouts]
    print(table(records))
    print(json.dumps({"benchmark": "collectives", "layouts": records}))


def measure(sizes: Sizes, num_processes: int) -> dict[str, Any]:
    """The record of the devices of all processes, each of which calls this."""
    count = sizes.num_devices
    devices = choose_devices(count, count, num_processes=num_processes)
    rows = [
        {"bytes": size, "seconds": average_seconds(devices, size, sizes.seconds)} for size in sizes_of(sizes.largest)
    ]
    latency, slope, error = fit(*([row[name] for row in rows] for name in ("bytes", "seconds")))
    return {
        "benchmark": "collectives",
        **machine({"versions": versions(), "devices": [str(device) for device in devices]}),
        "processes": jax.process_count(),
        "num_devices": count,
        "latency_us": round(1e6 * latency, 2),
        "hop_us": round(1e6 * latency / (2 * math.ceil(math.log2(count))), 2),
        "gigabytes_per_second": round(2 * (count - 1) / count / slope / 1e9, 3),
        "largest_error": round(error, 2),
        "rows": rows,
    }


def sizes_of(largest: int) -> list[int]:
    """Bytes of the arrays, up to so many megabytes."""
    sizes = [SMALLEST]
    while GROWTH * sizes[-1] <= largest * 2**20:
        sizes.append(GROWTH * sizes[-1])
    return sizes


def average_seconds(devices: list[jax.Device], size: int, seconds: float) -> float:
    """Of one average of `size` bytes over the devices; measured for so many seconds, or a few times."""

    def averages(x: jax.Array, times: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: flat_pmean(x), x)

    x = np.random.default_rng(0).normal(size=(len(cluster.own(devices)), size // 4)).astype(np.float32)
    program = jax.pmap(averages, axis_name=AXIS, in_axes=(0, None), devices=devices)
    x = program(x, np.int32(0))  # on the devices
    times = repeats(partial(program, x), seconds / (REPEATS + 1))
    return median_seconds(lambda: program(x, np.int32(times))) / times


def repeats(run: Callable[[np.int32], Any], seconds: float) -> int:
    """How often one call has to average to take so long: a power of two, the same in all processes."""
    times, took = 1, 0.0
    while took < seconds / 2:
        times *= 2
        began = time.perf_counter()
        jax.block_until_ready(run(np.int32(times)))
        took = 1e-6 * cluster.largest(int(1e6 * (time.perf_counter() - began)))
    return times


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """Latency in seconds and seconds per byte, with the least squared relative errors, and the largest of these."""
    ones = np.ones(len(sizes))
    relative = np.stack([ones, np.array(sizes)], axis=1) / np.array(seconds)[:, None]
    fitted = np.linalg.lstsq(relative, ones, rcond=None)[0]
    return *map(float, fitted), float(np.abs(relative @ fitted - 1).max())


def table(records: list[dict[str, Any]]) -> str:
    """One line for each layout, as Markdown."""
    shown = [0, len(records[0]["rows"]) // 2, -1]
    heads = [_bytes(records[0]["rows"][index]["bytes"]) for index in shown]
    lines = [f"| processes x devices of each | {' | '.join(heads)} | latency | GB/s | off by up to |", "|" + "---|" * 7]
    for one in records:
        times = [f"{1e3 * one['rows'][index]['seconds']:,.3g} ms" for index in shown]
        layout = f"{one['processes']} x {one['num_devices'] // one['processes']}"
        fitted = f"{one['latency_us']:,.0f} us | {one['gigabytes_per_second']:,.3g} | {one['largest_error']:.0%}"
        lines.append(f"| {layout} | {' | '.join(times)} | {fitted} |")
    return "\n".join([*lines, "", note(records[0])])


def _bytes(size: int) -> str:
    return f"{size // 2**20} MB" if size >= 2**20 else f"{size // 2**10} kB"


if __name__ == "__main__":
    sys.exit(main(measure_all, parse(Sizes)))
