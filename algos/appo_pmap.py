"""Asynchronous PPO and IMPALA (Espeholt et al. 2018) for environments on the host.

docs/appo.md explains this file.

python algos/appo_pmap.py --env envpool:CartPole-v1
python algos/appo_pmap.py --help
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pmaprl.flags import (
    ActorArgs,
    AdamBeta,
    Bounds,
    Count,
    CountOrZero,
    Discount,
    Fraction,
    Layers,
    NonNegative,
    Positive,
    main,
    parse,
)


@dataclass(kw_only=True)
class Args(ActorArgs):
    """Train APPO or IMPALA on environments that step on the host, in threads beside the learner."""

    tuned_like: ClassVar[str] = "appo_pmap"  # a copy of this file starts from the same tuned flags

    # advantage
    gamma: Discount = 0.99
    """Discount factor."""
    advantage: Literal["vtrace", "gae"] = "vtrace"
    """Advantage estimator: V-trace, which corrects for stale policies, or GAE, which does not."""
    gae_lambda: Discount = 0.95
    """Lambda of GAE and of V-trace."""
    rho_clip: Positive = 1.0
    """V-trace's rho-bar: largest importance weight of a step's own error."""
    c_clip: Positive = 1.0
    """V-trace's c-bar: largest importance weight with which later errors reach back a step."""
    max_policy_lag: CountOrZero = 0
    """Updates by which a step's policy may be stale before the step is left out; 0: no limit."""

    # optimizer
    update_epochs: Count = 4
    """Passes over the batch per update."""
    num_minibatches: Count = 4
    """Minibatches per epoch, each a gradient step."""
    learning_rate: Positive = 1e-3
    """Initial learning rate of Adam."""
    lr_schedule: Literal["linear", "constant"] = "linear"
    """Learning rate over the run: linear to zero, or constant."""
    max_grad_norm: NonNegative = 0.5
    """Global norm at which gradients are clipped; 0: no clipping."""
    adam_b1: AdamBeta = 0.9
    """Adam's beta1."""
    adam_b2: AdamBeta = 0.999
    """Adam's beta2."""

    # loss
    loss: Literal["appo", "impala"] = "appo"
    """Policy loss: PPO's clipped ratio, or IMPALA's policy gradient with clipped importance
    weights."""
    clip_eps: Positive = 0.2
    """Clipping range of the probability ratio of --loss appo."""
    clip_mode: Literal["ppo", "symmetric"] = "ppo"
    """Ratio interval: ppo is [1 - eps, 1 + eps], symmetric is [1 / (1 + eps), 1 + eps]."""
    pg_rho_clip: Positive = 1.0
    """Largest importance weight of the policy gradient of --loss impala."""
    ratio_clamp: Annotated[float, Bounds(at_least=1)] = 20.0
    """Bound x of probability ratios, which are clamped to 1 / x .. x before any use."""
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
    """Widths of the hidden layers, behind the convolutions where observations are images."""
    share_torso: bool = False
    """Share the hidden layers of policy and value function: half the computation, which pays off
    with images."""
    encoder: Literal["small", "nature", "impala", "flat"] = "small"
    """Image encoder: small (a 3 x 3 convolution with 16 channels), nature (the Nature DQN network),
    impala (IMPALA's ResNet) or flat (none)."""
    rnn: Literal["none", "gru", "lstm"] = "none"
    """Recurrent cells behind the hidden layers; actors carry their state from rollout to
    rollout."""
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

    def sizes(self, num_devices: int) -> list[str]:
        """Derived sizes, for the header of a run."""
        minibatch = self.steps_per_update // self.num_minibatches
        learning = (
            f"{self.update_epochs} epochs x {self.num_minibatches} minibatches of {minibatch:,}"
        )
        return [*super().sizes(num_devices), learning]

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
# networks


class Network(nn.Module):
    """Network of policies and values [T, N], and the memories after each step."""

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(self, obs: jax.Array, first: jax.Array, memory: "Memory"):
        args = self.args
        layers = partial(nets.Recurrent, args.rnn, args.rnn_size, args.rnn_span, args.dtype)
        x = nets.Torso.of(args, self.env.policy_obs_space, name="torso")(obs)
        x, policy_memory = layers(name="memory")(x, first, memory.policy)
        y = x
        value_memory = ()
        if not args.share_torso:
            y = nets.Torso.of(args, self.env.observation_space, name="value_torso")(obs)
            y, value_memory = layers(name="value_memory")(y, first, memory.value)
        value = nn.Dense(1, kernel_init=nn.initializers.zeros, name="value")(y)[..., 0]
        policy = nets.PolicyHead(self.env.action_space, name="policy")(x, obs)
        return policy, value, Memory(policy=policy_memory, value=value_memory)


