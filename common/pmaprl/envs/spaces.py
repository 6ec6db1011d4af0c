"""Observation and action spaces as small records, and `EnvSpec`, the interface of a policy."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

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
    """An array of integers, of which component i, in order, is in 0 .. nvec[i]-1.

    Networks have the components as a vector.
    """

    nvec: tuple[int, ...]
    dims: tuple[int, ...] | None = None  # the shape at the environment; None is a vector
    dtype: Any = None  # NumPy's type of an action at the environment; None is int32

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),) if self.dims is None else self.dims

    def __repr__(self) -> str:
        numbers = f"{list(self.nvec)}"
        if len(self.nvec) > 1 and len(set(self.nvec)) == 1:
            numbers = f"[{self.nvec[0]}] * {len(self.nvec)}"
        if self.dims is None:
            return f"MultiDiscrete({numbers})"
        return f"MultiDiscrete({numbers}, shape={list(self.dims)})"


class Box(NamedTuple):
    """Arrays between `low` and `high` (arrays of `shape`, possibly infinite)."""

    low: np.ndarray
    high: np.ndarray
    shape: tuple[int, ...]
    dtype: Any = None  # NumPy's type of an action at the environment; None is float32

    def __repr__(self) -> str:
        kind = "" if self.dtype is None else f" of {self.dtype}"
        return f"Box{list(self.shape)}{kind}"


UNBOUNDED = 2.0**62  # bounds of whole numbers from here on mean that there are none
ILLEGAL = -1e9  # logit of an illegal action; finite, because 0 times infinity is no number
Leaf = Discrete | MultiDiscrete | Box
Parts = dict[str, "Space"] | tuple["Space", ...]
"""A dictionary (sorted by name) or tuple of spaces."""
Space = Leaf | Parts
"""A leaf, or a dictionary or tuple of spaces.

