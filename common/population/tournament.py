"""What members who have trained together are worth: all play against all, and get Elo ratings."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.device.evaluation import SEED, play_episodes
from common.device.memory import Agent
from common.device.policy import Policy
from common.envs.environment import Env
from common.population.elo import MEAN, elo_ratings
from common.population.exchange import broken_of
from common.population.standings import Column, best_members, count_rated, mean_of_pairs

FILE = "elo.json"


class Table(NamedTuple):
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
        """What `FILE` says of it."""
        return {"games": self.games, "ratings": self.ratings, "scores": self.scores}

    @property
    def words(self) -> str:
        """The best members, a line each under two of what the numbers are."""
        rated = count_rated(self.ratings)
        if not rated:
            return "elo      no two members are left who could play each other"
        how = f"{self.games} games of each of {rated} members against each other one; the mean is {MEAN:.0f}"
        columns = {"Elo": Column(self.ratings, 7, 0), "score": Column(self.mean_scores, 8, 2)}
        return f"elo      {how}\n{best_members(self.ratings, columns)}"


def play_all(env: Env, agent: Agent, learners: Any, games: int) -> Table:
    """The table of `learners` [S, ...], whose weights may be broken, after so many `games` of each against each.

    One is the player that an episode counts for, the other plays everybody else. Seats are drawn, actions sampled. All
    games of one member are played side by side, in a single program for all of them.
    """
    scores = np.array(jax.jit(_scores_of(env, agent, games))(learners), np.float64)
    broken = np.asarray(broken_of(learners))
    scores[np.eye(len(scores), dtype=bool) | broken | broken[:, None]] = np.nan
    return Table(elo_ratings(scores, games), scores, games)


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
