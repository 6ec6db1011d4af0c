"""Illegal actions: never taken, never counted, without a NaN anywhere; and observations that have parts."""

from contextlib import nullcontext

import appo_pmap as appo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments.spaces import Dict
from helpers import (
    Fussy,
    Pusher,
    metric_rows,
    module_of,
    ppo,
    ppo_rnn,
    sac,
    small_args,
    small_dqn_args,
    small_rnn_args,
    small_sac_args,
)

from common.cli.errors import FailedEnvError, TrainingError
from common.device.agents import at_start, with_memory
from common.device.evaluation import play_episodes
from common.device.optim import hp_of
from common.device.rollout import action_noise, reset_mid_episode
from common.envs.custom import wrap
from common.envs.masks import MASK, check_legal
from common.envs.spaces import Box, Discrete, EnvSpec, MultiDiscrete, batch_shape, flat_size, sample
from common.export import function_of, inputs_of
from common.nets.distributions import Categoricals, PolicyHead, encode_action
from common.nets.recurrent import Inputs, initial_memory
from common.nets.torso import Ensemble
from common.play import Args as PlayArgs
from common.play import play
from common.policy import load_policy

LEGAL = np.array([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 1]], bool)
NVEC = 4, 2


def masked(logits, legal=LEGAL):
    return Categoricals(jnp.asarray(logits, jnp.float32), NVEC, scalar=False).only(jnp.asarray(legal))


def alone(row):
    """The distribution of one row over its legal choices alone, and those choices, of each component."""
    logits = np.random.default_rng(row).normal(size=6)
    choices = [np.flatnonzero(LEGAL[row, a:b]) for a, b in ((0, 4), (4, 6))]
    parts = (part[legal] for part, legal in zip((logits[:4], logits[4:]), choices, strict=True))
    return logits, [Categoricals(jnp.asarray(part), (len(part),), True) for part in parts], choices


@pytest.mark.parametrize("row", range(3))
def test_a_masked_distribution_is_that_over_what_is_legal(row):
    logits, parts, choices = alone(row)
    policy = masked(logits, LEGAL[row])
    for measure in ("entropy", "symmetric_kl_to_uniform"):
        expected = sum(getattr(part, measure)() for part in parts)
        assert float(getattr(policy, measure)()) == pytest.approx(float(expected), abs=1e-6)
    for pick in np.ndindex(*map(len, choices)):
        action = jnp.array([choice[i] for choice, i in zip(choices, pick, strict=True)])
        expected = sum(part.log_prob(jnp.int32(i)) for part, i in zip(parts, pick, strict=True))
        assert float(policy.log_prob(action)) == pytest.approx(float(expected), abs=1e-6)
    assert policy.mode().tolist() == [choice[int(part.mode())] for choice, part in zip(choices, parts, strict=True)]


@pytest.mark.parametrize("rising", [0, 1e-3])
def test_no_noise_picks_what_is_illegal(rising, monkeypatch, scale=1e4):
    """Nor the largest noise there is, where a sum of probabilities is rounded below it, or parallel sums rise."""
    cumsum = jnp.cumsum
    monkeypatch.setattr(jnp, "cumsum", lambda x, axis: cumsum(x, axis=axis) + rising * jnp.arange(x.shape[axis]))
    noise = np.linspace(2**-24, 1 - 2**-24, 4001, dtype=np.float32)
    logits = scale * np.random.default_rng(0).normal(size=(100, 6))
    for legal in LEGAL:
        for rows in np.split(logits, 20):
            policy = masked(rows[:, None].repeat(len(noise), 1), np.broadcast_to(legal, (5, len(noise), 6)))
            first, second = np.moveaxis(np.asarray(policy.sample(np.stack([noise] * 2, -1)[None].repeat(5, 0))), -1, 0)
            assert legal[:4][first].all() and legal[4:][second].all()


@pytest.mark.parametrize("legal", [LEGAL[0], np.zeros(6, bool)], ids=str)
def test_gradients_are_finite_and_none_reaches_what_is_illegal(legal):
    def measures(logits):
        policy = masked(logits, legal)
        action = policy.sample(jnp.full(2, 0.7))
        return policy.entropy() + policy.log_prob(action) + policy.symmetric_kl_to_uniform()

    value, gradient = jax.value_and_grad(measures)(jnp.array([3.0, -2.0, 50.0, 1.0, 0.0, 100.0]))
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert not np.any(gradient[~legal])