# --------------------------------------------------------------------------------------------------
# records

Metrics = dict[str, jax.Array]
"""Numbers [] of an update, by name."""


class Learner(struct.PyTreeNode):
    """Parameters, optimizer and normalizers, the same on every learner device."""

    params: Any
    opt_state: Any
    obs_stats: nets.Normalizer
    return_stats: nets.Normalizer  # of value targets; converts them to the network's units


class Memory(NamedTuple):
    """Memory of recurrent layers, carried from step to step, [N, ...]; () without such layers."""

    policy: Any
    value: Any  # () also if policy and value share the layers


class Batch(NamedTuple):
    """Samples for the losses: steps [1, T * N, ...], or with memory sequences [T, N, ...]."""

    obs: jax.Array  # as the network takes it
    first: jax.Array  # bool, True where an episode begins
    memory: Memory  # [1, N, ...] before the first step, as the actor had it
    action: jax.Array
    log_prob: jax.Array  # under the policy that acted
    value: jax.Array  # before this update
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array  # 1 for steps to learn from, else 0


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


def vtrace(
    log_rho: jax.Array,
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    lambda_: float,
    rho_clip: float,
    c_clip: float,
) -> tuple[jax.Array, jax.Array]:
    """V-trace value targets and advantages (Espeholt et al. 2018, eq. 1 and section 4.2).

    Args:
        log_rho: [T, N] log-probability of each action under the current policy, minus its
            log-probability under the policy that acted.
        reward: [T, N] rewards.
        value: [T, N] values of the observations.
        next_value: [T, N] value of the next observation; at a truncation, of the final observation.
        terminated: [T, N] bool, True where the episode ended, but not by a time limit.
        truncated: [T, N] bool, True where a time limit ended the episode.
        gamma: discount factor.
        lambda_: weight of later errors.
        rho_clip: rho-bar, the largest importance weight of a step's own error.
        c_clip: c-bar, the largest importance weight with which later errors reach back a step.

    Returns:
        [T, N] targets, and [T, N] advantages without the importance weight of their own action.
    """
    rho = jnp.exp(log_rho)
    done = terminated | truncated
    next_value = jnp.where(terminated, 0.0, next_value)
    delta = jnp.minimum(rho, rho_clip) * (reward + gamma * next_value - value)
    decay = gamma * lambda_ * jnp.minimum(rho, c_clip) * (1.0 - done)

    def backward(correction, inputs):
        delta, decay = inputs
        correction = delta + decay * correction
        return correction, correction

    start = jnp.zeros_like(delta[0])
    _, correction = jax.lax.scan(backward, start, (delta, decay), reverse=True)
    # The next value has no correction where an episode ends, nor at the last step
    following = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    next_correction = following * (1.0 - done)
    advantage = reward + gamma * (next_value + lambda_ * next_correction) - value
    return value + correction, advantage


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


def log_ratio(log_prob: jax.Array, old_log_prob: jax.Array, clamp: float) -> jax.Array:
    """Logarithm of probability ratios, which are clamped to 1 / `clamp` .. `clamp`."""
    return jnp.clip(log_prob - old_log_prob, -math.log(clamp), math.log(clamp))


def loss(
    policy: nets.Distribution, value: jax.Array, batch: Batch, hparams: HParams
) -> tuple[jax.Array, Metrics]:
    """Policy, value and exploration loss, averaged over the samples of weight 1.

    Args:
        policy: distributions over actions of samples [1, B], or of sequences [T, B].
        value: values in that shape.
        batch: the samples, in that shape.
        hparams: hyperparameters of this update.

    Returns:
        The loss [], and metrics [].
    """
    mean = partial(optim.weighted_mean, batch.weight)
    log_prob = policy.log_prob(batch.action)
    clamped = log_ratio(log_prob, batch.log_prob, hparams.ratio_clamp)
    ratio = jnp.exp(clamped)
    entropy = mean(policy.entropy())
    advantage = batch.advantage
    if hparams.norm_adv:
        advantage = optim.standardize(advantage, weight=batch.weight)
    bounds = ratio_bounds(hparams.clip_eps, hparams.clip_mode)
    clip_value = hparams.clip_eps if hparams.clip_vloss else None
    symmetric_kl = hparams.exploration_loss == "symmetric-kl"
    losses = {
        "loss/policy": mean(policy_loss(ratio, advantage, bounds)),
        "loss/value": mean(value_loss(value, batch.value, batch.target, clip_value)),
        "loss/exploration": mean(policy.symmetric_kl_to_uniform()) if symmetric_kl else -entropy,
    }
    if hparams.loss == "impala":
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, hparams.pg_rho_clip))
        losses["loss/policy"] = -mean(weight * advantage * log_prob)
    total = (
        losses["loss/policy"]
        + hparams.vf_coef * losses["loss/value"]
        + hparams.ent_coef * losses["loss/exploration"]
    )
    metrics = losses | {
        "loss/total": total,
        "policy/entropy": entropy,
        # From the policy that acted to the current one
        "policy/approx_kl": mean(ratio - 1 - clamped),
        "policy/clip_fraction": mean((ratio < bounds[0]) | (ratio > bounds[1])),
    }
    return total, metrics


