"""What members who have trained together are worth in teams: each plays with each, and all for the same reward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.device.evaluation import OTHER_SEED, SEED, play_episodes
from common.device.memory import Agent, Player
from common.device.opponents import dealt
from common.device.policy import Policy
from common.envs.environment import Env
from common.population.exchange import broken_of
from common.population.standings import Column, best_members, count_rated, mean_of_pairs

FILE = "teams.json"


class Table(NamedTuple):
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
        """What `FILE` says of it."""
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


def play_all(env: Env, agent: Agent, learners: Any, games: int) -> Table:
    """The table of `learners` [S, ...], whose weights may be broken, after so many `games` of each with each.

    They act greedily, in the episodes of an evaluation, with agents that are dealt as in training, and alike for all
    pairs. All games of one member are played side by side, in a single program for all of them.
    """
    returns = np.array(jax.jit(_returns_of(env, agent, games))(learners), np.float64)
    broken = np.asarray(broken_of(learners))
    returns[broken | broken[:, None]] = np.nan
    return Table(returns, games)


def _returns_of(env: Env, agent: Agent, games: int) -> Callable[[Any], jax.Array]:
    """Of learners [S, ...]: mean returns [S, S]."""
    numbers = jnp.arange(games)
    keys, deal_keys = (jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(x), numbers) for x in (SEED, OTHER_SEED))
    own = dealt(deal_keys, env.agents)

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
