"""Prints the training speed of SBX's SAC, in steps/s: python time_sbx_sac.py ENV STEPS NUM_ENVS

After each step of all environments come as many gradient updates as there are environments.
"""

import sys
import time

import torch
from sbx import SAC
from stable_baselines3.common.env_util import make_vec_env

LEARNING_STARTS = 100
WARM_UP = 200  # steps until everything is compiled


def steps_per_second(env: str, steps: int, num_envs: int) -> float:
    """With the flags that it has by itself: layers of 256 and 256, batches of 256, one update per step."""
    torch.set_num_threads(1)  # which it uses for seeds alone
    model = SAC("MlpPolicy", make_vec_env(env, num_envs), learning_starts=LEARNING_STARTS, gradient_steps=-1, seed=0)
    model.learn(LEARNING_STARTS + WARM_UP)
    began, before = time.perf_counter(), model.num_timesteps
    model.learn(steps, reset_num_timesteps=False)
    return (model.num_timesteps - before) / (time.perf_counter() - began)


if __name__ == "__main__":
    print(steps_per_second(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
