"""An environment of gymnasium.

python algos/appo_pmap.py --env gymnasium:my_gym_envs:Walk-v0
"""

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-2.1, 2.1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform()
        return self.observe(), {}

    def step(self, action):
        self.place += 0.1 * (2 * action - 1)
        reward, terminated = self.place, abs(self.place) > 2
        return self.observe(), reward, terminated, False, {}

    def observe(self):
        return np.array([self.place], np.float32)


gymnasium.register("Walk-v0", Walk, max_episode_steps=20)  # its time limit
