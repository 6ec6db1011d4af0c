"""Environments: names, parameters, the interface, and every gymnax id through episodes."""

import sys
from functools import partial
from types import SimpleNamespace

import appo_pmap as appo
import gymnasium
import gymnax
import helpers
import host_toys  # noqa: F401  (registers the toys)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Endings,
    KeyInState,
    Pusher,
    make_env,
    over_devices,
    same_bits,
    small_args,
    train,
)
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl.actors.actor import inspect_env
from pmaprl.cli.errors import UsageError
from pmaprl.device.keys import action_noise, split_keys
from pmaprl.device.rollout import keys_of_steps, new_starts, step_envs
from pmaprl.device.state import flatten, key_data, to_devices, to_host, unflatten
from pmaprl.envs import spaces
from pmaprl.envs.bytes import IN_BOUNDS, describe_bytes, spec_with_byte_max
from pmaprl.envs.custom import wrap
from pmaprl.envs.environment import LONGEST_HORIZON, Env
from pmaprl.envs.masks import check_parts
from pmaprl.envs.ranges import range_metrics
from pmaprl.envs.registry import SUITES, check_known, list_envs, make, make_host
from pmaprl.envs.spaces import EnvSpec
from pmaprl.envs.variation import run_env
from pmaprl.nets.distributions import encode_action

OFFLINE_IDS = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]
# Of spaces and suites
KINDS = "CartPole-v1", "Pendulum-v1", "FrozenLake-misc", "Catch-bsuite", "SpaceInvaders-MinAtar"
IDS = [
    name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in OFFLINE_IDS
]


@pytest.mark.parametrize("name", IDS)
def test_gymnax_id_steps_through_episodes(name):
    """Two of them in each environment at least, whose states can be saved."""
    num_envs = 4
    steps = 40
    env = make(name, '{"max_steps_in_episode": 20}')

    def step(states, keys):

        def draw(key):
            return spaces.sample(key, env.action_space)

        actions = jax.vmap(draw)(keys)
        one = step_envs(env, keys, states, actions)
        return one.state, (one.obs, one.reward, one.terminated | one.truncated)

    def play(key):
        starts = jax.random.split(key, num_envs)
        _, states = jax.vmap(env.reset)(starts)
        return jax.lax.scan(step, states, jax.random.split(key, (steps, num_envs)))

    states, (obs, reward, over) = jax.jit(play)(jax.random.key(0))
    host = jax.device_get(key_data(states))
    assert same_bits(unflatten(flatten(host), host), host)
    assert np.isfinite(reward).all()
    for (_, space), leaf in zip(
        spaces.leaves(env.observation_space),
        jax.tree.leaves(obs),
        strict=True,
    ):
        assert leaf.shape == (steps, num_envs, *space.shape)
        assert np.isfinite(leaf).all()
    for ends in over.T:
        lengths = np.diff(np.flatnonzero(ends), prepend=-1)
        assert lengths.max() <= 20
        assert ends.sum() >= 2


def test_env_params_replace_parameters():
    env = make("CartPole-v1", '{"max_steps_in_episode": 20, "gravity": 5}')
    assert env.max_steps == 20
    assert env.params.gravity == 5.0
    assert make("CartPole-v1", '{"max_steps_in_episode": 100000000}').max_steps == LONGEST_HORIZON
    assert make("CartPole-v1").params.gravity == 9.8


def test_random_elements_are_inside_their_space():
    keys = jax.random.split(jax.random.key(0), 2000)
    draw = lambda space: np.asarray(jax.vmap(lambda key: spaces.sample(key, space))(keys))  # noqa: E731
    assert set(draw(spaces.Discrete(3))) == {0, 1, 2}
    pairs = draw(spaces.MultiDiscrete((2, 3)))
    grid = {(i, j) for i in range(2) for j in range(3)}
    assert set(map(tuple, pairs)) == grid
    low = np.float32([-1, -np.inf])
    high = np.float32([0.5, np.inf])
    box = draw(spaces.Box(low, high, (2,)))
    assert -1 <= box[:, 0].min() < -0.9
    assert 0.4 < box[:, 0].max() <= 0.5
    unbounded = np.abs(box[:, 1])
    assert 2 < unbounded.max() < 10


