"""Episodes as GIFs, of `common/drawing`: what is recorded, what the pictures show, and the file."""

import json
from pathlib import Path
from types import SimpleNamespace

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_env
from PIL import Image, ImageFont
from test_envs import OFFLINE_IDS

from common.cli.errors import UsageError
from common.device.evaluation import play_episodes
from common.device.memory import Player
from common.drawing import canvas
from common.drawing.gif import CAPTION, draw_gif, timing
from common.drawing.host_recording import RecordedEnvs
from common.drawing.recording import Recording, record
from common.envs import spaces
from common.envs.own import wrap
from common.envs.registry import make, make_host

STEPS = 4
SLOW_TO_COMPILE = ("Asterix-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar")


def random_recording(env) -> Recording:
    """A few random steps, or only something of their shape where compiling them takes seconds."""
    if env.name in SLOW_TO_COMPILE:
        obs = np.random.default_rng(0).integers(0, 2, (STEPS + 1, *env.observation_space.shape))
        states = jax.tree.map(lambda x: np.zeros((STEPS + 1, *x.shape)), env.state_shape)
        return Recording(states, obs, np.zeros(STEPS, int), np.zeros(STEPS))
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
    near = np.argwhere(np.abs(frame - np.array(canvas.rgb(color))).max(axis=2) <= 12)
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
    [("Toy", 3, 9, 7), ("Toy", 7, 9, 7), *(("Endless", 5, n, n) for n in (1, 10, 12))],
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


class Plain:
    """What an environment needs to be one, and nothing else."""

    def __init__(self):
        toy, self.default_params = helpers.Toy(), helpers.ToyParams()
        self.reset, self.step = toy.reset, toy.step
        self.observation_space, self.action_space = toy.observation_space, toy.action_space


def test_an_unknown_final_state_repeats_the_one_before():
    recording = record(wrap(Plain()), lambda obs: jnp.zeros(1, jnp.int32), jax.random.key(0), 20)
    np.testing.assert_array_equal(recording.states.time, [0, 1, 2, 3, 4, 5, 6, 6])
    assert len(set(recording.states.episode)) == 1


# -------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", [*OFFLINE_IDS, "Pixels", "TwoDials", "KeyInState"])
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
    carts, poles = ([place(frame, color)[0] for frame in frames] for color in (canvas.INK, canvas.ORANGE))
    np.testing.assert_allclose(carts, middle + x * unit, atol=1.5)
    np.testing.assert_allclose(poles, carts + 0.5 * np.sin(theta) * unit, atol=3)
    pushes = [place(frame, canvas.BLUE)[0] - cart for frame, cart in zip(frames, carts, strict=True)]
    assert np.sign(np.round(pushes, -1)).tolist() == [1, -1, 1, -1, 0]  # at the end there is only the hinge


def test_the_pendulum_points_up_at_angle_zero(tmp_path):
    angles = np.array([0, np.pi, np.pi / 2, -np.pi / 2])
    frames = still(make("Pendulum-v1"), tmp_path / "a.gif", {"theta": angles}, actions=[[2.0], [-5.0], [0.0]])
    rods = np.array([place(frame, canvas.ORANGE) for frame in frames]) - 140
    length = np.hypot(*rods.T)
    assert length.min() > 40
    np.testing.assert_allclose(rods / length[:, None], [[0, -1], [0, 1], [-1, 0], [1, 0]], atol=0.03)
    torques = [place(frame, canvas.BLUE)[0] - 140 for frame in frames[:2]]
    assert torques[0] < -10  # counter-clockwise, from above
    assert torques[1] == pytest.approx(-torques[0], abs=2)  # clipped to the largest


