"""PPO with memory: a recurrent network trained through time (Schulman et al. 2017).

docs/ppo-rnn.md explains this file.

python algos/ppo_rnn_pmap.py --env MemoryChain-bsuite
python algos/ppo_rnn_pmap.py --help
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
    RecurrentArgs,
    main,
    parse,
)


@dataclass(kw_only=True)
class Args(RecurrentArgs):
    """Train PPO with memory. Sizes such as --num-envs are totals over all devices.

    Environments on the host have other flags.
    """

    # A copy of this file starts from the same tuned flags
    tuned_like: ClassVar[str] = "ppo_rnn_pmap"

    # rollout and advantage
    num_steps: Count = 128
    """Steps of every environment per update."""
    gamma: Discount = 0.99
    """Discount factor."""
    gae_lambda: Discount = 0.95
    """Lambda of generalized advantage estimation (GAE); 0: one-step TD, 1: Monte Carlo."""
    bptt_length: CountOrZero = 0
    """Length of backpropagation through time in steps, a divisor of --num-steps; 0: the whole
    rollout."""

    # optimizer
    update_epochs: Count = 4
    """Passes over the batch per update."""
    num_minibatches: Count = 8
    """Minibatches per epoch, each a gradient step."""
    learning_rate: Positive = 1e-3
    """Initial learning rate of Adam."""
    lr_schedule: Literal["linear", "constant", "kl-adaptive"] = "linear"
    """Learning rate over the run: linear to zero, constant, or adapted so that an update's KL is
    near --desired-kl."""
    desired_kl: Positive = 0.01
    """KL divergence of an update that --lr-schedule kl-adaptive aims at."""
    target_kl: NonNegative = 0.0
    """KL divergence of an epoch above which the rest of the update is skipped; 0: never."""
    max_grad_norm: NonNegative = 0.5
    """Global norm at which gradients are clipped; 0: no clipping."""
    adam_b1: AdamBeta = 0.9
    """Adam's beta1."""
    adam_b2: AdamBeta = 0.999
    """Adam's beta2."""

    # loss
    clip_eps: Positive = 0.2
    """Clipping range of the probability ratio."""
    clip_mode: Literal["ppo", "symmetric"] = "ppo"
    """Ratio interval: ppo is [1 - eps, 1 + eps], symmetric is [1 / (1 + eps), 1 + eps]."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""
    clip_vloss: bool = False
    """Clip the value loss with --clip-eps, like the policy loss."""
    ent_coef: NonNegative = 0.01
    """Initial entropy coefficient, the weight of the exploration loss."""
    ent_fraction: Fraction = 0.0
    """Fraction of the run over which the entropy coefficient decays linearly to 0; 0: constant."""
    exploration_loss: Literal["entropy", "symmetric-kl"] = "entropy"
    """Exploration loss: the policy's entropy, or its symmetric KL to the uniform policy (not for
    Box actions)."""

    # normalization
    norm_adv: bool = True
    """Normalize advantages over each minibatch, across all devices."""
    normalize_returns: bool = True
    """Let the critic predict normalized returns (PopArt), so that the scale of rewards does not
    matter."""
    normalize_obs: bool = False
    """Normalize observations by their running mean and standard deviation."""

    # network
    activation: Literal["tanh", "relu", "swish", "gelu"] = "tanh"
    """Activation of the hidden layers."""
    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Widths of the hidden layers of the actor and of the critic."""
    share_torso: bool = False
    """Share the hidden and recurrent layers of actor and critic: half the computation."""
    encoder: Literal["small", "nature", "impala", "flat"] = "small"
    """Image encoder: small (a 3 x 3 convolution with 16 channels), nature (the Nature DQN network),
    impala (IMPALA's ResNet) or flat (none)."""
    rnn: Literal["gru", "lstm"] = "gru"
    """Recurrent cells behind the hidden layers."""
    rnn_size: Count = 128
    """Width of the recurrent layers."""
    rnn_layers: Layers = 1
    """Number of recurrent layers."""
    rnn_span: CountOrZero = 128
    """Longest time scale of the recurrent cells at initialization, in steps (chrono
    initialization, Tallec and Ollivier 2018); 0: 2 steps for all."""
    obs_prev_action_reward: bool = False
    """Feed the previous action and reward to the recurrent layers too."""

    @property
    def samples_per_env(self) -> int:
        """Samples of a rollout per environment: one sequence, because its steps stay together."""
        return 1

    @property
    def sequence_length(self) -> int:
        """Steps of a segment that gradients go through."""
        return self.bptt_length or self.num_steps

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("bptt_length", "num_steps")


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
    flat_size,
    nets,
    optim,
    run_algorithm,
)

