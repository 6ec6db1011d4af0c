"""Soft Actor-Critic (Haarnoja et al. 2018), data-parallel over every device.

docs/sac.md explains this file.

python algos/sac_pmap.py --env Pendulum-v1
python algos/sac_pmap.py --help
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pmaprl.flags import (
    AdamBeta,
    Bounds,
    Count,
    Discount,
    Fraction,
    OffPolicyArgs,
    Positive,
    Ratio,
    Scale,
    Share,
    Temperature,
    UsageError,
    main,
    parse,
)


@dataclass(kw_only=True)
class Args(OffPolicyArgs):
    """Train SAC. Sizes such as --num-envs are totals over all devices.

    Environments on the host have other flags.
    """

    tuned_like: ClassVar[str] = "sac_pmap"  # a copy of this file starts from the same tuned flags

    env: str = "Pendulum-v1"

    # recipe
    recipe: Literal["sac", "crossq", "simba", "xqc"] = "sac"
    """Algorithm whose defaults the other flags take: SAC, or, for fewer steps, CrossQ, SimBa or
    XQC; see --recipe NAME --help."""

    # optimizer
    policy_lr: Positive = 3e-4
    """Initial learning rate of the policy."""
    q_lr: Positive = 1e-3
    """Initial learning rate of the Q functions and of the temperature."""
    lr_schedule: Literal["linear", "constant"] = "constant"
    """Learning rates over the run: linear to zero, or constant."""
    adam_b1: AdamBeta = 0.9
    """Adam's beta1."""
    adam_b2: AdamBeta = 0.999
    """Adam's beta2."""
    weight_decay: Fraction = 0.0
    """AdamW's weight decay of the policy and the Q functions, as a share of the learning rate."""
    policy_frequency: Count = 1
    """Updates of the Q functions per update of policy and temperature."""
    target_frequency: Count = 1
    """Updates of the Q functions per update of the target networks."""

    # loss
    gamma: Discount = 0.99
    """Discount factor."""
    target_networks: bool = True
    """Use target networks (slowly updated copies) for the targets."""
    tau: Share = 0.005
    """Polyak averaging coefficient of the target networks."""
    critic_bins: Count = 1
    """Bins of categorical Q functions, which learn by cross entropy; 1: plain Q functions, which
    learn by squared errors."""
    critic_limit: Ratio = 5.0
    """Largest magnitude of a return that the --critic-bins represent."""
    autotune: bool = True
    """Tune the temperature automatically, towards the target entropy."""
    alpha: Temperature = 0.2
    """Entropy temperature, with --autotune its initial value."""
    target_entropy_scale: Scale | None = None
    """Target entropy, in units of -|A| for Box actions (default: 1), of log n for n discrete ones
    (default: 0.5)."""

    # normalization
    normalize_obs: bool = False
    """Normalize observations by the mean and standard deviation of all observations
    stored so far."""
    normalize_rewards: bool = False
    """Divide rewards by the standard deviation of discounted returns so far."""

    # network
    critic_norm: Literal["none", "layer", "batch", "renorm"] = "none"
    """Normalization layers of the Q functions, which allow a higher --utd-ratio; renorm: batch
    renormalization."""
    actor_norm: Literal["none", "layer", "batch", "renorm"] = "none"
    """Normalization layers of the policy; renorm: batch renormalization."""
    weight_norm: bool = False
    """Scale the weights into each unit to norm 1 after every gradient step (weight
    normalization)."""
    residual: bool = False
    """Use residual blocks, all of one width, in place of hidden layers."""
    activation: Literal["tanh", "relu", "swish", "gelu"] = "relu"
    """Activation of the hidden layers."""
    hidden_sizes: tuple[Count, ...] = (256, 256)
    """Widths of the hidden layers of the policy and of each Q function."""
    critic_hidden_sizes: tuple[Count, ...] | None = None
    """Widths of the hidden layers of each Q function (default: --hidden-sizes)."""
    log_std_min: Annotated[float, Bounds(at_most=1)] = -5.0
    """Lowest logarithm of the policy's standard deviation for Box actions, at most 1; the highest
    is 2."""
    squash_log_std: bool = True
    """Squash the log standard deviation into its range by a tanh, else clip it."""

    def __post_init__(self):
        super().__post_init__()
        self.check_needed("target_entropy_scale", "autotune")
        self.check_needed("tau target_frequency", "target_networks")
        if self.critic_bins == 1:
            self.check_needed("critic_limit", "critic_bins", "above 1")
        else:
            limit = self.critic_limit
            self.check_atoms(-limit, limit, self.critic_bins, "--critic-limit and --critic-bins")


