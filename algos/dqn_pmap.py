"""DQN (Mnih et al. 2015) and its successors, data-parallel over every device.

docs/dqn.md explains this file.

python algos/dqn_pmap.py --env CartPole-v1
python algos/dqn_pmap.py --help
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

from pmaprl.flags import (
    AdamBeta,
    Count,
    Discount,
    Finite,
    Fraction,
    NonNegative,
    OffPolicyArgs,
    Positive,
    Share,
    Steps,
    UsageError,
    main,
    parse,
)


@dataclass(kw_only=True)
class Args(OffPolicyArgs):
    """Train DQN. Sizes such as --num-envs are totals over all devices.

    Environments on the host have other flags.
    """

    tuned_like: ClassVar[str] = "dqn_pmap"  # a copy of this file starts from the same tuned flags

    env: str = "CartPole-v1"
    total_timesteps: Steps = 50_000
    batch_size: Count = 64

    # exploration
    epsilon_start: Fraction = 1.0
    """Initial probability of a random action."""
    epsilon_end: Fraction = 0.05
    """Final probability of a random action, also of actions that are sampled after training."""
    epsilon_fraction: Fraction = 0.2
    """Fraction of the run over which the probability falls linearly from --epsilon-start to
    --epsilon-end."""

    # optimizer
    learning_rate: Positive = 1e-3
    """Initial learning rate of Adam."""
    lr_schedule: Literal["linear", "constant"] = "linear"
    """Learning rate over the run: linear to zero, or constant."""
    max_grad_norm: NonNegative = 10.0
    """Global norm at which gradients are clipped; 0: no clipping."""
    adam_b1: AdamBeta = 0.9
    """Adam's beta1."""
    adam_b2: AdamBeta = 0.999
    """Adam's beta2."""
    target_frequency: Count = 100
    """Gradient updates per update of the target network."""
    tau: Share = 1.0
    """Share of the Q network in an update of the target network; 1: a copy."""

    # loss
    gamma: Discount = 0.99
    """Discount factor."""
    double: bool = True
    """Use double Q-learning: the Q network chooses the next action, the target network evaluates
    it."""
    huber: bool = False
    """Use the Huber loss, linear for errors above 1, in place of half the squared error; it suits
    rewards within -1 .. 1."""
    n_steps: Count = 3
    """Steps of n-step returns; fewer at the end of an episode and, on the host, of a rollout."""
    distribution: Literal["none", "c51", "qr"] = "none"
    """Distribution of returns to learn: none (their mean alone), c51 (categorical) or qr
    (quantiles)."""
    num_atoms: Count = 51
    """Number of atoms of --distribution c51, or of quantiles of qr."""
    v_min: Finite = -10.0
    """Smallest return of --distribution c51."""
    v_max: Finite = 10.0
    """Largest return of --distribution c51."""

    # normalization
    normalize_obs: bool = True
    """Normalize observations by the mean and standard deviation of all observations
    stored so far."""

    # network
    dueling: bool = False
    """Use dueling heads: one for the value of a state, one for the advantages of its actions."""
    layer_norm: bool = False
    """Apply layer normalization before every activation."""
    activation: Literal["tanh", "relu", "swish", "gelu"] = "relu"
    """Activation of the hidden layers."""
    hidden_sizes: tuple[Count, ...] = (128, 128)
    """Widths of the hidden layers."""
    encoder: Literal["small", "nature", "impala", "flat"] = "small"
    """Image encoder: small (a 3 x 3 convolution with 16 channels), nature (the Nature DQN network),
    impala (IMPALA's ResNet) or flat (none)."""

    def __post_init__(self):
        super().__post_init__()
        self.check_needed("v_min v_max", "distribution", "c51")
        self.check_needed("num_atoms", "distribution", "c51", "qr")
        self.check_needed("huber", "distribution", "none")
        if self.distribution == "c51" and (self.v_min >= self.v_max or self.num_atoms == 1):
            atoms = f"{self.num_atoms} from {self.v_min} to {self.v_max}"
            raise UsageError(
                f"c51 needs two --num-atoms or more, from --v-min up to --v-max, got {atoms}"
            )
        if self.distribution == "c51":
            self.check_atoms(
                self.v_min, self.v_max, self.num_atoms, "--v-min, --v-max and --num-atoms"
            )


# Before the slow imports: --help and usage errors answer at once
ARGS = parse(Args) if __name__ == "__main__" else None

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from pmaprl.algorithm import (
    EnvSpec,
    GradientContext,
    HParams,
    OffPolicy,
    Transition,
    nets,
    optim,
    run_algorithm,
)

# --------------------------------------------------------------------------------------------------
# networks