Elements of a dictionary or tuple of spaces are dictionaries or tuples of elements.
"""


SpaceT = TypeVar("SpaceT", bound=Leaf)


def are_all(parts: Sequence[Space], kind: type[SpaceT]) -> TypeGuard[Sequence[SpaceT]]:
    """True if all `parts` are spaces of this kind."""
    return all(isinstance(part, kind) for part in parts)


def box(shape: tuple[int, ...], low: float = -np.inf, high: float = np.inf) -> Box:
    """Arrays with the same bounds everywhere."""
    shape = tuple(shape)
    return Box(
        low=np.full(shape, low, np.float32),
        high=np.full(shape, high, np.float32),
        shape=shape,
    )


def convert(space: Any, what: str) -> Space:
    """Convert a gymnax or gymnasium space, recognized by its attributes, to our record.

    A Tuple of nothing but Discrete actions becomes MultiDiscrete, and so does MultiBinary.

    Args:
        space: the space; one of ours stays as it is.
        what: use of the space, for messages; it begins with "action" for actions.

    Raises:
        ValueError: the space is none of Discrete, MultiDiscrete, MultiBinary and Box, nor a Dict or
            Tuple of these, or no policy could act in it.
    """
    acting = what.startswith("action")
    if hasattr(space, "nvec") or hasattr(space, "n"):
        _check_choices(space, what)
        return space if isinstance(space, (Discrete, MultiDiscrete)) else _choices(space, acting)
    if hasattr(space, "low"):
        _check_bounds(space, what)
        return _bounds_of_actions(space, what) if acting else _bounds_of_observations(space)
    parts = getattr(space, "spaces", space)
    if isinstance(parts, Mapping) and parts:
        unnamed = [name for name in parts if not isinstance(name, str)]
        if unnamed:
            raise ValueError(f"{what} has a part {unnamed[0]!r}: names must be strings")
        converted = {name: convert(parts[name], f"{what} {name}") for name in sorted(parts)}
        _check_names(converted, what)
        return converted
    is_one_of = any(kind.__name__ == "OneOf" for kind in type(space).__mro__)
    if isinstance(parts, (tuple, list)) and parts and not is_one_of:
        converted = [convert(part, f"{what} {index}") for index, part in enumerate(parts)]
        if acting and are_all(converted, Discrete):
            return _joined(converted)
        return tuple(converted)
    raise ValueError(
        f"{what} {space!r} is not supported: it must be Discrete, MultiDiscrete, "
        "MultiBinary, Box, or a Dict or Tuple"
    )


def _joined(parts: Sequence[Discrete]) -> MultiDiscrete:
    """Join choices to one action."""
    dtypes = {part.dtype for part in parts}
    nvec = tuple(part.n for part in parts)
    return MultiDiscrete(nvec, dtype=dtypes.pop() if len(dtypes) == 1 else None)


MASK = "action_mask"  # parts of observations with a meaning, see masks.py
PRIVILEGED = "privileged_state"


def _check_names(parts: dict[str, Space], what: str) -> None:
    """Raise ValueError if a checkpoint could not store arrays under the names of parts."""
    for name in parts:
        if ".." in name or not name.isprintable():
            raise ValueError(f'{what} has a part {name!r}: names must be printable, without ".."')
        if "/" in name and name.split("/")[0] in (MASK, PRIVILEGED):
            raise ValueError(
                f"{what} has a part {name!r}: what begins so is hidden from networks; rename it"
            )
    names = [leaf[0] for leaf in leaves(parts)]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"{what} has two parts {min(repeated)!r}: rename one of them")


def _choices(space: Any, acting: bool) -> Leaf:
    """A space of choices: Discrete, MultiDiscrete, or MultiBinary, which is observed as a Box."""
    has_counts = hasattr(space, "nvec")
    dtype = _unusual(space, np.int32) if acting else None
    shape = tuple(getattr(space, "shape", None) or np.shape(getattr(space, "nvec", 0)))
    if not shape:
        count = space.nvec if has_counts else space.n
        return Discrete(int(count), dtype)
    if not acting and not has_counts:
        return box(shape, 0.0, 1.0)._replace(dtype=np.dtype(bool))
    counts = space.nvec if has_counts else np.full(shape, 2)
    nvec = tuple(np.ravel(counts).astype(int).tolist())
    return MultiDiscrete(nvec, None if len(shape) == 1 else shape, dtype)


def _bounds_of_observations(space: Any) -> Box:
    """A Box of observations, whose bounds need not be exact.

    A bound that rules out nothing, such as NaN, becomes infinite.
    """
    shape = tuple(map(int, space.shape))  # NumPy's numbers are none of JSON
    with np.errstate(over="ignore"):  # the largest number of 64 bits may stand for infinity
        low = np.broadcast_to(np.asarray(space.low, np.float32), shape)
        high = np.broadcast_to(np.asarray(space.high, np.float32), shape)
    low = np.where(low < np.inf, low, -np.inf)
    high = np.where(high > -np.inf, high, np.inf)
    return Box(low, high, shape)


# Types with which networks do not compute
UNCOMMON = "float8_", "float6_", "float4_", "int4", "uint4", "int2", "uint2"
MOST_WHOLE = 2**24  # floats of 32 bits have all whole numbers up to this one


def _bounds_of_actions(space: Any, what: str) -> Box:
    """A Box of actions with the outermost bounds of 32 bits that are within its own ones.

    Raises:
        ValueError: no number of 32 bits is between the bounds, or floats of 32 bits do not have all
            whole numbers there.
    """
    shape = tuple(map(int, space.shape))  # NumPy's numbers are none of JSON
    dtype = _dtype_of(space, np.float32)
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    low = np.broadcast_to(np.asarray(space.low), shape).astype(np.float64)
    high = np.broadcast_to(np.asarray(space.high), shape).astype(np.float64)
    with np.errstate(over="ignore"):
        if is_floating:  # a bound is rounded to the space's own type
            low = low.astype(dtype).astype(np.float64)
            high = high.astype(dtype).astype(np.float64)
        else:
            low = np.ceil(low)
            high = np.floor(high)
        least = low.astype(np.float32)
        most = high.astype(np.float32)
    # The largest number of 64 bits may stand for infinity, and stays infinite
    is_below = np.isfinite(least) & (least < low)
    is_above = np.isfinite(most) & (most > high)
    least = np.where(is_below, np.nextafter(least, np.float32(np.inf)), least)
    most = np.where(is_above, np.nextafter(most, np.float32(-np.inf)), most)
    largest = np.maximum(np.abs(low), np.abs(high))
    if not is_floating and np.any(largest > MOST_WHOLE):
        raise ValueError(
            f"{what} {space!r} is not supported: whole numbers must be within -{MOST_WHOLE:,} .. "
            f"{MOST_WHOLE:,}, as floats of 32 bits have them"
        )
    has_numbers = (least <= most) & (least < np.inf) & (most > -np.inf)  # False with NaN
    if not np.all(has_numbers):
        raise ValueError(
            f"{what} {space!r} is not supported: no number of 32 bits is between its bounds "
            "everywhere"
        )
    return Box(low=least, high=most, shape=shape, dtype=_unusual(space, np.float32))


def _dtype_of(space: Any, usual: Any) -> np.dtype:
    """The type of a space's elements; the `usual` one if the space does not say."""
    return np.dtype(getattr(space, "dtype", None) or usual)


