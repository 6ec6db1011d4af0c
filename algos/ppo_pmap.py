"""Proximal Policy Optimization (Schulman et al. 2017), data-parallel over every device; docs/ppo.md explains this file.

python algos/ppo_pmap.py --env CartPole-v1
python algos/ppo_pmap.py --help
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.cli.checks import AdamBeta, Count, Counts, Discount, Fraction, NonNegative, Positive
from common.cli.command import main, parse
from common.cli.rollout_flags import GameArgs


@dataclass(kw_only=True)
class Args(GameArgs):
    """Train PPO on a gymnax-style environment. All sizes are global: --num-envs 64 is 64 over all devices together."""

    # rollout and advantage
    num_steps: Count = 64
    """Steps of every environment per update."""
    gamma: Discount = 0.99
    """Discount factor."""
    gae_lambda: Discount = 0.95
    """Lambda of generalized advantage estimation (GAE)."""

    # optimiser
    update_epochs: Count = 4
    """Passes over the batch per update."""
    num_minibatches: Count = 4
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
    """Hidden layers shared by actor and critic: half of the arithmetic."""
    encoder: Literal["small", "nature", "impala", "flat"] = "small"
    """Image encoder: a 3 x 3 convolution with 16 channels, the Nature DQN network, IMPALA's ResNet, or none (flat)."""

    def __post_init__(self):
        super().__post_init__()
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
from common.device.programs import Algorithm, TrainState
from common.device.reductions import Tally, across_devices, over_steps
from common.device.sampling import keys_of, minibatch_indices, rollout_keys, split_keys
from common.device.schedules import hyper_now, next_learning_rate
from common.device.sharding import AXIS, varying_like
from common.device.stepping import new_starts, reset_envs, step_envs
from common.device.update_loop import scan_until_stopped
from common.device.value_metrics import value_metrics
from common.envs.environment import Env, select
from common.envs.masks import legal_actions, legal_metrics
from common.envs.privileged import for_policies
from common.envs.requirements import need_fitting_spaces
from common.envs.spaces import Space, batch_shape, zeros
from common.envs.varied import for_member
from common.nets.distributions import Distribution, action_noise, part_of
from common.nets.heads import PolicyHead
from common.nets.normalizers import RunningStats, denormalize, merge, normalize, obs_stats, renew_units, running_stats
from common.nets.torso import Torso
from common.population.matchmaking import dealt, of_another_member
from common.training import Callback, TrainResult, train_on_devices

PAST = 8  # policies that --opponent self draws from

# ---------------------------------------------------------------------------------------------------------- networks


def torso_of(args: Args, obs_space: Space) -> Torso:
    """The hidden layers, behind what images pass first."""
    return Torso(obs_space, args.hidden_sizes, args.activation, args.dtype, args.encoder)


class Actor(nn.Module):
    """The policy, a distribution over actions, and the features [B, F] that it is made of."""

    args: Args
    obs_space: Space
    action_space: Space

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[Distribution, jax.Array]:
        x = torso_of(self.args, self.obs_space)(obs)
        return PolicyHead(self.action_space)(x, legal_actions(obs)), x


class Critic(nn.Module):
    """The value of an observation, or with --share-torso of the actor's features of it."""

    args: Args
    obs_space: Space

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.args.share_torso else torso_of(self.args, self.obs_space)(x)
        return nn.Dense(1, kernel_init=nn.initializers.zeros, name="value")(x)[..., 0]  # [B]


# ----------------------------------------------------------------------------------------------------------- records


class Params(NamedTuple):
    actor: Any
    critic: Any


class Learner(struct.PyTreeNode):
    """What is identical on every device."""

    params: Params
    opponents: Any  # parameters of past actors and their obs_stats [P, ...], with --opponent self, or ()
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
    obs: jax.Array  # [N, ...]
    tracker: EpisodeTracker  # [N]


class Trajectory(NamedTuple):
    """A rollout, [T, N, ...]."""

    obs: jax.Array  # as the environment gave it
    policy: Distribution  # the distribution that the action came from
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array  # true next observation
    objective: jax.Array | None = None  # what episodes are judged by, where it is not their return
    info: Any = None  # what --log-info names, by metric
    own: jax.Array | None = None  # bool: the components of an action that it chose itself; None is all of them


class Batch(NamedTuple):
    """What the losses need of each sample, [T * N, ...]."""

    obs: jax.Array  # as the networks take it
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array
    own: jax.Array | None = None  # as in a Trajectory


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