class QNetwork(nn.Module):
    """Network of the return of every action, [B, n, Z].

    Its Z numbers are the mean (Z = 1), logits of the atoms (c51), or the quantiles (qr).
    """

    args: Args
    env: EnvSpec
    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        x = nets.Torso.of(self.args, self.env.policy_obs_space)(obs)
        advantage = self.head(self.num_actions, "advantage")(x)
        if not self.args.dueling:
            return advantage
        value = self.head(1, "value")(x)
        return value + advantage - jnp.mean(advantage, axis=-2, keepdims=True)

    def head(self, count: int, name: str) -> nn.Module:
        """Layer from features to `count` returns [B, count, Z]."""
        product = jax.lax.dot_general  # the default; jax2onnx replaces it unless it is named
        return nn.DenseGeneral((count, num_outputs(self.args)), dot_general=product, name=name)


# --------------------------------------------------------------------------------------------------
# records

Metrics = dict[str, jax.Array]
"""Numbers [] of an update, by name."""


class Learner(struct.PyTreeNode):
    """Networks, optimizer and normalizer, the same on every device."""

    params: Any
    target_params: Any  # copy of `params` that follows them slowly or at intervals
    opt_state: Any
    obs_stats: nets.Normalizer
    epsilon: jax.Array  # [] probability of a random action


# --------------------------------------------------------------------------------------------------
# maths


def num_outputs(args: Args) -> int:
    """Number Z of network outputs per action."""
    return 1 if args.distribution == "none" else args.num_atoms


def q_values(output: jax.Array, args: Args) -> jax.Array:
    """Mean returns [...] from the network's outputs [..., Z]."""
    if args.distribution == "c51":
        return nets.ValueDistribution.of(output, args.v_min, args.v_max).mean()
    return jnp.mean(output, axis=-1)


def loss(
    output: jax.Array,
    next_output: jax.Array,
    reward: jax.Array,
    discount: jax.Array,
    args: Args,
) -> jax.Array:
    """Loss of the network's outputs against reward + discount * next outputs.

    Args:
        output: [B, Z] outputs for the actions taken.
        next_output: [B, Z] outputs of the target network for the next actions.
        reward: [B] rewards, or discounted sums of n rewards.
        discount: [B] factor of the next return; 0 after a termination.
        args: flags.

    Returns:
        [B] losses: cross entropy (c51, Bellemare et al. 2017, eq. 7), quantile Huber loss (qr), or
        the squared or Huber error of the mean.
    """
    if args.distribution == "c51":
        q = nets.ValueDistribution.of(output, args.v_min, args.v_max)
        next_q = nets.ValueDistribution.of(next_output, args.v_min, args.v_max)
        atoms = reward[:, None] + discount[:, None] * next_q.atoms
        return q.error(next_q.replace(atoms=atoms))
    target = reward[:, None] + discount[:, None] * next_output
    if args.distribution == "qr":
        return quantile_huber(output, target)
    error = optax.huber_loss if args.huber else optax.l2_loss
    return error(output, target)[:, 0]


def outside(
    next_output: jax.Array, reward: jax.Array, discount: jax.Array, args: Args
) -> jax.Array:
    """Share [B] of c51's target returns beyond --v-min .. --v-max; arguments as for `loss`."""
    following = nets.ValueDistribution.of(next_output, args.v_min, args.v_max)
    atoms = reward[:, None] + discount[:, None] * following.atoms
    return following.replace(atoms=atoms).outside()


def quantile_huber(quantiles: jax.Array, returns: jax.Array) -> jax.Array:
    """Quantile Huber loss (Dabney et al. 2018, eq. 10, kappa = 1).

    Args:
        quantiles: [B, Z] predicted quantiles.
        returns: [B, Z] target returns, equally likely.

    Returns:
        [B] losses.
    """
    middle = (jnp.arange(quantiles.shape[-1]) + 0.5) / quantiles.shape[-1]
    error = returns[:, None, :] - quantiles[:, :, None]  # [B, Z, Z]
    weight = jnp.abs(middle[:, None] - (error < 0))
    return jnp.sum(jnp.mean(weight * optax.huber_loss(error), axis=-1), axis=-1)


# --------------------------------------------------------------------------------------------------
# algorithm

INSTEAD = "algos/sac_pmap.py for a Box, algos/ppo_pmap.py for others"  # trains on other actions


