"""Conversion between the spaces of environments on the host and those of a policy."""

from functools import partial
from typing import Any

import jax
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs import spaces
from pmaprl.envs.numbers import narrow
from pmaprl.envs.spaces import EnvSpec


class Conversion:
    """Conversion between N environments and a policy.

    Images are [H, W, C] on our side, as networks take them. Frames that a suite stacks in front,
    [C, H, W], are recognized by their few channels.
    """

    def __init__(self, name: str, observation_space: Any, action_space: Any):
        """Convert the spaces of one environment.

        Raises:
            UsageError: a space is not supported.
            ValueError: a space is not supported.
        """
        self.theirs = spaces.convert(observation_space, "observation space")
        actions = spaces.convert(action_space, "action space")
        dtype_of = partial(_dtype, name)

        def narrow_dtype_of(leaf: spaces.Leaf, theirs: Any) -> np.dtype:
            return _narrow(dtype_of(leaf, theirs), theirs)

        stacked = [
            part for part, leaf in spaces.leaves(self.theirs) if spaces.has_channels_first(leaf)
        ]
        self._action_dtype = spaces.map_leaves(dtype_of, actions, action_space)
        self.spec = EnvSpec(
            name=name,
            observation_space=spaces.map_leaves(_channels_last, self.theirs),
            obs_dtype=spaces.map_leaves(narrow_dtype_of, self.theirs, observation_space),
            action_space=actions,
            channels_first=tuple(stacked),
        )

    def observations(self, obs: Any) -> Any:
        """Convert observations [N, ...] of the environments to the policy's."""

        def channels_last(leaf: spaces.Leaf, x: np.ndarray) -> np.ndarray:
            return np.moveaxis(x, 1, -1) if spaces.has_channels_first(leaf) else x

        return spaces.map_leaves(channels_last, self.theirs, obs)

    def actions(self, action: Any) -> Any:
        """Convert actions [N, ...] of the policy to the environments' shapes, types and bounds."""
        action = spaces.clip(action, self.spec.action_space, spaces.batch_shape(action), np)
        return jax.tree.map(lambda x, dtype: x.astype(dtype), action, self._action_dtype)


def _dtype(name: str, leaf: spaces.Leaf, theirs: Any) -> np.dtype:
    """The type of a part on their side.

    Raises:
        UsageError: the part is not supported.
    """
    if hasattr(theirs, "spaces"):
        raise UsageError(
            f"environment {name}: actions of several choices must be MultiDiscrete, not a Tuple"
        )
    return np.dtype(theirs.dtype)


def _narrow(dtype: np.dtype, theirs: Any) -> np.dtype:
    """The type of a part on our side, by its own bounds, because ours are rounded."""
    if hasattr(theirs, "low"):
        return narrow(dtype, theirs.low, theirs.high)
    return narrow(dtype)


def _channels_last(leaf: spaces.Leaf) -> spaces.Leaf:
    if not spaces.has_channels_first(leaf):
        return leaf
    low = np.moveaxis(leaf.low, 0, -1)
    high = np.moveaxis(leaf.high, 0, -1)
    return spaces.Box(low=low, high=high, shape=low.shape, dtype=leaf.dtype)
