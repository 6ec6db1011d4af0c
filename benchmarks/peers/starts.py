"""The states in which the kit's own evaluations begin, for peers whose environments can be put into
them.

What an episode of Pendulum returns depends on where it begins, with a standard deviation of 82 for
a policy that is good everywhere: means over two sets of 128 starts differ by about 10, and those of
good policies by less.
"""

import json
import sys
from contextlib import closing
from functools import cache
from typing import Any

import numpy as np

from benchmarks.jobs import last_line
from benchmarks.learning import peers
from pmaprl.cli.env_flags import split_name

# What a state of gymnasium's consists of, in its order, by the names that gymnax has for it
STATES = {
    "CartPole-v1": ("x", "x_dot", "theta", "theta_dot"),
    "Acrobot-v1": ("joint_angle1", "joint_angle2", "velocity_1", "velocity_2"),
    "MountainCar-v0": ("position", "velocity"),
    "MountainCarContinuous-v0": ("position", "velocity"),
    "Pendulum-v1": ("theta", "theta_dot"),
}


def in_jax(algorithm: str) -> bool:
    """Tell whether a peer's, such as sb3_ppo, plays with the keys of the kit's episodes, and needs
    no states.
    """
    return peers()[algorithm.rpartition("_")[0]]["trainer"] != "train_sb3.py"


def same_starts(algorithm: str, env: str) -> bool:
    """Tell whether evaluations of a peer's algorithm begin where those of the kit's do."""
    suite, name = split_name(env)
    return in_jax(algorithm) or (name in STATES and suite in ("gymnax", "gymnasium"))


@cache
def starts_of(algorithm: str, env: str, episodes: int) -> list[list[float]] | None:
    """Their states [episodes, numbers of a state]; None where a peer does not need them, or begins
    where it likes.

    A process of its own computes them, for one that has looked at an accelerator keeps its memory
    from the runs. Raises TrainingError where that fails, as without gymnasium.
    """
    if in_jax(algorithm) or not same_starts(algorithm, env):
        return None
    words = [sys.executable, "-m", "benchmarks.peers.starts", env, str(episodes)]
    return last_line(words, {"JAX_PLATFORMS": "cpu"})


def states_of(env: str, episodes: int) -> np.ndarray:
    """Compute in this process what `starts_of` returns."""
    from pmaprl.device.evaluation import SEED, episode_keys

    suite, name = split_name(env)
    if suite == "gymnasium":  # each episode has a seed of its own
        import gymnasium

        starts = []
        with closing(gymnasium.make(name)) as game:
            inner: Any = game.unwrapped  # has a `state`, if it is a classic task
            for index in range(episodes):
                game.reset(seed=SEED + index)
                starts.append(np.array(inner.state))
        return np.stack(starts)
    import jax

    from pmaprl.envs.registry import make

    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(SEED), np.arange(episodes))
    _, states = jax.vmap(make(name).reset)(jax.vmap(lambda key: episode_keys(key)[0])(keys))
    return np.stack([getattr(states, part) for part in STATES[name]], axis=-1)


if __name__ == "__main__":
    print(json.dumps(states_of(sys.argv[1], int(sys.argv[2])).tolist()))
