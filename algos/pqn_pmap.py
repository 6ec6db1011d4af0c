"""Parallelized Q-Network (Gallici et al. 2025), data-parallel over every device.

docs/pqn.md explains this file.

python algos/pqn_pmap.py --env CartPole-v1
python algos/pqn_pmap.py --help
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

from pmaprl.flags import (
    AdamBeta,
    Count,
    CountOrZero,
    Discount,
    Fraction,
    Layers,
    NonNegative,
    Positive,
    Ratio,
    RecurrentArgs,
    main,
    parse,
)


@dataclass(kw_only=True)
class Args(RecurrentArgs):
    """Train PQN. Sizes such as --num-envs are totals over all devices.

    Environments on the host have other flags.
    """

    tuned_like: ClassVar[str] = "pqn_pmap"  # a copy of this file starts from the same tuned flags

    # rollout and returns
    num_steps: Count = 64
    """Steps of every environment per update."""
    gamma: Discount = 0.99
    """Discount factor."""
    q_lambda: Discount = 0.95
    """Lambda of Q(lambda) returns; 0: one-step Q-learning, 1: discounted rewards to the end of the
    rollout."""
    bootstrap_truncated: bool = True
    """Bootstrap from the true last observation at a time limit, else count the limit as a
    termination."""
    reward_scale: Positive = 1.0
    """Factor of the rewards to learn from; reported rewards keep their units."""

    # exploration
    epsilon_start: Fraction = 1.0
    """Initial probability of a random action."""
    epsilon_end: Fraction = 0.05
    """Final probability of a random action, also of actions that are sampled after training."""
    epsilon_fraction: Fraction = 0.1
    """Fraction of the run over which the probability falls linearly from --epsilon-start to
    --epsilon-end."""

    # optimizer
    update_epochs: Count = 4
    """Passes over the batch per update."""
    num_minibatches: Count = 16
    """Minibatches per epoch, each a gradient step."""
    optimizer: Literal["radam", "adam"] = "radam"
    """Optimizer: radam (rectified Adam, Liu et al. 2020) or adam."""
    learning_rate: Positive = 5e-4
    """Initial learning rate."""
    lr_schedule: Literal["linear", "constant"] = "linear"
    """Learning rate over the run: linear to zero, or constant."""
    max_grad_norm: NonNegative = 10.0
    """Global norm at which gradients are clipped; 0: no clipping."""
    adam_b1: AdamBeta = 0.9
    """Adam's beta1."""
    adam_b2: AdamBeta = 0.999
    """Adam's beta2."""

    # network
    activation: Literal["tanh", "relu", "swish", "gelu"] = "relu"
    """Activation of the hidden layers."""
    hidden_sizes: tuple[Count, ...] = (128, 128)
    """Widths of the hidden layers, behind the convolutions where observations are images."""
    layer_norm: bool = True
    """Apply layer normalization before every activation, which keeps Q-learning stable without a
    target network."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""
    encoder: Literal["small", "nature", "impala", "flat"] = "small"
    """Image encoder: small (a 3 x 3 convolution with 16 channels), nature (the Nature DQN network),
    impala (IMPALA's ResNet) or flat (none)."""
    image_scale: Ratio = 1.0
    """Factor of images before the encoder, after --byte-max; 0.00392 = 1/255 on images of bits, as
    in purejaxql, makes the convolutions learn more slowly, which helps on Breakout."""
    rnn: Literal["none", "gru", "lstm"] = "none"
    """Recurrent cells behind the hidden layers; their state is carried from rollout to rollout."""
    rnn_size: Count = 128
    """Width of the recurrent layers."""
    rnn_layers: Layers = 1
    """Number of recurrent layers."""
    rnn_span: CountOrZero = 128
    """Longest time scale of the recurrent cells at initialization, in steps (chrono
    initialization, Tallec and Ollivier 2018); 0: 2 steps for all."""

    @property
    def samples_per_env(self) -> int:
        """Samples of a rollout per environment: its steps, or with memory one sequence."""
        return self.num_steps if self.rnn == "none" else 1

    def __post_init__(self):
        super().__post_init__()
        self.check_needed("rnn_size rnn_layers rnn_span", "rnn", "gru", "lstm")


# Before the slow imports: --help and usage errors answer at once
ARGS = parse(Args) if __name__ == "__main__" else None

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from pmaprl.algorithm import (
    EnvSpec,
    HParams,
    PolicyInput,
    RecurrentOnPolicy,
    Rollout,
    UpdateContext,
    nets,
    optim,
    run_algorithm,
)

# --------------------------------------------------------------------------------------------------
# network


class QNetwork(nn.Module):
    """Network of the Q values [T, N, n] of all actions, and the memories after each step."""

    args: Args
    env: EnvSpec
    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array, first: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        args = self.args
        x = nets.Torso.of(args, self.env.policy_obs_space)(obs)
        layers = nets.Recurrent(args.rnn, args.rnn_size, args.rnn_span, args.dtype)
        x, memory = layers(x, first, memory)
        # Observations hold the action mask, if there is one
        return nets.QHead(self.num_actions)(x, obs), memory


# --------------------------------------------------------------------------------------------------
# records

Metrics = dict[str, jax.Array]
"""Numbers [] of an update, by name."""


class Learner(struct.PyTreeNode):
    """Parameters, optimizer and normalizer, the same on every device."""

    params: Any
    opt_state: Any
    obs_stats: nets.Normalizer
    epsilon: jax.Array  # [] probability of random actions in the next rollout


class Extras(NamedTuple):
    """Outputs of the network that a rollout keeps, [T, N, ...]."""

    value: jax.Array  # value of the best action
    memory: Any  # memory of recurrent layers after the step; () without


class Batch(NamedTuple):
    """Samples for the loss: steps [1, T * N, ...], or with memory sequences [T, N, ...]."""

    obs: jax.Array  # as the network takes it
    first: jax.Array  # bool, True where an episode begins
    memory: Any  # [1, N, ...] before the first step, as the rollout had it
    action: jax.Array
    target: jax.Array


# --------------------------------------------------------------------------------------------------
# maths


def q_lambda_returns(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    q_lambda: float,
) -> jax.Array:
    """Peng's Q(lambda) returns (Peng & Williams 1996): means of n-step returns, weight lambda^n.

    Termination drops the bootstrap value. At a truncation and at the end of the rollout, the
    bootstrap value stands for everything that follows.

    Args:
        reward: [T, N] rewards.
        next_value: [T, N] value of the best action in the next observation; at a truncation, in the
            final observation.
        terminated: [T, N] bool, True where the episode ended, but not by a time limit.
        truncated: [T, N] bool, True where a time limit ended the episode.
        gamma: discount factor.
        q_lambda: weight of longer returns.

    Returns:
        [T, N] returns.
    """

    def backward(following, inputs):
        reward, next_value, terminated, truncated = inputs
        mixed = next_value + q_lambda * (following - next_value)
        following = jnp.where(truncated, next_value, mixed)
        total = reward + gamma * jnp.where(terminated, 0.0, following)
        return total, total

    inputs = reward, next_value, terminated, truncated
    _, returns = optim.unrolled_scan(backward, next_value[-1], inputs, reverse=True)
    return returns


def loss(q: jax.Array, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Half the mean squared error of the values of the actions taken.

    Args:
        q: [..., n] Q values of all actions.
        batch: the samples [...].

    Returns:
        The loss [], and metrics [].
    """
    taken = jnp.take_along_axis(q, batch.action[..., None], axis=-1)[..., 0]
    error = taken - batch.target
    half_square = 0.5 * jnp.mean(jnp.square(error))
    return half_square, {
        "loss/q": half_square,
        "q/mean": jnp.mean(taken),
        "q/target": jnp.mean(batch.target),
        "q/td_error": jnp.mean(jnp.abs(error)),
    }


# --------------------------------------------------------------------------------------------------
# algorithm

INSTEAD = "algos/ppo_pmap.py"  # trains on other actions


class PQN(RecurrentOnPolicy[Args, Learner]):
    """Parallelized Q-Network, as pure functions of one agent on one device.

    Raises:
        UsageError: actions are not Discrete.
    """

    def __post_init__(self) -> None:
        nets.check_discrete(self.env, INSTEAD)

    @cached_property
    def network(self) -> QNetwork:
        return QNetwork(self.args, self.env, nets.check_discrete(self.env, INSTEAD).n)

    def explore(
        self, learner: Learner, seen: PolicyInput, memory: Any, noise: jax.Array
    ) -> tuple[jax.Array, Extras, Any]:
        """Sample the epsilon-greedy actions [N] of a step.

        Returns:
            Actions, outputs for the rollout to keep, and the memory after the step.
        """
        q, memory = self.q_of(learner, seen.obs, seen.first, memory)
        action = nets.epsilon_greedy(q, learner.epsilon, seen.obs).sample(noise)
        extras = Extras(value=jnp.max(q, axis=-1), memory=memory)
        return action, extras, memory

    def update(
        self, learner: Learner, rollout: Rollout, context: UpdateContext
    ) -> tuple[Learner, Metrics]:
        """Learn from a rollout [T, N, ...]: compute returns, then learn (algorithm 1)."""
        batch = self.estimate(learner, rollout, context.hparams)
        learner, metrics = self.learn(learner, batch, context)
        obs_stats = learner.obs_stats.update(rollout.obs)
        return learner.replace(obs_stats=obs_stats, epsilon=context.hparams.epsilon), metrics

    def estimate(self, learner: Learner, rollout: Rollout, hparams: HParams) -> Batch:
        """Compute Q(lambda) returns, in units of the scaled rewards."""
        value, memory = rollout.extras
        last = rollout.last.obs, rollout.last.first, jax.tree.map(lambda x: x[-1], memory)
        final = rollout.final_obs, jnp.zeros_like(rollout.terminated), memory
        next_value = rollout.next_values(
            value,
            value_of=lambda x: self.value_of(learner, *x),
            last=last,
            final=final,
        )
        # Without a bootstrap, a time limit counts as a termination
        cut = rollout.truncated & (not self.args.bootstrap_truncated)
        target = q_lambda_returns(
            reward=hparams.reward_scale * rollout.reward,
            next_value=next_value,
            terminated=rollout.terminated | cut,
            truncated=rollout.truncated,
            gamma=hparams.gamma,
            q_lambda=hparams.q_lambda,
        )
        batch = Batch(
            obs=learner.obs_stats.normalize(rollout.obs),
            first=rollout.seen.first,
            memory=jax.tree.map(lambda x: x[None], rollout.memory),
            action=rollout.action,
            target=target,
        )
        if self.args.rnn != "none":
            return batch
        return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), batch)

    def learn(
        self, learner: Learner, batch: Batch, context: UpdateContext
    ) -> tuple[Learner, Metrics]:
        """Take gradient steps on the minibatches of all epochs."""
        # [E, M, B] samples or sequences
        minibatches = context.minibatches(self.args.update_epochs, self.args.num_minibatches)

        def step(carry, indices):
            params, opt_state = carry
            minibatch = jax.tree.map(lambda x: x[:, indices], batch)
            minibatch_loss = partial(self.loss_of, batch=minibatch)
            # The gradient is the mean over all devices
            params, opt_state, metrics = optim.adam_step(
                minibatch_loss, params, opt_state, context.hparams
            )
            return (params, opt_state), metrics

        start = learner.params, learner.opt_state
        (params, opt_state), metrics = optim.run_epochs(step, start, minibatches)
        return learner.replace(params=params, opt_state=opt_state), metrics

    def loss_of(self, params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Loss of a minibatch [1, B, ...] or [T, B, ...], and metrics."""
        memory = jax.tree.map(lambda x: x[0], batch.memory)
        q, _ = self.network.apply(params, batch.obs, batch.first, memory)
        return loss(q, batch)

    def q_of(
        self, learner: Learner, obs: jax.Array, first: jax.Array, memory: Any
    ) -> tuple[jax.Array, Any]:
        """Q values [N, n] for raw observations [N, ...], and the memory after them."""
        obs = learner.obs_stats.normalize(obs)
        inputs = jax.tree.map(lambda x: x[None], (obs, first))
        sequence = self.network.apply(learner.params, *inputs, memory)
        return jax.tree.map(lambda x: x[0], sequence)

    def value_of(
        self, learner: Learner, obs: jax.Array, first: jax.Array, memory: Any
    ) -> jax.Array:
        """Value [N] of the best action for raw observations."""
        q, _ = self.q_of(learner, obs, first, memory)
        return jnp.max(q, axis=-1)

    def initial_memory(self, count: int) -> Any:
        """Memory of `count` environments whose episodes begin."""
        return nets.initial_memory(self.args.rnn, self.args.rnn_size, self.args.rnn_layers, count)

    def init(self, key: jax.Array, hparams: HParams) -> Learner:
        """Make the learner before the first update."""
        params = self.network.init(
            key, self.env.example_obs(1, 1), jnp.ones((1, 1), bool), self.initial_memory(1)
        )
        return Learner(
            params=params,
            opt_state=optim.adam_init(params, hparams),
            obs_stats=nets.Normalizer.of(self.env.observation_space, on=self.args.normalize_obs),
            epsilon=hparams.epsilon,
        )

    def act(
        self, learner: Learner, seen: PolicyInput, memory: Any, key: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Choose actions [B] for inputs [B, ...]: epsilon-greedy with a key, else the best.

        Returns:
            Actions, and the memory after the step.
        """
        q, memory = self.q_of(learner, seen.obs, seen.first, memory)
        if key is None:
            return jnp.argmax(q, axis=-1), memory
        policy = nets.epsilon_greedy(q, self.args.epsilon_end, seen.obs)
        return policy.sample_with_key(key), memory


make_algorithm = PQN  # the name by which `load_policy` knows it


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    """Train as the command line does, also on an environment object or with a callback.

    `run_algorithm` describes the arguments and the result.
    """
    return run_algorithm(args, __file__, PQN, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
