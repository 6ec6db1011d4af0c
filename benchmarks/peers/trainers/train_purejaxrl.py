"""Trains PureJaxRL, of which a checkout is needed: python train_purejaxrl.py RUN_DIR

Or prints the speed of its training as JSON: python train_purejaxrl.py SOURCE ppo|ppo_rnn SIZES
"""

import importlib
import json
import statistics
import sys
import time
from types import ModuleType
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import on_device
from on_device import Peer, train
from rows import run_of

REPEATS = 3
FLAGS = {"LR": 2.5e-4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5}
FLAGS |= {"MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ANNEAL_LR": True}  # those of its files that are no sizes


def peer_of(source: str, args: dict) -> Peer:
    """Its ppo.py as it stands. `make_train` trains in one scan; one update of that is taken out, to stop in between."""
    ppo = module_of(source, "ppo")
    steps_per_update = args["flags"]["NUM_ENVS"] * args["flags"]["NUM_STEPS"]
    updates = -(-args["total_timesteps"] // steps_per_update)
    config = {**args["flags"], "ENV_NAME": args["env"], "TOTAL_TIMESTEPS": updates * steps_per_update}
    train_all = ppo.make_train(config)
    update = []

    def init(key):
        def scan(function, carry, xs, length=None, **options):
            if function.__name__ != "_update_step":
                return real_scan(function, carry, xs, length, **options)
            update[:] = [function]
            return carry, None

        real_scan = jax.lax.scan
        with mock.patch.object(jax.lax, "scan", scan):
            return train_all(key)["runner_state"]

    env, env_params = on_device.make(args["env"])
    env = ppo.FlattenObservationWrapper(env)
    network = ppo.ActorCritic(env.action_space(env_params).n, activation=config["ACTIVATION"])
    return Peer(
        init=init,
        update=lambda state: update[0](state, None)[0],
        act=lambda state, obs: network.apply(state[0].params, obs)[0].mode(),
        env=env,
        env_params=env_params,
        steps_per_update=steps_per_update,
    )


def module_of(source: str, name: str) -> ModuleType:
    """One of its files, with the kit's environments; its wrappers import suites of others that are not used here."""
    absent = "brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"
    sys.path.insert(0, f"{source}/purejaxrl")
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in absent}):
        module = importlib.import_module(name)
    module.gymnax = on_device  # for its `make`
    return module


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


if __name__ == "__main__" and len(sys.argv) == 4:
    print(json.dumps(speed(*sys.argv[1:3], json.loads(sys.argv[3]))))
elif __name__ == "__main__":
    with run_of(sys.argv) as rows:
        train(rows, peer_of(rows.config["source"], rows.args))
