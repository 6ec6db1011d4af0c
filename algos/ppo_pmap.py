"""Proximal Policy Optimization (Schulman et al. 2017), data-parallel over every device; docs/ppo.md explains this file.

python algos/ppo_pmap.py --env CartPole-v1
python algos/ppo_pmap.py --help
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.cli.checks import check
from common.cli.command import main, parse
from common.cli.errors import UsageError
from common.cli.flags import DeviceEnvArgs


@dataclass(kw_only=True)
class Args(DeviceEnvArgs):
    """Train PPO on a gymnax-style environment. All sizes are global: --num-envs 64 is 64 over all devices together."""

    num_steps: int = 64
    """Steps of every environment per update."""
    update_epochs: int = 4
    """Passes over the batch per update."""
    num_minibatches: int = 4
    """Gradient steps per epoch."""
    learning_rate: float = 1e-3
    """Adam step size, at the start."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to zero over the run."""
    lr_schedule: Literal["constant", "linear", "kl-adaptive"] | None = None
    """Schedule by name, instead of --anneal-lr; kl-adaptive steers the KL of an update to --desired-kl."""
    desired_kl: float = 0.01
    """The KL divergence per update that --lr-schedule kl-adaptive steers to."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation."""
    clip_eps: float = 0.2
    """Clipping range of the probability ratio."""
    clip_mode: Literal["ppo", "symmetric"] = "ppo"
    """Ratio interval: ppo is [1 - eps, 1 + eps], symmetric is [1 / (1 + eps), 1 + eps]."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    clip_vloss: bool = True
    """Clip the change of the value, by --clip-eps, as in the policy loss."""
    normalize_returns: bool = True
    """Let the critic predict returns in units of their running mean and deviation, whatever the scale of rewards."""
    ent_coef: float = 0.01
    """Weight of the exploration loss."""
    exploration_loss: Literal["entropy", "symmetric-kl"] = "entropy"
    """Reward the policy's entropy, or penalise its symmetric KL to the uniform policy (not for Box actions)."""
    max_grad_norm: float = 0.5
    """Clip the global norm of the gradient; 0 turns it off."""
    norm_adv: bool = True
    """Normalise advantages over each minibatch, across all devices."""
    target_kl: float = 0.0
    """Skip the remaining epochs of an update once the KL divergence of an epoch exceeds this; 0 turns it off."""
    normalize_obs: bool = False
    """Normalise observations by their running mean and standard deviation."""
    activation: Literal["tanh", "relu", "swish", "gelu"] = "tanh"
    """Activation of the hidden layers."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers of the actor and of the critic."""
    decorrelate: bool = False
    """Start every environment at a random phase of its episode, by random actions before the first update."""

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def block(self) -> int:
        """Neighbouring environments that are shuffled together, so that all minibatches get equal parts of them."""
        return block_width(self.num_steps, self.num_minibatches)

    @property
    def schedule(self) -> str:
        return self.lr_schedule or ("linear" if self.anneal_lr else "constant")

    def sizes(self, num_devices: int) -> list[str]:
        """The derived sizes, for the header of a run."""
        samples = f"{self.num_envs} envs ({self.num_envs // num_devices} per device) x {self.num_steps} steps"
        minibatch = self.steps_per_update // self.num_minibatches
        return [
            f"{samples} = {self.steps_per_update:,} per update, {self.num_updates:,} updates",
            f"{self.update_epochs} epochs x {self.num_minibatches} minibatches of {minibatch:,}",
        ]

    def __post_init__(self):
        super().__post_init__()
        check(self, "num_steps update_epochs num_minibatches hidden_sizes", at_least=1)
        check(self, "learning_rate clip_eps desired_kl", above=0)
        check(self, "vf_coef ent_coef max_grad_norm target_kl", at_least=0)
        check(self, "gamma gae_lambda", at_least=0, at_most=1)
        if self.lr_schedule == "linear" and not self.anneal_lr:
            raise UsageError("--no-anneal-lr contradicts --lr-schedule linear; leave one of them out")