def test_acrobot_is_done_when_its_tip_is_over_the_line(tmp_path):
    env = make("Acrobot-v1")
    first = np.array([0, np.pi, 2.0, 2.3, 2.5, 2.5])
    second = np.array([0, 0, 0.5, 0.5, -1.2, 1.5])
    frames = still(env, tmp_path / "a.gif", {"joint_angle1": first, "joint_angle2": second}, actions=[1] * 5)
    line = place(frames[0], canvas.GREEN)[1]
    over = [pixels(frame, canvas.ORANGE)[:, 1].min() + 5 < line for frame in frames]  # half a link's thickness
    done = [
        bool(env.inner.is_terminated(SimpleNamespace(joint_angle1=a, joint_angle2=b), env.params))
        for a, b in zip(first, second, strict=True)
    ]
    assert over == done
    assert set(done) == {True, False}


@pytest.mark.parametrize("name", ["MountainCar-v0", "MountainCarContinuous-v0"])
def test_the_car_reaches_the_flag_at_the_goal(tmp_path, name):
    env = make(name)
    positions = np.array([-1.2, -0.5236, env.params.goal_position])
    actions = [[0.0], [1.0]] if "Continuous" in name else [1, 2]
    frames = still(env, tmp_path / "a.gif", {"position": positions}, actions=actions)
    cars, flag = np.array([place(frame, canvas.RED) for frame in frames]), place(frames[0], canvas.GREEN)
    np.testing.assert_allclose(cars[:, 0], (positions + 1.3) * 180, atol=11)  # leans by its slope
    assert cars[1, 1] > cars[0, 1] > cars[2, 1]  # the valley, the left side, the hill
    assert abs(cars[2, 0] - flag[0]) < 25
    assert place(frames[1], canvas.BLUE)[0] > cars[1, 0] + 20


def test_the_reacher_points_where_its_angles_say(tmp_path):
    angles, goals = np.array([[0, 0], [np.pi / 2, 0], [np.pi, 0.3]]), np.array([[1.5, 1.0]] * 3)
    frames = still(
        make("Reacher-misc"), tmp_path / "a.gif", {"angles": angles, "goal_xy": goals}, actions=np.zeros((2, 2))
    )
    tips = np.stack([np.cos(angles).sum(axis=1), -np.sin(angles).sum(axis=1)], axis=1)
    np.testing.assert_allclose([place(frame, canvas.ORANGE) for frame in frames], 140 + tips * 140 / 3, atol=1.5)
    np.testing.assert_allclose(place(frames[0], canvas.GREEN), 140 + np.array([1.5, -1.0]) * 140 / 3, atol=1.5)


@pytest.mark.parametrize(("name", "field"), [("Swimmer-misc", "xy"), ("PointRobot-misc", "pos")])
def test_points_move_as_their_state(tmp_path, name, field):
    """Also far away, where they stay at the edge, and where the state is no number."""
    goal = "goal_xy" if field == "xy" else "goal"
    places = np.array([[0, 0], [0.5, 0], [0, 0.5], [90, 0], [np.nan, 0]])
    states = {field: places, goal: np.full((5, 2), 0.8), "urchin_xys": np.full((5, 3, 2), -0.5)}
    frames = still(make(name), tmp_path / "a.gif", states, actions=[[0.0, 0.1]] * 3 + [[np.nan, np.inf]])
    robots = np.array([place(frame, canvas.ORANGE) for frame in frames])
    right, up = robots[1] - robots[0], robots[2] - robots[0]
    assert right[0] == pytest.approx(-up[1], abs=2)
    assert right[0] > 30
    assert 0 <= robots[3, 0] < 280 > robots[3, 0] > robots[1, 0]
    assert place(frames[0], canvas.BLUE)[1] < robots[0, 1]  # pushed up


@pytest.mark.parametrize("name", ["FourRooms-misc", "MetaMaze-misc", "FrozenLake-misc"])
def test_agents_and_goals_are_in_their_squares(tmp_path, name):
    env = make(name)
    lake = name == "FrozenLake-misc"
    squares = np.array([[1, 0], [2, 3], [3, 2]]) if lake else np.array([[1, 1], [1, 3], [3, 1]])
    goal = np.array([3, 3] if lake else [5, 1])
    states = {"position": squares @ [4, 1]} if lake else {"pos": squares, "goal": np.stack([goal] * 3)}
    frames = still(env, tmp_path / "a.gif", states, actions=[0, 0])
    rows = 4 if lake else len(env.inner.env_map)
    side = 48 if lake else 300 // rows
    corner = np.array([(frames[0].shape[1] - side * rows) / 2, 0])
    for frame, square in zip(frames, squares, strict=True):
        np.testing.assert_allclose(place(frame, canvas.ORANGE), corner + (square[::-1] + 0.5) * side, atol=1)
    np.testing.assert_allclose(place(frames[0], canvas.GREEN), corner + (goal[::-1] + 0.5) * side, atol=1)


