"""PPO with memory, a recurrent network trained through time (Schulman et al. 2017); docs/ppo-rnn.md
explains this file.

python algos/ppo_rnn_pmap.py --env MemoryChain-bsuite
python algos/ppo_rnn_pmap.py --help
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from pmaprl.flags import (
    AdamBeta,
    Count,
    CountOrZero,
    Counts,
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
    rollout.
    """

    # optimiser
    update_epochs: Count = 4
    """Passes over the batch per update."""
    num_minibatches: Count = 8
    """Minibatches per epoch, each a gradient step."""
    learning_rate: Positive = 1e-3
    """Initial learning rate of Adam."""
    lr_schedule: Literal["linear", "constant", "kl-adaptive"] = "linear"
    """Learning rate over the run: linear to zero, constant, or adapted so that an update's KL is
    near --desired-kl.
    """
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
    """Clip the value loss by --clip-eps, as the policy loss is."""
    ent_coef: NonNegative = 0.01
    """Initial entropy coefficient, the weight of the exploration loss."""
    ent_fraction: Fraction = 0.0
    """Fraction of the run over which the entropy coefficient decays linearly to zero; 0:
    constant.
    """
    exploration_loss: Literal["entropy", "symmetric-kl"] = "entropy"
    """Exploration loss: the policy's entropy, or its symmetric KL to the uniform policy (not for
    Box actions).
    """

    # normalisation
    norm_adv: bool = True
    """Normalise advantages over each minibatch, across all devices."""
    normalize_returns: bool = True
    """Let the critic predict normalised returns (PopArt), so that the scale of rewards does not
    matter."""
    normalize_obs: bool = False
    """Normalise observations by their running mean and standard deviation."""

    # network
    activation: Literal["tanh", "relu", "swish", "gelu"] = "tanh"
    """Activation of the hidden layers."""
    hidden_sizes: Counts = (64, 64)
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
    """Longest time scale of the recurrent cells at initialisation, in steps (chrono initialisation,
    Tallec and Ollivier 2018); 0: 2 steps for all.
    """
    obs_prev_action_reward: bool = False
    """Feed the previous action and reward to the recurrent layers too."""

    @property
    def samples_per_env(self) -> int:
        """Parts of a rollout of an environment that minibatches may get: all in one."""
        return 1

    @property
    def sequence_length(self) -> int:
        """Steps of a sequence that is learned from."""
        return self.bptt_length or self.num_steps

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("bptt_length", "num_steps")


if __name__ == "__main__":
    ARGS = parse(Args)  # before the slow imports: --help and usage errors answer at once

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from pmaprl.algorithm import (
    EnvSpec,
    HParams,
    OnPolicy,
    PolicyInput,
    Rollout,
    UpdateContext,
    at_start,
    flat_size,
    in_segments,
    nets,
    optim,
    run_algorithm,
    side_by_side,
)

# --------------------------------------------------------------------------------------------------
# networks


class Actor(nn.Module):
    """The policy, a distribution over actions, the features [T, N, F] that it is made of, and
    memories.
    """

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(
        self, inputs: nets.Inputs, memory: Any
    ) -> tuple[nets.Distribution, jax.Array, Any]:
        torso = nets.RecurrentTorso.of(
            self.args, nets.without_privileged(self.env.observation_space)
        )
        x, memory = torso(inputs, memory)
        return nets.PolicyHead(self.env.action_space)(x, inputs.obs), x, memory


