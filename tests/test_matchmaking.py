"""Members of a population that play against or with each other: who meets whom, what they learn,
their ratings.
"""

import json
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import functions_of, only_acts, over_devices, ppo, relative_difference, small_args
from numpy.testing import assert_allclose

from pmaprl.device import drivers
from pmaprl.device.keys import keys_of
from pmaprl.device.opponents import deal_components, of_other_member
from pmaprl.device.sharding import AXIS, MEMBERS
from pmaprl.envs.environment import Env, Step
from pmaprl.envs.masks import legal_actions
from pmaprl.envs.registry import make
from pmaprl.envs.spaces import MultiDiscrete, box, sample
from pmaprl.policies.ratings import elo_ratings, play_all

GAME = "pgx:tic_tac_toe"
SIZES = {
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 1,
    "hidden_sizes": (4,),
}
FLAGS = SIZES | {
    "env": GAME,
    "population": 3,
    "opponent": "members",
    "normalize_obs": True,
    "total_timesteps": 96,
}


@pytest.mark.parametrize("count", [2, 5])
def test_nobody_plays_itself_and_everybody_is_played(count):
    keys = jax.random.split(jax.random.key(3), count)  # of their own
    drawn = []
    for update in range(40):
        of_update = partial(jax.random.fold_in, data=update)
        now = jax.vmap(of_update)(keys)
        choose = jax.vmap(of_other_member, axis_name=MEMBERS)
        others = choose(now, jnp.arange(count)).tolist()
        assert sorted(others) == list(range(count))
        assert all(other != member for member, other in enumerate(others))
        drawn.append(others[1])
    assert set(drawn) == set(range(count)) - {1}, "anyone else, in some update"


@pytest.mark.slow
def test_learners_meet_the_present_policies_of_others_on_any_number_of_devices():
    """Two members on two devices; a single run on one device does the same in the game against the
    other's policy.
    """
    flags = SIZES | {"normalize_obs": True, "total_timesteps": 10**6}
    game = make(GAME)
    pair = small_args(**flags, population=2, opponent="members")
    single = small_args(**flags)

    def one_update(args, env, state):
        functions = functions_of(args, env)
        return functions.update(state, jnp.int32(1))[0]

    def against(other, state):
        def move(key, obs):
            return ppo.PPO(single, game.spec).act(
                other,
                jax.tree.map(lambda x: x[None], obs),
                key,
            )[0]

        return one_update(single, game.against(move), state)

    def begun(args):
        state = functions_of(args, game).init(jnp.arange(args.num_agents))
        # At first all would move by chance
        decided = jax.tree.map(lambda x: 100 * x, state.learner.params.actor)
        params = state.learner.params._replace(actor=decided)
        return state.replace(learner=state.learner.replace(params=params))

    together = over_devices(partial(begun, pair), 2)
    alone = over_devices(partial(begun, single), 1)
    kinds = (partial(one_update, pair, game), against)
    both, one = (jax.jit(jax.vmap(f, axis_name=AXIS)) for f in kinds)
    for _ in range(2):
        learner = jax.tree.map(lambda x: x[:1, 1], together.learner)
        alone = one(learner, alone)
        together = both(together)
        first, second = (
            jax.tree.map(lambda x: x[:1, place][:, None], together.learner.params)
            for place in range(2)
        )
        assert relative_difference(alone.learner.params, first) < 1e-4
        assert relative_difference(alone.learner.params, second) > 1e-2, "members differ"


class Trio(Env):
    """Three agents earn the number whose digits they name, such as 201, and that ends the
    episode.
    """

    agents = (0, 1, 2)

    def __init__(self):
        super().__init__(
            "trio",
            None,
            box((1,)),
            MultiDiscrete((3, 3, 3)),
            max_steps=1,
        )

    def begin(self, key):
        return jnp.ones(1), 0

    def advance(self, key, state, action):
        return Step(
            obs=jnp.ones(1),
            state=0,
            reward=action @ jnp.array([100, 10, 1]),
            terminated=True,
            truncated=False,
        )


