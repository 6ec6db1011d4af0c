"""docs/benchmark.md and its pictures, made of the files in benchmarks/results/ and of nothing else.

python -m benchmarks.report
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accelerator import FILE, load_rows, picture, table
from benchmarks.peers.starts import in_jax, same_starts
from benchmarks.records import POPULATIONS, evaluations_of, load_record, load_records, markdown, returns_of
from benchmarks.sets import Goal, goals, goals_of_peer, peers
from benchmarks.tasks import listed
from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.cli.files import check_target, writing
from common.device.evaluation import SEED
from common.drawing.figures import Line, Panel, draw
from common.drawing.groups import Interval, estimate, interval

Record = dict[str, Any]


@dataclass(kw_only=True)
class Args:
    """Write the page of the benchmark and its pictures."""

    results: str = "benchmarks/results"
    """Where `python -m benchmarks.learning` wrote its results."""
    page: str = "docs/benchmark.md"
    """The page; its pictures go into the folder images beside it."""


def report(args: Args) -> None:
    """What the command does."""
    results, page = Path(args.results), Path(args.page)
    if not _machines(results):
        raise UsageError(f"{results} has no folder of a machine with results: python -m benchmarks.learning makes some")
    check_target(page)
    known = {(goal.algorithm, goal.env) for goal in _tasks()}
    for record in (record for machine in _machines(results) for record in load_records(machine)):
        if (record["algorithm"], record["env"]) not in known:
            print(f"left out: {record['env']} with {record['algorithm']}, which no set has")
    text, images = page_of(results), page.parent / "images"
    with writing(f"page {page}"):
        images.mkdir(parents=True, exist_ok=True)
        for name, figure in pictures(results):
            figure.savefig(images / name)
        page.write_text(text)
    print(f"wrote {page}")


def page_of(results: Path) -> str:
    """The page as Markdown."""
    chapters = list(_chapters(results))
    parts = [INTRODUCTION, _beside_others(chapters), *(_chapter(*chapter) for chapter in chapters), _missing(results)]
    measured = [_speeds(machine, rows) for machine, rows in _measured(results)]
    parts += [SPEED, *measured] if measured else []
    return "\n\n".join(parts) + "\n"


def pictures(results: Path) -> Iterator[tuple[str, Any]]:
    """Names and figures: for each set of environments curves over steps, beside peers also over time and a profile."""
    for machine, rows in _measured(results):
        yield _picture(machine, "speed", "num_envs"), picture(rows)
    for machine, name, records in _chapters(results):
        yield _picture(machine, name, "steps"), draw(_curves(records, "env_steps"), "env_steps", "greedy return, IQM")
        if _has_peers(records):
            yield _picture(machine, name, "seconds"), draw(_curves(records, "seconds"), "seconds", "greedy return, IQM")
            yield _picture(machine, name, "profile"), draw([_profile(records)], "score", "runs above the score")


def scores(records: list[Record]) -> dict[str, dict[str, np.ndarray]]:
    """For each algorithm the final returns [S] on each of its environments, where 0 is the worst that anyone had there.

    1 is the threshold of the task.
    """
    worst, found = {}, {}
    for record in records:
        worst[record["env"]] = min(worst.get(record["env"], np.inf), returns_of(record).min())
    for record in records:
        final, low, high = returns_of(record)[-1], worst[record["env"]], record["threshold"]
        score = (final - low) / (high - low) if low < high else np.ones(len(final))  # nobody was ever below it
        found.setdefault(record["algorithm"], {})[record["env"]] = score
    return found


def _chapter(machine: str, name: str, records: list[Record]) -> str:
    lines = [f"## {name}, {machine}", "", markdown(COLUMNS, map(_row, records)), ""]
    lines += [f"![Returns over environment steps](images/{_picture(machine, name, 'steps')})"]
    if _has_peers(records):
        lines += [
            f"![Returns over seconds](images/{_picture(machine, name, 'seconds')})",
            f"![Share of runs above a score](images/{_picture(machine, name, 'profile')})",
        ]
    return "\n".join(lines)


def _has_peers(records: list[Record]) -> bool:
    return any(counterpart(algorithm, set(_algorithms(records))) for algorithm in _algorithms(records))


def _beside_others(chapters: list[tuple[str, str, list[Record]]]) -> str:
    """For every task that a peer has too the final returns of all, and which peers are above or below ours."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}  # by machine, environment and our algorithm
    for machine, _, records in chapters:
        there = {(record["algorithm"], record["env"]): record for record in records}
        for algorithm, env in there:
            ours = counterpart(algorithm, {name for name, other in there if other == env})
            if ours:
                both = [returns_of(there[name, env])[-1] for name in (ours, algorithm)]
                row = cells.setdefault((machine, env, ours), {"ours": _return(both[0])})
                marks = _verdict(*(interval(x) for x in both)) + _reservation(there[algorithm, env])
                row[algorithm.rpartition("_")[0]] = f"{_return(both[1])} {marks}".strip()
    kits = list(dict.fromkeys(kit for row in cells.values() for kit in row)) or ["ours"]
    rows = ([env, ours, *(row.get(kit, "") for kit in kits)] for (_, env, ours), row in cells.items())
    return "\n".join(["## Beside other kits", "", BESIDE, "", markdown(["environment", "algorithm", *kits], rows)])


