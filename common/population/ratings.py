"""Ratings of members that play with or against each other, at the end of a run.

Games give Elo ratings by maximum likelihood; teams, whose agents share one reward, the mean return of each pair.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.cli.files import replacing
from common.device.agents import Agent, Player, Policy
from common.device.evaluation import OTHER_SEED, SEED, play_episodes
from common.device.opponents import draw_own_components
from common.envs.environment import Env
from common.population.pbt import diverged_members

MANY = 16  # members, from which on the games of each no longer become more


def rate_members(run: Any, env: Env, agent: Agent, learners: Any, status: str) -> str:
    """With --opponent members, write what `learners` [S, ...] are worth to a file; returns lines for the console.

    In games that is elo.json, where several agents act for one reward teams.json. See `Run.finish`. Without the flag,
    and for a run that has not finished, there are none.
    """
    if getattr(run.args, "opponent", "") != "members" or status != "finished":
        return ""
    games = play_games, ELO_FILE, "all against all"
    play, file, how = games if env.is_game else (play_in_teams, TEAMS_FILE, "all with all")
    with run.console.task(f"playing {how}"):
        table = play(env, agent, learners, games_of_two(run.args))
    write_ratings(run.dir / file, table.record, run.steps)
    return table.words


def games_of_two(args: Any) -> int:
    """How often the policy of one is played by that of another: above `MANY` members less often, so that each plays as
    many games in all as among those.
    """
    return math.ceil(args.eval_episodes * min(1, (MANY - 1) / (args.num_agents - 1)))


def write_ratings(path: Path, record: dict[str, Any], env_steps: int) -> None:
    """Write numbers and arrays by name as JSON, null in place of NaN."""
    plain = {name: np.where(np.isnan(x), None, np.asarray(x, object)).tolist() for name, x in record.items()}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"env_steps": env_steps} | plain) + "\n")


ELO_FILE = "elo.json"


class EloTable(NamedTuple):
    """Of S members."""

    ratings: np.ndarray  # [S] NaN for who is broken
    scores: np.ndarray  # [S, S] mean score of the row against the column, NaN where they have not played
    games: int  # of each row against each column

    @property
    def mean_scores(self) -> np.ndarray:
        """What each member earns of a game, [S], whichever of the two it counts for; NaN for who is broken."""
        return mean_of_pairs((self.scores + 1 - self.scores.T) / 2)

    @property
    def record(self) -> dict[str, Any]:
        """What `ELO_FILE` says of it."""
        return {"games": self.games, "ratings": self.ratings, "scores": self.scores}

    @property
    def words(self) -> str:
        """The best members, a line each under two of what the numbers are."""
        rated = count_rated(self.ratings)
        if not rated:
            return "elo      no two members are left who could play each other"
        how = f"{self.games} games of each of {rated} members against each other one; the mean is {MEAN_ELO:.0f}"
        columns = {"Elo": Column(self.ratings, 7, 0), "score": Column(self.mean_scores, 8, 2)}
        return f"elo      {how}\n{best_members(self.ratings, columns)}"


def play_games(env: Env, agent: Agent, learners: Any, games: int) -> EloTable:
    """The table of `learners` [S, ...], whose weights may be broken, after so many `games` of each against each.

    One is the player that an episode counts for, the other plays everybody else. Seats are drawn, actions sampled. All
    games of one member are played side by side, in a single program for all of them.
    """
    scores = np.array(jax.jit(_scores_of(env, agent, games))(learners), np.float64)
    broken = np.asarray(diverged_members(learners))
    scores[np.eye(len(scores), dtype=bool) | broken | broken[:, None]] = np.nan
    return EloTable(elo_ratings(scores, games), scores, games)


def _scores_of(env: Env, agent: Agent, games: int) -> Callable[[Any], jax.Array]:
    """Of learners [S, ...]: mean scores [S, S], 1 for a return above zero and 1/2 for zero."""

    def score(us: tuple, them: tuple) -> jax.Array:
        (our_place, ours), (their_place, theirs) = us, them
        policy, other = (Policy(agent, learner, env.spec) for learner in (ours, theirs))
        game = env.against(lambda key, obs: other(obs, key=key))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), our_place), their_place)
        episodes = play_episodes(game, policy.player(stochastic=True), jax.random.split(key, games))
        return jnp.mean((1 + jnp.sign(episodes.ret)) / 2)

    def scores(learners: Any) -> jax.Array:
        members = jnp.arange(len(jax.tree.leaves(learners)[0])), learners
        return jax.lax.map(lambda us: jax.vmap(lambda them: score(us, them))(members), members)

    return scores


MEAN_ELO = 1000.0  # of all ratings
PER_FACTOR_TEN = 400.0  # points between two of whom one wins ten times as often as the other
LONGEST_STEP = 1.0  # of Newton's method, which could overshoot where somebody wins nearly all games
PRECISION, MOST_STEPS = 1e-9, 1_000


def elo_ratings(scores: np.ndarray, games: float, drawn: float = 1.0) -> np.ndarray:
    """Ratings [S] by the model of Bradley and Terry (1952), whose mean is `MEAN_ELO`; NaN for who has played nobody.

    `scores` [S, S] is what the row earns of a game against the column, 1 for a win and 1/2 for a draw, on average over
    `games`; NaN where none were played. The entries (i, j) and (j, i) are different games of the same two. Each two
    have so many `drawn` ones more, by which ratings remain finite where somebody has won, or lost, every game.
    """
    played = ~np.isnan(scores) & ~np.eye(len(scores), dtype=bool)
    points = np.where(played, games * (scores + 1 - scores.T) + drawn / 2, 0.0)  # of the row from the column
    rated = played.any(axis=1)
    logits = _most_likely(points[np.ix_(rated, rated)])
    ratings = np.full(len(scores), np.nan)
    ratings[rated] = MEAN_ELO + PER_FACTOR_TEN / np.log(10) * logits
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


TEAMS_FILE = "teams.json"


class TeamTable(NamedTuple):
    """Of S members."""

    returns: np.ndarray  # [S, S] mean return where the row has half of the agents, rounded up; NaN for who is broken
    games: int  # of each row with each column

    @property
    def ratings(self) -> np.ndarray:
        """The mean return of each member's teams with others, [S], whichever half is its own; NaN where it has none."""
        return mean_of_pairs((self.returns + self.returns.T) / 2)

    @property
    def alone(self) -> np.ndarray:
        """The mean return of each member where it plays all agents, [S]."""
        return np.diag(self.returns)

    @property
    def record(self) -> dict[str, Any]:
        """What `TEAMS_FILE` says of it."""
        return {"games": self.games, "ratings": self.ratings, "returns": self.returns}

    @property
    def words(self) -> str:
        """The best members, a line each under two of what the numbers are."""
        rated = count_rated(self.ratings)
        if not rated:
            return "teams    no two members are left who could play together"
        how = f"{self.games} episodes of each of {rated} members with each other one; mean returns"
        columns = {"with others": Column(self.ratings, 14, 1), "alone": Column(self.alone, 10, 1)}
        return f"teams    {how}\n{best_members(self.ratings, columns)}"


