"""Values that a space rules out: on the device, on the host, in evaluations, and in front of a
policy.
"""

from types import SimpleNamespace

import dqn_pmap as dqn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import ppo_pmap as ppo
import ppo_rnn_pmap as ppo_rnn
import pqn_pmap as pqn
import pytest
from gymnax.environments.spaces import Box
from helpers import (
    AXIS,
    Fussy,
    Pixels,
    Toy,
    make_env,
    over_devices,
    small_args,
    small_pqn_args,
    small_rnn_args,
)

from pmaprl.cli.errors import FailedEnvError, TrainingError, UsageError
from pmaprl.device.evaluation import fault_of, run_episodes
from pmaprl.device.optim import hparams_of
from pmaprl.envs import spaces
from pmaprl.envs.custom import wrap
from pmaprl.envs.environment import Env, Step
from pmaprl.envs.masks import check_parts
from pmaprl.envs.ranges import IN_SPACE, OUTSIDE, are_choices, fault_in, in_space, range_metrics
from pmaprl.envs.spaces import Discrete, EnvSpec, MultiDiscrete
from pmaprl.policies.policy import Policy
from pmaprl.suites.tools.checked import _element, mask_of

BITS = spaces.convert(gymnasium.spaces.MultiBinary(2), "observation space")
SPACE = {
    "action_mask": spaces.box((2,), 0, 1),
    "place": Discrete(3),
    "cards": MultiDiscrete((2, 4), (2, 1)),
    "bits": BITS,
}
FITTING = {
    "action_mask": [0.0, 1.0],
    "place": 2,
    "cards": [[1], [3]],
    "bits": [0, 1],
}
WRONG = [
    {"action_mask": [0.0, -1e9]},
    {"action_mask": [0.5, 1.0]},
    {"action_mask": [np.nan, 1.0]},
    {"place": 3},
    {"place": -1},
    {"cards": [[2], [0]]},
    {"bits": [0, 7]},
    {"bits": [0, -1]},
]


def observations(**changes):
    """Make observations of four environments, [4, ...], of which the last one has `changes`."""
    one = {name: np.array([value] * 4) for name, value in FITTING.items()}
    for name, value in changes.items():
        one[name][3] = value
    return one


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_choices_and_masks_outside_of_their_space_are_found_on_any_device(wrong):
    spec = EnvSpec(
        name="Odd-v0",
        observation_space=SPACE,
        obs_dtype=None,
        action_space=Discrete(2),
    )
    for changes, fits in (({}, True), (wrong, False)):
        obs = observations(**changes)

        def measure(obs):
            return range_metrics(SPACE, AXIS, obs)

        found = over_devices(measure, 2, obs)[IN_SPACE]
        assert np.isfinite(found).tolist() == [fits] * 2
        assert in_space(obs, SPACE, np).tolist() == [True, True, True, fits]
        assert (fault_in(obs, spec) == "") == fits
    assert next(iter(wrong)) in fault_in(observations(**wrong), spec)


def test_numbers_and_masks_of_truths_cost_no_check():
    obs = {"action_mask": np.ones((4, 2), bool), "numbers": np.full((4, 1), 7.0)}
    space = {"action_mask": spaces.box((2,), 0, 1), "numbers": spaces.box((1,), 0, 1)}
    assert in_space(obs, space, np, (are_choices,)) is True
    assert range_metrics(space, AXIS, obs) == {}


class Beyond(Toy):
    """Observes the step, which is soon more than its space says."""

    observations = SimpleNamespace(n=3, shape=(), dtype=jnp.int32)

    def get_obs(self, state, params=None, key=None):
        return jnp.int32(state.time)


class Additive(Fussy):
    """Has 0 for legal actions, and a large negative number for the others."""

    def get_obs(self, state, params=None, key=None):
        mask = jnp.where(self.legal(state), 0.0, -1e9)
        return {"obs": Toy.get_obs(self, state), "action_mask": mask}


