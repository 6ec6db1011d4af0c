"""Speed of PPO over devices and processes; prints a table, and ends with one line of JSON.

    python benchmarks/scaling.py --plot docs/images/scaling.png
    python benchmarks/scaling.py --layouts 1x1 1x2 2x2 --scaling weak

A layout is processes x devices of each. Strong scaling keeps --num-envs for all devices together, weak scaling gives as
many to each. On a CPU processes and devices share the same cores: there it says only that all of it works and what it
costs.
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

import numpy as np

from benchmarks.accelerator import count_in_factors
from benchmarks.jobs import ends_with_us
from common.cli.checks import check, check_types
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.cli.files import check_target, writing
from common.cli.words import as_words
from common.drawing.figure import Line, Panel, draw

SCRIPT = Path(__file__).resolve().parents[1] / "algos" / "ppo_pmap.py"
KINDS = "strong", "weak"
Row = dict[str, Any]


@dataclass(kw_only=True)
class Sizes:
    """What to measure."""

    env: str = "CartPole-v1"
    layouts: tuple[str, ...] = ("1x1", "1x2", "1x4", "2x1", "2x2")
    """Processes x devices of each; the first is what the others are compared with."""
    scaling: tuple[str, ...] = KINDS
    """Strong scaling, weak scaling, or both."""
    num_envs: int = 64
    """Environments, over all devices with strong and on each with weak scaling."""
    steps: int = 500_000
    """Environment steps of every measurement, with weak scaling per device."""
    plot: str = ""
    """Where to draw the speeds, such as scaling.png."""

    def __post_init__(self):
        check_types(self)
        check(self, "num_envs steps", at_least=1)
        for layout in self.layouts:
            parts_of(layout)
        for kind in self.scaling:
            if kind not in KINDS:
                raise UsageError(f"--scaling {kind} is not among {', '.join(KINDS)}")
        if not (self.layouts and self.scaling):
            raise UsageError("--layouts and --scaling need at least one each")


def scale(sizes: Sizes) -> None:
    """What the command does."""
    if sizes.plot:
        check_target(Path(sizes.plot))
    record = measure(sizes)
    print(table(record))
    if sizes.plot:
        with writing(f"picture {sizes.plot}"):
            picture(record).savefig(sizes.plot)
    print(json.dumps(record))


def measure(sizes: Sizes) -> dict[str, Any]:
    """The record of all layouts."""
    rows, where, measured = [], {}, {}
    for kind in sizes.scaling:
        first = None
        for layout in sizes.layouts:
            processes, of_each = parts_of(layout)
            share = processes * of_each if kind == "weak" else 1
            if (layout, share) not in measured:  # one device is the same with both
                measured[layout, share] = run_in(layout, SCRIPT, _flags(sizes, share))
            result = measured[layout, share]
            where, first = machine(result), first or result["steps_per_second"]
            rows.append(
                {"scaling": kind, "processes": processes, "devices": processes * of_each}
                | {"num_envs": sizes.num_envs * share}
                | {name: result[name] for name in ("compile_seconds", "steps_per_second")}
                | {"speedup": round(result["steps_per_second"] / first, 3)}
            )
    return {"benchmark": "scaling", "env": sizes.env} | where | {"rows": rows}


def _flags(sizes: Sizes, share: int) -> dict[str, Any]:
    flags = {"env": sizes.env, "num_envs": sizes.num_envs * share, "total_timesteps": sizes.steps * share}
    return flags | {"tuned": False, "benchmark": True, "compile_cache": False}


def table(record: dict[str, Any]) -> str:
    """The rows as Markdown, and what they say nothing about."""
    heads = ["", "processes x devices of each", "environments", "steps/s", "beside the first", "compile"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in record["rows"]:
        layout = f"{row['processes']} x {row['devices'] // row['processes']}"
        cells = [row["scaling"], layout, str(row["num_envs"]), f"{row['steps_per_second'] / 1e3:,.0f} k"]
        cells += [f"{row['speedup']:.2f}", f"{row['compile_seconds']:.1f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", note(record)])


def picture(record: dict[str, Any]) -> Any:
    """Steps/s over devices, a line for each number of processes, and what devices of their own would make."""
    panels = []
    for kind in dict.fromkeys(row["scaling"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["scaling"] == kind]
        counts = sorted({row["processes"] for row in rows})
        lines = [_line(count, [row for row in rows if row["processes"] == count], counts) for count in counts]
        devices = np.array(sorted({row["devices"] for row in rows}), float)
        ideal = devices * rows[0]["steps_per_second"] / rows[0]["devices"]
        panels.append(Panel(f"{kind} scaling, {record['env']}", [*lines, Line("linear", devices, ideal, style=27)]))
    figure = draw(panels, "devices", "environment steps/s")
    figure.supxlabel(note(record), fontsize=8, color="0.4")
    count_in_factors(figure, whole=True)
    return figure


def _line(count: int, rows: list[Row], counts: list[int]) -> Line:
    devices, speeds = (np.array([row[name] for row in rows], float) for name in ("devices", "steps_per_second"))
    return Line(f"{count} process{'es' * (count > 1)}", devices, speeds, style=counts.index(count))


def parts_of(layout: str) -> tuple[int, int]:
    """The processes of a layout such as 2x4, and the devices of each. Raises UsageError where it is none."""
    parts = layout.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(f"--layouts {layout}: a layout is processes x devices of each, such as 2x4")
    return int(parts[0]), int(parts[1])


def run_in(layout: str, script: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """The line of JSON with which a script ends in the first of the processes. Raises TrainingError where one fails."""
    count, devices = parts_of(layout)
    command = [sys.executable, str(script), *as_words(flags | {"num_devices": count * devices})]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    together = {"coordinator": address, "num_processes": count}
    running = []
    for index in range(count):
        own = as_words(together | {"process_id": index}) if count > 1 else []
        words, env = ends_with_us([*command, *own]), os.environ | own_devices(index, count, devices)
        running.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env))
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise TrainingError(f"{count} processes with {' '.join(command[1:])} failed")
    return json.loads(said[0].strip().splitlines()[-1])


def note(record: dict[str, Any]) -> str:
    """What a picture or a table of this record has to say of the machine."""
    if not record["functional_only"]:
        return f"on {record['device']}"
    return f"functional only: all layouts share {record['cores']} CPU cores"


def machine(record: dict[str, Any]) -> dict[str, Any]:
    """Where a record was made: versions, a device, the cores, and whether all devices share those."""
    device = record["devices"][0]
    is_cpu = "cpu" in device.lower()
    return {"versions": record["versions"], "device": device, "cores": os.cpu_count(), "functional_only": is_cpu}


def own_devices(index: int, count: int, devices: int) -> dict[str, str]:
    """Which GPUs a process sees where several share a machine: each would else take all of them."""
    if count == 1:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count * devices)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[index * devices : (index + 1) * devices])}


if __name__ == "__main__":
    sys.exit(main(scale, parse(Sizes)))
