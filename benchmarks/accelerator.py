"""How fast training gets with more environments, on whatever devices there are: one table and one picture.

python -m benchmarks.accelerator --minutes 8

Each algorithm trains on each environment with more and more environments, until the time is over, a device's memory is
full, or the speed falls. What is measured is kept at once, so it may be stopped at any time.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.jobs import ROOT
from benchmarks.records import machine_class
from benchmarks.speed import Training
from common.cli.checks import check, check_types
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.cli.files import read_text, writing
from common.cli.words import as_words
from common.drawing.figure import Line, Panel, draw
from common.runs.directory import write_json

FIRST = {"ppo_pmap": 64, "ppo_rnn_pmap": 64, "sac_pmap": 16}  # environments to begin with
GROWTH = 4  # how many times as many come next
FILE = "accelerator.json"
WORTH = 1.05  # more environments are tried as long as the last ones were so many times as fast as those before
Row = dict[str, Any]


@dataclass(kw_only=True)
class Args:
    """Measure the speed of training over growing numbers of environments."""

    minutes: float = 8.0
    """When to end; a measurement that has begun is finished."""
    algos: tuple[str, ...] = tuple(FIRST)
    """Algorithms that step their environments on the device."""
    envs: tuple[str, ...] = ("CartPole-v1", "Breakout-MinAtar")
    """Environments; each is trained with each algorithm."""
    results: str = "benchmarks/results"
    """Where accelerator.json and its picture go, into a folder for this class of machine."""

    def __post_init__(self):
        check_types(self)
        check(self, "minutes", above=0)
        for algorithm in self.algos:
            if algorithm not in FIRST:
                raise UsageError(f"--algos {algorithm} is not among {', '.join(FIRST)}")
        if not (self.algos and self.envs):
            raise UsageError("--algos and --envs need at least one each")


def measure_all(args: Args) -> None:
    """What the command does. Raises UsageError where an environment cannot be, TrainingError where nothing can."""
    folder, deadline = Path(args.results) / machine_class(), time.monotonic() + 60 * args.minutes
    with writing(f"folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    known = {_key(row): row for row in (load_rows(folder) if (folder / FILE).exists() else [])}
    for row in measurements(args, deadline):
        print(sentence(row), flush=True)
        known[_key(row)] = row
        write_json(folder / FILE, {"rows": [known[key] for key in sorted(known)]})
    if not any("steps_per_second" in row for row in known.values()):
        raise TrainingError("nothing was measured, see above")
    picture([known[key] for key in sorted(known)]).savefig(folder / "accelerator.png")
    print(f"wrote {folder / FILE} and {folder / 'accelerator.png'}")


def _key(row: Row) -> tuple[str, str, int]:
    return row["algorithm"], row["env"], row["num_envs"]


def measurements(args: Args, deadline: float) -> Iterator[Row]:
    """One row after another: the first size of each series, then the next of each that is worth it.

    Raises UsageError where the first size of one cannot be measured.
    """
    series = [(algorithm, env, FIRST[algorithm]) for algorithm in args.algos for env in args.envs]
    last = {}
    while series:
        algorithm, env, num_envs = series.pop(0)
        before, began = last.get((algorithm, env)), time.monotonic()
        expected = GROWTH * before["seconds"] if before else 0.0
        if began + expected > deadline:
            print(f"{algorithm} {env}: {num_envs:,} envs may take {expected:.0f} s, more than is left", flush=True)
            continue
        try:
            row = measurement(algorithm, env, num_envs)
        except UsageError as error:  # of a larger size, that it does not fit
            if not before:
                raise
            row = failure(algorithm, env, num_envs, str(error))
        row["seconds"] = round(time.monotonic() - began, 1)
        yield row
        if "failed" in row or (before and row["steps_per_second"] < WORTH * before["steps_per_second"]):
            continue
        last[algorithm, env] = row
        series.append((algorithm, env, GROWTH * num_envs))


def measurement(algorithm: str, env: str, num_envs: int) -> Row:
    """What benchmarks.speed measures, in a process that may run out of memory; `failed` says why not.

    Raises UsageError where the algorithm does not take these sizes or this environment.
    """
    flags = {"env": env, "num_envs": num_envs} | sizes(algorithm, env, num_envs)
    training = Training(ROOT, algorithm, as_words(flags), seconds=2.0, kernels=True)
    try:
        speed = training.measure()
    except TrainingError as error:
        return failure(algorithm, env, num_envs, str(error))
    return training.about | {"flags": flags, "steps_per_second": speed}


def failure(algorithm: str, env: str, num_envs: int, reason: str) -> Row:
    """A row of what could not be measured."""
    return {"algorithm": algorithm, "env": env, "num_envs": num_envs, "failed": reason}


def sizes(algorithm: str, env: str, num_envs: int) -> dict[str, Any]:
    """The other sizes."""
    if algorithm == "sac_pmap":  # at most 8 gradient updates after each step of all environments
        return {"utd_ratio": min(1.0, 8 / num_envs)}
    return {"num_minibatches": 8, "share_torso": env.endswith("-MinAtar")}


def sentence(row: Row) -> str:
    """A row for the console."""
    where = f"{row['algorithm']} {row['env']} {row['num_envs']:>7,} envs"
    if "failed" in row:
        return f"{where}  failed: {row['failed']}"
    speed, _, memory, kernels, compiled = _cells(row)
    return f"{where}  {speed:>12} steps/s  {memory:>10}  {kernels:>7} kernels  compiled in {compiled}"


def load_rows(machine: Path) -> list[Row]:
    """What was measured on a class of machines. Raises UsageError where the file is something else."""
    path = machine / FILE
    try:
        rows = json.loads(read_text(path))["rows"]
        table(rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a result of benchmarks.accelerator: {error!r}") from error
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| algorithm | environment | environments | steps/s | share of the floor | memory | kernels | compiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["algorithm"], row["env"], f"{row['num_envs']:,}"]
        cells += [f"failed: {row['failed']}", "", "", "", ""] if "failed" in row else _cells(row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    memory, kernels = row["memory_bytes"], row["kernels_per_update"]  # None where the compiler does not tell
    share = row.get("share_of_floor")  # of the networks' own speed, which older rows have
    return [
        f"{row['steps_per_second']:,.0f}",
        "" if share is None else f"{share:.0%}",
        "" if memory is None else f"{memory / 1e6:,.0f} MB",
        "" if kernels is None else f"{kernels:,}",
        f"{row['compile_seconds']:.0f} s",
    ]


def picture(rows: list[Row]) -> Any:
    """Steps/s over environments, and of older rows what the networks alone would allow."""
    panels, rows = [], [row for row in rows if "failed" not in row]
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        lines = []
        for style, env in enumerate(dict.fromkeys(row["env"] for row in rows if row["algorithm"] == algorithm)):
            chosen = [row for row in rows if (row["algorithm"], row["env"]) == (algorithm, env)]
            # The same of 7 colours, and of 4 dashes the first and the last.
            for name, label, of_line in ("steps_per_second", env, 0), ("floor_steps_per_second", f"{env}, floor", 7):
                if points := [(row["num_envs"], row[name]) for row in chosen if name in row]:
                    lines.append(Line(label, *np.array(points, float).T, style=8 * style + of_line))
        panels.append(Panel(algorithm, lines))
    figure = draw(panels, "num_envs", "environment steps/s")
    count_in_factors(figure)
    return figure


def count_in_factors(figure: Any, whole: bool = False) -> None:
    """Logarithmic axes, with a tick at every x there is; `whole` writes these without prefixes such as k."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter, NullLocator

    for axes in figure.axes:
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(sorted({x for line in axes.lines for x in line.get_xdata()}))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(EngFormatter(sep=""))
            axis.set_minor_formatter(NullFormatter())
        if whole:
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))


if __name__ == "__main__":
    sys.exit(main(measure_all, parse(Args)))
