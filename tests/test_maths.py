"""Golden values and hand-computed numbers for the small pieces of mathematics."""

import dataclasses
import math
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers import make_env, over_devices, ppo, pqn, run_updates, small_args
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl.device.interface import PolicyInput, Rollout
from pmaprl.device.keys import action_noise
from pmaprl.device.optim import (
    AdamState,
    adapt_learning_rate,
    apply_schedules,
    hparams_of,
    run_epochs,
)
from pmaprl.device.sharding import AXIS
from pmaprl.envs.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from pmaprl.nets import QHead, epsilon_greedy
from pmaprl.nets.distributions import Categoricals, Joint, Normal, PolicyHead, encode_action
from pmaprl.nets.normalizers import Normalizer, popart, rescale_output, running_stats
from pmaprl.nets.returns import ValueDistribution, project
from pmaprl.nets.torso import BatchNorm

REWARD = [1, -0.5, 2, 0, 1]
VALUE = [0.2, 0.4, -0.1, 0.8, 0.3]
BOOTSTRAP = 0.6


def outcomes(ends):
    """Rewards, values of the next observations and ends of five steps, [5, 1]; `ends` names those
    of the third one.
    """
    next_value = [0.4, -0.1, 0.8 if ends == "no end" else 0.7, 0.3, BOOTSTRAP]
    flags = ((np.arange(5) == 2) & (kind in ends) for kind in ("terminated", "truncated"))
    outputs = (np.float32(REWARD), np.float32(next_value), *flags)
    return [jnp.asarray(x)[:, None] for x in outputs]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("no end", [3.4085205, 2.3524939, 3.5635236, 0.714007, 1.294]),
        ("terminated", [2.113975, 0.97605, 2.1, 0.714007, 1.294]),
        ("truncated", [2.7269614, 1.6278165, 2.793, 0.714007, 1.294]),
        # Whatever the last value
        ("terminated and truncated", [2.113975, 0.97605, 2.1, 0.714007, 1.294]),
    ],
)
def test_gae_golden_values(ends, expected):
    reward, *others = outcomes(ends)
    gae = ppo.gae(
        reward,
        jnp.float32(VALUE)[:, None],
        *others,
        0.99,
        0.95,
    )
    assert_allclose(gae[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("no end", [2.03855, 1.3985237, 3.0041549, 1.129689, 1.594]),
        ("terminated", [1.6227372, 0.75235, 2.0, 1.129689, 1.594]),
        ("truncated", [1.9097032, 1.1982955, 2.693, 1.129689, 1.594]),
        ("terminated and truncated", [1.6227372, 0.75235, 2.0, 1.129689, 1.594]),
    ],
)
def test_q_lambda_golden_values(ends, expected):
    returns = pqn.q_lambda_returns(*outcomes(ends), 0.99, 0.65)[:, 0]
    assert_allclose(returns, expected, rtol=1e-6)


def test_final_values_are_put_in_for_none_to_all_also_under_vmap():
    random = np.random.default_rng(1)
    draws = random.random((5, 6, 4))
    chances = np.array([0, 0.05, 0.3, 0.8, 1.1])
    threshold = chances[:, None, None]
    cut = draws < threshold
    # A termination too, whose next value does not count
    both = cut & (random.random(cut.shape) < 0.2)
    value = jnp.asarray(random.normal(size=(5, 6, 4)))
    final_obs = jnp.asarray(random.normal(size=(5, 6, 4, 1)))
    last = jnp.asarray(random.normal(size=(5, 4, 1)))

    def fill(value, cut, both, last, final_obs):
        ends = {
            "terminated": both,
            "truncated": cut,
            "final_obs": final_obs,
            "last": PolicyInput.at_start(last),
            "memory": (),
        }

        def doubled(obs):
            return 10 * obs[..., 0]

        return Rollout(*[None] * 4, **ends).next_values(value, doubled)

    at_the_end = 10 * last[:, None, :, 0]
    following = np.concatenate([value[:, 1:], at_the_end], axis=1)
    of_the_end = 10 * final_obs[..., 0]
    wanted = np.where(cut & ~both, of_the_end, following)
    found = jax.vmap(fill)(value, cut, both, last, final_obs)
    assert_array_equal(found, wanted)
    for i in range(5):
        compiled = jax.jit(fill)(value[i], cut[i], both[i], last[i], final_obs[i])
        assert_array_equal(compiled, wanted[i])
        without_ends = fill(value[i], cut[i], both[i], last[i], None)
        assert_array_equal(without_ends, following[i])