def test_names_are_refused_with_the_nearest_one_or_with_what_makes_it():
    with pytest.raises(UsageError, match="pond:crap.*pond:carp"):
        check_known("pond:crap", "crap", ["carp", "pike"])
    with pytest.raises(UsageError, match="make_host"):
        make("envpool:CartPole-v1")


def test_encoding_of_observations():
    one_hot = spaces.encode(jnp.array([2, 0]), spaces.Discrete(3))
    assert_array_equal(one_hot, [[0, 0, 1], [1, 0, 0]])
    action = jnp.array([[1, 2]])
    pair = spaces.encode(action, spaces.MultiDiscrete((2, 3)))
    assert_array_equal(
        pair,
        [[0, 1, 0, 0, 1]],
    )
    highest = np.full((2, 2, 1), 255)
    black = np.zeros((2, 2, 1))
    image = spaces.Box(black, highest, (2, 2, 1))
    white = jnp.full((5, 2, 2, 1), 255, jnp.uint8)
    ones = np.ones((5, 2, 2, 1))
    assert spaces.encode(white, image).tolist() == ones.tolist()
    matrix = spaces.Box(np.zeros((2, 3)), np.ones((2, 3)), (2, 3))
    flat = spaces.encode(jnp.ones((4, 5, 2, 3), bool), matrix)
    assert flat.shape == (4, 5, 6)


def test_choices_of_any_shape_are_a_vector_to_networks_and_keep_their_shape_elsewhere():
    column = gymnasium.spaces.MultiDiscrete(np.array([[2], [3]]))
    space = spaces.convert(column, "action space")
    assert space.shape == (2, 1)
    assert space.nvec == (2, 3)
    drawn = spaces.sample(jax.random.key(0), space)
    assert drawn.shape == (2, 1)
    encoded = spaces.encode(jnp.array([[[1], [2]]]), space)
    assert encoded.tolist() == [[0, 1, 0, 0, 1]]
    encoded = encode_action(jnp.array([[1, 2]]), space)
    assert encoded.tolist() == [[0, 1, 0, 0, 1]]
    clipped = spaces.clip(np.array([[1, 2], [0, 1]]), space, (2,), np)
    assert clipped.tolist() == [
        [[1], [2]],
        [[0], [1]],
    ]
    assert str(space) != str(spaces.MultiDiscrete((2, 3)))


@pytest.mark.parametrize(
    ("low", "high", "dtype", "kept"),
    [
        (-0.1, 0.1, np.float64, (-0.09999999403953552, 0.09999999403953552)),
        (-0.1, 0.1, np.float32, (np.float32(-0.1), np.float32(0.1))),
        (0.5, 0.5, np.float64, (0.5, 0.5)),
        (-1e300, 1e300, np.float64, (-np.inf, np.inf)),
        (-0.1, 2.9, np.int64, (0, 2)),
        (0.1, 0.1, np.float64, "between its bounds"),
        (1e300, 2e300, np.float64, "between its bounds"),
        (1.0, -1.0, np.float32, "between its bounds"),
        (0.2, 0.8, np.int32, "between its bounds"),
        (np.nan, 1.0, np.float32, "between its bounds"),
        (0, 2**40, np.int64, "whole numbers"),
        (-0.5, 0.5, jnp.bfloat16, (-0.5, 0.5)),
        (-1000, 1000, np.int8, "exceed"),
        (-5, 5, np.uint8, "exceed"),
        (0, 2, np.bool_, "exceed"),
        (0, 1, np.complex64, "real numbers"),
        (0, 1, np.longdouble, "real numbers"),
        (0, 1, "datetime64[s]", "real numbers"),
    ],
)
def test_bounds_of_actions_are_the_outermost_numbers_of_32_bits_within_them(low, high, dtype, kept):
    box = SimpleNamespace(
        low=low,
        high=high,
        shape=(2,),
        dtype=np.dtype(dtype),
    )
    if isinstance(kept, str):
        with pytest.raises(ValueError, match=kept):
            spaces.convert(box, "action space")
        return
    found = spaces.convert(box, "action space")
    assert found.low.tolist() == [kept[0]] * 2
    assert found.high.tolist() == [kept[1]] * 2
    assert found.low.dtype == found.high.dtype == np.float32


