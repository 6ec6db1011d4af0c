"""Which agent is the best, and which step: evaluations of several agents as one number, and members in order."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.env_flags import as_flags
from common.cli.run_flags import as_command_line
from common.runs.metrics import read_log

Overall = Callable[[Sequence[float]], float]
DISTINCT = "eval/distinct_episodes"  # of each agent, among all of an evaluation


def overall_of(args: Any) -> Overall:
    """For returns [S] of seeds their mean; for those of a population, whose members differ, that of the best one."""
    return best_return if args.is_population else mean_of_seeds


def mean_of_seeds(returns: Sequence[float]) -> float:
    return float(np.mean(returns))


def best_return(returns: Sequence[float]) -> float:
    """-inf where none is finite."""
    return float(np.max(returns, where=np.isfinite(returns), initial=-np.inf))


def describe_episodes(episodes: int, distinct: Sequence[float]) -> str:
    """A number of episodes, in words, and how many of them were `distinct`, of each agent, where that is known."""
    if not distinct or min(distinct) == episodes:
        return f"{episodes} {'different ' * bool(distinct and episodes > 1)}episode{'s' * (episodes > 1)}"
    fewest, most = min(distinct), max(distinct)
    which = f"{f'{fewest:.0f} to ' * (fewest < most)}{most:.0f} of them different" if most > 1 else "all the same"
    return f"{episodes} episodes, {which}"


def best_step(
    evaluations: dict[int, list[float]], agent: int | None = None, overall: Overall = mean_of_seeds
) -> int | None:
    """The step of the best evaluation, of the `agent` at this place among all or of all together.

    Of equal ones the newest. None where no evaluation has a finite return of it.
    """
    known = {step: x for step, x in evaluations.items() if len(x) > (agent or 0)}
    returns = {step: overall(x) if agent is None else x[agent] for step, x in known.items()}
    finite = {step: x for step, x in returns.items() if np.isfinite(x)}
    return max(reversed(finite), key=finite.get, default=None)


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
    when = f" at step {newest.step:,}" if newest.step < outcome.record["env_steps"] else ""
    how = describe_episodes(args.eval_episodes, newest.evaluation.get(DISTINCT, [])) + when
    lines = _best(flags, newest.evaluation, confirmed.get(newest.step, {}), how, _told(args))
    if best and newest.step > best.step and confirmed.get(newest.step):
        first, last = (best_return(x["eval/return_mean"]) for x in (best.evaluation, confirmed[newest.step]))
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
        who = f"member {member}: {as_command_line(members[member])}"
        first = f"{means[member]:.1f}, in other episodes " if other else ""
        lines.append(f"{place:>6}.  return {first}{mean:.1f} ± {std:.1f}{''.join(won)}, {who}")
    return lines


def _evolved(args: Any, run_dir: Path) -> list[dict[str, float]]:
    """The hyper-parameters that members have by now, where they evolve."""
    names = args.members.hyper if args.exchange_interval else ()
    series = read_log(run_dir, [f"hyper/{name}" for name in names]).series
    last = {name: series[f"hyper/{name}"].values[-1].tolist() for name in names if f"hyper/{name}" in series}
    return [{name: values[member] for name, values in last.items()} for member in range(args.num_agents)]