def test_losses():
    assert_allclose(ppo.ratio_bounds(0.1, "ppo"), (0.9, 1.1))
    bounds = ppo.ratio_bounds(0.1, "symmetric")
    assert_allclose(bounds, (0.9090909, 1.1), rtol=1e-7)
    ratio = jnp.array([1.0, 1.5, 0.5, 1.5, 0.5])
    advantage = jnp.array([2.0, 1.0, 1.0, -1.0, -1.0])
    # minimum of unclipped and clipped: 2, 1.2, 0.5, -1.5, -0.8
    policy_losses = ppo.policy_loss(ratio, advantage, (0.8, 1.2))
    assert_allclose(policy_losses, [-2, -1.2, -0.5, 1.5, 0.8])
    value = jnp.array([1.0, 0.0, 3.0])
    old = jnp.array([0.0, 0.0, 3.1])
    target = jnp.array([2.0, 1.0, 3.0])
    unclipped = ppo.value_loss(value, old, target, None)
    assert_allclose(unclipped, [0.5, 0.5, 0])
    # the clipped predictions are 0.2, 0 and 3: errors 1.8^2, 1, 0
    clipped = ppo.value_loss(value, old, target, 0.2)
    assert_allclose(clipped, [0.5 * 1.8**2, 0.5, 0], rtol=1e-6)


def test_no_epoch_counts_after_one_that_moves_the_policy_too_far():
    table = [[0.1, 0.1], [0.1, 0.3], [0.1, 0.1]]
    divergences = jnp.array(table)

    def step(carry, kl):
        params, steps = carry
        measured = {"policy/approx_kl": kl, "steps_max": steps + 1}
        return (params, steps + 1), measured

    for target, epochs in (
        (0.0, 3),
        (0.15, 2),
        (0.05, 1),
        (jnp.float32(0), 3),
        (jnp.float32(0.15), 2),
    ):
        (_, steps), metrics = run_epochs(
            step,
            ({}, jnp.float32(0)),
            divergences,
            target,
        )
        assert steps == metrics["steps_max"] == 2 * metrics["policy/epochs"] == 2 * epochs
        assert metrics["policy/approx_kl"] == pytest.approx(
            float(divergences[:epochs].mean()),
            rel=1e-5,
        )


def test_adapt_learning_rate():
    def adapted(rate, kl, **flags):
        hparams = hparams_of(
            small_args(**{"lr_schedule": "kl-adaptive", "desired_kl": 0.01} | flags)
        )
        state = AdamState(jnp.zeros(2), jnp.float32(rate))
        adapt = jax.vmap(
            lambda kl: adapt_learning_rate(state, kl, hparams), axis_name=AXIS, axis_size=2
        )
        on_two_devices = adapt(jnp.array([0.5 * kl, 1.5 * kl]))
        assert jnp.array_equal(on_two_devices.moments, jnp.zeros((2, 2)))
        assert jnp.ptp(on_two_devices.learning_rate) == 0
        return on_two_devices.learning_rate[0]

    for kl, expected in (
        (0.021, 1e-3 / 1.5),
        (0.004, 1.5e-3),
        (0.01, 1e-3),
        (0.02, 1e-3),
        (0.005, 1e-3),
    ):
        assert adapted(1e-3, kl) == pytest.approx(expected, rel=1e-6)
    assert adapted(9e-3, 0.0) == pytest.approx(1e-2)
    assert adapted(1.2e-6, 1.0) == pytest.approx(1e-6)
    assert adapted(1e-3, 1.0, lr_schedule="linear") == jnp.float32(1e-3)


