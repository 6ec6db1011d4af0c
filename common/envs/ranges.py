"""Values that an observation must not have: choices outside of their space, and masks of more than 0 and 1.

Networks would see zeros alone for such a choice, and whatever is not 0 would be a legal action.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.envs.bytes import byte_metrics
from common.envs.masks import is_mask
from common.envs.spaces import Box, EnvSpec, Leaf, Space, leaves

IN_SPACE = "obs/choices_in_space_min"  # a metric
OUTSIDE = "has a choice outside of its space, or an action_mask of more than 0 and 1"


def in_space(obs: Any, space: Space, numpy: Any = jnp) -> jax.Array | np.ndarray | bool:
    """Mark where choices and masks of `obs` [..., *obs] are elements of their space, [...]; True without any."""
    fits = True
    for name, leaf, x in leaves(space, obs):
        if _may_be_outside(name, leaf, x):
            fits = fits & _fits(name, leaf, x, numpy)
    return fits


def range_metrics(obs: Any, space: Space, axis_name: str) -> dict[str, jax.Array]:
    """Tell if bytes, choices and masks of observations are within what their space says, on all devices.

    NaN where they are not: the run ends with that, see `common.runs.recorder`.
    """
    found = byte_metrics(obs, space, axis_name)
    fits = in_space(obs, space)
    if fits is True:
        return found
    fewest = jax.lax.pmin(jnp.min(jnp.float32(fits)), axis_name)
    return found | {IN_SPACE: jnp.where(fewest > 0, 1.0, jnp.nan)}


def fault_in(obs: Any, spec: EnvSpec) -> str:
    """Say what of `obs` [..., *obs], host arrays, is not in its space, with an example; "" where everything is."""
    for name, leaf, x in leaves(spec.observation_space, obs):
        if not _may_be_outside(name, leaf, x):
            continue
        fits = _fits(name, leaf, x, np)
        if not np.all(fits):
            example = np.asarray(x)[~fits][0].tolist()
            what = f"the observation {name}".strip()
            space = "0 for illegal and 1 for legal actions" if is_mask(name) else f"in its space, {leaf}"
            return f"{what} of {spec.name} is {example}, not {space}"
    return ""


def _may_be_outside(name: str, leaf: Leaf, x: Any) -> bool:
    return x.dtype != bool and (is_mask(name) or not isinstance(leaf, Box))


def _fits(name: str, leaf: Leaf, x: Any, numpy: Any) -> Any:
    """Mark which of the elements `x` [..., *shape] are in their space, [...]."""
    if is_mask(name):
        fits = (x == 0) | (x == 1)
    else:
        count = np.reshape(np.array(leaf.nvec), leaf.shape)
        fits = (x >= 0) & (x < count)
    return numpy.all(fits, axis=tuple(range(x.ndim - len(leaf.shape), x.ndim)))
