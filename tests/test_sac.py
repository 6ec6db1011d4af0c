"""SAC: its maths, its replay buffer, its accounting, and the promises that every algorithm
keeps.
"""

from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    functions_of,
    make_env,
    metric_rows,
    programs,
    relative_difference,
    run_updates,
    sac,
    small_sac_args,
)
from numpy.testing import assert_allclose, assert_array_equal

import pmaprl.device.programs
from pmaprl.device.drivers import with_returns
from pmaprl.device.interface import Actors, Transition
from pmaprl.device.programs import over_devices
from pmaprl.device.replay import Replay, new_replay
from pmaprl.device.state import to_devices, to_host
from pmaprl.nets.distributions import SquashedNormal


@pytest.mark.parametrize("u", [-20.0, -3.0, 0.0, 0.8, 5.0, 20.0])
def test_squashed_normal_is_exact_where_tanh_saturates_too(u):
    policy = SquashedNormal(jnp.array([0.3]), jnp.array([-0.5]))
    noise = (u - policy.mean) / jnp.exp(policy.log_std)
    action, log_prob = policy.sample_with_log_prob(noise)
    slope = np.log(4) - 2 * u - 2 * np.logaddexp(0, -2 * u)
    scaled = (u - 0.3) * np.exp(0.5)
    exact = -0.5 * scaled**2 + 0.5 - 0.5 * np.log(2 * np.pi) - slope
    assert log_prob == pytest.approx(exact, rel=1e-5)
    assert action[0] == policy.sample(noise)[0] == pytest.approx(np.tanh(u), abs=1e-6)
    assert policy.mode()[0] == pytest.approx(np.tanh(0.3))


def dense(x, layer):
    return x @ layer["kernel"] + layer["bias"]


def two_critics(critics, x):
    each = [jax.tree.map(lambda x, i=i: x[i], critics) for i in range(2)]
    return jnp.stack([dense(jnp.tanh(dense(x, q["MLP_0"]["Dense_0"])), q["Dense_0"]) for q in each])


class Box:
    """Pendulum: one action, squashed; densities are within -1 .. 1, although torques are within -2
    .. 2.
    """

    env = "Pendulum-v1"
    wanted_entropy = -1.0

    @staticmethod
    def q(critics, obs, action):
        pairs = jnp.concatenate([obs, action], axis=1)
        return two_critics(critics, pairs)[..., 0]

    @classmethod
    def expected(cls, actor, critics, obs, noise):
        """Expected smaller Q and entropy, [B]."""
        hidden = jnp.tanh(dense(obs, actor["MLP_0"]["Dense_0"]))
        out = dense(hidden, actor["Dense_0"])
        mean = out[:, :1]
        spread = 3.5 * (jnp.tanh(out[:, 1:]) + 1)
        log_std = -5 + spread
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        normal = jnp.exp(-0.5 * noise**2)
        density = normal / jnp.sqrt(2 * jnp.pi) / jnp.exp(log_std) / (1 - action**2)
        least = jnp.min(cls.q(critics, obs, action), axis=0)
        return least, -jnp.log(density)[:, 0]


class Discrete:
    """Three actions, by enumeration."""

    env = "Blink"
    wanted_entropy = 0.5 * np.log(3)

    @staticmethod
    def q(critics, obs, action):
        rows = jnp.arange(len(action))
        return two_critics(critics, obs)[:, rows, action.astype(int)]

    @staticmethod
    def expected(actor, critics, obs, noise):
        hidden = jnp.tanh(dense(obs, actor["MLP_0"]["Dense_0"]))
        logits = dense(hidden, actor["Dense_0"])
        weights = jnp.exp(logits)
        p = weights / jnp.sum(jnp.exp(logits), axis=1, keepdims=True)
        least = jnp.min(two_critics(critics, obs), axis=0)
        return jnp.sum(p * least, axis=1), -jnp.sum(
            p * jnp.log(p),
            axis=1,
        )


def stepped(adam, tree, grads):
    """An optimizer and its state, a list, is changed."""
    moments = adam[1] or adam[0].init(tree)
    updates, adam[1] = adam[0].update(grads, moments)
    return optax.apply_updates(tree, updates)


