"""Members of a population that play games against each other: who meets whom, what they learn, their Elo ratings."""

import json
import types
from functools import partial
from typing import NamedTuple

import appo_pmap as appo
import asac_pmap as asac
import jax
import jax.numpy as jnp
import numpy as np
import ppo_rnn_pmap as ppo_rnn
import pytest
import sac_pmap as sac
from cli_helpers import check_words, refusal
from helpers import functions_of, over_devices, ppo, relative_difference, small_args

from common.device.memory import Agent
from common.device.seeds import MEMBERS
from common.device.sharding import AXIS
from common.envs.masks import legal_actions, sample_legal
from common.envs.registry import make
from common.population.elo import elo_ratings
from common.population.matchmaking import of_another_member
from common.population.tournament import Table, games_of_two, in_words, play_all, rate_members

GAME = "pgx:tic_tac_toe"
SIZES = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "hidden_sizes": (4,)}
FLAGS = SIZES | {"env": GAME, "population": 3, "matchmaking": "members", "normalize_obs": True, "total_timesteps": 96}


@pytest.fixture(scope="module")
def game():
    return make(GAME)


# -------------------------------------------------------------------------------------------------------- who with whom


def opponents(count: int, update: int) -> list[int]:
    """Whom each of `count` members gets in an update, where all of them have keys of their own."""
    keys = jax.vmap(partial(jax.random.fold_in, data=update))(jax.random.split(jax.random.key(3), count))
    return jax.vmap(of_another_member, axis_name=MEMBERS)(keys, jnp.arange(count)).tolist()


@pytest.mark.parametrize("count", [2, 5])
def test_nobody_plays_itself_and_everybody_is_played(count):
    drawn = [opponents(count, update) for update in range(40)]
    for others in drawn:
        assert sorted(others) == list(range(count))
        assert all(other != member for member, other in enumerate(others))
    assert {others[1] for others in drawn} == set(range(count)) - {1}, "anyone else, in some update"


def test_learners_meet_the_policies_that_others_have_at_that_time_on_any_number_of_devices(game):
    """Two members on two devices; a single run on one device does the same in the game against the other's policy."""
    flags = SIZES | {"normalize_obs": True, "total_timesteps": 10**6}
    pair, single = small_args(**flags, population=2, matchmaking="members"), small_args(**flags)

    def one_update(args, env, state):
        return functions_of(args, env).update(state, jnp.int32(1))[0]

    def against(other, state):
        def move(key, obs):
            return ppo.make_ppo(single, game).act(other, jax.tree.map(lambda x: x[None], obs), key)[0]

        return one_update(single, game.against(move), state)

    def begun(args):
        state = functions_of(args, game).init(jnp.arange(args.num_agents))
        decided = jax.tree.map(lambda x: 100 * x, state.learner.params.actor)  # at first all would move by chance
        return state.replace(learner=state.learner.replace(params=state.learner.params._replace(actor=decided)))

    together, alone = over_devices(partial(begun, pair), 2), over_devices(partial(begun, single), 1)
    both, one = (jax.jit(jax.vmap(f, axis_name=AXIS)) for f in (partial(one_update, pair, game), against))
    for _ in range(2):
        alone = one(jax.tree.map(lambda x: x[:1, 1], together.learner), alone)
        together = both(together)
        first, second = (jax.tree.map(lambda x: x[:1, place][:, None], together.learner.params) for place in range(2))
        assert relative_difference(alone.learner.params, first) < 1e-4
        assert relative_difference(alone.learner.params, second) > 1e-2, "members differ"


# ------------------------------------------------------------------------------------------------------------------ elo


def matrix(*rows):
    return np.array(rows, float)


def test_golden_ratings_of_two():
    """3 of 4 points are 400 log10(3) = 190.85 ratings; with one drawn game more, 3.5 of 5 are 400 log10(7 / 3)."""
    scores = matrix([np.nan, 0.75], [0.25, np.nan])
    for drawn, wanted in ((0, 190.85), (1, 147.19)):
        ratings = elo_ratings(scores, games=2, drawn=drawn)
        assert ratings[0] - ratings[1] == pytest.approx(wanted, abs=0.005) and np.mean(ratings) == pytest.approx(1000)
    assert np.diff(elo_ratings(matrix([np.nan, 1], [0.5, np.nan]), 2, 0))[0] == pytest.approx(-190.85, abs=0.005)


def test_who_wins_all_games_stays_finite():
    size = 20
    ratings = elo_ratings(np.triu(np.ones((size, size)), 1), games=1000)
    assert np.isfinite(ratings).all() and (np.diff(ratings) < -50).all()
    two = elo_ratings(matrix([0, 1], [0, 0]), games=1)  # 2.5 of 3 points
    assert two[0] - two[1] == pytest.approx(400 * np.log10(5))


