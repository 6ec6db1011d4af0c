"""Episodes as GIFs, of `common/pmaprl/drawing`: what is recorded, what the pictures show, and the
file.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Toy, make_env
from host_helpers import TOYS
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image, ImageColor

from pmaprl.device.agents import Player
from pmaprl.device.evaluation import play_episodes
from pmaprl.drawing import pictures
from pmaprl.drawing.episodes import CAPTION, RecordedEnvs, Recording, draw_gif, record, timing
from pmaprl.drawing.figures import COLORS
from pmaprl.drawing.pictures import LEGEND, MARGIN
from pmaprl.drawing.tracks import LEFT, PLOT, SHADES, TITLE, groups_of
from pmaprl.envs import spaces
from pmaprl.envs.custom import wrap
from pmaprl.envs.host import HostStep
from pmaprl.envs.registry import make, make_host
from pmaprl.suites.jaxmarl import COLORS as COLORS_OF_PARTICLES
from pmaprl.suites.jaxmarl import plane_of_particles
from pmaprl.suites.tools import plane

OTHERS = "Pendulum-v1", "MountainCarContinuous-v0", "Breakout-MinAtar", "MemoryChain-bsuite"
DRAWN = [
    "CartPole-v1",
    "FrozenLake-misc",
    "Pixels",
    *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
]


def drawn(env, recording, path) -> tuple[list[np.ndarray], list[int]]:
    """The frames of the recording's GIF [H, W, 3], without captions, and their milliseconds."""
    count = draw_gif(env, recording, path)
    frames = []
    delays = []
    with Image.open(path) as gif:
        assert gif.n_frames == count
        assert gif.info["loop"] == 0
        for index in range(count):
            gif.seek(index)
            picture = np.asarray(gif.convert("RGB"), int)
            frames.append(picture[:-CAPTION])
            delays.append(gif.info["duration"])
    return frames, delays


def still(name, path, **states) -> list[np.ndarray]:
    """The frames of hand-made states: {field: its values}."""
    env = make(name)
    count = len(next(iter(states.values())))
    begun = env.reset(jax.random.key(0))[1]
    zeros = jax.tree.map(lambda x: np.zeros(count), begun)
    recording = Recording(zeros.replace(**states), np.zeros((count, 1)), *np.zeros((2, count - 1)))
    return drawn(
        env,
        recording,
        path,
    )[0]


def pixels(frame: np.ndarray, color: str) -> np.ndarray:
    """Find the pixels that have `color`: [pixels, 2], (x, y) from the top left."""
    wanted = np.array(ImageColor.getrgb(color))
    near = np.argwhere(np.abs(frame - wanted).max(axis=2) <= 12)
    assert len(near), f"nothing is {color}"
    return near[:, ::-1]


def place(frame: np.ndarray, color: str) -> np.ndarray:
    """The middle of what has `color`, (x, y)."""
    return pixels(frame, color).mean(axis=0) + 0.5


def is_written(frame: np.ndarray) -> bool:
    """Tell whether there is dark text."""
    return (frame.max(axis=2) < 120).sum() > 5


def test_a_recording_is_an_episode_of_the_evaluation():
    env = make_env("Luck")
    keys = jax.random.split(jax.random.key(7), 3)

    def act(seen, memory, keys):

        def draw(key):
            return jax.random.randint(key, (), 0, 3)

        return jax.vmap(draw)(keys), memory

    player = Player(lambda count: (), act)
    episodes = jax.jit(lambda: play_episodes(env, player, keys))()
    for index, key in enumerate(keys):
        recording = record(env, player, key, env.max_steps)
        assert len(recording.rewards) == episodes.length[index]
        returned = float(episodes.ret[index])
        assert recording.rewards.sum() == pytest.approx(returned)
    assert len(set(episodes.length.tolist())) > 1


@pytest.mark.parametrize(("name", "max_steps", "steps"), [("Toy", 9, 7), ("Endless", 12, 12)])
def test_a_recording_ends_with_the_true_final_state_and_observation(name, max_steps, steps):
    """The end is that of the episode, or where `max_steps` are over."""
    recording = record(
        make_env(name),
        lambda obs: jnp.zeros(1, jnp.int32),
        jax.random.key(0),
        max_steps,
    )
    assert_array_equal(recording.states.time, range(steps + 1))
    assert_array_equal(recording.obs[:, 1], range(steps + 1))
    episodes_seen = set(recording.states.episode)
    assert len(episodes_seen) == len(set(recording.obs[:, 0])) == 1
    assert recording.rewards.tolist() == [2.5] * steps
    assert recording.actions.shape == (steps,)