def updated(
    kind, params: sac.Params, optimizers, transition, noises, args, number: int
) -> sac.Params:
    """Gradient update `number` (from 1), on a batch that holds a single transition many times."""
    obs, action, reward, terminated, next_obs = transition
    next_noise, noise = noises
    alpha = jnp.exp(params.log_alpha[0])
    expected = jax.jit(kind.expected)
    next_q, next_entropy = expected(params.actor, params.targets, next_obs, next_noise)
    target = reward + args.gamma * (1 - terminated) * (next_q + alpha * next_entropy)

    @jax.jit
    @jax.grad
    def q_gradient(critics):
        squares = (kind.q(critics, obs, action) - target) ** 2
        return jnp.sum(jnp.mean(squares, axis=1))

    @jax.jit
    @jax.grad
    def policy_gradient(actor):
        q, entropy = kind.expected(actor, critics, obs, noise)
        return -jnp.mean(q + alpha * entropy)

    critics = stepped(optimizers[0], params.critics, q_gradient(params.critics))
    targets = params.targets
    if number % args.target_frequency == 0:
        targets = jax.tree.map(
            lambda old, new: (1 - args.tau) * old + args.tau * new,
            targets,
            critics,
        )
    if number % args.policy_frequency:
        return sac.Params(
            params.actor,
            critics,
            targets,
            params.log_alpha,
        )
    actor = stepped(optimizers[1], params.actor, policy_gradient(params.actor))
    log_probs = expected(params.actor, critics, obs, noise)[1]
    entropy = jnp.mean(log_probs)
    excess = jnp.array([entropy - kind.wanted_entropy])
    return sac.Params(
        actor,
        critics,
        targets,
        stepped(optimizers[2], params.log_alpha, excess),
    )


@pytest.mark.parametrize(
    ("kind", "updates", "more"),
    [
        (Box, 2, {"lr_schedule": "linear"}),
        (Discrete, 6, {"policy_frequency": 2, "target_frequency": 3}),
    ],
    ids=["box", "discrete"],
)
def test_gradient_updates_are_those_of_the_paper(kind, updates, more):
    flags = {
        "num_envs": 1,
        "batch_size": 6,
        "learning_starts": 0,
        "utd_ratio": 1.0,
    }
    rates = {
        "policy_lr": 0.02,
        "q_lr": 0.03,
        "tau": 0.1,
        "activation": "tanh",
        "hidden_sizes": (3,),
    }
    args = small_sac_args(**flags, **rates, **more, total_timesteps=8)
    args.buffer_size = 1  # less than flags may say, so that the batch is known
    init, update = programs(args, make_env(kind.env), 1)
    state = init()
    trained_params = to_host(state).learner.params[:3]
    trees = (jax.tree.map(lambda x: np.float64(x[0]), tree["params"]) for tree in trained_params)
    before = params = sac.Params(*trees, np.log([0.2]))
    schedules = [optax.linear_schedule(x, x * (kind is Discrete), 8) for x in (0.03, 0.02, 0.03)]
    optimizers = [[optax.adam(schedule), None] for schedule in schedules]
    terminated = 0
    for step in range(updates):
        root = state.run.key[0, 0]
        state, outcome = update(state, np.int32(1))
        metrics = outcome.fetch(1).metrics
        step_key = jax.random.fold_in(root, step)
        learn_key = jax.random.split(step_key)[1]
        group_key = jax.random.fold_in(jax.random.fold_in(learn_key, 0), 0)
        keys = jax.random.split(group_key, 3)[1:]
        noises = [np.float64(jax.random.normal(key, (6, 1))) for key in keys]
        ring = to_host(state).actors.replay.data
        transition = [np.repeat(np.float64(x)[0, 0], 6, axis=0) for x in ring[:5]]
        terminated += transition[3][0]
        with jax.enable_x64(True):
            params = updated(
                kind,
                params,
                optimizers,
                transition,
                noises,
                args,
                step + 1,
            )
    ours = to_host(state).learner.params
    assert metrics["gradient_updates"] == updates
    assert metrics["replay/ratio"] == 1
    assert terminated == (3 if kind is Discrete else 0)
    for name in ("actor", "critics", "targets"):
        theirs = getattr(ours, name)["params"]
        mine = jax.tree.map(lambda x: x[0], theirs)
        assert relative_difference(getattr(params, name), mine) < 3e-5, name
        assert relative_difference(getattr(before, name), mine) > 0.005, f"{name} did not move"
    log_alpha = pytest.approx(float(params.log_alpha[0]), abs=1e-5)
    assert ours.log_alpha[0] == log_alpha


def filled_replay(num_envs: int, capacity: int, steps: int) -> Replay:
    """Rings of the numbers 1000 * env + step."""
    replay = new_replay({"id": jnp.int32(0)}, num_envs, capacity)

    def add_ids(replay, step):
        return replay.add({"id": 1000 * jnp.arange(num_envs) + step})

    add = jax.jit(add_ids)
    for step in range(steps):
        replay = add(replay, step)
    return replay


