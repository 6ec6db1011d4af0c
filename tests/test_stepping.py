"""Steps of many environments: resets of those alone that need one, and starts that several episodes share."""

from functools import partial

import jax
import numpy as np
import pytest
from helpers import Endings, make_env, over_devices, same_bits

from common.device.rollout import new_starts, reset_envs, split_keys, step_envs
from common.device.sharding import key_data
from common.envs.custom import wrap
from common.envs.environment import Env
from common.envs.spaces import sample

ENVS, STEPS = 12, 40


def unrolled(env: Env, step) -> tuple:
    """What `step(keys, states, actions)` returns over some steps, [T, N, ...], and the last states."""
    act = jax.vmap(lambda key: sample(key, env.action_space))

    def one(states, key):
        action_keys, step_keys = split_keys(jax.random.split(key, ENVS), 2)
        out = step(step_keys, states, act(action_keys))
        return out.state, out._replace(state=(), final_state=())

    _, states = reset_envs(env, jax.random.split(jax.random.key(0), ENVS))
    return jax.jit(lambda: jax.lax.scan(one, states, jax.random.split(jax.random.key(1), STEPS)))()


@pytest.mark.parametrize("name", ["Endings", "KeyInState"])
def test_environments_begin_anew_as_if_each_step_had_a_reset_in_it(name):
    env = make_env(name)
    (states, ours), (wanted_states, wanted) = (
        unrolled(env, step) for step in (lambda *inputs: step_envs(env, *inputs), jax.vmap(env.step))
    )
    assert (ours.terminated | ours.truncated).sum() > ENVS
    same = partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(same, (ours, key_data(states)), (wanted, key_data(wanted_states)))


class Counted(Endings):
    """Counts how often resets are computed, of several environments at a time."""

    resets = 0

    def reset_env(self, key, params):
        jax.debug.callback(self.count)
        return super().reset_env(key, params)

    def count(self):
        type(self).resets += 1


def test_episodes_begin_from_starts_that_are_the_same_on_any_number_of_devices():
    env, count = make_env("CartPole-v1"), 6
    starts, others = (over_devices(lambda: new_starts(env, jax.random.key(7), count), devices) for devices in (1, 4))
    starts, others = (jax.tree.map(lambda x: x[-1], of_devices) for of_devices in (starts, others))
    assert same_bits(starts, others)
    _, out = unrolled(env, lambda *inputs: step_envs(env, *inputs, starts))
    over = np.array(out.terminated | out.truncated)
    begun = np.array(out.obs)[over]
    which = [np.flatnonzero((np.array(starts[0]) == obs).all(axis=1)).tolist() for obs in begun]
    assert set(map(tuple, which)) == {(start,) for start in range(count)}, "each of them, and nothing else"
    np.testing.assert_array_equal(np.array(out.obs)[~over], np.array(out.final_obs)[~over])


def test_only_environments_whose_episodes_ended_compute_a_reset():
    env = wrap(Counted())
    _, out = jax.block_until_ready(unrolled(env, lambda *inputs: step_envs(env, *inputs)))
    jax.effects_barrier()
    ended = np.sum(out.terminated | out.truncated, axis=1)
    assert Counted.resets - 1 == sum(-(-ended // 3)), "three at a time, the root of twelve; and all of them at first"