# ---------------------------------------------------------------------------------- pictures drawn from observations


def seen(obs: np.ndarray) -> Recording:
    """An episode of an environment that nobody knows, with observations [T + 1, ...]."""
    return Recording(None, obs, np.zeros(len(obs) - 1, int), np.zeros(len(obs) - 1))


def observed(tmp_path, obs: np.ndarray, **parts: np.ndarray) -> list[np.ndarray]:
    """The frames of such an episode, with these `actions` and `rewards`."""
    return drawn(make_env("Toy"), seen(obs)._replace(**parts), tmp_path / "a.gif")[0]


def is_color(pixel: np.ndarray, color: str) -> bool:
    return bool(np.abs(pixel - np.array(canvas.rgb(color))).max() <= 3)


def test_channels_have_their_colours_and_share_squares(tmp_path):
    obs = np.zeros((2, 10, 10, 4), np.float32)
    obs[0, 0, 0, 0] = obs[0, 9, 4, 3] = 1
    obs[1, 5, 5, 0] = obs[1, 5, 5, 2] = 1
    first, second = observed(tmp_path, obs)
    assert first.shape == (300, 300, 3)
    assert is_color(first[15, 15], canvas.ORANGE)
    assert is_color(first[285, 135], canvas.YELLOW)
    assert is_color(first[15, 45], canvas.FLOOR)
    assert is_color(second[165, 165], canvas.ORANGE)  # the first channel inside ...
    assert is_color(second[153, 165], canvas.GREEN)  # ... the last
    ten = np.zeros((2, 10, 10, 10), bool)
    ten[:, range(10), range(10), range(10)] = True
    frame, _ = observed(tmp_path, ten)
    assert len({tuple(frame[30 * i + 15, 30 * i + 15]) for i in range(10)} | {tuple(frame[15, 45])}) == 11


