"""Ratings of members that play with or against each other, at the end of a run: a table and a file.

Games give Elo ratings by maximum likelihood; teams, whose agents share one reward, the mean return with all others.
"""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.cli.files import replacing
from common.device.agents import Agent, Player, Policy
from common.device.evaluation import OTHER_SEED, SEED, play_episodes
from common.device.opponents import draw_own_components, opponent_of
from common.envs.environment import Env
from common.population.pbt import diverged_members

MANY = 16  # members, from which on the games of each no longer become more
SHOWN = 10  # members in the table
MEAN_ELO = 1000.0  # of all ratings
PER_FACTOR_TEN = 400.0  # points between two of whom one wins ten times as often as the other


def rate_members(run: Any, env: Env, agent: Agent, learners: Any, status: str) -> str:
    """With --opponent members, write what `learners` [S, ...] are worth to a file; returns lines for the console.

    In games that is elo.json, where several agents act for one reward teams.json. See `Run.finish`. Without the flag,
    and for a run that has not finished, there are none.
    """
    args = run.args
    if opponent_of(args) != "members" or status != "finished":
        return ""
    games = math.ceil(args.eval_episodes * min(1, (MANY - 1) / (args.num_agents - 1)))
    with run.console.task("playing all with all"):
        scores = play_all(env, agent, learners, games)
    name, ratings = ("elo", elo_ratings(scores, games)) if env.is_game else ("teams", mean_with_others(scores))
    record = {"env_steps": run.steps, "games": games, "ratings": without_nan(ratings), "scores": without_nan(scores)}
    with replacing(run.dir / f"{name}.json") as temporary:
        temporary.write_text(json.dumps(record) + "\n")
    best = np.argsort(-ratings, kind="stable")[: np.sum(~np.isnan(ratings))]  # NaN comes last
    lines = [f"{name:9}{games} games of each of {len(best)} members with each other one; the best:"]
    return "\n".join([*lines, *(f"{'member':>15} {member:<5}{ratings[member]:10.1f}" for member in best[:SHOWN])])


def without_nan(x: np.ndarray) -> list[Any]:
    """As lists for JSON, with None in place of NaN."""
    return np.where(np.isnan(x), None, x.astype(object)).tolist()


def play_all(env: Env, agent: Agent, learners: Any, games: int) -> np.ndarray:
    """What each of `learners` [S, ...] earns on average of so many `games` against, or in a team with, each, [S, S].

    NaN for those whose weights are broken. In games also on the diagonal; there a win is 1 and a draw 1/2. All games of
    one member are played side by side, in a single program for all of them.
    """
    play = _score_of_game if env.is_game else _return_of_team
    broken = np.asarray(diverged_members(learners))

    @jax.jit
    def all_scores(members: Any) -> jax.Array:
        def scores_of(us: Any) -> jax.Array:
            return jax.vmap(lambda them: play(env, agent, us, them, games))(members)

        return jax.lax.map(scores_of, members)

    scores = np.array(all_scores((jnp.arange(len(broken)), learners)), np.float64)
    scores[broken | broken[:, None] | (env.is_game & np.eye(len(broken), dtype=bool))] = np.nan
    return scores


def _score_of_game(env: Env, agent: Agent, us: tuple, them: tuple, games: int) -> jax.Array:
    """The mean score of one that an episode counts for, where the other plays everybody else.

    Seats are drawn, actions sampled.
    """
    (our_place, ours), (their_place, theirs) = us, them
    policy, other = (Policy(agent, learner, env.spec) for learner in (ours, theirs))
    game = env.against(lambda key, obs: other(obs, key=key))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), our_place), their_place)
    episodes = play_episodes(game, policy.player(stochastic=True), jax.random.split(key, games))
    return jnp.mean((1 + jnp.sign(episodes.ret)) / 2)


def _return_of_team(env: Env, agent: Agent, us: tuple, them: tuple, games: int) -> jax.Array:
    """The mean return where one acts for half of the agents, rounded up, and the other for the rest, both greedily.

    Which agents these are is drawn as in training, and alike for all pairs.
    """
    numbers = jnp.arange(games)
    keys, deal_keys = (jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(x), numbers) for x in (SEED, OTHER_SEED))
    ours, theirs = (Policy(agent, learner, env.spec).player() for _, learner in (us, them))
    team = teammates(ours, theirs, draw_own_components(deal_keys, env.agents))
    return jnp.mean(play_episodes(env, team, keys).ret)


def teammates(first: Player, second: Player, own: jax.Array) -> Player:
    """Who plays N environments with those components of the `first` one's actions that are `own` [N, A], and with the
    rest of the `second` one's.
    """

    def act(seen, memory, keys):
        pairs = [player.act(seen, held, keys) for player, held in zip((first, second), memory, strict=True)]
        (actions, others), memory = zip(*pairs, strict=True)
        return jnp.where(own, actions, others), memory

    return Player(lambda count: (first.initial_memory(count), second.initial_memory(count)), act)


def elo_ratings(scores: np.ndarray, games: int) -> np.ndarray:
    """Ratings [S] by the model of Bradley and Terry (1952), whose mean is `MEAN_ELO`; NaN for who has played nobody.

    `scores` [S, S] is what the row earns of a game against the column, 1 for a win and 1/2 for a draw, on average over
    `games`; (i, j) and (j, i) are different games of the same two. Each two have one drawn game more, by which ratings
    remain finite where somebody has won, or lost, every game.
    """
    from scipy.optimize import minimize
    from scipy.special import expit, log_expit

    rated = ~np.isnan(scores).all(axis=1)
    own = scores[np.ix_(rated, rated)]
    points = games * (own + 1 - own.T) + 0.5  # of the row from the column
    np.fill_diagonal(points, 0.0)

    def loss_and_gradient(logits: np.ndarray) -> tuple[float, np.ndarray]:
        better = logits[:, None] - logits
        return -np.sum(points * log_expit(better)), np.sum((points + points.T) * expit(better) - points, axis=1)

    ratings = np.full(len(scores), np.nan)
    if rated.any():
        logits = minimize(loss_and_gradient, np.zeros(len(own)), jac=True).x
        ratings[rated] = MEAN_ELO + PER_FACTOR_TEN / np.log(10) * (logits - logits.mean())
    return ratings


def mean_with_others(returns: np.ndarray) -> np.ndarray:
    """The mean return of each member's teams with others, [S], whichever part is its own; NaN where it has none."""
    both = np.ma.masked_invalid((returns + returns.T) / 2)
    both[np.eye(len(both), dtype=bool)] = np.ma.masked
    return both.mean(axis=1).filled(np.nan)