class DQN(OffPolicy[Args, Learner]):
    """Deep Q-learning, as pure functions of one agent on one device.

    Raises:
        UsageError: actions are not Discrete.
    """

    def __post_init__(self) -> None:
        nets.check_discrete(self.env, INSTEAD)

    @cached_property
    def network(self) -> QNetwork:
        return QNetwork(self.args, self.env, nets.check_discrete(self.env, INSTEAD).n)

    @property
    def cautions(self) -> dict[str, tuple[float, str]]:
        """Warning where many returns leave the support of C51."""
        if self.args.distribution != "c51":
            return {}
        return nets.caution_of_support(
            f"--v-min {self.args.v_min:g} .. --v-max {self.args.v_max:g}"
        )

    def explore(self, learner: Learner, obs: jax.Array, noise: jax.Array) -> jax.Array:
        """Sample the actions [N] of a step: random with probability `epsilon`, else the best."""
        return self.policy_of(learner, obs, learner.epsilon).sample(noise)

    def update(
        self, learner: Learner, batch: Transition, context: GradientContext
    ) -> tuple[Learner, Metrics]:
        """Take a gradient step of the Q network and, if it is due, a step of the target network."""
        hparams = context.hparams
        obs, next_obs = (learner.obs_stats.normalize(x) for x in (batch.obs, batch.next_obs))
        batch = batch._replace(obs=obs, next_obs=next_obs)
        batch_loss = partial(
            self.loss_of, target_params=learner.target_params, batch=batch, hparams=hparams
        )
        params, opt_state, metrics = optim.adam_step(
            batch_loss, learner.params, learner.opt_state, hparams
        )
        due = context.updates % self.args.target_frequency == 0
        tau = jnp.where(due, hparams.tau, 0.0)
        target_params = jax.tree.map(
            lambda old, new: (1 - tau) * old + tau * new, learner.target_params, params
        )
        learner = learner.replace(
            params=params,
            target_params=target_params,
            opt_state=opt_state,
            epsilon=hparams.epsilon,
        )
        return learner, metrics

    def loss_of(
        self, params: Any, target_params: Any, batch: Transition, hparams: HParams
    ) -> tuple[jax.Array, Metrics]:
        """Loss of a batch, and metrics; no gradient goes through the targets."""
        outputs: Any = self.network.apply(params, batch.obs)  # [B, n, Z]
        output = self.of_action(outputs, batch.action)  # [B, Z]
        next_output: Any = self.network.apply(target_params, batch.next_obs)  # [B, n, Z]
        selector: Any = (
            self.network.apply(params, batch.next_obs) if self.args.double else next_output
        )
        next_action = nets.epsilon_greedy(q_values(selector, self.args), 0.0, batch.next_obs).mode()
        discount = hparams.gamma if batch.discount is None else batch.discount
        discount = jnp.where(batch.terminated, 0.0, discount)
        following = self.of_action(next_output, next_action)
        value = jnp.mean(loss(output, following, batch.reward, discount, self.args))
        q = q_values(output, self.args)
        metrics = {"loss/q": value, "q/mean": jnp.mean(q), "q/value_max": jnp.max(q)}
        if self.args.distribution == "c51":
            beyond = outside(following, batch.reward, discount, self.args)
            metrics["q/outside"] = jnp.mean(beyond)
        return value, metrics

    def of_action(self, output: jax.Array, action: jax.Array) -> jax.Array:
        """Select the outputs [B, Z] of actions [B] from those of all actions, [B, n, Z]."""
        return jnp.take_along_axis(output, action[:, None, None], axis=1)[:, 0]

    def policy_of(
        self, learner: Learner, obs: jax.Array, epsilon: float | jax.Array
    ) -> nets.Categoricals:
        """Epsilon-greedy policy for raw observations."""
        outputs: Any = self.network.apply(learner.params, learner.obs_stats.normalize(obs))
        q = q_values(outputs, self.args)
        return nets.epsilon_greedy(q, epsilon, obs)

    def observe(
        self, learner: Learner, transitions: Transition, valid: jax.Array | None
    ) -> Learner:
        """Update the normalizer with newly stored transitions [T, N, ...].

        If `valid` [T, N] is given, only transitions where it is True count.
        """
        return learner.replace(obs_stats=learner.obs_stats.update(transitions.obs, valid))

    def init(self, key: jax.Array, hparams: HParams) -> Learner:
        """Make the learner before the first update."""
        params = self.network.init(key, self.env.example_obs(1))
        return Learner(
            params=params,
            target_params=params,
            opt_state=optim.adam_init(params, hparams),
            obs_stats=nets.Normalizer.of(self.env.observation_space, on=self.args.normalize_obs),
            epsilon=hparams.epsilon,
        )

    def act(self, learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Choose actions [B] for raw observations: epsilon-greedy with a key, else the best."""
        policy = self.policy_of(learner, obs, self.args.epsilon_end)
        return policy.mode() if key is None else policy.sample_with_key(key)


make_algorithm = DQN  # the name by which `load_policy` knows it


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    """Train as the command line does, also on an environment object or with a callback.

    `run_algorithm` describes the arguments and the result.
    """
    return run_algorithm(args, __file__, DQN, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