def _unusual(space: Any, usual: Any) -> np.dtype | None:
    """The type of a space's elements, in at most 32 bits; None if it is the `usual` one."""
    dtype = _dtype_of(space, usual)
    if dtype.kind in "fiu" and dtype.itemsize == 8:
        dtype = np.dtype(f"{dtype.kind}4")
    return None if dtype == usual else dtype


def _check_choices(space: Any, what: str) -> None:
    """Raise ValueError if choices do not begin at 0, or cannot be counted in their own type."""
    if np.any(getattr(space, "start", 0)):
        raise ValueError(f"{what} {space!r} does not start at 0, which is not supported")
    refusal = f"{what} {space!r} is not supported"
    has_counts = hasattr(space, "nvec")
    counts = np.asarray(space.nvec if has_counts else space.n)
    if counts.dtype.kind not in "iu" or np.any(counts < 1):
        raise ValueError(f"{refusal}: numbers of choices must be whole and at least 1")
    if np.any(counts > HIGHEST):
        raise ValueError(f"{what} {space!r} has more than {HIGHEST:,} choices")
    shape = tuple(getattr(space, "shape", None) or ())
    if has_counts and shape:
        has_shape_of_space = counts.ndim <= 1 or counts.shape == shape
        if math.prod(shape) != counts.size or not has_shape_of_space:
            raise ValueError(
                f"{refusal}: it has shape {shape} and numbers of choices of shape {counts.shape}"
            )
    is_binary = any(kind.__name__ == "MultiBinary" for kind in type(space).__mro__)
    if not has_counts and shape and not is_binary:
        raise ValueError(f"{refusal}: it has shape {shape}, where choices of each are in nvec")
    if not has_counts and not shape and counts.ndim:
        raise ValueError(
            f"{refusal}: its number of choices has shape {counts.shape}, it is not one number"
        )
    highest = int(counts.max(initial=1)) - 1
    if not has_counts and shape:  # MultiBinary, with `n` bits
        highest = 1
    dtype = _dtype_of(space, np.int32)
    is_bit = dtype.kind == "b" and highest <= 1
    if not is_bit and (dtype.kind not in "iu" or highest > np.iinfo(dtype).max):
        raise ValueError(f"{refusal}: its type {dtype} does not hold its choice {highest}")


