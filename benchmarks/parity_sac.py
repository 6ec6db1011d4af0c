"""One gradient update of SAC's recipes beside their authors' code: the same parameters, batch and
noise.

python -m benchmarks.parity_sac --recipe crossq --source ~/sbx

What is printed is the largest difference of each array after the update, relative to its largest
entry. Both compute in double precision: the first step of Adam makes as much of the rounding of a
gradient as of a gradient.
"""

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from algos import sac_pmap
from benchmarks.peers.__main__ import TRAINERS, install, packages_for, python_of
from pmaprl.algorithm import GradientContext, Transition, optim
from pmaprl.cli.checks import check_flags
from pmaprl.cli.command import main, parse
from pmaprl.cli.errors import TrainingError
from pmaprl.device.optim import hparams_of
from pmaprl.device.sharding import AXIS
from pmaprl.envs.spaces import Box, EnvSpec

OBS = 17
ACTIONS = 6
BATCH = 256


Recipe = Literal["sac", "crossq", "simba", "xqc"]


@dataclass(kw_only=True)
class Args:
    """Compare one update with that of the authors' code."""

    recipe: Recipe
    """Recipe of SAC; SAC itself is compared with SBX's."""
    source: str
    """Checkout of araffin/sbx, SonyResearch/simba or danielpalenicek/xqc."""

    def __post_init__(self):
        check_flags(self)


def ours(recipe: Recipe) -> tuple[dict, dict, dict]:
    """Inputs, and parameters before and after an update, by name."""
    flags = {"log_std_min": -20.0, "squash_log_std": False, "q_lr": 3e-4} if recipe == "sac" else {}
    args = sac_pmap.Args(
        env="Pendulum-v1", recipe=recipe, normalize_obs=False, **flags, policy_frequency=1
    )
    obs_space, action_space = (
        Box(np.full(n, -x), np.full(n, x), (n,)) for n, x in ((OBS, np.inf), (ACTIONS, 1.0))
    )
    algorithm = sac_pmap.SAC(
        args,
        EnvSpec(
            name="parity",
            observation_space=obs_space,
            obs_dtype=np.float32,
            action_space=action_space,
        ),
    )
    hparams = hparams_of(args)
    rng = np.random.default_rng(0)
    learner = algorithm.init(jax.random.key(0), hparams)
    obs, next_obs = rng.normal(size=(2, BATCH, OBS)).astype(np.float32)  # as environments give them
    action = jnp.asarray(rng.uniform(-1, 1, (BATCH, ACTIONS)))
    reward = jnp.asarray(rng.normal(size=BATCH))
    terminated = jnp.asarray(rng.random(BATCH) < 0.1)
    batch = Transition(
        obs=obs, action=action, reward=reward, terminated=terminated, next_obs=next_obs
    )
    keys = tuple(jax.random.split(jax.random.key(1), (2, 1)))
    noises = [optim.noise_like(key, action) for key in keys]
    # Other code divides rewards before its update: here their deviation is 1
    stats = learner.return_stats.stats
    if stats is not None:
        unit = stats.replace(count=jnp.uint32(1), m2=jnp.asarray(1 - 1e-8))
        learner = learner.replace(return_stats=learner.return_stats.replace(stats=unit))
    update = jax.pmap(
        lambda x: algorithm.update(x, batch, GradientContext(hparams, jnp.int32(1), keys=keys))[0],
        axis_name=AXIS,
    )
    learner = jax.tree.map(
        lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x, learner
    )
    new = jax.tree.map(lambda x: x[0], update(jax.tree.map(lambda x: x[None], learner)))
    inputs = batch._asdict() | {"next_noise": noises[0], "noise": noises[1], "gamma": args.gamma}
    return (
        {k: x for k, x in inputs.items() if x is not None},
        named(learner.params),
        named(new.params),
    )


def named(params: sac_pmap.Params) -> dict[str, np.ndarray]:
    """Arrays by network, layer and kind, those of both Q functions as one; heads of the policy
    apart.
    """
    found: dict[str, Any] = {"log_alpha": params.log_alpha}
    for network in ("actor", "critics", "targets"):
        collections = dict(getattr(params, network) or {})
        if network == "targets":
            collections.pop("batch_stats", None)  # nothing is normalized by these
        for collection in collections.values():
            for (module, *layer), x in flatten_dict(collection).items():
                kind = module.split("_")[0]
                name = "/".join([network, *(layer if kind == "MLP" else ["head", *layer])])
                found[name] = x
    return _in_parts(
        {
            name.replace("LayerNorm", "Norm").replace("BatchNorm", "Norm"): x
            for name, x in found.items()
        }
    )


def _in_parts(found: dict) -> dict[str, np.ndarray]:
    """Means and variances apart, as others have them, and means and deviations of the policy."""
    parts = {"averages": ("mean", "var"), "actor/head": ("actor/mean", "actor/log_std")}
    for name in [*found]:
        for whole, halves in parts.items():
            if whole in name:
                x = found.pop(name)
                axis = -2 if whole == "averages" else -1
                split = np.split(x, 2, axis=axis) if axis == -1 else np.moveaxis(x, axis, 0)
                found |= {
                    name.replace(whole, half): part
                    for half, part in zip(halves, split, strict=True)
                }
    return {name: np.asarray(x) for name, x in found.items() if not name.endswith("batches")}


def compare(args: Args) -> None:
    """Run the command. Raises TrainingError where the authors' code fails."""
    packages = packages_for("sbx", "cpu")  # what the code of others needs, too
    install("sbx", packages)
    jax.config.update("jax_enable_x64", True)
    inputs, before, after = ours(args.recipe)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.npz"
        end = Path(folder) / "end.npz"
        np.savez(start, **inputs, **before)
        words = [
            python_of("sbx", packages),
            TRAINERS / "update_once.py",
            args.recipe,
            args.source,
            start,
            end,
        ]
        if code := subprocess.run(
            [*map(str, words)], env=os.environ | {"JAX_ENABLE_X64": "1"}
        ).returncode:
            raise TrainingError(f"the code in {args.source} ended with {code}, see above")
        theirs = dict(np.load(end))
    # What is less is rounding of zeros
    sizes = {name: max(np.max(np.abs(x)), 1e-4) for name, x in theirs.items()}
    differences = {
        name: np.max(np.abs(x - theirs[name])) / sizes[name] for name, x in after.items()
    }
    changed = {name: np.max(np.abs(x - before[name])) / sizes[name] for name, x in after.items()}
    for name, difference in sorted(differences.items(), key=lambda item: item[1]):
        print(f"{name:32} {difference:.1e}, changed by {changed[name]:.1e}")
    print(
        f"{args.recipe}: {len(differences)} arrays, largest difference "
        f"{max(differences.values()):.1e}"
    )


if __name__ == "__main__":
    main(compare, parse(Args))
