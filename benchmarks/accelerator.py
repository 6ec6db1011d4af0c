"""How fast training gets with more environments, on whatever devices there are: one table and one
picture.

python -m benchmarks.accelerator --minutes 8

Each algorithm trains on each environment with more and more environments, until the time is over, a
device's memory is full, or the speed falls. What is measured is kept at once, so it may be stopped
at any time.
"""

import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.jobs import ROOT, make_folder
from benchmarks.records import machine_class, markdown, read_record
from benchmarks.speed import Training, sizes_of
from pmaprl.cli.checks import Timeout, check_flags
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.run_flags import flag_words
from pmaprl.drawing.figures import Line, Panel, draw
from pmaprl.runs.directory import write_json

Algorithm = Literal["ppo_pmap", "ppo_rnn_pmap", "pqn_pmap", "sac_pmap", "dqn_pmap"]
# Environments to begin with; 4 times as many come next
FIRST: dict[Algorithm, int] = {
    "ppo_pmap": 64,
    "ppo_rnn_pmap": 64,
    "pqn_pmap": 64,
    "sac_pmap": 16,
    "dqn_pmap": 16,
}
FILE = "accelerator.json"
# More environments are tried as long as the last ones were so many times as fast as those before
WORTH = 1.05
COLUMNS = "algorithm", "environment", "environments", "steps/s", "memory", "kernels", "compiled"
Row = dict[str, Any]


class Size(NamedTuple):
    """Training whose speed is measured."""

    algorithm: Algorithm
    env: str
    num_envs: int


@dataclass(kw_only=True)
class Args:
    """Measure the speed of training over growing numbers of environments."""

    minutes: Timeout = 8.0
    """Minutes after which no measurement begins."""
    algos: tuple[Algorithm, ...] = tuple(FIRST)
    """Algorithms that step their environments on the device."""
    envs: tuple[str, ...] = ("CartPole-v1", "Breakout-MinAtar")
    """Environments; each is trained with each algorithm."""
    results: str = "benchmarks/results"
    """Folder for accelerator.json and its picture, in a folder of this class of machine."""

    def __post_init__(self):
        check_flags(self)


def measure_all(args: Args) -> None:
    """Measure the first size of each series, then the next of each that is worth it.

    Raises UsageError where the first size of one cannot be, TrainingError where nothing can.
    """
    folder = Path(args.results) / machine_class()
    deadline = time.monotonic() + 60 * args.minutes
    make_folder(folder)
    rows = load_rows(folder) if (folder / FILE).exists() else []
    series = [
        (Size(algorithm, env, FIRST[algorithm]), 0.0)
        for algorithm in args.algos
        for env in args.envs
    ]
    print(table([]))
    while series and time.monotonic() < deadline:
        size, before = series.pop(0)
        row = size._asdict() | measurement(*size)
        print(table([row]).splitlines()[-1], flush=True)
        known = {itemgetter(*Size._fields)(one): one for one in (*rows, row)}
        rows = [known[key] for key in sorted(known)]
        write_json(folder / FILE, {"rows": rows})
        if row.get("steps_per_second", -1.0) >= WORTH * before:
            larger = size._replace(num_envs=4 * size.num_envs)
            series.append((larger, row["steps_per_second"]))
    for (algorithm, env, num_envs), _ in series:
        print(f"no time left for {algorithm} {env} with {num_envs:,} environments", flush=True)
    if all("failed" in row for row in rows):
        raise TrainingError("nothing was measured, see above")
    picture(rows).savefig(folder / "accelerator.png")
    print(f"wrote {folder / FILE} and {folder / 'accelerator.png'}")


def measurement(algorithm: Algorithm, env: str, num_envs: int) -> Row:
    """Run benchmarks.speed in a process that may run out of memory; `failed` says why not.

    Raises UsageError where the algorithm does not take its first size, or this environment.
    """
    # At most 8 gradient updates after each step of all environments; several steps of DQN would
    # need a warm-up
    of_replay = {"utd_ratio": min(1.0, 8 / num_envs)} | (
        {"n_steps": 1} if algorithm == "dqn_pmap" else {}
    )
    of_rollouts = {"num_minibatches": 8} | (
        {"share_torso": env.endswith("-MinAtar")} if "ppo" in algorithm else {}
    )
    flags = {"env": env, "num_envs": num_envs} | (
        of_replay if algorithm in ("sac_pmap", "dqn_pmap") else of_rollouts
    )
    training = Training(
        checkout=ROOT,
        algorithm=algorithm,
        words=flag_words(flags),
        seconds=2.0,
        kernels=True,
    )
    try:
        return {"flags": flags, "steps_per_second": training.measure()} | training.about
    except (TrainingError, UsageError) as error:
        if num_envs == FIRST[algorithm] and isinstance(error, UsageError):
            raise
        return {"failed": str(error)}


def load_rows(machine: Path) -> list[Row]:
    """Read what was measured on a class of machines. Raises UsageError where the file is something
    else.
    """
    return read_record(
        machine / FILE, "benchmarks.accelerator", lambda record: table(record["rows"])
    )["rows"]


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = []
    for row in rows:
        cells = [f"failed: {row['failed']}", "", "", ""] if "failed" in row else []
        if not cells:
            kernels, memory = sizes_of(row)
            cells = [
                f"{row['steps_per_second']:,.0f}",
                memory,
                kernels,
                f"{row['compile_seconds']:.0f} s",
            ]
        lines.append([row["algorithm"], row["env"], f"{row['num_envs']:,}", *cells])
    return markdown(COLUMNS, lines)


def picture(rows: list[Row]) -> Any:
    """Steps/s over environments."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    panels = []
    series = {}
    for row in rows:
        if "failed" not in row:
            of_env = series.setdefault(row["algorithm"], {}).setdefault(row["env"], [])
            of_env.append((row["num_envs"], row["steps_per_second"]))
    for algorithm, of_envs in series.items():
        lines = [
            Line(env, *np.array(points, float).T, style=i)
            for i, (env, points) in enumerate(of_envs.items())
        ]
        panels.append(Panel(algorithm, lines))
    figure = draw(panels, "environments", "environment steps/s")
    for axes in figure.axes:
        axes.set(xscale="log", yscale="log")
        axes.autoscale()  # the limits are those of linear axes, which reach below zero
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.set_xticks(sorted({x for line in axes.lines for x in line.get_xdata()}))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
    return figure


if __name__ == "__main__":
    main(measure_all, parse(Args))