class Counting:
    """Two environments on the host whose pictures show the step, and whose episodes end after
    `length` steps.
    """

    spec = None
    num_envs = 2
    close = None
    kill = None

    def __init__(self, length: int, resets_in_step: bool, broken: bool = False):
        self.length = length
        self.resets_in_step = resets_in_step
        self.broken = broken
        self.time = 0

    def reset(self):
        return np.zeros((2, 1))

    def step(self, action):
        self.time += 1
        over = np.full(2, self.time == self.length)
        final = np.full((2, 1), self.time)
        return HostStep(
            obs=np.zeros((2, 1)),
            reward=np.ones(2),
            terminated=over,
            truncated=over & False,
            valid=~over,
            final_obs=final,
        )

    def frame(self):
        if self.broken:
            raise RuntimeError("no display")
        time = 0 if self.resets_in_step and self.time == self.length else self.time
        return np.full((300, 360, 3), time % 256, np.uint8)


def played_on_host(length: int, **how) -> RecordedEnvs:
    envs = RecordedEnvs(Counting(length, **how))
    envs.reset()
    for _ in range(length + 3):
        envs.step(np.array([7, 8]))
    return envs


@pytest.mark.parametrize(("length", "resets_in_step"), [(5, True), (1101, True), (1101, False)])
def test_an_episode_on_the_host_keeps_the_pictures_of_the_steps_that_are_drawn(
    length, resets_in_step
):
    envs = played_on_host(length, resets_in_step=resets_in_step)
    recording = envs.recording()
    assert recording.actions.tolist() == [7] * length
    assert len(recording.rewards) == length
    steps, _ = timing(length, 0.02)
    assert len(envs._pictures) <= len(steps), "others take memory"
    shown = [recording.paint(step).getpixel((0, 0))[0] for step in steps]
    # There the picture at the end is one of the next episode
    last = steps[-2] if resets_in_step else length
    expected = [step % 256 for step in (*steps[:-1], last)]
    assert shown == expected


@pytest.mark.parametrize(
    ("toy", "told"),
    [("Toy", "rgb_array"), ("PromisingToy", "render_mode"), ("DrawnToy", "")],
)
def test_a_gymnasium_environment_draws_itself_or_says_why_not(toy, told):
    envs = RecordedEnvs(make_host(f"{TOYS}{toy}-v0", 1, 0, frames=True, vectorization="sync"))
    envs.reset()
    for _ in range(8):
        envs.step(np.array([1]))
    envs.close()
    recording = envs.recording()
    assert told in recording.without_pictures
    assert bool(told) == bool(recording.without_pictures)
    assert (recording.paint is None) == bool(told)
    assert recording.obs_names == (("episode", "step") if toy == "PromisingToy" else ())


@pytest.mark.parametrize(
    ("env_id", "drawn"),
    [("InvertedPendulum-v4", True), ("InvertedPendulum-v2", False)],
)
def test_mujoco_of_envpool_names_the_environment_that_has_pictures(env_id, drawn):
    """It is named where gymnasium makes the same one."""
    envs = RecordedEnvs(make_host(f"envpool:{env_id}", 1, 0, frames=True))
    envs.reset()
    envs.close()
    assert (f"--env gymnasium:{env_id}" in envs.without_pictures) is drawn


def test_without_a_renderer_an_episode_on_the_host_keeps_observations():
    envs = played_on_host(3, resets_in_step=True, broken=True)
    recording = envs.recording()
    assert "no display" in recording.without_pictures
    assert recording.obs.ravel().tolist() == [0, 1, 2, 3]
    assert recording.paint is None


@pytest.mark.parametrize("name", DRAWN)
def test_every_environment_has_pictures(tmp_path, name):
    env = make_env(name)
    player = Player(
        lambda count: (),
        lambda seen, memory, keys: (spaces.sample(keys[0], env.action_space)[None], ()),
    )
    recording = record(env, player, jax.random.key(1), 4)
    frames, _ = drawn(env, recording, tmp_path / "episode.gif")
    assert len(frames) == len(recording.rewards) + 1
    height, width, _ = frames[0].shape
    assert 60 <= height <= 700
    assert 280 <= width <= 600
    colors = np.unique(frames[-1].reshape(-1, 3), axis=0)
    assert len(colors) > 1, "blank"