# Before the slow imports: --help and usage errors answer at once
ARGS = parse(Args) if __name__ == "__main__" else None

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from pmaprl.algorithm import (
    Discrete,
    GradientContext,
    HParams,
    OffPolicy,
    Space,
    Transition,
    nets,
    optim,
    run_algorithm,
)

# --------------------------------------------------------------------------------------------------
# networks


class Actor(nn.Module):
    """Network of the policy, a distribution over actions."""

    args: Args
    obs_space: Space
    action_space: nets.SquashableSpace

    @nn.compact
    def __call__(
        self, obs: jax.Array, train: bool = False
    ) -> nets.Categoricals | nets.SquashedNormal:
        args = self.args
        layer = {"dtype": args.dtype}
        x = nets.Features(self.obs_space, args.activation, layer)(obs)
        mlp = nets.MLP(args.hidden_sizes, args.activation, layer, args.actor_norm, args.residual)
        x = mlp(x, train)
        if isinstance(self.action_space, Discrete):
            logits = nn.Dense(self.action_space.n)(x)
            policy = nets.Categoricals(logits, self.action_space.nvec, scalar=True)
            return policy.only(nets.legal_actions(obs))
        x = nn.Dense(2 * math.prod(self.action_space.shape))(x)
        return nets.SquashedNormal.of(x, args.log_std_min, args.squash_log_std)


class QFunction(nn.Module):
    """Network of one Q function: returns [B] of a Box action, or [B, n] of all discrete actions."""

    args: Args
    obs_space: Space
    action_space: nets.SquashableSpace

    @nn.compact
    def __call__(
        self, obs: jax.Array, action: jax.Array | None = None, train: bool = False
    ) -> nets.ValueDistribution:
        args = self.args
        layer = {"dtype": args.dtype}
        widths = args.critic_hidden_sizes or args.hidden_sizes
        x = nets.Features(self.obs_space, args.activation, layer)(obs)
        mlp = nets.MLP(widths, args.activation, layer, args.critic_norm, args.residual)
        if isinstance(self.action_space, Discrete):
            n = self.action_space.n
            head = nn.Dense(n * args.critic_bins)
            outputs = head(mlp(x, train)).reshape(-1, n, args.critic_bins)
        else:
            head = nn.Dense(args.critic_bins)
            assert action is not None, "actions of a Box are an input"
            outputs = head(mlp(jnp.concatenate([x, action], axis=-1), train))
        return nets.ValueDistribution.of(outputs, -args.critic_limit, args.critic_limit)


# --------------------------------------------------------------------------------------------------
# records

Metrics = dict[str, jax.Array]
"""Numbers [] of an update, by name."""


class Params(NamedTuple):
    actor: Any
    critics: Any
    targets: Any  # target critics; None: use `critics`, and XLA merges the two equal passes
    log_alpha: jax.Array  # [] logarithm of the temperature


class OptStates(NamedTuple):
    actor: optax.OptState
    critics: optax.OptState
    log_alpha: optax.OptState


class Learner(struct.PyTreeNode):
    """Parameters, optimizers and normalizers, the same on every device."""

    params: Params
    opt_states: OptStates
    obs_stats: nets.Normalizer
    return_stats: nets.Normalizer  # of discounted returns


# --------------------------------------------------------------------------------------------------
# maths


def td_target(
    reward: jax.Array,
    terminated: jax.Array,
    next_q: jax.Array,
    next_entropy: jax.Array,
    alpha: jax.Array,
    gamma: float,
) -> jax.Array:
    """Target of both Q functions: reward + gamma * soft value of the next observation.

    Haarnoja et al. 2018b, eq. 2 and 3.

    Args:
        reward: [B] rewards.
        terminated: [B] bool, True where the episode ended, but not by a time limit.
        next_q: [..., B] smaller Q value of the next action.
        next_entropy: [B] entropy of the policy at the next observation, in nats.
        alpha: [] temperature.
        gamma: discount factor.

    Returns:
        [..., B] targets.
    """
    soft_value = next_q + alpha * next_entropy
    return reward + gamma * jnp.where(terminated, 0.0, soft_value)


