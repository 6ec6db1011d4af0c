"""Speed of asynchronous SAC: what stays of the gradient updates while actors step, what overlaps, and SBX beside it.

    python benchmarks/asac_throughput.py
    python benchmarks/asac_throughput.py --peer none

Every figure is a ratio of runs made one after another on the same machine; prints one line of JSON.

- kept: gradient updates per second while actors step, over those of the learner alone: with an environment that sleeps,
  whose actors leave the cores to the learner, and with HalfCheetah, whose do not.
- overlap: wall time of training over the longer of the actors' and the learner's time, both measured apart, on an
  environment whose step sleeps in C; the updates are made as long as a rollout takes. 1 is perfect.
- beside_sbx: steps per second on HalfCheetah over those of SBX's SAC, in a process and with packages of its own, with
  one gradient update per step in both. SBX has one environment, as its authors run it, or as many as we; the faster
  counts.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from algos import asac_pmap as asac
from benchmarks.actor_timing import ROUNDS, measure, measure_overlap
from benchmarks.jobs import ends_with_us
from benchmarks.peers.__main__ import TRAINERS, packages_for
from benchmarks.peers.installation import install, python_of
from benchmarks.records import machine_class
from common.cli.checks import Bounds, check_flags
from common.cli.command import main, parse
from common.cli.errors import TrainingError
from common.runs.directory import suite_version, versions

CHEETAH = "HalfCheetah-v5"
SLEEPING = {"env": "gymnasium:sleeping:Sleeping-v0", "vectorization": "vector", "learning_starts": 0}


@dataclass
class Sizes:
    """What to measure."""

    steps: Annotated[int, Bounds(at_least=1_000)] = 4_000
    """Environment steps per measurement."""
    peer: Literal["sbx", "none"] = "sbx"
    """Measure SBX too, which is installed once into the user's cache folder."""

    def __post_init__(self):
        check_flags(self)


def kept(steps: int, flags: dict[str, Any]) -> dict[str, float]:
    """Gradient updates per second of the learner alone and while training, and their ratio: medians of rounds."""
    updates = steps // asac.Args(**flags).steps_per_update
    rounds = []
    for _ in range(ROUNDS):
        serial, both = measure(asac, updates, **flags, serial=True), measure(asac, updates, **flags)
        alone = serial["total_timesteps"] / serial["time/learner_update"]
        rounds.append((both["steps_per_second"] / alone, alone, both["steps_per_second"]))
    ratio, alone, training = sorted(rounds)[ROUNDS // 2]
    return {"learner_alone": round(alone, 1), "training": round(training, 1), "ratio": round(ratio, 3)}


def beside_sbx(steps: int) -> dict[str, Any]:
    """Steps per second of both, the median of turns, and the ratio. Raises TrainingError where SBX fails."""
    packages = packages_for("sbx", "cpu" if machine_class().startswith("cpu-") else "gpu")
    install("sbx", packages)
    python = str(python_of("sbx", packages))
    flags = {"env": f"envpool:{CHEETAH}", "learning_starts": 0}
    args = asac.Args(**flags)

    def theirs(num_envs: int) -> float:
        words = [python, str(TRAINERS / "time_sbx_sac.py"), CHEETAH, str(steps), str(num_envs)]
        done = subprocess.run(ends_with_us(words), stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise TrainingError(f"{' '.join(words[1:])} ended with {done.returncode}, see above")
        return float(done.stdout.splitlines()[-1])

    rounds = [
        (measure(asac, steps // args.steps_per_update, **flags)["steps_per_second"], theirs(1), theirs(args.num_envs))
        for _ in range(ROUNDS)
    ]
    ours, one, many = (sorted(speeds)[ROUNDS // 2] for speeds in zip(*rounds, strict=True))
    speeds = {"ours": round(ours, 1), "sbx": {"1": round(one, 1), str(args.num_envs): round(many, 1)}}
    return speeds | {"ratio": round(ours / max(one, many), 2), "packages": packages}


def run(sizes: Sizes) -> None:
    """What the command does."""
    balanced = SLEEPING | {"envs_per_actor": 64, "actor_threads": 1, "utd_ratio": 0.02}
    slow = SLEEPING | {"env_params": '{"seconds": 0.0002}'}
    record = {
        "benchmark": "asac_throughput",
        "versions": versions() | suite_version("envpool:") | suite_version("gymnasium:"),
        "sizes": vars(sizes),
        "kept": {
            "sleeping": kept(sizes.steps, slow),
            CHEETAH: kept(sizes.steps, {"env": f"envpool:{CHEETAH}", "learning_starts": 0}),
        },
        "overlap": measure_overlap(asac, 10 * sizes.steps // asac.Args(**balanced).steps_per_update, balanced),
    }
    if sizes.peer == "sbx":
        record["beside_sbx"] = beside_sbx(sizes.steps)
    print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main(run, parse(Sizes)))