# --------------------------------------------------------------------------------------------------
# networks


class Actor(nn.Module):
    """Network of the policy: a distribution over actions, its features [T, N, F], and memories."""

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(
        self, inputs: nets.Inputs, memory: Any
    ) -> tuple[nets.Distribution, jax.Array, Any]:
        space = self.env.policy_obs_space
        x, memory = nets.RecurrentTorso.of(self.args, space)(inputs, memory)
        policy = nets.PolicyHead(self.env.action_space)(x, inputs.obs)
        return policy, x, memory


class Critic(nn.Module):
    """Network of the value [T, N], with a memory of its own.

    With --share-torso it takes the actor's features.
    """

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(self, x: nets.Inputs | jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        if isinstance(x, nets.Inputs):
            torso = nets.RecurrentTorso.of(self.args, self.env.observation_space)
            x, memory = torso(x, memory)
        value = nn.Dense(1, kernel_init=nn.initializers.zeros, name="value")(x)[..., 0]
        return value, memory


# --------------------------------------------------------------------------------------------------
# records

Metrics = dict[str, jax.Array]
"""Numbers [] of an update, by name."""


class Params(NamedTuple):
    actor: Any
    critic: Any


class Memory(NamedTuple):
    """Memory that is carried from step to step, [N, ...]."""

    actor: Any  # memory of the actor's recurrent layers
    critic: Any  # the same of the critic; () with --share-torso, or if only the policy acts
    action: jax.Array  # [N, A] last action, encoded


class Learner(struct.PyTreeNode):
    """Parameters, optimizer and normalizers, the same on every device."""

    params: Params
    opt_state: Any
    obs_stats: nets.Normalizer
    return_stats: nets.Normalizer  # of value targets; converts them to the critic's units


class Extras(NamedTuple):
    """Outputs of the networks that a rollout keeps, [T, N, ...]."""

    policy: nets.Distribution  # the distribution that the action came from
    value: jax.Array  # in units of the rewards
    memory: Memory  # after the step


class Batch(NamedTuple):
    """Samples for the losses, [L, T / L, N, ...].

    Each rollout is cut into T / L segments of L steps. Gradients stay within a segment.
    """

    inputs: nets.Inputs
    memory: Memory  # [1, T / L, N, ...] at the start of each segment, as the rollout had it
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


# --------------------------------------------------------------------------------------------------
# maths


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    gae_lambda: float,
) -> jax.Array:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16).

    Termination drops the bootstrap value; termination and truncation both stop the sum.

    Args:
        reward: [T, N] rewards.
        value: [T, N] values of the observations.
        next_value: [T, N] value of the next observation; at a truncation, of the final observation.
        terminated: [T, N] bool, True where the episode ended, but not by a time limit.
        truncated: [T, N] bool, True where a time limit ended the episode.
        gamma: discount factor.
        gae_lambda: weight of later errors.

    Returns:
        [T, N] advantages, in units of the rewards.
    """
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def backward(advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * advantage
        return advantage, advantage

    start = jnp.zeros_like(delta[0])
    _, advantages = optim.unrolled_scan(backward, start, (delta, decay), reverse=True)
    return advantages


def ratio_bounds(clip_eps: float, clip_mode: str) -> tuple[float, float]:
    """Interval to which the probability ratio is clipped."""
    low = 1 - clip_eps if clip_mode == "ppo" else 1 / (1 + clip_eps)
    return low, 1 + clip_eps


def policy_loss(ratio: jax.Array, advantage: jax.Array, bounds: tuple[float, float]) -> jax.Array:
    """Clipped surrogate objective of each sample (Schulman et al. 2017, eq. 7), to be minimized."""
    clipped = jnp.clip(ratio, *bounds)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def value_loss(
    value: jax.Array,
    old_value: jax.Array,
    target: jax.Array,
    clip_eps: float | None,
) -> jax.Array:
    """Half the squared error of each sample.

    With `clip_eps`, the larger of this error and the error of the clipped value.
    """
    error = jnp.square(value - target)
    if clip_eps is not None:
        clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
        error = jnp.maximum(error, jnp.square(clipped - target))
    return 0.5 * error


def loss(
    policy: nets.Distribution, value: jax.Array, batch: Batch, hparams: HParams
) -> tuple[jax.Array, Metrics]:
    """Policy, value and exploration loss (Schulman et al. 2017, eq. 9).

    Args:
        policy: distributions over actions of sequences [L, B].
        value: [L, B] values.
        batch: the sequences [L, B, ...].
        hparams: hyperparameters of this update.

    Returns:
        The loss [], and metrics [].
    """
    log_ratio = policy.log_prob(batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    entropy = policy.entropy()
    bounds = ratio_bounds(hparams.clip_eps, hparams.clip_mode)
    clip_value = hparams.clip_eps if hparams.clip_vloss else None
    symmetric_kl = hparams.exploration_loss == "symmetric-kl"
    metrics = optim.mean_each(
        {
            "loss/policy": policy_loss(ratio, batch.advantage, bounds),
            "loss/value": value_loss(value, batch.value, batch.target, clip_value),
            "loss/exploration": policy.symmetric_kl_to_uniform() if symmetric_kl else -entropy,
            "policy/entropy": entropy,
            "policy/approx_kl": ratio - 1 - log_ratio,  # Schulman's k3 estimator
            "policy/clip_fraction": (ratio < bounds[0]) | (ratio > bounds[1]),
        }
    )
    total = (
        metrics["loss/policy"]
        + hparams.vf_coef * metrics["loss/value"]
        + hparams.ent_coef * metrics["loss/exploration"]
    )
    return total, metrics | {
        "loss/total": total,
        "policy/log_ratio_max": jnp.max(jnp.abs(log_ratio)),
    }


def in_segments(tree: Any, num_segments: int) -> Any:
    """Cut a rollout [T, N, ...] in time into segments of L steps, [L, T / L, N, ...]."""

    def cut(x: jax.Array) -> jax.Array:
        segments = x.reshape(num_segments, -1, *x.shape[1:])  # [T / L, L, N, ...]
        return jnp.swapaxes(segments, 0, 1)

    return jax.tree.map(cut, tree)


def side_by_side(tree: Any) -> Any:
    """Merge the axes of segments and environments: [L, T / L, N, ...] to [L, B, ...]."""
    return jax.tree.map(lambda x: x.reshape(len(x), -1, *x.shape[3:]), tree)


# --------------------------------------------------------------------------------------------------
# algorithm


class RecurrentPPO(RecurrentOnPolicy[Args, Learner]):
    """PPO with memory, as pure functions of one agent on one device."""

    @cached_property
    def actor(self) -> Actor:
        return Actor(self.args, self.env)

    @cached_property
    def critic(self) -> Critic:
        return Critic(self.args, self.env)

    @property
    def wants_reward(self) -> bool:
        """True if the networks see the last reward."""
        return self.args.obs_prev_action_reward

    def explore(
        self, learner: Learner, seen: PolicyInput, memory: Memory, noise: jax.Array
    ) -> tuple[jax.Array, Extras, Memory]:
        """Sample the actions [N, ...] of a step.

        Returns:
            Actions, outputs for the rollout to keep, and the memory after the step.
        """
        policy, value, memory = self.step_networks(learner, seen, memory)
        action = policy.sample(noise)
        memory = memory._replace(action=nets.encode_action(action, self.env.action_space))
        extras = Extras(policy=policy, value=value, memory=memory)
        return action, extras, memory

    def update(
        self, learner: Learner, rollout: Rollout, context: UpdateContext
    ) -> tuple[Learner, Metrics]:
        """Learn from a rollout [T, N, ...]: estimate advantages, then learn (algorithm 1)."""
        batch, estimate_metrics = self.estimate(learner, rollout, context.hparams)
        learner, batch = nets.popart(learner, batch)
        learner, learn_metrics = self.learn(learner, batch, context)
        learner = learner.replace(obs_stats=learner.obs_stats.update(rollout.obs))
        return learner, estimate_metrics | learn_metrics

    def estimate(
        self, learner: Learner, rollout: Rollout, hparams: HParams
    ) -> tuple[Batch, Metrics]:
        """Estimate advantages and value targets, in units of the rewards, and cut segments."""
        policy, value, memory = rollout.extras
        last = rollout.last, jax.tree.map(lambda x: x[-1], memory)
        final_input = PolicyInput(
            obs=rollout.final_obs,
            first=jnp.zeros_like(rollout.terminated),
            reward=rollout.reward,
        )
        next_value = rollout.next_values(
            value,
            value_of=lambda x: self.step_networks(learner, *x)[1],
            last=last,
            final=(final_input, memory),
        )
        advantage = gae(
            reward=rollout.reward,
            value=value,
            next_value=next_value,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            gamma=hparams.gamma,
            gae_lambda=hparams.gae_lambda,
        )

        memory_before = jax.tree.map(
            lambda x, after: jnp.concatenate([x[None], after[:-1]]), rollout.memory, memory
        )
        batch = Batch(
            inputs=self.inputs_of(learner, rollout.seen, memory_before),
            memory=jax.tree.map(lambda x: x[:: self.args.sequence_length], memory_before),
            action=rollout.action,
            log_prob=policy.log_prob(rollout.action),
            value=value,
            advantage=advantage,
            target=advantage + value,
        )
        metrics = optim.value_metrics(value, batch.target, advantage)
        return in_segments(batch, self.args.num_steps // self.args.sequence_length), metrics

    def learn(
        self, learner: Learner, batch: Batch, context: UpdateContext
    ) -> tuple[Learner, Metrics]:
        """Take gradient steps on the minibatches of all epochs.

        After an epoch whose KL divergence exceeds --target-kl, later epochs change nothing.
        """
        hparams = context.hparams
        # [E, M, B] environments, each with all its steps
        minibatches = context.minibatches(self.args.update_epochs, self.args.num_minibatches)
        # [E, M, L, T / L, B]
        advantage = jnp.moveaxis(batch.advantage[..., minibatches], (2, 3), (0, 1))
        if self.args.norm_adv:
            advantage = optim.standardize(advantage, axis=(2, 3, 4))

        def step(carry, inputs):
            params, opt_state = carry
            envs, advantage = inputs
            minibatch = jax.tree.map(lambda x: x[:, :, envs], batch)._replace(advantage=advantage)
            minibatch = side_by_side(minibatch)
            minibatch_loss = partial(self.loss_of, batch=minibatch, hparams=hparams)
            # The gradient is the mean over all devices
            params, opt_state, metrics = optim.adam_step(minibatch_loss, params, opt_state, hparams)
            return (params, opt_state), metrics

        start = learner.params, learner.opt_state
        (params, opt_state), metrics = optim.run_epochs(
            step, start, (minibatches, advantage), hparams.target_kl
        )
        # The first minibatch of the last epoch measures the KL after the update; XLA drops the rest
        # of the loss, because nothing uses it
        first = jax.tree.map(lambda x: x[:, :, minibatches[-1, 0]], batch)
        _, after = self.loss_of(params, side_by_side(first), hparams)
        kl = after["policy/approx_kl"]
        opt_state = optim.adapt_learning_rate(opt_state, kl, hparams)
        learner = learner.replace(params=params, opt_state=opt_state)
        return learner, metrics | {"policy/approx_kl": kl}

    def loss_of(self, params: Params, batch: Batch, hparams: HParams) -> tuple[jax.Array, Metrics]:
        """Loss of a minibatch [L, B, ...], and metrics."""
        memory = jax.tree.map(lambda x: x[0], batch.memory)
        policy, value, _ = self.outputs(params, batch.inputs, memory)
        return loss(policy, value, batch, hparams)

    def step_networks(
        self, learner: Learner, seen: PolicyInput, memory: Memory
    ) -> tuple[nets.Distribution, jax.Array, Memory]:
        """Policy, value [N] in units of the rewards, and memory after one step."""
        inputs = jax.tree.map(lambda x: x[None], self.inputs_of(learner, seen, memory))
        sequence = self.outputs(learner.params, inputs, memory)
        policy, value, after = jax.tree.map(lambda x: x[0], sequence)
        return policy, learner.return_stats.denormalize(value), memory._replace(**after)

    def outputs(
        self, params: Params, inputs: nets.Inputs, memory: Memory
    ) -> tuple[nets.Distribution, jax.Array, dict]:
        """Policies and values [T, N] of a sequence that begins with `memory`.

        Returns:
            Policies, values, and the memories of actor and critic after each step.
        """
        outcome: Any = self.actor.apply(params.actor, inputs, memory.actor)
        policy, features, actor_memory = outcome
        value, critic_memory = self.critic.apply(
            params.critic, features if self.args.share_torso else inputs, memory.critic
        )
        return policy, value, {"actor": actor_memory, "critic": critic_memory}

    def inputs_of(self, learner: Learner, seen: PolicyInput, memory: Memory) -> nets.Inputs:
        """Inputs of the networks [..., N, ...] for raw observations."""
        return nets.Inputs.of(seen, memory.action, learner.obs_stats.normalize(seen.obs))

    def initial_memory(self, count: int) -> Memory:
        """Memory of the policy alone, for `count` environments whose episodes begin."""
        return Memory(
            actor=nets.initial_memory(
                self.args.rnn, self.args.rnn_size, self.args.rnn_layers, count
            ),
            critic=(),
            action=jnp.zeros((count, flat_size(self.env.action_space))),
        )

    def training_memory(self, count: int) -> Memory:
        """Memory of `explore`, with the critic's."""
        return self.with_critic(self.initial_memory(count))

    def with_critic(self, memory: Memory) -> Memory:
        """Add the critic's memory, which begins as the actor's does."""
        return memory if self.args.share_torso else memory._replace(critic=memory.actor)

    def init(self, key: jax.Array, hparams: HParams) -> Learner:
        """Make the learner before the first update."""
        actor_key, critic_key = jax.random.split(key)
        obs = self.env.example_obs(1)
        memory = self.initial_memory(1)
        inputs = nets.Inputs.of(PolicyInput.at_start(obs), memory.action, obs)
        inputs = jax.tree.map(lambda x: x[None], inputs)
        (_, features, _), actor_params = self.actor.init_with_output(
            actor_key, inputs, memory.actor
        )
        critic_params = self.critic.init(
            critic_key, features if self.args.share_torso else inputs, memory.actor
        )
        params = Params(actor=actor_params, critic=critic_params)
        return Learner(
            params=params,
            opt_state=optim.adam_init(params, hparams),
            obs_stats=nets.Normalizer.of(self.env.observation_space, on=self.args.normalize_obs),
            return_stats=nets.Normalizer.of_numbers(on=self.args.normalize_returns),
        )

    def act(
        self, learner: Learner, seen: PolicyInput, memory: Memory, key: jax.Array | None = None
    ) -> tuple[jax.Array, Memory]:
        """Choose actions [B, ...] for inputs [B, ...]: sampled with a key, else the most likely.

        Returns:
            Actions, and the memory after the step.
        """
        # XLA drops the values, which are not used
        policy, _, memory = self.step_networks(learner, seen, self.with_critic(memory))
        action = policy.mode() if key is None else policy.sample_with_key(key)
        encoded = nets.encode_action(action, self.env.action_space)
        return action, memory._replace(critic=(), action=encoded)


make_algorithm = RecurrentPPO  # the name by which `load_policy` knows it


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    """Train as the command line does, also on an environment object or with a callback.

    `run_algorithm` describes the arguments and the result.
    """
    return run_algorithm(args, __file__, RecurrentPPO, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
