"""An environment that costs time but no processor: `gymnasium:sleeping:Sleeping-v0`, for measuring what overlaps."""

import time

import gymnasium
import numpy as np


class Sleeping(gymnasium.vector.VectorEnv):
    """A step sleeps for `seconds` per environment, as simulators would one after another, but elsewhere."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 1, seconds: float = 0.0, **_):
        self.num_envs, self._seconds = num_envs, seconds
        self.single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (16,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(4)
        self._obs = np.zeros((num_envs, 16), np.float32)

    def reset(self, *, seed=None, options=None):
        return self._obs, {}

    def step(self, actions):
        time.sleep(self._seconds * self.num_envs)
        ends = np.zeros((2, self.num_envs), bool)
        return self._obs, np.ones(self.num_envs), *ends, {}


gymnasium.register("Sleeping-v0", vector_entry_point=Sleeping)
