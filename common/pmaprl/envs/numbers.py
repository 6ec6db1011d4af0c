"""Numbers of 64 bits in the 32 with which devices compute: no value wraps or becomes infinite in
silence.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

LOWEST = -(2**31)  # of int32
HIGHEST = 2**31 - 1


def narrow(dtype: Any, low: Any = LOWEST, high: Any = HIGHEST) -> np.dtype:
    """The type of 32 bits or fewer for numbers of `dtype` between `low` and `high`, which may be
    arrays.

    Whole numbers of 64 bits stay whole where int32 holds their bounds; others become floats, which
    keep the scale.
    """
    dtype = np.dtype(dtype)
    if dtype.itemsize <= 4 or dtype.kind not in "iuf":
        return dtype
    if dtype.kind == "f" or np.size(low) == 0:
        return np.dtype(np.float32)
    fits = float(np.min(low)) >= LOWEST and float(np.max(high)) <= HIGHEST
    return np.dtype(np.int32 if fits else np.float32)


def is_numeric(dtype: Any) -> bool:
    """Tell if a type is of real numbers or truths, JAX's own among them."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))


def cast(x: np.ndarray, dtype: Any) -> np.ndarray:
    """`x` in another type. Raises OverflowError, with the first such value, where that does not
    hold one of `x`.
    """
    if np.can_cast(x.dtype, dtype, "safe"):
        return x.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        new = x.astype(dtype)
        if new.dtype.kind == "f":
            lost = np.isinf(new) & np.isfinite(x)
        else:
            lost = (new.astype(x.dtype) != x) | ((new < 0) != (x < 0))
    if np.any(lost):
        raise OverflowError(f"{x[lost].flat[0]}, which {new.dtype} does not hold")
    return new