if __name__ == "__main__":
    ARGS = parse(Args)  # before the slow imports: --help and usage errors answer at once

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from common.device.averages import Averages, zeros_of
from common.device.devices import choose_devices
from common.device.episodes import EpisodeTracker, RecentEpisodes, new_recent, new_tracker, recent_metrics, track
from common.device.evaluation import Episodes, run_episodes
from common.device.sampling import block_width, keys_of, minibatch_indices, rollout_keys
from common.device.sharding import AXIS, flat_pmean, over_seeds, pmapped
from common.device.update_loop import repeat
from common.envs import spaces
from common.envs.environment import Env, make, wrap
from common.nets.convolutions import Convolutions
from common.nets.distributions import Categoricals, Normal, action_noise
from common.nets.normalizers import RunningStats, rescale_output, running_stats
from common.runs.run import Run, TrainResult

# ---------------------------------------------------------------------------------------------------------- networks


class Torso(nn.Module):
    """Features of an observation: an MLP, behind convolutions where the observation is an image [H, W, C]."""

    args: Args
    space: spaces.Space

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        activation = getattr(nn, self.args.activation)
        layer = {"kernel_init": nn.initializers.orthogonal(np.sqrt(2)), "dtype": self.args.dtype}
        x = spaces.encode(obs, self.space)  # [B, features] or [B, H, W, C]
        if spaces.is_image(self.space):
            x = Convolutions(activation, layer)(x)
        for width in self.args.hidden_sizes:
            x = activation(nn.Dense(width, **layer)(x))
        return x


class Actor(nn.Module):
    """The policy: a distribution over actions."""

    args: Args
    obs_space: spaces.Space
    action_space: spaces.Space

    @nn.compact
    def __call__(self, obs: jax.Array) -> Categoricals | Normal:
        x = Torso(self.args, self.obs_space)(obs)
        init = nn.initializers.orthogonal(0.01)
        if isinstance(self.action_space, spaces.Box):
            size = math.prod(self.action_space.shape)  # actions are flat here; `env.step` gives them their shape
            mean = nn.Dense(size, kernel_init=init)(x)
            log_std = self.param("log_std", nn.initializers.zeros, (size,))
            return Normal(mean, jnp.broadcast_to(log_std, mean.shape))
        logits = nn.Dense(sum(self.action_space.nvec), kernel_init=init)(x)
        return Categoricals(logits, self.action_space.nvec, scalar=isinstance(self.action_space, spaces.Discrete))


class Critic(nn.Module):
    """The value of an observation."""

    args: Args
    obs_space: spaces.Space

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        x = Torso(self.args, self.obs_space)(obs)
        return nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0), name="value")(x)[..., 0]  # [B]


# ----------------------------------------------------------------------------------------------------------- records


class Params(NamedTuple):
    actor: Any
    critic: Any


class Learner(struct.PyTreeNode):
    """What is identical on every device."""

    params: Params
    opt_state: optax.OptState
    learning_rate: jax.Array  # [] moves under kl-adaptive only
    obs_stats: RunningStats | None
    return_stats: RunningStats | None  # the units of the critic
    recent: RecentEpisodes
    key: jax.Array  # root of all randomness; never advanced, only folded
    updates: jax.Array  # [] updates done


class Envs(struct.PyTreeNode):
    """This device's share of the environments, N of them."""

    state: Any  # [N, ...]
    obs: jax.Array  # [N, ...]
    tracker: EpisodeTracker  # [N]


class TrainState(struct.PyTreeNode):
    learner: Learner
    envs: Envs


class Trajectory(NamedTuple):
    """A rollout, [T, N, ...]."""

    obs: jax.Array  # as the networks see it
    policy: Categoricals | Normal  # the distribution that the action came from
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array  # true next observation

    @property
    def done(self) -> jax.Array:
        return self.terminated | self.truncated


