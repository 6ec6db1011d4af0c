"""Trains PureJaxRL or purejaxql, of which a checkout is needed: python train_pure.py RUN_DIR

Or prints the speed of a file's training as JSON: python train_pure.py SOURCE ppo|ppo_rnn|pqn SIZES
"""

import importlib
import json
import sys
from types import ModuleType
from unittest import mock

import flax.linen as nn
import gymnax
import jax.numpy as jnp
import on_device
from on_device import OldGymnax, Peer, speed_of, train, update_of
from rows import run_of

FLAGS = {"LR": 2.5e-4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5}
FLAGS |= {"MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ANNEAL_LR": True}  # those of its files that are no sizes
OF_PQN = {"NORM_TYPE": "layer_norm", "WANDB_MODE": "disabled", "LR": 5e-4, "LR_LINEAR_DECAY": True, "GAMMA": 0.99}
OF_PQN |= {"LAMBDA": 0.65, "MAX_GRAD_NORM": 10, "EPS_START": 1.0, "EPS_FINISH": 0.05, "EPS_DECAY": 0.1}
OF_PQN |= {"HIDDEN_SIZE": 128, "NUM_LAYERS": 2}
ABSENT = ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix", "hydra", "omegaconf")
ABSENT += ("wandb", "safetensors", "safetensors.flax")  # imported there, and not used here


def module_of(source: str, name: str) -> ModuleType:
    """One of its files, on today's gymnax: ppo or ppo_rnn of PureJaxRL, pqn_gymnax or pqn_minatar of purejaxql."""
    sys.path[:0] = [source, f"{source}/purejaxrl"]
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in ABSENT}):
        module = importlib.import_module(f"purejaxql.{name}" if name.startswith("pqn") else name)
    if name.startswith("pqn"):
        module.LogWrapper = lambda env, log=module.LogWrapper: OldGymnax(log(env))
    else:
        module.gymnax = on_device  # for its `make`
    return module


class GRUCell(nn.GRUCell):
    """flax's, made and begun as ppo_rnn.py does it, which is written for flax before 0.7."""

    features: int = 128

    @staticmethod
    def initialize_carry(key, batch, size):
        return jnp.zeros((*batch, size))


def trained_by(source: str, name: str, config: dict) -> tuple[ModuleType, dict]:
    """Its file for an environment, and its whole configuration, for whole updates."""
    update = config["NUM_ENVS"] * config["NUM_STEPS"]
    steps = max(-(-config["TOTAL_TIMESTEPS"] // update), 1) * update
    config = (OF_PQN if name == "pqn" else FLAGS) | config | {"TOTAL_TIMESTEPS": steps}
    if name == "pqn":
        name = "pqn_minatar" if config["ENV_NAME"].endswith("MinAtar") else "pqn_gymnax"
        config |= {"TOTAL_TIMESTEPS_DECAY": steps, "NUM_EPOCHS": config.get("UPDATE_EPOCHS", config.get("NUM_EPOCHS"))}
    return module_of(source, name), config


def peer_of(source: str, args: dict) -> Peer:
    """Its file as it stands."""
    config = args["flags"] | {"ENV_NAME": args["env"], "TOTAL_TIMESTEPS": args["total_timesteps"]}
    module, config = trained_by(source, args["algorithm"], config)
    init, update = update_of(module.make_train(config))
    if args["algorithm"] == "ppo":
        env, env_params = on_device.make(args["env"])
        env = module.FlattenObservationWrapper(env)
        network = module.ActorCritic(env.action_space(env_params).n, activation=config["ACTIVATION"])

        def act(state, obs):
            return network.apply(state[0].params, obs)[0].mode()
    else:
        (env, env_params), sizes = gymnax.make(args["env"]), {}
        if module.__name__.endswith("gymnax"):
            env = module.FlattenObservationWrapper(env)
            sizes = {"hidden_size": config["HIDDEN_SIZE"], "num_layers": config["NUM_LAYERS"]}
        network, env = module.QNetwork(env.action_space(env_params).n, **sizes), OldGymnax(env)

        def act(state, obs):
            variables = {"params": state[0].params, "batch_stats": state[0].batch_stats}
            return jnp.argmax(network.apply(variables, obs[None], train=False)[0])

    return Peer(init, update, act, env, env_params, config["NUM_ENVS"] * config["NUM_STEPS"])


if __name__ == "__main__" and len(sys.argv) == 4:
    nn.GRUCell = GRUCell
    module, config = trained_by(*sys.argv[1:3], json.loads(sys.argv[3]))
    print(json.dumps(speed_of(module.make_train(config), config["TOTAL_TIMESTEPS"])))
elif __name__ == "__main__":
    with run_of(sys.argv) as rows:
        train(rows, peer_of(rows.config["source"], rows.args))