def _check_bounds(space: Any, what: str) -> None:
    """Raise ValueError if a Box is not of real numbers, or its type does not hold its bounds."""
    refusal = f"{what} {space!r} is not supported"
    dtype = _dtype_of(space, np.float32)
    if dtype.itemsize > 8 or dtype.name.startswith(UNCOMMON) or not is_numeric(dtype):
        raise ValueError(
            f"{refusal}: its type is {dtype}, which is none of real numbers in 8 to 64 bits"
        )
    if jnp.issubdtype(dtype, jnp.floating):
        return
    lowest = 0
    highest = 1
    if dtype.kind != "b":
        lowest = np.iinfo(dtype).min
        highest = np.iinfo(dtype).max
    for bound in (space.low, space.high):
        bound = np.asarray(bound)
        is_outside = (bound < lowest) | (bound > highest)
        if np.any(np.isfinite(bound) & is_outside):
            raise ValueError(
                f"{refusal}: its type {dtype} holds {lowest} to {highest}, which its bounds exceed"
            )


def as_seen(name: str, space: Space, obs: Any, may_differ: bool = True) -> tuple[Space, Any]:
    """Correct a space by an observation, because those that suites declare are sometimes wrong.

    Args:
        name: name of the environment.
        space: the declared space.
        obs: an observation, or its shapes and types.
        may_differ: whether a Box may have another shape than the observation.

    Returns:
        The space with the shapes of the observation, and the observation's types.

    Raises:
        UsageError: the observation does not fit the space.
    """

    def fitting(leaf: Leaf, x: jax.ShapeDtypeStruct) -> Leaf:
        is_box = isinstance(leaf, Box)
        fits_type = is_box or not jnp.issubdtype(x.dtype, jnp.floating)
        fits_shape = x.shape == leaf.shape or (is_box and may_differ)
        if not (fits_type and fits_shape):
            raise UsageError(
                f"environment {name}: it gives observations of type {x.dtype} and shape {x.shape} "
                f"where its space is {leaf} of shape {leaf.shape}"
            )
        if is_box and (x.dtype == np.int32 or x.dtype == np.uint32):
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
        if is_box and leaf.shape != x.shape:
            return _of_shape(leaf, x.shape)
        return leaf

    structure = jax.tree.structure(obs)
    if structure != jax.tree.structure(map_leaves(lambda leaf: 0, space)):
        raise UsageError(
            f"environment {name}: its observations have the structure {structure}, their space "
            f"is {space}"
        )
    return map_leaves(fitting, space, obs), jax.tree.map(lambda x: x.dtype, obs)


def _of_shape(leaf: Box, shape: tuple[int, ...]) -> Box:
    """A Box of another shape, without bounds if they differ between its numbers."""
    lows = set(np.ravel(leaf.low).tolist())
    highs = set(np.ravel(leaf.high).tolist())
    if len(lows) != 1 or len(highs) != 1:
        return box(shape)
    return box(shape, lows.pop(), highs.pop())._replace(dtype=leaf.dtype)


def check_tuples(space: Space, obs: Any) -> None:
    """Raise ValueError if `obs` has no tuple of as many parts where the space has one.

    A list or an array would be taken apart along its first axis, which may be a batch.
    """
    if isinstance(space, Leaf):
        return
    if isinstance(space, Mapping):
        for name, part in space.items():
            check_tuples(part, obs[name])
        return
    if not isinstance(obs, tuple) or len(obs) != len(space):
        raise ValueError(f"there is no tuple of {len(space)} parts")
    for part, x in zip(space, obs, strict=True):
        check_tuples(part, x)


def plain(obs: Any) -> Any:
    """Convert all kinds of mappings and sequences in an observation to dictionaries and tuples."""
    if isinstance(obs, Mapping):
        return {str(name): plain(part) for name, part in obs.items()}
    if isinstance(obs, (tuple, list)):
        return tuple(map(plain, obs))
    return obs