@pytest.mark.parametrize("scale", [1, 255])
def test_colour_images_keep_their_colours(tmp_path, scale):
    image = np.random.default_rng(0).uniform(0.1, 0.9, (3, 12, 16, 3))
    image[0, 0, 0] = 1
    obs = (image * scale).astype(np.uint8 if scale == 255 else np.float32)
    frames = observed(tmp_path, obs)
    for frame, wanted in zip(frames, image, strict=True):
        side = frame.shape[0] // 12
        error = np.abs(frame[side // 2 :: side, side // 2 :: side] - 255 * wanted).mean()
        assert error < 15  # of 255, with 576 colours for 255 places


def test_graded_channels_are_layers_and_a_single_one_is_grey(tmp_path):
    ramp = np.broadcast_to(np.linspace(0, 1, 8), (2, 6, 8))
    frame = observed(tmp_path, ramp)[0]
    side = frame.shape[0] // 6
    brightness = frame[side // 2, side // 2 :: side].sum(axis=1)
    assert (np.diff(brightness) > 0).all()
    stack = np.zeros((2, 6, 8, 4), np.uint8)
    stack[..., 0] = 255
    stack[:, :, 4:, 3] = 255
    stack[:, 0, 0, 3] = 128
    frame = observed(tmp_path, stack)[0]
    assert is_color(frame[100, 30], canvas.ORANGE)
    assert is_color(frame[100, 300], canvas.YELLOW)  # the last over the others


def test_large_images_are_shrunk(tmp_path):
    obs = np.zeros((2, 480, 640, 3), np.uint8)
    obs[:, :, 320:] = 200
    frame, _ = observed(tmp_path, obs)
    assert frame.shape == (240, 320, 3)
    assert frame[100, 100].sum() < 20 < frame[100, 300].sum()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_lines_show_components_action_and_reward(tmp_path, bad):
    ramp = np.arange(11.0)
    obs = np.stack([ramp, -ramp, np.where(ramp == 5, bad, ramp)], axis=1)
    actions, rewards = ramp[:-1] % 3, np.where(np.arange(10) < 5, 0.0, 1.0)
    frames = observed(tmp_path, obs, actions=actions, rewards=rewards)
    assert frames[0].shape[0] == 5 * 30
    lanes = np.stack([frame.reshape(5, 30, *frame.shape[1:]) for frame in frames])
    heights = np.array([[place(lane[:, 60:300], canvas.BLUE)[1] for lane in lanes[t, :2]] for t in range(11)])
    assert (np.diff(heights[:, 0]) < 0).all()  # grows
    assert (np.diff(heights[:, 1]) > 0).all()
    rights = [place(lane[4][:, 60:300], canvas.GREEN)[0] for lane in lanes[1:]]
    assert (np.diff(rights) > 0).all()
    assert place(lanes[10][3][:, 60:300], canvas.ORANGE)[0] > 60


@pytest.mark.parametrize("components", [9, 300])
def test_many_components_share_a_map(tmp_path, components):
    obs = np.zeros((31, components))
    obs[15:, -1] = 1
    obs[3] = np.nan
    frames = observed(tmp_path, obs)
    assert frames[0].shape[0] <= 200 + 60
    map_height = frames[0].shape[0] - 60
    last = frames[-1][map_height - 4, 66:298].sum(axis=1)  # the row of the last component
    assert np.argmax(last < last.mean()) / 232 == pytest.approx(15 / 31, abs=0.03)
    assert frames[0][map_height // 2, 200:300].min() == 255  # nothing yet


def test_components_thinner_than_a_pixel_are_seen(tmp_path):
    frame = observed(tmp_path, np.eye(301))[-1]
    columns = frame[3:197, 66:298].sum(axis=2)
    assert (columns.max(axis=0) - columns.min(axis=0) > 50).all()


@pytest.mark.parametrize("params", ['{"x_threshold": 0}', '{"x_threshold": -1}', '{"length": 1e30}', '{"length": 1e4}'])
def test_parameters_without_a_picture_are_drawn_from_the_observations(tmp_path, params):
    env = make("CartPole-v1", params)
    frames, _ = drawn(env, random_recording(env), tmp_path / "x.gif")
    assert frames[-1].shape[0] < 500
    assert len(np.unique(frames[-1].reshape(-1, 3), axis=0)) > 3


def test_a_subclass_with_another_state_is_drawn_from_its_observations(tmp_path):
    frames = still(make("CartPole-v1"), tmp_path / "a.gif", {"elsewhere": [0, 1]}, obs=np.eye(2, 4), actions=[1])
    assert frames[0].shape[0] == 6 * 30


# ------------------------------------------------------------------------------------------------------- the file


def swinging(steps: int) -> Recording:
    time = np.arange(steps + 1) / 25
    states = SimpleNamespace(x=2 * np.sin(time), theta=0.2 * np.sin(2 * time))
    return Recording(states, np.zeros((steps + 1, 4)), np.arange(steps) % 2, np.ones(steps))


def recorded(limit: int, drawn: bool = True, resets_in_step: bool = False, fails_at: int = -1) -> Recording:
    """The first of two environments on the host, whose pictures show the time, played for longer than its episode."""
    envs = make_host(
        "gymnasium:host_toys:DrawnToy-v0", 2, 0, json.dumps({"limit": limit}), "sync", frames=not resets_in_step
    )
    if resets_in_step and drawn:
        toy = envs._inner.envs[0].unwrapped
        envs.frame = lambda: np.full((30, 40, 3), toy.time % 256, np.uint8)
    if fails_at >= 0:
        toy, frame = envs._inner.envs[0].unwrapped, envs.frame
        envs.frame = lambda: frame() if toy.time != fails_at else 1 / 0
    envs = RecordedEnvs(envs)
    envs.reset()
    for time in range(limit + 3):
        envs.step(np.full(2, time % 3))
    return envs.recording()


@pytest.mark.parametrize(("resets_in_step", "last"), [(False, 7), (True, 6)])  # the last picture is hidden by a reset
def test_an_episode_on_the_host_is_its_suites_pictures(resets_in_step, last):
    recording = recorded(7, resets_in_step=resets_in_step)
    assert [int(np.asarray(recording.paint(step)).mean()) for step in range(8)] == [*range(7), last]
    assert recording.rewards.tolist() == recording.actions.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert recording.obs is None


def test_a_picture_that_fails_later_is_the_last_one_again():
    recording = recorded(7, fails_at=3)
    assert [int(np.asarray(recording.paint(step)).mean()) for step in range(8)] == [0, 1, 2, 2, 4, 5, 6, 7]


def test_without_pictures_an_episode_on_the_host_is_its_observations():
    recording = recorded(7, drawn=False, resets_in_step=True)
    assert recording.paint is None
    assert recording.obs[:, 1].tolist() == [*range(8)]


def test_of_a_long_episode_on_the_host_the_pictures_are_kept_that_are_drawn():
    recording = recorded(1_100)
    steps, _ = timing(1_100, 0.02)
    assert len(steps) == 276 and steps[:3] == [0, 4, 8]
    assert [int(np.asarray(recording.paint(step)).mean()) for step in steps] == [step % 256 for step in steps]
    with pytest.raises(KeyError):
        recording.paint(2)


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


def test_the_speed_is_that_of_the_environment_and_the_file_is_small(tmp_path):
    path, calls = tmp_path / "a.gif", []
    for steps, delay in ((10, 400), (100, 100)):
        assert drawn(make_env("Toy"), seen(np.zeros((steps + 1, 5))), path)[1] == [delay] * steps + [1_000]
    assert drawn(make("CartPole-v1"), swinging(500), path)[1] == [40] * 250 + [1_000]
    assert path.stat().st_size < 400_000
    draw_gif(make("CartPole-v1"), swinging(3), path, lambda *progress: calls.append(progress))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_caption_counts_steps_and_rewards(tmp_path, monkeypatch):
    captions = []
    write = canvas.write
    monkeypatch.setattr("common.drawing.gif.write", lambda *call: captions.append(call[3]) or write(*call))
    recording = swinging(4)._replace(rewards=np.array([1.5, -2.0, 1000.0, -np.inf]))
    draw_gif(make("CartPole-v1"), recording, tmp_path / "a.gif")
    rows = [captions[start : start + 6] for start in range(0, len(captions), 6)][-5:]
    assert rows[0] == ["step", "0 / 4", "reward", "-", "return", "0.00"]
    assert rows[2] == ["step", "2 / 4", "reward", "-2.00", "return", "-0.50"]
    assert rows[3] == ["step", "3 / 4", "reward", "1000.0", "return", "999.5"]
    assert rows[4] == ["step", "4 / 4", "reward", "-inf", "return", "-inf"]


def test_pillow_without_scalable_fonts_draws_too(tmp_path, monkeypatch):
    def load_default(size=None):
        if size:
            raise ImportError("The _imagingft C module is not installed")
        return ImageFont.load_default_imagefont()

    monkeypatch.setattr(ImageFont, "load_default", load_default)
    monkeypatch.setattr(canvas, "font", canvas.font.__wrapped__)  # as it is before its first use
    observed(tmp_path, np.zeros((3, 12)))


def test_paths_that_cannot_be_written(tmp_path):
    env, recording = make("CartPole-v1"), swinging(2)
    with pytest.raises(UsageError, match="is a directory: name a file in it"):
        draw_gif(env, recording, tmp_path)
    with pytest.raises(UsageError, match=r"/proc/a\.gif cannot be written"):
        draw_gif(env, recording, Path("/proc/a.gif"), lambda *_: pytest.fail("drawn before the path was tried"))
    assert not any(tmp_path.iterdir())
