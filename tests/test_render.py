"""Episodes as GIFs, of `common/drawing`: what is recorded, what the pictures show, and the file."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_env
from PIL import Image

from common.device.agents import Player
from common.device.evaluation import play_episodes
from common.drawing import pictures
from common.drawing.gif import CAPTION, draw_gif, timing
from common.drawing.recording import Recording, record
from common.envs import spaces
from common.envs.registry import make

STEPS = 4
OWN = "Acrobot-v1", "MountainCarContinuous-v0", "Reacher-misc", "Swimmer-misc", "PointRobot-misc", "FourRooms-misc"
OTHERS = "MetaMaze-misc", "Breakout-MinAtar", "MemoryChain-bsuite", "TwoDials", "KeyInState"
DRAWN = ["CartPole-v1", "FrozenLake-misc", "Pixels"]
DRAWN += [pytest.param(name, marks=pytest.mark.slow) for name in (*OWN, *OTHERS)]


def random_recording(env) -> Recording:
    """A few random steps."""
    player = Player(lambda count: (), lambda seen, memory, keys: (spaces.sample(keys[0], env.action_space)[None], ()))
    return record(env, player, jax.random.key(1), STEPS)


def drawn(env, recording, path) -> tuple[list[np.ndarray], list[int]]:
    """The frames of the recording's GIF [H, W, 3], without captions, and their milliseconds."""
    count = draw_gif(env, recording, path)
    frames, delays = [], []
    with Image.open(path) as gif:
        assert (gif.n_frames, gif.info["loop"]) == (count, 0)
        for index in range(count):
            gif.seek(index)
            frames.append(np.asarray(gif.convert("RGB"), int)[:-CAPTION])
            delays.append(gif.info["duration"])
    return frames, delays


def still(env, path, states: dict, obs=((0.0,), (0.0,)), actions=(0,)) -> list[np.ndarray]:
    """The frames of hand-made states: {field: its values}."""
    states = SimpleNamespace(**{name: np.asarray(values) for name, values in states.items()})
    rewards = np.zeros(len(actions))
    return drawn(env, Recording(states, np.asarray(obs), np.asarray(actions), rewards), path)[0]


def pixels(frame: np.ndarray, color: str) -> np.ndarray:
    """What has `color`: [pixels, 2], (x, y) from the top left."""
    near = np.argwhere(np.abs(frame - np.array(pictures.rgb(color))).max(axis=2) <= 12)
    assert len(near), f"nothing is {color}"
    return near[:, ::-1]


def place(frame: np.ndarray, color: str) -> np.ndarray:
    """The middle of what has `color`, (x, y)."""
    return pixels(frame, color).mean(axis=0) + 0.5


# ------------------------------------------------------------------------------------------------------- recording


def test_a_recording_is_an_episode_of_the_evaluation(monkeypatch):
    monkeypatch.setattr("common.drawing.recording.CHUNK", 8)
    env = make_env("Luck")
    keys = jax.random.split(jax.random.key(7), 3)

    def act(seen, memory, keys):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, 3))(keys), memory

    player = Player(lambda count: (), act)
    episodes = jax.jit(lambda: play_episodes(env, player, keys))()
    for index, key in enumerate(keys):
        recording = record(env, player, key, env.max_steps)
        assert len(recording.rewards) == episodes.length[index]
        assert recording.rewards.sum() == pytest.approx(float(episodes.ret[index]))
    assert len(set(episodes.length.tolist())) > 1


@pytest.mark.parametrize(
    ("name", "chunk", "max_steps", "steps"),
    [("Toy", 3, 9, 7), ("Toy", 7, 9, 7), ("Endless", 5, 12, 12)],
)
def test_a_recording_ends_with_the_true_final_state_and_observation(monkeypatch, name, chunk, max_steps, steps):
    """Where the episode ends, or where `max_steps` are over."""
    monkeypatch.setattr("common.drawing.recording.CHUNK", chunk)
    recording = record(make_env(name), lambda obs: jnp.zeros(1, jnp.int32), jax.random.key(0), max_steps)
    np.testing.assert_array_equal(recording.states.time, range(steps + 1))
    np.testing.assert_array_equal(recording.obs[:, 1], range(steps + 1))
    assert len(set(recording.states.episode)) == len(set(recording.obs[:, 0])) == 1
    assert recording.rewards.tolist() == [2.5] * steps
    assert recording.actions.shape == (steps,)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(recording))


# -------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", DRAWN)
def test_every_environment_has_pictures(tmp_path, name):
    env = make_env(name)
    recording = random_recording(env)
    frames, _ = drawn(env, recording, tmp_path / "episode.gif")
    assert len(frames) == len(recording.rewards) + 1
    height, width, _ = frames[0].shape
    assert 60 <= height <= 320
    assert 280 <= width <= 360
    for step, frame in enumerate(frames[1:]):
        assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 1, f"frame {step + 1} is blank"
    state = {field: values for field, values in vars(recording.states).items() if field != "time"}
    moves = any((x[0] != x[-1]).any() for x in (recording.obs, *jax.tree.leaves(state)))
    assert not moves or any((frame != frames[0]).any() for frame in frames)


