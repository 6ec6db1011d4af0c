"""Steps of many environments: resets of those alone that need one, and starts that several episodes share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Endings, make_env, same_bits

from common.device.rollout import new_starts, reset_envs, split_keys, step_envs
from common.device.sharding import AXIS, key_data
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
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    leaves = (jax.tree.leaves(key_data(some)) for some in (states, wanted_states))
    for found, expected in zip(*leaves, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


class Counted(Endings):
    """Counts how often resets are computed, of several environments at a time."""

    resets = 0

    def reset_env(self, key, params):
        jax.debug.callback(self.count)
        return super().reset_env(key, params)

    def count(self):
        type(self).resets += 1


def test_only_environments_whose_episodes_ended_compute_a_reset():
    env = wrap(Counted())
    _, out = jax.block_until_ready(unrolled(env, lambda *inputs: step_envs(env, *inputs)))
    jax.effects_barrier()
    ended = np.sum(out.terminated | out.truncated, axis=1)
    assert Counted.resets - 1 == sum(-(-ended // 3)), "three at a time, the root of twelve; and all of them at first"


def test_episodes_begin_from_the_starts_that_are_given():
    env = make_env("CartPole-v1")
    keys = jax.random.split(jax.random.key(7), 2)
    starts = jax.vmap(env.reset)(keys)
    _, out = unrolled(env, lambda *inputs: step_envs(env, *inputs, starts))
    over = np.array(out.terminated | out.truncated)
    begun = np.array(out.obs)[over]
    which = [np.flatnonzero((np.array(starts[0]) == obs).all(axis=1)).tolist() for obs in begun]
    assert set(map(tuple, which)) == {(0,), (1,)}, "each of the two, and nothing else"
    np.testing.assert_array_equal(np.array(out.obs)[~over], np.array(out.final_obs)[~over])


def test_starts_are_the_same_on_any_number_of_devices():
    env = make_env("CartPole-v1")
    made = []
    for devices in (jax.devices()[:1], jax.devices()[:4]):
        keys = jnp.stack([jax.random.key(0)] * len(devices))
        make = jax.pmap(lambda key: new_starts(env, key, 6), axis_name=AXIS, out_axes=None, devices=devices)
        made.append(make(keys))
    assert same_bits(*made)
    assert made[0][0].shape == (6, 4) and len(np.unique(made[0][0][:, 0])) == 6
