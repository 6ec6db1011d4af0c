"""One update of PQN beside that of purejaxql, from the same parameters, rollout and minibatches.

    python -m benchmarks.parity_pqn --source ~/purejaxql

Prints for each array of parameters the largest difference, relative to its largest magnitude. Their functions run as
they stand, on the kit's versions. In the last step but one of a rollout they bootstrap from the value of the last
observation, one too late, so these rollouts end an episode there, or have a single step.
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from algos import pqn_pmap as pqn
from benchmarks.peers.__main__ import TRAINERS
from benchmarks.records import markdown
from common.algorithm import Now, Rollout, Seen
from common.cli.command import main, parse
from common.cli.errors import TrainingError, UsageError
from common.device.optim import hp_of
from common.device.sharding import AXIS
from common.envs.registry import make

ALLOWED = 1e-5
EPOCHS, MINIBATCHES = 2, 8
CASES = {  # their file: environment, steps and environments of the rollout
    "pqn_gymnax": ("Catch-bsuite", 19, 64),  # whose episodes have 9 steps
    "pqn_minatar": ("Breakout-MinAtar", 1, 1024),
}
LAYERS = {  # of theirs, in ours
    "pqn_gymnax": {"Dense_2": "QHead_0/Dense_0"}
    | {f"{kind}_{i}": f"Torso_0/MLP_0/{kind}_{i}" for kind in ("Dense", "LayerNorm") for i in range(2)},
    "pqn_minatar": {
        "CNN_0/Conv_0": "Torso_0/Features_0/Convolutions_0/Convolution_0",
        "CNN_0/LayerNorm_0": "Torso_0/Features_0/Convolutions_0/LayerNorm_0",
        "CNN_0/Dense_0": "Torso_0/MLP_0/Dense_0",
        "CNN_0/LayerNorm_1": "Torso_0/MLP_0/LayerNorm_0",
        "Dense_0": "QHead_0/Dense_0",
    },
}


@dataclass(kw_only=True)
class Args:
    """Compare one update with that of purejaxql."""

    source: str
    """A checkout of purejaxql."""

    def __post_init__(self):
        if not (Path(self.source) / "purejaxql" / "pqn_minatar.py").is_file():
            raise UsageError(f"--source {self.source} has to name a checkout of purejaxql")


def theirs(name: str, order: np.ndarray) -> tuple[Any, Any, Any]:
    """Parameters before and after an update of a file of theirs, and its rollout [T, N, ...]."""
    module, (env, steps, envs) = importlib.import_module("train_purejaxql").module_of(name), CASES[name]
    seen, scan, create = {}, jax.lax.scan, module.CustomTrainState.create

    def noting_rollout(function, *inputs, **options):
        out = scan(function, *inputs, **options)
        if function.__name__ == "_step_env":
            jax.debug.callback(lambda rollout: seen.update(rollout=rollout), out[1][0])
        return out

    def noting_params(**fields):
        seen["before"] = fields["params"]
        return create(**fields)

    config = {"ENV_NAME": env, "NUM_ENVS": envs, "NUM_STEPS": steps, "NUM_EPOCHS": EPOCHS, "LR": 5e-4, "GAMMA": 0.99}
    config |= {"LAMBDA": 0.65, "MAX_GRAD_NORM": 10, "NUM_MINIBATCHES": MINIBATCHES, "NORM_TYPE": "layer_norm"}
    config |= {"EPS_START": 1.0, "EPS_FINISH": 0.05, "EPS_DECAY": 0.1, "WANDB_MODE": "disabled"}
    config |= {"TOTAL_TIMESTEPS": steps * envs, "TOTAL_TIMESTEPS_DECAY": steps * envs}
    with (
        mock.patch.object(jax.lax, "scan", noting_rollout),
        mock.patch.object(jax.random, "permutation", lambda key, x: x[order]),
        mock.patch.object(module.CustomTrainState, "create", noting_params),
    ):
        after = module.make_train(config)(jax.random.PRNGKey(0))["runner_state"][0].params
    jax.effects_barrier()
    return seen["before"], after, seen["rollout"]


def ours(name: str, before: dict[str, jax.Array], rollout: Any, order: np.ndarray) -> dict[str, jax.Array]:
    """Our parameters after the same update, by path."""
    env, steps, envs = CASES[name]
    is_image = name == "pqn_minatar"
    sizes = {"num_envs": envs, "num_steps": steps, "hidden_sizes": (128,) if is_image else (128, 128)}
    args = pqn.Args(env=env, q_lambda=0.65, update_epochs=EPOCHS, num_minibatches=MINIBATCHES, **sizes)
    spec = make(env).spec
    algorithm = pqn.make_pqn(args, spec)
    obs = jnp.concatenate([rollout.obs, rollout.next_obs[-1:]]) / (255 if is_image else 1)  # as that does with images
    obs = obs.reshape(steps + 1, envs, *spec.observation_space.shape)
    done, reward = jnp.asarray(rollout.done, bool), jnp.asarray(rollout.reward)
    same = Rollout(
        seen=Seen(obs[:-1], jnp.zeros_like(done), reward),
        action=jnp.asarray(rollout.action),
        extras=pqn.Extras(jnp.max(rollout.q_val, axis=-1), ()),
        reward=reward,
        terminated=done,
        truncated=jnp.zeros_like(done),
        final_obs=None,
        last=Seen(obs[-1], done[-1], reward[-1]),
        memory=(),
    )
    minibatches = jnp.asarray(order.reshape(MINIBATCHES, -1)[None].repeat(EPOCHS, 0))

    def update(_):
        learner = algorithm.init(jax.random.key(0), hp_of(args))
        learner = learner.replace(params={"params": unflatten_dict(before, sep="/")})
        now = Now(hp_of(args, epsilon=0.0), 0, minibatches=lambda *_: minibatches)
        return algorithm.update(learner, same, now)[0].params["params"]

    params = jax.jit(jax.vmap(update, axis_name=AXIS))(jnp.zeros(1))
    return {path: x[0] for path, x in flatten_dict(params, sep="/").items()}


def in_our_shapes(name: str, params: Any) -> dict[str, jax.Array]:
    """Parameters of theirs, by the paths of ours."""
    found = {}
    for path, x in flatten_dict(params, sep="/").items():
        layer, _, kind = path.rpartition("/")
        if path == "CNN_0/Dense_0/kernel":  # behind the convolutions, where channels come first in ours
            x = x.reshape(8, 8, 16, -1).transpose(2, 0, 1, 3).reshape(x.shape)
        if layer in LAYERS[name]:  # not what normalises nothing
            found[f"{LAYERS[name][layer]}/{kind}"] = x.reshape(-1, x.shape[-1]) if kind == "kernel" else x
    return found


def compare(args: Args) -> None:
    """What the command does. Raises TrainingError where arrays differ by more than ALLOWED."""
    sys.path[:0] = [str(TRAINERS), args.source]
    rows = []
    for name, (_, steps, envs) in CASES.items():
        order = np.random.default_rng(0).permutation(steps * envs)
        before, after, rollout = theirs(name, order)
        found = ours(name, in_our_shapes(name, before), rollout, order)
        for path, x in in_our_shapes(name, after).items():
            rows.append((name, path, float(jnp.abs(x - found[path]).max() / jnp.abs(x).max())))
    print(markdown(("their file", "parameters", "difference"), [(*row[:2], f"{row[2]:.1e}") for row in rows]))
    if not all(difference < ALLOWED for *_, difference in rows):
        raise TrainingError(f"some arrays differ by more than {ALLOWED}")


if __name__ == "__main__":
    main(compare, parse(Args))