class BeyondAtTheEnd(Beyond):
    """Observes what its space does not have where the time limit strikes, and nowhere else."""

    def get_obs(self, state, params=None, key=None):
        return jnp.where(state.time >= self.parameters.max_steps_in_episode, 7, 1)


class AdditiveAtTheEnd(Fussy):
    """Has a mask of another kind where the time limit strikes, and nowhere else."""

    def get_obs(self, state, params=None, key=None):
        obs = super().get_obs(state)
        is_last = state.time >= self.parameters.max_steps_in_episode
        return obs | {"action_mask": jnp.where(is_last, -1e9, obs["action_mask"])}


@pytest.mark.parametrize("kind", [BeyondAtTheEnd, AdditiveAtTheEnd])
@pytest.mark.parametrize("algorithm", [ppo, dqn], ids=["ppo", "dqn"])
def test_the_last_observation_of_an_episode_has_to_be_in_its_space_too(kind, algorithm, tmp_path):
    flags = {
        "num_envs": 16,
        "hidden_sizes": (4,),
        "eval_interval": 0,
        "num_devices": 1,
        "eval_episodes": 4,
    }
    flags |= {
        "total_timesteps": 4096,
        "run_dir": str(tmp_path / "run"),
        "checkpoint_interval": 0,
        "quiet": True,
    }
    with pytest.raises(TrainingError, match="action_mask of more than 0 and 1"):
        algorithm.train(algorithm.Args(**flags), env=wrap(kind()))


class NotFinite(Toy):
    def get_obs(self, state, params=None, key=None):
        factor = jnp.where(state.time == 3, jnp.nan, 1.0)
        return super().get_obs(state) * factor


class Codes(Pixels):
    """Observes bytes above the bound of its space from the second step on."""

    observations = Box(low=0, high=5, shape=(5, 6, 2), dtype=jnp.uint8)


class Huge(Toy):
    """Observes finite numbers whose squares are infinite in float32."""

    def get_obs(self, state, params=None, key=None):
        return super().get_obs(state) + jnp.where(state.time == 3, 1e20, 0.0)


def test_bytes_with_bounds_of_their_own_are_told_by_these():
    space = spaces.Box(np.array([0.0, 2.0]), np.array([255.0, 5.0]), (2,))
    spec = EnvSpec("Codes-v0", space, np.dtype(np.uint8), Discrete(2))
    obs = np.array([[3, 4], [3, 6]], np.uint8)
    told = fault_in(obs, spec)
    assert "2 to 5 at [1]" in told
    assert "255" not in told


@pytest.mark.parametrize("kind", [NotFinite, Codes, Huge])
def test_an_evaluation_of_numbers_that_no_policy_can_use_does_not_count(kind):
    assert fault_of(run_episodes_of(wrap(kind()))) == OUTSIDE


@pytest.mark.parametrize("kind", [Beyond, Additive])
def test_a_run_and_an_evaluation_on_what_a_space_rules_out_do_not_count(kind, tmp_path):
    env = wrap(kind())
    episodes = run_episodes_of(env)
    assert fault_of(episodes) == OUTSIDE
    with pytest.raises(TrainingError, match="action_mask of more than 0 and 1"):
        args = small_args(run_dir=str(tmp_path / "run"), eval_interval=0)
        ppo.train(args, env=env)


def run_episodes_of(env):
    """Two episodes by a policy that always takes the first action, on the host."""
    play = lambda key: run_episodes(env, lambda obs: jnp.zeros(2, jnp.int32), 2)  # noqa: E731
    episodes = jax.pmap(play, axis_name=AXIS)(jnp.zeros(1))
    of_first = jax.tree.map(lambda x: x[0], episodes)
    return jax.device_get(of_first)