def _return(final: np.ndarray) -> str:
    """The interquartile mean of the seeds' returns [S], with its interval."""
    return _spread(estimate(final), interval(final))


def _verdict(ours: Interval | None, theirs: Interval | None) -> str:
    """Where their interval lies, beside ours; nothing where they overlap. Those of single seeds say nothing."""
    if not (ours and theirs):
        return "one seed"
    if ours.low > theirs.high:
        return "below"
    return "above" if theirs.low > ours.high else ""


def _reservation(record: Record) -> str:
    """The mark of a peer's row that was not evaluated in episodes that begin where the kit's do."""
    if record["env"] == "MountainCarContinuous-v0" and not in_jax(record["algorithm"]):
        return "²"  # another environment, see the introduction
    same = record["flags"].get("eval_seed") == SEED and same_starts(record["algorithm"], record["env"])
    return "" if same else "¹"  # other starts


def counterpart(algorithm: str, there: set[str]) -> str | None:
    """Which of the kit's algorithms that are `there` a peer's is to be compared with: sb3_ppo with ppo_pmap.

    None for an algorithm of the kit.
    """
    kind = algorithm.rsplit("_", 1)[-1]
    return next((name for name in (f"{kind}_pmap", f"a{kind}_pmap") if name in there), None)


def _algorithms(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(record["algorithm"] for record in records))


def _speeds(machine: str, rows: list[Record]) -> str:
    return f"### {machine}\n\n{table(rows)}\n\n![Speed](images/{_picture(machine, 'speed', 'num_envs')})"


def _measured(results: Path) -> Iterator[tuple[str, list[Record]]]:
    """Machines and what `python -m benchmarks.accelerator` measured there."""
    for machine in _machines(results):
        if (machine / FILE).exists():
            yield machine.name, load_rows(machine)


def _picture(machine: str, name: str, kind: str) -> str:
    return f"benchmark_{machine}_{name}_{kind}.png"


def _row(record: Record) -> list[str]:
    final, count = returns_of(record)[-1], len(record["steps_per_second"])
    after, seconds = (
        np.array([np.inf if x is None else x for x in record[name]])
        for name in ("env_steps_to_threshold", "seconds_to_threshold")
    )
    return [
        f"[{record['env']}]({RESULTS}/{record['file']})" if "file" in record else record["env"],
        record["algorithm"],
        _return(final),
        f"{np.isfinite(after).sum()}/{len(after)} ≥{record['threshold']:g}{_fewer(record)}",
        _count(np.median(after), np.median(seconds)),
        f"{np.mean(record['steps_per_second']):,.0f} ({len(record['seeds']) // count})",
    ]


