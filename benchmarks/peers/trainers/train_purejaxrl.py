"""Trains PureJaxRL, of which a checkout is needed: python train_purejaxrl.py RUN_DIR"""

import importlib
import sys
from types import ModuleType
from unittest import mock

import jax
import on_device
from on_device import Peer, train
from rows import run_of


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


if __name__ == "__main__":
    with run_of(sys.argv) as rows:
        train(rows, peer_of(rows.config["source"], rows.args))