@pytest.mark.parametrize("kind", ["action space", "observation space"])
def test_choices_that_do_not_start_at_0_are_refused(kind):
    for space in (
        gymnasium.spaces.Discrete(3, start=1),
        gymnasium.spaces.MultiDiscrete([2, 2], start=[0, -1]),
    ):
        with pytest.raises(ValueError, match="start"):
            spaces.convert({"part": space}, kind)


@pytest.mark.parametrize(
    "space",
    [
        *({"n": n} for n in (0, -1, 2.7, True, "3", [3, 4])),
        {"n": 300, "dtype": np.uint8},
        {"n": 5, "dtype": np.bool_},
        {"n": 3, "dtype": np.float32},
        *({"nvec": nvec} for nvec in ([2.5, 3.0], [2, 0], [True, False])),
        {"nvec": [2, 3], "shape": (3,)},
        {"n": 5, "shape": (1,)},
        {"n": [2, 3], "shape": (2,)},
        {"nvec": [[2, 3, 4], [5, 6, 7]], "shape": (3, 2)},
        {"nvec": [2, 300], "dtype": np.uint8},
    ],
    ids=str,
)
def test_choices_that_nobody_can_count_are_refused(space):
    for kind in ("action space", "observation space"):
        with pytest.raises(ValueError, match="not supported"):
            spaces.convert(SimpleNamespace(**space), kind)


def test_a_shape_of_numpy_s_numbers_is_one_of_a_file():
    space = SimpleNamespace(low=0.0, high=1.0, shape=(np.int64(2),), dtype=np.dtype(np.float32))
    for kind in ("action space", "observation space"):
        assert type(spaces.convert(space, kind).shape[0]) is int


def test_our_own_choices_are_checked_too():
    for space in (spaces.Discrete(0), spaces.MultiDiscrete((2, -1))):
        with pytest.raises(ValueError, match="at least 1"):
            spaces.convert(space, "action space")


def test_several_choices_of_one_type_keep_it():
    choices = SimpleNamespace(n=3, shape=(), dtype=np.dtype(np.uint8))
    assert spaces.convert((choices, choices), "action space").dtype == np.uint8


def test_names_of_parts_that_are_no_strings_are_refused():
    part = SimpleNamespace(n=3)
    for parts in ({1: part}, {"a": part, 2: part}):
        with pytest.raises(ValueError, match="strings"):
            spaces.convert(parts, "observation space")


def test_actions_of_narrow_floats_are_not_rounded_to_whole_numbers():
    narrow = SimpleNamespace(low=-1, high=1, shape=(1,), dtype=np.dtype(jnp.bfloat16))
    space = spaces.convert(
        narrow,
        "action space",
    )
    for numpy in (jnp, np):
        found = spaces.clip(
            numpy.array([[0.25]], np.float32),
            space,
            (1,),
            numpy,
        )
        assert found.dtype == jnp.bfloat16
        assert float(found[0, 0]) == 0.25


def test_bounds_of_observations_that_rule_out_nothing_stay_so_in_a_file():
    bounds = np.array([np.nan, np.inf, -np.inf, -1.0])
    space = spaces.convert(
        SimpleNamespace(low=bounds, high=-bounds, shape=(4,)),
        "observation space",
    )
    lowest = [-np.inf] * 3 + [-1]
    assert space.low.tolist() == lowest
    highest = [np.inf] * 3 + [1]
    assert space.high.tolist() == highest
    spec = EnvSpec(
        name="Wide-v0",
        observation_space=space,
        obs_dtype=np.dtype(np.float32),
        action_space=spaces.Discrete(2),
    )
    stored = EnvSpec.from_json(spec.to_json()).observation_space
    assert stored.low.tolist() == space.low.tolist()
    assert stored.high.tolist() == space.high.tolist()