def map_leaves(function: Callable, space: Space, *trees: Any) -> Any:
    """Apply `function` to each leaf of a space, with the parts of the trees that belong to it.

    Args:
        function: takes a leaf and one part of each tree.
        space: the space.
        trees: elements of the space, or trees of the same structure.

    Returns:
        A tree of results with the structure of an element.
    """
    results = [function(*parts) for _, *parts in leaves(space, *trees)]
    return as_tree(results, space)


def as_tree(values: Iterable[Any], space: Space) -> Any:
    """Build a tree with the structure of an element, in plain dictionaries and tuples.

    Args:
        values: one value for each leaf, in the order of `leaves`.
        space: the space.
    """
    if isinstance(space, Leaf):
        return next(iter(values))
    rest = iter(values)
    parts = {key: as_tree(rest, part) for key, part in _items(space)}
    return parts if isinstance(space, Mapping) else tuple(parts.values())


def leaves(space: Space, *trees: Any, name: str = "") -> Iterator[tuple[Any, ...]]:
    """Iterate over the leaves of a space.

    Args:
        space: the space.
        trees: elements of the space, or trees of the same structure.
        name: name of the space, "" for the whole one.

    Yields:
        The name of a leaf, such as `robot/joints`, the leaf, and its part of each tree.
    """
    if isinstance(space, Leaf):
        yield name, space, *trees
        return
    for key, part in _items(space):
        subtrees = [tree[key] for tree in trees]
        subname = f"{name}/{key}" if name else str(key)
        yield from leaves(part, *subtrees, name=subname)


def _items(space: Parts) -> Iterable[tuple[Any, Space]]:
    return space.items() if isinstance(space, Mapping) else enumerate(space)


def batch_shape(obs: Any) -> tuple[int, ...]:
    """Batch axis (B,) of observations [B, ...]."""
    return jax.tree.leaves(obs)[0].shape[:1]


def sample(key: jax.Array, space: Space, legal: jax.Array | None = None) -> Any:
    """Draw an element uniformly; the numbers of an unbounded Box are normal.

    Args:
        key: a random key.
        space: the space.
        legal: [sum(nvec)] marks the choices that may be drawn; None: all.
    """
    keys = keys_of_parts(key, space)
    masks = as_tree(masks_of_parts(legal, space), space)
    return map_leaves(_sample_leaf, space, keys, masks)


def _sample_leaf(leaf: Leaf, key: jax.Array, legal: jax.Array | None) -> jax.Array:
    if isinstance(leaf, Box):
        with np.errstate(over="ignore", invalid="ignore"):
            bounded = np.isfinite(leaf.high - leaf.low)  # float32 has no width that is too large
        low = np.where(bounded, leaf.low, 0)
        high = np.where(bounded, leaf.high, 1)
        uniform = jax.random.uniform(key, leaf.shape, minval=low, maxval=high)
        return jnp.where(bounded, uniform, jax.random.normal(key, leaf.shape))
    if legal is None:
        counts = jnp.array(leaf.nvec).reshape(leaf.shape)
        return jax.random.randint(key, leaf.shape, 0, counts)
    logits = jnp.where(legal, 0.0, ILLEGAL)
    parts = jnp.split(logits, np.cumsum(leaf.nvec)[:-1])
    keys = [key] if len(parts) == 1 else jax.random.split(key, len(parts))
    choices = []
    for part_key, part in zip(keys, parts, strict=True):
        choice = jax.random.categorical(part_key, part)
        choices.append(choice.astype(jnp.int32))
    return jnp.stack(choices).reshape(leaf.shape)


def choices_of(space: Space) -> list[int]:
    """Number of choices of each component of an action; a Box has none."""
    counts = []
    for _, leaf in leaves(space):
        if not isinstance(leaf, Box):
            counts += leaf.nvec
    return counts


