"""The best possible return in a small game whose probabilities gymnasium tells, such as its toy
text.
"""

from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from pmaprl.cli.env_flags import read_params, split_name
from pmaprl.device.evaluation import SEED
from pmaprl.envs.environment import LONGEST_HORIZON


class Table(NamedTuple):
    """Probabilities and rewards of a game with S states and A actions."""

    onward: np.ndarray  # [S, A, S] of the next state; what lacks to 1 ends the episode
    reward: np.ndarray  # [S, A] expected
    starts: np.ndarray  # [S] of the first state
    horizon: int  # steps after which an episode is cut


class Optimum(NamedTuple):
    """Best expected returns, without discount."""

    all_starts: float  # the mean over the states in which an episode may begin
    evaluated: float  # the mean over those in which the kit's evaluations begin


EQUAL = {"FrozenLake-misc": ("FrozenLake-v1", {"max_steps_in_episode": "max_episode_steps"})}
"""Games of gymnax that gymnasium has too, by name: theirs, and their names of the parameters."""


def optimum_of(env: str, env_params: str, episodes: int) -> Optimum | None:
    """The best returns in `env`, and in so many episodes of an evaluation; None where probabilities
    are not known.
    """
    suite, name = split_name(env)
    params = read_params(env_params)
    if suite == "gymnax" and name in EQUAL:
        name, theirs = EQUAL[name]
        if not params.keys() <= theirs.keys():
            return None
        params = {theirs[key]: value for key, value in params.items()}
    elif suite != "gymnasium":
        return None
    try:
        import gymnasium
    except ImportError:  # where a game of gymnax was trained
        return None
    with closing(gymnasium.make(name, **params)) as game:
        table = table_of(game)
        if table is None:
            return None
        values = values_of(table)
        # Each episode has a seed of its own; the equal games have one start
        firsts = [game.reset(seed=SEED + index)[0] for index in range(episodes)]
    return Optimum(
        all_starts=float(table.starts @ values), evaluated=float(np.mean(values[firsts]))
    )


def table_of(game: Any) -> Table | None:
    """Read what gymnasium's toy text holds as `P`; None for other games, and where that is not all
    that happens.
    """
    inner = game.unwrapped
    if not (hasattr(inner, "P") and hasattr(inner, "initial_state_distrib")):
        return None
    # Of Taxi: where they want to go is not in the table
    if getattr(inner, "fickle_passenger", False):
        return None
    states = int(game.observation_space.n)
    actions = int(game.action_space.n)
    onward = np.zeros((states, actions, states))
    reward = np.zeros((states, actions))
    for state, action in np.ndindex(states, actions):
        for probability, following, earned, ends in inner.P[state][action]:
            reward[state, action] += probability * earned
            if not ends:
                onward[state, action, following] += probability
    horizon = game.spec.max_episode_steps or LONGEST_HORIZON
    return Table(
        onward=onward,
        reward=reward,
        starts=np.asarray(inner.initial_state_distrib),
        horizon=horizon,
    )


def values_of(table: Table) -> np.ndarray:
    """The best expected return [S] from each state with all steps left, by backward induction.

    A policy may count its steps here. One that sees the state alone can be a little worse.
    """
    values = np.zeros(len(table.starts))
    for _ in range(table.horizon):
        longer = (table.reward + table.onward @ values).max(axis=1)
        if np.array_equal(longer, values):  # more steps change nothing
            break
        values = longer
    return values
