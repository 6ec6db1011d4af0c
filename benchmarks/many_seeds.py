"""What many seeds of a run end with, and whether any of them loses what it had; prints one line of JSON.

    python benchmarks/many_seeds.py ppo_pmap --threshold 495 -- --env CartPole-v1 --num-seeds 200 --seed 10000
    python benchmarks/many_seeds.py ppo_pmap --reward-factor 0.01 -- --env CartPole-v1 --num-seeds 200 --seed 10000
    python benchmarks/many_seeds.py appo_pmap --runs 40 --threshold 495 -- --env envpool:CartPole-v1

What stands behind `--` are the flags of the algorithm; where they do not say how often to evaluate, it is ten times.
Rounding makes runs part after some 40,000 steps: compare `--num-devices 1` and 2, and in front of the command
`XLA_FLAGS=--xla_cpu_max_isa=SSE4_2`, which computes as an old processor would.
"""

import copy
import importlib
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import tyro

from common.cli.command import parse
from common.device.devices import choose_devices
from common.drawing.statistics import estimate, interval
from common.envs.environment import Env, Step, Transition
from common.envs.registry import make
from common.runs.directory import versions
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
    reward_factor: float = 1.0
    """Multiply rewards by this; the returns here stay those of the original."""


def scaled(env: Env, factor: float) -> Env:
    """`env` with its rewards multiplied by `factor`."""
    other = copy.copy(env)
    name = "step" if env.resets_itself else "advance"

    def stepped(*inputs: Any) -> Step | Transition:
        out = getattr(env, name)(*inputs)
        return out._replace(reward=factor * out.reward)

    setattr(other, name, stepped)
    return other


def evaluations(run_dir: Path) -> dict[int, np.ndarray]:
    """The mean greedy return of each seed [S], by the step of the evaluation."""
    rows = (row for row in read(run_dir / "metrics.jsonl") if "eval/return_mean" in row)
    return {row["env_steps"]: np.atleast_1d(np.array(row["eval/return_mean"], float)) for row in rows}


def main(what: What) -> None:
    algorithm = importlib.import_module(f"algos.{what.algorithm}")
    args = parse(algorithm.Args, list(what.flags))
    if args.eval_interval == algorithm.Args.eval_interval:
        args.eval_interval = args.total_timesteps // 10
    args.quiet, args.checkpoint_interval, num_seeds = True, 0, getattr(args, "num_seeds", 1)
    env = None
    if what.reward_factor != 1 and not hasattr(args, "num_devices"):
        sys.exit("--reward-factor needs an algorithm whose environments step on the devices")
    if what.reward_factor != 1:
        choose_devices(args.num_devices, args.num_envs, args.block)  # making an environment starts JAX
        env = scaled(make(args.env, args.env_params), what.reward_factor)
    began, runs = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for run in range(what.runs):
            args.run_dir = f"{folder}/{run}"
            algorithm.train(args, *([] if env is None else [env]))
            found = evaluations(Path(args.run_dir))
            runs.append({step: returns / what.reward_factor for step, returns in found.items()})
            args.seed += num_seeds
    final = np.concatenate([run[max(run)] for run in runs])  # [seeds of all runs]
    best = np.concatenate([np.max(list(run.values()), axis=0) for run in runs])
    everywhere = sorted(set.intersection(*map(set, runs)))  # on the host some evaluations may be left out
    spread = interval(final, "iqm")
    record = {
        "benchmark": "many_seeds",
        "versions": versions(),
        "devices": [str(device) for device in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "algorithm": what.algorithm,
        "flags": what.flags,
        "reward_factor": what.reward_factor,
        "seeds": final.size,
        "iqm": round(float(estimate(final, "iqm")), 3),
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
