"""Q-learning with a target network (Mnih et al. 2015), data-parallel over every device.

python examples/q_pmap.py --env CartPole-v1 --total-timesteps 30000
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pmaprl.flags import Discount, Fraction, OffPolicyArgs, Positive, Share, main, parse


@dataclass(kw_only=True)
class Args(OffPolicyArgs):
    """Train a Q network."""

    learning_rate: Positive = 1e-3
    """Learning rate of Adam."""
    gamma: Discount = 0.99
    """Discount factor."""
    tau: Share = 0.01
    """Share of the Q network in an update of its target."""
    epsilon: Fraction = 0.1
    """Probability of a random action."""


ARGS = parse(Args) if __name__ == "__main__" else None

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from pmaprl.algorithm import (
    EnvSpec,
    GradientContext,
    OffPolicy,
    Transition,
    nets,
    optim,
    run_algorithm,
)


class QNetwork(nn.Module):
    """Network of the Q values [B, n] of all actions."""

    args: Args
    env: EnvSpec

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        space = self.env.policy_obs_space
        x = nets.Torso.of(self.args, space, hidden_sizes=(64, 64), activation="relu")(obs)
        return nets.QHead(self.env.action_space.n)(x, obs)


class Learner(struct.PyTreeNode):
    """Learned state of Q-learning."""

    params: Any
    target_params: Any
    opt_state: optax.OptState
    obs_stats: None = None


class QLearning(OffPolicy[Args, Learner]):
    """Q-learning, as pure functions of one agent on one device."""

    def __post_init__(self) -> None:
        nets.check_discrete(self.env, "algos/ppo_pmap.py")

    @cached_property
    def network(self) -> QNetwork:
        return QNetwork(self.args, self.env)

    def policy_of(self, learner: Learner, obs: jax.Array) -> nets.Categoricals:
        return nets.epsilon_greedy(self.network.apply(learner.params, obs), self.args.epsilon, obs)

    def explore(self, learner: Learner, obs: jax.Array, noise: jax.Array) -> jax.Array:
        return self.policy_of(learner, obs).sample(noise)

    def update(
        self, learner: Learner, batch: Transition, context: GradientContext
    ) -> tuple[Learner, optim.Metrics]:
        next_q = jnp.max(self.network.apply(learner.target_params, batch.next_obs), axis=-1)
        target = batch.reward + context.hparams.gamma * jnp.where(batch.terminated, 0.0, next_q)

        def loss(params):
            q = jnp.take_along_axis(
                self.network.apply(params, batch.obs), batch.action[:, None], axis=1
            )[:, 0]
            value = jnp.mean(optax.l2_loss(q, target))
            return value, ({"loss/q": value}, {})

        adam = optax.adam(context.hparams.learning_rate)
        params, opt_state, metrics, _ = optim.gradient_step(
            loss, learner.params, adam, learner.opt_state
        )
        target_params = optax.incremental_update(params, learner.target_params, context.hparams.tau)
        return Learner(params, target_params, opt_state), metrics

    def init(self, key: jax.Array, hparams: Any) -> Learner:
        params = self.network.init(key, self.env.example_obs(1))
        return Learner(params, params, optax.adam(hparams.learning_rate).init(params))

    def act(self, learner: Learner, obs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        policy = self.policy_of(learner, obs)
        return policy.mode() if key is None else policy.sample_with_key(key)


make_algorithm = QLearning


def train(args: Args, env: Any = None, callback: Any = None) -> Any:
    return run_algorithm(args, __file__, QLearning, env, callback)


if __name__ == "__main__":
    main(train, ARGS)
