"""The members of a population, best first, and the flags by which one of them is trained alone."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.env_params import as_flags
from common.cli.words import as_typed
from common.runs.history import read_log
from common.runs.overall import DISTINCT, counted, of_best_member

SHOWN = 5  # members in the footer


def ranked(returns: list[float]) -> list[int]:
    """Members by their return, the best first; those without a finite one are last."""
    known = [x if math.isfinite(x) else -math.inf for x in returns]
    return sorted(range(len(known)), key=lambda member: -known[member])


def ranking(args: Any, run_dir: Path, outcome: Any) -> list[str]:
    """What the best members of a population earn, in the `Outcome` of a run, and with which flags."""
    members = zip(args.flags_of_members(), _evolved(args, run_dir), strict=True)
    flags = [as_flags(given | now, args.env_params) for given, now in members]
    newest, best, confirmed = outcome.newest, outcome.best, dict(outcome.confirmed)
    when = f" at step {newest.step:,}" if newest.step < outcome.env_steps else ""
    how = counted(outcome.eval_episodes, newest.evaluation.get(DISTINCT, [])) + when
    lines = _best(flags, newest.evaluation, confirmed.get(newest.step, {}), how, _told(args))
    if best and newest.step > best.step and confirmed.get(newest.step):
        first, last = (of_best_member(x["eval/return_mean"]) for x in (best.evaluation, confirmed[newest.step]))
        load = f"load_policy({str(run_dir)!r}, 'best')"
        lines += [f"better   return {first:.1f} at step {best.step:,}: {load}"] * (first > last)
    return lines


def _told(args: Any) -> str:
    """What the flags that are shown of a member are good for."""
    if args.exchange_interval:
        return "their flags by now"
    if getattr(args, "opponent", "") == "members":
        return "their flags"  # alone they would have nobody to play against
    return "what to add to your flags for each of them alone"


def summary(returns: float | list[float | None] | None) -> str:
    """The best, the median and the worst return, of those that have one."""
    every = returns if isinstance(returns, list) else [returns]
    finite = [x for x in every if x is not None and math.isfinite(x)]
    if not finite:
        return "-"
    return f"best {max(finite):.1f}, median {np.median(finite):.1f}, worst {min(finite):.1f}"


def _best(
    members: list[dict[str, Any]],
    evaluation: dict[str, list[float]],
    other: dict[str, list[float]],
    how: str,
    told: str,
) -> list[str]:
    """Lines for the best `members`, which are given by their flags, chosen by an evaluation, and what they earn in
    `other` episodes, if there are any.
    """
    means = evaluation.get("eval/return_mean", [])
    if not means:
        return []
    order, shown = ranked(means), other or evaluation
    order = [member for member in order if math.isfinite(means[member])]
    broken = f", of which {len(means) - len(order)} broke," if len(order) < len(means) else ""
    found = f"return {summary(means)} of {len(means)} members{broken} over {how}"
    apart = ", which selection flatters; behind it the return in other episodes" if other else ""
    lines = [f"greedy   {found}", f"ranked   by that return{apart}, and {told}:"]
    for place, member in enumerate(order[:SHOWN], start=1):
        mean, std = (shown[f"eval/return_{name}"][member] for name in ("mean", "std"))
        won = [f", {x[member]:.0%} won" for name, x in shown.items() if name == "eval/win_rate"]
        who = f"member {member}: {as_typed(members[member])}"
        first = f"{means[member]:.1f}, in other episodes " if other else ""
        lines.append(f"{place:>6}.  return {first}{mean:.1f} ± {std:.1f}{''.join(won)}, {who}")
    return lines


def _evolved(args: Any, run_dir: Path) -> list[dict[str, float]]:
    """The hyper-parameters that members have by now, where they evolve."""
    names = args.members.hyper if args.exchange_interval else ()
    series = read_log(run_dir, [f"hyper/{name}" for name in names]).series
    last = {name: series[f"hyper/{name}"].values[-1].tolist() for name in names if f"hyper/{name}" in series}
    return [{name: values[member] for name, values in last.items()} for member in range(args.num_agents)]