@pytest.mark.parametrize("swept", [{}, {"ent_coef": jnp.float32(0.4)}], ids=["alone", "member"])
def test_entropy_coefficient_falls_in_a_line(swept):
    args = small_args(
        ent_coef=0.2,
        ent_fraction=0.5,
        total_timesteps=8 * small_args().steps_per_update,
    )
    updates = jnp.arange(6)  # of eight
    run = SimpleNamespace(updates=updates, member_values=swept)
    start = swept.get("ent_coef", 0.2)
    falling = np.array([1, 0.75, 0.5, 0.25, 0, 0])
    expected = start * falling
    hparams, scheduled = apply_schedules(args, run, learner=None)
    assert_allclose(hparams.ent_coef, expected, rtol=1e-6)
    assert scheduled["ent_coef"] is hparams.ent_coef
    rates = args.learning_rate * (1 - updates / 8)
    assert_allclose(scheduled["learning_rate"], rates, rtol=1e-6)
    steady = dataclasses.replace(args, ent_fraction=0.0)
    assert "ent_coef" not in apply_schedules(steady, run, learner=None)[1]


def test_ratio_of_the_first_minibatch_is_one():
    sizes = {
        "update_epochs": 1,
        "num_minibatches": 1,
        "hidden_sizes": (8,),
    }
    args = small_args(
        **sizes,
        clip_eps=1e-5,
        learning_rate=0.01,
        normalize_obs=True,
    )
    _, metrics = run_updates(args, make_env("CartPole-v1"), 1, 3)
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/approx_kl"] > 1e-6, "after that step the policy is another"


LOGITS = np.array([0.5, -1.0, 2.0, 0.3, 0.1], np.float32)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def test_categorical_against_numpy():
    policy = Categoricals(jnp.asarray(LOGITS), (5,), scalar=True)
    p = softmax(LOGITS)
    alone = [policy.log_prob(jnp.int32(i)) for i in range(5)]
    assert_allclose(alone, np.log(p), rtol=1e-5)
    assert policy.mode() == 2
    assert policy.mode().shape == ()

    policy = Categoricals(jnp.asarray(LOGITS), (2, 3), scalar=False)
    p = softmax(LOGITS[:2])
    q = softmax(LOGITS[2:])
    log_probs = [[policy.log_prob(jnp.array([i, j])) for j in range(3)] for i in range(2)]
    expected = np.log(p)[:, None] + np.log(q)
    assert_allclose(log_probs, expected, rtol=1e-5)
    entropy = -(p * np.log(p)).sum() - (q * np.log(q)).sum()
    assert_allclose(policy.entropy(), entropy, rtol=1e-5)
    assert_array_equal(policy.mode(), [0, 0])


@pytest.mark.parametrize("legal", [None, [True, True, False, True, False]], ids=["all", "masked"])
def test_epsilon_greedy_explores_with_probability_epsilon_among_what_is_legal(legal):
    obs = {} if legal is None else {"action_mask": jnp.array(legal)}
    layer = {"kernel": np.eye(5), "bias": np.zeros(5)}
    params = {"params": {"Dense_0": layer}}
    q = QHead(5).apply(params, LOGITS, obs)
    best, count = (2, 5) if legal is None else (0, 3)
    floor = np.full(5, 0.3 / count)
    allowed = 1 if legal is None else np.array(legal)
    favour = 0.7 * (np.arange(5) == best)
    expected = floor * allowed + favour
    policy = epsilon_greedy(q, 0.3, obs)
    below_one = 1 - 2**-24
    grid = np.linspace(2**-24, below_one, 100_001, dtype=np.float32)
    noise = grid[:, None]
    picks = jax.vmap(policy.sample)(noise)
    frequencies = np.bincount(picks, minlength=5) / len(noise)
    assert_allclose(frequencies, expected, atol=1e-4)
    greedy = epsilon_greedy(q, 0.0, obs)
    assert policy.mode() == best
    drawn = jax.vmap(greedy.sample)(noise)
    assert set(drawn.tolist()) == {best}


@pytest.mark.parametrize(
    "space",
    [Discrete(5), MultiDiscrete((2, 3))],
    ids=["discrete", "multidiscrete"],
)
def test_sample_frequencies(space):
    policy = Categoricals(jnp.asarray(LOGITS), space.nvec, scalar=isinstance(space, Discrete))
    keys = jax.random.split(jax.random.key(0), 40_000)

    def sample(key):
        return policy.sample(action_noise(key, space))

    drawn = np.asarray(jax.vmap(sample)(keys))
    samples = drawn.reshape(len(keys), -1)
    edges = np.cumsum([0, *space.nvec])
    for i, n in enumerate(space.nvec):
        counts = np.bincount(samples[:, i], minlength=n)
        frequencies = counts / len(keys)
        part = LOGITS[edges[i] : edges[i + 1]]
        assert_allclose(frequencies, softmax(part), atol=0.01)
    at_the_ends = (0.0, 1 - 2**-24)
    noises = (jnp.full(action_noise(keys[0], space).shape, x, jnp.float32) for x in at_the_ends)
    largest = [np.max(policy.sample(noise)) for noise in noises]
    wanted = [0, max(space.nvec) - 1]
    assert largest == wanted, "at both ends of the noise"
    if len(space.nvec) == 2:
        assert abs(np.corrcoef(samples.T)[0, 1]) < 0.02


