"""Proximal Policy Optimization (Schulman et al. 2017), data-parallel over every device.

docs/ppo.md explains this file.

python algos/ppo_pmap.py --env CartPole-v1
python algos/ppo_pmap.py --help
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

from pmaprl.flags import (
    AdamBeta,
    Count,
    Discount,
    Fraction,
    NonNegative,
    OnPolicyArgs,
    Positive,
    main,
    parse,
)


@dataclass(kw_only=True)
class Args(OnPolicyArgs):
    """Train PPO. Sizes such as --num-envs are totals over all devices.

    Environments on the host have other flags.
    """

    tuned_like: ClassVar[str] = "ppo_pmap"  # a copy of this file starts from the same tuned flags

    # rollout and advantage
    num_steps: Count = 64
    """Steps of every environment per update."""
    gamma: Discount = 0.99
    """Discount factor."""
    gae_lambda: Discount = 0.95
    """Lambda of generalized advantage estimation (GAE); 0: one-step TD, 1: Monte Carlo."""

    # optimizer
    update_epochs: Count = 4
    """Passes over the batch per update."""
    num_minibatches: Count = 4
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
    """Share the hidden layers of actor and critic: half the computation, and --vf-coef acts on the
    policy too."""
    encoder: Literal["small", "nature", "impala", "flat"] = "small"
    """Image encoder: small (a 3 x 3 convolution with 16 channels), nature (the Nature DQN network),
    impala (IMPALA's ResNet) or flat (none)."""


# Before the slow imports: --help and usage errors answer at once
ARGS = parse(Args) if __name__ == "__main__" else None

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from pmaprl.algorithm import (
    EnvSpec,
    HParams,
    OnPolicy,
    Rollout,
    UpdateContext,
    nets,
    optim,
    run_algorithm,
)

# --------------------------------------------------------------------------------------------------
# networks


class Actor(nn.Module):
    """Network of the policy: a distribution over actions, and its features [B, F]."""

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[nets.Distribution, jax.Array]:
        space = self.env.policy_obs_space
        x = nets.Torso.of(self.args, space)(obs)
        # Observations hold the action mask, if there is one
        policy = nets.PolicyHead(self.env.action_space)(x, obs)
        return policy, x


class Critic(nn.Module):
    """Network of the value [B], from observations or, with --share-torso, the actor's features."""

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.args.share_torso:
            x = nets.Torso.of(self.args, self.env.observation_space)(x)
        # PopArt rescales the layer "value"
        return nn.Dense(1, kernel_init=nn.initializers.zeros, name="value")(x)[..., 0]


# --------------------------------------------------------------------------------------------------
# records

Metrics = dict[str, jax.Array]
"""Numbers [] of an update, by name."""


class Params(NamedTuple):
    actor: Any
    critic: Any


class Learner(struct.PyTreeNode):
    """Parameters, optimizer and normalizers, the same on every device."""

    params: Params
    opt_state: Any
    obs_stats: nets.Normalizer
    return_stats: nets.Normalizer  # of value targets; converts them to the critic's units


class Batch(NamedTuple):
    """Samples for the losses, [T * N, ...]."""

    obs: jax.Array  # as the networks take it
    action: jax.Array
    log_prob: jax.Array
    # `popart` converts these three from units of the rewards to the critic's
    value: jax.Array
    advantage: jax.Array
    target: jax.Array
    acted_by_us: jax.Array | None  # [..., A] bool, True for components that this policy chose


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
        policy: distributions over actions of samples [B].
        value: [B] values.
        batch: the samples [B, ...].
        hparams: hyperparameters of this update.

    Returns:
        The loss [], and metrics [].
    """
    policy = policy.restrict_to(batch.acted_by_us)
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
    return total, metrics | {"loss/total": total}


# --------------------------------------------------------------------------------------------------
# algorithm


class PPO(OnPolicy[Args, Learner]):
    """Proximal Policy Optimization, as pure functions of one agent on one device.

    The driver calls them. `hparams` has the flags `args` with schedules and sweeps applied. Shapes
    and branches come from `args`. Metrics are averaged over devices and over the log interval,
    unless their names end in _sum, _max, _min or _last.
    """

    @cached_property
    def actor(self) -> Actor:
        return Actor(self.args, self.env)

    @cached_property
    def critic(self) -> Critic:
        return Critic(self.args, self.env)

    def explore(
        self, learner: Learner, obs: jax.Array, noise: jax.Array
    ) -> tuple[jax.Array, nets.Distribution]:
        """Sample the actions [N, ...] of a step; `extras` are their distributions."""
        policy = self.policy_of(learner, obs)
        return policy.sample(noise), policy

    def update(
        self, learner: Learner, rollout: Rollout, context: UpdateContext
    ) -> tuple[Learner, Metrics]:
        """Learn from a rollout [T, N, ...]: estimate advantages, then learn (algorithm 1).

        A `Rollout` has obs, action, extras, reward, terminated, truncated, next_obs and, after the
        last step, last.obs.
        """
        batch, estimate_metrics = self.estimate(learner, rollout, context.hparams)
        learner, batch = nets.popart(learner, batch)
        learner, learn_metrics = self.learn(learner, batch, context)
        learner = learner.replace(obs_stats=learner.obs_stats.update(rollout.obs))
        return learner, estimate_metrics | learn_metrics

    def estimate(
        self, learner: Learner, rollout: Rollout, hparams: HParams
    ) -> tuple[Batch, Metrics]:
        """Estimate advantages and value targets, in units of the rewards."""
        value = self.value_of(learner, rollout.obs)  # [T, N]
        next_value = rollout.next_values(value, partial(self.value_of, learner))
        advantage = gae(
            reward=rollout.reward,
            value=value,
            next_value=next_value,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            gamma=hparams.gamma,
            gae_lambda=hparams.gae_lambda,
        )
        policy = rollout.extras.restrict_to(rollout.acted_by_us)
        batch = Batch(
            obs=learner.obs_stats.normalize(rollout.obs),
            action=rollout.action,
            log_prob=policy.log_prob(rollout.action),
            value=value,
            advantage=advantage,
            target=advantage + value,
            acted_by_us=rollout.acted_by_us,
        )
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [T * N, ...]
        return batch, optim.value_metrics(batch.value, batch.target, batch.advantage)

    def learn(
        self, learner: Learner, batch: Batch, context: UpdateContext
    ) -> tuple[Learner, Metrics]:
        """Take gradient steps on the minibatches of all epochs.

        After an epoch whose KL divergence exceeds --target-kl, later epochs change nothing.
        """
        hparams = context.hparams
        epochs = self.args.update_epochs
        minibatches = context.minibatches(epochs, self.args.num_minibatches)  # [E, M, B]
        advantage = optim.gather_samples(batch.advantage, minibatches)
        if self.args.norm_adv:
            advantage = optim.standardize(advantage, axis=-1)

        def step(carry, inputs):
            params, opt_state = carry
            indices, advantage = inputs
            minibatch = optim.gather_samples(batch, indices)._replace(advantage=advantage)
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
        first = optim.gather_samples(batch, minibatches[-1, 0])
        _, after = self.loss_of(params, first, hparams)
        kl = after["policy/approx_kl"]
        opt_state = optim.adapt_learning_rate(opt_state, kl, hparams)
        learner = learner.replace(params=params, opt_state=opt_state)
        return learner, metrics | {"policy/approx_kl": kl}

    def loss_of(self, params: Params, batch: Batch, hparams: HParams) -> tuple[jax.Array, Metrics]:
        """Loss of a minibatch [B, ...], and metrics."""
        policy, value = self.outputs(params, batch.obs)
        return loss(policy, value, batch, hparams)

    def policy_of(self, learner: Learner, obs: jax.Array) -> nets.Distribution:
        """Distributions over actions for raw observations."""
        policy, _ = self.outputs(learner.params, learner.obs_stats.normalize(obs))
        return policy

    def value_of(self, learner: Learner, obs: jax.Array) -> jax.Array:
        """Values of raw observations, in units of the rewards."""
        _, value = self.outputs(learner.params, learner.obs_stats.normalize(obs))
        return learner.return_stats.denormalize(value)

    def outputs(self, params: Params, obs: jax.Array) -> tuple[nets.Distribution, jax.Array]:
        """Policy and value for normalized observations; unused outputs cost nothing."""
        policy, features = self.actor.apply(params.actor, obs)
        value: Any = self.critic.apply(params.critic, features if self.args.share_torso else obs)
        return policy, value

    def init(self, key: jax.Array, hparams: HParams) -> Learner:
        """Make the learner before the first update."""
        actor_key, critic_key = jax.random.split(key)
        obs = self.env.example_obs(1)
        (_, features), actor_params = self.actor.init_with_output(actor_key, obs)
        critic_params = self.critic.init(critic_key, features if self.args.share_torso else obs)
        params = Params(actor=actor_params, critic=critic_params)
        return Learner(
            params=params,
            opt_state=optim.adam_init(params, hparams),
            obs_stats=nets.Normalizer.of(self.env.observation_space, on=self.args.normalize_obs),
            return_stats=nets.Normalizer.of_numbers(on=self.args.normalize_returns),
        )

    def act(self, learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Choose actions [B, ...] for raw observations: sampled with a key, else the best known."""
        policy = self.policy_of(learner, obs)
        return policy.mode() if key is None else policy.sample_with_key(key)


make_algorithm = PPO  # the name by which `load_policy` knows it


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    """Train as the command line does, also on an environment object or with a callback.

    `run_algorithm` describes the arguments and the result.
    """
    return run_algorithm(args, __file__, PPO, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
