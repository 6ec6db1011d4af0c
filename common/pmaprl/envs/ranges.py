"""Values that an observation must not have, as its space rules them out or no network computes with
them.

These are choices outside of their space, bytes outside of their bounds, masks and bits of more than
0 and 1, and numbers that are not finite. Networks would see zeros alone for such a choice, and
whatever is not 0 would be legal.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import shortened
from pmaprl.envs.bytes import IN_BOUNDS, is_bytes
from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import Box, EnvSpec, Leaf, Space, byte_range, is_bits, leaves

IN_SPACE = "obs/choices_in_space_min"  # a metric
OUTSIDE = (
    "has an observation that its space rules out, such as a choice beyond it, or an "
    "action_mask of more than "
)
OUTSIDE += "0 and 1, or one that is not finite"

Check = Callable[[str, Leaf, Any, Any], Any]
"""Marks, of a part's name, its leaf, elements [..., *shape] and NumPy or JAX's, which elements fit;
None is all.
"""


def are_choices(name: str, leaf: Leaf, x: Any, numpy: Any) -> Any:
    """Mark choices that their space has, and masks and bits that are 0 or 1."""
    if is_mask(name) or is_bits(leaf):
        return None if x.dtype == bool else _whole((x == 0) | (x == 1), leaf, numpy)
    if isinstance(leaf, Box):
        return None
    count = np.reshape(np.array(leaf.nvec), leaf.shape)
    return _whole((x >= 0) & (x < count), leaf, numpy)


def are_bytes_in_bounds(name: str, leaf: Leaf, x: Any, numpy: Any) -> Any:
    """Mark bytes within the bounds of their space, where these are not 0 and 255."""
    if not is_bytes(leaf, x.dtype):
        return None
    low, size = byte_range(leaf)
    if np.all(size == 255):
        return None
    return _whole((x >= low) & (x <= low + size), leaf, numpy)


def are_finite(name: str, leaf: Leaf, x: Any, numpy: Any) -> Any:
    """Mark numbers that are finite."""
    return _whole(numpy.isfinite(x), leaf, numpy) if jnp.issubdtype(x.dtype, jnp.floating) else None


CHECKS = are_choices, are_bytes_in_bounds, are_finite


def in_space(obs: Any, space: Space, numpy: Any = jnp, checks: tuple[Check, ...] = CHECKS) -> Any:
    """Mark where all parts of `obs` [..., *obs] pass these checks, [...]; True where there is
    nothing to check.
    """
    found = [check(*part, numpy) for part in leaves(space, obs) for check in checks]
    return reduce(lambda x, y: x & y, (fits for fits in found if fits is not None), True)


def range_metrics(space: Space, axis_name: str, *observations: Any) -> dict[str, jax.Array]:
    """Tell if bytes, choices and masks of observations are within what their space says, on all
    devices.

    NaN where they are not: the run ends with that, see `pmaprl.runs.recorder`.
    """
    metrics = {}
    for metric, check in ((IN_BOUNDS, are_bytes_in_bounds), (IN_SPACE, are_choices)):
        found = [in_space(obs, space, checks=(check,)) for obs in observations]
        if checked := [jnp.all(fits) for fits in found if fits is not True]:
            fits = jax.lax.pmin(jnp.float32(jnp.all(jnp.stack(checked))), axis_name)
            metrics[metric] = jnp.where(fits > 0, 1.0, jnp.nan)
    return metrics


def fault_in(obs: Any, spec: EnvSpec, checks: tuple[Check, ...] = CHECKS) -> str:
    """Say what of `obs` [..., *obs], host arrays, fails one of the checks, with an example; ""
    where nothing does.
    """
    for name, leaf, x in leaves(spec.observation_space, obs):
        for check in checks:
            fits = check(name, leaf, x, np)
            if fits is None or np.all(fits):
                continue
            example = np.asarray(x)[~fits].reshape(-1, *leaf.shape)[0].tolist()
            what = f"the observation {name}".strip()
            return (
                f"{what} of {spec.name} is {shortened(f'{example}')}, not "
                f"{_wanted(name, leaf, check)}"
            )
    return ""


def _wanted(name: str, leaf: Leaf, check: Check) -> str:
    if check is are_finite:
        return "finite"
    if check is are_bytes_in_bounds:
        low, size = byte_range(leaf)
        return f"within {np.min(low):g} to {np.max(low + size):g}, as its space has it"
    if is_mask(name):
        return "0 for illegal and 1 for legal actions"
    return "0 or 1 each" if isinstance(leaf, Box) else f"in its space, {leaf}"


def _whole(fits: Any, leaf: Leaf, numpy: Any) -> Any:
    """Mark the elements [...] of which everything [..., *shape] fits."""
    return numpy.all(fits, axis=tuple(range(fits.ndim - len(leaf.shape), fits.ndim)))