def test_symmetric_kl_to_uniform():
    tilted = [0.7, 0.1, 0.1, 0.1]
    for logits, nvec, wanted in (
        (tilted, (4,), 1),
        (tilted * 2, (4, 4), 2),
        ([1] * 4, (4,), 0),
    ):
        log_probs = jnp.log(jnp.array(logits))
        policy = Categoricals(log_probs, nvec, scalar=len(nvec) == 1)
        assert policy.symmetric_kl_to_uniform() == pytest.approx(
            wanted * 0.4378298,
            rel=1e-6,
            abs=1e-7,
        )


def of_normals():
    """Two policies of two dimensions, and a KL divergence for each, by integrals over actions."""
    means = np.array([[0.3, -1.0], [0.1, 0.5]])
    stds = np.array([[0.6, 1.2], [0.9, 0.4]])
    pairs = zip(means, stds, strict=True)
    policies = [Normal(jnp.float32(mean), jnp.float32(np.log(std))) for mean, std in pairs]
    u = np.linspace(-12, 12, 100_001)[:, None]
    scaled = (u - means[:, None]) / stds[:, None]
    scale = stds[:, None] * math.sqrt(2 * math.pi)
    p, q = np.exp(-0.5 * scaled**2) / scale
    density = p * np.log(p / q)
    return *policies, np.trapezoid(density, u, axis=0).sum()


def of_choices(nvec, legal=None):
    """Two policies, and the sum of the KL divergences of their components."""
    legal = np.ones(5, bool) if legal is None else np.array(legal, bool)
    second = np.array([3.0, 0.2, -1.0, 0.4, 1.5], np.float32)
    both = LOGITS, second
    policies = [
        Categoricals(jnp.asarray(x), nvec, scalar=len(nvec) == 1).only(jnp.asarray(legal))
        for x in both
    ]
    value = 0
    ends = np.cumsum(nvec)[:-1]
    for component in np.split(np.arange(5), ends):
        p, q = (softmax(x[component][legal[component]]) for x in both)
        value += np.sum(p * np.log(p / q))
    return *policies, value


def test_kl_divergences_and_probabilities_of_own_components_alone():
    """Policies of every kind have gradients that are finite, and zero where both are the same."""
    cases = [
        of_normals(),
        of_choices((5,)),
        of_choices((2, 3)),
    ]
    cases += [
        of_choices((5,), [1, 0, 1, 0, 1]),
        of_choices((2, 3), [1, 0, 0, 1, 1]),
        of_choices((5,), [0, 0, 1, 0, 0]),
    ]
    pairs = [case[:2] for case in cases]
    values = [case[2] for case in cases]
    joint = [Joint({"a": (pairs[0][i], pairs[4][i]), "b": pairs[1][i]}) for i in range(2)]
    pairs.append(joint)
    of_joint = values[0] + values[1] + values[4]
    all_values = [*values, of_joint]
    for (policy, other), value in zip(pairs, all_values, strict=True):
        assert_allclose(
            policy.kl(other),
            value,
            rtol=1e-4,
            atol=1e-7,
        )
        assert policy.kl(policy) == 0
        cases_of_policy = ((other, value == 0), (policy, True))
        for second, is_zero in cases_of_policy:

            def divergence(p, q):
                return p.kl(q)

            gradients = jax.grad(divergence, (0, 1), allow_int=True)(policy, second)
            leaves = jax.tree.leaves(gradients)
            moved = [np.abs(x).max() for x in leaves if x.dtype == np.float32]
            assert np.isfinite(moved).all()
            assert (np.max(moved) < 1e-6) == is_zero
    drawn = policy.sample_with_key(jax.random.key(0))  # of the last pair, several parts
    best = policy.mode()
    shapes = jax.tree.map(jnp.shape, drawn)
    shapes_of_best = jax.tree.map(jnp.shape, best)
    assert shapes == shapes_of_best
    assert drawn["a"][1].dtype == jnp.int32
    counted = jnp.array([True, False])
    normals = [Normal(x.mean[:1], x.log_std[:1]) for x in pairs[0]]
    choices = [Categoricals(x.logits[:2], (2,), True) for x in pairs[2]]
    kinds = ((*pairs[0], normals), (*pairs[2], choices))
    for policy, other, first in kinds:
        whole = policy.replace(counted=counted)
        mine = first[0]
        same_but_counted = other.replace(counted=counted)
        for one, two in ((whole, other), (policy, same_but_counted)):
            alone = mine.kl(first[1])
            assert_allclose(one.kl(two), alone, rtol=1e-6)
        found = whole.log_prob(policy.mode())
        expected = mine.log_prob(mine.mode())
        assert_allclose(found, expected, rtol=1e-6)
        for measure in ("entropy", "symmetric_kl_to_uniform")[
            : 1 if isinstance(mine, Normal) else 2
        ]:
            measured = getattr(whole, measure)()
            expected = getattr(mine, measure)()
            assert_allclose(measured, expected, rtol=1e-6)


