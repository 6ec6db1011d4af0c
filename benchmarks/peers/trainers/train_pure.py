"""Trains PureJaxRL or purejaxql, of which a checkout is needed: python train_pure.py RUN_DIR

Or prints the speed of a file's training, exactly as it is, as JSON: python train_pure.py SOURCE
ppo|ppo_rnn|pqn SIZES
"""

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import flax.linen as nn
import gymnax
import jax.numpy as jnp
import numpy as np
import on_device
from on_device import OldGymnax, Peer, speed_of, train, update_of
from rows import run_of

FLAGS = {
    "LR": 2.5e-4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
}
# Those of its files that are no sizes
FLAGS |= {"MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ANNEAL_LR": True}
OF_PQN = {
    "NORM_TYPE": "layer_norm",
    "WANDB_MODE": "disabled",
    "LR": 5e-4,
    "LR_LINEAR_DECAY": True,
    "GAMMA": 0.99,
}
OF_PQN |= {
    "LAMBDA": 0.65,
    "MAX_GRAD_NORM": 10,
    "EPS_START": 1.0,
    "EPS_FINISH": 0.05,
    "EPS_DECAY": 0.1,
}
OF_PQN |= {"HIDDEN_SIZE": 128, "NUM_LAYERS": 2}
# Others: pqn_gymnax
FILES = {"MinAtar": "pqn_minatar", "Craftax": "pqn_craftax", "MemoryChain": "pqn_rnn_gymnax"}
ABSENT = (
    "brax",
    "brax.envs",
    "brax.envs.wrappers",
    "brax.envs.wrappers.training",
    "navix",
    "hydra",
    "omegaconf",
)
ABSENT += ("wandb", "safetensors", "safetensors.flax")  # imported there, and not used here


def module_of(source: str, name: str) -> ModuleType:
    """One of its files, on today's gymnax: ppo or ppo_rnn of PureJaxRL, or of purejaxql pqn_gymnax,
    say.
    """
    sys.path[:0] = [source, f"{source}/purejaxrl"]
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in ABSENT}):
        module: Any = importlib.import_module(
            f"purejaxql.{name}" if name.startswith("pqn") else name
        )
    if name.startswith("pqn") and "craftax" not in name:
        module.LogWrapper = lambda env, log=module.LogWrapper: OldGymnax(log(env))
    elif name.startswith("ppo"):
        module.gymnax = on_device  # for its `make`
    return module


class GRUCell(nn.GRUCell):
    """flax's, made and begun as ppo_rnn.py does it, which is written for flax before 0.7."""

    features: int = 128

    @staticmethod
    def initialize_carry(key, batch, size):  # pyright: ignore[reportIncompatibleMethodOverride]
        return jnp.zeros((*batch, size))


def convolved(x: Any, kernel: Any, strides: Any, padding: Any, **_) -> Any:
    """The convolution of [B, H, W, C] in purejaxql's file for MinAtar as a product, which a CPU
    computes sooner.
    """
    if (kernel.shape[:2], tuple(strides), padding) != ((3, 3), (1, 1), "VALID"):
        raise NotImplementedError(
            f"a convolution {kernel.shape} with strides {strides} and padding {padding}"
        )
    near = [
        x[:, row : x.shape[1] - 2 + row, column : x.shape[2] - 2 + column]
        for row, column in np.ndindex(3, 3)
    ]
    return jnp.concatenate(near, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


def trained_by(source: str, name: str, config: dict) -> tuple[ModuleType, dict]:
    """Its file for an environment, and its whole configuration, for whole updates."""
    update = config["NUM_ENVS"] * config["NUM_STEPS"]
    steps = max(-(-config["TOTAL_TIMESTEPS"] // update), 1) * update
    config = (OF_PQN if name == "pqn" else FLAGS) | config | {"TOTAL_TIMESTEPS": steps}
    if name == "pqn":
        name = next(
            (file for part, file in FILES.items() if part in config["ENV_NAME"]), "pqn_gymnax"
        )
        config |= {
            "TOTAL_TIMESTEPS_DECAY": steps,
            "NUM_EPOCHS": config.get("UPDATE_EPOCHS", config.get("NUM_EPOCHS")),
        }
    return module_of(source, name), config


def peer_of(source: str, args: dict) -> Peer:
    """Its file, with today's gymnax."""
    config = args["flags"] | {"ENV_NAME": args["env"].removeprefix("craftax:")}
    module, config = trained_by(
        source, args["algorithm"], config | {"TOTAL_TIMESTEPS": args["total_timesteps"]}
    )
    init, update = update_of(module.make_train(config))
    if args["algorithm"] == "ppo":
        env, env_params = on_device.make(config["ENV_NAME"])
        env = module.FlattenObservationWrapper(env)
    elif "craftax" in module.__name__:
        env = module.make_craftax_env_from_name(config["ENV_NAME"], auto_reset=True)
        env_params = env.default_params
    else:
        env, env_params = gymnax.make(config["ENV_NAME"])
        env_params = env_params.replace(**config.get("ENV_KWARGS", {}))
        env = OldGymnax(
            env if "minatar" in module.__name__ else module.FlattenObservationWrapper(env)
        )
    act, memory = player_of(module, config, env.action_space(env_params).n)
    return Peer(
        init=init,
        update=update,
        act=act,
        env=env,
        env_params=env_params,
        steps_per_update=config["NUM_ENVS"] * config["NUM_STEPS"],
        memory=memory,
    )


def player_of(module: ModuleType, config: dict, num_actions: int) -> tuple[Callable, Any]:
    """`act` and `memory` of a `Peer`."""
    kind = next(
        name for name in ("ActorCritic", "RNNQNetwork", "QNetwork") if hasattr(module, name)
    )
    fields = {name: name.upper() for name in getattr(module, kind).__dataclass_fields__}
    given = {name: config[flag] for name, flag in fields.items() if flag in config}
    network = getattr(module, kind)(num_actions, **given)

    def act(state, obs, memory):
        if kind == "ActorCritic":
            return network.apply(state[0].params, obs)[0].mode(), memory
        variables = {"params": state[0].params, "batch_stats": state[0].batch_stats}
        if kind == "QNetwork":
            return jnp.argmax(network.apply(variables, obs[None], train=False)[0]), memory
        hidden, last = memory
        hidden, values = network.apply(
            variables, hidden, obs[None, None], jnp.zeros((1, 1), bool), last, train=False
        )
        action = jnp.argmax(values[0, 0])
        return action, (hidden, action[None, None])

    return act, (
        network.initialize_carry(1),
        jnp.zeros((1, 1), int),
    ) if kind == "RNNQNetwork" else ()


if __name__ == "__main__" and len(sys.argv) == 4:
    nn.GRUCell = GRUCell
    _, source, name, flags = sys.argv
    module, config = trained_by(source, name, json.loads(flags))
    print(json.dumps(speed_of(module.make_train(config), config["TOTAL_TIMESTEPS"])))
elif __name__ == "__main__":
    nn.Conv = partial(nn.Conv, conv_general_dilated=convolved)
    with run_of(sys.argv) as rows:
        train(rows, peer_of(rows.config["source"], rows.args))
