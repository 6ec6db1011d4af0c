"""Observation and action spaces as small records, and `EnvSpec`, what a policy has to know of its
environment.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.envs.numbers import HIGHEST, is_numeric, narrow


class Discrete(NamedTuple):
    """Integers 0 .. n-1, shape []."""

    n: int
    dtype: Any = None  # NumPy's type of an action at the environment; None is int32
    shape = ()

    @property
    def nvec(self) -> tuple[int, ...]:
        return (self.n,)

    def __repr__(self) -> str:
        return f"Discrete(n={self.n})"


class MultiDiscrete(NamedTuple):
    """An array of integers, its component i, in order, in 0 .. nvec[i]-1. Networks have them as a
    vector.
    """

    nvec: tuple[int, ...]
    dims: tuple[int, ...] | None = None  # the shape at the environment; None is a vector
    dtype: Any = None  # as that of `Discrete`

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),) if self.dims is None else self.dims

    def __repr__(self) -> str:
        alike = len(set(self.nvec)) == 1 < len(self.nvec)
        numbers = f"[{self.nvec[0]}] * {len(self.nvec)}" if alike else f"{list(self.nvec)}"
        return (
            f"MultiDiscrete({numbers}{'' if self.dims is None else f', shape={list(self.dims)}'})"
        )


class Box(NamedTuple):
    """Arrays between `low` and `high` (arrays of `shape`, possibly infinite)."""

    low: np.ndarray
    high: np.ndarray
    shape: tuple[int, ...]
    dtype: Any = None  # NumPy's type of an action at the environment; None is float32

    def __repr__(self) -> str:
        kind = "" if self.dtype is None else f" of {self.dtype}"
        return f"Box{list(self.shape)}{kind}"


UNBOUNDED = 2.0**62  # bounds of whole numbers from here on say that there are none
ILLEGAL = -1e9  # a logit whose probability is 0, and which is finite, as 0 times infinity is not
Leaf = Discrete | MultiDiscrete | Box
Space = Leaf | dict[str, "Space"] | tuple["Space", ...]
"""A leaf, or a dictionary (sorted by name) or tuple of spaces, whose elements are dictionaries or
tuples of theirs.
"""


def box(shape: tuple[int, ...], low: float = -np.inf, high: float = np.inf) -> Box:
    """Arrays with the same bounds everywhere."""
    return Box(*(np.full(shape, bound, np.float32) for bound in (low, high)), tuple(shape))


def convert(space: Any, what: str) -> Space:
    """Our record of a gymnax or gymnasium space, recognised by its attributes; ours stay as they
    are.

    A Tuple of nothing but Discrete actions is MultiDiscrete, as is MultiBinary. Raises ValueError,
    naming `what` the space is for, where it is none of Discrete, MultiDiscrete, MultiBinary and
    Box, nor a Dict or Tuple of such, and where nobody could act in it.
    """
    acting = what.startswith("action")
    if hasattr(space, "nvec") or hasattr(space, "n"):
        _check_choices(space, what)
        return space if isinstance(space, (Discrete, MultiDiscrete)) else _choices(space, acting)
    if hasattr(space, "low"):
        _check_bounds(space, what)
        return _bounds_of_actions(space, what) if acting else _box_seen(space)
    parts = getattr(space, "spaces", space)
    if isinstance(parts, Mapping) and parts:
        if unnamed := [name for name in parts if not isinstance(name, str)]:
            raise ValueError(f"{what} has a part {unnamed[0]!r}: names must be strings")
        converted = {name: convert(parts[name], f"{what} {name}") for name in sorted(parts)}
        _check_names(converted, what)
        return converted
    is_one_of = any(kind.__name__ == "OneOf" for kind in type(space).__mro__)
    if isinstance(parts, (tuple, list)) and parts and not is_one_of:
        converted = tuple(convert(part, f"{what} {index}") for index, part in enumerate(parts))
        if acting and all(isinstance(part, Discrete) for part in converted):
            dtypes = {part.dtype for part in converted}
            dtype = dtypes.pop() if len(dtypes) == 1 else None
            return MultiDiscrete(tuple(part.n for part in converted), dtype=dtype)
        return converted
    raise ValueError(
        f"{what} {space!r} is not supported: it must be Discrete, MultiDiscrete, "
        "MultiBinary, Box, or a Dict or Tuple"
    )


MASK = "action_mask"  # parts of observations with a meaning, see masks.py
PRIVILEGED = "privileged_state"


def _check_names(parts: dict[str, Space], what: str) -> None:
    """Raise ValueError where a checkpoint could not keep what is stored under the names of
    parts.
    """
    for name in parts:
        if ".." in name or not name.isprintable():
            raise ValueError(f'{what} has a part {name!r}: names must be printable, without ".."')
        if "/" in name and name.split("/")[0] in (MASK, PRIVILEGED):
            raise ValueError(
                f"{what} has a part {name!r}: what begins so is hidden from networks; rename it"
            )
    names = [leaf[0] for leaf in leaves(parts)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{what} has two parts {min(twice)!r}: rename one of them")


def _choices(space: Any, acting: bool) -> Leaf:
    """A space of choices: Discrete, MultiDiscrete, or MultiBinary, which is a Box to who observes
    it.
    """
    dtype = _unusual(space, np.int32) if acting else None
    shape = tuple(getattr(space, "shape", None) or np.shape(getattr(space, "nvec", 0)))
    if not shape:
        return Discrete(int(space.nvec if hasattr(space, "nvec") else space.n), dtype)
    if not (acting or hasattr(space, "nvec")):
        return box(shape, 0.0, 1.0)._replace(dtype=np.dtype(bool))
    counts = space.nvec if hasattr(space, "nvec") else np.full(shape, 2)
    nvec = tuple(int(n) for n in np.ravel(counts))
    return MultiDiscrete(nvec, None if len(shape) == 1 else shape, dtype)


def _box_seen(space: Any) -> Box:
    """A Box of observations, whose bounds need not be exact; one that rules out nothing, such as
    NaN, is infinite.
    """
    shape = tuple(space.shape)
    with np.errstate(over="ignore"):  # the largest number of 64 bits, where others say infinity
        low, high = (
            np.broadcast_to(np.asarray(bound, np.float32), shape)
            for bound in (space.low, space.high)
        )
    low = np.where(low < np.inf, low, -np.inf)
    high = np.where(high > -np.inf, high, np.inf)
    return Box(low, high, shape)


# Types with which networks do not compute
UNCOMMON = "float8_", "float6_", "float4_", "int4", "uint4", "int2", "uint2"
MOST_WHOLE = 2**24  # the largest number up to which 32-bit floats have all whole ones


def _bounds_of_actions(space: Any, what: str) -> Box:
    """A Box of actions, whose bounds are the outermost numbers of 32 bits that are within those of
    its own type.

    Raises ValueError where there are none between them, or where floats of 32 bits do not have all
    whole numbers there.
    """
    shape = tuple(space.shape)
    dtype = _unusual(space, np.float32)
    own = np.dtype(getattr(space, "dtype", None) or np.float32)
    bounds = (
        np.broadcast_to(np.asarray(bound), shape).astype(np.float64)
        for bound in (space.low, space.high)
    )
    low, high = bounds
    with np.errstate(over="ignore"):
        if jnp.issubdtype(own, jnp.floating):  # a bound is what it is in the space's own type
            low = low.astype(own).astype(np.float64)
            high = high.astype(own).astype(np.float64)
        else:
            low = np.ceil(low)
            high = np.floor(high)
        least = low.astype(np.float32)
        most = high.astype(np.float32)
    # The largest number of 64 bits, where others say infinity, stays infinite
    least = np.where(
        np.isfinite(least) & (least < low), np.nextafter(least, np.float32(np.inf)), least
    )
    most = np.where(
        np.isfinite(most) & (most > high), np.nextafter(most, np.float32(-np.inf)), most
    )
    if not jnp.issubdtype(own, jnp.floating) and np.any(
        np.maximum(np.abs(low), np.abs(high)) > MOST_WHOLE
    ):
        told = (
            f"whole numbers must be within -{MOST_WHOLE:,} .. {MOST_WHOLE:,}, as floats "
            "of 32 bits have them"
        )
        raise ValueError(f"{what} {space!r} is not supported: {told}")
    if not np.all((least <= most) & (least < np.inf) & (most > -np.inf)):  # also where one is NaN
        raise ValueError(
            f"{what} {space!r} is not supported: no number of 32 bits is between its bounds "
            "everywhere"
        )
    return Box(low=least, high=most, shape=shape, dtype=dtype)


def _unusual(space: Any, usual: Any) -> np.dtype | None:
    """The type of a space's elements, in at most 32 bits as JAX has them; None where that is the
    `usual` one.
    """
    own = np.dtype(getattr(space, "dtype", None) or usual)
    own = {8: np.dtype(f"{own.kind}4")}.get(own.itemsize, own) if own.kind in "fiu" else own
    return None if own == usual else own


def _check_choices(space: Any, what: str) -> None:
    """Raise ValueError where the choices of a space do not begin at 0, or cannot be counted in
    their own type.
    """
    if np.any(getattr(space, "start", 0)):
        raise ValueError(f"{what} {space!r} does not start at 0, which is not supported")
    told = f"{what} {space!r} is not supported"
    has_counts = hasattr(space, "nvec")
    counts = np.asarray(space.nvec if has_counts else space.n)
    if counts.dtype.kind not in "iu" or np.any(counts < 1):
        raise ValueError(f"{told}: numbers of choices must be whole and at least 1")
    if np.any(counts > HIGHEST):
        raise ValueError(f"{what} {space!r} has more than {HIGHEST:,} choices")
    shape = tuple(getattr(space, "shape", None) or ())
    if (
        has_counts
        and shape
        and (math.prod(shape) != counts.size or (counts.ndim > 1 and counts.shape != shape))
    ):
        raise ValueError(
            f"{told}: it has shape {shape} and numbers of choices of shape {counts.shape}"
        )
    if not (has_counts or shape) and counts.ndim:
        raise ValueError(
            f"{told}: its number of choices has shape {counts.shape}, it is not one number"
        )
    # MultiBinary has `n` bits
    highest = 1 if not has_counts and shape else int(counts.max(initial=1)) - 1
    dtype = np.dtype(getattr(space, "dtype", None) or np.int32)
    is_bit = dtype.kind == "b" and highest <= 1
    if not is_bit and (dtype.kind not in "iu" or highest > np.iinfo(dtype).max):
        raise ValueError(f"{told}: its type {dtype} does not hold its choice {highest}")


def _check_bounds(space: Any, what: str) -> None:
    """Raise ValueError where a Box is not of real numbers, or has finite bounds that its own type
    does not hold.
    """
    told = f"{what} {space!r} is not supported"
    dtype = np.dtype(getattr(space, "dtype", None) or np.float32)
    if dtype.itemsize > 8 or dtype.name.startswith(UNCOMMON) or not is_numeric(dtype):
        raise ValueError(
            f"{told}: its type is {dtype}, which is none of real numbers in 8 to 64 bits"
        )
    if jnp.issubdtype(dtype, jnp.floating):
        return
    lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for bound in (space.low, space.high):
        bound = np.asarray(bound)
        if np.any(np.isfinite(bound) & ((bound < lowest) | (bound > highest))):
            raise ValueError(
                f"{told}: its type {dtype} holds {lowest} to {highest}, which its bounds exceed"
            )


def as_seen(name: str, space: Space, obs: Any) -> tuple[Space, Any]:
    """A space with the shapes of an observation, and the observation's types: what is declared is
    sometimes wrong.
    """

    def fitting(leaf, x):
        if not isinstance(leaf, Box) and (
            x.shape != leaf.shape or jnp.issubdtype(x.dtype, jnp.floating)
        ):
            given = f"observations of type {x.dtype} and shape {x.shape}"
            raise UsageError(
                f"environment {name}: it gives {given} where its space is {leaf} of shape "
                f"{leaf.shape}"
            )
        if isinstance(leaf, Box) and x.dtype in (np.int32, np.uint32):
            bounds = np.abs(np.stack([leaf.low, leaf.high]))
            largest = np.max(bounds, where=bounds < UNBOUNDED, initial=0)
            if largest > np.float32(np.iinfo(x.dtype).max):
                raise UsageError(
                    f"environment {name}: {x.dtype} does not hold {largest:g}, which its "
                    "space declares"
                )
        if jnp.dtype(x.dtype).itemsize > 4 or x.dtype.name.startswith(UNCOMMON):
            raise UsageError(
                f"environment {name}: networks cannot take observations of type {x.dtype}: "
                "give float32"
            )
        return (
            leaf if not isinstance(leaf, Box) or leaf.shape == x.shape else _of_shape(leaf, x.shape)
        )

    if (found := jax.tree.structure(obs)) != jax.tree.structure(map_leaves(lambda leaf: 0, space)):
        raise UsageError(
            f"environment {name}: its observations have the structure {found}, their space "
            f"is {space}"
        )
    return map_leaves(fitting, space, obs), jax.tree.map(lambda x: x.dtype, obs)


def _of_shape(leaf: Box, shape: tuple[int, ...]) -> Box:
    """A Box of another shape, with the same bounds if those are the same everywhere, else without
    any.
    """
    bounds = [set(np.ravel(bound).tolist()) for bound in (leaf.low, leaf.high)]
    if any(len(numbers) != 1 for numbers in bounds):
        return box(shape)
    return box(shape, *(numbers.pop() for numbers in bounds))._replace(dtype=leaf.dtype)


def plain(obs: Any) -> Any:
    """An observation in dictionaries and tuples, whatever kinds of mappings and sequences a suite
    has.
    """
    if isinstance(obs, Mapping):
        return {str(name): plain(part) for name, part in obs.items()}
    return tuple(map(plain, obs)) if isinstance(obs, (tuple, list)) else obs


def map_leaves(function: Callable, space: Space, *trees: Any) -> Any:
    """`function` of each leaf of a space, and of what the trees, in which elements are, have for
    it; as such a tree.
    """
    return as_tree([function(*found) for _, *found in leaves(space, *trees)], space)


def as_tree(values: Iterable[Any], space: Space) -> Any:
    """An element of a space, with these values in place of its leaves; flax's own dictionaries
    become plain ones.
    """
    if isinstance(space, Leaf):
        return next(iter(values))
    rest = iter(values)
    parts = {key: as_tree(rest, part) for key, part in _items(space)}
    return parts if isinstance(space, Mapping) else tuple(parts.values())


def leaves(space: Space, *trees: Any, name: str = "") -> Iterator[tuple[Any, ...]]:
    """Of each leaf its name, such as `robot/joints`, the leaf, and what the trees have for it."""
    if isinstance(space, Leaf):
        yield name, space, *trees
        return
    for key, part in _items(space):
        yield from leaves(
            part, *(x[key] for x in trees), name=f"{name}/{key}" if name else str(key)
        )


def _items(space: Space) -> Iterable[tuple[Any, Space]]:
    return space.items() if isinstance(space, Mapping) else enumerate(space)


def batch_shape(obs: Any) -> tuple[int, ...]:
    """(B,) of a batch of observations [B, ...]."""
    return jax.tree.leaves(obs)[0].shape[:1]


def sample(key: jax.Array, space: Space, legal: jax.Array | None = None) -> Any:
    """A uniformly random element, of choices a `legal` [sum(nvec)] one if given; normal where a Box
    is unbounded.
    """
    return map_leaves(
        _sample_leaf, space, keys_of_parts(key, space), as_tree(masks_of_parts(legal, space), space)
    )


def _sample_leaf(leaf: Leaf, key: jax.Array, legal: jax.Array | None) -> jax.Array:
    if isinstance(leaf, Box):
        with np.errstate(over="ignore", invalid="ignore"):
            bounded = np.isfinite(leaf.high - leaf.low)  # else also where float32 has no such width
        low = np.where(bounded, leaf.low, 0)
        high = np.where(bounded, leaf.high, 1)
        uniform = jax.random.uniform(key, leaf.shape, minval=low, maxval=high)
        return jnp.where(bounded, uniform, jax.random.normal(key, leaf.shape))
    if legal is None:
        return jax.random.randint(key, leaf.shape, 0, jnp.array(leaf.nvec).reshape(leaf.shape))
    parts = jnp.split(jnp.where(legal, 0.0, ILLEGAL), np.cumsum(leaf.nvec)[:-1])
    keys = [key] if len(parts) == 1 else jax.random.split(key, len(parts))
    picks = [
        jax.random.categorical(*one).astype(jnp.int32) for one in zip(keys, parts, strict=True)
    ]
    return jnp.stack(picks).reshape(leaf.shape)


def choices_of(space: Space) -> list[int]:
    """How many choices each component of an action has; those of a Box have none to be masked."""
    return [n for _, leaf in leaves(space) if not isinstance(leaf, Box) for n in leaf.nvec]


def masks_of_parts(legal: jax.Array | None, space: Space) -> list[jax.Array | None]:
    """The part of `legal` [..., sum(nvec)] for each leaf of an action; None for a Box, and where
    there is none.
    """
    masks = []
    start = 0
    for _, leaf in leaves(space):
        size = sum(choices_of(leaf))
        masks.append(None if legal is None or not size else legal[..., start : start + size])
        start += size
    return masks


def clip(action: Any, space: Space, batch: tuple[int, ...] = (), np: Any = jnp) -> Any:
    """Actions [*batch, A] or [*batch, *shape] in shape and type of the environment, those of a Box
    clipped.

    Those that are whole numbers there become the nearest ones, as a cast hardly ever gives the
    highest. `np` may be NumPy.
    """

    def clipped(leaf, x):
        x = x.reshape(*batch, *leaf.shape)
        if isinstance(leaf, Box):
            x = np.clip(x, leaf.low, leaf.high)
        is_whole = leaf.dtype is not None and not jnp.issubdtype(leaf.dtype, jnp.floating)
        if is_whole and jnp.issubdtype(x.dtype, jnp.floating):
            x = np.rint(x)
        return x if leaf.dtype is None else x.astype(leaf.dtype)

    return map_leaves(clipped, space, action)


def encode(observation: jax.Array, space: Leaf) -> jax.Array:
    """A batch of raw observations as network input, float32: [..., *shape] or, one-hot, [...,
    sum(nvec)].

    Bytes become 0..1, see `byte_range`. Arrays that are not images [H, W, C] are flattened.
    """
    if not isinstance(space, Box):
        batch = observation.shape[: observation.ndim - len(space.shape)]
        components = observation.astype(jnp.int32).reshape(*batch, len(space.nvec))
        if len(set(space.nvec)) == 1:
            return jax.nn.one_hot(components, space.nvec[0]).reshape(
                *components.shape[:-1], sum(space.nvec)
            )
        parts = [jax.nn.one_hot(components[..., i], n) for i, n in enumerate(space.nvec)]
        return jnp.concatenate(parts, axis=-1)
    batch = observation.shape[: observation.ndim - len(space.shape)]
    shape = space.shape if is_image(space) else (math.prod(space.shape),)
    numbers = observation.astype(jnp.float32).reshape(*batch, *shape)
    if observation.dtype != jnp.uint8:
        return numbers
    low, size = (bound.reshape(shape) for bound in byte_range(space))
    numbers = numbers - low if np.any(low) else numbers
    return numbers / (size.flat[0] if len(set(size.flat)) == 1 else size)


def byte_range(space: Box) -> tuple[np.ndarray, np.ndarray]:
    """The lowest bytes, and how far the highest are from those, by the bounds of `space`; 0 and 255
    where it has none.

    There are none where they are infinite, or the same: then nobody knows what else comes.
    """
    low = np.maximum(space.low, 0)
    high = np.minimum(space.high, 255)
    known = np.isfinite(space.low) & np.isfinite(space.high) & (low < high)
    return np.where(known, low, 0), np.where(known, high - low, 255).astype(np.float32)


def is_bits(leaf: Leaf) -> bool:
    """Tell if an observation is of bits, as those of a MultiBinary are."""
    return isinstance(leaf, Box) and leaf.dtype == np.dtype(bool)


def flat_size(space: Space) -> int:
    """How many numbers an element is, encoded."""
    return sum(
        math.prod(leaf.shape) if isinstance(leaf, Box) else sum(leaf.nvec)
        for _, leaf in leaves(space)
    )


def keys_of_parts(key: jax.Array, space: Space) -> Any:
    """A key for each leaf; the key itself where there is one."""
    count = len(list(leaves(space)))
    return as_tree([key] if count == 1 else jax.random.split(key, count), space)


def is_image(space: Space) -> bool:
    return isinstance(space, Box) and len(space.shape) == 3


class EnvSpec(NamedTuple):
    """What a policy has to know of its environment."""

    name: str
    observation_space: Space
    obs_dtype: Any  # NumPy's type of an observation, a tree of types where it has parts
    action_space: Space
    # Names of parts that the environment gives as [C, H, W], not [H, W, C]
    channels_first: tuple[str, ...] = ()

    @property
    def obs_like(self) -> Any:
        """Shape and type of an observation."""
        return map_leaves(
            lambda leaf, dtype: jax.ShapeDtypeStruct(leaf.shape, dtype),
            self.observation_space,
            self.obs_dtype,
        )

    @property
    def given_like(self) -> Any:
        """Shape and type of an observation as the environment gives it."""
        found = []
        for name, leaf, like in leaves(self.observation_space, self.obs_like):
            channels_first = name in self.channels_first and is_image(leaf)
            shape = (like.shape[2], *like.shape[:2]) if channels_first else like.shape
            found.append(jax.ShapeDtypeStruct(shape, like.dtype))
        return as_tree(found, self.observation_space)

    def with_channels_last(self, obs: Any) -> Any:
        """Observations [..., *shape], as the environment gives them or with channels last already,
        with those last.
        """
        found = []
        for name, _, given, like, x in leaves(
            self.observation_space, self.given_like, self.obs_like, obs
        ):
            moves = name in self.channels_first and x.shape[-3:] == given.shape != like.shape
            numpy = jnp if isinstance(x, jax.Array) else np
            found.append(numpy.moveaxis(x, -3, -1) if moves else x)
        return as_tree(found, self.observation_space)

    def example_obs(self, *batch: int) -> Any:
        """A batch of observations, all zeros."""
        return jax.tree.map(lambda x: jnp.zeros((*batch, *x.shape), x.dtype), self.obs_like)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "observation_space": _to_json(self.observation_space),
            "obs_dtype": jax.tree.map(str, self.obs_dtype),
            "action_space": _to_json(self.action_space),
            "channels_first": list(self.channels_first),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "EnvSpec":
        """The inverse of `to_json`."""
        observation, action = (
            _from_json(stored[name]) for name in ("observation_space", "action_space")
        )
        dtype = map_leaves(
            lambda leaf, name: _narrow(leaf, _stored_dtype(name)), observation, stored["obs_dtype"]
        )
        return cls(
            str(stored["name"]),
            observation,
            dtype,
            action,
            tuple(map(str, stored.get("channels_first", ()))),
        )


def _narrow(leaf: Leaf, dtype: np.dtype) -> np.dtype:
    return narrow(dtype, leaf.low, leaf.high) if isinstance(leaf, Box) else narrow(dtype)


def _to_json(space: Space) -> dict[str, Any]:
    if isinstance(space, Mapping):
        return {"type": "Dict", "parts": {name: _to_json(part) for name, part in space.items()}}
    if not isinstance(space, Leaf):
        return {"type": "Tuple", "parts": list(map(_to_json, space))}
    stored = {"type": type(space).__name__, "shape": list(space.shape)}
    stored |= {} if space.dtype is None else {"dtype": str(space.dtype)}
    if isinstance(space, Discrete):
        return stored | {"n": space.n}
    if isinstance(space, MultiDiscrete):
        return stored | {"nvec": list(space.nvec)}
    # One number where all are the same, else all of them in order; None is unbounded
    for name in ("low", "high"):
        numbers = [float(x) if np.isfinite(x) else None for x in np.ravel(getattr(space, name))]
        stored[name] = numbers[0] if len(set(numbers)) == 1 else numbers
    return stored


def _stored_dtype(name: str) -> np.dtype:
    """Raise ValueError where a stored type is none of real numbers."""
    dtype = jnp.dtype(name)
    if not is_numeric(dtype):
        raise ValueError(f"{dtype} is no type of numbers")
    return dtype


MOST_STORED = 2**28  # numbers of an element of a space in a file
MOST_CHOICES = 100_000  # components of one


def _from_json(stored: dict[str, Any]) -> Space:
    if stored["type"] == "Dict":
        return {name: _from_json(part) for name, part in stored["parts"].items()}
    if stored["type"] == "Tuple":
        return tuple(map(_from_json, stored["parts"]))
    shape = tuple(stored["shape"])
    if math.prod(shape) > MOST_STORED or len(stored.get("nvec", ())) > MOST_CHOICES:
        raise ValueError(f"a space of shape {shape} is too large to be one of a run")
    dtype = stored.get("dtype") and _stored_dtype(stored["dtype"])
    if stored["type"] == "Discrete":
        return Discrete(stored["n"], dtype)
    if stored["type"] == "MultiDiscrete":
        return MultiDiscrete(tuple(stored["nvec"]), None if len(shape) == 1 else shape, dtype)
    low, high = (np.array(stored[name], np.float32) for name in ("low", "high"))  # None becomes NaN
    low = np.where(np.isnan(low), -np.inf, low)
    high = np.where(np.isnan(high), np.inf, high)
    low, high = (np.broadcast_to(x.reshape(shape if x.ndim else ()), shape) for x in (low, high))
    return Box(low=low, high=high, shape=shape, dtype=dtype)
