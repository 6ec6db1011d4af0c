"""What an algorithm needs of an environment, checked in one sentence."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from common.cli.errors import UsageError
from common.envs.masks import check_mask
from common.envs.privileged import PRIVILEGED, has_privileged
from common.envs.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple, leaves


def check_usable_spaces(name: str, observation_space: Any, dtypes: Any, action_space: Any) -> None:
    """Raise UsageError where the environment called `name` has nothing to observe or to do, or not in real numbers."""
    for part, leaf, dtype in leaves(observation_space, dtypes):
        if _is_empty(leaf) or jnp.issubdtype(dtype, jnp.complexfloating):
            what = "complex numbers" if jnp.issubdtype(dtype, jnp.complexfloating) else str(leaf)
            raise UsageError(f"environment {name}: no policy can observe {what}{part and f', its part {part}'}")
    for part, leaf in leaves(action_space):
        where = part and f" {part}"
        if _is_empty(leaf):
            raise UsageError(f"environment {name} has no action{where}: its action space is {action_space}")
        if isinstance(leaf, Box) and not (leaf.low <= leaf.high).all():  # nor where one is not a number
            low, high = next((x, y) for x, y in zip(leaf.low.flat, leaf.high.flat, strict=True) if not x <= y)
            raise UsageError(f"environment {name}: its actions{where} are bounded by {low:g} below and {high:g} above")


def _is_empty(leaf: Any) -> bool:
    return 0 in leaf.shape or not isinstance(leaf, Box) and min(leaf.nvec) < 1


def need_fitting_steps(args: Any, env: Any) -> None:
    """Raise UsageError where who plays, or --reset-pool, does not fit how the environment steps and resets."""
    game = "a game of several players, such as pgx:connect_four"
    if getattr(args, "opponent", "") == "self" and not env.is_game:
        raise UsageError(f"--opponent self needs {game}, not {env.name}")
    if getattr(args, "opponent", "") == "members" and not (env.is_game or len(set(env.agents)) > 1):
        team = "an environment of several agents, such as jaxmarl:MPE_simple_spread_v3"
        raise UsageError(f"--opponent members needs {game}, or {team}, not {env.name}")
    if getattr(args, "reset_pool", 0) and env.resets_itself:
        raise UsageError(f"--reset-pool needs an environment without resets of its own, and {env.name} has them")


def check_spaces(args: Any, env: Any) -> None:
    """Raise UsageError where a flag, or a mask, does not fit the spaces of an environment, or of its EnvSpec.

    A flag that an algorithm lacks asks for nothing.
    """
    check_mask(env)
    if getattr(args, "share_torso", False) and has_privileged(env.observation_space):
        raise UsageError(f"--share-torso would hide the {PRIVILEGED} of {env.name} from the critic, for whom it is")
    has_array = any(isinstance(leaf, Box) for _, leaf in leaves(env.observation_space))
    if getattr(args, "normalize_obs", False) and not has_array:
        raise UsageError(f"--normalize-obs needs arrays as observations, {env.name} has {env.observation_space}")
    has_box = any(isinstance(leaf, Box) for _, leaf in leaves(env.action_space))
    if getattr(args, "exploration_loss", "") == "symmetric-kl" and has_box:
        raise UsageError("--exploration-loss symmetric-kl needs discrete actions: there is no uniform policy on a Box")


def check_squashable(env: Any, instead: str) -> None:
    """Raise UsageError unless actions are Discrete, two or more, or a Box with finite bounds, as SAC needs them.

    It names what to take `instead`.
    """
    space = env.action_space
    if isinstance(space, (MultiDiscrete, Dict, Tuple)):
        raise UsageError(f"SAC acts in a Box or in Discrete actions, {env.name} has {space}; {instead} can train on it")
    if isinstance(space, Discrete):
        if space.n == 1:
            raise UsageError(f"SAC chooses among actions, and {env.name} has only one; {instead} can train on it")
        return
    if not (np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)).all():
        raise UsageError(
            f"SAC squashes actions between bounds, and those of {env.name} are {np.ravel(space.low)} to "
            f"{np.ravel(space.high)}: each must be finite, the lower below the upper; {instead} can train on it"
        )