TEAM = SIZES | {"num_envs": 16, "population": 3, "opponent": "members", "total_timesteps": 10**6}


def head_of(state):
    """Weights [D, S, F, 9] and biases [D, S, 9] of the last layer of the policies."""
    return state.learner.params.actor["params"]["PolicyHead_0"]["Dense_0"]


def begun_and_update(num_devices: int, **flags):
    args = small_args(**TEAM | flags)
    functions = functions_of(args, Trio())
    state = over_devices(lambda: functions.init(jnp.arange(args.num_agents)), num_devices)

    def one_update_of(state):
        return functions.update(state, jnp.int32(1))

    update = jax.jit(jax.vmap(one_update_of, axis_name=AXIS))

    def updated(state):
        state, outcome = update(state)
        outcome_of_one = jax.tree.map(lambda x: x[0], outcome)
        return state, outcome_of_one.fetch(1).metrics

    return state, updated


@pytest.mark.slow
def test_teams_are_two_agents_of_a_member_and_one_of_another_on_any_number_of_devices():
    """Members are stubborn, so the lowest, highest and mean return of updates tell who played."""
    (states, updates), steps = zip(*map(begun_and_update, (1, 2)), strict=True), set()
    for head in map(head_of, states):  # member m names the digit m, whatever happens
        head["kernel"] *= 0
        logits = 100 * jnp.tile(jnp.eye(3), 3)
        head["bias"] = jnp.broadcast_to(logits, head["bias"].shape)
    for _ in range(6):
        updated = (update(state) for state, update in zip(states, updates, strict=True))
        states, metrics = zip(
            *updated,
            strict=True,
        )
        one, two = (
            [found[f"episode/{name}"] for name in ("return_min", "return_max", "return")]
            for found in metrics
        )
        assert_allclose(one, two, rtol=1e-6)
        low, high, mean = one
        others = [sum(map(int, f"{int(x):03}")) - 2 * m for m, x in enumerate(high)]
        places = tuple((other - m) % 3 for m, other in enumerate(others))
        steps |= {places}
        for m, other in enumerate(others):
            possible = [111 * m + (other - m) * place for place in (1, 10, 100)]
            assert (low[m], high[m]) == (min(possible), max(possible)), "any of the agents"
            assert low[m] < mean[m] < high[m]
    assert steps == {(1, 1, 1), (2, 2, 2)}


@pytest.mark.slow
def test_members_learn_nothing_of_agents_that_others_play(monkeypatch):
    def first_agent(keys, agents):
        return jnp.tile(jnp.array([True, False, False]), (len(keys), 1))

    monkeypatch.setattr(drivers, "deal_components", first_agent)
    state, update = begun_and_update(
        1,
        ent_coef=0.1,
        num_minibatches=1,
        clip_eps=1e-5,
    )
    after, metrics = update(state)
    for name in ("kernel", "bias"):
        axes = (0, 1, 2)[: head_of(state)[name].ndim - 1]
        moved = np.any(
            head_of(after)[name] != head_of(state)[name],
            axis=axes,
        )
        assert moved.tolist() == [True] * 3 + [False] * 6
    assert np.max(metrics["policy/clip_fraction"]) == 0, "the first ratios are 1"
    uniform = pytest.approx(np.log(3), rel=1e-2)
    assert metrics["policy/entropy"] == uniform, "of one component"