def _fewer(record: Record) -> str:
    """That evaluations are missing, where some are, and the steps after which it learned are as coarse."""
    fewest, flags = min(evaluations_of(record)), record["flags"]
    asked = flags["total_timesteps"] // flags["eval_interval"] if flags.get("eval_interval") else 0
    return f" ({fewest} of {asked} evaluations)" if fewest < asked else ""


def _curves(records: list[Record], x: str) -> list[Panel]:
    panels, algorithms = [], _algorithms(records)
    for env in dict.fromkeys(record["env"] for record in records):
        lines = []
        for record in (record for record in records if record["env"] == env):
            style = algorithms.index(record["algorithm"])
            values = returns_of(record).T  # [S, E]
            curve, band = estimate(values), interval(values)
            lines.append(Line(record["algorithm"], np.array(record[x]), curve, band, style=style))
        panels.append(Panel(env, lines))
    return panels


def _profile(records: list[Record]) -> Panel:
    """The share of an algorithm's runs whose score is above x (Agarwal et al. 2021, section 4.2)."""
    x, lines = np.linspace(0, 1.2, 121), []
    for style, (algorithm, tasks) in enumerate(scores(records).items()):
        above = [task[:, None] > x for task in tasks.values()]  # [S, P] each
        value, band = estimate(np.concatenate(above), "mean"), interval(*above, kind="mean")
        lines.append(Line(f"{algorithm}, tasks: {len(tasks)}", x, value, band, style=style))
    return Panel("performance profile", lines)


def _missing(results: Path) -> str:
    """What of the sets has no results of any machine yet."""
    there = {(x["algorithm"], x["env"]) for machine in _machines(results) for x in load_records(machine)}
    absent = [goal for goal in _tasks() if (goal.algorithm, goal.env) not in there]
    return f"## Not yet run\n\n{listed(absent) or 'Nothing: all has been run'}."


def _chapters(results: Path) -> Iterator[tuple[str, str, list[Record]]]:
    """Machine, set and records of all that there are results of."""
    for machine in _machines(results):
        files = (path for path in sorted(machine.glob("*/*.json")) if path.parent.name != POPULATIONS)
        found = (load_record(path) | {"file": path.relative_to(results).as_posix()} for path in files)
        records = {(record["algorithm"], record["env"]): record for record in found}
        for name in dict.fromkeys(goal.set for goal in _tasks()):
            goals_of_set = [goal for goal in _tasks() if goal.set == name]
            envs = list(dict.fromkeys(goal.env for goal in goals_of_set))
            tasks = [(g.algorithm, g.env) for g in sorted(goals_of_set, key=lambda goal: envs.index(goal.env))]
            if chosen := [records[task] for task in tasks if task in records]:
                yield machine.name, name, chosen


def _tasks() -> list[Goal]:
    """All that there is to learn, the peers' after ours."""
    return [*goals(), *(goal for peer in peers() for goal in goals_of_peer(peer))]


def _machines(results: Path) -> list[Path]:
    """The folder of each class of machines that has results."""
    folders = sorted(path for path in results.iterdir() if path.is_dir()) if results.is_dir() else []
    return [folder for folder in folders if any(folder.glob("*/*.json")) or (folder / FILE).exists()]


def _count(steps: float, seconds: float) -> str:
    return f"{steps:,.0f} ({seconds:,.0f}s)" if np.isfinite(steps) else "never"


def _spread(value: np.ndarray, spread: Interval | None) -> str:
    """A value and its interval, which is left out where it is that value alone."""
    numbers = [f"{x:.4g}" for x in ((value, spread.low, spread.high) if spread else (value,))]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]" if len(set(numbers)) > 1 else numbers[0]