def masks_of_parts(legal: jax.Array | None, space: Space) -> list[jax.Array | None]:
    """The part of `legal` [..., sum(nvec)] for each leaf of an action.

    It is None for a Box, and everywhere if `legal` is None.
    """
    masks = []
    start = 0
    for _, leaf in leaves(space):
        end = start + sum(choices_of(leaf))
        has_choices = end > start
        masks.append(None if legal is None or not has_choices else legal[..., start:end])
        start = end
    return masks


def clip(action: Any, space: Space, batch: tuple[int, ...] = (), np: Any = jnp) -> Any:
    """Convert actions to the environment's shapes and types, and clip those of a Box.

    Actions that are whole numbers in the environment are rounded: a cast would hardly ever give the
    highest one.

    Args:
        action: [*batch, A] or [*batch, *shape].
        space: the action space.
        batch: shape of the batch.
        np: NumPy, or JAX's version of it.
    """

    def clipped(leaf, x):
        x = x.reshape(*batch, *leaf.shape)
        if isinstance(leaf, Box):
            x = np.clip(x, *_finite_bounds(leaf))
        is_whole = leaf.dtype is not None and not jnp.issubdtype(leaf.dtype, jnp.floating)
        if is_whole and jnp.issubdtype(x.dtype, jnp.floating):
            x = np.rint(x)
        return x if leaf.dtype is None else x.astype(leaf.dtype)

    return map_leaves(clipped, space, action)


def _finite_bounds(leaf: Box) -> tuple[np.ndarray, np.ndarray]:
    """Bounds within which no number becomes infinite in the type of an action."""
    if leaf.dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.low, leaf.high
    held = jnp.finfo(leaf.dtype)
    return np.maximum(leaf.low, float(held.min)), np.minimum(leaf.high, float(held.max))


def encode(observation: jax.Array, space: Leaf) -> jax.Array:
    """Encode a batch of raw observations as network input, float32.

    Bytes become 0..1, see `byte_range`. Arrays that are not images [H, W, C] are flattened.

    Returns:
        Numbers [..., *shape], or one-hot choices [..., sum(nvec)].
    """
    batch = observation.shape[: observation.ndim - len(space.shape)]
    if not isinstance(space, Box):
        return _one_hot(observation.astype(jnp.int32), space.nvec, batch)
    shape = space.shape if is_image(space) else (math.prod(space.shape),)
    numbers = observation.astype(jnp.float32).reshape(*batch, *shape)
    if observation.dtype != jnp.uint8:
        return numbers
    low, size = byte_range(space)
    if np.any(low):
        numbers = numbers - low.reshape(shape)
    is_same_size = len(set(size.flat)) == 1
    return numbers / (size.flat[0] if is_same_size else size.reshape(shape))


def _one_hot(choices: jax.Array, nvec: tuple[int, ...], batch: tuple[int, ...]) -> jax.Array:
    """Encode choices [*batch, *shape] as [*batch, sum(nvec)]."""
    components = choices.reshape(*batch, len(nvec))
    if len(set(nvec)) == 1:
        encoded = jax.nn.one_hot(components, nvec[0])
        return encoded.reshape(*batch, sum(nvec))
    parts = [jax.nn.one_hot(components[..., i], count) for i, count in enumerate(nvec)]
    return jnp.concatenate(parts, axis=-1)


def byte_range(space: Box) -> tuple[np.ndarray, np.ndarray]:
    """The lowest bytes, and the distances of the highest from them, by the bounds of `space`.

    They are 0 and 255 where bounds are infinite, or equal: then the observed bytes are unknown.
    """
    low = np.maximum(space.low, 0)
    high = np.minimum(space.high, 255)
    known = np.isfinite(space.low) & np.isfinite(space.high) & (low < high)
    return np.where(known, low, 0), np.where(known, high - low, 255).astype(np.float32)


def is_bits(leaf: Leaf) -> bool:
    """Tell if an observation is of bits, as those of a MultiBinary are."""
    return isinstance(leaf, Box) and leaf.dtype == np.dtype(bool)


