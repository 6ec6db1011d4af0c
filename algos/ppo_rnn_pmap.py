"""PPO with memory, a recurrent network trained through time (Schulman et al. 2017); docs/ppo-rnn.md explains this file.

python algos/ppo_rnn_pmap.py --env MemoryChain-bsuite
python algos/ppo_rnn_pmap.py --help
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.cli.checks import AdamBeta, Count, CountOrZero, Counts, Discount, Fraction, NonNegative, Positive
from common.cli.command import main, parse
from common.cli.rollout_flags import DeviceRolloutArgs


@dataclass(kw_only=True)
class Args(DeviceRolloutArgs):
    """Train PPO with memory on a gymnax-style environment. All sizes are global: --num-envs 64 is 64 on all devices."""

    # rollout and advantage
    num_steps: Count = 128
    """Steps of every environment per update."""
    gamma: Discount = 0.99
    """Discount factor."""
    gae_lambda: Discount = 0.95
    """Lambda of generalized advantage estimation (GAE)."""
    bptt_length: CountOrZero = 0
    """Length of backpropagation through time in steps, a divisor of --num-steps; 0: the whole rollout."""

    # optimiser
    update_epochs: Count = 4
    """Passes over the batch per update."""
    num_minibatches: Count = 8
    """Minibatches per epoch, each a gradient step."""
    learning_rate: Positive = 1e-3
    """Learning rate of Adam, at the start."""
    lr_schedule: Literal["linear", "constant", "kl-adaptive"] = "linear"
    """Learning rate over the run: linear to zero, constant, or adapted so that an update's KL is near --desired-kl."""
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
    """Clipping of the value loss by --clip-eps, as of the policy loss."""
    ent_coef: NonNegative = 0.01
    """Entropy coefficient, the weight of the exploration loss, at the start."""
    ent_fraction: Fraction = 0.0
    """Fraction of the run over which the entropy coefficient decays linearly to zero; 0: it stays."""
    exploration_loss: Literal["entropy", "symmetric-kl"] = "entropy"
    """Exploration loss: the policy's entropy, or its symmetric KL to the uniform policy (not for Box actions)."""

    # normalisation
    norm_adv: bool = True
    """Normalisation of advantages over each minibatch, across all devices."""
    normalize_returns: bool = True
    """PopArt: the critic predicts returns normalised by their running mean and deviation, for any scale of rewards."""
    normalize_obs: bool = False
    """Normalisation of observations by their running mean and standard deviation."""

    # network
    activation: Literal["tanh", "relu", "swish", "gelu"] = "tanh"
    """Activation of the hidden layers."""
    hidden_sizes: Counts = (64, 64)
    """Widths of the hidden layers of the actor and of the critic."""
    share_torso: bool = False
    """Hidden and recurrent layers shared by actor and critic: half of the arithmetic."""
    encoder: Literal["small", "nature", "impala", "flat"] = "small"
    """Image encoder: a 3 x 3 convolution with 16 channels, the Nature DQN network, IMPALA's ResNet, or none (flat)."""
    rnn: Literal["gru", "lstm"] = "gru"
    """Recurrent cells behind the hidden layers."""
    rnn_size: Count = 128
    """Width of the recurrent layers."""
    rnn_layers: Count = 1
    """Number of recurrent layers."""
    rnn_span: CountOrZero = 128
    """Longest time scale of the recurrent cells at initialisation, in steps (chrono initialisation, Tallec and Ollivier
    2018); 0: 2 steps for all."""
    obs_prev_action_reward: bool = False
    """Previous action and reward as further inputs of the recurrent layers."""

    @property
    def samples_per_env(self) -> int:
        """Parts of a rollout of an environment that minibatches may get: all in one."""
        return 1

    @property
    def segment(self) -> int:
        """Steps of a sequence that is learned from."""
        return self.bptt_length or self.num_steps

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("bptt_length", "num_steps")
        self.check_needed("desired_kl", "lr_schedule", "kl-adaptive")