def test_cart_and_pole_are_where_the_state_says(tmp_path):
    x = np.array([-2.0, 0, 1.3, 0, 0])
    theta = np.array([0, 0, 0, 0.2, -0.2])
    frames = still("CartPole-v1", tmp_path / "a.gif", x=x, theta=theta)
    middle = 180
    unit = 180 / (1.15 * 2.4)
    carts, poles = (
        [place(frame, color)[0] for frame in frames] for color in (pictures.INK, pictures.ORANGE)
    )
    assert_allclose(carts, middle + x * unit, atol=1.5)
    assert_allclose(poles, carts + 0.5 * np.sin(theta) * unit, atol=3)


def test_channels_have_their_colours_the_first_in_front_and_images_keep_theirs(tmp_path):
    obs = np.zeros((2, 10, 10, 4), np.float32)
    obs[0, 0, 0, 0] = obs[0, 9, 4, 3] = 1
    obs[1, 5, 5, 0] = obs[1, 5, 5, 2] = 1
    first, second = drawn(
        make_env("Toy"),
        Recording(None, obs, *np.zeros((2, 1))),
        tmp_path / "a.gif",
    )[0]
    assert first.shape == (300 + MARGIN, MARGIN + 300 + LEGEND, 3)
    left = MARGIN
    found = (
        first[15, left + 15],
        first[285, left + 135],
        first[15, left + 45],
        second[165, left + 165],
    )
    wanted = map(
        ImageColor.getrgb,
        (pictures.ORANGE, pictures.YELLOW, pictures.FLOOR, pictures.ORANGE),
    )
    assert_allclose(found, [*wanted], atol=8)
    color = np.uint8([200, 30, 90])
    image = np.broadcast_to(color, (2, 50, 60, 3))
    frames, _ = drawn(
        make_env("Toy"),
        Recording(None, image, *np.zeros((2, 1))),
        tmp_path / "b.gif",
    )
    assert_allclose(frames[1][150, 90], [200, 30, 90], atol=8)


def test_a_legend_has_the_colours_of_all_channels(tmp_path):
    obs = np.zeros((2, 10, 10, 4), np.float32)
    recording = Recording(None, obs, *np.zeros((2, 1)))
    frame = drawn(make_env("Toy"), recording, tmp_path / "a.gif")[0][0]
    legend = frame[:, MARGIN + 300 :]
    colors = pictures.CHANNELS[:4]
    middles = [place(legend, color)[1] for color in colors]
    assert_allclose(np.diff(middles), pictures.LINE, atol=1)
    assert is_written(frame[:300, :MARGIN]), "no numbers of rows"
    assert is_written(frame[300:, MARGIN : MARGIN + 300]), "no numbers of columns"


def names_of(groups) -> list[list[str]]:
    return [[track.name for track in group.tracks] for group in groups]


def test_numbers_have_the_names_of_their_parts_or_those_that_are_told():
    spaces_of = {
        "joints": spaces.box((2,)),
        "action_mask": spaces.box((3,)),
        "mode": spaces.Discrete(4),
    }
    obs = {
        "joints": np.zeros((3, 2)),
        "action_mask": np.ones((3, 3)),
        "mode": np.array([0, 1, 2]),
    }
    action_space = (spaces.Discrete(3), spaces.box((2,), -1, 1))
    recording = Recording(
        states=None,
        obs=obs,
        actions=(np.array([2, 1]), np.full((2, 2), 5.0)),
        rewards=np.array([1.0, 2.0]),
    )
    leaves = spaces.leaves(spaces_of, obs)
    seen = [x for x in leaves if x[0] != "action_mask"]
    groups = groups_of(recording, seen, action_space, lambda count: ())
    observed, acted, earned = names_of(groups)
    assert observed == ["joints 0", "joints 1", "mode"]
    assert acted == ["action 0", "action 1, 0", "action 1, 1"]
    assert earned == ["reward", "return"]
    told = groups_of(
        recording,
        seen,
        action_space,
        lambda count: ("a", "b", "c"),
    )
    assert names_of(told)[0] == ["a", "b", "c"]


def test_rewards_and_actions_belong_to_the_step_that_led_there_within_their_bounds():
    recording = Recording(
        states=None,
        obs=np.array([[0.0], [1.0], [2.0]]),
        actions=np.full((2, 1), 5.0),
        rewards=np.array([1.0, 2.0]),
    )
    seen = [("", spaces.box((1,)), recording.obs)]
    groups = groups_of(
        recording,
        seen,
        spaces.box((1,), -1, 1),
        lambda count: (),
    )
    (obs,), (action,), (reward, ret) = (group.tracks for group in groups)
    assert_array_equal(obs.values, [0, 1, 2])
    assert_array_equal(action.values, [np.nan, 1, 1])
    assert_array_equal(reward.values, [np.nan, 1, 2])
    assert_array_equal(ret.values, [0, 1, 3])


