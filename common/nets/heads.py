"""The last layer of a policy: features in, a distribution over actions out."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from common.envs import spaces
from common.nets.distributions import Categoricals, Normal


class PolicyHead(nn.Module):
    """The distribution over actions: categorical, over those that are `legal`, or normal for a Box.

    No observation changes the deviation of a normal one. The actions of a Box are flat here; the environment gives them
    their shape. The gain of 0.01 makes all actions about equally likely at first.
    """

    space: spaces.Space

    @nn.compact
    def __call__(self, x: jax.Array, legal: jax.Array | None = None) -> Categoricals | Normal:
        init = nn.initializers.orthogonal(0.01)
        if isinstance(self.space, spaces.Box):
            size = math.prod(self.space.shape)
            mean = nn.Dense(size, kernel_init=init)(x)
            log_std = self.param("log_std", nn.initializers.zeros, (size,))
            return Normal(mean, jnp.broadcast_to(log_std, mean.shape))
        logits = nn.Dense(sum(self.space.nvec), kernel_init=init)(x)
        return Categoricals(logits, self.space.nvec, scalar=isinstance(self.space, spaces.Discrete)).only(legal)
