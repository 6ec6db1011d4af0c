"""Illegal actions: never taken, never counted, without a NaN anywhere; and observations that have
parts.
"""

import dataclasses
from contextlib import nullcontext

import appo_pmap as appo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from gymnax.environments.spaces import Dict
from helpers import (
    Fussy,
    Pusher,
    ToyParams,
    ToyState,
    metric_rows,
    module_of,
    ppo,
    ppo_rnn,
    result_of,
    run_updates,
    sac,
    same_bits,
    small_args,
    small_dqn_args,
    small_pqn_args,
    small_rnn_args,
    small_sac_args,
)
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl.cli.errors import FailedEnvError, TrainingError
from pmaprl.device.contract import as_recurrent
from pmaprl.device.evaluation import play_episodes
from pmaprl.device.interface import PolicyInput
from pmaprl.device.keys import action_noise
from pmaprl.device.optim import hparams_of
from pmaprl.device.rollout import reset_mid_episode
from pmaprl.device.state import key_data
from pmaprl.envs.custom import wrap
from pmaprl.envs.masks import MASK, check_legal
from pmaprl.envs.spaces import Box, Discrete, EnvSpec, MultiDiscrete, batch_shape, flat_size, sample
from pmaprl.export import function_of, inputs_of
from pmaprl.nets.distributions import Categoricals, PolicyHead, QHead, encode_action, epsilon_greedy
from pmaprl.nets.recurrent import Inputs, initial_memory
from pmaprl.nets.torso import Ensemble
from pmaprl.play import Args as PlayArgs
from pmaprl.play import play
from pmaprl.policy import load_policy

LEGAL = np.array([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 1]], bool)
NVEC = 4, 2


def masked(logits, legal=LEGAL):
    policy = Categoricals(jnp.asarray(logits, jnp.float32), NVEC, scalar=False)
    return policy.only(jnp.asarray(legal))


def alone(row):
    """The distribution of one row over its legal choices alone, and those choices, of each
    component.
    """
    rng = np.random.default_rng(row)
    logits = rng.normal(size=6)
    components = ((0, 4), (4, 6))
    choices = [np.flatnonzero(LEGAL[row, a:b]) for a, b in components]
    pairs = zip((logits[:4], logits[4:]), choices, strict=True)
    parts = (part[legal] for part, legal in pairs)
    policies = [Categoricals(jnp.asarray(part), (len(part),), True) for part in parts]
    return logits, policies, choices


@pytest.mark.parametrize("row", range(3))
def test_a_masked_distribution_is_that_over_what_is_legal(row):
    logits, parts, choices = alone(row)
    policy = masked(logits, LEGAL[row])
    for measure in ("entropy", "symmetric_kl_to_uniform"):
        expected = sum(getattr(part, measure)() for part in parts)
        found = float(getattr(policy, measure)())
        assert found == pytest.approx(float(expected), abs=1e-6)
    for pick in np.ndindex(*map(len, choices)):
        indices = [choice[i] for choice, i in zip(choices, pick, strict=True)]
        action = jnp.array(indices)
        choices_of_parts = zip(parts, pick, strict=True)
        expected = sum(part.log_prob(jnp.int32(i)) for part, i in choices_of_parts)
        found = float(policy.log_prob(action))
        assert found == pytest.approx(float(expected), abs=1e-6)
    best = [choice[int(part.mode())] for choice, part in zip(choices, parts, strict=True)]
    assert policy.mode().tolist() == best