def test_normal_against_numpy():
    mean = np.array([0.3, -1.0])
    log_std = np.array([-0.5, 0.2])
    action = np.array([0.8, 1.5])
    policy = Normal(jnp.asarray(mean), jnp.asarray(log_std))
    std = np.exp(log_std)
    exponent = -0.5 * ((action - mean) / std) ** 2
    normalizer = np.log(std * math.sqrt(2 * math.pi))
    log_density = exponent - normalizer
    log_prob = policy.log_prob(jnp.asarray(action))
    assert_allclose(log_prob, log_density.sum(), rtol=1e-6)
    variance = 2 * math.pi * math.e * std**2
    entropy = 0.5 * np.log(variance)
    assert_allclose(policy.entropy(), entropy.sum(), rtol=1e-6)
    assert_allclose(policy.mode(), mean, rtol=1e-6)

    box = Box(-np.ones(2), np.ones(2), (2,))
    keys = jax.random.split(jax.random.key(0), 40_000)

    def sample(key):
        return policy.sample(action_noise(key, box))

    samples = jax.vmap(sample)(keys)
    assert_allclose(samples.mean(0), mean, atol=0.02)
    assert_allclose(samples.std(0), std, rtol=0.02)


def test_a_normal_policy_is_in_units_of_the_bounds():
    """Units are those of each dimension, where both bounds are finite; entropies and ratios are
    those of the same policy within -1 .. 1.
    """
    low = np.array([-100, 0, -np.inf, 3, -3e38], np.float32)
    high = np.array([100, 0.5, 1, 3, 3e38], np.float32)
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(2, 4, 5)).astype(np.float32)
    head = PolicyHead(Box(low, high, (5,)))
    scale = np.array([100, 0.25, 1, 1, 1])
    policy, params = head.init_with_output(jax.random.key(0), x)
    unit_box = Box(-np.ones(5), np.ones(5), (5,))
    plain = PolicyHead(unit_box).apply(params, x)
    assert policy.entropy().tolist() == plain.entropy().tolist()
    modes = (policy.mode(), plain.mode())
    samples = (policy.sample(noise), plain.sample(noise))
    for ours, units in (modes, samples):
        offset = np.array([0, 0.25, 0, 0, 0])
        assert_allclose(ours, units * scale + offset, rtol=1e-5)
        assert_allclose(policy.log_prob(ours), plain.log_prob(units), rtol=1e-4)
        assert_allclose(encode_action(ours, head.space), units, rtol=1e-4)