def test_whole_actions_reach_an_environment_on_the_devices_as_such():
    class Gears(Pusher):
        actions = gymnax.environments.spaces.Box(-2, 3, (), jnp.int32)

        def reward(self, state, action):
            assert action.shape == ()
            assert action.dtype == jnp.int32
            return action

    env = wrap(Gears())

    def reward_of(action):
        begun = env.reset(jax.random.key(1))[1]
        return env.step(jax.random.key(0), begun, action).reward

    step = jax.vmap(reward_of)
    rewards = step(jnp.array([[-9.0], [-0.6], [0.4], [2.9], [9.0]]))
    assert rewards.tolist() == [-2, -1, 0, 3, 3]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 5, [0, 0.6, 1]),
        (0, 255, [0, 3 / 255, 5 / 255]),
        (-np.inf, np.inf, [0, 3 / 255, 5 / 255]),
        (0, 0, [0, 3 / 255, 5 / 255]),
        ([0, 1, 4], [1, 5, 5], [0, 0.5, 1]),
        ([0, 0, 5], [0, 10, 5], [0, 0.3, 5 / 255]),
    ],
    ids=str,
)
def test_bytes_become_0_to_1_by_their_bounds(low, high, wanted):
    low, high = (np.broadcast_to(np.float32(bound), (3,)) for bound in (low, high))
    codes = jnp.uint8([[0, 3, 5]])
    found = spaces.encode(codes, spaces.Box(low, high, (3,)))
    assert_allclose(found[0], wanted, rtol=1e-6)


def test_a_flag_says_what_the_largest_byte_is_for_networks_on_the_device_and_on_the_host():
    on_device = run_env(small_args(byte_max=20), make("helpers:Parts")).spec
    on_host = inspect_env(
        appo.Args(env="gymnasium:host_toys:ImageToy-v0", vectorization="sync", byte_max=20)
    ).spec
    pictures = on_device.observation_space["picture"], on_host.observation_space
    for space in pictures:
        tens = jnp.full((1, *space.shape), 10, jnp.uint8)
        assert spaces.encode(tens, space).max() == 0.5
    declared = make("helpers:Parts").spec
    assert spec_with_byte_max(declared, 0).to_json() == declared.to_json() != on_device.to_json()


def test_bounds_of_bytes_outlive_another_shape_and_impossible_numbers():
    for low, high, shape in ((0, 5, (20, 20)), (-1, 5, (20, 20, 3))):
        space = spaces.box(shape, low, high)
        codes = jax.ShapeDtypeStruct((20, 20, 3), np.uint8)
        found, _ = spaces.as_seen("Codes-v0", space, codes)
        bounds = [float(bound.max()) for bound in spaces.byte_range(found)]
        assert bounds == [0, 5]


def test_the_header_names_bytes_that_may_be_codes():
    def spec(shape, high, dtype=np.uint8):
        return spaces.EnvSpec(
            name="E",
            observation_space={"part": spaces.box(shape, 0, high)},
            obs_dtype={"part": np.dtype(dtype)},
            action_space=spaces.Discrete(2),
        )

    may_be_codes = [
        ((4,), 255),
        ((7, 7, 3), 255),
        ((4,), np.inf),
    ]
    for shape, high in may_be_codes:
        assert "part" in describe_bytes(small_args(), spec(shape, high))["bytes"]
    given = small_args(byte_max=255)
    assert not describe_bytes(given, spec((4,), 255))
    normalizing = small_args(normalize_obs=True)
    assert not describe_bytes(normalizing, spec((4,), 255))
    for known in (
        spec((4,), 5),
        spec((84, 84, 4), 255),
        spec((4,), 255, np.float32),
    ):
        assert not describe_bytes(small_args(), known)


