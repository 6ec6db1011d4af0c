"""Suites of environments on the device: their steps, ends and last observations beside the
originals.
"""

import json
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import functions_of, same_bits, small_args
from numpy.testing import assert_allclose, assert_array_equal
from test_envs import OFFLINE_IDS

from pmaprl.device.programs import over_devices
from pmaprl.device.state import flatten, key_data, members_on_devices, unflatten
from pmaprl.envs.registry import make
from pmaprl.envs.spaces import MultiDiscrete, sample

pytestmark = pytest.mark.slow


def physics(original, key, state, action):
    out = original.step(state[0], action)
    return out.obs, out.reward, out.done


def craftax(original, key, state, action):
    obs, _, reward, done, _ = original.step_env(key, state, action, original.default_params)
    return obs, reward, done


def jumanji(original, key, state, action):
    out = original.step(state[0], action)[1]
    return out.observation.grid, out.reward, out.last()


def pgx(original, key, state, action):
    game = original.step(state.game, action, jax.random.split(key)[0])
    return (
        {"action_mask": game.legal_action_mask, "obs": game.observation},
        game.rewards[0],
        game.terminated,
    )


def navix(original, key, state, action):
    out = original.step(state, action)
    return out.observation[..., 0], out.reward, out.is_termination()


def xminigrid(original, key, state, action):
    env, params = original
    out = env.step(params.replace(max_steps=40), state, action)  # the sooner, the higher the reward
    return out.observation[..., 0], out.reward, out.last() & (out.discount == 0)


def jaxmarl(original, key, state, action):
    obs, _, rewards, _, _ = original.step_env(
        key,
        state[0],
        dict(zip(original.agents, action, strict=True)),
    )
    return obs, sum(rewards.values()), False  # it ends by its limit, which it calls an end


def octax(original, key, state, action):
    _, frames, reward, terminated, *_ = original[0].step(state, action)
    return jnp.transpose(frames, (2, 1, 0)), reward, terminated


class Case(NamedTuple):
    # Of the original, by key, state and action: its observation, its reward, and whether it ends
    # there
    step: Callable
    limit: str  # the parameter
    steps: int  # its value
    ends: str  # how episodes end: T by themselves, L by the limit
    observed: Callable = lambda obs: obs  # what of our observations is compared
    draws_starts: bool = True
    # A state whose episode ends, where chance does not bring it about
    doomed: Callable = lambda state: state


def dead(state):
    return state.replace(player_health=jnp.full_like(state.player_health, -9))


def things(count):
    """Take the first so many planes of a MiniGrid, as codes."""
    return lambda obs: obs[..., :count].argmax(axis=-1)


CASES = {
    "brax:inverted_pendulum": Case(step=physics, limit="episode_length", steps=4, ends="LT"),
    "craftax:Craftax-Classic-Symbolic-v1": Case(
        step=craftax,
        limit="max_timesteps",
        steps=3,
        ends="LT",
        doomed=dead,
    ),
    "jumanji:Snake-v1": Case(
        step=jumanji,
        limit="time_limit",
        steps=8,
        ends="LT",
        observed=lambda obs: obs["grid"],
    ),
    "pgx:2048": Case(step=pgx, limit="max_steps", steps=5, ends="LT"),
    "navix:Navix-Empty-5x5-v0": Case(
        step=navix,
        limit="max_steps",
        steps=40,
        ends="LT",
        observed=things(11),
        draws_starts=False,
    ),
    "xminigrid:MiniGrid-Empty-5x5": Case(
        step=xminigrid,
        limit="max_steps",
        steps=40,
        ends="LT",
        observed=things(13),
        draws_starts=False,
    ),
    "jaxmarl:MPE_simple_spread_v3": Case(step=jaxmarl, limit="max_steps", steps=9, ends="L"),
    "octax:brix": Case(
        step=octax,
        limit="max_num_steps_per_episodes",
        steps=5,
        ends="L",
        draws_starts=False,
    ),
    "playground:CartpoleBalance": Case(step=physics, limit="episode_length", steps=3, ends="L"),
}
MAKERS = {
    "brax": ("brax.envs", "get_environment", {}),
    "craftax": ("craftax.craftax_env", "make_craftax_env_from_name", {"auto_reset": False}),
    "octax": ("octax.environments", "create_environment", {}),
    "playground": ("mujoco_playground", "registry.load", {"config_overrides": {"impl": "jax"}}),
}


def original(name):
    """The environment itself, where its package is installed."""
    suite, env_id = name.split(":")
    package, function, how = MAKERS.get(suite, (suite, "make", {}))
    return attrgetter(function)(pytest.importorskip(package))(env_id, **how)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