@pytest.mark.parametrize("rising", [0, 1e-3])
def test_no_noise_picks_what_is_illegal(rising, monkeypatch, scale=1e4):
    """Nor the largest noise there is, where a sum of probabilities is rounded below it, or parallel
    sums rise.
    """
    cumsum = jnp.cumsum

    def rising_sum(x, axis):
        return cumsum(x, axis=axis) + rising * jnp.arange(x.shape[axis])

    monkeypatch.setattr(
        jnp,
        "cumsum",
        rising_sum,
    )
    largest = 1 - 2**-24
    noise = np.linspace(2**-24, largest, 4001, dtype=np.float32)
    rng = np.random.default_rng(0)
    logits = scale * rng.normal(size=(100, 6))
    for legal in LEGAL:
        for rows in np.split(logits, 20):
            policy = masked(
                rows[:, None].repeat(len(noise), 1),
                np.broadcast_to(legal, (5, len(noise), 6)),
            )
            for_both = np.stack([noise] * 2, -1)
            first, second = np.moveaxis(
                np.asarray(policy.sample(for_both[None].repeat(5, 0))),
                -1,
                0,
            )
            assert legal[:4][first].all()
            assert legal[4:][second].all()


@pytest.mark.parametrize("legal", [LEGAL[0], LEGAL[0] & (np.arange(6) < 4)], ids=str)
def test_gradients_are_finite_and_none_reaches_what_is_illegal(legal):
    """The second component of the second mask has no legal choice: it keeps them all."""

    def measures(logits):
        policy = masked(logits, legal)
        action = policy.sample(jnp.full(2, 0.7))
        return policy.entropy() + policy.log_prob(action) + policy.symmetric_kl_to_uniform()

    point = jnp.array([3.0, -2.0, 50.0, 1.0, 0.0, 100.0])
    value, gradient = jax.value_and_grad(measures)(point)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    of_illegal = gradient[:4][~legal[:4]]
    assert not np.any(of_illegal)
    moves = np.any(gradient[4:] != 0)
    assert moves == (not legal[4:].any())


def test_a_component_without_a_legal_choice_has_them_all():
    """Others keep their mask."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=6)
    for row in range(3):
        first = LEGAL[row] & (np.arange(6) < 4)
        second = LEGAL[row] & (np.arange(6) >= 4)
        for legal, same in (
            (first, first | (np.arange(6) >= 4)),
            (second, second | (np.arange(6) < 4)),
        ):
            policy = masked(logits, legal)
            wanted = masked(logits, same)
            assert_array_equal(policy.logits, wanted.logits)
            best = wanted.mode().tolist()
            assert policy.mode().tolist() == best
            assert float(policy.entropy()) == float(wanted.entropy())


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_q_values_without_a_legal_action_are_those_without_a_mask(epsilon):
    """The mask of one action alone is honoured."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5)).astype(np.float32)
    table = [[0, 0, 0], [1, 1, 1], [0, 1, 0]]
    masks = np.array(table, bool)
    head = QHead(3)
    variables = head.init(jax.random.key(0), x)
    plain = head.apply(variables, x)
    found = head.apply(variables, x, {MASK: masks})
    assert_array_equal(found[:2], plain[:2])
    assert np.argmax(found[2]) == 1
    assert np.max(found[2]) == plain[2, 1]
    greedy = epsilon_greedy(plain, epsilon, {MASK: masks})
    free = epsilon_greedy(plain, epsilon)
    assert_array_equal(greedy.mode()[:2], free.mode()[:2])
    assert_allclose(greedy.logits[:2], free.logits[:2], rtol=1e-6)
    assert int(greedy.mode()[2]) == 1


def test_parts_of_an_action_add_up():
    """Their log-probabilities, and their entropies; a mask is of those that have choices."""
    push = Box(np.full(2, -1.0), np.ones(2), (2,))
    space = Discrete(4), {"push": push, "turn": Discrete(2)}
    head = PolicyHead(space)
    legal = LEGAL
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5)).astype(np.float32)
    policy, _ = head.init_with_output(jax.random.key(0), x, {MASK: legal})
    first, normal, second = policy.parts[0], *policy.parts[1].values()
    assert_array_equal(first.legal, legal[:, :4])
    assert_array_equal(second.legal, legal[:, 4:])
    noise = action_noise(jax.random.key(1), space, (3,))
    action = policy.sample(noise)
    parts = zip((first, normal, second), jax.tree.leaves(action), strict=True)
    log_prob = sum(part.log_prob(x) for part, x in parts)
    assert_allclose(policy.log_prob(action), log_prob, rtol=1e-6)
    assert_allclose(
        policy.entropy(),
        first.entropy() + normal.entropy() + second.entropy(),
        rtol=1e-6,
    )
    assert encode_action(action, space).shape == (3, flat_size(space)) == (3, 8)
    assert all(legal[range(3), action[0]])