@pytest.mark.parametrize("devices", [1, 4])
def test_running_statistics_equal_numpy(devices):
    """Device shares have very different means: a mean of variances would be wrong."""
    random = np.random.default_rng(0)
    batches = [
        random.normal(5 * i, 1 + i, (8, 3, 2)) + 10 * np.arange(8)[:, None, None] for i in range(4)
    ]
    stats = running_stats((2,))
    two = jnp.array([1.5, -2.0])
    assert_array_equal(stats.normalize(two), [1.5, -2.0])
    for batch in batches:
        merged = over_devices(stats.merge, devices, jnp.float32(batch))
        for leaf in jax.tree.leaves(merged):
            assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
        stats = jax.tree.map(lambda x: x[0], merged)
    everything = np.concatenate(batches).reshape(-1, 2)
    assert stats.count == len(everything)
    wanted = [everything.mean(0), everything.std(0)]
    assert_allclose([stats.mean, stats.std], wanted, rtol=1e-5)
    normal = stats.normalize(jnp.float32(everything))
    moments = [normal.mean(0), normal.std(0)]
    assert_allclose(moments, [[0, 0], [1, 1]], atol=1e-4)
    far = jnp.full((2,), 1e6)
    assert stats.normalize(far).max() == 10
    valid = np.arange(24).reshape(8, 3) % 5 > 0
    some = over_devices(
        running_stats((2,)).merge,
        devices,
        jnp.float32(batches[1]),
        valid,
    )
    some = jax.tree.map(lambda x: x[0], some)
    chosen = batches[1][valid]
    assert some.count == len(chosen)
    wanted = [chosen.mean(0), chosen.std(0)]
    assert_allclose([some.mean, some.std], wanted, rtol=1e-5)


