"""Prints the training speed of PureJaxRL's PPO with memory, in steps/s: python time_purejaxrl_rnn.py SOURCE SIZES"""

import json
import statistics
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
from train_purejaxrl import module_of

REPEATS = 5
FLAGS = {  # those of the file that are no sizes
    "LR": 2.5e-4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ANNEAL_LR": True,
}


class GRUCell(nn.GRUCell):
    """flax's, made and begun as the file does it, which is written for flax before 0.7."""

    features: int = 128

    @staticmethod
    def initialize_carry(key, batch, size):
        return jnp.zeros((*batch, size))


def steps_per_second(source: str, sizes: dict) -> float:
    """Of its training function as it stands, the median of some runs; `sizes` are in the words of its flags."""
    nn.GRUCell = GRUCell
    train = jax.jit(module_of(source, "ppo_rnn").make_train(FLAGS | sizes))
    jax.block_until_ready(train(jax.random.key(0)))
    seconds = []
    for seed in range(1, REPEATS + 1):
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(seed)))
        seconds.append(time.perf_counter() - began)
    return sizes["TOTAL_TIMESTEPS"] / statistics.median(seconds)


if __name__ == "__main__":
    print(steps_per_second(sys.argv[1], json.loads(sys.argv[2])))