@pytest.mark.slow
def test_an_environment_with_a_typed_key_in_its_state_trains_and_moves_between_devices(tmp_path):
    env = wrap(KeyInState())
    args = small_args(
        hidden_sizes=(4,),
        total_timesteps=128,
        num_seeds=2,
        run_dir=str(tmp_path / "run"),
    )
    old, wanted = (helpers.init_over(args, env, count)() for count in (2, 4))
    shapes = jax.eval_shape(lambda state: state, wanted)
    moved = to_devices(to_host(old), shapes, jax.devices()[:4])

    def kind(x):
        return (x.shape, x.dtype)

    assert jax.tree.map(kind, moved) == jax.tree.map(
        lambda x: (x.shape, x.dtype),
        wanted,
    )
    assert same_bits(key_data(moved), key_data(wanted)), "the same environments on each device"
    assert train(args, env).status == "finished"


@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_box_actions_of_any_shape_reach_the_environment_and_have_one_log_prob(shape):
    class Levers(Pusher):
        actions = gymnax.environments.spaces.Box(-1.0, 0.5, shape)

        def reward(self, state, action):
            assert action.shape == shape
            return super().reward(state, action)

    env = wrap(Levers())
    actor = helpers.ppo.Actor(small_args(), env.spec)
    keys = jax.random.split(jax.random.key(0), 5)
    obs, state = jax.vmap(env.reset)(keys)
    params = actor.init(jax.random.key(1), obs)
    policy, _ = actor.apply(params, obs)
    noise = jax.vmap(lambda key: action_noise(key, env.action_space))(
        jax.random.split(jax.random.key(2), 5)
    )
    action = policy.sample(noise)
    size = int(np.prod(shape))
    log_prob = policy.log_prob(action)
    assert log_prob.shape == policy.entropy().shape == (5,)
    entropy = size * 0.5 * (1 + np.log(2 * np.pi))
    assert_allclose(policy.entropy(), entropy, rtol=1e-5)
    keys = jax.random.split(jax.random.key(3), 5)
    reward = jax.vmap(env.step)(keys, state, action).reward
    clipped = np.clip(action, -1, 0.5).reshape(5, -1)
    assert_allclose(reward, clipped.sum(axis=1), rtol=1e-5)


def test_environments_are_listed(capsys):
    list_envs(SUITES, "all")
    assert {"CartPole-v1", "brax:ant", "pgx:chess", "gymnasium:CartPole-v1"} <= set(
        capsys.readouterr().out.split()
    )


def test_the_command_that_installs_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(UsageError, match="pip install ale-py"):
        make_host("gymnasium:ALE/Pong-v5", 1, 0, vectorization="sync")


ENVS = 12
STEPS = 40


def unrolled(env: Env, step) -> tuple:
    """Run `step(keys, states, actions)` over some steps: what it returns, [T, N, ...], and the last
    states.
    """

    def draw(key):
        return spaces.sample(key, env.action_space)

    act = jax.vmap(draw)

    def one(states, key):
        action_keys, step_keys = split_keys(jax.random.split(key, ENVS), 2)
        out = step(step_keys, states, act(action_keys))
        return out.state, out._replace(state=(), final_state=())

    starts = jax.random.split(jax.random.key(0), ENVS)
    _, states = jax.vmap(env.reset)(starts)

    def play():
        steps = jax.random.split(jax.random.key(1), STEPS)
        return jax.lax.scan(one, states, steps)

    return jax.jit(play)()


@pytest.mark.parametrize("name", ["Endings", "KeyInState"])
def test_environments_begin_anew_as_if_each_step_had_a_reset_in_it(name):
    env = make_env(name)
    steps = (lambda *inputs: step_envs(env, *inputs), jax.vmap(env.step))
    (states, ours), (wanted_states, wanted) = (unrolled(env, step) for step in steps)
    assert (ours.terminated | ours.truncated).sum() > ENVS
    same = partial(assert_allclose, atol=1e-6)
    found = (ours, key_data(states))
    expected = (wanted, key_data(wanted_states))
    jax.tree.map(same, found, expected)


