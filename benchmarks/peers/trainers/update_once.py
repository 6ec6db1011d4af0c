"""A gradient update of the authors' code, for parity_sac.py: python update_once.py RECIPE SOURCE
START END
"""

import itertools
import re
import sys
from typing import Any
from unittest.mock import MagicMock

recipe, source, start, end = sys.argv[1:]
sys.path.insert(0, source)
# Nothing is read or logged
sys.modules |= dict.fromkeys(("wandb", "omegaconf", "xqc.logging"), MagicMock())

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tensorflow_probability.substrates.jax.internal import samplers

# Older versions have it
jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]
# Nothing is in single precision
jnp.float32 = jnp.float64
given = dict(np.load(start))
obs, action, next_obs, reward = (
    jnp.asarray(given[name]) for name in ("obs", "action", "next_obs", "reward")
)
done = jnp.float64(given["terminated"])
gamma = float(given["gamma"])
key = jax.random.key(0)
alpha = float(np.exp(given["log_alpha"]))
size = action.shape[-1]
# The Q functions' update comes first
noises = itertools.cycle([given["next_noise"], given["noise"]])
# Dimensions of actions first
samplers.normal = lambda shape, **_: jnp.asarray(next(noises).T.reshape(shape))

WIDTHS = {
    network: [
        given[f"{network}/Dense_{i}/kernel"].shape[-1]
        for i in range(9)
        if f"{network}/Dense_{i}/kernel" in given
    ]
    for network in ("actor", "critics")
}


def name_of(network: str, path: tuple) -> str:
    """Name an array as the kit does."""
    name = "/".join(str(part.key) for part in path)
    head = "mean" if network == "actor" else "head"
    last = len(WIDTHS["actor" if network == "actor" else "critics"])
    block = r"encoder/ResidualBlock_(\d)/"
    for pattern, ours in [
        (r"^(params/|batch_stats/)?(Vmap\w+/)?", ""),
        *(
            [(rf"^Dense_{last}/", f"{head}/"), (rf"^Dense_{last + 1}/", "log_std/")]
            if "Block" not in name
            else []
        ),
        ("BatchRenorm", "Norm"),
        (f"{block}LayerNorm_0", r"Norm_\1"),
        ("encoder/LayerNorm_0", f"Norm_{last // 2}"),
        (f"{block}Dense_(\\d)", lambda found: f"Dense_{2 * int(found[1]) + 2 - int(found[2])}"),
        ("encoder/", ""),
        ("predictor/Dense_0", head),
        ("predictor/Dense_1", "log_std"),
        ("BatchNormEmbedder_0/BatchNorm_0", "Norm_0"),
        (r"MLP_0/XQCBlock_(\d)/BatchNorm_0", lambda found: f"Norm_{int(found[1]) + 1}"),
        (r"MLP_0/XQCBlock_(\d)/Dense_0", r"Dense_\1"),
        ("predictor_scalar/value", head),
        ("predictor_tanh_gauss/", ""),
    ]:
        name = re.sub(pattern, ours, name)
    return f"{network}/{name}"


def filled(network: str, tree: Any) -> Any:
    """Their arrays with the kit's numbers; those that the kit does not have stay."""

    def ours(path, x):
        found = given.get(name_of(network, path))
        return x if found is None else jnp.asarray(found.reshape(x.shape))

    return jax.tree_util.tree_map_with_path(ours, tree)


