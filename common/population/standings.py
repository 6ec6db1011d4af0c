"""What members who have played each with each are worth, as numbers and as a table."""

from typing import NamedTuple

import numpy as np

SHOWN = 10  # members in the table


class Column(NamedTuple):
    """One of a table."""

    values: np.ndarray  # [S]
    width: int
    decimals: int


def mean_of_pairs(pairs: np.ndarray) -> np.ndarray:
    """The mean [S] over the others in each row of `pairs` [S, S], of those that are not NaN; else NaN."""
    others = np.where(np.eye(len(pairs), dtype=bool), np.nan, pairs)
    counts = np.sum(~np.isnan(others), axis=1)
    return np.nansum(others, axis=1) / np.where(counts, counts, np.nan)


def count_rated(ratings: np.ndarray) -> int:
    """How many of the members have a rating."""
    return int(np.sum(~np.isnan(ratings)))


def best_members(ratings: np.ndarray, columns: dict[str, Column]) -> str:
    """The best members by their `ratings` [S], a line each under the names of the columns."""
    rated = count_rated(ratings)
    best = np.argsort(-ratings, kind="stable")[:rated]  # NaN comes last
    lines = [f"{'rank':>13}{'member':>9}" + "".join(f"{name:>{x.width}}" for name, x in columns.items())]
    for rank, member in enumerate(best[:SHOWN], start=1):
        numbers = "".join(f"{x.values[member]:>{x.width}.{x.decimals}f}" for x in columns.values())
        lines.append(f"{rank:>13}{member:>9}{numbers}")
    return "\n".join(lines + [f"{'...':>13}"] * (rated > SHOWN))