class Batch(NamedTuple):
    """What the losses need of each sample, [T * N, ...]."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


class PPO(NamedTuple):
    """The algorithm as pure functions of one device, for `pmap`, `shard_map` or `vmap` with axis name `AXIS`."""

    init: Callable  # seeds [S] -> TrainState
    update: Callable  # TrainState, number of updates -> TrainState, metrics, first non-finite update of each metric
    evaluate: Callable  # TrainState -> Episodes [S, E]
    new_learner: Callable  # keys of the parameters and of everything random -> Learner
    act: Callable  # Learner, raw observations [B, ...], key or None for the best -> actions [B, ...]


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
    """Clipped surrogate objective (Schulman et al. 2017, eq. 7), negated."""
    return -jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, *bounds) * advantage))


def value_loss(value, old_value, target, clip_eps: float | None) -> jax.Array:
    """Half the squared error; with `clip_eps` the worse of it and of the error after a clipped change."""
    error = jnp.square(value - target)
    if clip_eps is not None:
        clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
        error = jnp.maximum(error, jnp.square(clipped - target))
    return 0.5 * jnp.mean(error)


def adapt_learning_rate(learning_rate, kl, desired_kl: float) -> jax.Array:
    """Divide by 1.5 where the KL divergence is over twice the desired one, multiply where it is under half of it."""
    factor = jnp.where(kl > 2 * desired_kl, 1 / 1.5, jnp.where(kl < 0.5 * desired_kl, 1.5, 1.0))
    return jnp.clip(learning_rate * factor, 1e-6, 1e-2)


# --------------------------------------------------------------------------------------------------------- algorithm


def make_ppo(args: Args, env: Env) -> PPO:
    """PPO for `env` as pure functions. Raises UsageError for flags that its spaces do not fit."""
    if args.exploration_loss == "symmetric-kl" and isinstance(env.action_space, spaces.Box):
        raise UsageError("--exploration-loss symmetric-kl needs discrete actions: there is no uniform policy on a Box")
    if args.normalize_obs and not isinstance(env.observation_space, spaces.Box):
        raise UsageError(f"--normalize-obs needs arrays as observations, {env.name} has {env.observation_space}")
    actor = Actor(args, env.observation_space, env.action_space)
    critic = Critic(args, env.observation_space)
    clip = optax.clip_by_global_norm(args.max_grad_norm) if args.max_grad_norm else optax.identity()
    optimizer = optax.flatten(optax.chain(clip, optax.scale_by_adam(eps=1e-5)))

    def init(seeds: jax.Array) -> TrainState:
        """Fresh state for every seed [S] on this device. Not vmapped: batched orthogonal matrices can deadlock."""
        return jax.lax.map(init_one, seeds)

    def update(state: TrainState, num_updates: jax.Array):
        """Run `num_updates` updates of all seeds; see `repeat` for what comes back."""

        def of_one_seed(state):
            state, metrics, broken = repeat(update_once, state, num_updates)
            return state, metrics | recent_metrics(state.learner.recent), broken

        return over_seeds(of_one_seed, args.num_seeds)(state)

    def evaluate(state: TrainState) -> Episodes:
        """Greedy episodes of all seeds, this device's share of `eval_episodes`, [S, E]."""
        return over_seeds(evaluate_one, args.num_seeds)(state.learner)

    def init_one(seed: jax.Array) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        start = env.reset_mid_episode if args.decorrelate else env.reset
        obs, env_state = jax.vmap(start)(keys_of(envs_key, num_envs))
        envs = Envs(state=env_state, obs=obs, tracker=new_tracker(num_envs))
        return TrainState(new_learner(params_key, key), envs)

    def new_learner(params_key: jax.Array, key: jax.Array) -> Learner:
        obs = jnp.zeros((1, *env.observation_space.shape), env.obs_dtype)
        actor_key, critic_key = jax.random.split(params_key)
        params = Params(actor.init(actor_key, obs), critic.init(critic_key, obs))
        return Learner(
            params=params,
            opt_state=optimizer.init(params),
            learning_rate=jnp.float32(args.learning_rate),
            obs_stats=running_stats(env.observation_space.shape) if args.normalize_obs else None,
            return_stats=running_stats(()) if args.normalize_returns else None,
            recent=new_recent(),
            key=key,
            updates=jnp.int32(0),
        )

    def update_once(state: TrainState):
        """One iteration of PPO: collect, estimate advantages, learn."""
        learner, envs = state.learner, state.envs
        rollout_key, shuffle_key = jax.random.split(jax.random.fold_in(learner.key, learner.updates))

        envs, trajectory = collect(learner, envs, rollout_key)
        tracker, recent, episodes = track(envs.tracker, learner.recent, trajectory.reward, trajectory.done, AXIS)
        batch, value_metrics = estimate(learner, envs, trajectory)
        learner, batch = update_units(learner, batch)
        params, opt_state, learn_metrics = learn(learner, batch, shuffle_key)

        obs_stats = learner.obs_stats and learner.obs_stats.merge(trajectory.obs, AXIS)
        learner = learner.replace(
            params=params,
            opt_state=opt_state,
            learning_rate=next_learning_rate(learner, learn_metrics["policy/approx_kl"]),
            obs_stats=obs_stats,
            recent=recent,
            updates=learner.updates + 1,
        )
        return TrainState(learner, envs.replace(tracker=tracker)), Averages.of(value_metrics | learn_metrics), episodes

    def collect(learner: Learner, envs: Envs, key: jax.Array) -> tuple[Envs, Trajectory]:
        """Step all environments `num_steps` times with the current policy."""
        keys = rollout_keys(key, args.num_steps, envs.obs.shape[0])  # [T, N]
        noise_keys, env_keys = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(keys), -1, 0)
        noise = jax.vmap(jax.vmap(partial(action_noise, space=env.action_space)))(noise_keys)  # all steps in one pass

        def step(carry, inputs):
            env_state, obs = carry
            noise, keys = inputs
            policy = actor.apply(learner.params.actor, see(learner, obs))
            action = policy.sample(noise)
            out = jax.vmap(env.step)(keys, env_state, action)
            transition = Trajectory(obs, policy, action, out.reward, out.terminated, out.truncated, out.final_obs)
            return (out.state, out.obs), transition

        (env_state, obs), trajectory = jax.lax.scan(step, (envs.state, envs.obs), (noise, env_keys))
        return envs.replace(state=env_state, obs=obs), trajectory

    def estimate(learner: Learner, envs: Envs, trajectory: Trajectory) -> tuple[Batch, dict[str, jax.Array]]:
        """Values, advantages and value targets of a rollout, in units of the rewards, flattened to [T * N, ...]."""
        value = value_of(learner, trajectory.obs)  # [T, N]
        next_value = jnp.concatenate([value[1:], value_of(learner, envs.obs)[None]])
        cut = trajectory.truncated & ~trajectory.terminated
        next_value = put_final_values(next_value, cut, trajectory.final_obs, partial(value_of, learner))
        ends = trajectory.terminated, trajectory.truncated
        advantage = gae(trajectory.reward, value, next_value, *ends, args.gamma, args.gae_lambda)

        batch = Batch(
            obs=see(learner, trajectory.obs),
            action=trajectory.action,
            log_prob=trajectory.policy.log_prob(trajectory.action),
            value=value,
            advantage=advantage,
            target=advantage + value,
        )
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [T * N, ...]
        return batch, value_statistics(batch)

    def update_units(learner: Learner, batch: Batch) -> tuple[Learner, Batch]:
        """Move on to units of the critic that count these targets in; its values stay what they are (PopArt)."""
        if learner.return_stats is None:
            return learner, batch
        units = learner.return_stats.merge(batch.target, AXIS)
        critic_params = rescale_output(learner.params.critic, "value", learner.return_stats, units)
        value, target = units.normalize(batch.value, math.inf), units.normalize(batch.target, math.inf)
        learner = learner.replace(params=learner.params._replace(critic=critic_params), return_stats=units)
        return learner, batch._replace(value=value, target=target)

    def learn(learner: Learner, batch: Batch, key: jax.Array):
        """Epochs of minibatch gradient steps; returns parameters, optimizer state and metrics."""
        num_envs = batch.value.shape[0] // args.num_steps
        sizes = args.num_steps, num_envs, args.update_epochs, args.num_minibatches
        minibatches = minibatch_indices(key, *sizes)  # [E, M, B]
        mean, std = advantage_statistics(batch.advantage[minibatches])  # [E, M]
        learning_rate = current_learning_rate(learner)
        loss_and_grad = jax.value_and_grad(loss, has_aux=True)

        @jax.jit  # traced once, although its shapes are asked for too
        def gradient_step(carry, inputs):
            params, opt_state = carry
            indices, mean, std = inputs
            minibatch = jax.tree.map(lambda x: x[indices], batch)
            minibatch = minibatch._replace(advantage=(minibatch.advantage - mean) / std)
            (_, metrics), grads = loss_and_grad(params, minibatch)
            grads, metrics = flat_pmean((grads, metrics))
            direction, opt_state = optimizer.update(grads, opt_state)
            params = jax.tree.map(lambda p, d: p - learning_rate * d, params, direction)
            return (params, opt_state), metrics | {"grad/norm": optax.global_norm(grads)}

        def epoch(carry):
            index, params, opt_state, sums, _ = carry
            inputs = jax.tree.map(lambda x: x[index], (minibatches, mean, std))
            (params, opt_state), metrics = jax.lax.scan(gradient_step, (params, opt_state), inputs)
            metrics = jax.tree.map(jnp.mean, metrics)
            return index + 1, params, opt_state, jax.tree.map(jnp.add, sums, metrics), metrics["policy/approx_kl"]

        def wanted(carry):
            index, *_, kl = carry
            return (index < args.update_epochs) & ~(kl > (args.target_kl or jnp.inf))

        first = jax.tree.map(lambda x: x[0, 0], (minibatches, mean, std))
        _, zeros = zeros_of(gradient_step, (learner.params, learner.opt_state), first)
        start = jnp.int32(0), learner.params, learner.opt_state, zeros, jnp.zeros(())
        epochs, params, opt_state, sums, _ = jax.lax.while_loop(wanted, epoch, start)
        metrics = jax.tree.map(lambda total: total / epochs, sums)
        metrics |= {"policy/epochs": epochs.astype(jnp.float32), "learning_rate": learning_rate}
        return params, opt_state, metrics | {"params/norm": optax.global_norm(params)}

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Policy, value and exploration losses of a minibatch, [B, ...]."""
        policy = actor.apply(params.actor, batch.obs)
        value = critic.apply(params.critic, batch.obs)
        log_ratio = policy.log_prob(batch.action) - batch.log_prob
        ratio = jnp.exp(log_ratio)
        bounds = ratio_bounds(args.clip_eps, args.clip_mode)

        entropy = jnp.mean(policy.entropy())
        uses_entropy = args.exploration_loss == "entropy"
        losses = {
            "loss/policy": policy_loss(ratio, batch.advantage, bounds),
            "loss/value": value_loss(value, batch.value, batch.target, args.clip_eps if args.clip_vloss else None),
            "loss/exploration": -entropy if uses_entropy else jnp.mean(policy.symmetric_kl_to_uniform()),
        }
        weights = {"loss/policy": 1.0, "loss/value": args.vf_coef, "loss/exploration": args.ent_coef}
        total = sum(weights[name] * value for name, value in losses.items())
        statistics = {
            "loss/total": total,
            "policy/entropy": entropy,
            "policy/approx_kl": jnp.mean(ratio - 1 - log_ratio),  # Schulman's k3 estimator
            "policy/clip_fraction": jnp.mean((ratio < bounds[0]) | (ratio > bounds[1])),
        }
        return total, losses | statistics

    def value_of(learner: Learner, obs: jax.Array) -> jax.Array:
        """The critic's values of raw observations, in units of the rewards."""
        value = critic.apply(learner.params.critic, see(learner, obs))
        return value if learner.return_stats is None else learner.return_stats.denormalize(value)

    def evaluate_one(learner: Learner) -> Episodes:
        return run_episodes(env, partial(act, learner), math.ceil(args.eval_episodes / jax.lax.axis_size(AXIS)))

    def act(learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Actions [B, ...] for raw observations [B, ...]: sampled with a key, else the most likely ones."""
        policy = actor.apply(learner.params.actor, see(learner, obs))
        return policy.mode() if key is None else policy.sample(action_noise(key, env.action_space, obs.shape[:1]))

    def see(learner: Learner, obs: jax.Array) -> jax.Array:
        """Raw observations as the networks get them."""
        return obs if learner.obs_stats is None else learner.obs_stats.normalize(obs)

    def current_learning_rate(learner: Learner) -> jax.Array:
        if args.schedule == "kl-adaptive":
            return learner.learning_rate
        progress = learner.updates / args.num_updates if args.schedule == "linear" else 0.0
        return jnp.float32(args.learning_rate) * jnp.maximum(1.0 - progress, 0.0)

    def next_learning_rate(learner: Learner, kl: jax.Array) -> jax.Array:
        if args.schedule != "kl-adaptive":
            return learner.learning_rate
        return adapt_learning_rate(learner.learning_rate, kl, args.desired_kl)

    def advantage_statistics(advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Global mean and standard deviation of each minibatch [..., B], or 0 and 1 without --norm-adv."""
        if not args.norm_adv:
            return jnp.zeros(advantage.shape[:-1]), jnp.ones(advantage.shape[:-1])
        mean = jax.lax.pmean(jnp.mean(advantage, axis=-1), AXIS)
        variance = jax.lax.pmean(jnp.mean(jnp.square(advantage - mean[..., None]), axis=-1), AXIS)
        return mean, jnp.sqrt(variance) + 1e-8

    return PPO(init, update, evaluate, new_learner, act)


make_algorithm = make_ppo  # the name by which `load_policy` knows it


def put_final_values(next_value, cut, final_obs, value_of) -> jax.Array:
    """`next_value` [T, N] with the value of `final_obs` [T, N, ...] where `cut` [T, N].

    Evaluates N observations at a time until all are done: no network pass at all while no time limit strikes, and right
    under `vmap`, where a `cond` would evaluate everything.
    """
    shape, width = next_value.shape, next_value.shape[1]
    final_obs = final_obs.reshape(-1, *final_obs.shape[2:])

    def fill(carry):
        cut, next_value = carry
        (index,) = jnp.nonzero(cut, size=width, fill_value=cut.size)
        next_value = next_value.at[index].set(value_of(final_obs[index]), mode="drop")
        return cut.at[index].set(False, mode="drop"), next_value

    start = cut.ravel(), next_value.ravel()
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0]), fill, start)[1].reshape(shape)


