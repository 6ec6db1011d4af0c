"""One number for what several agents earn in an evaluation, and which of several is the best."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Overall = Callable[[Sequence[float]], float]
DISTINCT = "eval/distinct_episodes"  # of each agent, among all of an evaluation


def overall_of(args: Any) -> Overall:
    """For returns [S] of seeds their mean; for those of a population, whose members differ, that of the best one."""
    return of_best_member if args.is_population else of_seeds


def of_seeds(returns: Sequence[float]) -> float:
    return float(np.mean(returns))


def of_best_member(returns: Sequence[float]) -> float:
    """-inf where none is finite."""
    return float(np.max(returns, where=np.isfinite(returns), initial=-np.inf))


def counted(episodes: int, distinct: Sequence[float]) -> str:
    """A number of episodes, in words, and how many of them were `distinct`, of each agent, where that is known."""
    if not distinct or min(distinct) == episodes:
        return f"{episodes} {'different ' * bool(distinct and episodes > 1)}episode{'s' * (episodes > 1)}"
    fewest, most = min(distinct), max(distinct)
    which = f"{f'{fewest:.0f} to ' * (fewest < most)}{most:.0f} of them different" if most > 1 else "all the same"
    return f"{episodes} episodes, {which}"


def best_step(evaluations: dict[int, list[float]], agent: int | None = None, overall: Overall = of_seeds) -> int | None:
    """The step of the best evaluation, of the `agent` at this place among all or of all together.

    Of equal ones the newest. None where no evaluation has a finite return of it.
    """
    known = {step: x for step, x in evaluations.items() if len(x) > (agent or 0)}
    returns = {step: overall(x) if agent is None else x[agent] for step, x in known.items()}
    finite = {step: x for step, x in returns.items() if np.isfinite(x)}
    return max(reversed(finite), key=finite.get, default=None)
