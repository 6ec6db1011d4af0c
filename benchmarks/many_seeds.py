"""Train many seeds and see what they end with, and whether any of them loses what it had; prints
one line of JSON.

    python -m benchmarks.many_seeds ppo_pmap --threshold 495 -- --env CartPole-v1 \\
        --num-seeds 200 --seed 10000
    python -m benchmarks.many_seeds appo_pmap --runs 40 --threshold 495 -- --env envpool:CartPole-v1

What stands behind `--` are the flags of the algorithm; where they do not say how often to evaluate,
it is ten times. Rounding makes runs part after some 40,000 steps: compare `--num-devices 1` and 2,
and in front of the command `XLA_FLAGS=--xla_cpu_max_isa=SSE4_2`, which computes as an old processor
would.
"""

import importlib
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from pmaprl.cli.command import parse
from pmaprl.cli.files import read_config
from pmaprl.comparison.curves import align
from pmaprl.runs.estimates import estimate, interval
from pmaprl.runs.metrics import EVALUATION, read_log


@dataclass
class What:
    """Flags of what to train, and of what counts as learned."""

    algorithm: tyro.conf.Positional[str]
    """A file of algos/, such as ppo_pmap."""
    flags: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- FLAGS")] = (
        field(default=())
    )
    """Flags of the algorithm."""
    threshold: float = math.inf
    """Return from which on a seed has learned its task."""
    runs: int = 1
    """Runs one after another, each with the seeds that follow those of the one before."""


def main(what: What) -> None:
    algorithm = importlib.import_module(f"pmaprl.algos.{what.algorithm}")
    args = parse(algorithm.Args, list(what.flags))
    if args.eval_interval == type(args).eval_interval:
        args.eval_interval = args.total_timesteps // 10
    args.quiet = True
    args.checkpoint_interval = 0
    curves = []  # of each run
    with tempfile.TemporaryDirectory() as folder:
        for run in range(what.runs):
            args.run_dir = f"{folder}/{run}"
            algorithm.train(args)
            curves.append(read_log(Path(args.run_dir), [EVALUATION]).series[EVALUATION])
            args.seed += args.num_agents
        config = read_config(args.run_dir)
    steps, returns = align(curves, hold=True)  # [P], [seeds of all runs, P]
    final = returns[:, -1]
    best = returns.max(axis=1)
    bounds = interval(final)
    record = {
        **{name: config[name] for name in ("versions", "devices")},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "algorithm": what.algorithm,
        "flags": what.flags,
        "seeds": final.size,
        "iqm": round(float(estimate(final)), 3),
        "iqm_interval": bounds and [round(float(x), 3) for x in (bounds.low, bounds.high)],
        "learned": int(np.sum(final >= what.threshold)),
        "lost": int(np.sum((best >= what.threshold) & (final < what.threshold))),
        "mean_by_step": {
            int(x): round(y, 2) for x, y in zip(steps, returns.mean(axis=0), strict=True)
        },
        "final": [round(x, 2) for x in final],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(tyro.cli(What))
