"""Why a run cannot go on from what another one saved, or from its own past: in flags, observations, actions, layers."""

import math
from collections.abc import Iterator
from typing import Any

from common.envs.spaces import Box, Dict, Discrete, Space, Tuple, leaves
from common.envs.spec import EnvSpec
from common.runs.arrays import ROWS, Arrays, Mismatch, first_part
from common.runs.directory import differences

OF_LEARNER = ("num_seeds", "population", "sweep")
OF_LEARNER += ("hidden_sizes", "normalize_obs", "normalize_returns", "share_torso", "encoder")
OF_LEARNER += ("critic_layer_norm", "rnn", "rnn_size", "rnn_layers", "obs_prev_action_reward", "opponent")
OF_ACTORS = "num_envs", "buffer_size"
"""Flags that decide, in algorithms that have them, which arrays there are and how large."""
NAMED = 3  # layers at most, in a sentence

Config = dict[str, Any]


def explain(error: Mismatch, then: Config, now: Config) -> str:
    """What of two configurations, `then` and `now`, makes their arrays differ; where nothing does, which arrays do."""
    layers = _layers(error)
    if then["algorithm"] != now["algorithm"] and layers:
        return f"it was made by {then['algorithm']}, whose layers differ from those of {now['algorithm']}: {layers}"
    spaces = list(_spaces(then, now))
    of_env = ("env", "env_params") if spaces or first_part(error.first) == ROWS else ()
    of_actors = OF_ACTORS if any(first_part(name) == ROWS for name in error.wanted) else ()
    flags = [name for name in (*of_env, *of_actors, *OF_LEARNER) if name in now["args"].keys() & then["args"].keys()]
    return "; ".join([*differences(then["args"], now["args"], flags), *spaces]) or layers or str(error)


def _spaces(then: Config, now: Config) -> Iterator[str]:
    """What differs of observations and actions."""
    try:
        there, here = (EnvSpec.from_json(config["env_spec"]) for config in (then, now))
    except (KeyError, TypeError, ValueError, ArithmeticError):  # the file says something else
        return
    for kind in ("observation", "action"):
        before, after = (_in_words(getattr(spec, f"{kind}_space")) for spec in (there, here))
        if before != after:
            shorter = after.removesuffix(" numbers") if before.endswith(" numbers") else after
            yield f"an {kind} is {before} there, {shorter} here"


def _in_words(space: Space) -> str:
    if isinstance(space, (Dict, Tuple)):
        return ", ".join(f"{name}: {_in_words(leaf)}" for name, leaf in leaves(space))
    if isinstance(space, Box):
        return f"{_size(space.shape)} number{'s' * (math.prod(space.shape) != 1)}"
    return f"one of {space.n}" if isinstance(space, Discrete) else f"one of each of {_size(space.nvec)}"


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _layers(error: Mismatch) -> str:
    """What differs of the layers."""
    there, here = _sizes(error.stored), _sizes(error.wanted)
    differing = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    said = [f"{name} is {there.get(name, 'missing')} there, {here.get(name, 'missing')} here" for name in differing]
    more = [f"and {len(said) - NAMED} more"] if len(said) > NAMED else []
    return "; ".join(said[:NAMED] + more)


def _sizes(arrays: Arrays) -> dict[str, str]:
    """By the names of layers, such as `actor/Torso_0/Dense_0`, their largest arrays, such as 4 x 64, of one seed."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, array in arrays.items():
        parts = name.split("/")
        if parts[1:2] == ["params"]:
            layer = "/".join(part for part in parts[2:-1] or parts[2:] if part != "params")
            shapes.setdefault(layer, []).append(tuple(array.shape[1:]))
    return {layer: _size(max(found, key=math.prod)) for layer, found in shapes.items()}