@pytest.mark.parametrize("has_starts", [False, True])
def test_keys_that_are_split_in_front_of_all_steps_lead_to_the_same_steps(has_starts):
    env = make_env("KeyInState")
    keys = jax.random.split(jax.random.key(1), (STEPS, ENVS))
    obs, states = jax.vmap(env.reset)(keys[0])
    starts = jax.tree.map(lambda x: x[:3], (obs, states)) if has_starts else None

    def draw(key):
        return spaces.sample(key, env.action_space)

    actions = jax.vmap(draw)(keys[0])

    def after(keys):
        def one(states, keys):
            out = step_envs(env, keys, states, actions, starts)
            return out.state, (out.obs, out.reward, out.terminated)

        def play():
            return jax.lax.scan(one, states, keys)

        return key_data(jax.jit(play)())

    once = after(keys_of_steps(env, keys, starts, None))
    assert same_bits(once, after(keys))


@pytest.mark.parametrize(
    ("begun", "then", "is_kept"),
    [
        (0, 0.5, False),
        (False, 2, False),
        (np.int32(0), 1.0, False),
        (np.uint8(0), np.int32(300), False),
        (np.int8(0), np.int32(300), False),
        (0.0, 1, True),
        (0, True, True),
        (0, 1, True),
        (np.float32(0), np.int32(7), True),
        (np.uint32(0), np.int32(7), False),
        (np.uint8(0), np.int8(1), False),
        (np.int32(0), np.float16(0.5), False),
        (np.float16(0), np.float32(1), False),
        (np.int32(0), jnp.bfloat16(0.5), False),
        (np.int32(0), np.uint8(3), True),
        (np.float32(0), jnp.bfloat16(1), True),
        (jnp.bfloat16(0), np.int32(300), False),
        (jnp.bfloat16(0), np.float16(1), False),
        (jnp.bfloat16(0), np.int8(1), False),
        (np.float16(0), np.int32(7), False),
        (np.float16(0), np.int8(7), True),
    ],
    ids=str,
)
def test_types_that_a_step_would_cut_to_those_of_a_reset_are_refused(begun, then, is_kept):
    """In states and in observations, of an environment of one's own."""

    class InState(Pusher):
        def reset_env(self, key, params):
            obs, state = super().reset_env(key, params)
            return obs, (state, begun)

        def step_env(self, key, state, action, params):
            obs, inner, *rest = super().step_env(
                key,
                state[0],
                action,
                params,
            )
            return obs, (inner, jnp.asarray(then)), *rest

        def is_truncated(self, state, params):
            return super().is_truncated(state[0], params)

    class InObs(Pusher):
        def reset_env(self, key, params):
            return jnp.asarray([begun]), super().reset_env(key, params)[1]

        def step_env(self, key, state, action, params):
            return jnp.asarray([then]), *super().step_env(key, state, action, params)[1:]

        def observation_space(self, params):
            return gymnax.environments.spaces.Box(
                0,
                1000,
                (1,),
                jnp.float32,
            )

    for kind in (InState, InObs):
        if is_kept:
            wrap(kind())
        else:
            with pytest.raises(UsageError, match="cut to"):
                wrap(kind())


