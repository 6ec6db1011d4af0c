"""Trains rejax: python train_rejax.py RUN_DIR"""

import sys

import jax.numpy as jnp
from on_device import Peer, make, train
from rejax import get_algo
from rows import run_of


def peer_of(args: dict) -> Peer:
    """Its PPO or SAC, with flags as its configurations have them."""
    env, env_params = make(args["env"])
    algorithm = get_algo(args["algorithm"]).create(
        env=env, env_params=env_params, total_timesteps=args["total_timesteps"], **args["flags"]
    )
    return Peer(
        init=algorithm.init_state,
        update=algorithm.train_iteration,
        act=lambda state, obs, memory: (greedy(algorithm, state, obs), memory),
        env=algorithm.env,
        env_params=algorithm.env_params,
        steps_per_update=algorithm.num_envs * getattr(algorithm, "num_steps", 1),
    )


def greedy(algorithm, state, obs):
    """Choose what its policy takes for the likeliest."""
    if algorithm.normalize_observations:
        obs = algorithm.normalize_obs(state.obs_rms_state, obs)
    mode = algorithm.actor.apply(
        state.actor_ts.params,
        jnp.expand_dims(obs, 0),
        method=lambda actor, obs: actor._action_dist(obs).mode(),
    )[0]
    if algorithm.discrete:
        return mode
    space = algorithm.action_space
    if hasattr(algorithm.actor, "action_scale"):  # a Gaussian before tanh
        return algorithm.actor.action_loc + algorithm.actor.action_scale * jnp.tanh(mode)
    return jnp.clip(mode, space.low, space.high)


if __name__ == "__main__":
    with run_of(sys.argv) as rows:
        train(rows, peer_of(rows.args))
