"""Outputs of gymnasium environments, held against their spaces and made plain: numbers, arrays,
infos of numbers.

Processes of environments import this, so it needs nothing that is slow.
"""

import numbers
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from pmaprl.cli.errors import FailedEnvError, shortened
from pmaprl.envs.suite_tools import is_number

RETURNED = {
    "reset": "2 values (observation, info)",
    "step": "5 values (observation, reward, terminated, truncated, info)",
}


class CheckedEnv(gymnasium.Wrapper):
    """An environment that gives elements of its observation space, a float, two bools, and an info
    of floats.

    An array of one number is taken as that number, a list as an array. Everything else raises a
    FailedEnvError, before a vector environment would broadcast, cast or cut it. Observations are
    copies: an environment may write the next one into the same array, and a vector environment
        keeps the last one of an episode while it resets. Entries of infos that are no numbers are
        left out: nobody reads them, and those of several environments need not fit together.
    """

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        obs, info = outputs_of(self.env, "reset", self.env.reset(seed=seed, options=options))
        return _element(self.observation_space, obs, "the observation"), _numbers(info)

    def step(self, action: Any) -> tuple[Any, ...]:
        if isinstance(self.action_space, Box) and not self.action_space.shape:
            # Not a scalar, which is no element of the space
            action = np.asarray(action, self.action_space.dtype)
        outputs = outputs_of(self.env, "step", self.env.step(action))
        obs, reward, terminated, truncated, info = outputs
        return (
            _element(self.observation_space, obs, "the observation"),
            _number(reward, "the reward"),
            _truth(terminated, "terminated"),
            _truth(truncated, "truncated"),
            _numbers(info),
        )


def outputs_of(env: gymnasium.Env, method: str, outputs: Any) -> tuple[Any, ...]:
    """The `outputs` of an environment's `reset` or `step`. Raises FailedEnvError where they are not
    as many as now.
    """
    wanted = RETURNED[method]
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    if not isinstance(outputs, tuple | list) or len(outputs) != int(wanted[0]):
        got = (
            f"{len(outputs)}"
            if isinstance(outputs, tuple | list)
            else f"one {type(outputs).__name__}"
        )
        raise FailedEnvError(
            f"{method} of {name} returned {got} instead of the {wanted} of gymnasium"
        )
    if not isinstance(outputs[-1], Mapping):
        raise FailedEnvError(
            f"the info that {method} of {name} returned is {_shown(outputs[-1])}, not a dictionary"
        )
    return tuple(outputs)


def _element(space: Space, obs: Any, what: str) -> Any:
    """An observation in the shape and the type of its space."""
    if isinstance(space, Dict):
        if not isinstance(obs, Mapping) or set(space) - set(obs):
            raise FailedEnvError(
                f"{what} has not the parts {', '.join(map(str, space))} of its space"
            )
        return {name: _element(part, obs[name], f"{what} {name}") for name, part in space.items()}
    if isinstance(space, Tuple):
        if not isinstance(obs, tuple | list) or len(space) != len(obs):
            raise FailedEnvError(f"{what} has not the {len(space)} parts of its space")
        return tuple(
            _element(part, x, f"{what} {index}")
            for index, (part, x) in enumerate(zip(space, obs, strict=True))
        )
    if not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        return obs
    array = array_of(obs, what)
    if array.shape != space.shape and not array.size == 1 == np.prod(space.shape):
        raise FailedEnvError(f"{what} has shape {array.shape} instead of {space.shape}")
    typed = _typed(array.reshape(space.shape), space.dtype, what)
    if not isinstance(space, Box):
        count = (
            2
            if isinstance(space, MultiBinary)
            else space.n
            if isinstance(space, Discrete)
            else space.nvec
        )
        start = 0 if isinstance(space, MultiBinary) else space.start
        if not np.all((typed >= start) & (typed - start < count)):
            raise FailedEnvError(f"{what} {_shown(typed.tolist())} is not in its space, {space}")
    return np.array(typed)