def numbers_of(count: int) -> tuple[spaces.EnvSpec, Recording]:
    """An episode of five steps with observations of so many numbers, some of which are not
    finite.
    """
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(6, count))
    obs[2, 1] = np.nan
    spec = spaces.EnvSpec(
        name="some",
        observation_space=spaces.box((count,)),
        obs_dtype=np.dtype(np.float32),
        action_space=spaces.Discrete(3),
    )
    rewards = np.array([1.0, np.inf, 0, -1, 2])
    return spec, Recording(
        states=None,
        obs=obs,
        actions=np.array([0, 1, 2, 1, 0]),
        rewards=rewards,
    )


def test_a_few_numbers_are_lines_with_a_legend_beside_and_ticks(tmp_path):
    frames, _ = drawn(*numbers_of(3), tmp_path / "a.gif")
    ticks = frames[0][:, :LEFT]
    samples = frames[0][:, LEFT + PLOT + 6 : LEFT + PLOT + 24]
    heights = [place(samples, color)[1] for color in COLORS[:6]]
    assert heights == sorted(heights), "three numbers, an action, reward and return"
    for height in map(int, heights):
        assert is_written(ticks[height - 19 : height + 19]), "no ticks"
    change = np.abs(frames[1] - frames[0])
    moved = change.max(axis=2) > 40
    columns = moved[:, LEFT : LEFT + PLOT].any(axis=0)
    assert 0 < columns.sum() < 12, "more than the mark has moved"
    assert all(moved[int(height) - 6 : int(height) + 6, -70:].any() for height in heights), (
        "the numbers of the step"
    )


def test_many_numbers_are_shades_with_names_beside(tmp_path):
    frames, _ = drawn(*numbers_of(40), tmp_path / "a.gif")
    shades = frames[0][TITLE : TITLE + SHADES, LEFT : LEFT + PLOT]
    names = frames[0][TITLE : TITLE + SHADES, LEFT + PLOT + 6 :]
    tones = np.unique(shades.reshape(-1, 3), axis=0)
    assert len(tones) > 10
    assert all(is_written(names[top : top + 15]) for top in range(0, SHADES, 15))


def test_names_that_are_not_as_many_as_the_numbers_are_told(tmp_path):
    spec, recording = numbers_of(3)
    told = []
    draw_gif(
        spec,
        recording._replace(obs_names=("one",)),
        tmp_path / "a.gif",
        told.append,
    )
    assert len(told) == 1
    assert all(word in told[0] for word in ("obs_names", "some", "1", "3"))


class Framed(Toy):
    """Draws itself with its own method, which goes wrong in the step called `bad`."""

    def __init__(self, make, bad: int):
        self.make = make
        self.bad = bad

    def frame(self, state, params):
        shade = 40 * int(state.time)
        good = np.full((30, 40, 3), shade, np.uint8)
        return self.make(good) if state.time == self.bad else good


def failing(picture):
    raise ValueError("no paint left")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (failing, "no paint left"),
        (np.float32, "float32"),
        (lambda x: x[..., 0], "30, 40"),
        (lambda x: x[:9], "size"),
    ],
)
def test_an_own_frame_that_goes_wrong_costs_a_picture_and_is_told(make, told, tmp_path):
    env = wrap(Framed(make, bad=3))
    texts = []
    recording = record(
        env,
        lambda obs: jnp.zeros(1, jnp.int32),
        jax.random.key(0),
        5,
    )
    assert draw_gif(env, recording, tmp_path / "a.gif", texts.append) == 6
    assert len(texts) == 1
    assert told in texts[0]
    frames, _ = drawn(env, recording, tmp_path / "b.gif")
    shown = [frame[9, 140, 0] for frame in frames]
    assert_allclose(shown, [0, 40, 80, 80, 160, 200], atol=8)


def test_an_own_frame_that_never_works_is_told_with_its_place_and_numbers_are_drawn(tmp_path):
    env = wrap(Framed(failing, bad=0))
    texts = []
    recording = record(
        env,
        lambda obs: jnp.zeros(1, jnp.int32),
        jax.random.key(0),
        5,
    )
    assert draw_gif(env, recording, tmp_path / "a.gif", texts.append) == 6
    assert len(texts) == 1
    assert all(word in texts[0] for word in ("no paint left", "test_render.py", "observations"))
    assert Image.open(tmp_path / "a.gif").width > 500


