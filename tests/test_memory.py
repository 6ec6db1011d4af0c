"""Recurrent networks: the cells, and that memory begins anew exactly where an episode does, in
acting and learning.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import ppo_rnn_pmap as ppo_rnn
import pytest
from helpers import calls_of_gae, make_env, run_updates, small_rnn_args
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl.nets.recurrent import CELLS, Recurrent, initial_memory
from pmaprl.policy import load_policy

KINDS = list(CELLS)
BY_KIND = pytest.mark.parametrize("kind", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
STEPS = 12
ENVS = 6
FEATURES = 3
SIZE = 5


def random_sequence(seed=0):
    """Inputs [T, N, F], and episodes that begin at random steps, some at the first."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(STEPS, ENVS, FEATURES)).astype(np.float32)
    return inputs, rng.random((STEPS, ENVS)) < 0.3


@functools.cache
def network(kind, layers=2):
    """Layers with random parameters, as a function of inputs, first and memory; and a memory full
    of ones.
    """
    module = Recurrent(kind, SIZE, span=9)
    zeros = initial_memory(kind, SIZE, layers, ENVS)
    memory = jax.tree.map(lambda x: x + 1, zeros)
    params = module.init(jax.random.key(0), *random_sequence(), memory)

    def disturbed(x):
        return x + 0.1 * jax.random.normal(jax.random.key(1), x.shape)

    params = jax.tree.map(disturbed, params)
    return functools.partial(module.apply, params), memory


def library_cell(kind, params, layer):
    """flax's own cell with the parameters of one of our layers."""
    names = {"gru": "rzn", "lstm": "ifgo"}[kind]
    inputs, recurrent, of_recurrent = (
        params[f"{name}_{layer}"] for name in ("input", "recurrent", "recurrent_bias")
    )
    arrays = (inputs["kernel"], inputs["bias"], recurrent, of_recurrent)
    theirs = {}
    for gate, *parts in zip(
        names,
        *(np.split(x, len(names), axis=-1) for x in arrays),
        strict=True,
    ):
        kernel, bias, recurrent, recurrent_bias = parts
        theirs[f"i{gate}"] = {"kernel": kernel}
        theirs[f"h{gate}"] = {"kernel": recurrent}
        if gate == "n":  # where the reset gate comes between both biases
            theirs["in"]["bias"] = bias
            theirs["hn"]["bias"] = recurrent_bias
        else:
            theirs[("i" if kind == "gru" else "h") + gate]["bias"] = bias + recurrent_bias
    cell = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}[kind](SIZE)
    return cell, {"params": theirs}


@pytest.mark.parametrize("kind", KINDS)
def test_x7_a_sequence_equals_a_loop_of_flax_s_cells_that_begin_anew_with_each_episode(kind):
    x, first = random_sequence()
    apply, memory = network(kind)
    outputs, left = apply(x, first, memory)
    cells = [
        library_cell(kind, jax.device_get(apply.args[0]["params"]), layer) for layer in range(2)
    ]
    carries = [layer[::-1] if kind == "lstm" else layer[0] for layer in memory]  # (c, h)
    for step in range(STEPS):
        y = x[step]
        for layer, (cell, params) in enumerate(cells):

            def begun(m):
                return np.where(first[step][:, None], 0, m)

            carry = jax.tree.map(begun, carries[layer])
            carries[layer], y = cell.apply(params, carry, y)
        assert_allclose(outputs[step], y, atol=1e-6)
    assert_array_equal(left[-1][0], outputs)


@pytest.mark.parametrize(("span", "low", "high"), [(0, 2, 2), (300, 2, 300)])
@pytest.mark.parametrize("kind", KINDS)
def test_cells_of_a_new_network_remember_for_times_up_to_their_span(kind, span, low, high):
    """A cell that remembers T steps loses 1 / T of its state in each, and takes in as much of what
    is new.
    """
    size = 200
    module = Recurrent(kind, size, span)
    memory = initial_memory(kind, size, 1, ENVS)
    obs = np.zeros((1, ENVS, FEATURES), np.float32)
    inputs = obs, np.zeros((1, ENVS), bool)
    params = module.init(jax.random.key(0), *inputs, memory)["params"]
    params["recurrent_0"] *= 0.0
    ones = jax.tree.map(lambda x: x + 1, memory)
    _, after = module.apply({"params": params}, *inputs, ones)
    # An LSTM's second array is the one that lasts
    kept = np.asarray(after[0][-1][0, 0], np.float64)
    times = 1 / (1 - kept)
    assert low - 1e-3 < times.min()
    assert times.max() < high + 0.1
    assert np.ptp(times) > 0.9 * (high - low) - 1e-3
    assert abs(times.mean() - (low + high) / 2) < 0.1 * high
    # All of it is new
    bias = params["input_0"]["bias"]
    params["input_0"]["bias"] = bias.at[2 * size : 3 * size].set(100.0)
    _, filled = module.apply({"params": params}, *inputs, memory)
    kept = np.asarray(filled[0][-1][0, 0])
    assert_allclose(1 / kept, times, rtol=1e-3)