if __name__ == "__main__":
    ARGS = parse(Args)  # before the slow imports: --help and usage errors answer at once

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from common.device.clipped_adam import clipped_adam, unless_zero
from common.device.episodes import EpisodeTracker, RecentEpisodes, count_episodes, new_recent, new_tracker
from common.device.final_values import put_final_values
from common.device.hyper import hyper_of
from common.device.memory import Seen, at_start
from common.device.programs import Algorithm, TrainState
from common.device.reductions import Tally, across_devices, over_steps
from common.device.sampling import in_segments, keys_of, minibatch_indices, rollout_keys, side_by_side, split_keys
from common.device.schedules import hyper_now, next_learning_rate
from common.device.sharding import AXIS, varying_like
from common.device.stepping import new_starts, reset_envs, step_envs
from common.device.update_loop import scan_until_stopped
from common.device.value_metrics import value_metrics
from common.envs.environment import Env
from common.envs.masks import legal_actions, legal_metrics
from common.envs.privileged import for_policies
from common.envs.requirements import need_fitting_spaces
from common.envs.spaces import Space, flat_size, zeros
from common.envs.varied import for_member
from common.nets.distributions import Distribution, action_noise, encode_action
from common.nets.heads import PolicyHead
from common.nets.normalizers import RunningStats, denormalize, merge, normalize, obs_stats, renew_units, running_stats
from common.nets.recurrent import Inputs, RecurrentTorso, initial_memory
from common.nets.torso import Torso
from common.training import Callback, TrainResult, train_on_devices

# ---------------------------------------------------------------------------------------------------------- networks


def remembering_torso(args: Args, obs_space: Space) -> RecurrentTorso:
    """Hidden layers and recurrent ones behind them."""
    torso = Torso(obs_space, args.hidden_sizes, args.activation, args.dtype, args.encoder)
    return RecurrentTorso(torso, args.rnn, args.rnn_size, args.rnn_span, args.obs_prev_action_reward, args.dtype)


class Actor(nn.Module):
    """The policy, a distribution over actions, the features [T, N, F] that it is made of, and memories."""

    args: Args
    obs_space: Space
    action_space: Space

    @nn.compact
    def __call__(self, inputs: Inputs, memory: Any) -> tuple[Distribution, jax.Array, Any]:
        x, memory = remembering_torso(self.args, self.obs_space)(inputs, memory)
        return PolicyHead(self.action_space)(x, legal_actions(inputs.obs)), x, memory