def test_ratings_are_found_again_from_what_they_make_expect():
    wanted = np.array([1300.0, 1000, 950, 750])
    scores = 1 / (1 + 10 ** ((wanted - wanted[:, None]) / 400))
    np.testing.assert_allclose(elo_ratings(scores, games=10, drawn=0), wanted, atol=1e-6)
    scores[1], scores[:, 1] = np.nan, np.nan
    found = elo_ratings(scores, games=10, drawn=0)
    assert np.isnan(found).tolist() == [False, True, False, False]
    np.testing.assert_allclose(found[[0, 2, 3]], wanted[[0, 2, 3]], atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- tournament


class Skill(NamedTuple):
    params: jax.Array  # below zero for one who moves against the rules, and so loses at once


def agent_of(game) -> Agent:
    def act(learner, seen, memory, key):
        legal = legal_actions(seen.obs)
        good = jax.vmap(lambda key, legal: sample_legal(key, game.action_space, legal))(
            jax.random.split(key, len(seen.first)), legal
        )
        return jnp.where(learner.params < 0, jnp.argmin(legal, axis=-1), good), memory

    return Agent(lambda count: (), act)


def test_all_play_all_and_count_wins_and_draws(game):
    skills = Skill(jnp.array([1.0, -1.0, np.nan, 1.0]))
    table = play_all(game, agent_of(game), skills, games=200)
    scores = table.scores
    assert np.isnan(scores[2]).all() and np.isnan(scores[:, 2]).all() and np.isnan(np.diag(scores)).all()
    assert scores[1, 0] == scores[1, 3] == 0.0
    assert 0.9 < scores[0, 1] <= 1, "who moves first can move against the rules only on a board with a stone"
    assert scores[0, 3] != scores[3, 0] and scores[[0, 3], [3, 0]] == pytest.approx(0.5, abs=0.12)
    assert np.isnan(table.ratings).tolist() == [False, False, True, False]
    rows = in_words(table).splitlines()
    assert "200 games of each of 3 members" in rows[0] and rows[1].split() == ["rank", "member", "Elo", "score"]
    assert rows[-1].split() == ["3", "1", f"{table.ratings[1]:.0f}", f"{table.mean_scores[1]:.2f}"]
    assert table.mean_scores[1] == pytest.approx((2 - scores[0, 1] - scores[3, 1]) / 4)


def test_a_table_is_short():
    table = Table(np.linspace(1200, 800, 12), np.full((12, 12), 0.5), games=2)
    assert [row.split()[0] for row in in_words(table).splitlines()[2:]] == [*map(str, range(1, 11)), "..."]


@pytest.mark.parametrize(("members", "games"), [(2, 128), (16, 128), (61, 32), (10_000, 1)])
def test_members_of_large_populations_play_as_many_games_in_all(members, games):
    assert games_of_two(types.SimpleNamespace(num_agents=members, eval_episodes=128)) == games


def test_nobody_is_rated_without_the_flag_or_before_the_end():
    for matchmaking, status in (("none", "finished"), ("members", "interrupted"), ("members", "stopped")):
        run = types.SimpleNamespace(args=types.SimpleNamespace(matchmaking=matchmaking))
        assert rate_members(run, None, None, None, status) == ""


# ----------------------------------------------------------------------------------------------------------------- runs


def train(folder, **more):
    return ppo.train(small_args(**FLAGS, run_dir=str(folder), **more))


def test_runs_resume_to_the_last_bit_and_end_with_ratings(tmp_path, capsys, shared_programs):
    whole = train(tmp_path / "a", quiet=False)
    said = capsys.readouterr().out
    stored = json.loads((tmp_path / "a" / "elo.json").read_text())
    assert stored["env_steps"] == 96 and stored["games"] == 4 and np.shape(stored["scores"]) == (3, 3)
    assert np.mean(stored["ratings"]) == pytest.approx(1000)
    best = int(np.argmax(stored["ratings"]))
    assert "elo      4 games of each of 3 members" in said and f"1{best:>9}{stored['ratings'][best]:>7.0f}" in said
    assert "their flags:" in said
    train(tmp_path / "b", stop_after=32)
    again = ppo.train(ppo.Args.from_run(tmp_path / "b"))
    assert again.state_sha256 == whole.state_sha256
    assert json.loads((tmp_path / "b" / "elo.json").read_text()) == stored


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", "--matchmaking members needs a --population of 2 or more members, not 0"),
        ("--population 1", "2 or more members, not 1"),
        ("--num-seeds 3", "2 or more members, not 0"),
        ("--grid gamma=0.9,0.99", "2 or more members, not 0"),
        ("--population 2 --opponent self", "--matchmaking members and --opponent self both"),
        ("--population 2 --env CartPole-v1", "--matchmaking members needs a game of several players, not CartPole-v1"),
    ],
)
def test_refusals(words, wanted):
    check_words(refusal(ppo.train, ppo.Args, ["--env", GAME, "--matchmaking", "members", *words.split()]), wanted)


@pytest.mark.parametrize("algorithm", [sac, ppo_rnn, appo, asac])
def test_other_algorithms_have_no_members_that_play(algorithm):
    message = refusal(algorithm.train, algorithm.Args, ["--matchmaking", "members"])
    check_words(message, "there is no --matchmaking here")
    if algorithm in (sac, ppo_rnn):
        check_words(message, "algos/ppo_pmap.py has it")


def test_members_that_are_swept_may_play_each_other():
    args = small_args(population=3, matchmaking="members", sweep=("gamma=choice:0.9,0.99",))
    assert len(args.members.hyper["gamma"]) == 3
