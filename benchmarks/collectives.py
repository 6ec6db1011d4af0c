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
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.scaling import machine, note, parts_of, run_in
from common.cli.checks import check, check_types
from common.cli.command import main, parse
from common.cli.errors import UsageError

SMALLEST, GROWTH = 1024, 4  # bytes, and how many times as many come next
REPEATS = 5


@dataclass(kw_only=True)
class Sizes:
    """Measure how long an all-reduce takes."""

    layouts: tuple[str, ...] = ()
    """Layouts to measure on this machine, one after the other: processes x devices of each, such as 1x2 2x2."""
    num_devices: int = 2
    """Devices of all processes together, without --layouts."""
    largest: int = 64
    """Megabytes of the largest array."""
    distributed: bool = False
    """As in training: with the other processes that Slurm, Open MPI, Kubernetes or a TPU pod has started."""
    coordinator: str = ""
    """As in training: host:port of process 0."""
    num_processes: int = 1
    """As in training: processes in all."""
    process_id: int = 0
    """As in training: which of them this one is."""

    def __post_init__(self):
        check_types(self)
        check(self, "num_devices", at_least=2)
        check(self, "largest num_processes", at_least=1)
        if self.layouts and (self.distributed or self.coordinator):
            raise UsageError("--layouts starts its own processes: leave out --distributed and --coordinator")
        for layout in self.layouts:
            if parts_of(layout) == (1, 1):
                raise UsageError(f"--layouts {layout}: one device has nobody to average with")


def measure_all(sizes: Sizes) -> None:
    """What the command does."""
    if sizes.layouts:
        records = [run_in(layout, Path(__file__), {"largest": sizes.largest}) for layout in sizes.layouts]
        print(table(records))
        print(json.dumps({"benchmark": "collectives", "layouts": records}))
        return
    if sizes.distributed:
        jax.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", sizes.num_devices // sizes.num_processes)  # where it has no others
        if sizes.coordinator:
            jax.distributed.initialize(sizes.coordinator, sizes.num_processes, sizes.process_id)
    record = measure(sizes)
    if jax.process_index() == 0:
        print(json.dumps(record))


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of the devices of all processes, each of which calls this."""
    count = sizes.num_devices
    devices = jax.devices()[:count]
    if len(devices) < count:
        raise UsageError(f"--num-devices {count}: there are {len(devices)}")
    rows = [{"bytes": size, "seconds": average_seconds(devices, size)} for size in sizes_of(sizes.largest)]
    latency, slope, error = fit(*([row[name] for row in rows] for name in ("bytes", "seconds")))
    return {
        "benchmark": "collectives",
        **machine({"versions": {"jax": jax.__version__}, "devices": [str(device) for device in devices]}),
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


def average_seconds(devices: list[jax.Device], size: int) -> float:
    """Of one average of `size` bytes over the devices, one after another in a program; the median of some runs."""
    times = min(max(2**26 // size, 4), 1024)

    def averages(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: jax.lax.pmean(x, "devices"), x)

    own = [device for device in devices if device.process_index == jax.process_index()]
    x = np.random.default_rng(0).normal(size=(len(own), size // 4)).astype(np.float32)
    program, seconds = jax.pmap(averages, axis_name="devices", devices=devices), []
    x = jax.block_until_ready(program(x))  # on the devices
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(program(x))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) / times


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """Latency in seconds and seconds per byte, with the least squared relative errors, and the largest of these."""
    ones = np.ones(len(sizes))
    relative = np.stack([ones, np.array(sizes)], axis=1) / np.array(seconds)[:, None]
    fitted = np.linalg.lstsq(relative, ones, rcond=None)[0]
    return *map(float, fitted), float(np.abs(relative @ fitted - 1).max())


def table(records: list[dict[str, Any]]) -> str:
    """One line for each layout, as Markdown."""
    shown = [0, len(records[0]["rows"]) // 2, -1]
    sizes = [records[0]["rows"][index]["bytes"] for index in shown]
    heads = [f"{size // 2**20} MB" if size >= 2**20 else f"{size // 2**10} kB" for size in sizes]
    lines = [f"| processes x devices of each | {' | '.join(heads)} | latency | GB/s | off by up to |", "|" + "---|" * 7]
    for one in records:
        times = [f"{1e3 * one['rows'][index]['seconds']:,.3g} ms" for index in shown]
        layout = f"{one['processes']} x {one['num_devices'] // one['processes']}"
        fitted = f"{one['latency_us']:,.0f} us | {one['gigabytes_per_second']:,.3g} | {one['largest_error']:.0%}"
        lines.append(f"| {layout} | {' | '.join(times)} | {fitted} |")
    return "\n".join([*lines, "", note(records[0])])


if __name__ == "__main__":
    sys.exit(main(measure_all, parse(Sizes)))