class Critic(nn.Module):
    """The value of what was seen, with a memory of its own, or with --share-torso of the actor's features."""

    args: Args
    obs_space: Space

    @nn.compact
    def __call__(self, x: Inputs | jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        x, memory = (x, memory) if self.args.share_torso else remembering_torso(self.args, self.obs_space)(x, memory)
        return nn.Dense(1, kernel_init=nn.initializers.zeros, name="value")(x)[..., 0], memory  # [T, N]


# ----------------------------------------------------------------------------------------------------------- records


class Params(NamedTuple):
    actor: Any
    critic: Any


class Memory(NamedTuple):
    """What is carried from step to step, [N, ...]."""

    actor: Any  # of recurrent layers
    critic: Any  # likewise; () where the critic shares them, and where nothing but the policy is wanted
    action: jax.Array  # the last one as numbers [N, A]


class Learner(struct.PyTreeNode):
    """What is identical on every device."""

    params: Params
    opt_state: optax.OptState
    hyper: dict[str, jax.Array]  # [] flags of its own, of a member of a population
    learning_rate: jax.Array  # [] moves under kl-adaptive only
    obs_stats: Any  # RunningStats of each part of observations, or None
    return_stats: RunningStats | None  # the units of the critic
    recent: RecentEpisodes
    key: jax.Array  # root of all randomness; never advanced, only folded
    updates: jax.Array  # [] updates done


class Shard(struct.PyTreeNode):
    """This device's share of the running environments, N of them."""

    env_state: Any  # [N, ...]
    seen: Seen  # [N, ...]
    memory: Memory  # [N, ...] still of the last episode where a new one begins
    tracker: EpisodeTracker  # [N]


class Trajectory(NamedTuple):
    """A rollout, [T, N, ...]."""

    seen: Seen  # as the environment gave it
    policy: Distribution  # the distribution that the action came from
    action: jax.Array
    value: jax.Array  # in units of the rewards
    memory: Memory  # after the step
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array  # true next observation
    objective: jax.Array | None = None  # what episodes are judged by, where it is not their return
    info: Any = None  # what --log-info names, by metric


class Batch(NamedTuple):
    """What the losses need of each sample, in S segments of K steps that gradients do not leave, [K, S, N, ...]."""

    inputs: Inputs
    memory: Memory  # [1, S, N, ...] at the start of each segment, as it was then
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


# ------------------------------------------------------------------------------------------------------------- maths


def gae(reward, value, next_value, terminated, truncated, gamma: float, gae_lambda: float) -> jax.Array:
    """Advantages [T, N] by generalized advantage estimation (Schulman et al. 2016, eq. 16).

    `next_value` is the value of the true next observation, also where the episode was truncated. Termination cuts the
    bootstrap; both kinds of end cut the sum.
    """
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * (1.0 - (terminated | truncated))

    def backward(advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * advantage
        return advantage, advantage

    return jax.lax.scan(backward, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]


def ratio_bounds(clip_eps: float, clip_mode: str) -> tuple[float, float]:
    """Interval of the probability ratio outside which it earns no more."""
    return (1 - clip_eps if clip_mode == "ppo" else 1 / (1 + clip_eps)), 1 + clip_eps


def policy_loss(ratio, advantage, bounds) -> jax.Array:
    """Clipped surrogate objective of each sample (Schulman et al. 2017, eq. 7), negated."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, *bounds) * advantage)


def standardized(advantage, mean) -> jax.Array:
    """Advantages with zero mean and unit variance over all devices; `mean` is a device's share of one."""
    centred = advantage - jax.lax.pmean(mean(advantage), AXIS)
    return centred / (jnp.sqrt(jax.lax.pmean(mean(jnp.square(centred)), AXIS)) + 1e-8)


def value_loss(value, old_value, target, clip_eps: float | None) -> jax.Array:
    """Half the squared error of each sample; with `clip_eps` the worse of it and of that after a clipped change."""
    error = jnp.square(value - target)
    if clip_eps is not None:
        clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
        error = jnp.maximum(error, jnp.square(clipped - target))
    return 0.5 * error


# --------------------------------------------------------------------------------------------------------- algorithm


def make_ppo_rnn(args: Args, env: Env) -> Algorithm:
    """PPO with memory for `env` as pure functions. Raises UsageError for flags that its spaces do not fit."""
    need_fitting_spaces(args, env)
    actor = Actor(args, for_policies(env.observation_space), env.action_space)
    critic = Critic(args, env.observation_space)

    def update(state: TrainState) -> tuple[TrainState, Tally, Any]:
        """One iteration of PPO (algorithm 1): collect, estimate advantages, learn."""
        learner, start = state.learner, state.shard
        rollout_key, shuffle_key = jax.random.split(jax.random.fold_in(learner.key, learner.updates))

        shard, trajectory = collect(learner, start, rollout_key)
        tracker, recent, episodes = count_episodes(shard.tracker, learner.recent, trajectory, AXIS)
        batch, estimate_metrics = estimate(learner, start.memory, trajectory, shard)
        learner, batch = renew_units(learner, batch, AXIS)
        params, opt_state, learn_metrics = learn(learner, batch, shuffle_key)

        learner = learner.replace(
            params=params,
            opt_state=opt_state,
            learning_rate=next_learning_rate(args, learner, learn_metrics["policy/approx_kl"]),
            obs_stats=merge(learner.obs_stats, trajectory.seen.obs, AXIS),
            recent=recent,
            updates=learner.updates + 1,
        )
        state = TrainState(learner, shard.replace(tracker=tracker))
        legal = legal_metrics(trajectory.seen.obs, env.action_space, AXIS)
        return state, Tally.of(estimate_metrics | learn_metrics | legal), episodes

    def collect(learner: Learner, shard: Shard, key: jax.Array) -> tuple[Shard, Trajectory]:
        """Step all environments `num_steps` times with the current policy."""
        noise_keys, env_keys = split_keys(rollout_keys(key, args.num_steps, shard.tracker.ret.size), 2)  # [T, N]
        noise = jax.vmap(jax.vmap(partial(action_noise, space=env.action_space)))(noise_keys)  # all steps in one pass
        own = for_member(env, learner.hyper)
        starts = new_starts(own, jax.random.fold_in(key, args.num_steps), args.reset_pool, AXIS)

        def step(carry, inputs):
            env_state, seen, memory = carry
            noise, keys = inputs
            policy, value, memory = look(learner, seen, memory)
            action = policy.sample(noise)
            out = step_envs(own, keys, env_state, action, starts)
            memory = memory._replace(action=encode_action(action, env.action_space))
            outcome = out.reward, out.terminated, out.truncated, out.final_obs, out.objective, out.info
            seen_next = Seen(out.obs, out.terminated | out.truncated, out.reward)
            return (out.state, seen_next, memory), Trajectory(seen, policy, action, value, memory, *outcome)

        start = shard.env_state, shard.seen, shard.memory
        (env_state, seen, memory), trajectory = jax.lax.scan(step, start, (noise, env_keys))
        return shard.replace(env_state=env_state, seen=seen, memory=memory), trajectory

    def estimate(learner: Learner, memory: Memory, trajectory: Trajectory, shard: Shard) -> tuple[Batch, dict]:
        """Advantages and value targets of a rollout that began with `memory`, in units of the rewards, in segments."""
        value = trajectory.value
        next_value = jnp.concatenate([value[1:], look(learner, shard.seen, shard.memory)[1][None]])
        cut_off = trajectory.truncated & ~trajectory.terminated
        final = Seen(trajectory.final_obs, jnp.zeros_like(cut_off), trajectory.reward), trajectory.memory
        next_value = put_final_values(next_value, cut_off, final, lambda final: look(learner, *final)[1])
        ends, hyper = (trajectory.terminated, trajectory.truncated), hyper_of(args, learner)
        advantage = gae(trajectory.reward, value, next_value, *ends, hyper.gamma, hyper.gae_lambda)

        before = jax.tree.map(lambda x, after: jnp.concatenate([x[None], after[:-1]]), memory, trajectory.memory)
        batch = Batch(
            inputs=inputs_of(learner, trajectory.seen, before),
            memory=jax.tree.map(lambda x: x[:: args.segment], before),
            action=trajectory.action,
            log_prob=trajectory.policy.log_prob(trajectory.action),
            value=value,
            advantage=advantage,
            target=advantage + value,
        )
        metrics = value_metrics(*(x.ravel() for x in (value, batch.target, advantage)))
        return in_segments(batch, args.num_steps // args.segment), metrics

    def learn(learner: Learner, batch: Batch, key: jax.Array):
        """Epochs of minibatch gradient steps; returns parameters, optimizer state and metrics."""
        sizes = 1, batch.value.shape[2], args.update_epochs, args.num_minibatches
        minibatches = minibatch_indices(key, *sizes)  # [E, M, B] environments, each with all its steps
        advantage = jnp.moveaxis(batch.advantage[..., minibatches], (2, 3), (0, 1))  # [E, M, K, S, B]
        if args.norm_adv:
            advantage = standardized(advantage, partial(jnp.mean, axis=(2, 3, 4), keepdims=True))
        hyper, scheduled = hyper_now(args, learner)

        def step(carry, inputs):
            envs, advantage = inputs
            minibatch = jax.tree.map(lambda x: x[:, :, envs], batch)._replace(advantage=advantage)
            return gradient_step(carry, side_by_side(minibatch), hyper)

        def epoch(carry, inputs):
            carry, metrics = jax.lax.scan(step, carry, inputs)
            metrics = over_steps(metrics)
            return carry, metrics, metrics["policy/approx_kl"] > unless_zero(hyper.target_kl)

        start = learner.params, learner.opt_state
        (params, opt_state), metrics, epochs = scan_until_stopped(epoch, start, (minibatches, advantage))
        # Nothing else of this loss is computed
        after = loss(params, side_by_side(jax.tree.map(lambda x: x[:, :, minibatches[-1, 0]], batch)), hyper)[1]
        metrics |= {"policy/approx_kl": jax.lax.pmean(after["policy/approx_kl"], AXIS)}
        metrics |= {"policy/epochs": epochs} | scheduled
        return params, opt_state, metrics | {"params/norm": optax.global_norm(params)}

    def gradient_step(carry, minibatch: Batch, hyper):
        """One step of the optimizer on parameters and its state, which it carries, and metrics."""
        params, opt_state = carry
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(varying_like(minibatch, params), minibatch, hyper)
        grads, metrics = across_devices(grads, metrics)
        direction, opt_state = clipped_adam(hyper).update(grads, opt_state)
        params = jax.tree.map(lambda p, d: p - hyper.learning_rate * d, params, direction)
        return (params, opt_state), metrics | {"grad/norm": optax.global_norm(grads)}

    def loss(params: Params, batch: Batch, hyper) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Policy, value and exploration losses of a minibatch, [K, B, ...]."""
        policy, value, _ = outputs(params, batch.inputs, jax.tree.map(lambda x: x[0], batch.memory))
        log_ratio = policy.log_prob(batch.action) - batch.log_prob
        ratio = jnp.exp(log_ratio)
        bounds = ratio_bounds(hyper.clip_eps, args.clip_mode)
        clip_value = hyper.clip_eps if args.clip_vloss else None
        entropy = jnp.mean(policy.entropy())
        losses = {
            "loss/policy": jnp.mean(policy_loss(ratio, batch.advantage, bounds)),
            "loss/value": jnp.mean(value_loss(value, batch.value, batch.target, clip_value)),
            "loss/exploration": -entropy,
        }
        if args.exploration_loss == "symmetric-kl":
            losses["loss/exploration"] = jnp.mean(policy.symmetric_kl_to_uniform())
        # Equation 9
        total = losses["loss/policy"] + hyper.vf_coef * losses["loss/value"]
        total += hyper.ent_coef * losses["loss/exploration"]
        return total, losses | {
            "loss/total": total,
            "policy/entropy": entropy,
            "policy/approx_kl": jnp.mean(ratio - 1 - log_ratio),  # Schulman's k3 estimator
            "policy/clip_fraction": jnp.mean((ratio < bounds[0]) | (ratio > bounds[1])),
            "policy/log_ratio_max": jnp.max(jnp.abs(log_ratio)),
        }

    def look(learner: Learner, seen: Seen, memory: Memory) -> tuple[Distribution, jax.Array, Memory]:
        """Policy and value [N], in units of the rewards, for what is seen now, and the memory after it."""
        inputs = jax.tree.map(lambda x: x[None], inputs_of(learner, seen, memory))
        policy, value, left = jax.tree.map(lambda x: x[0], outputs(learner.params, inputs, memory))
        return policy, denormalize(learner.return_stats, value), memory._replace(**left)

    def outputs(params: Params, inputs: Inputs, memory: Memory) -> tuple[Distribution, jax.Array, dict]:
        """Policies and values [T, N] of a sequence that begins with `memory`, and the memories after each step."""
        policy, features, of_actor = actor.apply(params.actor, inputs, memory.actor)
        value, of_critic = critic.apply(params.critic, features if args.share_torso else inputs, memory.critic)
        return policy, value, {"actor": of_actor, "critic": of_critic}

    def inputs_of(learner: Learner, seen: Seen, memory: Memory) -> Inputs:
        """What the networks take where this is seen, [..., N]."""
        return Inputs.of(seen, memory.action, normalize(learner.obs_stats, seen.obs))

    def new_memory(count: int) -> Memory:
        """Of `count` environments whose episodes begin, for the policy alone."""
        layers = initial_memory(args.rnn, args.rnn_size, args.rnn_layers, count)
        return Memory(layers, (), jnp.zeros((count, flat_size(env.action_space))))

    def with_critic(memory: Memory) -> Memory:
        return memory if args.share_torso else memory._replace(critic=memory.actor)

    def init(seed: jax.Array, hyper=None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        obs, env_state = reset_envs(for_member(env, hyper), keys_of(envs_key, num_envs), mid_episode=args.decorrelate)
        memory, tracker = with_critic(new_memory(num_envs)), new_tracker(env, num_envs, args.decorrelate)
        return TrainState(new_learner(params_key, key, hyper), Shard(env_state, at_start(obs), memory, tracker))

    def new_learner(params_key: jax.Array, key: jax.Array, hyper=None) -> Learner:
        hyper = hyper or {}
        obs, memory = zeros(env, 1), new_memory(1)
        inputs = jax.tree.map(lambda x: x[None], Inputs.of(at_start(obs), memory.action, obs))
        actor_key, critic_key = jax.random.split(params_key)
        (_, features, _), actor_params = actor.init_with_output(actor_key, inputs, memory.actor)
        params = Params(actor_params, critic.init(critic_key, features if args.share_torso else inputs, memory.actor))
        return Learner(
            params=params,
            opt_state=clipped_adam(args).init(params),
            hyper=hyper,
            learning_rate=jnp.float32(hyper.get("learning_rate", args.learning_rate)),
            obs_stats=obs_stats(env.observation_space) if args.normalize_obs else None,
            return_stats=running_stats(()) if args.normalize_returns else None,
            recent=new_recent(env),
            key=key,
            updates=jnp.int32(0),
        )

    def act(learner: Learner, seen: Seen, memory: Memory, key: jax.Array | None = None) -> tuple[jax.Array, Memory]:
        """Actions [B, ...] for what is seen [B, ...], sampled with a key, else the most likely ones; and the memory."""
        policy, _, memory = look(learner, seen, with_critic(memory))  # whose values nobody wants: it is not computed
        noise = None if key is None else action_noise(key, env.action_space, seen.first.shape)
        action = policy.mode() if key is None else policy.sample(noise)
        return action, memory._replace(critic=(), action=encode_action(action, env.action_space))

    reward = args.obs_prev_action_reward
    return Algorithm(init, update, new_learner, act, initial_memory=new_memory, wants_reward=reward)


make_algorithm = make_ppo_rnn  # the name by which `load_policy` knows it


# --------------------------------------------------------------------------------------------------------------- run


def train(args: Args, env: Any = None, callback: Callback | None = None) -> TrainResult:
    """Train as the command line does, also on an environment object or with a callback; see `train_on_devices`."""
    return train_on_devices(args, __file__, make_ppo_rnn, env, callback=callback)


if __name__ == "__main__":
    sys.exit(main(train, ARGS))
