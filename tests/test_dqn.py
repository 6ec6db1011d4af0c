"""DQN: n-step returns from the buffer, and the losses of its three kinds of returns."""

import host_helpers
import jax
import jax.numpy as jnp
import numpy as np
import ppo_pmap as ppo
import pytest
from helpers import (
    dqn,
    make_env,
    metric_rows,
    over_devices,
    pqn,
    relative_difference,
    sac,
    small_dqn_args,
    small_sac_args,
)
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl.actors.batches import over_learners
from pmaprl.actors.host_drivers import transitions_of
from pmaprl.cli.errors import UsageError
from pmaprl.device.interface import GradientContext, PolicyInput, Transition
from pmaprl.device.optim import hparams_of
from pmaprl.device.replay import new_replay
from pmaprl.device.sharding import AXIS
from pmaprl.envs.environment import check_spaces, defaults_left_off
from pmaprl.envs.registry import make
from pmaprl.envs.spaces import Discrete, box
from pmaprl.nets.returns import ValueDistribution


def test_n_step_returns_end_with_the_episode_and_cross_the_ring_s_end():
    rng = np.random.default_rng(0)
    steps = 17
    gamma = 0.9
    reward, terminated, truncated = rng.normal(size=(steps, 3)), *(rng.random((2, steps, 3)) < 0.2)
    times = np.arange(steps)[:, None]
    obs = 100 * np.arange(3) + times
    zero = jnp.float32(0)
    no = jnp.bool_(False)
    replay = new_replay(
        Transition(
            obs=zero,
            action=jnp.int32(0),
            reward=zero,
            terminated=no,
            next_obs=zero,
            first=no,
        ),
        num_envs=3,
        capacity=7,
    )
    for t in range(steps):
        first = (t == 0) | (terminated | truncated)[t - 1]
        new = Transition(
            obs=obs[t],
            action=obs[t],
            reward=reward[t],
            terminated=terminated[t],
            next_obs=obs[t] + 0.5,
            first=first,
        )
        replay = replay.add(jax.tree.map(jnp.asarray, new))
    batch = replay.sample(
        jax.random.split(jax.random.key(0), 1),
        300,
        3,
        gamma,
    )
    starts = set()
    columns = (np.asarray(x).tolist() for x in batch if x is not None)
    for first, action, total, ended, reached, _, discount in zip(*columns, strict=True):
        ring, start = divmod(int(first), 100)
        last = next((t for t in (start, start + 1) if (terminated | truncated)[t, ring]), start + 2)
        rewards = reward[start : last + 1, ring]
        assert action == first
        assert ended == terminated[last, ring]
        assert reached == obs[last, ring] + 0.5
        discounts = gamma ** np.arange(len(rewards))
        assert total == pytest.approx(rewards @ discounts, abs=1e-6)
        assert discount == pytest.approx(gamma ** len(rewards))
        starts.add((ring, start))
    assert starts == {(ring, start) for ring in range(3) for start in range(10, 15)}


def projected(probs, returns, support):
    """Bellemare et al. 2017, algorithm 1."""
    found = np.zeros(len(support))
    for prob, value in zip(probs, returns, strict=True):
        inside = np.clip(value, support[0], support[-1])
        place = (inside - support[0]) / (support[1] - support[0])
        low = int(place)
        found[low] += prob * (low + 1 - place)
        found[min(low + 1, len(support) - 1)] += prob * (place - low)
    return found


def huber(x):
    return 0.5 * x**2 if abs(x) <= 1 else abs(x) - 0.5


def probabilities(logits):
    weights = np.exp(logits)
    return weights / np.sum(np.exp(logits), axis=-1, keepdims=True)


def loss_by_hand(args, output, later, choosing, legal, reward, discount):
    """The loss of one sample: `output` [Z] of its action, `later` [n, Z] and what chooses among
    those.
    """
    support = np.linspace(args.v_min, args.v_max, args.num_atoms)
    count = args.num_atoms
    means = (
        probabilities(choosing) @ support if args.distribution == "c51" else choosing.mean(axis=-1)
    )
    legal_means = np.where(legal, means, -np.inf)
    best = later[np.argmax(legal_means)]
    if args.distribution == "c51":
        wanted = projected(probabilities(best), reward + discount * support, support)
        return -wanted @ np.log(probabilities(output))
    target = reward + discount * best
    if args.distribution == "none":
        return huber(output[0] - target[0]) if args.huber else 0.5 * (output[0] - target[0]) ** 2
    pairs = [(i, y - q) for i, q in enumerate(output) for y in target]
    losses = (abs((i + 0.5) / count - (error < 0)) * huber(error) for i, error in pairs)
    return sum(losses) / count


