"""Layouts of processes and devices on this machine, and commands that run in them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.jobs import ends_with_us
from common.cli.errors import TrainingError, UsageError
from common.cli.words import as_words


def parts_of(layout: str) -> tuple[int, int]:
    """The processes of a layout such as 2x4, and the devices of each. Raises UsageError where it is none."""
    parts = layout.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(f"--layouts {layout}: a layout is processes x devices of each, such as 2x4")
    return int(parts[0]), int(parts[1])


def run_in(layout: str, script: Path, flags: dict[str, Any], **variables: str) -> dict[str, Any]:
    """The line of JSON with which a script ends in the first of the processes, which get these environment variables.

    Raises TrainingError where one fails.
    """
    count, devices = parts_of(layout)
    command = [sys.executable, str(script), *as_words(flags | {"num_devices": count * devices})]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    running = []
    for index in range(count):
        own = as_words({"distributed": f"{address},{index}/{count}"}) if count > 1 else []
        words, env = ends_with_us([*command, *own]), os.environ | variables | _own_devices(index, count, devices)
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


def _own_devices(index: int, count: int, devices: int) -> dict[str, str]:
    """Which GPUs a process sees where several share a machine: each would else take all of them."""
    if count == 1:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count * devices)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[index * devices : (index + 1) * devices])}
