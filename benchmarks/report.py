"""docs/benchmark.md and its pictures, made of page.md and the files in benchmarks/results/, and of
nothing else.

python -m benchmarks.report
"""

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kernels
from benchmarks.accelerator import FILE, load_rows, picture, table
from benchmarks.learning import FOLDER, Goal, goals, goals_of_peer, listed, peers
from benchmarks.peers.starts import in_jax, same_starts
from benchmarks.records import load_records, markdown, returns_of, spread
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import UsageError
from pmaprl.cli.files import check_target, writing
from pmaprl.device.evaluation import SEED
from pmaprl.drawing.figures import Line, Panel, draw
from pmaprl.runs.estimates import Interval, estimate, interval

Record = dict[str, Any]
COLUMNS = ["environment", "algorithm", "final return", "learned", "after"]
# The look of the best possible return
REFERENCE = {"color": "0.4", "linestyle": ":", "marker": "", "zorder": 1}
ON_THE_WAY = {"minatar": [1_000_000, 5_000_000]}  # by set: steps at which returns are shown too


@dataclass(kw_only=True)
class Args:
    """Write the page of the benchmark and its pictures."""

    results: str = "benchmarks/results"
    """Folder that `python -m benchmarks.learning` wrote its results to."""
    page: str = "docs/benchmark.md"
    """Page to write; its pictures go into the folder images beside it."""


def report(args: Args) -> None:
    """Run the command."""
    results = Path(args.results)
    page = Path(args.page)
    if not _machines(results):
        raise UsageError(
            f"{results} has no folder of a machine with results: python -m "
            "benchmarks.learning makes some"
        )
    check_target(page)
    text = page_of(results)
    images = page.parent / "images"
    with writing(f"page {page}"):
        images.mkdir(parents=True, exist_ok=True)
        for name, figure in pictures(results):
            figure.savefig(images / name)
        page.write_text(text)
    print(f"wrote {page}")


def page_of(results: Path) -> str:
    """The page as Markdown."""
    records = [record for machine in _machines(results) for record in load_records(machine)]
    chapters = list(_chapters(results))
    there = {(record["algorithm"], record["env"]) for record in records}
    known = {(goal.algorithm, goal.env): goal for goal in _tasks()}
    for algorithm, env in there - known.keys():
        print(f"left out: {env} with {algorithm}, which no set has")
    print(f"not yet run: {listed([goal for task, goal in known.items() if task not in there])}")
    speeds = [
        f"### {machine}\n\n{table(rows)}\n\n"
        f"![Speed](images/{_picture(machine, 'speed', 'num_envs')})"
        for machine, rows in _measured(results)
    ]
    counted = results / "kernels.json"
    gpu = kernels.parts(json.loads(counted.read_text())) if counted.exists() else "Not counted."
    text = (FOLDER / "page.md").read_text()
    filled = {
        "beside": _beside_others(chapters),
        "chapters": "\n\n".join(_chapter(*x) for x in chapters),
    }
    return text.format(**filled, kernels=gpu, speeds="\n\n".join(speeds) or "Not measured.")


def pictures(results: Path) -> Iterator[tuple[str, Any]]:
    """Names and figures: for each set of environments curves over steps, beside peers also over
    time and a profile.
    """
    for machine, rows in _measured(results):
        yield _picture(machine, "speed", "num_envs"), picture(rows)
    for machine, name, records in _chapters(results):
        yield (
            _picture(machine, name, "steps"),
            draw(_curves(records, "env_steps"), "env_steps", "greedy return, IQM"),
        )
        if _has_peers(records):
            # Of one class of machines
            own = [record for record in records if record["file"].startswith(f"{machine}/")]
            yield (
                _picture(machine, name, "seconds"),
                draw(_curves(own, "seconds"), "seconds", "greedy return, IQM"),
            )
            yield (
                _picture(machine, name, "profile"),
                draw([_profile(records)], "", "runs above the score"),
            )


def scores(records: list[Record]) -> dict[str, dict[str, np.ndarray]]:
    """Final returns [S] by algorithm and environment: 0 is the worst that anyone had there, 1 the
    task's threshold.
    """
    worst = {}
    found = {}
    for record in records:
        worst[record["env"]] = min(worst.get(record["env"], np.inf), returns_of(record).min())
    for record in records:
        final = returns_of(record)[-1]
        low = worst[record["env"]]
        high = record["threshold"]
        # Nobody was ever below it
        score = (final - low) / (high - low) if low < high else np.ones(len(final))
        found.setdefault(record["algorithm"], {})[record["env"]] = score
    return found


