"""Soft Actor-Critic (Haarnoja et al. 2018), data-parallel over every device; docs/sac.md explains this file.

python algos/sac_pmap.py --env Pendulum-v1
python algos/sac_pmap.py --help
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.flags import (
    AdamBeta,
    Count,
    Counts,
    Discount,
    OffPolicyArgs,
    Positive,
    Scale,
    Share,
    Temperature,
    UsageError,
    main,
    parse,
)


@dataclass(kw_only=True)
class Args(OffPolicyArgs):
    """Train SAC. Sizes count over all devices. Environments on the host have other flags."""

    env: str = "Pendulum-v1"

    # optimiser
    policy_lr: Positive = 3e-4
    """Adam's learning rate of the policy."""
    q_lr: Positive = 1e-3
    """Adam's learning rate of the Q functions and of the temperature."""
    adam_b1: AdamBeta = 0.9
    """Adam's beta1."""
    adam_b2: AdamBeta = 0.999
    """Adam's beta2."""
    policy_frequency: Count = 1
    """Updates of the Q functions per update of policy and temperature."""
    target_frequency: Count = 1
    """Updates of the Q functions per update of the target networks."""

    # loss
    gamma: Discount = 0.99
    """Discount factor."""
    tau: Share = 0.005
    """Polyak averaging coefficient of the target networks."""
    autotune: bool = True
    """Automatic tuning of the temperature, towards the target entropy."""
    alpha: Temperature = 0.2
    """Entropy temperature: its first value with --autotune, else that of the whole run."""
    target_entropy_scale: Scale | None = None
    """Target entropy, in units of -|A| for Box actions (default: 1), of log n for n discrete ones (default: 0.5)."""

    # normalisation
    normalize_obs: bool = False
    """Normalisation of observations by the mean and standard deviation of all stored so far."""

    # network
    critic_layer_norm: bool = False
    """Layer normalisation in the Q functions, which allows for a --utd-ratio well above 1."""
    activation: Literal["tanh", "relu", "swish", "gelu"] = "relu"
    """Activation of the hidden layers."""
    hidden_sizes: Counts = (256, 256)
    """Widths of the hidden layers of the policy and of each Q function."""

    def __post_init__(self):
        super().__post_init__()
        if self.target_entropy_scale is not None and not self.autotune:
            raise UsageError("--target-entropy-scale needs --autotune: with --no-autotune nothing steers to it")


if __name__ == "__main__":
    ARGS = parse(Args)  # before the slow imports: --help and usage errors answer at once

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from common.algorithm import Discrete, EnvSpec, Flags, Now, OffPolicy, Space, Transition, nets, optim, run_algorithm

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0

# ---------------------------------------------------------------------------------------------------------- networks