def policy_for(name, **flags):
    """A policy of PPO with its first parameters."""
    env = make_env(name)
    args = small_args(**flags)
    algorithm = ppo.make_algorithm(args, env.spec)
    learner = algorithm.init(jax.random.key(0), hparams_of(args))
    return Policy(algorithm, learner, env.spec)


NOT_FINITE = [
    [0.0, np.nan],
    [np.inf, 0.0],
    jnp.array([jnp.nan, 0.0]),
    [0.0, -1e20],
    jnp.array([1e20, 0.0]),
]


@pytest.mark.parametrize(
    "obs",
    [*NOT_FINITE, np.ma.array([0.0, 1.0], mask=[True, False])],
    ids=range(6),
)
def test_a_policy_refuses_numbers_that_are_none(obs):
    policy = policy_for("Toy")
    policy([0.0, 1.0])
    with pytest.raises(UsageError, match="finite|masked"):
        policy(obs)


def test_a_policy_whose_numbers_overflow_refuses_instead_of_a_broken_memory():
    """LayerNorm squares products of observations with parameters."""
    args = small_pqn_args(rnn="gru", rnn_size=8)
    env = make_env("Toy")
    algorithm = pqn.make_algorithm(args, env.spec)
    learner = algorithm.init(jax.random.key(0), hparams_of(args))
    policy = Policy(algorithm, jax.tree.map(lambda x: 10 * x, learner), env.spec)
    memory = policy.initial_memory(1)
    policy(np.array([[1e9, -1e9]]), memory, True)
    with pytest.raises(UsageError, match="too large"):
        policy(np.array([[1e19, -1e19]]), memory, True)


TOLD = [
    ("no", 0.0),
    (np.nan, 0.0),
    (2, 0.0),
    ([0, 1, 1], 0.0),
    (True, np.nan),
    (True, 1e39),
]


@pytest.mark.parametrize(("first", "reward"), TOLD, ids=range(6))
def test_a_policy_with_memory_is_told_truths_and_finite_numbers(first, reward):
    args = small_rnn_args(obs_prev_action_reward=True)
    env = make_env("Toy")
    algorithm = ppo_rnn.make_algorithm(args, env.spec)
    learner = algorithm.init(jax.random.key(0), hparams_of(args))
    policy = Policy(algorithm, learner, env.spec)
    memory = policy.initial_memory(1)
    policy(np.zeros((1, 2)), memory, [True], reward=[0.0])
    with pytest.raises(UsageError, match="first|reward"):
        policy(np.zeros((1, 2)), memory, first, reward=reward)
    with pytest.raises(UsageError, match="memory"):
        policy(
            np.zeros((1, 2)),
            jax.tree.map(lambda x: x.tolist(), memory),
            True,
            reward=0.0,
        )


KEYS = [
    0,
    np.random.default_rng(0),
    jax.random.split(jax.random.key(0), 3),
    1.5,
]


@pytest.mark.parametrize("key", KEYS, ids=range(4))
def test_a_policy_takes_one_key(key):
    with pytest.raises(UsageError, match="jax.random.key"):
        policy_for("Toy")([0.0, 1.0], key=key)


def test_a_policy_refuses_what_its_space_rules_out():
    policy = policy_for("FrozenLake-misc", normalize_obs=False)
    assert policy(np.int32(15)).shape == ()
    for wrong in (16, -1):
        with pytest.raises(UsageError, match="Discrete"):
            policy(np.int32(wrong))


def test_observations_of_choices_must_be_whole_numbers_of_their_shape():
    class Place(Env):
        given = jnp.float32(1)

        def begin(self, key):
            return self.given, 0

        def advance(self, key, state, action):
            return Step(
                obs=self.given,
                state=state,
                reward=0.0,
                terminated=jnp.bool_(False),
                truncated=jnp.bool_(False),
            )

    class Row(Place):
        given = jnp.zeros(1, jnp.int32)

    for kind, told in ((Place, "float32"), (Row, r"\(1,\)")):
        with pytest.raises(UsageError, match=told):
            kind("Place-v0", None, Discrete(3), Discrete(2))


