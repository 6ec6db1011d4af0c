"""The last layer of a policy: features in, a distribution over actions out."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from common.envs import spaces
from common.envs.masks import legal_actions, mask_of, masks_of_parts
from common.envs.unit_actions import action_scale
from common.nets.distributions import Categoricals, Distribution, Joint, Normal


class PolicyHead(nn.Module):
    """The distribution over actions: categorical, over those that are legal at `obs`, or normal for a Box.

    A normal one is in units of the bounds, see `action_scale`, and no observation changes its deviation. The actions of
    a Box are flat here; the environment gives them their shape. The gain of 0.01 makes all actions about equally likely
    at first.
    """

    space: spaces.Space

    @nn.compact
    def __call__(self, x: jax.Array, obs: Any = None) -> Distribution:
        init, legal = nn.initializers.orthogonal(0.01), legal_actions(obs)
        if isinstance(self.space, (spaces.Dict, spaces.Tuple)):
            return Joint(self._parts(x, legal))
        if isinstance(self.space, spaces.Box):
            size = math.prod(self.space.shape)
            mean = nn.Dense(size, kernel_init=init)(x)
            log_std = self.param("log_std", nn.initializers.zeros, (size,))
            scale, offset = (tuple(x.tolist()) for x in action_scale(self.space))
            return Normal(mean, jnp.broadcast_to(log_std, mean.shape), scale=scale, offset=offset)
        logits = nn.Dense(sum(self.space.nvec), kernel_init=init)(x)
        return Categoricals(logits, self.space.nvec, scalar=isinstance(self.space, spaces.Discrete)).only(legal)

    def _parts(self, x: jax.Array, legal: jax.Array | None) -> Any:
        """A head for each part; the mask is of the choices of those that have any, in order."""
        names = iter([name.replace("/", "_") for name, _ in spaces.leaves(self.space)])
        masks = iter(masks_of_parts(legal, self.space))

        def head(leaf):
            return PolicyHead(leaf, name=f"part_{next(names)}")

        return spaces.map_leaves(lambda leaf: head(leaf)(x, mask_of(next(masks))), self.space)
