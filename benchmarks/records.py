"""Records that a benchmark keeps of finished runs: one for an environment and an algorithm, over
all seeds.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.jobs import Job, last_line
from benchmarks.optimum import Optimum, optimum_of
from pmaprl.cli.errors import UsageError
from pmaprl.cli.files import read_config
from pmaprl.cli.run_flags import ONE_TIME
from pmaprl.envs.host import evaluation_params
from pmaprl.runs.estimates import estimate, interval
from pmaprl.runs.metrics import EVALUATION, Log, Series, jsonable, read_log

NAMES = (
    "env",
    "algorithm",
    "command",
    "versions",
    "git",
    "devices",
    "flags",
    "seeds",
    "threshold",
    "env_steps",
)
NAMES += ("returns", "seconds", "env_steps_to_threshold", "steps_per_second")


def machine_class() -> str:
    """The kind of devices and how many, such as cpu-2.

    A process of its own asks, for one that has looked at an accelerator keeps its memory from the
    runs.
    """
    ask = "import json, jax; print(json.dumps([jax.devices()[0].device_kind, len(jax.devices())]))"
    kind, count = last_line([sys.executable, "-c", ask])
    if kind == "cpu":
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{kind.lower().replace(' ', '-')}-{count}"


def record_of(algorithm: str, env: str, jobs: list[Job], threshold: float) -> dict[str, Any]:
    """Sum up runs that differ in their seeds only; `algorithm` and `env` are names to show.

    `returns` are the greedy ones, [steps][seeds], None where one is not finite. Where only others
    were evaluated at a step, a seed's is on the line between its own `evaluations`. `optimum` is
    there where it is known: the best possible return from the starts of these evaluations, and from
    all starts.

    Seconds and steps/s are of a run with all its seeds, over all its invocations; seconds are means
    over the runs.
    """
    logs = [log_of(job) for job in jobs]
    curves = [log.series[EVALUATION] for log in logs]
    config = read_config(jobs[0].run_dir)
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    lines = [_on(steps, curve) for curve in curves]
    best = _optimum(config["args"])
    return {
        "env": env,
        "algorithm": algorithm,
        "command": jobs[0].command,
        **{name: config[name] for name in ("versions", "git", "devices")},
        "flags": {name: value for name, value in config["args"].items() if name not in ONE_TIME},
        "seeds": [job.args.seed + i for job in jobs for i in range(job.args.num_agents)],
        "threshold": threshold,
        **({"optimum": best._asdict()} if best else {}),
        "env_steps": [int(step) for step in steps],
        "returns": [
            [jsonable(value) for value in row] for row in np.hstack([line[:, 1:] for line in lines])
        ],
        "seconds": np.mean([line[:, 0] for line in lines], axis=0).tolist(),
        "evaluations": [len(np.unique(curve.steps)) for curve in curves for _ in curve.values.T],
        "env_steps_to_threshold": [
            _reached(curve, x, threshold) for curve in curves for x in curve.values.T
        ],
        "steps_per_second": [
            job.args.num_agents * log.steps / log.trained_seconds
            for job, log in zip(jobs, logs, strict=True)
        ],
    }


def _optimum(flags: dict[str, Any]) -> Optimum | None:
    """The best returns of a run's evaluations, where they are known."""
    if "env" not in flags or "eval_episodes" not in flags:
        return None
    return optimum_of(flags["env"], evaluation_params(flags), flags["eval_episodes"])


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def spread(returns: np.ndarray) -> str:
    """The interquartile mean of the returns [S] of seeds and its 95% bootstrap interval, if that is
    another number.
    """
    bounds = interval(returns)
    numbers = [
        f"{x:.4g}"
        for x in ((estimate(returns), bounds.low, bounds.high) if bounds else (estimate(returns),))
    ]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]" if len(set(numbers)) > 1 else numbers[0]


def log_of(job: Job) -> Log:
    """Read what a finished run has written. Raises UsageError where it is not all there."""
    log = read_log(job.run_dir, [EVALUATION])
    evaluated = max(log.series[EVALUATION].steps, default=0) if EVALUATION in log.series else 0
    if evaluated < job.args.total_timesteps:
        end = f"its evaluations end at step {evaluated:,.0f} of {job.args.total_timesteps:,}"
        raise UsageError(
            f"{job.run_dir} is damaged, {end}: delete it, and the same command runs it again"
        )
    return log


def load_records(machine: Path) -> list[dict[str, Any]]:
    """All records of a class of machines, each with its `file`, as seen from the folder of all."""
    files = sorted(machine.glob("*/*.json"))
    return [
        load_record(path) | {"file": path.relative_to(machine.parent).as_posix()} for path in files
    ]


def load_record(path: Path) -> dict[str, Any]:
    """Read what `record_of` gave. Raises UsageError where the file is something else."""
    return read_record(path, "benchmarks.learning", _check)


def read_record(path: Path, maker: str, check: Callable[[dict], Any]) -> dict[str, Any]:
    """A file of `maker`'s, for which `check` raised nothing. Raises UsageError for anything
    else.
    """
    try:
        record = json.loads(path.read_text())
        check(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path} is not a result of {maker}, or damaged ({type(error).__name__})"
        raise UsageError(
            f"{what}: delete it, and the command that made it writes it again"
        ) from error
    return record


def _check(record: dict[str, Any]) -> None:
    """Raise KeyError, ValueError or TypeError where something lacks, does not fit, or is no
    number.
    """
    itemgetter(*NAMES)(record)
    evaluations = len(record["env_steps"])
    seeds = len(record["seeds"])
    sizes = {
        "returns": (evaluations, seeds),
        "env_steps": (evaluations,),
        "seconds": (evaluations,),
        "threshold": (),
    }
    sizes |= {"env_steps_to_threshold": (seeds,)}
    for name, size in sizes.items():
        if np.array(record[name], float).shape != size:
            raise ValueError(name)
    numbers = [record["threshold"], returns_of(record), np.array(record["steps_per_second"], float)]
    if "optimum" in record:
        numbers.append(itemgetter(*Optimum._fields)(record["optimum"]))
    if not (seeds and all(np.size(x) and np.isfinite(x).all() for x in numbers)):
        raise ValueError("numbers")


def returns_of(record: dict[str, Any]) -> np.ndarray:
    """The returns [E, S] of E evaluations; one that is not finite counts as the lowest of the
    record.
    """
    returns = np.array(record["returns"], float)
    return np.where(np.isfinite(returns), returns, np.nanmin(returns))


def _on(steps: np.ndarray, curve: Series) -> np.ndarray:
    """Seconds and returns [E, 1 + S] at these steps; of equal ones the last, between two on the
    line.
    """
    own = dict(zip(curve.steps, np.column_stack([curve.wall, curve.values]), strict=True))
    between = np.stack(
        [np.interp(steps, list(own), line) for line in np.array(list(own.values())).T], axis=1
    )
    return np.stack([own.get(step, row) for step, row in zip(steps, between, strict=True)])


def _reached(curve: Series, values: np.ndarray, threshold: float) -> int | None:
    """Steps after which a seed's evaluation first reaches the threshold; None if never."""
    return next((int(step) for step in curve.steps[values >= threshold]), None)
