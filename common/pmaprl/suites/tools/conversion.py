"""Between the spaces of environments on the host and those of a policy."""

from functools import partial
from typing import Any

import jax
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs import spaces
from pmaprl.envs.numbers import narrow
from pmaprl.envs.spaces import EnvSpec


class Conversion:
    """Between N environments and a policy.

    Images are [H, W, C] on our side, as networks take them. Frames that a suite stacks in front,
    [C, H, W], are known by their few channels.
    """

    def __init__(self, name: str, observation_space: Any, action_space: Any):
        """The spaces are those of one environment. Raises UsageError or ValueError where one is not
        supported.
        """
        self.theirs = spaces.convert(observation_space, "observation space")
        actions = spaces.convert(action_space, "action space")
        dtype_of = partial(_dtype, name)
        self._action_dtype = spaces.map_leaves(dtype_of, actions, action_space)
        dtype = spaces.map_leaves(
            lambda leaf, theirs: _narrow(dtype_of(leaf, theirs), theirs),
            self.theirs,
            observation_space,
        )
        self.spec = EnvSpec(
            name=name,
            observation_space=spaces.map_leaves(_channels_last, self.theirs),
            obs_dtype=dtype,
            action_space=actions,
            channels_first=tuple(
                part for part, leaf in spaces.leaves(self.theirs) if _stacked(leaf)
            ),
        )

    def observations(self, obs: Any) -> Any:
        """Observations [N, ...] of the environments as the policy takes them."""
        return spaces.map_leaves(
            lambda leaf, x: np.moveaxis(x, 1, -1) if _stacked(leaf) else x, self.theirs, obs
        )

    def actions(self, action: Any) -> Any:
        """Actions [N, ...] of the policy as the environments take them: in shape, type and
        bounds.
        """
        action = spaces.clip(action, self.spec.action_space, spaces.batch_shape(action), np)
        return jax.tree.map(lambda x, dtype: x.astype(dtype), action, self._action_dtype)


def _dtype(name: str, leaf: spaces.Leaf, theirs: Any) -> np.dtype:
    """The type of a part on their side. Raises UsageError where it is not supported."""
    if hasattr(theirs, "spaces"):
        raise UsageError(
            f"environment {name}: actions of several choices must be MultiDiscrete, not a Tuple"
        )
    return np.dtype(theirs.dtype)


def _narrow(dtype: np.dtype, theirs: Any) -> np.dtype:
    """The type of a part on our side: by its own bounds, since ours are rounded."""
    return narrow(dtype, theirs.low, theirs.high) if hasattr(theirs, "low") else narrow(dtype)


def _stacked(leaf: spaces.Leaf) -> bool:
    """Whether an observation is frames [C, H, W]."""
    return spaces.is_image(leaf) and leaf.shape[0] < min(leaf.shape[1:])


def _channels_last(leaf: spaces.Leaf) -> spaces.Leaf:
    if not _stacked(leaf):
        return leaf
    low, high = (np.moveaxis(bound, 0, -1) for bound in (leaf.low, leaf.high))
    return spaces.Box(low, high, low.shape)
