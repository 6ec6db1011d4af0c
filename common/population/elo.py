"""Elo ratings by maximum likelihood, from what players score against each other."""

import numpy as np

MEAN = 1000.0  # of all ratings
PER_FACTOR_TEN = 400.0  # points between two of whom one wins ten times as often as the other
LONGEST_STEP = 1.0  # of Newton's method, which could overshoot where somebody wins nearly all games
PRECISION, MOST_STEPS = 1e-9, 1_000


def elo_ratings(scores: np.ndarray, games: float, drawn: float = 1.0) -> np.ndarray:
    """Ratings [S] by the model of Bradley and Terry (1952), whose mean is `MEAN`; NaN for who has played nobody.

    `scores` [S, S] is what the row earns of a game against the column, 1 for a win and 1/2 for a draw, on average over
    `games`; NaN where none were played. The entries (i, j) and (j, i) are different games of the same two. Each two
    have so many `drawn` ones more, by which ratings remain finite where somebody has won, or lost, every game.
    """
    played = ~np.isnan(scores) & ~np.eye(len(scores), dtype=bool)
    points = np.where(played, games * (scores + 1 - scores.T) + drawn / 2, 0.0)  # of the row from the column
    rated = played.any(axis=1)
    logits = _most_likely(points[np.ix_(rated, rated)])
    ratings = np.full(len(scores), np.nan)
    ratings[rated] = MEAN + PER_FACTOR_TEN / np.log(10) * logits
    return ratings


def _most_likely(points: np.ndarray) -> np.ndarray:
    """Logits [S] with mean zero, whose differences explain `points` [S, S] best, by Newton's method."""
    games, logits = points + points.T, np.zeros(len(points))
    for _ in range(MOST_STEPS):
        expected = 1 / (1 + np.exp(logits - logits[:, None]))  # what the row earns of a game against the column
        gradient = np.sum(points - games * expected, axis=1)
        weights = games * expected * (1 - expected)
        hessian = np.diag(weights.sum(axis=1)) - weights
        step = np.linalg.solve(hessian + 1, gradient)  # 1 keeps the mean, which the likelihood does not know
        longest = np.abs(step).max(initial=0.0)
        logits += step * min(1.0, LONGEST_STEP / max(longest, PRECISION))
        if longest < PRECISION:
            break
    return logits