# --------------------------------------------------------------------------------------------------
# algorithm


class APPO(RecurrentOnPolicy[Args, Learner]):
    """Asynchronous PPO and IMPALA, as pure functions of one agent on one device."""

    @cached_property
    def network(self) -> Network:
        return Network(self.args, self.env)

    def explore(
        self, learner: Learner, seen: PolicyInput, memory: Memory, noise: jax.Array
    ) -> tuple[jax.Array, jax.Array, Memory]:
        """Sample the actions [N, ...] of a step.

        Returns:
            Actions, their log-probabilities [N], and the memory after the step.
        """
        policy, _, memory = self.step_network(learner, seen.obs, seen.first, memory)
        action = policy.sample(noise)
        return action, policy.log_prob(action), memory

    def update(
        self, learner: Learner, rollout: Rollout, context: UpdateContext
    ) -> tuple[Learner, Metrics]:
        """Learn from this device's share of the rollouts, corrected for the policies' lag."""
        batch, estimate_metrics = self.estimate(learner, rollout, context)
        learner, batch = nets.popart(learner, batch, batch.weight > 0)
        learner, learn_metrics = self.learn(learner, batch, context)
        learner = learner.replace(obs_stats=learner.obs_stats.update(rollout.obs, rollout.valid))
        return learner, estimate_metrics | learn_metrics

    def estimate(
        self, learner: Learner, rollout: Rollout, context: UpdateContext
    ) -> tuple[Batch, Metrics]:
        """Estimate values, advantages and targets, in units of the rewards."""
        hparams = context.hparams
        # The loss repeats this pass: with one gradient step per update, both compile into one
        obs = learner.obs_stats.normalize(rollout.obs)
        obs, first = self.as_samples((obs, rollout.seen.first))
        outcome = self.network.apply(learner.params, obs, first, rollout.memory)
        policy, value, memory = jax.tree.map(
            lambda x: x.reshape(*rollout.reward.shape, *x.shape[2:]), outcome
        )
        value = learner.return_stats.denormalize(value)  # [T, N]
        last = rollout.last.obs, rollout.last.first, jax.tree.map(lambda x: x[-1], memory)
        final = rollout.final_obs, jnp.zeros_like(rollout.terminated), memory
        next_value = rollout.next_values(
            value,
            value_of=lambda x: self.value_of(learner, *x),
            last=last,
            final=final,
        )
        log_rho = log_ratio(policy.log_prob(rollout.action), rollout.extras, hparams.ratio_clamp)
        if self.args.advantage == "gae":
            advantage = gae(
                reward=rollout.reward,
                value=value,
                next_value=next_value,
                terminated=rollout.terminated,
                truncated=rollout.truncated,
                gamma=hparams.gamma,
                gae_lambda=hparams.gae_lambda,
            )
            target = value + advantage
        else:
            target, advantage = vtrace(
                log_rho=log_rho,
                reward=rollout.reward,
                value=value,
                next_value=next_value,
                terminated=rollout.terminated,
                truncated=rollout.truncated,
                gamma=hparams.gamma,
                lambda_=hparams.gae_lambda,
                rho_clip=hparams.rho_clip,
                c_clip=hparams.c_clip,
            )
        # Rollouts of actors say which steps count, and how old their policies are
        assert rollout.valid is not None
        assert rollout.version is not None
        weight = rollout.valid
        if self.args.max_policy_lag:
            weight = weight & (context.updates - rollout.version <= self.args.max_policy_lag)
        weight = weight.astype(jnp.float32)
        mean = partial(optim.weighted_mean, weight)
        metrics = {
            "value/mean": mean(value),
            "value/target": mean(target),
            "policy/rho": mean(jnp.exp(log_rho)),
        }
        batch = Batch(
            obs=obs,
            first=first,
            memory=jax.tree.map(lambda x: x[None], rollout.memory),
            action=self.as_samples(rollout.action),
            log_prob=self.as_samples(rollout.extras),
            value=self.as_samples(value),
            advantage=self.as_samples(advantage),
            target=self.as_samples(target),
            weight=self.as_samples(weight),
        )
        return batch, metrics

    def as_samples(self, tree: Any) -> Any:
        """Put samples along the second axis of [T, N, ...]: steps, or with memory sequences."""
        if self.args.rnn != "none":
            return tree
        return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), tree)

    def learn(
        self, learner: Learner, batch: Batch, context: UpdateContext
    ) -> tuple[Learner, Metrics]:
        """Take gradient steps on the minibatches of all epochs."""
        hparams = context.hparams
        epochs = self.args.update_epochs
        minibatches = context.minibatches(epochs, self.args.num_minibatches)  # [E, M, B]

        def step(carry, indices):
            params, opt_state = carry
            minibatch = batch
            if self.args.num_minibatches > 1:
                minibatch = jax.tree.map(lambda x: x[:, indices], batch)
            minibatch_loss = partial(self.loss_of, batch=minibatch, hparams=hparams)
            # The gradient is the mean over all devices
            params, opt_state, metrics = optim.adam_step(minibatch_loss, params, opt_state, hparams)
            return (params, opt_state), metrics

        start = learner.params, learner.opt_state
        if minibatches.shape[:2] == (1, 1):
            (params, opt_state), metrics = step(start, minibatches[0, 0])
        else:
            (params, opt_state), metrics = optim.run_epochs(step, start, minibatches)
        # The first minibatch of the last epoch measures the KL after the update; XLA drops the rest
        # of the loss, because nothing uses it
        first = jax.tree.map(lambda x: x[:, minibatches[-1, 0]], batch)
        _, after = self.loss_of(params, first, hparams)
        learner = learner.replace(params=params, opt_state=opt_state)
        return learner, metrics | {"policy/approx_kl": after["policy/approx_kl"]}

    def loss_of(self, params: Any, batch: Batch, hparams: HParams) -> tuple[jax.Array, Metrics]:
        """Loss of a minibatch [1, B, ...] or [T, B, ...], and metrics."""
        memory = jax.tree.map(lambda x: x[0], batch.memory)
        outcome: Any = self.network.apply(params, batch.obs, batch.first, memory)
        policy, value, _ = outcome
        return loss(policy, value, batch, hparams)

    def step_network(self, learner: Learner, obs: jax.Array, first: jax.Array, memory: Memory):
        """Policy, value in the network's units, and memory after one step, for raw observations."""
        obs = learner.obs_stats.normalize(obs)
        inputs = jax.tree.map(lambda x: x[None], (obs, first))
        sequence = self.network.apply(learner.params, *inputs, memory)
        return jax.tree.map(lambda x: x[0], sequence)

    def value_of(
        self, learner: Learner, obs: jax.Array, first: jax.Array, memory: Memory
    ) -> jax.Array:
        """Values of raw observations, in units of the rewards."""
        _, value, _ = self.step_network(learner, obs, first, memory)
        return learner.return_stats.denormalize(value)

    def initial_memory(self, count: int) -> Memory:
        """Memory of the policy alone, for `count` environments whose episodes begin."""
        layers = nets.initial_memory(self.args.rnn, self.args.rnn_size, self.args.rnn_layers, count)
        return Memory(policy=layers, value=())

    def training_memory(self, count: int) -> Memory:
        """Memory of `explore`, with that of the values."""
        return self.with_values(self.initial_memory(count))

    def with_values(self, memory: Memory) -> Memory:
        """Add the memory of the values, which begins as the policy's does."""
        return memory if self.args.share_torso else memory._replace(value=memory.policy)

    def init(self, key: jax.Array, hparams: HParams) -> Learner:
        """Make the learner before the first update."""
        first = jnp.ones((1, 1), bool)
        params = self.network.init(
            key, self.env.example_obs(1, 1), first, self.with_values(self.initial_memory(1))
        )
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
        policy, _, memory = self.step_network(
            learner, seen.obs, seen.first, self.with_values(memory)
        )
        action = policy.mode() if key is None else policy.sample_with_key(key)
        return action, memory._replace(value=())


make_algorithm = APPO  # the name by which `load_policy` knows it


def train(args: Args, callback: Any = None) -> Any:
    """Train as the command line does, also with a callback.

    `run_algorithm` describes the arguments and the result.
    """
    return run_algorithm(args, __file__, APPO, None, callback)


if __name__ == "__main__":
    main(train, ARGS)