def flat_size(space: Space) -> int:
    """Number of numbers of an encoded element."""
    size = 0
    for _, leaf in leaves(space):
        size += math.prod(leaf.shape) if isinstance(leaf, Box) else sum(leaf.nvec)
    return size


def keys_of_parts(key: jax.Array, space: Space) -> Any:
    """Keys of the leaves; the key itself if there is one leaf."""
    count = len(list(leaves(space)))
    keys = [key] if count == 1 else jax.random.split(key, count)
    return as_tree(keys, space)


def is_image(space: Space) -> TypeGuard[Box]:
    return isinstance(space, Box) and len(space.shape) == 3


def has_channels_first(space: Space) -> TypeGuard[Box]:
    """Tell if an image seems to be [C, H, W], because it has few channels there."""
    return is_image(space) and space.shape[0] < min(space.shape[1:])


def has_privileged(space: Space) -> bool:
    return isinstance(space, Mapping) and PRIVILEGED in space


def without_privileged(tree: Any) -> Any:
    """The part of an observation space, or of a tree like it, that policies see."""
    if not has_privileged(tree):
        return tree
    return {name: part for name, part in tree.items() if name != PRIVILEGED}


class HasSpaces(Protocol):
    """Part that an `Env` and its `EnvSpec` have in common."""

    @property
    def name(self) -> str: ...

    @property
    def observation_space(self) -> Space: ...

    @property
    def action_space(self) -> Space: ...


class EnvSpec(NamedTuple):
    """Properties of an environment that a policy depends on."""

    name: str
    observation_space: Space
    obs_dtype: Any  # NumPy's type of an observation, or a tree of types
    action_space: Space
    channels_first: tuple[str, ...] = ()  # names of images that the environment has as [C, H, W]

    @property
    def policy_obs_space(self) -> Space:
        """The part of the observation space that policies see, without `privileged_state`."""
        return without_privileged(self.observation_space)

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
        shapes = []
        for name, leaf, like in leaves(self.observation_space, self.obs_like):
            shape = like.shape
            if name in self.channels_first and is_image(leaf):
                height, width, channels = shape
                shape = channels, height, width
            shapes.append(jax.ShapeDtypeStruct(shape, like.dtype))
        return as_tree(shapes, self.observation_space)

    def with_channels_last(self, obs: Any) -> Any:
        """Move the channels of images behind their sides, if they are not there already.

        Args:
            obs: observations [..., *shape], as the environment gives them or with channels last.
        """
        parts = []
        space = self.observation_space
        for name, _, given, like, x in leaves(space, self.given_like, self.obs_like, obs):
            is_given = x.shape[-3:] == given.shape != like.shape
            if name in self.channels_first and is_given:
                is_ours = isinstance(x, jax.Array)
                x = jnp.moveaxis(x, -3, -1) if is_ours else np.moveaxis(x, -3, -1)
            parts.append(x)
        return as_tree(parts, space)

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

        def dtype_of(leaf: Leaf, name: str) -> np.dtype:
            return _narrow(leaf, _stored_dtype(name))

        observation_space = _from_json(stored["observation_space"])
        action_space = _from_json(stored["action_space"])
        too_large = excess(observation_space) or excess(action_space, acting=True)
        if too_large:
            raise ValueError(f"a space is too large: it has {too_large}")
        return cls(
            name=str(stored["name"]),
            observation_space=observation_space,
            obs_dtype=map_leaves(dtype_of, observation_space, stored["obs_dtype"]),
            action_space=action_space,
            channels_first=tuple(map(str, stored.get("channels_first", ()))),
        )


def _narrow(leaf: Leaf, dtype: np.dtype) -> np.dtype:
    if isinstance(leaf, Box):
        return narrow(dtype, leaf.low, leaf.high)
    return narrow(dtype)