COLUMNS = ["environment", "algorithm", "final return", "learned", "after", "steps/s (agents)"]
RESULTS = "../benchmarks/results"  # from the page
INTRODUCTION = """# Benchmark

This page shows how well each algorithm learns, [beside other kits](#beside-other-kits) where they have flags for the
same environment. Whether the code is correct is a matter of tests: `tests/test_maths.py` compares losses and
advantages with golden values, `tests/test_invariants.py` compares device counts, resumed runs and seeds.

`python -m benchmarks.learning --set NAME` trains our algorithms, `python -m benchmarks.peers --peer NAME` the other
kits, and `python -m benchmarks.report` writes this page from their records. Each environment in the tables links to
its record, which has the command, the flags, the versions and all returns.

## How to read it

- **Returns** are greedy, over 128 episodes (32 on the host, if the command sets no other number). A cell shows the
  interquartile mean over seeds and its 95% bootstrap interval (Agarwal et al. 2021), unless all seeds are equal.
  With three seeds the interval is just the range from the worst to the best, which is much less than 95%.
- **Learned** counts the seeds that reach the threshold in some evaluation. *After* is the median number of steps
  (and seconds) over all seeds, including those that never reach it. A row with fewer evaluations than planned says
  so: its *after* is too coarse to compare.
- **Scores** of the performance profiles: 0 is the worst return of any algorithm on a task, 1 is its threshold.
- **Flags.** Ours come from `algos/tuned/` where it has an entry, theirs are those that their authors publish (SBX:
  those of SB3). This favours ours: dozens of runs went into the flags of one game. All kits train for as many steps
  as ours, which may be another number than their authors': SB3's PPO is better on Pendulum midway than at the end.
- **Seeds** start at 100, and flags were tuned on other seeds. There are two exceptions: the training length of
  LunarLanderContinuous, and Breakout, whose flags were retuned after two of these seeds had ended at 52. Treat these
  two as optimistic.
- **Episodes.** Intervals cover seeds, not episodes. Where an environment has few initial states and no randomness
  later, greedy episodes repeat: of the 128 on Breakout 2 differ, on Catch 5, on SpaceInvaders, DeepSea and
  DiscountingChain 1.
- **Starts.** Our evaluations always begin in the same initial states. Other kits begin there too, except where a
  cell is marked. Different starts matter on Pendulum, where means over two sets of 128 episodes differ more than
  good policies do; elsewhere the effect is unknown. Trust a marked cell only if the gap is far wider than the
  intervals, as on Asterix.
- **Version.** Most records predate four changes: PPO and APPO act in units of a Box's bounds, critics begin at zero,
  SAC measures entropy within -1 .. 1, and host evaluations have a seed for each episode. Newer are those of PQN and
  DQN, of PPO on the host, and of SAC on the host on Pendulum, InvertedDoublePendulum and Hopper.
- **Speed** is that of all agents of a run together; the number of agents is in parentheses. Seconds include
  compilation, and for our algorithms evaluation. A chapter names the machine: cpu-2 has two cores. Other runs often
  shared it, so compare seconds and steps/s only roughly."""

BESIDE = """*Above* or *below* means that the kit's whole interval lies above or below ours; otherwise intervals
overlap, which does not prove equality. ¹ The evaluation has other initial states. ² The environment differs:
gymnasium's MountainCarContinuous stops at the left wall, gymnax's keeps its velocity. SB3 and SBX train on
gymnasium's environments, rejax and PureJaxRL on gymnax's."""

SPEED = """## Speed over environments

`python -m benchmarks.accelerator` measures training speed with more and more environments, until more bring less
than 5%. PPO learns from every step equally often; SAC makes at most 8 gradient updates of 256 transitions after each
step of all environments. The floor is the time of the networks alone, at the same batch sizes. Kernels are the
operations that a device starts one by one in an update."""

if __name__ == "__main__":
    main(report, parse(Args))
