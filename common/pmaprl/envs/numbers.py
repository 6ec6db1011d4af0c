"""Casts of 64 bits to the 32 with which devices compute; no value wraps or overflows in silence."""

from typing import Any

import jax.numpy as jnp
import numpy as np

LOWEST = -(2**31)  # of int32
HIGHEST = 2**31 - 1


def narrow(dtype: Any, low: Any = LOWEST, high: Any = HIGHEST) -> np.dtype:
    """The type of 32 bits or fewer for numbers of `dtype` between `low` and `high`.

    Whole numbers of 64 bits stay whole if int32 holds their bounds. Others become floats, which
    keep the scale. The bounds may be arrays.
    """
    dtype = np.dtype(dtype)
    if dtype.itemsize <= 4 or dtype.kind not in "iuf":
        return dtype
    if dtype.kind == "f" or np.size(low) == 0:
        return np.dtype(np.float32)
    fits = float(np.min(low)) >= LOWEST and float(np.max(high)) <= HIGHEST
    return np.dtype(np.int32 if fits else np.float32)


def is_numeric(dtype: Any) -> bool:
    """True if a type is of real numbers or bools, JAX's own types among them."""
    kinds = jnp.bool_, jnp.integer, jnp.floating
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def cast(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Convert an array to another type.

    Raises:
        OverflowError: the type does not hold a value, which the message names.
    """
    if np.can_cast(x.dtype, dtype, "safe"):
        return x.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        new = x.astype(dtype)
        if new.dtype.kind == "f":
            is_lost = np.isinf(new) & np.isfinite(x)
        else:
            has_other_sign = (new < 0) != (x < 0)
            is_lost = (new.astype(x.dtype) != x) | has_other_sign
    if np.any(is_lost):
        first = x[is_lost].flat[0]
        raise OverflowError(f"{first}, which {new.dtype} does not hold")
    return new