def in_double(tree: Any) -> Any:
    return jax.tree_util.tree_map(
        lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def sbx() -> tuple[list, Any]:
    """Trees by network, and the logarithm of the temperature, after an update of SBX's SAC or
    CrossQ.
    """
    from sbx.common import policies
    from sbx.common.type_aliases import BatchNormTrainState, RLTrainState
    from sbx.crossq import crossq
    from sbx.crossq import policies as normed
    from sbx.sac import sac

    with_stats = recipe == "crossq"
    kit, state_of = (crossq.CrossQ, BatchNormTrainState) if with_stats else (sac.SAC, RLTrainState)
    networks = {
        "actor": (normed.Actor if with_stats else policies.SquashedGaussianActor)(
            WIDTHS["actor"], size
        ),
        "critics": (normed if with_stats else policies).VectorCritic(WIDTHS["critics"]),
    }
    rate, b1, states = (1e-3, 0.5, {}) if with_stats else (3e-4, 0.9, {})
    for name, network in networks.items():
        # Its loss of the Q functions is half of the kit's
        eps = 0.5e-8 if name == "critics" else 1e-8
        variables = filled(name, network.init(key, obs, *[action] * (name == "critics")))
        more = variables if with_stats else {"params": variables, "target_params": variables}
        states[name] = state_of.create(
            apply_fn=network.apply, tx=optax.adam(rate, b1, eps=eps), **more
        )
    entropy = crossq.EntropyCoef(alpha)
    temperature = sac.TrainState.create(
        apply_fn=entropy.apply, params=entropy.init(key)["params"], tx=optax.adam(rate)
    )
    batch = obs, action, next_obs, reward, done, jnp.full(len(obs), gamma)
    q, _, _ = kit.update_critic(states["actor"], states["critics"], temperature, *batch, key)
    q = q if with_stats else kit.soft_update(0.005, q)
    policy, q, _, _, entropy = kit.update_actor(states["actor"], q, temperature, obs, key)
    temperature, _ = kit.update_temperature(-size, temperature, entropy)
    trees = [("actor", policy.params), ("critics", q.params)]
    stats = (
        [("actor", policy.batch_stats), ("critics", q.batch_stats)]
        if with_stats
        else [("targets", q.target_params)]
    )
    return trees + stats, temperature.params["log_ent_coef"]


def simba() -> tuple[list, Any]:
    """Update SimBa's SAC once; parameters in the kit's order: Q functions, targets, policy,
    temperature.
    """
    from scale_rl.agents.sac import sac_network, sac_update
    from scale_rl.networks.trainer import Trainer

    common = {"block_type": "residual", "dtype": float}
    made = {  # of so many blocks
        "actor": sac_network.SACActor(num_blocks=1, hidden_dim=128, action_dim=size, **common),
        "critics": sac_network.SACClippedDoubleCritic(num_blocks=2, hidden_dim=512, **common),
        "alpha": sac_network.SACTemperature(alpha),
    }
    inputs = {
        "actor": {"observations": obs},
        "critics": {"observations": obs, "actions": action},
        "alpha": {},
    }
    models = {}
    for name, network in made.items():
        tx = optax.adamw(1e-4, weight_decay=0.0 if name == "alpha" else 1e-2)
        model = Trainer.create(network, {"rngs": key, **inputs[name]}, tx)
        params = filled(name, model.params)
        models[name] = model.replace(params=params, opt_state=tx.init(params))
    batch = {
        "observation": obs,
        "action": action,
        "reward": reward,
        "terminated": done,
        "next_observation": next_obs,
    }
    more = models["alpha"], batch
    q, _ = sac_update.update_critic(
        key, models["actor"], models["critics"], models["critics"], *more, gamma, 1, True
    )
    targets, _ = sac_update.update_target_network(q, models["critics"], 0.005)
    policy, info = sac_update.update_actor(key, models["actor"], q, *more, True)
    temperature, _ = sac_update.update_temperature(models["alpha"], info["entropy"], -0.5 * size)
    trees = [("actor", policy.params), ("critics", q.params), ("targets", targets.params)]
    return trees, temperature.params["log_temp"]


def xqc() -> tuple[list, Any]:
    """Update XQC once; parameters in the same order."""
    from xqc.agents import XQCLearner
    from xqc.replay_buffer import Batch

    rates = dict.fromkeys(("actor_lr", "critic_lr", "temp_lr"), 3e-4) | {
        "lr_end": 3e-5,
        "num_interactions": 10**6,
    }
    on = dict.fromkeys(
        ("pre_activation_bn", "normalize_last_layer", "use_batch_norm", "use_weight_norm"), True
    )
    off = dict.fromkeys(("use_layer_norm", "decay_bn", "skip_connections"), False)
    sizes = {
        "hidden_dims_actor": WIDTHS["actor"],
        "hidden_dims_critic": WIDTHS["critics"],
        "n_critics": 2,
    }
    more = {
        "policy_delay": 3,
        "tau": 0.005,
        "target_entropy": "auto",
        "init_temperature": alpha,
        "weight_decay": 0.0,
    }
    more |= {
        "num_seeds": 1,
        "updates_per_step": 2,
        "max_v": 5.0,
        "min_v": -5.0,
        "target_net_update_freq": 1,
    }
    learner = XQCLearner(
        0, obs[:1], action[:1], critic_loss="categorical", **rates, **on, **off, **sizes, **more
    )
    learner.temperature = in_double(learner.temperature)
    for attribute, network in (
        ("actor", "actor"),
        ("critic", "critics"),
        ("target_critic", "targets"),
    ):
        model = in_double(getattr(learner, attribute))
        params = filled(network, model.params)
        stats = filled(network, model.batch_stats)
        setattr(learner, attribute, model.replace(params=params, batch_stats=stats))
    batch = Batch(obs, action, reward, 1 - done, next_obs, jnp.full((len(obs), 1), gamma))
    learner.update(jax.tree.map(lambda x: x[None, None], batch))
    networks = (("actor", learner.actor), ("critics", learner.critic))
    trees = [(name, tree) for name, model in networks for tree in (model.params, model.batch_stats)]
    return [*trees, ("targets", learner.target_critic.params)], learner.temperature.params[
        "log_temp"
    ][0]


trees, log_alpha = {"sac": sbx, "crossq": sbx, "simba": simba, "xqc": xqc}[recipe]()
leaves = [
    (name_of(name, path), x)
    for name, tree in trees
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
]
np.savez(
    end,
    log_alpha=log_alpha,
    **{name: x.reshape(given[name].shape) for name, x in leaves if name in given},
)