class Actor(nn.Module):
    """The policy: a distribution over actions."""

    args: Args
    obs_space: Space
    action_space: Space

    @nn.compact
    def __call__(self, obs: jax.Array) -> nets.Categoricals | nets.SquashedNormal:
        args, layer = self.args, {"dtype": self.args.dtype}
        x = nets.Features(self.obs_space, args.activation, layer)(obs)
        x = nets.MLP(args.hidden_sizes, args.activation, layer)(x)
        if isinstance(self.action_space, Discrete):
            policy = nets.Categoricals(nn.Dense(self.action_space.n)(x), self.action_space.nvec, scalar=True)
            return policy.only(nets.legal_actions(obs))
        mean, log_std = jnp.split(nn.Dense(2 * math.prod(self.action_space.shape))(x), 2, axis=-1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (jnp.tanh(log_std) + 1)
        return nets.SquashedNormal(mean, log_std)


class Critics(nn.Module):
    """Both Q functions: [2, B] of a Box action, or [2, B, n] of all discrete actions."""

    args: Args
    obs_space: Space
    action_space: Space

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> jax.Array:
        return jnp.stack([self.q_function(obs, action) for _ in range(2)])

    def q_function(self, obs: jax.Array, action: jax.Array | None) -> jax.Array:
        args, layer = self.args, {"dtype": self.args.dtype}
        x = nets.Features(self.obs_space, args.activation, layer)(obs)
        layers = nets.MLP(args.hidden_sizes, args.activation, layer, args.critic_layer_norm)
        if isinstance(self.action_space, Discrete):
            return nn.Dense(self.action_space.n)(layers(x))
        return nn.Dense(1)(layers(jnp.concatenate([x, action], axis=-1)))[..., 0]


# ----------------------------------------------------------------------------------------------------------- records


class Params(NamedTuple):
    actor: Any
    critics: Any
    targets: Any  # slowly following `critics`
    log_alpha: jax.Array  # [] logarithm of the temperature


class OptStates(NamedTuple):
    actor: optax.OptState
    critics: optax.OptState
    log_alpha: optax.OptState


class Learner(struct.PyTreeNode):
    """Parameters, optimisers and normaliser, the same on every device."""

    params: Params
    opt_states: OptStates
    obs_stats: Any  # RunningStats of each part of observations, or None


# ------------------------------------------------------------------------------------------------------------- maths


def td_target(reward, terminated, next_q, next_entropy, alpha, gamma: float) -> jax.Array:
    """Target of both Q functions (Haarnoja et al. 2018b, eq. 2 and 3): reward + gamma * soft value of what follows."""
    return reward + gamma * jnp.where(terminated, 0.0, next_q + alpha * next_entropy)


def adam(learning_rate: float | jax.Array, hp: Flags) -> optax.GradientTransformation:
    """The optimizer (Kingma & Ba 2015), with the averages that `hp` says."""
    return optax.adam(learning_rate, hp.adam_b1, hp.adam_b2)


def target_entropy(space: Space, scale: float | None) -> float:
    """Entropy in nats that --autotune steers to: -|A| for a Box, half of the largest one for discrete actions.

    That of a Box is of actions within -1 .. 1, as log-probabilities are: it means the same whatever the bounds.
    """
    if isinstance(space, Discrete):
        return (0.5 if scale is None else scale) * math.log(space.n)
    return -(1.0 if scale is None else scale) * math.prod(space.shape)


# --------------------------------------------------------------------------------------------------------- algorithm


def make_sac(args: Args, env: EnvSpec) -> OffPolicy:
    """SAC for `env` as pure functions of one agent on one device. Raises UsageError for other actions."""
    nets.check_squashable(env, "algos/ppo_pmap.py")
    discrete = isinstance(env.action_space, Discrete)
    actor = Actor(args, nets.without_privileged(env.observation_space), env.action_space)
    critics = Critics(args, env.observation_space, env.action_space)
    scales = [scale for scale in args.values_of("target_entropy_scale") if scale is not None]
    if discrete and max(scales, default=0) > 1:
        raise UsageError(f"--target-entropy-scale {max(scales)}: no policy has more entropy than log n, scale 1")

    def explore(learner: Learner, obs: jax.Array, noise: jax.Array) -> jax.Array:
        """Actions [N, ...] as the replay buffer keeps them, within -1 .. 1."""
        return policy_of(learner, obs).sample(noise)

    def update(learner: Learner, batch: Transition, now: Now) -> tuple[Learner, optim.Metrics]:
        """One step of both Q functions, of their targets, and, when it is due, of policy and temperature."""
        obs, next_obs = (nets.normalize(learner.obs_stats, x) for x in (batch.obs, batch.next_obs))
        batch = batch._replace(obs=obs, next_obs=next_obs)
        # Expectations over all actions need no noise
        next_noise, noise = (None if discrete else optim.noise_like(keys, batch.action) for keys in now.keys)
        learner, metrics = update_critics(learner, batch, next_noise, now.hp)
        tau = jnp.where(now.updates % args.target_frequency == 0, now.hp.tau, 0.0)
        params = learner.params
        targets = jax.tree.map(lambda old, new: old + tau * (new - old), params.targets, params.critics)
        learner = learner.replace(params=params._replace(targets=targets))
        due = now.updates % args.policy_frequency == 0
        learner, policy_metrics = optim.when(due, lambda learner: update_policy(learner, batch, noise, now.hp), learner)
        return learner, metrics | policy_metrics

    def update_critics(learner: Learner, batch: Transition, noise: jax.Array, hp: Flags) -> tuple[Learner, dict]:
        """One gradient step of both Q functions."""
        params = learner.params
        next_q, next_entropy = soft_value(params.actor, params.targets, batch.next_obs, noise)
        alpha = temperature(learner, hp)
        target = td_target(batch.reward, batch.terminated, next_q, next_entropy, alpha, hp.gamma)

        def loss(critic_params):
            if discrete:
                q = critics.apply(critic_params, batch.obs)
                q = jnp.take_along_axis(q, batch.action[None, :, None], axis=-1)[..., 0]
            else:
                q = critics.apply(critic_params, batch.obs, batch.action)
            losses = jnp.mean(jnp.square(q - target), axis=-1)  # [2]
            means = jnp.mean(q, axis=-1)
            return jnp.sum(losses), {
                "loss/q1": losses[0],
                "loss/q2": losses[1],
                "q/mean1": means[0],
                "q/mean2": means[1],
                "q/target": jnp.mean(target),
                "q/td_error": jnp.mean(jnp.abs(q - target)),
            }

        grads, metrics = optim.mean_gradients(loss)(params.critics)
        changes, opt_state = adam(hp.q_lr, hp).update(grads, learner.opt_states.critics)
        params = params._replace(critics=optax.apply_updates(params.critics, changes))
        learner = learner.replace(params=params, opt_states=learner.opt_states._replace(critics=opt_state))
        return learner, metrics | {"grad/q_norm": optax.global_norm(grads)}

    def update_policy(learner: Learner, batch: Transition, noise: jax.Array, hp: Flags) -> tuple[Learner, dict]:
        """One gradient step of the policy and, with --autotune, of the temperature."""
        params, opt_states, alpha = learner.params, learner.opt_states, temperature(learner, hp)
        target = target_entropy(env.action_space, hp.target_entropy_scale)
        legal = nets.legal_actions(batch.obs)  # with a mask: the same share of the largest possible entropy
        scale = target / math.log(env.action_space.n) if discrete else 1.0
        masked = {} if legal is None else {"policy/target_entropy": scale * jnp.mean(nets.largest_entropy(legal))}

        def loss(actor_params):
            q, entropy = soft_value(actor_params, params.critics, batch.obs, noise)
            value = -jnp.mean(q + alpha * entropy)
            return value, {"loss/policy": value, "policy/entropy": jnp.mean(entropy)} | masked

        grads, metrics = optim.mean_gradients(loss)(params.actor)
        changes, actor_state = adam(hp.policy_lr, hp).update(grads, opt_states.actor)
        params = params._replace(actor=optax.apply_updates(params.actor, changes))
        opt_states = opt_states._replace(actor=actor_state)
        if args.autotune:  # the gradient of log_alpha * (entropy - target), with the entropy over all devices
            gradient = metrics["policy/entropy"] - metrics.get("policy/target_entropy", target)
            change, alpha_state = adam(hp.q_lr, hp).update(gradient, opt_states.log_alpha)
            params = params._replace(log_alpha=params.log_alpha + change)
            opt_states = opt_states._replace(log_alpha=alpha_state)
        metrics |= {"policy/alpha": alpha, "grad/policy_norm": optax.global_norm(grads)}
        return learner.replace(params=params, opt_states=opt_states), metrics

    def temperature(learner: Learner, hp: Flags) -> jax.Array:
        return jnp.exp(learner.params.log_alpha) if args.autotune else jnp.float32(hp.alpha)

    def soft_value(actor_params, critic_params, obs, noise) -> tuple[jax.Array, jax.Array]:
        """The smaller Q of the policy's actions [B], and the policy's entropy [B], both in expectation."""
        policy = actor.apply(actor_params, obs)
        if discrete:
            q = jnp.min(critics.apply(critic_params, obs), axis=0)  # [B, n]
            return jnp.sum(jax.nn.softmax(policy.logits) * q, axis=-1), policy.entropy()
        action, log_prob = policy.sample_with_log_prob(noise)
        return jnp.min(critics.apply(critic_params, obs, action), axis=0), -log_prob

    def policy_of(learner: Learner, obs: jax.Array) -> nets.Categoricals | nets.SquashedNormal:
        """The actor's distributions for raw observations."""
        return actor.apply(learner.params.actor, nets.normalize(learner.obs_stats, obs))

    def observe(learner: Learner, new: Transition, valid: jax.Array | None) -> Learner:
        """The learner after transitions [T, N, ...] were stored, those that are `valid` [T, N] if that is given."""
        return learner.replace(obs_stats=nets.update_stats(learner.obs_stats, new.obs, valid))

    def init(key: jax.Array, hp: Flags) -> Learner:
        obs, action = env.example_obs(1), nets.empty_action(env.action_space)[None]
        actor_key, critics_key = jax.random.split(key)
        critic_params, log_alpha = critics.init(critics_key, obs, action), jnp.log(jnp.float32(hp.alpha))
        params = Params(actor.init(actor_key, obs), critic_params, critic_params, log_alpha)
        return Learner(
            params=params,
            opt_states=OptStates(*map(adam(hp.q_lr, hp).init, (params.actor, critic_params, log_alpha))),
            obs_stats=nets.obs_stats(env.observation_space, on=args.normalize_obs),
        )

    def act(learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Actions [B, ...] for raw observations [B, ...]: sampled with a key, else the most likely ones."""
        policy = policy_of(learner, obs)
        return nets.to_env(policy.mode() if key is None else policy.sample_with_key(key), env.action_space)

    return OffPolicy(init, explore, update, act, observe)


make_algorithm = make_sac  # the name by which `load_policy` knows it


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    """Train as the command line does, also on an environment object or with a callback; see `run_algorithm`."""
    return run_algorithm(args, __file__, make_sac, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
