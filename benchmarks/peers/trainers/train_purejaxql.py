"""Trains purejaxql, of which a checkout is needed: python train_purejaxql.py RUN_DIR

Or prints the speed of its training as JSON: python train_purejaxql.py SOURCE pqn SIZES
"""

import importlib
import json
import sys
from types import ModuleType
from unittest import mock

import gymnax
import jax.numpy as jnp
from on_device import OldGymnax, Peer, speed_of, train, update_of
from rows import run_of

FLAGS = {"NORM_TYPE": "layer_norm", "WANDB_MODE": "disabled", "LR": 5e-4, "LR_LINEAR_DECAY": True, "GAMMA": 0.99}
FLAGS |= {"LAMBDA": 0.65, "MAX_GRAD_NORM": 10, "EPS_START": 1.0, "EPS_FINISH": 0.05, "EPS_DECAY": 0.1}
FLAGS |= {"HIDDEN_SIZE": 128, "NUM_LAYERS": 2}


def module_of(name: str) -> ModuleType:
    """One of its files, on today's gymnax; the packages of its command line are not used here."""
    absent = "hydra", "omegaconf", "wandb", "safetensors", "safetensors.flax"
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in absent}):
        module = importlib.import_module(f"purejaxql.{name}")
    module.LogWrapper = lambda env, log=module.LogWrapper: OldGymnax(log(env))
    return module


def trained_by(config: dict) -> tuple[ModuleType, dict]:
    """Its file for an environment, and its whole configuration, for whole updates."""
    update = config["NUM_ENVS"] * config["NUM_STEPS"]
    steps = max(-(-config["TOTAL_TIMESTEPS"] // update), 1) * update
    is_image = config["ENV_NAME"].endswith("MinAtar")
    config = FLAGS | config | {"TOTAL_TIMESTEPS": steps, "TOTAL_TIMESTEPS_DECAY": steps}
    return module_of("pqn_minatar" if is_image else "pqn_gymnax"), config


def peer_of(args: dict) -> Peer:
    """Its file as it stands."""
    module, config = trained_by(args["flags"] | {"ENV_NAME": args["env"], "TOTAL_TIMESTEPS": args["total_timesteps"]})
    init, update = update_of(module.make_train(config))
    env, env_params = gymnax.make(args["env"])
    sizes = {}
    if module.__name__.endswith("gymnax"):
        env = module.FlattenObservationWrapper(env)
        sizes = {"hidden_size": config["HIDDEN_SIZE"], "num_layers": config["NUM_LAYERS"]}
    network = module.QNetwork(env.action_space(env_params).n, **sizes)

    def act(state, obs):
        variables = {"params": state[0].params, "batch_stats": state[0].batch_stats}
        return jnp.argmax(network.apply(variables, obs[None], train=False)[0])

    return Peer(init, update, act, OldGymnax(env), env_params, config["NUM_ENVS"] * config["NUM_STEPS"])


if __name__ == "__main__" and len(sys.argv) == 4:
    sys.path.insert(0, sys.argv[1])
    sizes = json.loads(sys.argv[3])
    module, config = trained_by(sizes | {"NUM_EPOCHS": sizes["UPDATE_EPOCHS"]})
    print(json.dumps(speed_of(module.make_train(config), config["TOTAL_TIMESTEPS"])))
elif __name__ == "__main__":
    with run_of(sys.argv) as rows:
        sys.path.insert(0, rows.config["source"])
        train(rows, peer_of(rows.args))