@BY_KIND
def test_x7_no_gradient_crosses_the_beginning_of_an_episode(kind):
    """Nor the memory from before it; within an episode it reaches all earlier steps."""
    x, first = random_sequence()
    apply, memory = network(kind)

    def outputs_of(step, x, memory):
        return jnp.sum(apply(x, first, memory)[0][step])

    for step in range(STEPS):
        gradients = jax.grad(outputs_of, (1, 2))
        to_inputs, to_memory = gradients(step, x, memory)
        episode = np.cumsum(first, axis=0)
        is_before = np.arange(STEPS)[:, None] <= step
        reached = (episode == episode[step]) & is_before
        assert_array_equal(np.any(to_inputs != 0, axis=-1), reached)
        arrives = np.any(to_memory[0][0] != 0, axis=-1)
        assert_array_equal(arrives, episode[step] == 0)


VARIANTS = {
    "segments": {
        "bptt_length": 4,
        "rnn": "lstm",
        "obs_prev_action_reward": True,
        "normalize_obs": True,
    },
    "shared": {"share_torso": True, "rnn_layers": 2, "normalize_obs": True},
    "half precision": {"precision": "bfloat16"},
}
ONE_STEP = {"num_minibatches": 1, "update_epochs": 1, "num_steps": 16}


@pytest.mark.parametrize("kind", KINDS)
def test_on_an_accelerator_gradients_are_the_same(kind, monkeypatch):
    """There they have a rule of their own, which a CPU computes too."""
    apply, memory = network(kind)
    x, first = random_sequence()

    def loss(params, x, memory):
        outputs = apply.func(params, x, first, memory)[0]
        return jnp.sum(jnp.sin(outputs))

    def gradients():
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        return gradient(*apply.args, x, memory)

    plain = gradients()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    close = functools.partial(assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, gradients(), plain)


LATER = ("segments", "Hybrid"), ("shared", "Endings"), ("half precision", "Endings")


@pytest.mark.parametrize(
    ("case", "env"),
    [("segments", "Endings"), *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER)],
)
def test_x7_learning_begins_with_the_probabilities_of_acting(case, env):
    """Episodes of 3, 4 and 5 steps end at every position of rollouts and segments."""
    _, metrics = run_updates(
        small_rnn_args(**ONE_STEP | VARIANTS[case]),
        make_env(env),
        1,
        6,
    )
    assert metrics["policy/log_ratio_max"] < 1e-5
    assert metrics["grad/norm"] > 1e-3


class CountingCritic(nn.Module):
    """V = 100 id + how many steps of the episode it remembers."""

    args: ppo_rnn.Args
    obs_space: object

    def __call__(self, inputs, memory):
        def step(count, first):
            count = jnp.where(first, 0.0, count + 1)
            return count, count

        _, counts = jax.lax.scan(step, memory[0][0][:, 0], inputs.first)
        counted = jnp.broadcast_to(counts[..., None], (*counts.shape, SIZE))
        return 100 * inputs.obs[..., 0] + counts, ((counted,),)


@pytest.mark.parametrize("num_seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_x6_bootstrap_with_the_memory_from_before_the_reset(monkeypatch, num_seeds):
    args = small_rnn_args(num_seeds=num_seeds, rnn_size=SIZE)
    for _, value, next_value, terminated, truncated in calls_of_gae(
        monkeypatch,
        args,
        CountingCritic,
        3,
    ):
        assert (truncated & ~terminated).sum() > 5
        rests = set(np.unique(value % 100))
        assert rests == {0, 1, 2, 3, 4}
        # the same episode, remembered for one step more
        assert_array_equal(next_value[~terminated], value[~terminated] + 1)
        over = (terminated | truncated)[:-1]
        assert_array_equal(value[1:][over] % 100, 0)


@pytest.mark.slow
def test_what_is_left_of_an_environment_without_velocities():
    key = jax.random.key(1)
    for name, seen in (("CartPole-v1", [0, 2]), ("Pendulum-v1", [0, 1])):
        envs = make_env(name), make_env(f"pmaprl:Partial{name}")
        whole, part = (
            env.step(key, env.reset(key)[1], jnp.ones(env.action_space.shape, int)) for env in envs
        )
        assert part.obs.tolist() == whole.obs[jnp.array(seen)].tolist()
        assert part.reward == whole.reward


def test_the_beginning_of_an_episode_empties_the_memory_of_a_policy(trained):
    policy = load_policy(trained("memory")[0])
    first = np.array([True, False, True])
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(3, 2)).astype(np.float32)
    empty = policy.initial_memory(3)
    ones = jax.tree.map(lambda x: x + 1, empty)
    both = (policy(obs, x, first, reward=np.ones(3))[1] for x in (empty, ones))
    leaves = (jax.tree.leaves(memory.actor) for memory in both)
    for one, other in zip(*leaves, strict=True):
        differs = np.any(one != other, axis=1)
        assert differs.tolist() == [False, True, False]
