"""Speed of PPO over devices and processes; prints one line of JSON.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --layouts 1x1 1x2 2x2 --weak

A layout is processes x devices of each. Strong scaling keeps --num-envs for all devices together, --weak gives as many
to each. On a CPU processes and devices share the same cores: there it says only that all of it works and what it costs.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.cli.checks import check
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.cli.words import as_words

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Sizes:
    """What to measure."""

    env: str = "CartPole-v1"
    layouts: tuple[str, ...] = ("1x1", "1x2", "1x4", "2x1", "2x2")
    """Processes x devices of each; the first is what the others are compared with."""
    num_envs: int = 64
    """Environments, over all devices or with --weak on each."""
    weak: bool = False
    """Measure weak scaling."""
    steps: int = 500_000
    """Environment steps of every measurement, with --weak per device."""

    def __post_init__(self):
        check(self, "num_envs steps", at_least=1)
        for layout in self.layouts:
            if not all(part.isascii() and part.isdigit() and int(part) for part in _parts(layout)):
                raise UsageError(f"--layouts {layout}: a layout is processes x devices of each, such as 2x4")


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of all layouts."""
    rows, where = [], {}
    for layout in sizes.layouts:
        processes, devices = map(int, _parts(layout))
        total = processes * devices
        share = total if sizes.weak else 1
        flags = {"env": sizes.env, "num_envs": sizes.num_envs * share, "num_devices": total}
        record = _run(processes, flags | {"total_timesteps": sizes.steps * share, "tuned": False, "benchmark": True})
        row = {"processes": processes, "devices": total, "num_envs": flags["num_envs"]}
        rows.append(row | {name: record[name] for name in ("compile_seconds", "steps_per_second")})
        where = {"versions": record["versions"], "device": record["devices"][0], "cores": os.cpu_count()}
    for row in rows:
        row["speedup"] = round(row["steps_per_second"] / rows[0]["steps_per_second"], 3)
    kind = "weak" if sizes.weak else "strong"
    functional = where["device"].startswith("cpu")
    return {"benchmark": "scaling", "scaling": kind, "functional_only": functional} | where | {"rows": rows}


def _parts(layout: str) -> list[str]:
    parts = layout.split("x")
    return parts if len(parts) == 2 else [""]


def _run(count: int, flags: dict[str, Any]) -> dict[str, Any]:
    """What a run of `count` processes on this machine measures. Raises TrainingError where one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, str(ROOT / "algos" / "ppo_pmap.py"), *as_words(flags)]
    together = [
        {"coordinator": address, "num_processes": count, "process_id": i} if count > 1 else {} for i in range(count)
    ]
    running = [subprocess.Popen([*command, *as_words(one)], stdout=subprocess.PIPE, text=True) for one in together]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise TrainingError(f"{count} processes with {' '.join(command[1:])} failed")
    return json.loads(said[0].strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main(lambda sizes: print(json.dumps(measure(sizes))), parse(Sizes)))
