"""One number for what several agents earn in an evaluation."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Overall = Callable[[Sequence[float]], float]


def overall_of(args: Any) -> Overall:
    """For returns [S] of seeds their mean; for those of a population, whose members differ, that of the best one."""
    return of_best_member if args.is_population else of_seeds


def of_seeds(returns: Sequence[float]) -> float:
    return float(np.mean(returns))


def of_best_member(returns: Sequence[float]) -> float:
    """-inf where none is finite."""
    return float(np.max(returns, where=np.isfinite(returns), initial=-np.inf))