LOSSES = [
    ("none", {"double": False}),
    ("none", {"huber": True}),
    ("qr", {"num_atoms": 5}),
]
LOSSES += [("c51", {"num_atoms": 5, "v_min": -2.0, "v_max": 3.0})]


@pytest.mark.parametrize(("distribution", "flags"), LOSSES, ids=str)
def test_losses_are_those_of_the_papers(distribution, flags):
    args = small_dqn_args(
        env="helpers:Fussy",
        distribution=distribution,
        **flags,
        dueling=True,
        hidden_sizes=(4,),
    )
    env = make_env("Fussy")
    rng = np.random.default_rng(1)
    size = 6
    algorithm = dqn.DQN(args, env.spec)
    network = dqn.QNetwork(args, env.spec, env.action_space.n)
    learner = algorithm.init(jax.random.key(0), hparams_of(args))

    def disturbed(x):
        return x + 0.3 * rng.normal(size=x.shape)

    learner = learner.replace(target_params=jax.tree.map(disturbed, learner.params))
    numbers = rng.normal(size=(2, size, 2)).astype(np.float32)
    legal = rng.random((2, size, 3)) < 0.6
    legal[..., 0] |= ~legal.any(axis=-1)
    pairs = zip(numbers, legal, strict=True)
    obs, next_obs = ({"obs": x, "action_mask": mask} for x, mask in pairs)
    terminated = np.arange(size) % 3 == 0
    discount = np.linspace(0.7, 0.9, size, dtype=np.float32)
    action = rng.integers(0, 3, size, dtype=np.int32)
    reward = rng.normal(size=size).astype(np.float32)
    batch = Transition(
        obs=obs,
        action=action,
        reward=reward,
        terminated=terminated,
        next_obs=next_obs,
        discount=discount,
    )
    output, later = (np.float64(network.apply(learner.params, x)) for x in (obs, next_obs))
    later_by_target = np.float64(network.apply(learner.target_params, next_obs))
    choosing = later if args.double else later_by_target

    hparams = hparams_of(args, epsilon=0.3, tau=0.25)
    cases = ((args.target_frequency + 1, 0.0), (args.target_frequency, 0.25))
    for number, tau in cases:
        now = GradientContext(hparams, jnp.int32(number))
        updated = over_devices(
            lambda batch, now=now: algorithm.update(learner, batch, now),
            1,
            batch,
        )
        after, metrics = jax.tree.map(lambda x: x[0], updated)
        mixed = jax.tree.map(
            lambda old, new, tau=tau: old + tau * (new - old),
            learner.target_params,
            after.params,
        )
        assert relative_difference(after.target_params, mixed) < 1e-6
    rows = zip(
        output,
        action,
        later_by_target,
        choosing,
        legal[1],
        reward,
        ~terminated * discount,
        strict=True,
    )
    losses = [loss_by_hand(args, output[action], *more) for output, action, *more in rows]
    assert metrics["loss/q"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert after.epsilon == pytest.approx(0.3)


class Lab(host_helpers.Lab):
    """DQN beside actors of four environments with three actions, of whose rollouts every step is
    valid.
    """

    def __init__(self, **flags):
        sizes = {
            "envs_per_actor": 4,
            "batch_size": 16,
            "learning_starts": 32,
            "total_timesteps": 640,
        }
        args = dqn.Args(**host_helpers.SMALL | sizes | flags)
        super().__init__(dqn, args)


def test_learning_waits_until_every_group_of_rings_has_something_to_draw():
    """One environment has reset itself all the time, and two steps are none of three: the others
    have enough.
    """
    lab = Lab(n_steps=3, learning_starts=24)
    init = jax.vmap(lab.driver.init, axis_name=AXIS)
    state = jax.jit(init)(jnp.zeros(1, int))
    obs = np.zeros((9, 4, 2), np.float32)
    taken = np.zeros((8, 4), np.int32)
    whole = host_helpers.made_up(
        1,
        obs,
        valid=1.1,
        action=taken,
        extras=taken,
    )
    kept = (np.arange(4) != 1) | (np.arange(8)[:, None] < 2)
    short = whole._replace(valid=whole.valid & kept)
    updates = []
    for rollout in (short, whole):
        rollouts = over_learners((rollout, rollout), 1)
        state, *_ = lab.step(state, rollouts)
        updates.append(int(state.run.gradient_updates[0]))
    assert updates == [0, 64], "what was due before is not made up for"


def test_the_share_of_returns_beyond_the_atoms_of_c51_is_measured_and_warned_of_once(
    tmp_path, capsys
):
    table = [[-3.0, 0.0, 2.0, 2.1], [-2.0, -1.0, 1.0, 2.0]]
    atoms = jnp.array(table)
    logits = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]] * 2))
    returns = ValueDistribution(
        atoms=atoms,
        logits=logits,
        low=-2.0,
        high=2.0,
    )
    assert_allclose(returns.outside(), [0.5, 0.0], rtol=1e-6)
    flags = {
        "distribution": "c51",
        "v_min": -1.0,
        "v_max": 2.0,
        "hidden_sizes": (4,),
        "total_timesteps": 20 * 16,
    }
    args = small_dqn_args(**flags, env="helpers:Toy", log_interval=64, run_dir=str(tmp_path))
    dqn.train(args)
    shares = [row["q/outside"] for row in metric_rows(tmp_path) if row.get("q/outside") is not None]
    assert len(shares) > 3
    assert min(shares) > 0.2
    assert capsys.readouterr().err.count("beyond --v-min -1 .. --v-max 2") == 1


