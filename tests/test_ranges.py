"""Values that a space rules out: on the device, on the host, in evaluations, and in front of a policy."""

from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import ppo_pmap as ppo
import pytest
from helpers import AXIS, Fussy, Toy, make_env, over_devices, small_args

from common.cli.errors import FailedEnvError, TrainingError, UsageError
from common.device.agents import Policy
from common.device.evaluation import fault_of, run_episodes
from common.envs import spaces
from common.envs.custom import wrap
from common.envs.environment import Env, Step
from common.envs.ranges import IN_SPACE, OUTSIDE, fault_in, in_space, range_metrics
from common.envs.spaces import Discrete, EnvSpec, MultiDiscrete
from suites.tools.checked import _element, mask_of

SPACE = {"action_mask": spaces.box((2,), 0, 1), "place": Discrete(3), "cards": MultiDiscrete((2, 4), (2, 1))}
FITTING = {"action_mask": [0.0, 1.0], "place": 2, "cards": [[1], [3]]}
WRONG = [
    {"action_mask": [0.0, -1e9]},
    {"action_mask": [0.5, 1.0]},
    {"action_mask": [np.nan, 1.0]},
    {"place": 3},
    {"place": -1},
    {"cards": [[2], [0]]},
]


def observations(**changes):
    """Those of four environments, [4, ...], of which the last one has `changes`."""
    one = {name: np.array([value] * 4) for name, value in FITTING.items()}
    for name, value in changes.items():
        one[name][3] = value
    return one


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_choices_and_masks_outside_of_their_space_are_found_on_any_device(wrong):
    spec = EnvSpec("Odd-v0", SPACE, None, Discrete(2))
    for changes, fits in (({}, True), (wrong, False)):
        obs = observations(**changes)
        found = over_devices(lambda obs: range_metrics(obs, SPACE, AXIS), 2, obs)[IN_SPACE]
        assert np.isfinite(found).tolist() == [fits] * 2
        assert in_space(obs, SPACE, np).tolist() == [True, True, True, fits]
        assert (fault_in(obs, spec) == "") == fits
    assert next(iter(wrong)) in fault_in(observations(**wrong), spec)


def test_numbers_and_masks_of_truths_cost_no_check():
    obs = {"action_mask": np.ones((4, 2), bool), "numbers": np.full((4, 1), 7.0)}
    space = {"action_mask": spaces.box((2,), 0, 1), "numbers": spaces.box((1,), 0, 1)}
    assert in_space(obs, space, np) is True
    assert range_metrics(obs, space, AXIS) == {}


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


@pytest.mark.parametrize("kind", [Beyond, Additive])
def test_a_run_and_an_evaluation_on_what_a_space_rules_out_do_not_count(kind, tmp_path):
    env = wrap(kind())
    episodes = run_episodes_of(env)
    assert fault_of(episodes) == OUTSIDE
    with pytest.raises(TrainingError, match="action_mask of more than 0 and 1"):
        ppo.train(small_args(run_dir=str(tmp_path / "run"), eval_interval=0), env=env)


def run_episodes_of(env):
    """Two episodes by a policy that always takes the first action, on the host."""
    play = lambda key: run_episodes(env, lambda obs: jnp.zeros(2, jnp.int32), 2)  # noqa: E731
    episodes = jax.pmap(play, axis_name=AXIS)(jnp.zeros(1))
    return jax.device_get(jax.tree.map(lambda x: x[0], episodes))


def test_a_policy_refuses_what_its_space_rules_out():
    env = make_env("FrozenLake-misc")
    algorithm = ppo.make_algorithm(small_args(normalize_obs=False), env.spec)
    hp = SimpleNamespace(learning_rate=1e-3)
    policy = Policy(algorithm, algorithm.init(jax.random.key(0), hp), env.spec)
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
            return Step(self.given, state, 0.0, jnp.bool_(False), jnp.bool_(False))

    class Row(Place):
        given = jnp.zeros(1, jnp.int32)

    for kind, told in ((Place, "float32"), (Row, r"\(1,\)")):
        with pytest.raises(UsageError, match=told):
            kind("Place-v0", None, Discrete(3), Discrete(2))


BIT = gymnasium.spaces.Box(0, 1, (2,), np.int8)


@pytest.mark.parametrize(
    "mask", [[0.5, 1], [0, 256], [np.nan, 1], [0.0, -1e9], ["0", "1"], [1j, 0], [1], [[1, 0]]], ids=str
)
def test_a_mask_in_an_info_is_0_and_1_in_the_shape_of_the_first_one(mask):
    assert mask_of([False, True], BIT, "the mask").tolist() == [0, 1]
    for space, given in ((BIT, mask), (gymnasium.spaces.Tuple([BIT]), (mask,))):
        with pytest.raises(FailedEnvError):
            mask_of(given, space, "the mask")


def test_a_mask_in_an_info_keeps_its_parts():
    space = gymnasium.spaces.Tuple([BIT, BIT])
    for parts in (([1, 0],), ([1, 0], [0, 1], [1, 1]), None, 1):
        with pytest.raises(FailedEnvError, match="2 parts"):
            mask_of(parts, space, "the mask")


def test_a_bit_is_0_or_1():
    with pytest.raises(FailedEnvError, match="space"):
        _element(gymnasium.spaces.MultiBinary(3), [2, 0, 1], "the observation")
