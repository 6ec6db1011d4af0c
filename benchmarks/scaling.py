"""Speed over processes and devices: of training, of an all-reduce, or projected to many GPUs; prints a table and JSON.

    python benchmarks/scaling.py
    python benchmarks/scaling.py train --layouts 1x1 1x2 2x2
    python benchmarks/scaling.py all-reduce --layouts 1x2 2x2
    srun python benchmarks/scaling.py all-reduce --num-devices 16 --distributed
    python benchmarks/scaling.py project --update-ms 45 --all-reduces 16x36600 7x64 --all-gathers 1x1230

A layout is processes x devices of each. On a CPU they share the same cores: there it says only that all of it works and
what it costs.

- train: PPO. Strong scaling keeps --num-envs for all devices together, weak scaling gives as many to each.
- all-reduce: arrays from 1 kB on, each four times as large. Latency a and slope b of t = a + b * bytes have the least
  squared relative errors. Around a ring of D devices 2 (D - 1) / D of the bytes go through every link: that many over b
  is its bandwidth. A tree makes 2 log2(D) hops: a over these is what a hop takes.
- project: the formula of docs/scaling.md, with assumed links. Nothing of it is measured.
"""

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tyro

from benchmarks.jobs import ROOT, ends_with_us
from benchmarks.records import markdown
from common.cli.checks import Count, Seconds, check_flags
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.cli.run_flags import Meeting, flag_words, read_meeting

What = Literal["train", "all-reduce", "project"]
GPUS = 8, 64, 512
BEGIN = 10e-6  # seconds to begin a collective; NCCL's tables have 6.6 to 14 us


LINKS = {  # seconds of a hop, however little is sent, and bytes/s of each GPU, one way, as if each had its own machine
    "NVLink": (1e-6, 450e9),  # NVIDIA's H100: 900 GB/s both ways; NCCL's tables have 0.6 to 1.9 us
    "InfiniBand": (5e-6, 50e9),  # 400 Gb/s, as ConnectX-7 has; NCCL's tables have 2.7 to 8.5 us
    "Ethernet": (30e-6, 12.5e9),  # 100 Gb/s; TCP through the kernel takes 10 to 30 us
}


@dataclass(kw_only=True)
class Sizes:
    """Measure or project the speed of training over processes and devices."""

    what: Annotated[tyro.conf.Positional[What], tyro.conf.arg(metavar="WHAT")] = "train"
    """train, all-reduce or project."""
    layouts: tuple[str, ...] = ()
    """Processes x devices of each; train compares others with the first, by default 1x1 1x2 1x4 2x1 2x2."""
    env: str = "CartPole-v1"
    """train: the environment."""
    num_envs: Count = 64
    """train: environments, over all devices with strong and on each with weak scaling."""
    steps: Count = 500_000
    """train: environment steps of every measurement, with weak scaling per device."""
    largest: Count = 64
    """all-reduce: megabytes of the largest array."""
    num_devices: Count = 2
    """all-reduce: devices of all processes together, without --layouts."""
    distributed: Meeting = ""
    """all-reduce: as in training, the processes that a cluster has started, or HOST:PORT,ID/COUNT."""
    update_ms: Seconds = 0.0
    """project: milliseconds of an update of one GPU alone, its steps over the steps/s of benchmarks.speed."""
    all_reduces: tuple[str, ...] = ()
    """project: all-reduces of an update, times x bytes, one for each gradient step, of 4 bytes for each parameter."""
    all_gathers: tuple[str, ...] = ()
    """project: all-gathers of an update likewise, with the bytes that each GPU puts in."""
    latency_us: Seconds = 0.0
    """project: microseconds of a hop of another link, such as `hop_us` of all-reduce."""
    gigabytes_per_second: Seconds = 0.0
    """project: what each GPU sends through it, such as `gigabytes_per_second` of all-reduce."""

    def __post_init__(self):
        check_flags(self)
        for flag in "layouts", "all_reduces", "all_gathers":
            for word in getattr(self, flag):
                parts_of(word, flag.replace("_", "-"))
        if self.what == "project" and not (self.update_ms and self.all_reduces):
            raise UsageError("project needs --update-ms and --all-reduces")
        if bool(self.latency_us) != bool(self.gigabytes_per_second):
            raise UsageError("another link needs both --latency-us and --gigabytes-per-second")


def parts_of(word: str, flag: str = "layouts") -> tuple[int, int]:
    """The numbers of a layout such as 2x4, or of collectives. Raises UsageError where it has others."""
    parts = word.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        meant = "processes x devices of each, such as 2x4" if flag == "layouts" else "times x bytes, such as 16x36600"
        raise UsageError(f"--{flag} {word}: write {meant}")
    return int(parts[0]), int(parts[1])


