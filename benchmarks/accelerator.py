"""How fast training gets with more environments, on whatever devices there are: one table and one picture.

python -m benchmarks.accelerator --minutes 8

Each algorithm trains on each environment with more and more environments, until the time is over, a device's memory is
full, or the speed falls. What is measured is kept at once, so it may be stopped at any time.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.jobs import ROOT
from benchmarks.records import machine_class, markdown
from benchmarks.speed import Training
from common.cli.checks import Timeout, check_flags
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.cli.files import writing
from common.cli.run_flags import flag_words
from common.drawing.figures import Line, Panel, draw
from common.runs.directory import write_json

FIRST = {"ppo_pmap": 64, "ppo_rnn_pmap": 64, "sac_pmap": 16}  # environments to begin with; 4 times as many come next
FILE = "accelerator.json"
WORTH = 1.05  # more environments are tried as long as the last ones were so many times as fast as those before
COLUMNS = "algorithm", "environment", "environments", "steps/s", "share of the floor", "memory", "kernels", "compiled"
Row = dict[str, Any]


@dataclass(kw_only=True)
class Args:
    """Measure the speed of training over growing numbers of environments."""

    minutes: Timeout = 8.0
    """When to end; a measurement that has begun is finished."""
    algos: tuple[Literal["ppo_pmap", "ppo_rnn_pmap", "sac_pmap"], ...] = tuple(FIRST)
    """Algorithms that step their environments on the device."""
    envs: tuple[str, ...] = ("CartPole-v1", "Breakout-MinAtar")
    """Environments; each is trained with each algorithm."""
    results: str = "benchmarks/results"
    """Where accelerator.json and its picture go, into a folder for this class of machine."""

    def __post_init__(self):
        check_flags(self)


def measure_all(args: Args) -> None:
    """What the command does. Raises UsageError where an environment cannot be, TrainingError where nothing can."""
    folder, deadline = Path(args.results) / machine_class(), time.monotonic() + 60 * args.minutes
    with writing(f"folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    rows = load_rows(folder) if (folder / FILE).exists() else []
    known = {(row["algorithm"], row["env"], row["num_envs"]): row for row in rows}
    print(table([]))
    for row in measurements(args, deadline):
        print(table([row]).splitlines()[-1], flush=True)
        known |= {(row["algorithm"], row["env"], row["num_envs"]): row}
        rows = [known[key] for key in sorted(known)]
        write_json(folder / FILE, {"rows": rows})
    if all("failed" in row for row in rows):
        raise TrainingError("nothing was measured, see above")
    picture(rows).savefig(folder / "accelerator.png")
    print(f"wrote {folder / FILE} and {folder / 'accelerator.png'}")


def measurements(args: Args, deadline: float) -> Iterator[Row]:
    """One row after another: the first size of each series, then the next of each that is worth it.

    Raises UsageError where the first size of one cannot be measured.
    """
    series = [(algorithm, env, FIRST[algorithm], 0.0) for algorithm in args.algos for env in args.envs]
    while series and time.monotonic() < deadline:
        algorithm, env, num_envs, before = series.pop(0)
        try:
            row = measurement(algorithm, env, num_envs)
        except UsageError as error:  # of a larger size, that it does not fit
            if not before:
                raise
            row = {"failed": str(error)}
        yield {"algorithm": algorithm, "env": env, "num_envs": num_envs} | row
        if row.get("steps_per_second", -1.0) >= WORTH * before:
            series.append((algorithm, env, 4 * num_envs, row["steps_per_second"]))
    for algorithm, env, num_envs, _ in series:
        print(f"no time left for {algorithm} {env} with {num_envs:,} environments", flush=True)


def measurement(algorithm: str, env: str, num_envs: int) -> Row:
    """What benchmarks.speed measures, in a process that may run out of memory; `failed` says why not.

    Raises UsageError where the algorithm does not take these sizes or this environment.
    """
    of_ppo = {"num_minibatches": 8, "share_torso": env.endswith("-MinAtar")}
    of_sac = {"utd_ratio": min(1.0, 8 / num_envs)}  # at most 8 gradient updates after each step of all environments
    flags = {"env": env, "num_envs": num_envs} | (of_sac if algorithm == "sac_pmap" else of_ppo)
    training = Training(ROOT, algorithm, flag_words(flags), seconds=2.0, kernels=True)
    try:
        speed = training.measure()
    except TrainingError as error:
        return {"failed": str(error)}
    return training.about | {"flags": flags, "steps_per_second": speed}


def load_rows(machine: Path) -> list[Row]:
    """What was measured on a class of machines. Raises UsageError where the file is something else."""
    path = machine / FILE
    try:
        rows = json.loads(path.read_text())["rows"]
        table(rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a result of benchmarks.accelerator: {error!r}") from error
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = []
    for row in rows:
        cells = [row["algorithm"], row["env"], f"{row['num_envs']:,}"]
        if "failed" in row:
            cells += [f"failed: {row['failed']}", "", "", "", ""]
        else:
            share = row.get("share_of_floor")  # of the networks' own speed, which older rows have
            memory, kernels = row["memory_bytes"], row["kernels_per_update"]  # None where the compiler does not tell
            cells += [f"{row['steps_per_second']:,.0f}", "" if share is None else f"{share:.0%}"]
            cells += ["" if memory is None else f"{memory / 1e6:,.0f} MB", "" if kernels is None else f"{kernels:,}"]
            cells += [f"{row['compile_seconds']:.0f} s"]
        lines.append(cells)
    return markdown(COLUMNS, lines)


def picture(rows: list[Row]) -> Any:
    """Steps/s over environments, and of older rows what the networks alone would allow."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

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
    for axes in figure.axes:
        axes.set(xscale="log", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.set_xticks(sorted({x for line in axes.lines for x in line.get_xdata()}))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(EngFormatter(sep=""))
            axis.set_minor_formatter(NullFormatter())
    return figure


if __name__ == "__main__":
    main(measure_all, parse(Args))