@pytest.mark.parametrize(
    "value",
    [
        np.int64(3_000_000_000),
        np.uint64(2**40),
        np.float64(1e300),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", ["reward", "state", "obs"])
def test_numbers_of_64_bits_are_kept_or_refused(value, part):
    class Large(Pusher):
        def step_env(self, key, state, action, params):
            obs, inner, reward, *rest = super().step_env(
                key,
                state[0],
                action,
                params,
            )
            outputs = {
                "obs": obs,
                "state": jnp.zeros((), np.float32),
                "reward": reward,
            }
            outputs[part] = np.full(obs.shape, value) if part == "obs" else value
            states = (inner, outputs["state"])
            return outputs["obs"], states, outputs["reward"], *rest

        def reset_env(self, key, params):
            obs, inner = super().reset_env(key, params)
            return obs, (inner, jnp.zeros((), np.float32))

        def is_truncated(self, state, params):
            return super().is_truncated(state[0], params)

    with pytest.raises(UsageError, match="does not hold"):
        wrap(Large())


@pytest.mark.parametrize(("limit", "steps"), [(np.inf, 1000), (20.5, 21), (np.int32(9), 9)])
def test_a_time_limit_may_be_any_number(limit, steps):
    pusher = Pusher()
    params = pusher.default_params.replace(max_steps_in_episode=limit)
    assert wrap((pusher, params)).max_steps == steps


def test_a_time_limit_that_is_no_number_is_refused():
    pusher = Pusher()
    with pytest.raises(UsageError, match="max_steps_in_episode is None"):
        wrap((pusher, pusher.default_params.replace(max_steps_in_episode=None)))


def test_a_reward_that_is_a_key_is_refused():
    class Key(Pusher):
        def step_env(self, key, state, action, params):
            obs, state, _, *rest = super().step_env(key, state, action, params)
            return obs, state, key, *rest

    with pytest.raises(UsageError, match="no number"):
        wrap(Key())


WIDE = {
    "type": "Box",
    "shape": [300_000, 300_000],
    "low": 0,
    "high": 1,
}
LONG = {
    "type": "Box",
    "shape": [1_000_000, 200],
    "low": 0,
    "high": 1,
}
SHORT = {
    "type": "Box",
    "shape": [1],
    "low": 0,
    "high": 1,
}
CHOICES = {
    "type": "MultiDiscrete",
    "shape": [99_999],
    "nvec": [2] * 99_999,
}


@pytest.mark.parametrize(
    ("part", "space"),
    [
        ("observation_space", WIDE),
        ("observation_space", CHOICES),
        (
            "observation_space",
            {"type": "Tuple", "parts": [SHORT] * 20_000},
        ),
        ("action_space", LONG),
        ("action_space", CHOICES),
        ("action_space", {"type": "Discrete", "shape": [], "n": 10**9}),
        (
            "action_space",
            {"type": "Tuple", "parts": [LONG | {"shape": [300_000]}] * 4},
        ),
    ],
    ids=[
        "numbers",
        "choices",
        "parts",
        "actions",
        "components",
        "outputs",
        "sums",
    ],
)
def test_a_stored_space_that_nobody_could_train_on_is_refused_at_once(part, space):
    spec = EnvSpec(
        "Wide-v0",
        spaces.box((2,)),
        np.dtype(np.float32),
        spaces.Discrete(2),
    )
    with pytest.raises(ValueError, match="too large"):
        EnvSpec.from_json(spec.to_json() | {part: space})


def test_no_run_begins_whose_spaces_would_be_refused_later():
    wide = spaces.box((1_000_000, 200))
    spec = EnvSpec(
        "Wide-v0",
        wide,
        np.dtype(np.float32),
        spaces.Discrete(2),
    )
    check_parts(spec)
    with pytest.raises(UsageError, match="action"):
        check_parts(spec._replace(action_space=wide))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
def test_types_with_which_networks_do_not_compute_are_refused(dtype):
    class Narrow(Pusher):
        def get_obs(self, state, params=None, key=None):
            return super().get_obs(state).astype(dtype)

        def reset_env(self, key, params):
            obs, state = super().reset_env(key, params)
            return obs.astype(dtype), state

    with pytest.raises(UsageError, match=dtype):
        wrap(Narrow())


def test_an_end_is_true_or_false():
    class Ends(Pusher):
        def is_truncated(self, state, params):
            return jnp.int32(super().is_truncated(state, params))

    with pytest.raises(UsageError, match="truncated of type int32"):
        wrap(Ends())


def test_a_part_of_a_state_keeps_its_shape():
    class Growing(Pusher):
        def reset_env(self, key, params):
            obs, state = super().reset_env(key, params)
            return obs, {"inner": state, "seen": jnp.zeros(2)}

        def step_env(self, key, state, action, params):
            obs, inner, *rest = super().step_env(
                key,
                state["inner"],
                action,
                params,
            )
            seen = {"inner": inner, "seen": jnp.append(state["seen"], 0.0)}
            return obs, seen, *rest

        def is_truncated(self, state, params):
            return super().is_truncated(state["inner"], params)

    with pytest.raises(UsageError, match=r"seen.*\(3,\).*\(2,\)"):
        wrap(Growing())


@pytest.mark.parametrize("info", [None, [], 3])
def test_an_info_of_a_step_of_one_s_own_is_a_dictionary(info):
    class Telling(Pusher):
        def step(self, key, state, action, params):
            obs, state, reward, terminated, _ = self.step_env(key, state, action, params)
            return obs, state, reward, terminated, terminated, info

    with pytest.raises(UsageError, match="not a dictionary"):
        wrap(Telling())


def test_a_complex_reward_is_refused():
    class Complex(Pusher):
        def step_env(self, key, state, action, params):
            obs, state, reward, *rest = super().step_env(key, state, action, params)
            return obs, state, reward * 1j, *rest

    with pytest.raises(UsageError, match="complex"):
        wrap(Complex())


class Counted(Endings):
    """Counts how often resets are computed, of several environments at a time."""

    resets = 0

    def reset_env(self, key, params):
        jax.debug.callback(self.count)
        return super().reset_env(key, params)

    def count(self):
        type(self).resets += 1


def test_episodes_begin_from_starts_that_are_the_same_on_any_number_of_devices():
    env = make_env("CartPole-v1")
    count = 6
    starts, others = (
        over_devices(lambda: new_starts(env, jax.random.key(7), count), devices)
        for devices in (1, 4)
    )
    starts, others = (jax.tree.map(lambda x: x[-1], of_devices) for of_devices in (starts, others))
    assert same_bits(starts, others)

    def step(*inputs):
        return step_envs(env, *inputs, starts)

    _, out = unrolled(env, step)
    over = np.array(out.terminated | out.truncated)
    begun = np.array(out.obs)[over]
    which = [np.flatnonzero((np.array(starts[0]) == obs).all(axis=1)).tolist() for obs in begun]
    each = {(start,) for start in range(count)}
    assert set(map(tuple, which)) == each, "each of them, and nothing else"
    shown = np.array(out.obs)[~over]
    final = np.array(out.final_obs)[~over]
    assert_array_equal(shown, final)


def test_only_environments_whose_episodes_ended_compute_a_reset():
    env = wrap(Counted())

    def step(*inputs):
        return step_envs(env, *inputs)

    _, out = jax.block_until_ready(unrolled(env, step))
    jax.effects_barrier()
    ended = np.sum(out.terminated | out.truncated, axis=1)
    assert Counted.resets - 1 == sum(-(-ended // 3)), (
        "three at a time, the root of twelve; and all of them at first"
    )


@pytest.mark.parametrize(
    ("byte", "in_bounds"),
    [
        (0, False),
        (1, True),
        (5, True),
        (6, False),
    ],
)
def test_bytes_outside_of_their_bounds_are_found_on_any_device(byte, in_bounds):
    codes = spaces.box((2,), 1, 5)
    picture = spaces.box((2, 2, 1), 0, 255)
    space = {"codes": codes, "picture": picture}
    threes = np.full((4, 2), 3, np.uint8)
    white = np.full((4, 2, 2, 1), 255, np.uint8)
    obs = {"codes": threes, "picture": white}
    obs["codes"][3, 1] = byte

    def measure(obs):
        return range_metrics(space, helpers.AXIS, obs)

    found = over_devices(measure, 2, obs)[IN_BOUNDS]
    assert np.isfinite(found).tolist() == [in_bounds] * 2
    assert not range_metrics({"picture": space["picture"]}, "", {"picture": obs["picture"]})