def test_every_component_of_an_action_needs_a_legal_choice():
    spec = EnvSpec(
        name="E",
        observation_space=None,
        obs_dtype=None,
        action_space=MultiDiscrete(NVEC),
    )
    table = [[1, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]
    masks = np.array(table, bool)
    for row, stuck in enumerate((False, True, True)):
        acting = np.arange(3) == row
        with pytest.raises(FailedEnvError, match="E has a state") if stuck else nullcontext():
            check_legal({"action_mask": masks}, acting, spec)


def test_random_actions_are_legal():
    """Random actions are drawn before a run that begins in the middle of episodes, and before SAC
    learns.
    """
    box = Box(np.full(2, -1.0), np.ones(2), (2,))
    space = Discrete(4), box, MultiDiscrete((2,))
    keys = jax.random.split(jax.random.key(0), 300)
    for legal in LEGAL:

        def draw(key, legal=legal):
            return sample(key, space, legal)

        choice, vector, component = jax.vmap(draw)(keys)
        allowed = set(np.flatnonzero(legal[:4]))
        assert set(choice.tolist()) == allowed
        allowed = set(np.flatnonzero(legal[4:]))
        assert set(component.ravel().tolist()) == allowed
        assert vector.shape == (300, 2)
    env = wrap(Fussy())
    returns = reset_mid_episode(env, keys)[1]
    assert len(set(returns.time.tolist())) > 3


@struct.dataclass
class ClosingParams(ToyParams):
    closes: int = 0


class Closing(Fussy):
    """Episodes end by a time limit, or by termination where their number is odd.

    The last observation has all actions, with `closes` 1 none, with 2 one of them. Actions pay
    differently.
    """

    parameters = ClosingParams()

    def reset_env(self, key, params):
        episode = jax.random.randint(key, (), 0, 3 * 1000)
        state = ToyState(time=jnp.int32(0), episode=episode)
        return self.seen(state, params), state

    def step_env(self, key, state, action, params):
        _, after, _, ended, info = super().step_env(key, state, action, params)
        reward = 1.0 + 0.5 * action + jnp.sin(state.episode)
        closes_early = (after.episode % 2 == 1) & (after.time == 5)
        return (
            self.seen(after, params),
            after,
            reward,
            ended | closes_early,
            info,
        )

    def seen(self, state, params):
        is_closed = (state.episode % 2 == 1) & (state.time == 5)
        is_last = (state.time >= 7) | is_closed
        choices = [jnp.ones(3, bool), jnp.zeros(3, bool), jnp.arange(3) == state.episode % 3]
        last = jnp.stack(choices)[params.closes]
        numbers = [jnp.sin(state.episode), 0.1 * state.time]
        obs = jnp.stack(numbers)
        mask = jnp.where(is_last, last, self.legal(state))
        return {"obs": obs, "action_mask": mask}


CLOSING = {
    "ppo": small_args(),
    "memory": small_rnn_args(),
    "pqn": small_pqn_args(),
    "pqn gru": small_pqn_args(rnn="gru", rnn_size=8),
    "dqn": small_dqn_args(utd_ratio=0.25, dueling=True),
    "dqn n-step": small_dqn_args(utd_ratio=0.25, n_steps=2, double=False),
    "c51": small_dqn_args(utd_ratio=0.25, distribution="c51", v_max=30.0),
    "qr": small_dqn_args(utd_ratio=0.25, distribution="qr", num_atoms=8),
    "sac": small_sac_args(utd_ratio=0.25),
    "crossq": small_sac_args(utd_ratio=0.25, recipe="crossq", critic_hidden_sizes=(16,)),
    "xqc": small_sac_args(utd_ratio=0.25, recipe="xqc", critic_hidden_sizes=(16,)),
}
FAST = "pqn", "dqn", "sac"


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in CLOSING],
)
def test_an_empty_mask_where_an_episode_ends_changes_nothing_that_is_learned(name):
    """By any algorithm, not in the last bit; Q functions honour one that leaves some actions at a
    time limit.
    """
    args = dataclasses.replace(CLOSING[name], sweep=("env.closes=0,1,2",))
    updates = 4 if hasattr(args, "update_epochs") else 30
    state, metrics = run_updates(args, wrap(Closing()), 1, updates)
    learner = jax.tree.map(lambda x: np.asarray(x)[0], key_data(state.learner))
    opened, closed, narrow = (jax.tree.map(lambda x, i=i: x[i], learner) for i in range(3))
    assert same_bits(opened, closed)
    assert same_bits(opened, narrow) == (name in ("ppo", "memory"))
    leaves = jax.tree.leaves(learner.params)
    assert all(np.isfinite(x).all() for x in leaves)
    assert np.all(metrics["policy/legal_actions_min"] == 1)