def test_cart_and_pole_are_where_the_state_says(tmp_path):
    env = make("CartPole-v1")
    x, theta = np.array([-2.0, 0, 1.3, 0, 0]), np.array([0, 0, 0, 0.2, -0.2])
    frames = still(env, tmp_path / "a.gif", {"x": x, "theta": theta}, actions=[1, 0, 1, 0])
    middle, unit = 180, 180 / (1.15 * 2.4)
    carts, poles = ([place(frame, color)[0] for frame in frames] for color in (pictures.INK, pictures.ORANGE))
    np.testing.assert_allclose(carts, middle + x * unit, atol=1.5)
    np.testing.assert_allclose(poles, carts + 0.5 * np.sin(theta) * unit, atol=3)
    pushes = [place(frame, pictures.BLUE)[0] - cart for frame, cart in zip(frames, carts, strict=True)]
    assert np.sign(np.round(pushes, -1)).tolist() == [1, -1, 1, -1, 0]  # at the end there is only the hinge


def test_acrobot_is_done_when_its_tip_is_over_the_line(tmp_path):
    env = make("Acrobot-v1")
    first = np.array([0, np.pi, 2.0, 2.3, 2.5, 2.5])
    second = np.array([0, 0, 0.5, 0.5, -1.2, 1.5])
    frames = still(env, tmp_path / "a.gif", {"joint_angle1": first, "joint_angle2": second}, actions=[1] * 5)
    line = place(frames[0], pictures.GREEN)[1]
    over = [pixels(frame, pictures.ORANGE)[:, 1].min() + 5 < line for frame in frames]  # half a link's thickness
    done = [
        bool(env.inner.is_terminated(SimpleNamespace(joint_angle1=a, joint_angle2=b), env.params))
        for a, b in zip(first, second, strict=True)
    ]
    assert over == done
    assert set(done) == {True, False}


# ---------------------------------------------------------------------------------- pictures drawn from observations


def seen(obs: np.ndarray) -> Recording:
    """An episode of an environment that nobody knows, with observations [T + 1, ...]."""
    return Recording(None, obs, np.zeros(len(obs) - 1, int), np.zeros(len(obs) - 1))


def observed(tmp_path, obs: np.ndarray, **parts: np.ndarray) -> list[np.ndarray]:
    """The frames of such an episode, with these `actions` and `rewards`."""
    return drawn(make_env("Toy"), seen(obs)._replace(**parts), tmp_path / "a.gif")[0]


def is_color(pixel: np.ndarray, color: str) -> bool:
    return bool(np.abs(pixel - np.array(pictures.rgb(color))).max() <= 3)


def test_channels_have_their_colours_and_share_squares(tmp_path):
    obs = np.zeros((2, 10, 10, 4), np.float32)
    obs[0, 0, 0, 0] = obs[0, 9, 4, 3] = 1
    obs[1, 5, 5, 0] = obs[1, 5, 5, 2] = 1
    first, second = observed(tmp_path, obs)
    assert first.shape == (300, 300, 3)
    assert is_color(first[15, 15], pictures.ORANGE)
    assert is_color(first[285, 135], pictures.YELLOW)
    assert is_color(first[15, 45], pictures.FLOOR)
    assert is_color(second[165, 165], pictures.ORANGE)  # the first channel inside ...
    assert is_color(second[153, 165], pictures.GREEN)  # ... the last


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_lines_show_components_action_and_reward(tmp_path, bad):
    ramp = np.arange(11.0)
    obs = np.stack([ramp, -ramp, np.where(ramp == 5, bad, ramp)], axis=1)
    actions, rewards = ramp[:-1] % 3, np.where(np.arange(10) < 5, 0.0, 1.0)
    frames = observed(tmp_path, obs, actions=actions, rewards=rewards)
    assert frames[0].shape[0] == 5 * 30
    lanes = np.stack([frame.reshape(5, 30, *frame.shape[1:]) for frame in frames])
    heights = np.array([[place(lane[:, 60:300], pictures.BLUE)[1] for lane in lanes[t, :2]] for t in range(11)])
    assert (np.diff(heights[:, 0]) < 0).all()  # grows
    assert (np.diff(heights[:, 1]) > 0).all()
    rights = [place(lane[4][:, 60:300], pictures.GREEN)[0] for lane in lanes[1:]]
    assert (np.diff(rights) > 0).all()
    assert place(lanes[10][3][:, 60:300], pictures.ORANGE)[0] > 60


@pytest.mark.parametrize("params", ['{"x_threshold": 0}', '{"length": 1e30}'])
def test_parameters_without_a_picture_are_drawn_from_the_observations(tmp_path, params):
    env = make("CartPole-v1", params)
    frames, _ = drawn(env, random_recording(env), tmp_path / "x.gif")
    assert frames[-1].shape[0] < 500
    assert len(np.unique(frames[-1].reshape(-1, 3), axis=0)) > 3


# ------------------------------------------------------------------------------------------------------- the file


def swinging(steps: int) -> Recording:
    time = np.arange(steps + 1) / 25
    states = SimpleNamespace(x=2 * np.sin(time), theta=0.2 * np.sin(2 * time))
    return Recording(states, np.zeros((steps + 1, 4)), np.arange(steps) % 2, np.ones(steps))


@pytest.mark.parametrize(
    ("steps", "seconds", "frames", "delay"),
    [
        (10, 0.001, 11, 20),  # browsers take no delay under 20 ms
        *((40, 0.02, 41, 20), (499, 0.02, 500, 20), (500, 0.02, 251, 40)),
        *((2_000, 0.02, 251, 100), (27_000, 0.02, 423, 100)),
    ],
)
def test_frames_and_speed_of_episodes_of_any_length(steps, seconds, frames, delay):
    drawn_steps, delays = timing(steps, seconds)
    assert (len(drawn_steps), delays[0], delays[-1]) == (frames, delay, 1_000)
    assert (drawn_steps[0], drawn_steps[-1], len(delays)) == (0, steps, frames)
    assert len(set(np.diff(drawn_steps)[:-1])) == 1