def _to_json(space: Space) -> dict[str, Any]:
    if isinstance(space, Mapping):
        return {"type": "Dict", "parts": {name: _to_json(part) for name, part in space.items()}}
    if not isinstance(space, Leaf):
        return {"type": "Tuple", "parts": list(map(_to_json, space))}
    stored = {"type": type(space).__name__, "shape": list(space.shape)}
    if space.dtype is not None:
        stored["dtype"] = str(space.dtype)
    if isinstance(space, Discrete):
        return stored | {"n": space.n}
    if isinstance(space, MultiDiscrete):
        return stored | {"nvec": list(space.nvec)}
    return stored | {"low": _bounds_to_json(space.low), "high": _bounds_to_json(space.high)}


def _bounds_to_json(bound: np.ndarray) -> float | list[float | None] | None:
    """One number if all are the same, otherwise all in order; None is unbounded."""
    numbers = [float(x) if np.isfinite(x) else None for x in np.ravel(bound)]
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _bounds_from_json(stored: Any, shape: tuple[int, ...], unbounded: float) -> np.ndarray:
    """The inverse of `_bounds_to_json`."""
    bound = np.array(stored, np.float32)  # None becomes NaN
    bound = np.where(np.isnan(bound), unbounded, bound)
    if bound.ndim:
        bound = bound.reshape(shape)
    return np.broadcast_to(bound, shape)


def _stored_dtype(name: str) -> np.dtype:
    """Convert the name of a type; raise ValueError if it is none of real numbers."""
    dtype = jnp.dtype(name)
    if not is_numeric(dtype):
        raise ValueError(f"{dtype} is no type of numbers")
    return dtype


MOST_NUMBERS = 2**28  # of an observation
MOST_ACTIONS = 2**20  # numbers that a network predicts for an action: of a Box, or choices
MOST_LEAVES = 1_000  # parts of observations or actions
MOST_COMPONENTS = 5_000  # choices of an element; programs grow with them
MOST_EQUAL = 20_000  # choices of an observation of equal ones, which are encoded together


def excess(space: Space, acting: bool = False) -> str:
    """Say of what a space has too much to compile a program for it; "" if it is small enough."""
    found = list(leaves(space))
    sizes = [math.prod(leaf.shape) for _, leaf in found if isinstance(leaf, Box)]
    choices = [leaf.nvec for _, leaf in found if not isinstance(leaf, Box)]
    sizes += map(sum, choices)  # networks see and predict them one-hot
    components = sum(len(nvec) for nvec in choices if acting or len(set(nvec)) > 1)
    equal = sum(map(len, choices)) - components
    for count, most, what in (
        (sum(sizes), MOST_ACTIONS if acting else MOST_NUMBERS, "numbers"),
        (len(found), MOST_LEAVES, "parts"),
        (components, MOST_COMPONENTS, "choices at once"),
        (equal, MOST_EQUAL, "choices at once"),
    ):
        if count > most:
            return f"{count:,} {what}, at most {most:,} are supported"
    return ""


def _from_json(stored: dict[str, Any]) -> Space:
    if stored["type"] == "Dict":
        return {name: _from_json(part) for name, part in stored["parts"].items()}
    if stored["type"] == "Tuple":
        return tuple(map(_from_json, stored["parts"]))
    shape = tuple(stored["shape"])
    if math.prod(shape) > MOST_NUMBERS:
        raise ValueError(f"a space of shape {shape} is too large to be one of a run")
    dtype = stored.get("dtype") and _stored_dtype(stored["dtype"])
    if stored["type"] == "Discrete":
        return Discrete(stored["n"], dtype)
    if stored["type"] == "MultiDiscrete":
        return MultiDiscrete(tuple(stored["nvec"]), None if len(shape) == 1 else shape, dtype)
    return Box(
        low=_bounds_from_json(stored["low"], shape, -np.inf),
        high=_bounds_from_json(stored["high"], shape, np.inf),
        shape=shape,
        dtype=dtype,
    )