def _chapter(machine: str, name: str, records: list[Record]) -> str:
    shown = {"steps": "Returns over environment steps"}
    if _has_peers(records):
        shown |= {"seconds": "Returns over seconds", "profile": "Share of runs above a score"}
    lines = [f"![{what}](images/{_picture(machine, name, kind)})" for kind, what in shown.items()]
    also = ON_THE_WAY.get(name, [])
    columns = COLUMNS + [f"return at {steps:,}" for steps in also]
    rows = [_row(record, also) for record in records]
    if any("optimum" in record for record in records):
        columns.append("optimum")
        rows = [[*row, _optimum(record)] for row, record in zip(rows, records, strict=True)]
    return "\n".join([f"## {name}, {machine}", "", markdown(columns, rows), "", *lines])


def _beside_others(chapters: list[tuple[str, str, list[Record]]]) -> str:
    """For every task that a peer has too the final returns of all, and which peers are above or
    below ours.
    """
    # By machine, environment and our algorithm
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for machine, _, records in chapters:
        there = {(record["algorithm"], record["env"]): record for record in records}
        for algorithm, env in there:
            if ours := counterpart(algorithm, {name for name, other in there if other == env}):
                both = [returns_of(there[name, env])[-1] for name in (ours, algorithm)]
                row = cells.setdefault((machine, env, ours), {"ours": spread(both[0])})
                marks = _verdict(*(interval(x) for x in both)) + _reservation(there[algorithm, env])
                row[algorithm.rpartition("_")[0]] = f"{spread(both[1])} {marks}".strip()
    kits = list(dict.fromkeys(kit for row in cells.values() for kit in row)) or ["ours"]
    rows = (
        [env, ours, *(row.get(kit, "") for kit in kits)] for (_, env, ours), row in cells.items()
    )
    return markdown(["environment", "algorithm", *kits], rows)


def _verdict(ours: Interval | None, theirs: Interval | None) -> str:
    """Say where their interval lies, beside ours; nothing where they overlap. Few seeds have
    none.
    """
    if not (ours and theirs):
        return "few seeds"
    return "below" if ours.low > theirs.high else "above" if theirs.low > ours.high else ""


def _reservation(record: Record) -> str:
    """The mark of a peer's row that was not evaluated in episodes that begin where the kit's do."""
    if record["env"] == "MountainCarContinuous-v0" and not in_jax(record["algorithm"]):
        return "²"  # another environment, see the introduction
    same = record["flags"].get("eval_seed") == SEED and same_starts(
        record["algorithm"], record["env"]
    )
    return "" if same else "¹"  # other starts


def counterpart(algorithm: str, there: set[str]) -> str | None:
    """Find the one of the kit's that are `there` with which a peer's algorithm is compared: sb3_ppo
    with ppo_pmap; None for ours.
    """
    kind, *more = algorithm.rsplit("_", 1)[-1].split(" ", 1)  # such as "pqn" and "(gru)"
    names = (" ".join([f"{prefix}{kind}_pmap", *more]) for prefix in ("", "a"))
    return next((name for name in names if name in there), None)


def _has_peers(records: list[Record]) -> bool:
    return any(
        counterpart(algorithm, set(_algorithms(records))) for algorithm in _algorithms(records)
    )


def _algorithms(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(record["algorithm"] for record in records))


def _measured(results: Path) -> Iterator[tuple[str, list[Record]]]:
    """Machines and what `python -m benchmarks.accelerator` measured there."""
    yield from ((x.name, load_rows(x)) for x in _machines(results) if (x / FILE).exists())


def _picture(machine: str, name: str, kind: str) -> str:
    return f"benchmark_{machine}_{name}_{kind}.png"


def _row(record: Record, also: list[int]) -> list[str]:
    returns = returns_of(record)
    flags = record["flags"]
    after = np.array([np.inf if x is None else x for x in record["env_steps_to_threshold"]])
    # Older records hold only those of all seeds
    evaluations = min(record.get("evaluations") or [len(returns)])
    asked = flags["total_timesteps"] // flags["eval_interval"] if flags.get("eval_interval") else 0
    fewer = f" ({evaluations} of {asked} evaluations)" if evaluations < asked else ""
    median = np.median(after)
    at = np.array(record["env_steps"])
    return [
        f"[{record['env']}](../benchmarks/results/{record['file']})"
        if "file" in record
        else record["env"],
        record["algorithm"],
        spread(returns[-1]),
        f"{np.isfinite(after).sum()}/{len(after)} ≥{record['threshold']:g}{fewer}",
        f"{median:,.0f}" if np.isfinite(median) else "",
        *(f"{estimate(returns[np.abs(at - x).argmin()]):.4g}" if at[-1] >= x else "" for x in also),
    ]


