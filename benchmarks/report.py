"""docs/benchmark.md and its pictures, made of the files in benchmarks/results/ and of nothing else.

python -m benchmarks.report
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accelerator import FILE, load_rows, picture, table
from benchmarks.peers.starts import in_jax, same_starts
from benchmarks.records import evaluations_of, load_records, returns_of
from benchmarks.sets import Goal, goals, goals_of_peer, peers, plain
from benchmarks.tasks import listed
from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.cli.files import check_target, writing
from common.device.evaluation import SEED
from common.drawing.figure import Line, Panel, draw
from common.drawing.statistics import Interval, estimate, interval, stratified

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
    """Names and figures: for each set of environments the curves over steps and over time, and the profile; speeds."""
    for machine, rows in _measured(results):
        yield _picture(machine, "speed", "num_envs"), picture(rows)
    for machine, name, records in _chapters(results):
        yield _picture(machine, name, "steps"), draw(_curves(records, "env_steps"), "env_steps", "greedy return, IQM")
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
    lines = [
        f"## {name}, {machine}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
        *map(_row, records),
        "",
    ]
    lines += [_score(algorithm, records) for algorithm in _algorithms(records)]
    lines += [
        "",
        f"![Returns over environment steps](images/{_picture(machine, name, 'steps')})",
        f"![Returns over seconds](images/{_picture(machine, name, 'seconds')})",
        f"![Share of runs above a score](images/{_picture(machine, name, 'profile')})",
    ]
    return "\n".join(lines)


def _score(algorithm: str, records: list[Record]) -> str:
    """The final score over the tasks of an algorithm; beside a peer's that of ours over the same tasks."""
    found = scores(records)
    ours = counterpart(algorithm, {name for name, envs in found.items() if found[algorithm].keys() <= envs.keys()})
    count = len(found[algorithm])
    parts = [f"{algorithm} {_spread(*stratified(list(found[algorithm].values())))}"]
    if ours:
        parts.append(f"over the same {ours} {_spread(*stratified([found[ours][env] for env in found[algorithm]]))}")
    return f"- Final score over {count} task{'s' * (count > 1)}: {', '.join(parts)}"


def _beside_others(chapters: list[tuple[str, str, list[Record]]]) -> str:
    """For every task of a peer that we have too the final returns of both, and who is above."""
    lines = ["## Beside other kits", "", "| environment | ours | theirs | |", "|---|---|---|---|"]
    for _, _, records in chapters:
        there = {(record["algorithm"], record["env"]): record for record in records}
        for algorithm, env in there:
            ours = counterpart(algorithm, {name for name, other in there if other == env})
            if ours:
                both = [(name, returns_of(there[name, env])[-1]) for name in (ours, algorithm)]
                cells = [
                    f"{name} {_spread(estimate(x, 'iqm'), interval(x, 'iqm'))}, {len(x)} seeds" for name, x in both
                ]
                verdict = _verdict(*(interval(x, "iqm") for _, x in both))
                lines.append(f"| {env} | {' | '.join(cells)} | {verdict}{_reservation(there[algorithm, env])} |")
    return "\n".join(lines)


def _verdict(ours: Interval | None, theirs: Interval | None) -> str:
    """Who is above the other, of two intervals; those of single seeds say nothing."""
    if not (ours and theirs):
        return "one seed"
    if ours.low > theirs.high:
        return "ours is above"
    return "theirs is above" if theirs.low > ours.high else "intervals overlap"


def _reservation(record: Record) -> str:
    """What a peer's row has to say where it was not evaluated in episodes that begin where the kit's do."""
    if record["env"] == "MountainCarContinuous-v0" and not in_jax(record["algorithm"]):
        return ", another environment"  # see the introduction
    same = record["flags"].get("eval_seed") == SEED and same_starts(record["algorithm"], record["env"])
    return "" if same else ", other starts"


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