@pytest.mark.parametrize("count", [2**24, 2**28, 2**32 - 1, 10**10])
def test_running_statistics_count_single_samples_after_billions(count):
    low = jnp.uint32(count % 2**32)
    high = jnp.uint32(count // 2**32)
    words = {"count": low, "count_high": high}
    stats = running_stats(()).replace(
        mean=jnp.float32(3),
        m2=jnp.float32(count),
        **words,
    )

    def merge_a_thousand(stats):

        def step(i, stats):
            return stats.merge(3.0 + 2 * (i % 2) - jnp.ones(1))

        return jax.lax.fori_loop(
            0,
            1024,
            step,
            stats,
        )

    alone = jax.tree.map(lambda x: x[None], stats)

    def body(stats):
        return merge_a_thousand(jax.tree.map(lambda x: x[0], stats))

    after = over_devices(body, 1, alone)

    def first(x):
        return np.float64(x[0])

    after = jax.tree.map(first, after)
    assert after.count + 2**32 * after.count_high == count + 1024
    assert_allclose(after.m2 + after.m2_rest - count, 1024, rtol=1e-3)
    assert_allclose(after.mean + after.mean_rest, 3, atol=1e-6)


def merged(stats, batch, valid):
    """The statistics after a batch on one device; compiled for all statistics, not for these as
    constants.
    """

    def leading(x):
        return x[None]

    alone = jax.tree.map(leading, (stats, batch))

    def merge(old, new):
        before = jax.tree.map(lambda x: x[0], old)
        return before.merge(new[0], valid)

    after = over_devices(merge, 1, *alone)
    return jax.tree.map(lambda x: x[0], after)


@pytest.mark.parametrize("valid", [None, np.arange(64) % 3 > 0])
@pytest.mark.parametrize(
    ("mean", "std", "kind"),
    [
        (1e8, 577_350, np.int32),
        (1.7e9, 10, np.int32),
        (4e9, 1000, np.uint32),
        (1e6, 1, np.float32),
        (200, 9, np.uint8),
    ],
)
def test_running_statistics_are_right_far_from_zero(mean, std, kind, valid):
    rng = np.random.default_rng(0)
    batches = rng.normal(mean, std, (3, 64, 1)).astype(kind)
    stats = running_stats((1,))
    for batch in batches:
        stats = merged(stats, batch, valid)
    rows = slice(None) if valid is None else valid
    seen = batches[:, rows].astype(float)
    normal = (batches[0] - seen.mean()) / seen.std()
    found = stats.normalize(jnp.asarray(batches[0]))
    assert_allclose(found, normal, atol=1e-3)
    as_constants = jax.jit(stats.normalize)  # as in an exported policy
    constants = as_constants(jnp.asarray(batches[0]))
    assert_allclose(constants, normal, atol=1e-3)


def test_half_precision_and_bools_are_summed_in_single_precision():
    huge = np.full((4096, 1), 60_000, np.float16)
    ones = np.ones((4096, 1), bool)
    for batch in (huge, ones):
        stats = merged(running_stats((1,)), batch, np.ones(4096, bool))
        assert_allclose(stats.mean, batch[0].astype(float), rtol=1e-6)


def test_new_units_leave_predictions_as_they_are():
    network = ppo.Critic(
        small_args(hidden_sizes=(5,)),
        EnvSpec(
            name="",
            observation_space=Box(None, None, (3,)),
            obs_dtype=np.float32,
            action_space=None,
        ),
    )
    x = jnp.linspace(-2, 2, 12).reshape(4, 3)
    params = network.init(jax.random.key(0), x)
    empty = running_stats(()).replace(count=jnp.uint32(9))
    pairs = ((-300, 40), (5, 0.01))
    old, new = (
        empty.replace(mean=jnp.float32(mean), m2=jnp.float32(9 * std**2)) for mean, std in pairs
    )
    rescaled = rescale_output(params, "value", old, new)
    both = ((old, params), (new, rescaled))
    before, after = (stats.denormalize(network.apply(p, x)) for stats, p in both)
    assert_allclose(before, after, rtol=1e-5)
    apart = network.apply(params, x) - network.apply(rescaled, x)
    assert abs(apart).min() > 0.1
    # A layer by another name would keep predicting in old units
    with pytest.raises(ValueError, match="head"):
        rescale_output(params, "head", old, new)


class Values(struct.PyTreeNode):
    params: dict
    return_stats: Normalizer


class Samples(NamedTuple):
    value: jax.Array
    target: jax.Array
    advantage: jax.Array


@pytest.mark.parametrize(("spread", "std"), [(0.0, 30.0), (0.1, 30.0), (1.0, 1.0), (5.0, 5.0)])
def test_the_first_values_are_not_far_from_targets_without_spread(spread, std):
    """Equal rewards make equal targets where each is the sum of as many of them."""
    head = {"value": {"kernel": jnp.zeros((2, 1)), "bias": jnp.zeros(1)}}
    learner = Values({"params": head}, Normalizer.of_numbers())
    targets = 30 + spread * jnp.array([-1.0, 1.0, 1.0, -1.0])
    batch = Samples(value=jnp.zeros(4), target=targets, advantage=targets)
    several = jax.tree.map(lambda x: x[None], (learner, batch))
    moved, samples = jax.vmap(popart, axis_name=AXIS)(*several)
    assert_allclose(moved.return_stats.std[0], std, rtol=1e-3)
    assert_allclose(samples.advantage[0], targets / std, rtol=1e-3)
    value = moved.return_stats.stats.denormalize(moved.params["params"]["value"]["bias"][0])
    assert_allclose(value, 0, atol=1e-4)
    # Later batches count as they are
    again = samples._replace(target=targets[None] + 2)
    later, _ = jax.vmap(popart, axis_name=AXIS)(moved, again)
    all_targets = np.concatenate([targets, targets + 2])
    variance = np.var(all_targets) + (std > spread) * std**2 / 2
    assert_allclose(later.return_stats.std[0], np.sqrt(variance), rtol=1e-2)


@pytest.mark.parametrize(("renorm", "warmup"), [(False, 0), (True, 1), (True, 2)])
@pytest.mark.parametrize("devices", [1, 4])
def test_batches_are_normalized_by_the_samples_of_all_devices_or_by_running_averages(
    renorm, warmup, devices
):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (8, 3)).astype(np.float32)
    average, variance = np.float32([[1, 2, -30], [4, 0.01, 3]])
    moments = np.stack([average, variance])
    start = {"averages": moments, "batches": np.float32(1)}
    layer = BatchNorm(renorm, warmup=warmup)
    variables = layer.init(jax.random.key(0), x) | {"batch_stats": start}

    def apply(x):
        return layer.apply(variables, x, train=True, mutable="batch_stats")

    y, new = over_devices(apply, devices, x)
    of_batch = np.sqrt(x.var(0) + 1e-3)
    usual = np.sqrt(variance + 1e-3)
    r = np.clip(of_batch / usual, 1 / 3, 3)
    shift = (x.mean(0) - average) / usual
    d = np.clip(shift, -5, 5)
    r, d = (r, d) if renorm and warmup == 1 else (1.0, 0.0)  # after one batch
    expected = (x - x.mean(0)) / of_batch * r + d
    assert_allclose(np.reshape(y, (8, 3)), expected, atol=1e-4)
    moments_of_batch = np.stack([x.mean(0), x.var(0)])
    averages = 0.99 * start["averages"] + 0.01 * moments_of_batch
    for running in new["batch_stats"]["averages"]:
        assert_allclose(running, averages, rtol=1e-5)
    expected = (x - average) / usual
    assert_allclose(layer.apply(variables, x), expected, rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("mean", [3, 1e3, 1e4])
def test_batches_far_from_zero_are_normalized(mean, devices):
    rng = np.random.default_rng(0)
    x = rng.normal(mean, 1, (256, 3)).astype(np.float32)
    layer = BatchNorm()
    variables = layer.init(jax.random.key(0), x)

    def apply(x):
        return layer.apply(variables, x, train=True, mutable="batch_stats")

    y, new = over_devices(apply, devices, x)
    exact = x.astype(float)
    spread = np.sqrt(exact.var(0) + 1e-3)
    normal = (exact - exact.mean(0)) / spread
    tolerance = 2e-2 if mean == 1e4 else 1e-3
    assert_allclose(np.reshape(y, (256, 3)), normal, atol=tolerance)
    variance = new["batch_stats"]["averages"][0, 1]
    assert_allclose(variance, 0.99 + 0.01 * exact.var(0), rtol=1e-4)


def test_gradients_go_through_the_mean_and_the_deviation_of_a_batch():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(3, 2, (2, 8, 3)).astype(np.float32)
    layer = BatchNorm()
    variables = layer.init(jax.random.key(0), x)

    def total(x):
        normalized = layer.apply(variables, x, train=True, mutable="batch_stats")[0]
        return jnp.sum(weight * normalized)

    def wanted(x):
        spread = jnp.sqrt(x.var(0) + layer.epsilon)
        return jnp.sum(weight * (x - x.mean(0)) / spread)

    found = over_devices(jax.grad(total), 1, x)[0]
    assert_allclose(found, jax.grad(wanted)(x), atol=1e-4)


def test_a_distribution_of_returns_is_shared_by_neighbours_and_chosen_by_its_mean():
    rng = np.random.default_rng(0)
    # Two of 3 actions over -2, -1, ..., 2
    logits_of_two = rng.normal(size=(2, 6, 3, 5)).astype(np.float32)
    q = ValueDistribution.of(logits_of_two, -2.0, 2.0)
    least = q.smallest()
    probs = jax.nn.softmax(rng.normal(size=(6, 3)))
    expected = np.min(q.mean(), axis=0)
    assert_allclose(least.mean(), expected, rtol=1e-6)
    value = least.expected(probs)
    weighted = probs * least.mean()
    assert_allclose(value.mean(), np.sum(weighted, axis=-1), rtol=1e-5)
    moved = value.replace(atoms=1.5 * value.atoms + 0.3)
    shared = np.zeros((6, 5))
    for row, atoms, weights in zip(
        shared,
        np.clip(moved.atoms, -2, 2) + 2,
        jax.nn.softmax(moved.logits),
        strict=True,
    ):
        for atom, weight in zip(atoms, weights, strict=True):
            row[math.floor(atom)] += weight * (1 - atom % 1)
            row[math.ceil(atom)] += weight * (atom % 1)
    found = project(jax.nn.softmax(moved.logits), moved.atoms, -2.0, 2.0)
    assert_allclose(found, shared, atol=1e-6)
    picks = [0, 1, 2, 0, 1, 2]
    taken = q.of_actions(jnp.array(picks))
    log_softmax = jax.nn.log_softmax(q.logits)
    logs = log_softmax[:, np.arange(6), [0, 1, 2, 0, 1, 2]]
    cross_entropy = -np.sum(shared * logs, axis=-1)
    assert_allclose(taken.error(moved), cross_entropy, rtol=1e-5)
    of_state = [[0.0, -200.0, 0.0], [0.0, -150.0, 1.0]]
    rare = ValueDistribution.of(jnp.array([of_state]), -1.0, 1.0)

    def mean(logits):
        return jnp.sum(rare.expected(jax.nn.softmax(logits)).mean())

    gradient = jax.grad(mean)(jnp.zeros((1, 2)))
    finite = np.isfinite(gradient)
    assert finite.all() and np.any(gradient != 0), "what rounds to 0 has a gradient all the same"
