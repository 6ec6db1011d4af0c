"""What many seeds of a run end with, and whether any of them loses what it had; prints one line of JSON.

    python benchmarks/many_seeds.py ppo_pmap --threshold 495 -- --env CartPole-v1 --num-seeds 200 --seed 10000
    python benchmarks/many_seeds.py appo_pmap --runs 40 --threshold 495 -- --env envpool:CartPole-v1

What stands behind `--` are the flags of the algorithm; where they do not say how often to evaluate, it is ten times.
Rounding makes runs part after some 40,000 steps: compare `--num-devices 1` and 2, and in front of the command
`XLA_FLAGS=--xla_cpu_max_isa=SSE4_2`, which computes as an old processor would.
"""

import importlib
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tyro

from common.cli.command import parse
from common.drawing.groups import estimate, interval
from common.runs.metrics import read


@dataclass
class What:
    """What to train, and what counts as learned."""

    algorithm: tyro.conf.Positional[str]
    """A file of algos/, such as ppo_pmap."""
    flags: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = field(default=())
    """Flags of the algorithm."""
    threshold: float = math.inf
    """Return from which on a seed has learned its task."""
    runs: int = 1
    """Runs one after another, each with the seeds that follow those of the one before."""


def main(what: What) -> None:
    algorithm = importlib.import_module(f"algos.{what.algorithm}")
    args = parse(algorithm.Args, list(what.flags))
    if args.eval_interval == type(args).eval_interval:
        args.eval_interval = args.total_timesteps // 10
    args.quiet, args.checkpoint_interval = True, 0
    began, runs = time.perf_counter(), []  # of each the mean greedy returns [S], by the step of the evaluation
    with tempfile.TemporaryDirectory() as folder:
        for run in range(what.runs):
            args.run_dir = f"{folder}/{run}"
            algorithm.train(args)
            rows = [row for row in read(Path(args.run_dir) / "metrics.jsonl") if "eval/return_mean" in row]
            runs.append({row["env_steps"]: np.array(row["eval/return_mean"], float, ndmin=1) for row in rows})
            args.seed += getattr(args, "num_seeds", 1)
        config = json.loads((Path(args.run_dir) / "config.json").read_text())
    final = np.concatenate([run[max(run)] for run in runs])  # [seeds of all runs]
    best = np.concatenate([np.max(list(run.values()), axis=0) for run in runs])
    everywhere = sorted(set.intersection(*map(set, runs)))  # on the host some evaluations may be left out
    spread = interval(final)
    record = {
        "benchmark": "many_seeds",
        "versions": config["versions"],
        "devices": config["devices"],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "algorithm": what.algorithm,
        "flags": what.flags,
        "seeds": final.size,
        "iqm": round(float(estimate(final)), 3),
        "iqm_interval": spread and [round(float(spread.low), 3), round(float(spread.high), 3)],
        "min": round(float(final.min()), 3),
        "max": round(float(final.max()), 3),
        "learned": int(np.sum(final >= what.threshold)),
        "lost": int(np.sum((best >= what.threshold) & (final < what.threshold))),
        "mean_by_step": {step: round(float(np.mean([run[step] for run in runs])), 2) for step in everywhere},
        "final": [round(float(x), 2) for x in final],
        "seconds": round(time.perf_counter() - began),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(tyro.cli(What))
