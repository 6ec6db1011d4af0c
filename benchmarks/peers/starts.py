"""The states in which the kit's own evaluations begin, for peers whose environments can be put into them.

What an episode of Pendulum returns depends on where it begins, with a standard deviation of 82 for a policy that is
good everywhere: the means of two sets of 128 starts differ by 10, which is more than good policies do.
"""

import jax
import numpy as np

from algos.asac_pmap import Args
from common.device.evaluation import SEED, episode_keys
from common.device.stepping import reset_envs
from common.envs.registry import make

STATES = {  # what a state of gymnasium's consists of, in its order, by the names that gymnax has for it
    "CartPole-v1": ("x", "x_dot", "theta", "theta_dot"),
    "Acrobot-v1": ("joint_angle1", "joint_angle2", "velocity_1", "velocity_2"),
    "MountainCar-v0": ("position", "velocity"),
    "MountainCarContinuous-v0": ("position", "velocity"),
    "Pendulum-v1": ("theta", "theta_dot"),
}


def starts_of(env: str, episodes: int) -> list[list[float]] | None:
    """Their states [episodes, numbers of a state]; None where peers begin where they like."""
    suite, _, name = env.rpartition(":")
    if name not in STATES or suite not in ("", "gymnasium"):
        return None
    return (_on_host(name, episodes) if suite else _on_device(name, episodes)).tolist()


def _on_device(name: str, episodes: int) -> np.ndarray:
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(SEED), np.arange(episodes))
    _, states = reset_envs(make(name), jax.vmap(lambda key: episode_keys(key)[0])(keys))
    return np.stack([getattr(states, part) for part in STATES[name]], axis=-1)


def _on_host(name: str, episodes: int) -> np.ndarray:
    """Each of the environments that asynchronous SAC evaluates in has a seed of its own, and begins several."""
    import gymnasium

    count = min(episodes, Args().envs_per_actor)
    starts = []
    for index in range(count):
        env = gymnasium.make(name)
        for seed in [SEED + index] + [None] * (len(range(index, episodes, count)) - 1):
            env.reset(seed=seed)
            starts.append(np.array(env.unwrapped.state))
    return np.stack(starts)