def scale(sizes: Sizes) -> None:
    """What the command does."""
    if sizes.what == "project":
        print(projection(sizes))
    elif sizes.what == "train":
        report(train(sizes))
    elif sizes.layouts:
        flags = {"largest": sizes.largest}
        report([run_in(layout, [__file__, "all-reduce"], flags) for layout in sizes.layouts])
    else:
        import jax

        if sizes.distributed == "auto":
            jax.distributed.initialize()
        else:
            together = read_meeting(sizes.distributed) if sizes.distributed else ("", 1, 0)
            jax.config.update("jax_num_cpu_devices", sizes.num_devices // together[1])  # where it has no others
            if sizes.distributed:
                jax.distributed.initialize(*together)
        record = measure_all_reduce(sizes)
        if jax.process_index() == 0:
            print(json.dumps(record))


def report(rows: list[dict[str, Any]]) -> None:
    """Print rows as Markdown, whether their devices share the cores, and all of it as JSON."""
    shown = [name for name, value in rows[0].items() if isinstance(value, int | float | str)]
    cells = [[row[name] if isinstance(row[name], str) else f"{row[name]:,.5g}" for name in shown] for row in rows]
    print(markdown(shown, cells))
    if "cpu" in rows[0]["devices"][0].lower():
        print(f"\nfunctional only: all layouts share {os.cpu_count()} CPU cores")
    print("", json.dumps(rows), sep="\n")


def run_in(layout: str, script: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """The line of JSON with which a script ends in the first of the processes. Raises TrainingError where one fails."""
    count, devices = parts_of(layout)
    command = [sys.executable, *script, *flag_words(flags | {"num_devices": count * devices})]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Each process would else take all GPUs of the machine.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count * devices)))).split(",")
    running = []
    for index in range(count):
        words, env = command, {}
        if count > 1:
            words = [*command, *flag_words({"distributed": f"{address},{index}/{count}"})]
            env = {"CUDA_VISIBLE_DEVICES": ",".join(visible[index * devices : (index + 1) * devices])}
        running.append(subprocess.Popen(ends_with_us(words), stdout=subprocess.PIPE, text=True, env=os.environ | env))
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise TrainingError(f"{count} processes with {' '.join(command[1:])} failed")
    return {"layout": layout} | json.loads(said[0].strip().splitlines()[-1])


def train(sizes: Sizes) -> list[dict[str, Any]]:
    """What PPO reaches in all layouts, a row for each."""
    rows, measured = [], {}
    for kind in ("strong", "weak"):
        first = None
        for layout in sizes.layouts or ("1x1", "1x2", "1x4", "2x1", "2x2"):
            share = math.prod(parts_of(layout)) if kind == "weak" else 1
            if (layout, share) not in measured:  # one device is the same with both
                flags = {"env": sizes.env, "num_envs": sizes.num_envs * share, "total_timesteps": sizes.steps * share}
                flags |= {"tuned": False, "benchmark": True, "compile_cache": False}
                measured[layout, share] = run_in(layout, [str(ROOT / "algos" / "ppo_pmap.py")], flags)
            found = measured[layout, share]
            first = first or found["steps_per_second"]
            names = "layout", "num_envs", "steps_per_second", "compile_seconds", "devices", "versions"
            speedup = {"beside the first": round(found["steps_per_second"] / first, 2)}
            rows.append({"scaling": kind} | {name: found[name] for name in names} | speedup)
    return rows


def measure_all_reduce(sizes: Sizes) -> dict[str, Any]:
    """The record of the devices of all processes, each of which calls this."""
    import jax

    count, devices = sizes.num_devices, jax.devices()[: sizes.num_devices]
    if not 2 <= count == len(devices):
        raise UsageError(f"--num-devices {count}: an all-reduce needs two or more, and here are {len(jax.devices())}")
    measured = [2**power for power in range(10, 21 + int(math.log2(sizes.largest)), 2)]
    seconds = [average_seconds(devices, size) for size in measured]
    latency, slope, error = fit(measured, seconds)
    return {
        "ms of 1 kB": 1e3 * seconds[0],
        f"ms of {measured[-1] // 2**20} MB": 1e3 * seconds[-1],
        "latency_us": 1e6 * latency,
        "hop_us": 1e6 * latency / (2 * math.ceil(math.log2(count))),
        "gigabytes_per_second": 2 * (count - 1) / count / slope / 1e9,
        "largest_error": error,
        "devices": [str(device) for device in devices],
        "bytes": measured,
        "seconds": seconds,
    }


def average_seconds(devices: list[Any], size: int) -> float:
    """Of one average of `size` bytes over the devices, one after another in a program; the median of some runs."""
    import jax

    times = min(max(2**26 // size, 4), 1024)

    def averages(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: jax.lax.pmean(x, "devices"), x)

    own = sum(device.process_index == jax.process_index() for device in devices)
    x = np.random.default_rng(0).normal(size=(own, size // 4)).astype(np.float32)
    program, seconds = jax.pmap(averages, axis_name="devices", devices=devices), []
    x = jax.block_until_ready(program(x))  # on the devices
    for _ in range(5):
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


def all_reduce_seconds(size: int, devices: int, hop: float, rate: float) -> float:
    """Of one, once it has begun: around a ring or up and down a tree, as is faster."""
    around = 2 * (devices - 1) * (hop + size / rate / devices)
    return min(around, 2 * math.ceil(math.log2(devices)) * hop + 2 * size / rate)


def exchange_seconds(assumed: Sizes, devices: int, hop: float, rate: float) -> float:
    """Of all exchanges of an update; an all-gather goes around a ring."""
    reduces, gathers = (list(map(parts_of, words)) for words in (assumed.all_reduces, assumed.all_gathers))
    begin = BEGIN * sum(times for times, _ in reduces + gathers)
    seconds = sum(times * all_reduce_seconds(size, devices, hop, rate) for times, size in reduces)
    return begin + seconds + (devices - 1) * sum(times * (hop + size / rate) for times, size in gathers)


def projection(assumed: Sizes) -> str:
    """Efficiency and the time of an update's exchanges over links and numbers of GPUs, as Markdown."""
    own = {"yours": (1e-6 * assumed.latency_us, 1e9 * assumed.gigabytes_per_second)} if assumed.latency_us else {}
    lines = []
    for name, link in (LINKS | own).items():
        times = [1e3 * exchange_seconds(assumed, count, *link) for count in GPUS]
        cells = [f"{assumed.update_ms / (assumed.update_ms + took):.0%}, {took:,.3g} ms" for took in times]
        lines.append([name, *cells])
    return markdown(["link", *(f"{count} GPUs" for count in GPUS)], lines)


if __name__ == "__main__":
    main(scale, parse(Sizes))
