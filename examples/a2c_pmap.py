"""Advantage Actor-Critic (Mnih et al. 2016), synchronous, data-parallel over every device.

python examples/a2c_pmap.py --env CartPole-v1
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from pmaprl.flags import (
    AdamBeta,
    Count,
    Discount,
    NonNegative,
    OnPolicyArgs,
    Positive,
    main,
    parse,
)


@dataclass(kw_only=True)
class Args(OnPolicyArgs):
    """Train A2C. Sizes such as --num-envs are totals over all devices."""

    # rollout and advantage
    num_steps: Count = 16
    """Steps of every environment per update."""
    gamma: Discount = 0.99
    """Discount factor."""
    # optimizer
    learning_rate: Positive = 3e-3
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
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""
    ent_coef: NonNegative = 0.01
    """Entropy coefficient."""
    # network
    activation: Literal["tanh", "relu", "swish", "gelu"] = "tanh"
    """Activation of the hidden layers."""
    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Widths of the hidden layers."""


# Before the slow imports: --help and usage errors answer at once
ARGS = parse(Args) if __name__ == "__main__" else None

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from pmaprl.algorithm import EnvSpec, OnPolicy, Rollout, UpdateContext, nets, optim, run_algorithm


class Network(nn.Module):
    """Network of the policy, a distribution over actions, and of the value [B]."""

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[nets.Distribution, jax.Array]:
        x = nets.Torso.of(self.args, self.env.policy_obs_space)(obs)
        value = nn.Dense(1)(nets.Torso.of(self.args, self.env.observation_space)(obs))[..., 0]
        return nets.PolicyHead(self.env.action_space)(x, obs), value


class Learner(struct.PyTreeNode):
    """Learned state of A2C, identical on every device."""

    params: Any
    opt_state: Any
    obs_stats: None = None  # observations are not normalized


def n_step_returns(reward, next_value, terminated, truncated, gamma: float) -> jax.Array:
    """Sum discounted rewards [T, N] up to the end of the rollout or episode (section 4).

    The value of what follows is added, except after a termination.
    """

    def backward(following, inputs):
        reward, next_value, terminated, truncated = inputs
        following = jnp.where(truncated, next_value, following)
        total = reward + gamma * jnp.where(terminated, 0.0, following)
        return total, total

    steps = reward, next_value, terminated, truncated
    return jax.lax.scan(backward, next_value[-1], steps, reverse=True)[1]


class A2C(OnPolicy[Args, Learner]):
    """Advantage actor-critic, as pure functions of one agent on one device."""

    @cached_property
    def network(self) -> Network:
        return Network(self.args, self.env)

    def explore(
        self, learner: Learner, obs: jax.Array, noise: jax.Array
    ) -> tuple[jax.Array, tuple]:
        return self.network.apply(learner.params, obs)[0].sample(noise), ()

    def update(
        self, learner: Learner, rollout: Rollout, context: UpdateContext
    ) -> tuple[Learner, dict[str, jax.Array]]:
        """One gradient step on a rollout."""
        value = self.value_of(learner, rollout.obs)  # [T, N]
        next_value = rollout.next_values(value, partial(self.value_of, learner))
        ends = rollout.terminated, rollout.truncated
        target = n_step_returns(rollout.reward, next_value, *ends, context.hparams.gamma)
        hparams = context.hparams
        rollout_loss = partial(self.loss, rollout=rollout, target=target, hparams=hparams)
        params, opt_state, metrics = optim.adam_step(  # with the gradient over all devices
            rollout_loss, learner.params, learner.opt_state, hparams
        )
        return learner.replace(params=params, opt_state=opt_state), metrics

    def loss(
        self, params: Any, rollout: Rollout, target: jax.Array, hparams: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        policy, value = self.network.apply(params, rollout.obs)
        policy = policy.restrict_to(rollout.acted_by_us)  # those that it chose itself, in a team
        advantage = jax.lax.stop_gradient(target - value)
        losses = {
            "loss/policy": -jnp.mean(policy.log_prob(rollout.action) * advantage),
            "loss/value": 0.5 * jnp.mean(jnp.square(value - target)),
            "policy/entropy": jnp.mean(policy.entropy()),
        }
        total = (
            losses["loss/policy"]
            + hparams.vf_coef * losses["loss/value"]
            - hparams.ent_coef * losses["policy/entropy"]
        )
        return total, losses

    def value_of(self, learner: Learner, obs: jax.Array) -> jax.Array:
        return self.network.apply(learner.params, obs)[1]

    def init(self, key: jax.Array, hparams: Any) -> Learner:
        params = self.network.init(key, self.env.example_obs(1))
        return Learner(params, optim.adam_init(params, hparams))

    def act(self, learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Choose actions [B, ...] for observations [B, ...]: the likeliest, or by a key sampled."""
        policy = self.network.apply(learner.params, obs)[0]
        return policy.mode() if key is None else policy.sample_with_key(key)


make_algorithm = A2C  # the name by which `load_policy` knows it


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    """Train as the command line does; see `run_algorithm`."""
    return run_algorithm(args, __file__, A2C, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
