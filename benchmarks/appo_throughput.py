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
from common.runs.directory import suite_version, versions

ROUNDS = 5


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
    sleeping |= {"num_steps": 8, "envs_per_actor": 128, "hidden_sizes": (256, 256), "num_epochs": 16}
    overlap = measure_overlap(2 * sizes.updates, sleeping)

    one = {**sleeping, "sampler_only": True, "env_params": '{"seconds": 0.0001}'}
    two = one | {"actor_threads": 2, "envs_per_actor": 64}
    threads = [measure(sizes.updates, **flags)["steps_per_second"] for flags in (one, two)]

    cartpole = {"env": "envpool:CartPole-v1"}
    frames = {"env": "envpool:Pong-v5", "encoder": "nature", "share_torso": True, "hidden_sizes": (512,)}
    frames |= {"envs_per_actor": sizes.frames, "num_steps": 16, "num_epochs": 1, "num_minibatches": 1}
    kept = {"cartpole": compare(20 * sizes.updates, cartpole), "frames": compare(2 * sizes.updates, frames)}
    serial = [measure(20 * sizes.updates, **cartpole, serial=serial)["steps_per_second"] for serial in (True, False)]
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


def measure_overlap(updates: int, flags: dict[str, Any]) -> dict[str, float]:
    """Milliseconds per update of actor, learner and both at once, where the first two are about equal.

    The median of several rounds: the speed of a shared machine changes between two measurements.
    """
    args = Args(**flags)
    alone = busy(updates, measure(updates, **flags, serial=True))
    sleep = max(alone["learner"] - alone["actor"], 0.0) / args.num_steps / args.envs_per_actor
    flags = flags | {"env_params": json.dumps({"seconds": sleep})}
    rounds = []
    for _ in range(ROUNDS):
        serial, both = measure(updates, **flags, serial=True), measure(updates, **flags)
        times = busy(updates, serial) | {"together": args.steps_per_update / both["steps_per_second"]}
        ratio = times["together"] / max(times["actor"], times["learner"])
        faster = args.steps_per_update / serial["steps_per_second"] / times["together"]
        times = {f"{name}_ms": round(1e3 * seconds, 1) for name, seconds in times.items()}
        rounds.append(times | {"ratio": round(ratio, 3), "over_serial": round(faster, 2)})
    return sorted(rounds, key=lambda found: found["ratio"])[ROUNDS // 2]


def busy(updates: int, serial: dict[str, Any]) -> dict[str, float]:
    """Seconds per update that actor and learner each take, from a --serial run."""
    actor = serial["time/actor_act"] + serial["time/actor_env_step"]
    return {"actor": actor / updates, "learner": serial["time/learner_update"] / updates}


def compare(updates: int, flags: dict[str, Any]) -> dict[str, float]:
    """Steps per second of the actors alone and while training, and their ratio."""
    alone, training = (measure(updates, **flags, sampler_only=sampler)["steps_per_second"] for sampler in (True, False))
    return {"sampler_only": alone, "training": training, "ratio": round(training / alone, 3)}


if __name__ == "__main__":
    main(tyro.cli(Sizes))
