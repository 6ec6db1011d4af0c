"""Speed of populations: what a member's step costs beside that of a single run; prints one line of JSON.

    python benchmarks/population_throughput.py
    python benchmarks/population_throughput.py --members 1 64 --processes 0

Programs of the kit's own PPO with all that can be swept as arrays, each measured warm, in one process; `cost` is the
time of a member's environment step over that of the single run's. Populations train on one device, and then on several,
each with members of its own. Beside them as many processes as there are cores train single runs at the same time, as
one would without populations: `cost` of those is per run likewise.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

from algos.ppo_pmap import Args, make_ppo
from benchmarks.timing import time_training
from common.cli.checks import Bounds, Count, CountOrZero, Counts, check_flags
from common.cli.command import main, parse
from common.cli.errors import TrainingError
from common.cli.words import as_words
from common.device.devices import share_members
from common.envs.registry import make
from common.runs.directory import versions

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ("learning_rate=log:1e-4:1e-2", "gamma=uniform:0.9:0.999", "clip_eps=uniform:0.1:0.3", "ent_coef=log:1e-3:1e-1")


@dataclass
class Sizes:
    """What to measure."""

    env: str = "CartPole-v1"
    members: Counts = (4, 64, 512)
    """Sizes of populations, each beside the single run."""
    num_envs: Count = 4
    """Environments of each member."""
    num_devices: CountOrZero = 0
    """Devices that share the members, where they divide them; 0 are all accelerators or cores that do."""
    steps: Count = 1_000_000
    """Environment steps of all members together per measurement."""
    processes: Annotated[int, Bounds(at_least=-1)] = 0
    """Single runs at the same time, each in a process; 0 is one for each core, and -1 leaves them out."""

    def __post_init__(self):
        check_flags(self)


def time_members(sizes: Sizes, count: int, num_devices: int) -> dict[str, Any]:
    """What a population costs; one member is a single run, whose flags are numbers in the program."""
    swept = {"population": count, "sweep": SWEEP} if count > 1 else {}
    sharding = "members" if num_devices > 1 else "pmap"
    args = Args(env=sizes.env, num_envs=sizes.num_envs, total_timesteps=10**9, sharding=sharding, **swept)
    devices, env = share_members(num_devices, count, args.num_envs, args.block), make(args.env)
    updates = max(sizes.steps // (count * args.steps_per_update), 2)
    timing = time_training(make_ppo(args, env), env, devices, updates, members=args.members, sharding=sharding)
    return {
        "members": count,
        "devices": num_devices,
        "compile_seconds": round(timing.compile_seconds, 2),
        "member_steps_per_second": round(count * args.steps_per_update / timing.update_seconds),
        "memory_bytes_per_device": timing.memory,
    }


def time_processes(sizes: Sizes) -> dict[str, Any]:
    """What single runs at the same time cost, each in a process of its own. Raises TrainingError where one fails."""
    count = sizes.processes or os.cpu_count()
    flags = {"env": sizes.env, "num_envs": sizes.num_envs, "num_devices": 1}
    flags |= {"total_timesteps": sizes.steps, "tuned": False, "benchmark": True}
    command = [sys.executable, str(ROOT / "algos" / "ppo_pmap.py"), *as_words(flags)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise TrainingError(f"one of {count} processes with {' '.join(command[1:])} failed")
    records = [json.loads(text) for text in said]
    return {
        "processes": count,
        "compile_seconds": round(max(record["compile_seconds"] for record in records), 2),
        "member_steps_per_second": sum(record["steps_per_second"] for record in records),
    }


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of all sizes."""
    several = len(share_members(sizes.num_devices, math.gcd(*sizes.members), sizes.num_envs))
    layouts = [(count, share) for share in sorted({1, several}) for count in sizes.members]
    single, *populations = (time_members(sizes, *layout) for layout in ((1, 1), *layouts))
    others = [] if sizes.processes < 0 else [time_processes(sizes)]
    for row in (*populations, *others):
        row["cost"] = round(single["member_steps_per_second"] / row["member_steps_per_second"], 3)
    return {
        "benchmark": "population_throughput",
        "versions": versions(),
        "devices": [str(device) for device in jax.devices()[:several]],
        "sizes": vars(sizes),
        "rows": [single, *populations, *others],
    }


if __name__ == "__main__":
    sys.exit(main(lambda sizes: print(json.dumps(measure(sizes))), parse(Sizes)))
