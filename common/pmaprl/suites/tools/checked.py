"""Checks of all that gymnasium environments return against their spaces.

Processes of environments import this, so it needs nothing that is slow.
"""

import numbers
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from pmaprl.cli.errors import FailedEnvError, shortened
from pmaprl.envs.suite_params import is_number

RETURNED = {
    "reset": "2 values (observation, info)",
    "step": "5 values (observation, reward, terminated, truncated, info)",
}


class CheckedEnv(gymnasium.Wrapper):
    """Environment that returns elements of its observation space, a float, two bools and floats.

    An array of one number is taken as that number, a list as an array. Everything else raises a
    FailedEnvError, before a vector environment would broadcast, cast or cut it.

    Observations are copies: an environment may write the next one into the same array, and a vector
    environment keeps the last one of an episode while it resets. Entries of infos that are no
    numbers are left out: nobody reads them, and those of several environments need not fit
    together.

    A mask of legal actions in an info has to be there from the first reset on, because only then is
    it observed.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        observations = self.observation_space
        is_observed = isinstance(observations, Dict) and "action_mask" in observations.spaces
        self._needs_no_mask = is_observed or isinstance(self.action_space, Box)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        obs, info = outputs_of(self.env, "reset", self.env.reset(seed=seed, options=options))
        self._check_mask(info)
        return _element(self.observation_space, obs, "the observation"), _numbers(info)

    def step(self, action: Any) -> tuple[Any, ...]:
        if isinstance(self.action_space, Box) and not self.action_space.shape:
            # A scalar, which is how a vector environment passes it on, is no element of the space
            action = np.asarray(action, self.action_space.dtype)
        outputs = outputs_of(self.env, "step", self.env.step(action))
        obs, reward, terminated, truncated, info = outputs
        checked = (
            _element(self.observation_space, obs, "the observation"),
            _number(reward, "the reward"),
            _truth(terminated, "terminated"),
            _truth(truncated, "truncated"),
            _numbers(info),
        )
        _, _, terminated, truncated, _ = checked
        if not (terminated or truncated):  # at the end nobody acts
            self._check_mask(info)
        return checked

    def _check_mask(self, info: Mapping) -> None:
        """Raise FailedEnvError if an info has a mask that is not observed."""
        if not self._needs_no_mask and info.get("action_mask") is not None:
            raise FailedEnvError(
                f"the info of {name_of(self.env)} has an action_mask, and that of its first reset "
                "had none: return it from every reset too"
            )


def outputs_of(env: gymnasium.Env, method: str, outputs: Any) -> tuple[Any, ...]:
    """Check the number of `outputs` of an environment's `reset` or `step`.

    Raises:
        FailedEnvError: they are not as many as gymnasium's, or the info is no dictionary.
    """
    expected = RETURNED[method]
    name = name_of(env)
    count = f"one {type(outputs).__name__}"
    if isinstance(outputs, tuple | list):
        count = f"{len(outputs)}"
    if count != expected[0]:
        raise FailedEnvError(
            f"{method} of {name} returned {count} instead of the {expected} of gymnasium"
        )
    if not isinstance(outputs[-1], Mapping):
        raise FailedEnvError(
            f"the info that {method} of {name} returned is {_shown(outputs[-1])}, not a dictionary"
        )
    return tuple(outputs)


def name_of(env: gymnasium.Env) -> str:
    """The id of an environment, or the name of its class if it is not registered."""
    return env.spec.id if env.spec else type(env.unwrapped).__name__


def _element(space: Space, obs: Any, what: str) -> Any:
    """Convert an observation to the shape and the type of its space."""
    if isinstance(space, Dict):
        if not isinstance(obs, Mapping) or set(space) - set(obs):
            names = ", ".join(map(str, space))
            raise FailedEnvError(f"{what} has not the parts {names} of its space")
        if "action_mask" in obs and "action_mask" not in space.spaces:
            raise FailedEnvError(f"{what} has an action_mask that its space does not have: add it")
        return {name: _element(part, obs[name], f"{what} {name}") for name, part in space.items()}
    if isinstance(space, Tuple):
        if not isinstance(obs, tuple | list) or len(space) != len(obs):
            raise FailedEnvError(f"{what} has not the {len(space)} parts of its space")
        parts = zip(space, obs, strict=True)
        elements = [
            _element(part, values, f"{what} {index}") for index, (part, values) in enumerate(parts)
        ]
        return tuple(elements)
    if not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        return obs
    array = array_of(obs, what)
    shape = space.shape or ()
    if array.shape != shape and not array.size == 1 == np.prod(shape):
        raise FailedEnvError(f"{what} has shape {array.shape} instead of {shape}")
    typed = _typed(array.reshape(shape), space.dtype, what)
    if not isinstance(space, Box):
        start, count = _range(space)
        if not np.all((typed >= start) & (typed - start < count)):
            raise FailedEnvError(f"{what} {_shown(typed.tolist())} is not in its space, {space}")
    return np.array(typed)


def _range(space: Discrete | MultiDiscrete | MultiBinary) -> tuple[Any, Any]:
    """The least number of a space of choices, and how many there are."""
    if isinstance(space, MultiBinary):
        return 0, 2
    if isinstance(space, Discrete):
        return space.start, space.n
    return space.start, space.nvec


def mask_of(legal: Any, space: Space, what: str) -> Any:
    """Convert a mask of legal actions to the shape and the type of its space.

    Args:
        legal: the mask.
        space: a Box, or a Tuple of masks' spaces.
        what: name of the mask in messages.

    Raises:
        FailedEnvError: the mask has other parts or shapes, or other numbers than 0 and 1.
    """
    if isinstance(space, Tuple):
        if not isinstance(legal, tuple | list) or len(legal) != len(space):
            raise FailedEnvError(
                f"{what} is {_shown(legal)}, which has not the {len(space)} parts of the first one"
            )
        parts = zip(legal, space.spaces, strict=True)
        return tuple(mask_of(part, part_space, what) for part, part_space in parts)
    array = array_of(legal, what)
    if array.shape != space.shape:
        raise FailedEnvError(f"{what} has shape {array.shape} instead of {space.shape}")
    if not np.all((array == 0) | (array == 1)):
        raise FailedEnvError(
            f"{what} is {_shown(array.tolist())}, not 0 for illegal and 1 for legal actions"
        )
    return array.astype(space.dtype)


def array_of(value: Any, what: str) -> np.ndarray:
    """Convert a value to an array of real numbers.

    Raises:
        FailedEnvError: it cannot be converted; the message names it by `what`.
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
    """Convert an array to the type of a space.

    Raises:
        FailedEnvError: whole numbers would get other values.
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
    # NumPy's numbers are Real too, and so are fractions; but NumPy counts spans of time among them
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
    """Convert the rewards, or the ends, of `count` environments to an array [N].

    Raises:
        FailedEnvError: they are not `count` numbers.
    """
    array = array_of(values, what)
    if array.size != count:
        raise FailedEnvError(f"{what} of {count} environments have shape {array.shape}")
    return array.reshape(count)


def true_of_each(values: Any, count: int, what: str) -> np.ndarray:
    """Convert the ends of `count` environments to an array [N] of bools.

    Raises:
        FailedEnvError: one is neither true nor false.
    """
    array = of_each(values, count, what)
    if array.dtype != bool and not np.isin(array, (0, 1)).all():
        raise FailedEnvError(f"{what} is {_shown(values)}, not true or false everywhere")
    return array.astype(bool)


def _numbers(info: Mapping) -> dict[str, float]:
    """The entries that are numbers, all as floats.

    A vector environment would give an entry the type of its first value for ever.
    """
    return {
        name: _as_float(value)
        for name, value in info.items()
        if is_number(value) and not _is_reserved(name)
    }


def _is_reserved(name: Any) -> bool:
    """True for names that vector environments use themselves: _NAME and final_..., or no text."""
    if not isinstance(name, str):
        return True
    return name.startswith("_") or name in ("final_obs", "final_info")


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # it has more than 308 digits
        return float("inf") if value > 0 else float("-inf")


def _shown(value: Any) -> str:
    return shortened(" ".join(repr(value).split()))
