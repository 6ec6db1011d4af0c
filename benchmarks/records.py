"""What a benchmark keeps of finished runs: one record for an environment and an algorithm, over all seeds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.jobs import Job
from common.cli.errors import UsageError
from common.cli.files import read_config
from common.cli.run_flags import ONE_TIME
from common.drawing.groups import EVALUATION, estimate, interval
from common.runs.metrics import Log, Series, jsonable, read_log

COMPILATION = "time/compile"
POPULATIONS = "populations"  # the folder of what `benchmarks.population_learning` writes: no records of one algorithm
NAMES = ("env", "algorithm", "command", "versions", "git", "devices", "flags", "seeds", "threshold", "env_steps")
NAMES += ("returns", "seconds", "env_steps_to_threshold", "seconds_to_threshold", "steps_per_second")
NAMES += ("compile_seconds", "wall_seconds")


def machine_class() -> str:
    """The kind of devices and how many, such as cpu-2.

    A process of its own asks, for one that has looked at an accelerator keeps its memory from the runs.
    """
    ask = "import jax; print(jax.devices()[0].device_kind, len(jax.devices()), sep='-')"
    kind = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    if kind.startswith("cpu"):
        return f"cpu-{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    return kind.lower().replace(" ", "-")


def record_of(algorithm: str, env: str, jobs: list[Job], threshold: float) -> dict[str, Any]:
    """What came of runs that differ in their seeds only; `algorithm` and `env` are names to show.

    `returns` are the greedy ones, [steps][seeds], None where one is not finite. Where only others were evaluated at a
    step, a seed's is on the line between its own `evaluations`.

    Seconds and steps/s are of a run with all its seeds, over all its invocations; seconds are means over the runs.
    """
    logs = [log_of(job) for job in jobs]
    curves = [log.series[EVALUATION] for log in logs]
    config = read_config(jobs[0].run_dir)
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    lines = [_on(steps, curve) for curve in curves]
    reached = [_reached(curve, threshold) for curve in curves]
    return {
        "env": env,
        "algorithm": algorithm,
        "command": jobs[0].command,
        "versions": config["versions"],
        "git": config["git"],
        "devices": config["devices"],
        "flags": {name: value for name, value in config["args"].items() if name not in ONE_TIME},
        "seeds": [job.args.seed + i for job in jobs for i in range(job.args.num_agents)],
        "threshold": threshold,
        "env_steps": [int(step) for step in steps],
        "returns": [[jsonable(value) for value in row] for row in np.hstack([line[:, 1:] for line in lines])],
        "seconds": np.mean([line[:, 0] for line in lines], axis=0).tolist(),
        "evaluations": [len(np.unique(curve.steps)) for curve in curves for _ in curve.values.T],
        "env_steps_to_threshold": [step for found in reached for step, _ in found],
        "seconds_to_threshold": [seconds for found in reached for _, seconds in found],
        "steps_per_second": [
            job.args.num_agents * log.steps / log.trained_seconds for job, log in zip(jobs, logs, strict=True)
        ],
        "compile_seconds": [float(np.unique(log.series[COMPILATION].values).sum()) for log in logs],
        "wall_seconds": [log.wall_seconds for log in logs],
    }


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def spread(returns: np.ndarray) -> str:
    """The interquartile mean of the returns [S] of seeds, with its 95% bootstrap interval where they are several."""
    bounds = interval(returns)
    return f"{estimate(returns):.4g}" + (f" ({bounds.low:.4g} to {bounds.high:.4g})" if bounds else "")


def log_of(job: Job) -> Log:
    """What a finished run has written. Raises UsageError where it is not all there."""
    log = read_log(job.run_dir, [EVALUATION, COMPILATION])
    evaluated = max(log.series[EVALUATION].steps, default=0) if EVALUATION in log.series else 0
    if evaluated < job.args.total_timesteps or COMPILATION not in log.series:
        end = f"its evaluations end at step {evaluated:,.0f} of {job.args.total_timesteps:,}"
        raise UsageError(f"{job.run_dir} is damaged, {end}: delete it, and the same command runs it again")
    return log


def load_records(folder: Path) -> list[dict[str, Any]]:
    """All records of a class of machines."""
    return [load_record(path) for path in sorted(folder.glob("*/*.json")) if path.parent.name != POPULATIONS]


def load_record(path: Path) -> dict[str, Any]:
    """What `record_of` gave. Raises UsageError where the file is something else."""
    return read_record(path, NAMES, _check, "benchmarks.learning")


def read_record(path: Path, names: Sequence[str], check: Callable[[dict], None], maker: str) -> dict[str, Any]:
    """These entries of a file of `maker`'s, for which `check` raised nothing. Raises UsageError for anything else."""
    try:
        record = json.loads(path.read_text())
        later = {name: record[name] for name in ("evaluations",) if name in record}  # which older files do not have
        record = {name: record[name] for name in names} | later
        check(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path} is not a result of {maker}, or damaged ({type(error).__name__})"
        raise UsageError(f"{what}: delete it, and the command that made it writes it again") from error
    return record


def _check(record: dict[str, Any]) -> None:
    """Raise ValueError or TypeError where sizes do not fit each other, or something is no number."""
    evaluations, seeds = len(record["env_steps"]), len(record["seeds"])
    sizes = {"returns": (evaluations, seeds), "env_steps": (evaluations,), "seconds": (evaluations,), "threshold": ()}
    sizes |= {"env_steps_to_threshold": (seeds,), "seconds_to_threshold": (seeds,)}
    for name, size in sizes.items():
        if np.array(record[name], float).shape != size:
            raise ValueError(name)
    if not (np.isfinite(record["threshold"]) and np.isfinite(returns_of(record)).all() and seeds):
        raise ValueError("returns")
    for name in ("steps_per_second", "compile_seconds"):
        if not (len(record[name]) and np.isfinite(np.array(record[name], float)).all()):
            raise ValueError(name)


def returns_of(record: dict[str, Any]) -> np.ndarray:
    """The returns [E, S] of E evaluations; one that is not finite counts as the lowest of the record."""
    returns = np.array(record["returns"], float)
    return np.where(np.isfinite(returns), returns, np.nanmin(returns))


def evaluations_of(record: dict[str, Any]) -> list[int]:
    """How often each seed was evaluated; older records hold only what all were."""
    return record.get("evaluations") or [len(record["env_steps"])] * len(record["seeds"])


def _on(steps: np.ndarray, curve: Series) -> np.ndarray:
    """Seconds and returns [E, 1 + S] at these steps; of equal ones the last, between two on the line."""
    own = dict(zip(curve.steps, np.column_stack([curve.wall, curve.values]), strict=True))
    between = np.stack([np.interp(steps, list(own), line) for line in np.array(list(own.values())).T], axis=1)
    return np.stack([own.get(step, row) for step, row in zip(steps, between, strict=True)])


def _reached(curve: Series, threshold: float) -> list[tuple[int | None, float | None]]:
    """For each seed, the steps and the seconds after which an evaluation first reaches the threshold; None if never."""
    found = []
    for values in curve.values.T:
        there = np.flatnonzero(values >= threshold)
        found.append((int(curve.steps[there[0]]), float(curve.wall[there[0]])) if len(there) else (None, None))
    return found
