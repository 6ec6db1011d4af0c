"""Trains PureJaxRL, of which a checkout is needed: python train_purejaxrl.py RUN_DIR

Or prints the speed of its training as JSON: python train_purejaxrl.py SOURCE ppo|ppo_rnn SIZES
"""

import importlib
import json
import sys
from types import ModuleType
from unittest import mock

import flax.linen as nn
import jax.numpy as jnp
import on_device
from on_device import Peer, speed_of, train, update_of
from rows import run_of

FLAGS = {"LR": 2.5e-4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5}
FLAGS |= {"MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ANNEAL_LR": True}  # those of its files that are no sizes


def peer_of(source: str, args: dict) -> Peer:
    """Its ppo.py as it stands."""
    ppo = module_of(source, "ppo")
    steps_per_update = args["flags"]["NUM_ENVS"] * args["flags"]["NUM_STEPS"]
    updates = -(-args["total_timesteps"] // steps_per_update)
    config = {**args["flags"], "ENV_NAME": args["env"], "TOTAL_TIMESTEPS": updates * steps_per_update}
    init, update = update_of(ppo.make_train(config))
    env, env_params = on_device.make(args["env"])
    env = ppo.FlattenObservationWrapper(env)
    network = ppo.ActorCritic(env.action_space(env_params).n, activation=config["ACTIVATION"])
    return Peer(
        init=init,
        update=update,
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
    """Of its training function as it stands; `sizes` are in the words of its flags."""
    nn.GRUCell = GRUCell
    update = sizes["NUM_ENVS"] * sizes["NUM_STEPS"]
    steps = max(sizes["TOTAL_TIMESTEPS"] // update, 1) * update
    train = module_of(source, name).make_train(FLAGS | sizes | {"TOTAL_TIMESTEPS": steps})
    return speed_of(train, steps)


if __name__ == "__main__" and len(sys.argv) == 4:
    print(json.dumps(speed(*sys.argv[1:3], json.loads(sys.argv[3]))))
elif __name__ == "__main__":
    with run_of(sys.argv) as rows:
        train(rows, peer_of(rows.config["source"], rows.args))