def test_parts_of_an_action_add_up():
    """Their log-probabilities, and their entropies; a mask is of those that have choices."""
    space = Discrete(4), {"push": Box(np.full(2, -1.0), np.ones(2), (2,)), "turn": Discrete(2)}
    head = PolicyHead(space)
    legal = LEGAL
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    policy, _ = head.init_with_output(jax.random.key(0), x, {MASK: legal})
    first, normal, second = policy.parts[0], *policy.parts[1].values()
    np.testing.assert_array_equal(first.legal, legal[:, :4])
    np.testing.assert_array_equal(second.legal, legal[:, 4:])
    action = policy.sample(action_noise(jax.random.key(1), space, (3,)))
    parts = zip((first, normal, second), jax.tree.leaves(action), strict=True)
    np.testing.assert_allclose(policy.log_prob(action), sum(part.log_prob(x) for part, x in parts), rtol=1e-6)
    np.testing.assert_allclose(policy.entropy(), first.entropy() + normal.entropy() + second.entropy(), rtol=1e-6)
    assert encode_action(action, space).shape == (3, flat_size(space)) == (3, 8)
    assert all(legal[range(3), action[0]])


def test_every_component_of_an_action_needs_a_legal_choice():
    spec = EnvSpec("E", None, None, MultiDiscrete(NVEC))
    masks = np.array([[1, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]], bool)
    for row, stuck in enumerate((False, True, True)):
        acting = np.arange(3) == row
        with pytest.raises(FailedEnvError, match="E has a state") if stuck else nullcontext():
            check_legal({"action_mask": masks}, acting, spec)


def test_random_actions_are_legal():
    """Those before a run that begins in the middle of episodes, and before SAC learns."""
    space = Discrete(4), Box(np.full(2, -1.0), np.ones(2), (2,)), MultiDiscrete((2,))
    keys = jax.random.split(jax.random.key(0), 300)
    for legal in LEGAL:
        choice, vector, component = jax.vmap(lambda key, legal=legal: sample(key, space, legal))(keys)
        assert set(choice.tolist()) == set(np.flatnonzero(legal[:4]))
        assert set(component.ravel().tolist()) == set(np.flatnonzero(legal[4:]))
        assert vector.shape == (300, 2)
    env = wrap(Fussy())
    returns = reset_mid_episode(env, keys)[1]
    assert len(set(returns.time.tolist())) > 3


class Stuck(Fussy):
    """The fifth state of an episode has no legal action, and neither has the last, where nobody acts."""

    stuck = 4

    def legal(self, state):
        return super().legal(state) & (state.time != self.stuck) & (state.time != 7)


ALGORITHMS = {
    "ppo": small_args(normalize_obs=True, exploration_loss="symmetric-kl"),
    "sac": small_sac_args(utd_ratio=0.125, total_timesteps=960),
    "memory": small_rnn_args(normalize_obs=True),
    "dqn": small_dqn_args(utd_ratio=0.125, total_timesteps=960),
}
BY_NAME = pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sac", "memory", "dqn"))]
)


@BY_NAME
def test_no_illegal_action_is_ever_taken(name, tmp_path):
    """In training, in evaluations, and before SAC begins to learn, which wants no more entropy than legal ones have."""
    args = ALGORITHMS[name]
    args.run_dir, args.log_interval = str(tmp_path / "run"), 128
    result = module_of(args).train(args, wrap(Fussy()))
    rows = metric_rows(result.run_dir)
    assert {row["episode/return_min"] for row in rows} - {None} == {7.0}
    assert {row["policy/legal_actions_min"] for row in rows} == {1.0}
    assert result.evaluation["eval/return_min"] == [7.0]
    wanted = [row["policy/target_entropy"] for row in rows if row.get("policy/alpha") is not None]
    # Half of the largest entropy; one action is legal in two thirds of all states, and two in the others
    assert bool(wanted) == (name == "sac") and wanted == pytest.approx([0.5 * np.log(2) / 3] * len(wanted), rel=0.3)