def test_an_evaluation_in_which_nothing_was_legal_does_not_count(tmp_path, capsys):
    """In a run it is warned of, and its return is no number; where it is played by itself, it is an
    error.
    """
    args = small_args(
        env="test_masks:Stuck",
        num_steps=2,
        total_timesteps=32,
        run_dir=str(tmp_path),
        quiet=False,
    )
    assert ppo.train(args).status == "finished", "which has not come to the state itself"
    assert (
        "does not count: test_masks:Stuck has a state without any legal action"
        in capsys.readouterr().err
    )
    assert result_of(tmp_path)["eval/return_mean"] == [None]
    with pytest.raises(FailedEnvError, match="without any legal action"):
        play(PlayArgs(str(tmp_path), episodes=2, env="test_masks:Stuck"))


class Stuck(Fussy):
    """The fifth state of an episode has no legal action, and neither has the last, where nobody
    acts.
    """

    stuck = 4

    def legal(self, state):
        is_open = state.time != self.stuck
        return super().legal(state) & is_open & (state.time != 7)


ALGORITHMS = {
    "ppo": small_args(normalize_obs=True, exploration_loss="symmetric-kl"),
    "sac": small_sac_args(utd_ratio=0.125, total_timesteps=960),
    "memory": small_rnn_args(normalize_obs=True),
    "dqn": small_dqn_args(utd_ratio=0.125, total_timesteps=960),
}
BY_NAME = pytest.mark.parametrize(
    "name",
    ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sac", "memory", "dqn"))],
)


@BY_NAME
def test_no_illegal_action_is_ever_taken(name, tmp_path):
    """In training, in evaluations, and before SAC begins to learn, which wants no more entropy than
    legal ones have.
    """
    args = ALGORITHMS[name]
    args.run_dir = str(tmp_path / "run")
    args.log_interval = 128
    result = module_of(args).train(args, wrap(Fussy()))
    rows = metric_rows(result.run_dir)
    assert {row["episode/return_min"] for row in rows} - {None} == {7.0}
    assert {row["policy/legal_actions_min"] for row in rows} == {1.0}
    assert result.evaluation["eval/return_min"] == [7.0]
    wanted = [row["policy/target_entropy"] for row in rows if row.get("policy/alpha") is not None]
    # Half of the largest entropy; one action is legal in two thirds of all states, and two in the
    # others
    assert bool(wanted) == (name == "sac")
    target = 0.5 * np.log(2) / 3
    assert wanted == pytest.approx([target] * len(wanted), rel=0.3)


@pytest.mark.slow
def test_a_state_without_any_legal_action_ends_the_run(tmp_path):
    """But not at the end of an episode, where nobody acts."""
    with pytest.raises(TrainingError, match="legal_actions_min"):
        args = small_args(env="test_masks:Stuck", run_dir=str(tmp_path / "run"))
        ppo.train(args)
    env = Stuck()
    env.stuck = -1
    ended = ppo.train(small_args(run_dir=str(tmp_path / "end")), wrap(env))
    assert ended.status == "finished"


