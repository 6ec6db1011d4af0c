"""Speed of APPO: how acting and learning overlap, what a second actor thread brings, what training costs the actors.

    python benchmarks/appo_throughput.py
    python benchmarks/appo_throughput.py --frames 4

Every figure is a ratio of runs made one after another on the same machine; prints one line of JSON.

- overlap: wall time of training over the longer of the actors' and the learner's time, both measured apart, on an
  environment whose step sleeps in C; the updates are made as long as a rollout takes. 1 is perfect.
- two_threads: sampling rate of two actor threads with half of the environments each, over that of one, on the same.
- kept: share of the rate of the actors alone that training keeps, for CartPole and for frames as large as Atari's.
- over_serial: training rate over that with --serial.
"""

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import tyro

from algos.appo_pmap import Args, train
from common.run_directory import suite_version, versions


@dataclass
class Sizes:
    """What to measure."""

    frames: int = 4
    """Environments per actor thread for the part with frames."""
    updates: int = 60
    """Updates per measurement."""


def measure(updates: int, **flags: Any) -> dict[str, Any]:
    """The line that `--benchmark` prints."""
    args = Args(**flags, benchmark=True, log_interval=10**9)
    args.total_timesteps = updates * args.steps_per_update
    line = io.StringIO()
    with contextlib.redirect_stdout(line):
        train(args)
    return json.loads(line.getvalue())


def main(sizes: Sizes) -> None:
    sleeping = {"env": "gymnasium:sleeping:Sleeping-v0", "vectorization": "vector", "actor_threads": 1}
    sleeping |= {"num_steps": 32, "hidden_sizes": (128, 128)}
    overlap = measure_overlap(sizes.updates, sleeping)

    one = {**sleeping, "sampler_only": True, "env_params": '{"seconds": 0.002}'}
    two = one | {"actor_threads": 2, "envs_per_actor": 8, "num_minibatches": 2}
    threads = [measure(sizes.updates, **flags)["steps_per_second"] for flags in (one, two)]

    cartpole = {"env": "envpool:CartPole-v1"}
    frames = {"env": "envpool:Pong-v5", "encoder": "nature", "share_torso": True, "hidden_sizes": (512,)}
    frames |= {"envs_per_actor": sizes.frames, "num_steps": 16}
    kept = {"cartpole": compare(8 * sizes.updates, cartpole), "frames": compare(sizes.updates // 2, frames)}
    serial = [measure(8 * sizes.updates, **cartpole, serial=serial)["steps_per_second"] for serial in (True, False)]
    record = {
        "benchmark": "appo_throughput",
        "versions": versions() | suite_version("envpool:") | suite_version("gymnasium:"),
        "sizes": vars(sizes),
        "overlap": overlap,
        "two_threads": {"steps_per_second": threads, "ratio": round(threads[1] / threads[0], 2)},
        "kept": kept,
        "over_serial": {"steps_per_second": serial, "ratio": round(serial[1] / serial[0], 2)},
    }
    print(json.dumps(record))


def measure_overlap(updates: int, flags: dict[str, Any]) -> dict[str, float]:
    """Milliseconds per update of actor, learner and both at once, where the first two are about equal."""
    alone = measure(updates, **flags, serial=True)
    learner = alone["time/learner_update"] / updates
    acting = (alone["time/actor_act"] + alone["time/actor_env_step"]) / updates
    params = json.dumps({"seconds": max(learner - acting, 0.0) / flags["num_steps"]})
    apart = measure(updates, **flags, serial=True, env_params=params)
    learner = apart["time/learner_update"] / updates
    actor = (apart["time/actor_act"] + apart["time/actor_env_step"]) / updates
    args = Args(**flags)
    together = args.steps_per_update / measure(updates, **flags, env_params=params)["steps_per_second"]
    record = {"actor_ms": actor, "learner_ms": learner, "together_ms": together}
    record = {name: round(1e3 * value, 2) for name, value in record.items()}
    return record | {"ratio": round(together / max(actor, learner), 3)}


def compare(updates: int, flags: dict[str, Any]) -> dict[str, float]:
    """Steps per second of the actors alone and while training, and their ratio."""
    alone, training = (measure(updates, **flags, sampler_only=sampler)["steps_per_second"] for sampler in (True, False))
    return {"sampler_only": alone, "training": training, "ratio": round(training / alone, 3)}


if __name__ == "__main__":
    main(tyro.cli(Sizes))
