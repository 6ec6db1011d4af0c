"""Checks for values that an observation must not have.

These are choices outside of their space, bytes outside of their bounds, masks and bits of more than
0 and 1, and numbers that are not finite or have no square. Networks would see nothing but zeros for
such a choice, every action whose mask is not 0 would be legal, and layers square their inputs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import shortened
from pmaprl.envs.bytes import IN_BOUNDS, is_bytes
from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import Box, EnvSpec, Leaf, Space, byte_range, is_bits, leaves

IN_SPACE = "obs/choices_in_space_min"  # name of a metric
OUTSIDE = (
    "has an observation that its space rules out, such as a choice beyond it, or an "
    "action_mask of more than 0 and 1, or one that is not finite or too large"
)
LARGEST = np.sqrt(np.finfo(np.float32).max)  # about 1.8e19: squares of larger ones are infinite

Check = Callable[[str, Leaf, Any, Any], Any]
"""(name of a part, its leaf, elements [..., *shape], NumPy or JAX's) -> elements that fit [...].

None means that all fit.
"""


def are_choices(name: str, leaf: Leaf, x: Any, numpy: Any) -> Any:
    """Mark choices that are in their space, and masks and bits that are 0 or 1."""
    if is_mask(name) or is_bits(leaf):
        if x.dtype == bool:
            return None
        return _all_of_element((x == 0) | (x == 1), leaf, numpy)
    if isinstance(leaf, Box):
        return None
    count = np.reshape(np.array(leaf.nvec), leaf.shape)
    return _all_of_element((x >= 0) & (x < count), leaf, numpy)


def are_bytes_in_bounds(name: str, leaf: Leaf, x: Any, numpy: Any) -> Any:
    """Mark bytes within the bounds of their space, unless these are 0 and 255."""
    if not is_bytes(leaf, x.dtype):
        return None
    low, size = byte_range(leaf)
    if np.all(size == 255):
        return None
    return _all_of_element((x >= low) & (x <= low + size), leaf, numpy)


def are_finite(name: str, leaf: Leaf, x: Any, numpy: Any) -> Any:
    """Mark numbers that are finite, and so are their squares."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    return _all_of_element(numpy.abs(x) <= LARGEST, leaf, numpy)


CHECKS = are_choices, are_bytes_in_bounds, are_finite


def in_space(obs: Any, space: Space, numpy: Any = jnp, checks: tuple[Check, ...] = CHECKS) -> Any:
    """Mark observations whose parts all pass all checks.

    Args:
        obs: observations [..., *obs].
        space: their space.
        numpy: NumPy, or JAX's version of it.
        checks: the checks.

    Returns:
        Bools [...]; True if there is nothing to check.
    """
    passes = True
    for name, leaf, values in leaves(space, obs):
        for check in checks:
            fits = check(name, leaf, values, numpy)
            if fits is not None:
                passes = passes & fits
    return passes


def range_metrics(space: Space, axis_name: str, *observations: Any) -> dict[str, jax.Array]:
    """Check bytes, choices and masks of observations against their space, on all devices.

    Returns:
        Metrics [] that are 1, or NaN if a check fails. The run ends with a NaN, see
        `pmaprl.runs.recorder`.
    """
    metrics = {}
    for metric, check in ((IN_BOUNDS, are_bytes_in_bounds), (IN_SPACE, are_choices)):
        results = [in_space(obs, space, checks=(check,)) for obs in observations]
        checked = [jnp.all(fits) for fits in results if fits is not True]
        if checked:
            fits = jnp.all(jnp.stack(checked))
            fits_everywhere = jax.lax.pmin(jnp.float32(fits), axis_name)
            metrics[metric] = jnp.where(fits_everywhere > 0, 1.0, jnp.nan)
    return metrics


def fault_in(obs: Any, spec: EnvSpec, checks: tuple[Check, ...] = CHECKS) -> str:
    """Name a part of `obs` [..., *obs], host arrays, that fails a check, with an example.

    Returns:
        A sentence; "" if all parts pass.
    """
    for name, leaf, values in leaves(spec.observation_space, obs):
        for check in checks:
            fits = check(name, leaf, values, np)
            if fits is None or np.all(fits):
                continue
            failing = np.asarray(values)[~fits].reshape(-1, *leaf.shape)
            example = shortened(f"{failing[0].tolist()}")
            part = f"the observation {name}".strip()
            required = _requirement(name, leaf, check, failing[0])
            return f"{part} of {spec.name} is {example}, not {required}"
    return ""


def _requirement(name: str, leaf: Leaf, check: Check, example: np.ndarray) -> str:
    """The condition that a check tests, in words, where an example [*shape] fails it."""
    if check is are_finite:
        return f"finite numbers within -{LARGEST:.2g} to {LARGEST:.2g}"
    if check is are_bytes_in_bounds and isinstance(leaf, Box):
        low, size = byte_range(leaf)
        high = low + size
        place = tuple(np.argwhere((example < low) | (example > high))[0].tolist())
        is_same = np.all(low == low[place]) and np.all(high == high[place])
        where = "" if is_same else f" at {list(place)}"
        return f"within {low[place]:g} to {high[place]:g}{where}, as its space has it"
    if is_mask(name):
        return "0 for illegal and 1 for legal actions"
    return "0 or 1 each" if isinstance(leaf, Box) else f"in its space, {leaf}"


def _all_of_element(fits: Any, leaf: Leaf, numpy: Any) -> Any:
    """Mark the elements [...] whose numbers [..., *shape] all fit."""
    first = fits.ndim - len(leaf.shape)
    return numpy.all(fits, axis=tuple(range(first, fits.ndim)))
