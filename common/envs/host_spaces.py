"""Spaces, observations and actions of gymnasium's kind as ours: for environments on the host."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from common.cli.errors import UsageError
from common.envs import spaces
from common.envs.requirements import check_usable_spaces
from common.envs.spec import EnvSpec

# JAX computes with 32 bits
NARROW = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.int64): np.dtype(np.int32)}


class Conversion:
    """Between N environments and a policy.

    Images are [H, W, C] on our side, as networks take them. Frames that a suite stacks in front, [C, H, W], are known
    by their few channels.
    """

    def __init__(self, name: str, observation_space: Any, action_space: Any):
        """The spaces are those of one environment. Raises UsageError or ValueError where one is not supported."""
        self.theirs = spaces.convert(observation_space, "observation space")
        ours = spaces.map_parts(_channels_last, self.theirs)
        dtype = spaces.map_leaves(partial(_dtype, name), self.theirs, _tree(observation_space))
        actions = spaces.convert(action_space, "action space")
        self._action_dtype = spaces.map_leaves(partial(_action_dtype, name), actions, _tree(action_space))
        check_usable_spaces(name, ours, dtype, actions)
        self.spec = EnvSpec(name, ours, dtype, actions)

    def observations(self, obs: Any) -> Any:
        """Observations [N, ...] of the environments as the policy takes them."""
        return spaces.map_leaves(lambda leaf, x: np.moveaxis(x, 1, -1) if _stacked(leaf) else x, self.theirs, obs)

    def actions(self, action: Any) -> Any:
        """Actions [N, ...] of the policy as the environments take them: those of a Box in shape and in bounds."""
        space = self.spec.action_space
        action = spaces.clip(action, space, spaces.batch_shape(action), np)
        return spaces.map_leaves(lambda leaf, dtype, x: _in_type(x, dtype), space, self._action_dtype, action)


def _tree(space: Any) -> Any:
    """The suite's own spaces of all parts, as a tree."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return {name: _tree(part) for name, part in parts.items()}
    return tuple(map(_tree, parts)) if parts else space


def _dtype(name: str, leaf: spaces.Leaf, theirs: Any) -> np.dtype:
    """The type that a part of observations has on our side. Raises UsageError where it is not supported."""
    _check_starts(name, theirs)
    return NARROW.get(np.dtype(theirs.dtype), np.dtype(theirs.dtype))


def _action_dtype(name: str, leaf: spaces.Leaf, theirs: Any) -> np.dtype:
    """The type of a part of actions on their side. Raises UsageError where it is not supported."""
    _check_starts(name, theirs)
    if isinstance(theirs, tuple):
        raise UsageError(f"environment {name}: actions of several choices must be MultiDiscrete, not a Tuple")
    return theirs.dtype


def _in_type(action: np.ndarray, dtype: Any) -> np.ndarray:
    """Actions as numbers of that type: for integers the nearest ones, as a cast hardly ever gives the highest."""
    whole = action.dtype.kind == "f" and np.dtype(dtype).kind in "iu"
    return (np.rint(action) if whole else action).astype(dtype)


def _check_starts(name: str, space: Any) -> None:
    if np.any(getattr(space, "start", 0)):
        raise UsageError(f"environment {name}: {space} does not start at 0, which is not supported")


def _stacked(leaf: spaces.Leaf) -> bool:
    """Whether an observation is frames [C, H, W]."""
    return spaces.is_image(leaf) and leaf.shape[0] < min(leaf.shape[1:])


def _channels_last(leaf: spaces.Leaf) -> spaces.Leaf:
    if not _stacked(leaf):
        return leaf
    low, high = (np.moveaxis(bound, 0, -1) for bound in (leaf.low, leaf.high))
    return spaces.Box(low, high, low.shape)
