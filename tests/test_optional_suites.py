"""Suites that are tested where they are installed: their steps, ends and last observations beside the originals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_updates, same_bits, small_args

from common.device.sharding import to_host
from common.envs.registry import make
from common.envs.spaces import MultiDiscrete
from common.runs.arrays import flatten, unflatten

pytestmark = pytest.mark.slow

TINY = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "hidden_sizes": (4,)}
INSTALLED = {
    "navix": "navix:Navix-DoorKey-5x5-v0",
    "xminigrid": "xminigrid:MiniGrid-DoorKey-5x5",
    "jaxmarl": "jaxmarl:MPE_simple_spread_v3",
    "octax": "octax:brix",
    "mujoco_playground": "playground:CartpoleBalance",
}


@pytest.mark.parametrize("package", INSTALLED)
def test_they_train_and_their_states_can_be_saved(package):
    pytest.importorskip(package)
    state, metrics = run_updates(small_args(**TINY, total_timesteps=64), make(INSTALLED[package]), 1, 2)
    host = to_host(state)
    assert same_bits(unflatten(flatten(host), host), host)
    first = jax.tree.map(lambda x: x[0, 0], host.actors.env_state)
    if package in ("navix", "xminigrid", "octax"):  # others need a graphics library
        frame = make(INSTALLED[package]).frame(first)
        assert frame.dtype == np.uint8 and frame.shape[2] == 3 and frame.std() > 0
    assert np.isfinite(metrics["loss/total"])


def test_navix_ends_as_the_original_and_begins_anew_at_once():
    navix = pytest.importorskip("navix")
    ours, original = make("navix:Navix-Empty-5x5-v0", '{"max_steps": 9}'), navix.make("Navix-Empty-5x5-v0", max_steps=9)
    step, theirs = jax.jit(ours.step), jax.jit(original.step)
    obs, state = jax.jit(ours.reset)(jax.random.key(3))
    beside = jax.jit(original.reset)(jax.random.key(3))
    to_goal = [2, 2, 1, 2, 2]  # two squares east, and two south
    for time, action in enumerate(to_goal):
        out, beside = step(jax.random.key(time), state, jnp.int32(action)), theirs(beside, action)
        assert float(out.reward) == float(beside.reward) == (time == 4)
        assert (bool(out.terminated), bool(out.truncated)) == (time == 4, False)
        assert out.final_obs[..., :11].argmax(axis=-1).tolist() == beside.observation[..., 0].tolist()
        obs, state = out.obs, out.state
    assert state.t == 0 and (obs != out.final_obs).any(), "not one step later"
    for time in range(9):
        out = step(jax.random.key(time), state, jnp.int32(0))
        assert (bool(out.terminated), bool(out.truncated)) == (False, time == 8)
        state = out.state
    assert ours.observation_space.shape == (5, 5, 21) and obs.dtype == bool


def test_xminigrid_ends_as_the_original_and_begins_anew():
    xminigrid = pytest.importorskip("xminigrid")
    ours, (original, params) = make("xminigrid:MiniGrid-Empty-5x5"), xminigrid.make("MiniGrid-Empty-5x5")
    step, theirs = jax.jit(ours.step), jax.jit(original.step)
    obs, state = jax.jit(ours.reset)(jax.random.key(3))
    beside = original.reset(params, jax.random.key(3))
    ends = {}
    for time in range(260):
        lucky = jax.random.randint(jax.random.key(1000 + time), (), 0, 3)
        action = jnp.int32(1) if ends else lucky  # walks about until it finds the goal, then turns round and round
        beside = theirs(params, state, action)
        out = step(jax.random.key(time), state, action)
        assert float(out.reward) == pytest.approx(float(beside.reward))
        assert bool(out.terminated) == bool(beside.last() & (beside.discount == 0))
        assert bool(out.truncated) == bool(beside.last() & (beside.discount == 1))
        assert out.final_obs[..., :13].argmax(axis=-1).tolist() == beside.observation[..., 0].tolist()
        if out.terminated or out.truncated:
            ends[bool(out.terminated)] = int(beside.state.step_num)
            assert out.state.state.step_num == 0
        state = out.state
    assert ends[True] < 100 and ends[False] == 100, "the goal, and the time limit"


def test_the_agents_of_jaxmarl_act_as_one_and_its_limit_is_a_truncation():
    jaxmarl = pytest.importorskip("jaxmarl")
    ours, original = make("jaxmarl:MPE_simple_spread_v3"), jaxmarl.make("MPE_simple_spread_v3")
    step, theirs = jax.jit(ours.step), jax.jit(original.step_env)
    (obs, state), (_, beside) = (jax.jit(env.reset)(jax.random.key(3)) for env in (ours, original))
    assert ours.action_space == MultiDiscrete((5, 5, 5)) and list(obs) == original.agents
    for time in range(25):
        key, action = jax.random.key(time), jnp.array([1, 2, 4])
        out = step(key, state, action)
        choices = dict(zip(original.agents, action, strict=True))
        expected, beside, rewards, dones, _ = theirs(jax.random.split(key)[0], beside, choices)
        for agent in original.agents:
            np.testing.assert_allclose(out.final_obs[agent], expected[agent], atol=1e-5)
        assert float(out.reward) == pytest.approx(float(sum(rewards.values())), rel=1e-4)
        assert (bool(out.terminated), bool(out.truncated)) == (False, time == 24)
        state = out.state
    *_, dones, _ = theirs(jax.random.key(0), beside, choices)
    assert dones["__all__"], "one step later than its parameter says, and nothing of why"
    assert ours.agents == (0, 1, 2)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
def test_octax_steps_as_the_original():
    pytest.importorskip("octax")
    from octax.environments import create_environment

    name, params = "octax:brix", '{"max_num_steps_per_episodes": 5}'
    ours, (original, _) = make(name, params), create_environment("brix")
    step, theirs = jax.jit(ours.step), original.step
    _, state = jax.jit(ours.reset)(jax.random.key(3))
    for time in range(5):
        out, beside = step(jax.random.key(time), state, jnp.int32(1)), theirs(state, 1)
        np.testing.assert_array_equal(out.final_obs, np.moveaxis(np.array(beside[1]), (0, 1, 2), (2, 1, 0)))
        assert (bool(out.terminated), bool(out.truncated)) == (bool(beside[3]), time == 4)
        state = out.state
    assert state.time == 0 and ours.observation_space.shape == (32, 64, 4)


def test_playground_has_a_limit_of_ours_and_begins_anew_elsewhere():
    pytest.importorskip("mujoco_playground")
    from mujoco_playground import registry

    ours = make("playground:CartpoleBalance", '{"episode_length": 3}')
    original = registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    step, theirs = jax.jit(ours.step), jax.jit(original.step)
    (obs, state), beside = jax.jit(ours.reset)(jax.random.key(3)), jax.jit(original.reset)(jax.random.key(3))
    for time in range(3):
        out, beside = step(jax.random.key(time), state, jnp.array([0.3])), theirs(beside, jnp.array([0.3]))
        np.testing.assert_allclose(out.final_obs, beside.obs, atol=1e-5)
        assert float(out.reward) == pytest.approx(float(beside.reward), rel=1e-4)
        assert (bool(out.terminated), bool(out.truncated)) == (False, time == 2)
        state = out.state
    assert np.abs(out.obs - obs).max() > 1e-4, "not the first start again"
