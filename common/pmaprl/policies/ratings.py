"""Elo ratings of the members of a population that play against each other."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmaprl.cli.files import write_json
from pmaprl.device.evaluation import SEED, play_episodes
from pmaprl.device.population import diverged_members
from pmaprl.envs.environment import Env
from pmaprl.policies.policy import Policy
from pmaprl.runs.run import Run

MOST_OPPONENTS = 15  # with more opponents, a member plays fewer games against each
NUM_SHOWN = 10  # members in the table
MEAN_ELO = 1000.0  # mean of all ratings
PER_FACTOR_TEN = 400.0  # points between two members of whom one wins ten times as often


def rate_members(
    run: Run,
    env: Env,
    algorithm: Any,
    directory: Path,
    learners: Any,
    status: str,
) -> str:
    """Rate the members of a finished run with --opponent members, and write elo.json.

    `learners` are [S, ...]. The file is written to the run's `directory`.

    Returns:
        Lines for `Run.finish`; empty if there is nothing to rate.
    """
    args = run.args
    if args.opponent != "members" or status != "finished" or not env.is_game:
        return ""
    share = min(1, MOST_OPPONENTS / (args.num_agents - 1))
    games = math.ceil(args.eval_episodes * share)
    run.console.say("playing all with all ...")
    scores = play_all(env, algorithm, learners, games)
    ratings = elo_ratings(scores, games)
    record = {"env_steps": run.steps, "games": games}
    for name, x in {"ratings": ratings, "scores": scores}.items():
        entries = x.astype(object)
        entries[np.isnan(x)] = None
        record[name] = entries.tolist()
    write_json(directory / "elo.json", record)
    num_rated = np.sum(~np.isnan(ratings))
    best = np.argsort(-ratings, kind="stable")[:num_rated]  # NaN comes last
    others = f"{games} games of each of {len(best)} members with each other one"
    lines = [f"elo      {others}; the best:"]
    for member in best[:NUM_SHOWN]:
        lines.append(f"{'member':>15} {member:<5}{ratings[member]:10.1f}")
    return "\n".join(lines)


def play_all(
    env: Env,
    algorithm: Any,
    learners: Any,
    games: int,
) -> np.ndarray:
    """Let all members play against each other.

    All games of one member are played side by side, in a single program for all members.

    Args:
        env: a game.
        algorithm: the members' algorithm.
        learners: learners [S, ...].
        games: number of games of each ordered pair.

    Returns:
        Mean scores [S, S] of the row against the column: 1 for a win, 1/2 for a draw. NaN on the
        diagonal, and for members whose weights are broken.
    """
    broken = np.asarray(diverged_members(learners))

    def score(us: tuple, them: tuple) -> Array:
        """Mean score [] of `us` against `them`, with random seats and sampled actions."""
        our_id, our_learner = us
        their_id, their_learner = them
        policy = Policy(algorithm, our_learner, env.spec)
        opponent = Policy(algorithm, their_learner, env.spec)
        game = env.against(lambda key, obs: opponent(obs, key=key))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), our_id), their_id)
        keys = jax.random.split(key, games)
        episodes = play_episodes(game, policy.player(stochastic=True), keys)
        return jnp.mean((1 + jnp.sign(episodes.ret)) / 2)

    @jax.jit
    def all_scores(members: tuple) -> Array:
        def scores_of(us: tuple) -> Array:
            return jax.vmap(partial(score, us))(members)

        return jax.lax.map(scores_of, members)

    members = (jnp.arange(len(broken)), learners)
    scores = np.array(all_scores(members), np.float64)
    is_itself = np.eye(len(broken), dtype=bool)
    scores[broken | broken[:, None] | is_itself] = np.nan
    return scores


def elo_ratings(scores: np.ndarray, games: int) -> np.ndarray:
    """Rate members by the model of Bradley and Terry (1952).

    (i, j) and (j, i) are different games of the same two members. Each pair gets one more game, a
    draw, which keeps ratings finite if a member has won, or lost, every game.

    Args:
        scores: [S, S] mean scores of the row against the column, 1 for a win, 1/2 for a draw.
        games: number of games behind each score.

    Returns:
        Ratings [S], whose mean is `MEAN_ELO`; NaN for a member that has played nobody.
    """
    from scipy.optimize import minimize
    from scipy.special import expit, log_expit

    rated = ~np.isnan(scores).all(axis=1)
    of_rated = scores[np.ix_(rated, rated)]
    points = games * (of_rated + 1 - of_rated.T) + 0.5  # of the row from the column
    np.fill_diagonal(points, 0.0)

    def loss_and_gradient(logits: np.ndarray) -> tuple[float, np.ndarray]:
        better = logits[:, None] - logits
        loss = -np.sum(points * log_expit(better))
        surplus = (points + points.T) * expit(better) - points
        return loss, np.sum(surplus, axis=1)

    ratings = np.full(len(scores), np.nan)
    if rated.any():
        logits = minimize(loss_and_gradient, np.zeros(len(of_rated)), jac=True).x
        scale = PER_FACTOR_TEN / np.log(10)
        ratings[rated] = MEAN_ELO + scale * (logits - logits.mean())
    return ratings