def test_a_picture_has_the_parameters_that_its_episode_has_drawn():
    env = make("CartPole-v1", '{"length": "choice:0.2,0.9"}')
    frames = {}
    for seed in range(6):
        begun = env.reset(jax.random.key(seed))[1]
        state, numbers = jax.device_get(begun)
        frames[round(float(numbers["length"]), 3)] = env.frame((state, numbers)).shape
    alone = {length: make("CartPole-v1", f'{{"length": {length}}}') for length in frames}
    assert len(frames) == 2
    assert frames == {length: other.frame(state).shape for length, other in alone.items()}
    assert env.obs_names[0] == "cart position"


def particles(**state) -> np.ndarray:
    """A picture of MPE's particles, two agents and a landmark."""
    names = {"agents": ["agent_0", "adversary_0"], "landmarks": ["landmark 0"]}
    inner = SimpleNamespace(
        **names,
        rad=np.array([0.15, 0.15, 0.2]),
        silent=np.array([0, 1]),
    )
    return plane_of_particles(inner, SimpleNamespace(**state)).astype(int)


def test_particles_are_circles_on_a_plane_with_a_legend():
    agent, adversary, landmark = (
        COLORS_OF_PARTICLES[kind] for kind in ("agent", "adversary", "landmark")
    )
    places_of_particles = np.array([[-1.0, 0.5], [0.9, -0.2], [0.0, 1.0]])
    frame = particles(p_pos=places_of_particles, goal=None)
    on_plane = frame[plane.TOP : plane.TOP + plane.SIDE, plane.LEFT : plane.LEFT + plane.SIDE]
    legend = frame[:, plane.LEFT + plane.SIDE + 2 :]
    places = {agent: (-1.0, 0.5), adversary: (0.9, -0.2), landmark: (0.0, 1.0)}
    for color, center in places.items():
        x, y = (
            (1.5 + sign * at) / 3 * plane.SIDE for sign, at in zip((1, -1), center, strict=True)
        )
        middle = np.median(pixels(on_plane, color), axis=0)  # texts have some such pixels too
        assert_allclose(middle, (x, y), atol=2)
    colors = (agent, adversary, landmark)
    heights = [np.median(pixels(legend, color), axis=0)[1] for color in colors]
    assert_allclose(np.diff(heights), plane.LINE, atol=1)
    size = np.ptp(pixels(on_plane, agent), axis=0)
    assert_allclose(size, 2 * 0.15 / 3 * plane.SIDE, atol=4)
    assert is_written(frame[plane.TOP :, : plane.LEFT])
    assert is_written(frame[plane.TOP + plane.SIDE + 2 :])
    assert frame.shape == (plane.HEIGHT, plane.WIDTH, 3)


def test_a_plane_shows_particles_that_are_far_away_the_goal_and_what_is_said():
    places = np.array([[-4.0, 0.5], [0.9, -0.2], [0.0, 1.0]])
    far = particles(
        p_pos=places,
        goal=np.int32(0),
        c=np.array([[0.0, 1.0], [0.0, 0.0]]),
    )
    plane_of_far = far[:, : plane.LEFT + plane.SIDE]
    assert len(pixels(plane_of_far, COLORS_OF_PARTICLES["agent"])) > 5
    assert len(pixels(far, plane.RING)) > 20
    rows = slice(plane.TOP + plane.SIDE - 16, plane.TOP + plane.SIDE - 3)
    corner = (
        rows,
        slice(plane.LEFT + 2, plane.LEFT + 70),
    )
    assert is_written(far[corner])
    assert not is_written(particles(p_pos=places, goal=None)[corner])


@pytest.mark.parametrize(
    ("steps", "seconds", "frames", "delay"),
    [
        (10, 0.001, 11, 20),
        (499, 0.02, 500, 20),
        (500, 0.02, 251, 40),
        (2000, 0.02, 251, 100),
        (27000, 0.02, 423, 100),
    ],
)
def test_frames_and_speed_of_episodes_of_any_length(steps, seconds, frames, delay):
    drawn_steps, delays = timing(steps, seconds)
    assert len(drawn_steps) == frames
    assert delays[0] == delay
    assert delays[-1] == 1_000
    assert drawn_steps[0] == 0
    assert drawn_steps[-1] == steps
    assert len(delays) == frames
    assert len(set(np.diff(drawn_steps)[:-1])) == 1


@pytest.mark.parametrize(("height", "size"), [(300, (240, 240)), (480, (480, 480))])
def test_a_picture_of_a_suite_has_at_most_the_height_that_is_wanted(height, size):
    frame = np.zeros((480, 480, 3), np.uint8)
    assert pictures.fitting(frame, height=height).size == size