@pytest.mark.slow
def test_a_state_without_any_legal_action_ends_the_run(tmp_path):
    """But not at the end of an episode, where nobody acts."""
    with pytest.raises(TrainingError, match="legal_actions_min"):
        ppo.train(small_args(env="test_masks:Stuck", run_dir=str(tmp_path / "run")))
    env = Stuck()
    env.stuck = -1
    assert ppo.train(small_args(run_dir=str(tmp_path / "end")), wrap(env)).status == "finished"


class Secretive(Pusher):
    """Its critics see more than its policies, whose actions are in a Box: no change is lost in rounding to choices."""

    observations = Dict({"obs": Pusher.observations, "privileged_state": Pusher.observations})

    def get_obs(self, state, params=None, key=None):
        return dict.fromkeys(("obs", "privileged_state"), super().get_obs(state))


def values_of(module, args, env, learner, obs):
    """What the critic of an algorithm says of observations [N, ...]."""
    params, actions = learner.params, jnp.zeros((batch_shape(obs)[0], 1))
    if hasattr(module, "QFunction"):
        q_function = module.QFunction(args, env.observation_space, env.action_space)
        return Ensemble(q_function, 2).apply(params.critics, obs, actions).mean()
    first, memory = jnp.ones((1, len(actions)), bool), initial_memory("gru", 8, 1, len(actions))
    sequence = jax.tree.map(lambda x: x[None], obs)
    if module is appo:
        network = appo.Network(args, env.observation_space, env.action_space)
        return network.apply(params, sequence, first, appo.Memory(memory, memory))[1]
    if module is ppo_rnn:
        return ppo_rnn.Critic(args, env.spec).apply(params.critic, Inputs(sequence, first, None), memory)[0]
    return ppo.Critic(args, env.spec).apply(params.critic, obs)


@pytest.mark.parametrize(
    "module",
    [ppo, *(pytest.param(module, marks=pytest.mark.slow) for module in (ppo_rnn, appo, sac))],
    ids=lambda module: module.__name__,
)
def test_critics_alone_see_what_is_privileged(module):
    flags = {"hidden_sizes": (8,), "normalize_obs": True, "quiet": True}
    flags |= {"rnn": "gru", "rnn_size": 8} if module in (ppo_rnn, appo) else {}
    args, env = module.Args(**flags), wrap(Secretive())
    algorithm = module.make_algorithm(args, env.spec)
    agent, learner = with_memory(algorithm), algorithm.init(jax.random.key(0), hp_of(args))
    learner = learner.replace(params=jax.tree.map(lambda x: x + 0.1, learner.params))  # critics begin at zero
    numbers = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
    obs, other = ({"obs": numbers[0], "privileged_state": more} for more in numbers[1:])
    for key in (None, jax.random.key(2)):
        one, changed = (agent.act(learner, at_start(x), agent.initial_memory(5), key) for x in (obs, other))
        jax.tree.map(np.testing.assert_array_equal, one, changed)
    one, changed = (np.asarray(values_of(module, args, env, learner, x)) for x in (obs, other))
    assert (one != changed).all()


@pytest.mark.slow
def test_a_loaded_policy_does_not_ask_for_what_is_privileged(tmp_path):
    run = {"env": "test_masks:Secretive", "normalize_obs": True, "run_dir": str(tmp_path), "eval_episodes": 4}
    result = ppo.train(small_args(**run, total_timesteps=64))
    policy, env = load_policy(tmp_path), wrap(Secretive())
    obs, _ = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 5))
    public = {name: part for name, part in obs.items() if name != "privileged_state"}
    np.testing.assert_array_equal(policy(public), policy(obs))
    assert inputs_of(policy)["obs"].keys() == public.keys()
    np.testing.assert_array_equal(jax.jit(function_of(policy))(public), policy(public))
    episodes = play_episodes(env, policy, jax.random.split(jax.random.key(1), 4))  # which gives it all there is
    assert policy.evaluation == result.evaluation["eval/return_mean"][0] and np.isfinite(episodes.ret).all()
    assert play(PlayArgs(str(tmp_path), episodes=2, env=run["env"])).ret.shape == (2,)
