"""Registers `pmaprl/PartialCartPole-v1` and `pmaprl/PartialPendulum-v1` with gymnasium: its own without velocities.

Processes of environments import this too, so it needs nothing that is slow.
"""

import gymnasium
from gymnasium.spaces import Box
from gymnasium.wrappers import TransformObservation

from common.envs.velocities import PREFIX, SEEN


def make(whole: str, render_mode: str | None = None) -> gymnasium.Env:
    """gymnasium's environment `whole` without what is not seen, and without a time limit."""
    env, seen = gymnasium.make(whole, max_episode_steps=-1, render_mode=render_mode), list(SEEN[whole])
    box = env.observation_space
    box = Box(box.low[seen], box.high[seen], dtype=box.dtype)
    return TransformObservation(env, lambda obs: obs[seen], box)


for whole in SEEN:
    gymnasium.register(
        f"pmaprl/{PREFIX}{whole}",
        f"{__name__}:make",
        kwargs={"whole": whole},
        max_episode_steps=gymnasium.spec(whole).max_episode_steps,
        reward_threshold=gymnasium.spec(whole).reward_threshold,
    )