def _optimum(record: Record) -> str:
    """The best possible return from the starts of the evaluations, and over all where that is
    another; or nothing.
    """
    if "optimum" not in record:
        return ""
    evaluated, everywhere = (
        f"{record['optimum'][name]:.4g}" for name in ("evaluated", "all_starts")
    )
    return evaluated if evaluated == everywhere else f"{evaluated} ({everywhere} over all starts)"


def _curves(records: list[Record], x: str) -> list[Panel]:
    panels = {}
    algorithms = _algorithms(records)
    for record in records:
        values = returns_of(record).T  # [S, E]
        name = record["algorithm"]
        line = Line(
            label=name,
            x=np.array(record[x]),
            y=estimate(values),
            band=interval(values),
            style=algorithms.index(name),
        )
        panels.setdefault(record["env"], []).append(line)
    optima = {
        record["env"]: record["optimum"]["evaluated"] for record in records if "optimum" in record
    }
    for env, optimum in optima.items():
        ends = np.array([0, max(line.x[-1] for line in panels[env])])
        panels[env].append(Line(label="optimum", x=ends, y=np.full(2, optimum), how=REFERENCE))
    return [Panel(env, lines) for env, lines in panels.items()]


def _profile(records: list[Record]) -> Panel:
    """The share of an algorithm's runs whose score is above x (Agarwal et al. 2021, section
    4.2).
    """
    x = np.linspace(0, 1.2, 121)
    lines = []
    for style, (algorithm, tasks) in enumerate(scores(records).items()):
        above = [task[:, None] > x for task in tasks.values()]  # [S, P] each
        value = estimate(np.concatenate(above), "mean")
        band = interval(*above, kind="mean")
        lines.append(
            Line(label=f"{algorithm}, tasks: {len(tasks)}", x=x, y=value, band=band, style=style)
        )
    return Panel(
        "performance profile", lines, "score: 0 is the worst return on its task, 1 its threshold"
    )


def _chapters(results: Path) -> Iterator[tuple[str, str, list[Record]]]:
    """Machine, set and records of all that there are results of.

    A machine that only adds algorithms to environments of the one with most records of a set is
    shown in its chapter.
    """
    records = {
        x.name: {(r["algorithm"], r["env"]): r for r in load_records(x)} for x in _machines(results)
    }
    for name in dict.fromkeys(goal.set for goal in _tasks()):
        goals_of_set = [goal for goal in _tasks() if goal.set == name]
        envs = list(dict.fromkeys(goal.env for goal in goals_of_set))
        tasks = [
            (g.algorithm, g.env)
            for g in sorted(goals_of_set, key=lambda goal: envs.index(goal.env))
        ]
        there = {
            machine: {task: own[task] for task in tasks if task in own}
            for machine, own in records.items()
        }
        most = max(there, key=lambda machine: len(there[machine]))
        adding = [
            machine for machine in there if _adds_to(there[machine].keys(), there[most].keys())
        ]
        for machine in (machine for machine in there if machine not in adding):
            chosen = dict(there[machine])
            for other in adding if machine == most else ():
                chosen |= there[other]
            if chosen:
                yield machine, name, [chosen[task] for task in tasks if task in chosen]


def _adds_to(some: Set[tuple[str, str]], others: Set[tuple[str, str]]) -> bool:
    """Tell whether these tasks, algorithms and environments, are new in some of the environments of
    the others.
    """
    return some.isdisjoint(others) and {env for _, env in some} < {env for _, env in others}


def _tasks() -> list[Goal]:
    """All that there is to learn, the peers' after ours."""
    return [*goals(), *(goal for peer in peers() for goal in goals_of_peer(peer))]


def _machines(results: Path) -> list[Path]:
    """The folder of each class of machines that has results."""
    files = [*results.glob("*/*/*.json"), *results.glob(f"*/{FILE}")]
    return sorted({results / path.relative_to(results).parts[0] for path in files})


if __name__ == "__main__":
    main(report, parse(Args))