def value_statistics(batch: Batch) -> dict[str, jax.Array]:
    """Metrics of the value function over the whole batch of all devices."""
    samples = jnp.stack([batch.target, batch.target - batch.value, batch.advantage, batch.value])
    mean = jax.lax.pmean(jnp.mean(samples, axis=1), AXIS)
    variance = jax.lax.pmean(jnp.mean(jnp.square(samples - mean[:, None]), axis=1), AXIS)
    target, error, advantage, _ = variance
    return {
        "value/mean": mean[3],
        "value/explained_variance": 1 - error / jnp.maximum(target, 1e-8),
        "advantage/std": jnp.sqrt(advantage),
    }


# --------------------------------------------------------------------------------------------------------------- run


def train(args: Args, env: Any = None) -> TrainResult:
    """Train as the command line does. `env` takes a gymnax-style environment object instead of the name `args.env`.

    Raises UsageError for what cannot be done, TrainingError where training had to stop, KeyboardInterrupt after SIGINT.
    """
    devices = choose_devices(args.num_devices, args.num_envs, args.block)
    env = make(args.env, args.env_params) if env is None else wrap(env)
    ppo = pmapped(make_ppo(args, env), devices)
    with Run(args, __file__, env, devices) as run:
        state, update = run.start(ppo)
        while run.unfinished:
            state, *report = update(state, run.next_chunk())
            run.advance(state, *report)
        return run.finish(state)


if __name__ == "__main__":
    sys.exit(main(train, ARGS))