def make_ppo(args: Args, env: Env) -> Algorithm:
    """PPO for `env` as pure functions. Raises UsageError for flags that its spaces do not fit."""
    need_fitting_spaces(args, env)
    actor = Actor(args, for_policies(env.observation_space), env.action_space)
    critic = Critic(args, env.observation_space)

    def update(state: TrainState) -> tuple[TrainState, Tally, Any]:
        """One iteration of PPO (algorithm 1): collect, estimate advantages, learn."""
        learner, shard = state.learner.replace(opponents=opponents_of(state.learner)), state.shard
        rollout_key, shuffle_key = jax.random.split(jax.random.fold_in(learner.key, learner.updates))

        shard, trajectory = collect(learner, shard, rollout_key)
        tracker, recent, episodes = count_episodes(shard.tracker, learner.recent, trajectory, AXIS)
        batch, estimate_metrics = estimate(learner, shard, trajectory)
        learner, batch = renew_units(learner, batch, AXIS)
        params, opt_state, learn_metrics = learn(learner, batch, shuffle_key)

        learner = learner.replace(
            params=params,
            opt_state=opt_state,
            learning_rate=next_learning_rate(args, learner, learn_metrics["policy/approx_kl"]),
            obs_stats=merge(learner.obs_stats, trajectory.obs, AXIS),
            recent=recent,
            updates=learner.updates + 1,
        )
        state = TrainState(learner, shard.replace(tracker=tracker))
        legal = legal_metrics(trajectory.obs, env.action_space, AXIS)
        return state, Tally.of(estimate_metrics | learn_metrics | legal), episodes

    def collect(learner: Learner, shard: Shard, key: jax.Array) -> tuple[Shard, Trajectory]:
        """Step all environments `num_steps` times with the current policy."""
        noise_keys, env_keys = split_keys(rollout_keys(key, args.num_steps, shard.tracker.ret.size), 2)  # [T, N]
        noise = jax.vmap(jax.vmap(partial(action_noise, space=env.action_space)))(noise_keys)  # all steps in one pass
        starts_key, other_key, deal_key = (jax.random.fold_in(key, args.num_steps + more) for more in range(3))
        other = other_of(learner, other_key)
        game, own = game_of(learner, other), own_of(deal_key, shard.tracker.ret.size)
        starts = new_starts(game, starts_key, args.reset_pool, AXIS)

        def step(carry, inputs):
            env_state, obs = carry
            noise, keys = inputs
            policy = policy_of(learner, obs)
            action = policy.sample(noise)
            if own is not None:
                action = jnp.where(own, action, policy_of(other, obs).sample(noise))
            out = step_envs(game, keys, env_state, action, starts)
            outcome = out.reward, out.terminated, out.truncated, out.final_obs, out.objective, out.info
            return (out.state, out.obs), Trajectory(obs, policy, action, *outcome, own)

        (env_state, obs), trajectory = jax.lax.scan(step, (shard.env_state, shard.obs), (noise, env_keys))
        return shard.replace(env_state=env_state, obs=obs), trajectory

    def estimate(learner: Learner, shard: Shard, trajectory: Trajectory) -> tuple[Batch, dict[str, jax.Array]]:
        """Values, advantages and value targets of a rollout, in units of the rewards, flattened to [T * N, ...]."""
        value = value_of(learner, trajectory.obs)  # [T, N]
        next_value = jnp.concatenate([value[1:], value_of(learner, shard.obs)[None]])
        cut_off = trajectory.truncated & ~trajectory.terminated
        next_value = put_final_values(next_value, cut_off, trajectory.final_obs, partial(value_of, learner))
        ends, hyper = (trajectory.terminated, trajectory.truncated), hyper_of(args, learner)
        advantage = gae(trajectory.reward, value, next_value, *ends, hyper.gamma, hyper.gae_lambda)

        batch = Batch(
            obs=normalize(learner.obs_stats, trajectory.obs),
            action=trajectory.action,
            log_prob=part_of(trajectory.policy, trajectory.own).log_prob(trajectory.action),
            value=value,
            advantage=advantage,
            target=advantage + value,
            own=trajectory.own,
        )
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [T * N, ...]
        return batch, value_metrics(batch.value, batch.target, batch.advantage)

    def learn(learner: Learner, batch: Batch, key: jax.Array):
        """Epochs of minibatch gradient steps; returns parameters, optimizer state and metrics."""
        num_envs = batch.value.shape[0] // args.num_steps
        sizes = args.num_steps, num_envs, args.update_epochs, args.num_minibatches
        minibatches = minibatch_indices(key, *sizes)  # [E, M, B]
        advantage = batch.advantage[minibatches]
        if args.norm_adv:
            advantage = standardized(advantage, partial(jnp.mean, axis=-1, keepdims=True))
        hyper, scheduled = hyper_now(args, learner)

        def step(carry, inputs):
            indices, advantage = inputs
            minibatch = jax.tree.map(lambda x: x[indices], batch)._replace(advantage=advantage)
            return gradient_step(carry, minibatch, hyper)

        def epoch(carry, inputs):
            carry, metrics = jax.lax.scan(step, carry, inputs)
            metrics = over_steps(metrics)
            return carry, metrics, metrics["policy/approx_kl"] > unless_zero(hyper.target_kl)

        start = learner.params, learner.opt_state
        (params, opt_state), metrics, epochs = scan_until_stopped(epoch, start, (minibatches, advantage))
        # Nothing else of this loss is computed
        after = loss(params, jax.tree.map(lambda x: x[minibatches[-1, 0]], batch), hyper)[1]
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
        """Policy, value and exploration losses of a minibatch, [B, ...]."""
        policy, value = outputs(params, batch.obs)
        policy = part_of(policy, batch.own)
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
        }

    def opponents_of(learner: Learner) -> Any:
        """The past policies of --opponent self; every --opponent-interval updates that of now is the newest of them."""
        if args.opponent != "self":
            return ()
        turn, late = jnp.divmod(learner.updates, args.opponent_interval)
        now = learner.params.actor, learner.obs_stats
        replaced = (jnp.arange(PAST) == turn % PAST) & (late == 0) | (learner.updates == 0)  # all of them at first
        return jax.tree.map(lambda past, x: jax.vmap(select, (0, None, 0))(replaced, x, past), learner.opponents, now)

    def other_of(learner: Learner, key: jax.Array) -> Learner | None:
        """Who else plays: another member, or with --opponent self a past policy; None is chance, or nobody."""
        if args.opponent == "members":
            params, stats = of_another_member(key, (learner.params.actor, learner.obs_stats))
        elif args.opponent == "self":
            chosen = jax.random.randint(key, (), 0, PAST)
            params, stats = jax.tree.map(lambda x: x[chosen], learner.opponents)
        else:
            return None
        return learner.replace(params=learner.params._replace(actor=params), obs_stats=stats)

    def game_of(learner: Learner, other: Learner | None) -> Env:
        """The environment; in a game the `other` plays everybody else."""
        game = for_member(env, learner.hyper)
        if other is None or not env.is_game:
            return game
        return game.against(lambda key, obs: act(other, jax.tree.map(lambda x: x[None], obs), key)[0])

    def own_of(key: jax.Array, num_envs: int) -> jax.Array | None:
        """Which components of actions [N, A] are of agents that the member plays itself; None is all of them."""
        together = args.opponent == "members" and not env.is_game
        return dealt(keys_of(key, num_envs), env.agents) if together else None

    def policy_of(learner: Learner, obs: jax.Array) -> Distribution:
        """The actor's distributions for raw observations."""
        return outputs(learner.params, normalize(learner.obs_stats, obs))[0]

    def value_of(learner: Learner, obs: jax.Array) -> jax.Array:
        """The critic's values of raw observations, in units of the rewards."""
        return denormalize(learner.return_stats, outputs(learner.params, normalize(learner.obs_stats, obs))[1])

    def outputs(params: Params, obs: jax.Array) -> tuple[Distribution, jax.Array]:
        """Policy and value for observations as the networks take them; what is not used is not computed."""
        policy, features = actor.apply(params.actor, obs)
        return policy, critic.apply(params.critic, features if args.share_torso else obs)

    def init(seed: jax.Array, hyper=None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        obs, env_state = reset_envs(for_member(env, hyper), keys_of(envs_key, num_envs), mid_episode=args.decorrelate)
        shard = Shard(env_state, obs, new_tracker(env, num_envs, args.decorrelate))
        return TrainState(new_learner(params_key, key, hyper), shard)

    def new_learner(params_key: jax.Array, key: jax.Array, hyper=None) -> Learner:
        hyper = hyper or {}
        obs = zeros(env, 1)
        actor_key, critic_key = jax.random.split(params_key)
        (_, features), actor_params = actor.init_with_output(actor_key, obs)
        params = Params(actor_params, critic.init(critic_key, features if args.share_torso else obs))
        stats = obs_stats(env.observation_space) if args.normalize_obs else None
        past = (params.actor, stats) if args.opponent == "self" else ()
        return Learner(
            params=params,
            opponents=jax.tree.map(lambda x: jnp.stack([x] * PAST), past),
            opt_state=clipped_adam(args).init(params),
            hyper=hyper,
            learning_rate=jnp.float32(hyper.get("learning_rate", args.learning_rate)),
            obs_stats=stats,
            return_stats=running_stats(()) if args.normalize_returns else None,
            recent=new_recent(env),
            key=key,
            updates=jnp.int32(0),
        )

    def act(learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Actions [B, ...] for raw observations [B, ...]: sampled with a key, else the most likely ones."""
        policy = policy_of(learner, obs)
        return policy.mode() if key is None else policy.sample(action_noise(key, env.action_space, batch_shape(obs)))

    return Algorithm(init, update, new_learner, act)


make_algorithm = make_ppo  # the name by which `load_policy` knows it


# --------------------------------------------------------------------------------------------------------------- run


def train(args: Args, env: Any = None, callback: Callback | None = None) -> TrainResult:
    """Train as the command line does, also on an environment object or with a callback; see `train_on_devices`."""
    return train_on_devices(args, __file__, make_ppo, env, callback=callback)


if __name__ == "__main__":
    sys.exit(main(train, ARGS))