@pytest.mark.parametrize("name", CASES)
def test_episodes_follow_each_other_at_once_with_the_steps_and_ends_of_the_original(name):
    case = CASES[name]
    theirs = jax.jit(partial(case.step, original(name)))
    env = make(name, json.dumps({case.limit: case.steps}))
    step = jax.jit(env.step)
    act = jax.jit(lambda key: sample(key, env.action_space))
    obs, state = jax.jit(env.reset)(jax.random.key(3))
    begun = obs
    ends = ""
    time = 0
    while len(ends) < 3 or set(ends) < set(case.ends):
        state = case.doomed(state) if len(ends) == 1 else state
        key = jax.random.key(len(ends) * 1000 + time)
        action = act(key)
        expected, reward, terminated = theirs(jax.random.split(key)[0], state, action)
        out = step(key, state, action)
        time = time + 1
        jax.tree.map(
            lambda x, y: assert_allclose(x, y, atol=1e-5),
            case.observed(out.final_obs),
            expected,
        )
        assert float(out.reward) == pytest.approx(float(reward), rel=1e-4)
        assert bool(out.terminated) == bool(terminated)
        assert bool(out.truncated) == (time == case.steps)
        if out.terminated or out.truncated:
            assert same_bits(out.obs, begun) != case.draws_starts
            assert not (case.draws_starts and same_bits(out.obs, out.final_obs))
            ends = ends + "LT"[bool(out.terminated)]
            time = 0
        obs = out.obs
        state = out.state
    assert set(ends) == set(case.ends)
    assert env.max_steps == case.steps


@pytest.mark.parametrize(
    "name",
    [*OFFLINE_IDS, *CASES, "jumanji:Game2048-v1", "jumanji:LevelBasedForaging-v0"],
)
def test_an_update_can_be_traced_and_states_can_be_saved(name):
    """Tracing raises where shapes or types do not fit."""
    if name in CASES:
        original(name)  # skips what is not installed
    args = small_args(
        num_envs=4,
        num_steps=4,
        num_minibatches=2,
        hidden_sizes=(4,),
    )
    devices = jax.devices()[:1]
    env = make(name)
    programs = over_devices(functions_of(args, env), devices)
    state = jax.eval_shape(programs.init, members_on_devices(args.members, 1))
    jax.eval_shape(programs.update, state, np.int32(1))
    host = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(key_data, state.actors.env_state),
    )
    assert same_bits(unflatten(flatten(host), host), host)
    if name.startswith(
        ("navix", "xminigrid", "octax", "jumanji:Game", "jaxmarl:MPE")
    ):  # others need a graphics library
        frame = env.frame(env.reset(jax.random.key(0))[1])
        assert frame.dtype == np.uint8
        assert frame.shape[2] == 3
        assert frame.std() > 0


def test_codes_of_jumanji_are_codes_and_amounts_are_amounts():
    sudoku = make("jumanji:Sudoku-v0")
    game = make("jumanji:Game2048-v1")
    snake = make("jumanji:Snake-v1")
    (obs, _), (tiles, _) = sudoku.reset(jax.random.key(0)), game.reset(jax.random.key(0))
    assert sudoku.observation_space["board"] == MultiDiscrete((11,) * 81)
    theirs = sudoku.inner.reset(jax.random.key(0))[1].observation.board
    assert theirs.min() == -1
    assert_array_equal(obs["board"], jnp.ravel(theirs) + 1)
    assert game.observation_space["board"] == MultiDiscrete((18,) * 16)
    assert tiles["board"].max() in (1, 2)
    begun = snake.reset(jax.random.key(0))[1]
    out = snake.step(jax.random.key(0), begun, jnp.int32(0))
    assert out.final_obs["step_count"] == pytest.approx(1 / 4000)


def test_where_jumanji_leaves_no_action_all_are_possible():
    snake = make("jumanji:Snake-v1")
    foraging = make("jumanji:LevelBasedForaging-v0")
    for env, none, wanted in [
        (snake, np.zeros(4, bool), [1] * 4),
        (foraging, np.array([[0] * 6, [0, 0, 1, 0, 0, 0]], bool), [1] * 6 + [0, 0, 1, 0, 0, 0]),
    ]:
        begun = jax.eval_shape(env.inner.reset, jax.random.key(0))[1]
        shapes = begun.observation
        seen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)._replace(
            action_mask=jnp.asarray(none)
        )
        assert env._observed(seen)["action_mask"].tolist() == wanted
