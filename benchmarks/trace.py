"""Counts that a trace of JAX's profiler gives of a device: kernels, launches, and how long the
device had nothing to do.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pmaprl.cli.errors import TrainingError

MOST = 10  # kernels that are listed
LAUNCHES = "cuLaunchKernel", "cudaLaunchKernel"  # on the host; what begins with these
GRAPHS = "cuGraphLaunch", "cudaGraphLaunch"
Event = dict[str, Any]


def newest_trace(folder: Path) -> list[Event]:
    """The events of the newest trace in a folder of `jax.profiler`. Raises TrainingError where
    there is none.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise TrainingError(f"the profiler has left no trace in {folder}")
    with gzip.open(files[-1]) as file:
        return json.load(file)["traceEvents"]


def summary_of(events: Iterable[Event], updates: int) -> dict[str, Any]:
    """Count kernels and launches of one of the `updates` that are traced, and name the most
    expensive kernels.

    Kernels are what runs on the streams of a device; on a CPU, which has none, the operations of
    XLA's programs. Raises TrainingError where there are no such.
    """
    events = list(events)
    spans = [event for event in events if event.get("ph") == "X"]
    streams = _streams(events)
    kernels = [event for event in spans if (event["pid"], event.get("tid")) in streams]
    kernels = kernels or [event for event in spans if "hlo_op" in event.get("args", {})]
    if not kernels:
        raise TrainingError("the trace has no kernels")

    by_name: dict[str, list[float]] = defaultdict(list)  # microseconds of each
    for event in kernels:
        by_name[event["name"]].append(event.get("dur", 0.0))
    total = sum(map(sum, by_name.values())) or 1.0
    busy, span = _busy_and_span(kernels)
    first = sorted(by_name, key=lambda name: -sum(by_name[name]))[:MOST]
    return {
        "kernels_per_update": round(len(kernels) / updates, 1),
        "microseconds_per_update": round(span / updates, 1),
        "idle_share": round(1 - busy / span, 4) if span else 0.0,
        "launches_per_update": round(_count(spans, LAUNCHES) / updates, 1),
        "graphs_per_update": round(_count(spans, GRAPHS) / updates, 1),
        "most_expensive": [
            {
                "name": name,
                "share": round(sum(by_name[name]) / total, 4),
                "times_per_update": round(len(by_name[name]) / updates, 1),
                "microseconds_each": round(sum(by_name[name]) / len(by_name[name]), 2),
            }
            for name in first
        ],
    }


def _streams(events: list[Event]) -> set[tuple[Any, Any]]:
    """Process and thread of every stream of a device; a device also has lines that tell the same in
    other words.
    """
    named = [
        event for event in events if event.get("ph") == "M" and "name" in event.get("args", {})
    ]
    devices = {
        event["pid"]
        for event in named
        if event["name"] == "process_name" and event["args"]["name"].startswith("/device:")
    }
    return {
        (event["pid"], event.get("tid"))
        for event in named
        if event["name"] == "thread_name"
        and event["pid"] in devices
        and event["args"]["name"].startswith("Stream")
    }


def _count(spans: list[Event], names: tuple[str, ...]) -> int:
    return sum(event["name"].startswith(names) for event in spans)


def _busy_and_span(kernels: list[Event]) -> tuple[float, float]:
    """Microseconds in which a kernel runs, and those from the first one to the end of the last."""
    busy = 0.0
    end = float("-inf")
    times = sorted((event["ts"], event["ts"] + event.get("dur", 0.0)) for event in kernels)
    for begins, ends in times:
        busy += max(ends - max(begins, end), 0.0)
        end = max(end, ends)
    return busy, end - times[0][0]
