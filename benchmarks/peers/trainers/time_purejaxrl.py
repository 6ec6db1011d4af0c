"""Prints the speed of PureJaxRL's training as JSON: python time_purejaxrl.py SOURCE ppo|ppo_rnn SIZES"""

import json
import statistics
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
from train_purejaxrl import module_of

REPEATS = 3
FLAGS = {"LR": 2.5e-4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5}
FLAGS |= {"MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ANNEAL_LR": True}  # those of its files that are no sizes


class GRUCell(nn.GRUCell):
    """flax's, made and begun as ppo_rnn.py does it, which is written for flax before 0.7."""

    features: int = 128

    @staticmethod
    def initialize_carry(key, batch, size):
        return jnp.zeros((*batch, size))


def speed(source: str, name: str, sizes: dict) -> dict:
    """Of its training function as it stands, the median of some warm runs; `sizes` are in the words of its flags."""
    nn.GRUCell = GRUCell
    update = sizes["NUM_ENVS"] * sizes["NUM_STEPS"]
    steps = max(sizes["TOTAL_TIMESTEPS"] // update, 1) * update
    train = jax.jit(module_of(source, name).make_train(FLAGS | sizes | {"TOTAL_TIMESTEPS": steps}))
    began = time.perf_counter()
    train = train.lower(jax.random.key(0)).compile()
    compiled, seconds = time.perf_counter() - began, []
    for seed in range(1 + REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(seed)))
        seconds.append(time.perf_counter() - began)
    return {"steps_per_second": round(steps / statistics.median(seconds[1:])), "compile_seconds": round(compiled, 2)}


if __name__ == "__main__":
    print(json.dumps(speed(*sys.argv[1:3], json.loads(sys.argv[3]))))