def test_actors_explore_with_the_learner_s_epsilon_and_rollouts_are_not_continued():
    lab = Lab(n_steps=2)
    driver = lab.driver
    args = lab.args
    keys = jax.random.split(jax.random.key(0))
    learner, run = driver.begin(*keys)
    seen = PolicyInput.at_start(jnp.ones((3000, 2)))
    agent = dqn.DQN(args, lab.spec)
    best = agent.act(learner, seen.obs[:1])
    for epsilon in 0.0, 0.3:
        published = driver.publish(
            learner.replace(epsilon=jnp.float32(epsilon)),
            run.replace(env_steps=jnp.int32(640)),
        )
        action, *_ = driver.act_on_host(
            published,
            (),
            jax.random.key_data(jax.random.key(1)),
            jnp.uint32(0),
            seen,
        )
        share = jnp.mean(action != best)
        assert share == pytest.approx(epsilon * 2 / 3, abs=0.03)
    ends = np.arange(8)[:, None] == [2, 5, 7, 9]  # the last goes on
    obs = np.zeros((9, 4, 2), np.float32)
    taken = {"action": ends, "extras": ends}
    own_step = host_helpers.made_up(1, obs, **taken)._replace(valid=~ends)  # reset in that row
    in_step = host_helpers.made_up(
        1,
        obs,
        **taken | {"terminated": ends, "truncated": ends, "final_obs": obs[1:]},
    )
    for rollout in own_step, in_step:
        first = transitions_of(rollout, with_first=True).first
        wanted = np.concatenate([np.ones((1, 4), bool), ends[:-1]])
        assert_array_equal(first, wanted)


def test_a_default_that_does_not_fit_the_observations_is_left_off_and_said():
    env = make("FrozenLake-misc").spec
    args = dqn.Args(env="FrozenLake-misc")
    check_spaces(args, env)
    assert "--normalize-obs" in " ".join(defaults_left_off(args, env).values())
    assert defaults_left_off(args, make("CartPole-v1").spec) == {}
    # It is no default of PPO, so somebody has asked for it
    with pytest.raises(UsageError, match="normalize-obs"):
        check_spaces(ppo.Args(env="FrozenLake-misc", normalize_obs=True), env)


@pytest.mark.parametrize("algorithm", [dqn.DQN, pqn.PQN, sac.SAC])
def test_actions_that_an_algorithm_cannot_have_are_refused_when_it_is_made(algorithm):
    """The replay buffer is made before the networks, and fails on other actions."""
    actions = {"a": Discrete(2), "b": box((2,), -1.0, 1.0)}
    spec = make_env("Toy").spec._replace(action_space=actions)
    with pytest.raises(UsageError, match="ppo_pmap"):
        algorithm(small_sac_args(), spec)