def play_in_teams(env: Env, agent: Agent, learners: Any, games: int) -> TeamTable:
    """The table of `learners` [S, ...], whose weights may be broken, after so many `games` of each with each.

    They act greedily, in the episodes of an evaluation, with agents that are dealt as in training, and alike for all
    pairs. All games of one member are played side by side, in a single program for all of them.
    """
    returns = np.array(jax.jit(_returns_of(env, agent, games))(learners), np.float64)
    broken = np.asarray(diverged_members(learners))
    returns[broken | broken[:, None]] = np.nan
    return TeamTable(returns, games)


def _returns_of(env: Env, agent: Agent, games: int) -> Callable[[Any], jax.Array]:
    """Of learners [S, ...]: mean returns [S, S]."""
    numbers = jnp.arange(games)
    keys, deal_keys = (jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(x), numbers) for x in (SEED, OTHER_SEED))
    own = draw_own_components(deal_keys, env.agents)

    def earned(us: Any, them: Any) -> jax.Array:
        ours, theirs = (Policy(agent, learner, env.spec).player() for learner in (us, them))
        return jnp.mean(play_episodes(env, teammates(ours, theirs, own), keys).ret)

    def returns(learners: Any) -> jax.Array:
        return jax.lax.map(lambda us: jax.vmap(lambda them: earned(us, them))(learners), learners)

    return returns


def teammates(first: Player, second: Player, own: jax.Array) -> Player:
    """Who plays N environments with those components of the `first` one's actions that are `own` [N, A], and with the
    rest of the `second` one's.
    """

    def act(seen, memory, keys):
        pairs = [player.act(seen, held, keys) for player, held in zip((first, second), memory, strict=True)]
        (actions, others), memory = zip(*pairs, strict=True)
        return jnp.where(own, actions, others), memory

    return Player(lambda count: (first.initial_memory(count), second.initial_memory(count)), act)


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
