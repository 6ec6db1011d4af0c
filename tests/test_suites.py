"""Suites of environments on the device: their steps, ends and last observations beside the originals."""

import jax
import numpy as np
import pytest
from helpers import run_updates, same_bits, small_args

from common.cli.errors import UsageError
from common.device.sharding import to_host
from common.envs.registry import make
from common.runs.arrays import flatten, unflatten

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


def test_brax_trains_and_its_state_can_be_saved(pole):
    tiny = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "hidden_sizes": (4,)}
    state, metrics = run_updates(small_args(**tiny, total_timesteps=64), pole, 1, 2)
    host = to_host(state)
    assert same_bits(unflatten(flatten(host), host), host)
    assert metrics["episode/length_max"] == 4 and np.isfinite(metrics["loss/total"])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ('{"gravity": 3}', "brax:ant has no parameter 'gravity'; it has ctrl_cost_weight, .*backend, episode_length"),
        ('{"backend": 3}', "'backend' must be like 'generalized', got 3"),
        ('{"backend": "none"}', "environment brax:ant cannot be made: "),
        ('{"healthy_z_range": [0.2]}', r"'healthy_z_range' must be like \(0.2, 1.0\), got \[0.2\]"),
    ],
)
def test_parameters_of_brax_are_checked(params, words):
    with pytest.raises(UsageError, match=words):
        make("brax:ant", params)
