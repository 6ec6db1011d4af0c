"""Speed of APPO: how acting and learning overlap, what a second actor thread brings, what training costs the actors.

    python benchmarks/appo_throughput.py
    python benchmarks/appo_throughput.py --frames 4

Every figure is a ratio of runs made one after another on the same machine; prints one line of JSON.

- overlap: wall time of training over the longer of the actors' and the learner's time, both measured apart, on an
  environment whose step sleeps in C; the updates are made as long as a rollout takes. 1 is perfect.
- two_threads: sampling rate of two actor threads with half of the environments each, over that of one, on the same.
- kept: share of the rate of the actors alone that training keeps, for CartPole and for frames as large as Atari's.
- over_serial: training rate over that with --serial, on the sleeping environment and on CartPole.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import tyro

from algos import appo_pmap as appo
from benchmarks.actor_timing import measure, measure_overlap
from common.runs.directory import suite_version, versions


@dataclass
class Sizes:
    """What to measure."""

    frames: int = 4
    """Environments per actor thread for the part with frames."""
    updates: int = 60
    """Updates per measurement."""


def main(sizes: Sizes) -> None:
    sleeping = {"env": "gymnasium:sleeping:Sleeping-v0", "vectorization": "vector", "actor_threads": 1}
    sleeping |= {"num_steps": 8, "envs_per_actor": 128, "hidden_sizes": (256, 256), "num_epochs": 16}
    overlap = measure_overlap(appo, 2 * sizes.updates, sleeping)

    one = {**sleeping, "sampler_only": True, "env_params": '{"seconds": 0.0001}'}
    two = one | {"actor_threads": 2, "envs_per_actor": 64}
    threads = [measure(appo, sizes.updates, **flags)["steps_per_second"] for flags in (one, two)]

    cartpole = {"env": "envpool:CartPole-v1"}
    frames = {"env": "envpool:Pong-v5", "encoder": "nature", "share_torso": True, "hidden_sizes": (512,)}
    frames |= {"envs_per_actor": sizes.frames, "num_steps": 16, "num_epochs": 1, "num_minibatches": 1}
    kept = {"cartpole": compare(20 * sizes.updates, cartpole), "frames": compare(2 * sizes.updates, frames)}
    serial = [
        measure(appo, 20 * sizes.updates, **cartpole, serial=serial)["steps_per_second"] for serial in (True, False)
    ]
    record = {
        "benchmark": "appo_throughput",
        "versions": versions() | suite_version("envpool:") | suite_version("gymnasium:"),
        "sizes": vars(sizes),
        "overlap": overlap,
        "two_threads": {"steps_per_second": threads, "ratio": round(threads[1] / threads[0], 2)},
        "kept": kept,
        "cartpole_over_serial": {"steps_per_second": serial, "ratio": round(serial[1] / serial[0], 2)},
    }
    print(json.dumps(record))


def compare(updates: int, flags: dict[str, Any]) -> dict[str, float]:
    """Steps per second of the actors alone and while training, and their ratio."""
    alone, training = (
        measure(appo, updates, **flags, sampler_only=sampler)["steps_per_second"] for sampler in (True, False)
    )
    return {"sampler_only": alone, "training": training, "ratio": round(training / alone, 3)}


if __name__ == "__main__":
    main(tyro.cli(Sizes))