def test_half_of_the_agents_are_dealt_by_environment_on_any_number_of_devices():
    agents = (0, 0, 1, 2, 2, 2)
    one, two = (
        over_devices(lambda: deal_components(keys_of(jax.random.key(0), 64 // n), agents), n)
        for n in (1, 2)
    )
    own = np.concatenate(one)
    assert np.array_equal(own, np.concatenate(two))
    assert (own[:, 0] == own[:, 1]).all()
    assert (own[:, 3] == own[:, 4]).all()
    assert (own[:, 3] == own[:, 5]).all()
    of_others = own[:, [0, 2, 3]]
    assert (of_others.sum(axis=1) == 2).all()
    assert not own.all(axis=0).any()
    drawn = deal_components(jax.random.split(jax.random.key(0), 64), (0, 1))
    assert (drawn.sum(axis=1) == 1).all()


def test_golden_ratings_of_two():
    """3 of 4 points, with a drawn game more 3.5 of 5, are 400 log10(7 / 3) ratings; who has played
    nobody has none.
    """
    table = [[np.nan, np.nan, 0.75], [np.nan] * 3, [0.25, np.nan, np.nan]]
    scores = np.array(table)
    found = elo_ratings(scores, games=2)
    assert np.isnan(found).tolist() == [False, True, False]
    assert found[0] - found[2] == pytest.approx(147.19, abs=0.01)
    assert np.nanmean(found) == pytest.approx(1000)
    unplayed = elo_ratings(np.full((2, 2), np.nan), games=2)
    assert np.isnan(unplayed).all()
    ratings = elo_ratings(np.triu(np.ones((20, 20)), 1), games=1000)
    assert np.isfinite(ratings).all(), "who wins all games, too"
    wanted = np.array([1300.0, 1000, 950, 750])  # found again from what they make expect
    distances = (wanted - wanted[:, None]) / 400
    scores = 1 / (1 + 10**distances)
    # Of both orders of a pair: whoever is the row has an advantage
    scores += 0.05 * (1 - np.eye(4))
    assert_allclose(elo_ratings(scores, games=10**6), wanted, atol=0.1)


class Skill(NamedTuple):
    params: jax.Array  # below zero for one who moves against the rules, and so loses at once


@pytest.mark.slow
def test_all_play_all_with_wins_and_draws_counted():
    game = make(GAME)
    strengths = jnp.array([1.0, -1.0, np.nan, 1.0])
    skills = Skill(strengths)

    def act(learner, seen, key):
        legal = legal_actions(seen.obs)
        keys = jax.random.split(key, len(seen.first))

        def draw(key, legal):
            return sample(key, game.action_space, legal)

        good = jax.vmap(draw)(keys, legal)
        worst = jnp.argmin(legal, axis=-1)
        return jnp.where(learner.params < 0, worst, good)

    scores = play_all(
        game,
        only_acts(act),
        skills,
        games=200,
    )
    assert np.isnan(scores[2]).all()
    assert np.isnan(scores[:, 2]).all()
    assert np.isnan(np.diag(scores)).all()
    assert scores[1, 0] == scores[1, 3] == 0.0
    assert 0.9 < scores[0, 1] <= 1, (
        "who moves first can move against the rules only on a board with a stone"
    )
    assert scores[0, 3] != scores[3, 0]
    assert scores[[0, 3], [3, 0]] == pytest.approx(0.5, abs=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("env", [None, Trio()], ids=["game", "team"])
def test_runs_resume_to_the_last_bit_and_end_with_ratings(env, tmp_path, capsys, shared_programs):
    args = small_args(**FLAGS, run_dir=str(tmp_path / "a"), quiet=False)
    whole = ppo.train(args, env)
    short = small_args(**FLAGS, run_dir=str(tmp_path / "b"), stop_after=32)
    ppo.train(short, env)
    again = ppo.Args.from_run(tmp_path / "b", env="builtins:NoneType" if env else GAME)
    assert ppo.train(again, env).state_sha256 == whole.state_sha256
    if env is None:
        stored, resumed = (
            json.loads((tmp_path / name / "elo.json").read_text()) for name in ("a", "b")
        )
        assert stored["env_steps"] == 96
        assert stored["games"] == 4
        assert np.shape(stored["scores"]) == (3, 3)
        assert np.mean(stored["ratings"]) == pytest.approx(1000)
        assert f"{max(stored['ratings']):.1f}" in capsys.readouterr().out
        assert resumed == stored