class Critic(nn.Module):
    """The value of what was seen, with a memory of its own, or with --share-torso of the actor's
    features.
    """

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(self, x: nets.Inputs | jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        if not self.args.share_torso:
            x, memory = nets.RecurrentTorso.of(self.args, self.env.observation_space)(x, memory)
        # [T, N]
        return nn.Dense(1, kernel_init=nn.initializers.zeros, name="value")(x)[..., 0], memory


# --------------------------------------------------------------------------------------------------
# records


class Params(NamedTuple):
    actor: Any
    critic: Any


class Memory(NamedTuple):
    """What is carried from step to step, [N, ...]."""

    actor: Any  # of recurrent layers
    # Likewise; () where the critic shares them, and where nothing but the policy is wanted
    critic: Any
    action: jax.Array  # the last one as numbers [N, A]


class Learner(struct.PyTreeNode):
    """Parameters, optimiser and normalisers, the same on every device."""

    params: Params
    opt_state: optim.AdamState
    obs_stats: Any  # RunningStats of each part of observations, or None
    return_stats: nets.RunningStats | None  # of value targets: the critic predicts in their units


class Extras(NamedTuple):
    """What a rollout keeps of each step, [T, N, ...]."""

    policy: nets.Distribution  # the distribution that the action came from
    value: jax.Array  # in units of the rewards
    memory: Memory  # after the step


class Batch(NamedTuple):
    """What the losses need of each sample, in S segments of K steps that gradients do not leave,
    [K, S, N, ...].
    """

    inputs: nets.Inputs
    memory: Memory  # [1, S, N, ...] at the start of each segment, as it was then
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


# --------------------------------------------------------------------------------------------------
# maths


def gae(
    reward, value, next_value, terminated, truncated, gamma: float, gae_lambda: float
) -> jax.Array:
    """Advantages [T, N] by generalized advantage estimation (Schulman et al. 2016, eq. 16).

    `next_value` is that of the next observation, where the episode was truncated of its last one.
    Termination drops the bootstrap value; termination and truncation both stop the sum.
    """
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def backward(advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * advantage
        return advantage, advantage

    return optim.unrolled_scan(backward, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]


def ratio_bounds(clip_eps: float, clip_mode: str) -> tuple[float, float]:
    """Interval to which the probability ratio is clipped."""
    return (1 - clip_eps if clip_mode == "ppo" else 1 / (1 + clip_eps)), 1 + clip_eps


def policy_loss(ratio, advantage, bounds) -> jax.Array:
    """Clipped surrogate objective of each sample (Schulman et al. 2017, eq. 7), negated."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, *bounds) * advantage)


def value_loss(value, old_value, target, clip_eps: float | None) -> jax.Array:
    """Half the squared error of each sample; with `clip_eps` the larger of it and of that after a
    clipped change.
    """
    error = jnp.square(value - target)
    if clip_eps is not None:
        clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
        error = jnp.maximum(error, jnp.square(clipped - target))
    return 0.5 * error


def loss(
    policy: nets.Distribution, value: jax.Array, batch: Batch, hparams: HParams
) -> tuple[jax.Array, optim.Metrics]:
    """Policy, value and exploration losses of sequences [K, B, ...] (Schulman et al. 2017, eq. 9),
    and metrics.
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


# --------------------------------------------------------------------------------------------------
# algorithm


def make_ppo_rnn(args: Args, env: EnvSpec) -> OnPolicy:
    """PPO with memory for `env` as pure functions of one agent on one device."""
    actor = Actor(args, env)
    critic = Critic(args, env)

    def explore(
        learner: Learner, seen: PolicyInput, memory: Memory, noise: jax.Array
    ) -> tuple[jax.Array, Extras, Memory]:
        """Actions [N, ...] of a step of the rollout, what it keeps of it, and the memory after
        it.
        """
        policy, value, memory = step_networks(learner, seen, memory)
        action = policy.sample(noise)
        memory = memory._replace(action=nets.encode_action(action, env.action_space))
        return action, Extras(policy, value, memory), memory

    def update(
        learner: Learner, rollout: Rollout, context: UpdateContext
    ) -> tuple[Learner, optim.Metrics]:
        """One iteration of PPO (algorithm 1), after the rollout: estimate advantages, learn."""
        batch, estimate_metrics = estimate(learner, rollout, context.hparams)
        learner, batch = nets.popart(learner, batch)
        learner, learn_metrics = learn(learner, batch, context)
        learner = learner.replace(obs_stats=nets.update_stats(learner.obs_stats, rollout.obs))
        return learner, estimate_metrics | learn_metrics

    def estimate(
        learner: Learner, rollout: Rollout, hparams: HParams
    ) -> tuple[Batch, optim.Metrics]:
        """Advantages and value targets of a rollout, in units of the rewards, in segments [K, S, N,
        ...].
        """
        policy, value, memory = rollout.extras
        last = rollout.last, jax.tree.map(lambda x: x[-1], memory)
        final = (
            PolicyInput(rollout.final_obs, jnp.zeros_like(rollout.terminated), rollout.reward),
            memory,
        )
        next_value = rollout.next_values(
            value, lambda x: step_networks(learner, *x)[1], last, final
        )
        ends = rollout.terminated, rollout.truncated
        advantage = gae(rollout.reward, value, next_value, *ends, hparams.gamma, hparams.gae_lambda)

        memory_before = jax.tree.map(
            lambda x, after: jnp.concatenate([x[None], after[:-1]]), rollout.memory, memory
        )
        batch = Batch(
            inputs=inputs_of(learner, rollout.seen, memory_before),
            memory=jax.tree.map(lambda x: x[:: args.sequence_length], memory_before),
            action=rollout.action,
            log_prob=policy.log_prob(rollout.action),
            value=value,
            advantage=advantage,
            target=advantage + value,
        )
        metrics = optim.value_metrics(value, batch.target, advantage)
        return in_segments(batch, args.num_steps // args.sequence_length), metrics

    def learn(
        learner: Learner, batch: Batch, context: UpdateContext
    ) -> tuple[Learner, optim.Metrics]:
        """Epochs of minibatch gradient steps, none after the KL divergence of an epoch exceeds
        --target-kl.
        """
        hparams = context.hparams
        minibatches = context.minibatches(args.update_epochs, args.num_minibatches)
        # [E, M, B] environments, each with all its steps
        # [E, M, K, S, B]
        advantage = jnp.moveaxis(batch.advantage[..., minibatches], (2, 3), (0, 1))
        advantage = optim.standardize(advantage, axis=(2, 3, 4)) if args.norm_adv else advantage

        def step(carry, inputs):
            params, opt_state = carry
            envs, advantage = inputs
            minibatch = side_by_side(
                jax.tree.map(lambda x: x[:, :, envs], batch)._replace(advantage=advantage)
            )
            # Over all devices
            grads, metrics = optim.mean_gradients(loss_of)(params, minibatch, hparams)
            params, opt_state = optim.adam_step(params, grads, opt_state, hparams)
            return (params, opt_state), metrics | {"grad/norm": optim.global_norm(grads)}

        start = learner.params, learner.opt_state
        (params, opt_state), metrics = optim.run_epochs(
            step, start, (minibatches, advantage), hparams.target_kl
        )
        # KL after the update, on the first minibatch of the last epoch; XLA drops the unused rest
        # of the loss
        after = loss_of(
            params,
            side_by_side(jax.tree.map(lambda x: x[:, :, minibatches[-1, 0]], batch)),
            hparams,
        )[1]
        kl = optim.mean_over_devices(after["policy/approx_kl"])
        learner = learner.replace(
            params=params, opt_state=optim.adapt_learning_rate(opt_state, kl, hparams)
        )
        return learner, metrics | {"policy/approx_kl": kl}

    def loss_of(params: Params, batch: Batch, hparams: HParams) -> tuple[jax.Array, optim.Metrics]:
        """The loss of a minibatch [K, B, ...], and metrics."""
        policy, value, _ = outputs(params, batch.inputs, jax.tree.map(lambda x: x[0], batch.memory))
        return loss(policy, value, batch, hparams)

    def step_networks(
        learner: Learner, seen: PolicyInput, memory: Memory
    ) -> tuple[nets.Distribution, jax.Array, Memory]:
        """Policy and value [N], in units of the rewards, for what is seen now, and the memory after
        it.
        """
        inputs = jax.tree.map(lambda x: x[None], inputs_of(learner, seen, memory))
        policy, value, after = jax.tree.map(lambda x: x[0], outputs(learner.params, inputs, memory))
        return policy, nets.denormalize(learner.return_stats, value), memory._replace(**after)

    def outputs(
        params: Params, inputs: nets.Inputs, memory: Memory
    ) -> tuple[nets.Distribution, jax.Array, dict]:
        """Policies and values [T, N] of a sequence that begins with `memory`, and the memories
        after each step.
        """
        policy, features, actor_memory = actor.apply(params.actor, inputs, memory.actor)
        value, critic_memory = critic.apply(
            params.critic, features if args.share_torso else inputs, memory.critic
        )
        return policy, value, {"actor": actor_memory, "critic": critic_memory}

    def inputs_of(learner: Learner, seen: PolicyInput, memory: Memory) -> nets.Inputs:
        """What the networks take where this is seen, [..., N]."""
        return nets.Inputs.of(seen, memory.action, nets.normalize(learner.obs_stats, seen.obs))

    def new_memory(count: int) -> Memory:
        """Of `count` environments whose episodes begin, for the policy alone."""
        layers = nets.initial_memory(args.rnn, args.rnn_size, args.rnn_layers, count)
        return Memory(layers, (), jnp.zeros((count, flat_size(env.action_space))))

    def with_critic(memory: Memory) -> Memory:
        return memory if args.share_torso else memory._replace(critic=memory.actor)

    def init(key: jax.Array, hparams: HParams) -> Learner:
        actor_key, critic_key = jax.random.split(key)
        obs = env.example_obs(1)
        memory = new_memory(1)
        inputs = jax.tree.map(lambda x: x[None], nets.Inputs.of(at_start(obs), memory.action, obs))
        (_, features, _), actor_params = actor.init_with_output(actor_key, inputs, memory.actor)
        params = Params(
            actor_params,
            critic.init(critic_key, features if args.share_torso else inputs, memory.actor),
        )
        return Learner(
            params=params,
            opt_state=optim.adam_init(params, hparams),
            obs_stats=nets.obs_stats(env.observation_space, on=args.normalize_obs),
            return_stats=nets.running_stats((), on=args.normalize_returns),
        )

    def act(
        learner: Learner, seen: PolicyInput, memory: Memory, key: jax.Array | None = None
    ) -> tuple[jax.Array, Memory]:
        """Actions [B, ...] for what is seen [B, ...], sampled with a key, else the most likely
        ones; and the memory.
        """
        # Its values are not computed
        policy, _, memory = step_networks(learner, seen, with_critic(memory))
        action = policy.mode() if key is None else policy.sample_with_key(key)
        return action, memory._replace(
            critic=(), action=nets.encode_action(action, env.action_space)
        )

    memories = new_memory, lambda count: with_critic(new_memory(count))
    return OnPolicy(init, explore, update, act, *memories, wants_reward=args.obs_prev_action_reward)


make_algorithm = make_ppo_rnn  # the name by which `load_policy` knows it


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    """Train as the command line does, also on an environment object or with a callback; see
    `run_algorithm`.
    """
    return run_algorithm(args, __file__, make_ppo_rnn, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