def spec_with(observed, acted):
    return EnvSpec(
        name="Odd-v0",
        observation_space={"x": spaces.box((1,)), **observed},
        obs_dtype=None,
        action_space=acted,
    )


BITS_OF = {"fire": spaces.box((2,), 0, 1), "move": spaces.box((2,), 0, 1)}


@pytest.mark.parametrize(
    "spec",
    [
        spec_with({"action_mask": BITS_OF}, MultiDiscrete((2, 2))),
        spec_with({"action_mask": BITS_OF}, {"a": Discrete(2), "b": Discrete(2)}),
        spec_with({"action_mask": spaces.box((4,), 0, 1)}, {"a": Discrete(2), "b": Discrete(2)}),
        spec_with(
            {"action_mask": (spaces.box((2,), 0, 1),) * 2}, {"a": Discrete(2), "b": Discrete(2)}
        ),
        spec_with({"inner": {"action_mask": spaces.box((2,), 0, 1)}}, Discrete(2)),
    ],
    ids=range(5),
)
def test_a_mask_that_does_not_say_what_it_masks_is_refused(spec):
    with pytest.raises(UsageError, match="mask"):
        check_parts(spec)


def test_parts_of_a_mask_have_the_names_of_the_actions():
    actions = {
        "fire": Discrete(2),
        "move": Discrete(2),
        "steer": spaces.box((1,)),
    }
    check_parts(spec_with({"action_mask": BITS_OF}, actions))


@pytest.mark.parametrize("name", ["action_mask/x", "privileged_state/y"])
def test_a_name_that_would_hide_a_part_is_refused(name):
    with pytest.raises(ValueError, match="rename"):
        spaces.convert({name: SimpleNamespace(n=3)}, "observation space")


BIT = gymnasium.spaces.Box(0, 1, (2,), np.int8)


@pytest.mark.parametrize(
    "mask",
    [
        [0.5, 1],
        [0, 256],
        [np.nan, 1],
        [0.0, -1e9],
        ["0", "1"],
        [1j, 0],
        [1],
        [[1, 0]],
    ],
    ids=str,
)
def test_a_mask_in_an_info_is_0_and_1_in_the_shape_of_the_first_one(mask):
    assert mask_of([False, True], BIT, "the mask").tolist() == [0, 1]
    cases = ((BIT, mask), (gymnasium.spaces.Tuple([BIT]), (mask,)))
    for space, given in cases:
        with pytest.raises(FailedEnvError):
            mask_of(given, space, "the mask")


def test_a_mask_in_an_info_keeps_its_parts():
    space = gymnasium.spaces.Tuple([BIT, BIT])
    for parts in (
        ([1, 0],),
        ([1, 0], [0, 1], [1, 1]),
        None,
        1,
    ):
        with pytest.raises(FailedEnvError, match="2 parts"):
            mask_of(parts, space, "the mask")


def test_a_mask_that_the_space_forgets_is_not_dropped():
    space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(0, 1, (2,))})
    with pytest.raises(FailedEnvError, match="action_mask"):
        _element(space, {"x": np.zeros(2), "action_mask": np.ones(3)}, "the observation")


@pytest.mark.parametrize("obs", [[1, 2], [1, 2, 3, 4], (1, 2, 3), np.zeros((2, 2))], ids=str)
def test_parts_of_an_observation_are_a_tuple_where_the_space_has_one(obs):
    space = {"pair": (spaces.box(()), spaces.box(()))}
    spaces.check_tuples(space, {"pair": (1, 2)})
    with pytest.raises(ValueError, match="tuple of 2"):
        spaces.check_tuples(space, {"pair": obs})


def test_a_bit_is_0_or_1():
    with pytest.raises(FailedEnvError, match="space"):
        _element(gymnasium.spaces.MultiBinary(3), [2, 0, 1], "the observation")
