"""Spaces, observations and actions of gymnasium's kind as ours: for environments on the host."""

from typing import Any

import numpy as np

from common.cli.errors import UsageError
from common.envs import spaces

# JAX computes with 32 bits
NARROW = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.int64): np.dtype(np.int32)}


class Conversion:
    """Between N environments and a policy.

    Images are [H, W, C] on our side, as networks take them. Frames that a suite stacks in front, [C, H, W], are known
    by their few channels.
    """

    def __init__(self, name: str, observation_space: Any, action_space: Any):
        """The spaces are those of one environment. Raises UsageError or ValueError where one is not supported."""
        self._action_dtype = action_space.dtype
        self.spec = _spec(name, observation_space, action_space)
        box = self.spec.observation_space
        self._channels_first = spaces.is_image(box) and box.shape[0] < min(box.shape[1:])
        if self._channels_first:
            low, high = (np.moveaxis(bound, 0, -1) for bound in (box.low, box.high))
            self.spec = self.spec._replace(observation_space=spaces.Box(low, high, low.shape))

    def observations(self, obs: np.ndarray) -> np.ndarray:
        """Observations [N, ...] of the environments as the policy takes them."""
        return np.moveaxis(obs, 1, -1) if self._channels_first else obs

    def actions(self, action: np.ndarray) -> np.ndarray:
        """Actions [N, ...] of the policy as the environments take them: those of a Box in shape and in bounds."""
        space = self.spec.action_space
        if isinstance(space, spaces.Box):
            action = np.clip(action.reshape(len(action), *space.shape), space.low, space.high)
        return action.astype(self._action_dtype)


def _spec(name: str, observation: Any, action: Any) -> spaces.EnvSpec:
    for space in (observation, action):
        if np.any(getattr(space, "start", 0)):
            raise UsageError(f"environment {name}: {space} does not start at 0, which is not supported")
    dtype = NARROW.get(np.dtype(observation.dtype), np.dtype(observation.dtype))
    box = spaces.convert(observation, "observation space")
    if 0 in box.shape:
        raise UsageError(f"environment {name} has no observation: its observation space has shape {box.shape}")
    return spaces.EnvSpec(name, box, dtype, spaces.convert(action, "action space"))