def adam(
    learning_rate: float | jax.Array, hparams: HParams, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015) with the betas of `hparams`; AdamW with --weight-decay."""
    if hparams.weight_decay:
        return optax.adamw(
            learning_rate, hparams.adam_b1, hparams.adam_b2, weight_decay=weight_decay
        )
    return optax.adam(learning_rate, hparams.adam_b1, hparams.adam_b2)


def target_entropy(space: nets.SquashableSpace, scale: float | None) -> float:
    """Entropy in nats that --autotune steers to.

    Its default is -|A| for a Box scaled to -1 .. 1, and half of log n for n actions.
    """
    if isinstance(space, Discrete):
        return (0.5 if scale is None else scale) * math.log(space.n)
    return -(1.0 if scale is None else scale) * math.prod(space.shape)


def entropy_scales(space: nets.SquashableSpace) -> tuple[float, float]:
    """Lowest and highest --target-entropy-scale that a policy can reach.

    No policy has more entropy than the uniform one.
    """
    if isinstance(space, Discrete):
        return -math.inf, 1.0
    return -math.log(2), math.inf


# --------------------------------------------------------------------------------------------------
# algorithm


class SAC(OffPolicy[Args, Learner]):
    """Soft Actor-Critic, as pure functions of one agent on one device.

    Raises:
        UsageError: actions are neither a Box nor Discrete, or no policy has the target entropy.
    """

    def __post_init__(self) -> None:
        low, high = entropy_scales(self.space)
        for scale in self.args.values_of("target_entropy_scale"):
            if scale is not None and not low <= scale <= high:
                bound = "log n, scale 1" if self.discrete else "|A| log 2, scale -0.693"
                raise UsageError(
                    f"--target-entropy-scale {scale}: no policy has more entropy than {bound}"
                )

    @cached_property
    def space(self) -> nets.SquashableSpace:
        return nets.check_squashable(self.env, "algos/ppo_pmap.py")

    @property
    def discrete(self) -> bool:
        """True if actions are Discrete."""
        return isinstance(self.space, Discrete)

    @cached_property
    def actor(self) -> Actor:
        return Actor(self.args, self.env.policy_obs_space, self.space)

    @cached_property
    def critics(self) -> nets.Ensemble:
        """Both Q functions, which return [2, B], or [2, B, n] for n actions."""
        return nets.Ensemble(QFunction(self.args, self.env.observation_space, self.space), 2)

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """Limits of evolution: no policy has more entropy than the uniform one."""
        return {"target_entropy_scale": entropy_scales(self.space)}

    @property
    def cautions(self) -> dict[str, tuple[float, str]]:
        """Warning where many returns leave the support of categorical critics."""
        if self.args.critic_bins == 1:
            return {}
        return nets.caution_of_support(f"--critic-limit {self.args.critic_limit:g}")

    def explore(self, learner: Learner, obs: jax.Array, noise: jax.Array) -> jax.Array:
        """Sample the actions [N, ...] of a step, as the buffer keeps them, within -1 .. 1."""
        return self.policy_of(learner, obs).sample(noise)

    def update(
        self, learner: Learner, batch: Transition, context: GradientContext
    ) -> tuple[Learner, optim.Reports]:
        """Update the Q functions, their targets, and, if it is due, policy and temperature."""
        hparams = context.hparams
        obs, next_obs = (learner.obs_stats.normalize(x) for x in (batch.obs, batch.next_obs))
        reward = batch.reward
        if self.args.normalize_rewards:
            reward = reward / learner.return_stats.std
        batch = batch._replace(obs=obs, next_obs=next_obs, reward=reward)
        # Expectations over all actions need no noise
        next_noise, noise = (
            None if self.discrete else optim.noise_like(keys, batch.action) for keys in context.keys
        )
        learner, metrics = self.update_critics(learner, batch, next_noise, hparams)
        if self.args.target_networks:
            params = learner.params
            target_due = context.updates % self.args.target_frequency == 0
            tau = jnp.where(target_due, hparams.tau, 0.0)
            targets = jax.tree.map(
                lambda old, new: old + tau * (new - old), params.targets, params.critics
            )
            learner = learner.replace(params=params._replace(targets=targets))
        policy_due = context.updates % self.args.policy_frequency == 0
        learner, policy_metrics = optim.update_if(
            policy_due, lambda learner: self.update_policy(learner, batch, noise, hparams), learner
        )
        return learner, metrics | policy_metrics

    def update_critics(
        self, learner: Learner, batch: Transition, noise: jax.Array | None, hparams: HParams
    ) -> tuple[Learner, Metrics]:
        """Take a gradient step of both Q functions."""
        params = learner.params
        opt_states = learner.opt_states
        alpha = self.temperature(learner, hparams)
        next_policy = self.actor.apply(params.actor, batch.next_obs)
        next_action, next_entropy = self.sample_action(next_policy, noise)
        inputs = batch.obs, batch.action
        next_inputs = batch.next_obs, next_action
        targets = params.critics if params.targets is None else params.targets
        _, next_q, _ = nets.joint_forward(self.critics, targets, inputs, next_inputs)
        next_q = self.min_q(next_q, next_policy)
        atoms = td_target(
            reward=batch.reward,
            terminated=batch.terminated,
            next_q=next_q.atoms.T,  # [Z, B]
            next_entropy=next_entropy,
            alpha=alpha,
            gamma=hparams.gamma,
        )
        target = next_q.replace(atoms=atoms.T)

        def loss(variables):
            q, _, stats = nets.joint_forward(self.critics, variables, inputs, next_inputs)
            q = q.of_actions(batch.action) if self.discrete else q
            losses = jnp.mean(q.error(target), axis=-1)  # [2]
            means = jnp.mean(q.mean(), axis=-1)
            td_error = jnp.mean(jnp.abs(q.mean() - target.mean()))
            metrics = {
                "loss/q1": losses[0],
                "loss/q2": losses[1],
                "q/mean1": means[0],
                "q/mean2": means[1],
            }
            if self.args.critic_bins > 1:
                metrics["q/outside"] = jnp.mean(target.outside())
            total = jnp.sum(losses)
            metrics |= {"q/target": jnp.mean(target.mean()), "q/td_error": td_error}
            return total, (metrics, stats)

        new_critics, opt_state, metrics, norm = optim.gradient_step(
            loss,
            params.critics,
            optimizer=adam(hparams.q_lr, hparams, self.args.weight_decay),
            state=opt_states.critics,
            weight_norm=self.args.weight_norm,
        )
        learner = learner.replace(
            params=params._replace(critics=new_critics),
            opt_states=opt_states._replace(critics=opt_state),
        )
        return learner, metrics | {"grad/q_norm": norm}

    def update_policy(
        self, learner: Learner, batch: Transition, noise: jax.Array | None, hparams: HParams
    ) -> tuple[Learner, Metrics]:
        """Take a gradient step of the policy and, with --autotune, of the temperature."""
        params = learner.params
        opt_states = learner.opt_states
        alpha = self.temperature(learner, hparams)
        target = target_entropy(self.space, hparams.target_entropy_scale)
        # With a mask the target is the same share of the largest possible entropy
        legal = nets.legal_actions(batch.obs)
        scale = target / math.log(self.space.n) if isinstance(self.space, Discrete) else 1.0
        masked = {}
        if legal is not None:
            masked["policy/target_entropy"] = scale * jnp.mean(nets.largest_entropy(legal))

        def loss(variables):
            policy, stats = self.actor.apply(
                variables, batch.obs, train=True, mutable="batch_stats"
            )
            action, entropy = self.sample_action(policy, noise)
            q = self.min_q(self.critics.apply(params.critics, batch.obs, action), policy).mean()
            value = -jnp.mean(q + alpha * entropy)
            metrics = {"loss/policy": value, "policy/entropy": jnp.mean(entropy)} | masked
            return value, (metrics, stats)

        new_actor, opt_state, metrics, norm = optim.gradient_step(
            loss,
            params.actor,
            optimizer=adam(hparams.policy_lr, hparams, self.args.weight_decay),
            state=opt_states.actor,
            weight_norm=self.args.weight_norm,
        )
        params = params._replace(actor=new_actor)
        opt_states = opt_states._replace(actor=opt_state)
        # The gradient of log_alpha * (entropy - target), with the entropy over all devices
        if self.args.autotune:
            gradient = metrics["policy/entropy"] - metrics.get("policy/target_entropy", target)
            change: Any
            change, alpha_state = adam(hparams.q_lr, hparams).update(
                gradient, opt_states.log_alpha, params.log_alpha
            )
            params = params._replace(log_alpha=params.log_alpha + change)
            opt_states = opt_states._replace(log_alpha=alpha_state)
        metrics |= {"policy/alpha": alpha, "grad/policy_norm": norm}
        return learner.replace(params=params, opt_states=opt_states), metrics

    def temperature(self, learner: Learner, hparams: HParams) -> jax.Array:
        """Weight [] of the entropy."""
        if self.args.autotune:
            return jnp.exp(learner.params.log_alpha)
        return jnp.float32(hparams.alpha)

    def sample_action(self, policy: Any, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Sample actions [B, ...], and estimate the policy's entropy [B].

        Discrete policies need no sample: their Q functions have a value for every action.
        """
        if self.discrete:
            return jnp.zeros(policy.logits.shape[:1], jnp.int32), policy.entropy()
        action, log_prob = policy.sample_with_log_prob(noise)
        return action, -log_prob

    def min_q(self, q: nets.ValueDistribution, policy: Any) -> nets.ValueDistribution:
        """Take the smaller of both Q functions [2, B, ...].

        For discrete actions, average it over the policy's actions.
        """
        smallest = q.smallest()
        return smallest.expected(jax.nn.softmax(policy.logits)) if self.discrete else smallest

    def policy_of(
        self, learner: Learner, obs: jax.Array
    ) -> nets.Categoricals | nets.SquashedNormal:
        """Distributions over actions for raw observations."""
        policy: Any = self.actor.apply(learner.params.actor, learner.obs_stats.normalize(obs))
        return policy

    def observe(
        self, learner: Learner, transitions: Transition, valid: jax.Array | None
    ) -> Learner:
        """Update the normalizers with newly stored transitions [T, N, ...].

        If `valid` [T, N] is given, only transitions where it is True count.
        """
        obs_stats = learner.obs_stats.update(transitions.obs, valid)
        return_stats = learner.return_stats.update(transitions.discounted, valid)
        return learner.replace(obs_stats=obs_stats, return_stats=return_stats)

    def init(self, key: jax.Array, hparams: HParams) -> Learner:
        """Make the learner before the first update."""
        obs = self.env.example_obs(1)
        action = nets.empty_action(self.env.action_space)[None]
        actor_key, critics_key = jax.random.split(key)
        policy = self.actor.init(actor_key, obs)
        q = self.critics.init(critics_key, obs, action)
        if self.args.weight_norm:
            policy = optim.unit_norm(policy)
            q = optim.unit_norm(q)
        params = Params(
            actor=policy,
            critics=q,
            targets=q if self.args.target_networks else None,
            log_alpha=jnp.log(jnp.float32(hparams.alpha)),
        )
        optimizer = adam(hparams.q_lr, hparams)
        opt_states = OptStates(
            actor=optimizer.init(policy),
            critics=optimizer.init(q),
            log_alpha=optimizer.init(params.log_alpha),
        )
        return Learner(
            params=params,
            opt_states=opt_states,
            obs_stats=nets.Normalizer.of(self.env.observation_space, on=self.args.normalize_obs),
            return_stats=nets.Normalizer.of_numbers(on=self.args.normalize_rewards),
        )

    def act(self, learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Choose actions [B, ...] for raw observations: sampled with a key, else the best known."""
        policy = self.policy_of(learner, obs)
        action = policy.mode() if key is None else policy.sample_with_key(key)
        return nets.to_env(action, self.env.action_space)


make_algorithm = SAC  # the name by which `load_policy` knows it


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    """Train as the command line does, also on an environment object or with a callback.

    `run_algorithm` describes the arguments and the result.
    """
    return run_algorithm(args, __file__, SAC, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