class Secretive(Pusher):
    """Its critics see more than its policies, whose actions are in a Box: no change is lost in
    rounding to choices.
    """

    observations = Dict({"obs": Pusher.observations, "privileged_state": Pusher.observations})

    def get_obs(self, state, params=None, key=None):
        obs = super().get_obs(state)
        return dict.fromkeys(("obs", "privileged_state"), obs)


def values_of(module, args, env, learner, obs):
    """Compute what the critic of an algorithm says of observations [N, ...]."""
    params = learner.params
    actions = jnp.zeros((batch_shape(obs)[0], 1))
    if hasattr(module, "QFunction"):
        q_function = module.QFunction(args, env.observation_space, env.action_space)
        critics = Ensemble(q_function, 2)
        return critics.apply(params.critics, obs, actions).mean()
    first = jnp.ones((1, len(actions)), bool)
    memory = initial_memory("gru", 8, 1, len(actions))
    sequence = jax.tree.map(lambda x: x[None], obs)
    if module is appo:
        network = appo.Network(args, env.spec)
        both = appo.Memory(memory, memory)
        return network.apply(params, sequence, first, both)[1]
    if module is ppo_rnn:
        return ppo_rnn.Critic(args, env.spec).apply(
            params.critic,
            Inputs(sequence, first, None),
            memory,
        )[0]
    critic = ppo.Critic(args, env.spec)
    return critic.apply(params.critic, obs)


@pytest.mark.parametrize(
    "module",
    [ppo, *(pytest.param(module, marks=pytest.mark.slow) for module in (ppo_rnn, appo, sac))],
    ids=lambda module: module.__name__,
)
def test_critics_alone_see_what_is_privileged(module):
    flags = {
        "hidden_sizes": (8,),
        "normalize_obs": True,
        "quiet": True,
    }
    is_recurrent = module in (ppo_rnn, appo)
    flags |= {"rnn": "gru", "rnn_size": 8} if is_recurrent else {}
    args = module.Args(**flags)
    env = wrap(Secretive())
    algorithm = module.make_algorithm(args, env.spec)
    agent = as_recurrent(algorithm)
    learner = algorithm.init(jax.random.key(0), hparams_of(args))
    # Critics begin at zero
    moved = jax.tree.map(lambda x: x + 0.1, learner.params)
    learner = learner.replace(params=moved)
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(3, 5, 2)).astype(np.float32)
    obs, other = ({"obs": numbers[0], "privileged_state": more} for more in numbers[1:])
    for key in (None, jax.random.key(2)):
        one, changed = (
            agent.act(learner, PolicyInput.at_start(x), agent.initial_memory(5), key)
            for x in (obs, other)
        )
        jax.tree.map(assert_array_equal, one, changed)
    one, changed = (np.asarray(values_of(module, args, env, learner, x)) for x in (obs, other))
    assert (one != changed).all()


@pytest.mark.slow
def test_a_loaded_policy_does_not_ask_for_what_is_privileged(tmp_path):
    run = {
        "env": "test_masks:Secretive",
        "normalize_obs": True,
        "run_dir": str(tmp_path),
        "eval_episodes": 4,
    }
    result = ppo.train(small_args(**run, total_timesteps=64))
    policy = load_policy(tmp_path)
    env = wrap(Secretive())
    keys = jax.random.split(jax.random.key(0), 5)
    obs, _ = jax.vmap(env.reset)(keys)
    public = {name: part for name, part in obs.items() if name != "privileged_state"}
    assert_array_equal(policy(public), policy(obs))
    assert inputs_of(policy)["obs"].keys() == public.keys()
    compiled = jax.jit(function_of(policy))
    assert_array_equal(compiled(public), policy(public))
    # Which gives it all there is
    starts = jax.random.split(jax.random.key(1), 4)
    episodes = play_episodes(env, policy, starts)
    assert policy.evaluation == result.evaluation["eval/return_mean"][0]
    assert np.isfinite(episodes.ret).all()
    episodes = play(PlayArgs(str(tmp_path), episodes=2, env=run["env"]))
    assert episodes.ret.shape == (2,)