def _row(record: Record) -> str:
    returns, steps = returns_of(record), np.array(record["env_steps"], float)  # [E, S], [E]
    area = np.trapezoid(returns, steps, axis=0) / (steps[-1] - steps[0]) if len(steps) > 1 else returns[0]
    after, seconds = (
        np.array([np.inf if x is None else x for x in record[name]])
        for name in ("env_steps_to_threshold", "seconds_to_threshold")
    )
    cells = [
        f"{record['env']}, {record['algorithm']}<br>`{record['command']}`{_more(record)}{_fewer(record)}",
        _spread(estimate(returns[-1], "iqm"), interval(returns[-1], "iqm")),
        _spread(estimate(area, "iqm"), interval(area, "iqm")),
        f"{np.isfinite(after).sum()} of {len(after)} reach {record['threshold']:g}",
        _count(np.median(after)),
        _count(np.median(seconds)),
        f"{np.mean(record['steps_per_second']):,.0f} ({len(record['seeds']) // len(record['steps_per_second'])})",
        f"{np.mean(record['compile_seconds']):.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def _more(record: Record) -> str:
    """That the command was given for other seeds, too; that of a peer is for all."""
    runs = len(record["steps_per_second"])
    return f", {runs} times with other seeds" if runs > 1 and plain(record["algorithm"]).endswith("_pmap") else ""


def _fewer(record: Record) -> str:
    """That evaluations are missing, where some are, and areas and steps are as coarse."""
    fewest, flags = min(evaluations_of(record)), record["flags"]
    asked = flags["total_timesteps"] // flags["eval_interval"] if flags.get("eval_interval") else 0
    return f", **{fewest} of {asked} evaluations**" if fewest < asked else ""


def _curves(records: list[Record], x: str) -> list[Panel]:
    panels, algorithms = [], _algorithms(records)
    for env in dict.fromkeys(record["env"] for record in records):
        lines = []
        for record in (record for record in records if record["env"] == env):
            style = algorithms.index(record["algorithm"])
            values = returns_of(record).T  # [S, E]
            curve = estimate(values, "iqm")
            lines.append(Line(record["algorithm"], np.array(record[x]), curve, interval(values, "iqm"), style=style))
        panels.append(Panel(env, lines))
    return panels


def _profile(records: list[Record]) -> Panel:
    """The share of an algorithm's runs whose score is above x (Agarwal et al. 2021, section 4.2)."""
    x, lines = np.linspace(0, 1.2, 121), []
    for style, (algorithm, tasks) in enumerate(scores(records).items()):
        above = [task[:, None] > x for task in tasks.values()]  # [S, P] each
        value, band = stratified(above, "mean")
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
        records = {(record["algorithm"], record["env"]): record for record in load_records(machine)}
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


def _count(value: float) -> str:
    return f"{value:,.0f}" if np.isfinite(value) else "never"


def _spread(value: np.ndarray, spread: Interval | None) -> str:
    return f"{value:.4g}" + (f" ({spread.low:.4g} to {spread.high:.4g})" if spread else "")


COLUMNS = ["environment", "final", "area under the curve", "learned", "after steps", "after seconds"]
COLUMNS += ["steps/s (agents)", "compiled"]
INTRODUCTION = """# Benchmark

**Right** is what tests hold, on every change: losses, advantages, V-trace and distributions against golden values
(`tests/test_maths.py`, `tests/test_sac.py`, `tests/test_appo.py`); the same parameters on 1, 2, 4 and 8 devices and
of a seed alone or among others, resume to the last bit, and time limits through a whole update
(`tests/test_invariants.py`); nothing saved lost by `kill -9`, signals or a full disk (`tests/test_faults.py`).
Whether the default flags learn on other processors too, with hundreds of seeds, is in [ppo.md](ppo.md#results) and
[sac.md](sac.md#results).

**How good** it is the tables say, [beside other kits](#beside-other-kits) first: what is learned with the commands
below, in greedy returns over 128 episodes, 32 on the host where the command says nothing else. What was planned and
has [not yet been run](#not-yet-run) is named below.

- **Flags.** Ours begin with those of `algos/tuned/` where it has some for an environment, and theirs are those that
  their authors publish for it, SBX's those of SB3. That favours ours: dozens of runs went into the flags of one game.
  All train for as many steps as ours do, which may be others than the authors' own: SB3 is better on Pendulum midway
  than at the end.
- **Seeds** are from 100 on; flags were sought with others, but for how long LunarLanderContinuous trains, and for
  Breakout: that its flags had to be sought anew was seen on two of these seeds, which had ended at 52, so that there
  they are no wholly independent proof.
- **Figures.** Returns are interquartile means over seeds with 95% bootstrap intervals (Agarwal et al. 2021); of three
  seeds they are the mean, and from the worst to the best, which is much less than 95% sure. Ours is above where our
  whole interval lies above all of theirs. Where intervals overlap no difference is shown, which does not make them
  equal; on CartPole all are at the maximum. "Learned" counts the seeds that reach the threshold in some evaluation;
  "after" is the median over all seeds, those that never do included. Areas are of each seed's own curve, with lines
  between its evaluations. A row whose seeds were evaluated less often than its command asks for says so: its areas,
  and when it learned, are too coarse to be compared, which its last returns are not. A score is 0 for the worst return
  that any algorithm had on the task, and 1 for its threshold; a final score is the interquartile mean over the runs of
  all tasks together, so that one task of four can fail and not be seen in it.
- **Episodes.** All intervals are over seeds, none is over the episodes of an evaluation. Greedy episodes are the same
  where they begin alike and nothing is drawn afterwards: of the 128 on Breakout-MinAtar 2 are different, on
  Catch-bsuite 5, on SpaceInvaders-MinAtar, DeepSea-bsuite and DiscountingChain-bsuite 1. What a seed returns there is
  the mean of so few. The records are of runs that did not count different episodes, so that rows lack that number.
- **Version.** The records were made before four changes of numbers: PPO and APPO act in units of the bounds of a Box,
  critics begin at zero, SAC measures entropies within -1 .. 1, and on the host every episode of an evaluation has a
  seed of its own. A host row that is run again is comparable with other kits' once these are run again, too.
- **Starts.** Evaluations of ours all begin in the same states. Those of other kits begin there too where the row does
  not say other starts: kits on envpool's tasks cannot be put there, and some runs have not yet been repeated since
  others can. Intervals over seeds do not cover what starts are worth: on Pendulum means over two sets of 128 differ by
  more than those of good policies, on other tasks that has not been measured. Trust such a row where the gap is far
  wider than the intervals, as on Asterix; a row with another environment decides nothing.
- **Speed.** Steps/s are of all agents of a run together, as many as stand in brackets; seconds are of such a run, with
  compilation, and for our own algorithms with evaluations. A chapter names the class of machine, as cpu-2 for two
  cores. These were at times shared with other runs, so that seconds and steps/s of two rows can be compared roughly at
  best: on Freeway PureJaxRL ran beside three others, at a fraction of its speed, and on Breakout beside ours.

This page and its pictures are made by `python -m benchmarks.report` from the files in `benchmarks/results/`, and
those by `python -m benchmarks.learning --set NAME` and, for other kits with the flags that their authors publish,
`python -m benchmarks.peers --peer NAME`. PureJaxRL and rejax train on the same environments as we do, SB3 and SBX on
gymnasium's, which are the same but for MountainCarContinuous, where a car that hits the wall stops."""


SPEED = """## Speed over environments

Training speed with more and more environments, until more of them bring less than 5%, made by
`python -m benchmarks.accelerator`. PPO learns from every step as often, SAC makes at most 8 gradient updates of 256
transitions after each step of all environments. The floor is what the networks alone would take, at the same batch
sizes on the same devices; kernels are the operations that a device is given one by one in an update, a loop's as often
as it runs where the compiler knows how often."""

if __name__ == "__main__":
    sys.exit(main(report, parse(Args)))