def mask_of(legal: Any, space: Space, what: str) -> Any:
    """A mask of legal actions in the shape and the type of its space, a Box or a Tuple of such.

    Raises FailedEnvError where it has other parts or shapes, or another number than 0 and 1.
    """
    if isinstance(space, Tuple):
        if not isinstance(legal, tuple | list) or len(legal) != len(space):
            raise FailedEnvError(
                f"{what} is {_shown(legal)}, which has not the {len(space)} parts of the first one"
            )
        return tuple(
            mask_of(part, of_part, what) for part, of_part in zip(legal, space.spaces, strict=True)
        )
    array = array_of(legal, what)
    if array.shape != space.shape:
        raise FailedEnvError(f"{what} has shape {array.shape} instead of {space.shape}")
    if not np.all((array == 0) | (array == 1)):
        raise FailedEnvError(
            f"{what} is {_shown(array.tolist())}, not 0 for illegal and 1 for legal actions"
        )
    return array.astype(space.dtype)


def array_of(value: Any, what: str) -> np.ndarray:
    """A value as an array of real numbers. Raises FailedEnvError, naming `what` it is, where it is
    none.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raise FailedEnvError(f"{what} is {_shown(value)}, not numbers")
    if np.ma.is_masked(value):
        raise FailedEnvError(f"{what} is {_shown(value)}, which leaves numbers out")
    try:
        array = np.asarray(value)
    except Exception as error:  # it is ragged, or of another library
        raise FailedEnvError(f"{what} {_shown(value)} is no array") from error
    if array.dtype.kind not in "biuf":
        raise FailedEnvError(f"{what} is {_shown(value)}, not numbers")
    return array


def _typed(array: np.ndarray, dtype: Any, what: str) -> np.ndarray:
    """An array in the type of a space. Raises FailedEnvError where that is whole numbers, which
    have other values.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        typed = array.astype(dtype)
    if typed.dtype.kind != "f" and not np.array_equal(typed, array):
        raise FailedEnvError(
            f"{what} is of type {array.dtype} and holds numbers that {np.dtype(dtype)} does not"
        )
    return typed


def _number(value: Any, what: str) -> float:
    # Also NumPy's, and whole numbers and fractions of any size; a span of time counts among them
    if isinstance(value, numbers.Real) and not isinstance(value, np.timedelta64):
        return _as_float(value)
    array = array_of(value, what)
    if array.size != 1:
        raise FailedEnvError(f"{what} has shape {array.shape}, it is not one number")
    return float(array.item())


def _truth(value: Any, what: str) -> bool:
    number = _number(value, what)
    if number not in (0.0, 1.0):
        raise FailedEnvError(f"{what} is {_shown(value)}, not true or false")
    return bool(number)


def of_each(values: Any, count: int, what: str) -> np.ndarray:
    """The rewards, or the ends, of `count` environments, [N]. Raises FailedEnvError where there is
    no one of each.
    """
    array = array_of(values, what)
    if array.size != count:
        raise FailedEnvError(f"{what} of {count} environments have shape {array.shape}")
    return array.reshape(count)


def true_of_each(values: Any, count: int, what: str) -> np.ndarray:
    """Ends of `count` environments, [N] bool. Raises FailedEnvError where one is neither true nor
    false.
    """
    array = of_each(values, count, what)
    if array.dtype != bool and not np.isin(array, (0, 1)).all():
        raise FailedEnvError(f"{what} is {_shown(values)}, not true or false everywhere")
    return array.astype(bool)


def _numbers(info: Mapping) -> dict[str, float]:
    """The entries that are numbers, all as floats: vector environments give each the type that it
    has first.
    """
    found = {}
    for name, value in info.items():
        # They mark with _NAME who has told NAME, and put the end of an episode under final_...
        special = (
            not isinstance(name, str) or name.startswith("_") or name in ("final_obs", "final_info")
        )
        if not special and is_number(value):
            found[name] = _as_float(value)
    return found


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # it has more than 308 digits
        return float("inf") if value > 0 else float("-inf")


def _shown(value: Any) -> str:
    return shortened(" ".join(repr(value).split()))
