"""Suites of environments on the device: their steps, ends and last observations beside the originals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from common.drawing.gif import draw_gif
from common.drawing.recording import record
from common.envs.masks import legal_actions, sample_legal
from common.envs.registry import make
from common.envs.spaces import Box, Discrete, MultiDiscrete

pytestmark = pytest.mark.slow

POLE = "brax:inverted_pendulum"


@pytest.fixture(scope="module")
def pole():
    return make(POLE, '{"episode_length": 4}')


def test_brax_steps_as_the_original_and_begins_anew_where_it_has_ended(pole):
    from brax import envs

    original = envs.get_environment("inverted_pendulum")
    step, theirs = jax.jit(pole.step), jax.jit(original.step)
    obs, state = jax.jit(pole.reset)(jax.random.key(3))
    beside = jax.jit(original.reset)(jax.random.key(3))
    np.testing.assert_array_equal(obs, beside.obs)
    ends = []
    for time in range(6):
        action = np.array([0.2], np.float32) if len(ends) == 0 else np.array([1.0], np.float32)
        out = step(jax.random.key(time), state, action)
        beside = theirs(beside, action)
        np.testing.assert_allclose(out.final_obs, beside.obs, atol=1e-6)
        assert float(out.reward) == float(beside.reward)
        assert bool(out.terminated) == bool(beside.done)
        if out.terminated or out.truncated:
            ends.append((time, bool(out.terminated), bool(out.truncated)))
            assert np.abs(out.obs - out.final_obs).max() > 1e-3 and np.abs(out.obs).max() < 0.02
            beside = beside.replace(pipeline_state=out.state[0].pipeline_state, obs=out.obs)
        obs, state = out.obs, out.state
    assert ends[0] == (3, False, True), "the time limit"
    assert ends[1][1:] == (True, False), "a fall, before the limit"


def test_jumanji_steps_as_the_original_and_begins_anew_where_it_has_ended():
    import jumanji

    ours, original = make("jumanji:Snake-v1"), jumanji.make("Snake-v1")
    step, theirs = jax.jit(ours.step), jax.jit(original.step)
    (obs, state), (their_state, beside) = (jax.jit(env.reset)(jax.random.key(3)) for env in (ours, original))
    for time in range(60):
        np.testing.assert_array_equal(obs["grid"], beside.observation.grid)
        np.testing.assert_array_equal(obs["action_mask"], beside.observation.action_mask)
        assert obs["step_count"] == pytest.approx(time / 4000)  # one more than the limit
        action = sample_legal(jax.random.key(time), ours.action_space, legal_actions(obs))
        if time > 20 and not obs["action_mask"].all():
            action = jnp.argmin(obs["action_mask"])  # into a wall, or itself
        out = step(jax.random.key(time), state, action)
        their_state, beside = theirs(their_state, action)
        assert (float(out.reward), bool(out.terminated), bool(out.truncated)) == (
            float(beside.reward),
            bool(beside.last()),
            False,
        )
        obs, state = out.obs, out.state
        if out.terminated:
            break
    np.testing.assert_array_equal(out.final_obs["grid"], beside.observation.grid)
    assert obs["step_count"] == 0 and time > 20


def test_time_limits_of_jumanji_are_truncations():
    import jumanji

    ours, original = make("jumanji:Maze-v0", '{"time_limit": 3}'), jumanji.make("Maze-v0", time_limit=3)
    step, theirs = jax.jit(ours.step), jax.jit(original.step)
    (obs, state), (their_state, _) = (env.reset(jax.random.key(0)) for env in (ours, original))
    for time in range(3):
        action = jnp.argmax(obs["action_mask"])
        out = step(jax.random.key(time), state, action)
        their_state, beside = theirs(their_state, action)
        assert (bool(out.truncated), bool(out.terminated)) == (time == 2, False)
        obs, state = out.obs, out.state
    assert beside.last() and beside.discount == 0, "its own end says that nothing follows"
    assert out.final_obs["step_count"] == 3 and out.obs["step_count"] == 0
    assert ours.max_steps == 3


def test_codes_of_jumanji_are_codes_and_amounts_are_amounts():
    sudoku, game = make("jumanji:Sudoku-v0"), make("jumanji:Game2048-v1")
    (obs, _), (tiles, _) = sudoku.reset(jax.random.key(0)), game.reset(jax.random.key(0))
    assert sudoku.observation_space.parts["board"] == MultiDiscrete((11,) * 81)
    theirs = sudoku.inner.reset(jax.random.key(0))[1].observation.board
    assert theirs.min() == -1
    np.testing.assert_array_equal(obs["board"], jnp.ravel(theirs) + 1)
    assert game.observation_space.parts["board"] == MultiDiscrete((18,) * 16) and tiles["board"].max() in (1, 2)
    tour = make("jumanji:TSP-v1")
    assert tour.observation_space.parts["position"] == Discrete(20)
    assert isinstance(tour.observation_space.parts["coordinates"], Box)


def test_the_time_limit_in_a_reward_of_jumanji_is_the_one_that_was_asked_for():
    env = make("jumanji:SearchAndRescue-v0", '{"time_limit": 40}')
    inner = env.inner.unwrapped
    np.testing.assert_allclose(inner._reward_fn(jnp.ones((1, 1), bool), 20, inner.time_limit), 0.5, rtol=1e-6)


def test_where_jumanji_leaves_no_action_all_are_possible():
    snake, foraging = make("jumanji:Snake-v1"), make("jumanji:LevelBasedForaging-v0")
    for env, none, wanted in [
        (snake, np.zeros(4, bool), [1] * 4),
        (foraging, np.array([[0] * 6, [0, 0, 1, 0, 0, 0]], bool), [1] * 6 + [0, 0, 1, 0, 0, 0]),
    ]:
        shapes = jax.eval_shape(env.inner.reset, jax.random.key(0))[1].observation
        seen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)._replace(action_mask=jnp.asarray(none))
        assert env._observed(seen)["action_mask"].tolist() == wanted


def test_pictures_are_drawn_by_the_suite_itself_or_else_of_observations(tmp_path, monkeypatch):
    env = make("jumanji:Game2048-v1")
    recording = record(env, lambda obs: jnp.argmax(obs["action_mask"], axis=-1), jax.random.key(0), 5)
    frames = [env.frame(jax.tree.map(lambda x, step=step: x[step], recording.states)) for step in (0, 5)]
    assert all(frame.shape == (400, 400, 3) and frame.dtype == np.uint8 for frame in frames)
    assert (frames[0] != frames[1]).any()
    sizes = []
    for name in ("own", "general"):
        draw_gif(env, recording, tmp_path / name)
        sizes.append(Image.open(tmp_path / name).size)
        monkeypatch.setattr(env, "frame", None)  # a renderer that does not work
    assert sizes[0] == (280, 224) and sizes[1] != sizes[0]