@pytest.mark.parametrize(("steps", "groups"), [(3, 4), (30, 2)])
def test_sampling_is_uniform_over_the_newest_transitions(steps, groups):
    scipy_stats = pytest.importorskip("scipy.stats")
    replay = filled_replay(4, 8, steps)
    keys = jax.random.split(jax.random.key(1), groups)
    drawn = np.asarray(replay.sample(keys, 40_000 // groups)["id"])
    counts = Counter(drawn.tolist())
    expected = {1000 * env + step for env in range(4) for step in range(max(0, steps - 8), steps)}
    assert set(counts) == expected
    assert scipy_stats.chisquare(list(counts.values())).pvalue > 1e-3
    per_group = drawn.reshape(groups, -1) // 1000 // (4 // groups)
    own_group = per_group == np.arange(groups)[:, None]
    assert own_group.all(), "a group drew from the environments of another"


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
@pytest.mark.parametrize(("num_envs", "num_seeds"), [(1, 1), (4, 3)])
def test_the_buffer_is_updated_in_place(num_envs, num_seeds):
    """The memory that the compiled update needs beside its state is far less than the buffer."""
    flags = {
        "num_envs": num_envs,
        "num_seeds": num_seeds,
        "hidden_sizes": (4,),
        "batch_size": 8,
    }
    args = small_sac_args(**flags, buffer_size=10**6)
    functions_of_args = functions_of(args, make_env("Pendulum-v1"))
    functions = over_devices(functions_of_args, jax.devices()[:1])
    seeds = np.zeros((1, num_seeds), np.int32)
    state = jax.eval_shape(functions.init, seeds)
    memory = (
        functions.update.lower(state, np.int32(0))
        .compile(pmaprl.device.programs._options(1))
        .memory_analysis()
    )
    buffer = 33e6 * num_seeds
    assert memory.alias_size_in_bytes > buffer, "the state is not donated"
    assert memory.temp_size_in_bytes < 0.2 * buffer


@pytest.mark.parametrize(
    ("ratio", "num_envs"),
    [
        (0.12345, 3),
        (1e-5, 16),
        (0.1, 1),
        (0.3, 16),
        (1.7, 3),
        (20.0, 1),
    ],
)
def test_the_ratio_is_exact(ratio, num_envs):
    args = small_sac_args(utd_ratio=ratio, num_envs=num_envs, learning_starts=20)
    steps = range(0, 2000, num_envs)
    exact = [int(Fraction(str(ratio)) * max(step - 20, 0)) for step in steps]
    assert (
        [args.updates_due(step) for step in steps]
        == exact
        == args.updates_due(jnp.array(steps)).tolist()
    )


def actions_of(state) -> np.ndarray:
    actions = to_host(state).actors.replay.data.action
    return actions[0, :, :, 0]  # [N, C]


def test_actions_are_random_until_learning_starts():
    args = small_sac_args(learning_starts=7 * 16, utd_ratio=0.0625)
    init, update = programs(args, make_env("Pendulum-v1"), 1)
    start = init()
    state, *_ = update(start, np.int32(10))
    params = jax.tree.map(lambda x: x + 0.5, start.learner.params)
    moved = start.replace(learner=start.learner.replace(params=params))
    changed, *_ = update(moved, np.int32(10))
    first = actions_of(state)
    second = actions_of(changed)
    assert_array_equal(first[:, :7], second[:, :7])
    acts_apart = first[:, 7:10] != second[:, 7:10]
    assert acts_apart.all(), "the policy does not act after the warm-up"
    uniform = first[:, :7].ravel()
    assert abs(uniform.mean()) < 0.2
    assert uniform.std() == pytest.approx(1 / np.sqrt(3), abs=0.1)


@pytest.mark.slow
def test_a_broken_number_is_noticed_before_it_is_learned_from():
    """The reward is NaN in the warm-up, when nothing is learned yet: the state must not be
    saved.
    """
    args = small_sac_args(learning_starts=16 * 100)
    init, update = programs(args, make_env("Poison"), 1)
    outcome = update(init(), np.int32(50))[1]
    broken = outcome.fetch(50).broken
    found = [broken[f"env/{name}"].tolist() for name in ("reward", "obs_magnitude")]
    assert found == [[40], [-1]]


def test_time_limits_are_not_stored_as_terminations_and_no_reset_is_a_next_observation():
    state, _ = run_updates(
        small_sac_args(buffer_size=16 * 64, learning_starts=32),
        make_env("Endings"),
        2,
        60,
    )
    ring = jax.tree.map(
        lambda x: x[0, :, :60].reshape(-1, *x.shape[3:]),
        to_host(state).actors.replay.data,
    )
    (episode, step), (next_episode, next_step) = ring.obs.T, ring.next_obs.T
    assert_array_equal(episode, next_episode)
    assert_array_equal(step + 1, next_step)
    over = next_step == 3 + episode // 3 % 3
    assert_array_equal(ring.terminated, over & (episode % 3 != 1))
    assert (over & (episode % 3 == 1)).sum() > 20
    assert_allclose(ring.reward, episode % 7 + 0.5 * next_step)


@pytest.mark.usefixtures("shared_programs")
def test_without_the_buffer_checkpoints_are_small_and_a_resumed_run_refills(tmp_path):
    flags = {
        "total_timesteps": 16 * 40,
        "log_interval": 16 * 8,
        "buffer_size": 16 * 10_000,
        "learning_starts": 64,
    }
    flags |= {"stop_after": 16 * 20, "save_buffer": False}
    part = sac.train(small_sac_args(**flags, run_dir=str(tmp_path / "part")))
    resumed = sac.train(sac.Args.from_run(part.run_dir, quiet=True))
    (before,) = [
        row
        for row in metric_rows(part.run_dir)
        if row["env_steps"] == 16 * 20 and "replay/fill" in row
    ]
    filled = [row for row in metric_rows(resumed.run_dir) if "replay/fill" in row]
    last = filled[-1]
    refilled = 16 * 20 - 64  # of the 20 updates after the resume, the first four only refill
    assert last["gradient_updates"] - before["gradient_updates"] == refilled // 8
    assert last["replay/fill"] == pytest.approx(20 / 10_000)


@pytest.mark.slow
def test_after_a_refill_the_policy_acts_not_chance():
    args = small_sac_args()
    init, update = programs(args, make_env("Pendulum-v1"), 1)
    state, *_ = update(init(), np.int32(10))
    host = to_host(state)
    replay = jax.tree.map(np.zeros_like, host.actors.replay)
    emptied = host.replace(actors=host.actors.replace(replay=replay))
    shapes = jax.eval_shape(lambda x: x, state)
    state_again = to_devices(emptied, shapes, jax.devices()[:1])
    refilled, outcome = update(state_again, np.int32(2))
    continued, *_ = update(state, np.int32(2))
    wanted = actions_of(continued)[:, 10]
    assert_array_equal(actions_of(refilled)[:, 0], wanted)
    assert outcome.fetch(2).metrics["gradient_updates"] == args.updates_due(160), (
        "it learned from a buffer that is not refilled"
    )


def test_discounted_returns_begin_with_each_episode_and_make_the_unit_of_rewards():
    actors = Actors((), (), (), (), (), jnp.array([0.0, 4.0]))
    new = Transition(
        obs=(),
        action=(),
        reward=jnp.ones((3, 2)),
        terminated=(),
        next_obs=(),
    )
    ends = jnp.array([[0, 1], [1, 0], [0, 0]], bool)
    actors, new = with_returns(
        0.5,
        actors,
        new,
        ends,
    )
    assert_array_equal(new.discounted, [[1, 3], [1.5, 1], [1, 1.5]])
    assert_array_equal(actors.discounted, [1, 1.5])
    losses = []
    for factor in (1.0, 100.0):
        env = make_env("Endings")
        advance = env.advance
        env.advance = lambda *x, advance=advance, factor=factor: (y := advance(*x))._replace(
            reward=factor * y.reward
        )
        args = small_sac_args(normalize_rewards=True)
        losses.append(run_updates(args, env, 2, 4)[1]["loss/q1"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.usefixtures("users_compiler")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "steps", "batch_size", "flags"),
    [(-600, 6_000, 128, {}), (-300, 3_000, 64, {"utd_ratio": 4.0, "critic_norm": "layer"})],
)
def test_pendulum_is_learned(wanted, steps, batch_size, flags, tmp_path):
    """Better than the worst three of a dozen seeds; chance earns -1200, and a long run -150."""
    small = {
        "num_seeds": 3,
        "hidden_sizes": (64, 64),
        "policy_lr": 1e-3,
        "eval_episodes": 64,
        "buffer_size": 10_000,
    }
    flags = flags | {
        "total_timesteps": steps,
        "batch_size": batch_size,
        "eval_interval": 0,
        "checkpoint_interval": 0,
    }
    args = sac.Args(**small, **flags, quiet=True, num_devices=1, run_dir=str(tmp_path / "run"))
    result = sac.train(args)
    assert np.mean(result.evaluation["eval/return_mean"]) > wanted
