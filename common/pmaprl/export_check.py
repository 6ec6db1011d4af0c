"""Comparison of an exported file with its policy, on random observations.

It finds a file that its runtime refuses, or that acts differently, before anybody relies on it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.device.state import by_name
from pmaprl.envs.foreign_code import import_package, reason
from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import Box, Leaf, Space, as_tree, choices_of, leaves
from pmaprl.policies.policy import Policy
from pmaprl.policy import StoredPolicy

BATCH = 16
SPREADS = 1.0, 3.0, 10.0, 30.0
"""Distances of the observations of each batch, in their usual deviations."""
WIDEST = 1e3  # bounds that are further apart say little of the observed numbers
TOLERANCE = 1e-4  # largest difference of numbers, relative to the largest one of an array
NOISY_POLICIES = 32  # policies whose parameters differ by rounding
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-2}  # relative size of that rounding

Runtime = Callable[[dict[str, Any]], list[Any]]
"""inputs of an exported policy -> leaves of its actions and of its new memory"""


class Checked(NamedTuple):
    """A comparison that found no difference."""

    observations: int
    varied: bool  # not all of them have the same action

    def __str__(self) -> str:
        note = "" if self.varied else ", all of which have the same action"
        return f"it acts as the policy does at {self.observations} random observations{note}"


def check_file(policy: StoredPolicy, file: Path, suffix: str) -> Checked:
    """Compare an exported file with the `policy` that it was made of.

    Batches have one observation and several. A policy with memory goes on from its own memory in
    each batch, so that differences do not add up.

    Args:
        policy: The policy.
        file: The file.
        suffix: Its format, `.stablehlo` or `.onnx`.

    Returns:
        The extent of the comparison.

    Raises:
        UsageError: The runtime refuses the file, or its actions differ by more than rounding.
    """
    cpus = _cpus()
    on_cpu = jax.default_device(cpus[0]) if cpus else nullcontext()
    with on_cpu:  # a GPU rounds the factors of products
        with _refusals(suffix):
            run = RUNTIMES[suffix](file)
        rng = np.random.default_rng(0)
        actions = []
        for count, spreads in ((1, SPREADS[:1]), (BATCH, SPREADS)):
            memory = policy.initial_memory(count)
            for spread in spreads:
                inputs = _random_inputs(policy, rng, count, spread, memory)
                ours = act(policy, inputs)
                theirs = _act_by(run, _exported_inputs(policy, inputs), suffix)
                _compare(policy, inputs, ours.arrays(), theirs, suffix)
                actions.append(ours.actions)
                memory = ours.memory
    parts = [np.concatenate(part) for part in zip(*actions, strict=True)]
    return Checked(len(parts[0]), varied=any(np.any(part != part[:1]) for part in parts))


def _act_by(run: Callable, inputs: Any, suffix: str) -> list[np.ndarray]:
    """Run an exported file on inputs. Raises UsageError where its runtime refuses them."""
    with _refusals(suffix):
        return list(map(np.asarray, run(inputs)))


class Inputs(NamedTuple):
    """A batch of B inputs of a policy."""

    obs: Any  # [B, *shape]
    memory: Any  # [B, ...]; () for a policy without memory
    first: np.ndarray  # [B] bool
    reward: np.ndarray  # [B]


class Outputs(NamedTuple):
    """Outputs of a policy for a batch of B."""

    actions: list[np.ndarray]  # leaves of the greedy actions [B, ...]
    memory: Any  # new memory [B, ...]; () for a policy without memory

    def arrays(self) -> list[np.ndarray]:
        """All arrays in the order in which an exported policy gives them."""
        return [*self.actions, *map(np.asarray, jax.tree.leaves(by_name(self.memory)))]


def act(policy: Policy, inputs: Inputs) -> Outputs:
    """Greedy actions of the policy for a batch."""
    if policy.has_memory:
        actions, memory = policy(inputs.obs, inputs.memory, inputs.first, reward=inputs.reward)
    else:
        actions = policy(inputs.obs)
        memory = ()
    return Outputs(list(map(np.asarray, jax.tree.leaves(actions))), memory)


# ---------------------------------------------------------------------------------- observations


def _random_inputs(
    policy: Policy,
    rng: np.random.Generator,
    count: int,
    spread: float,
    memory: Any,
) -> Inputs:
    """Draw a batch of `count` inputs for a policy with this `memory`."""
    first = rng.random(count) < 0.2
    reward = rng.normal(0, spread, count).astype(np.float32)
    obs = random_observations(policy, rng, count, spread)
    return Inputs(obs=obs, memory=memory, first=first, reward=reward)


def random_observations(
    policy: Policy,
    rng: np.random.Generator,
    count: int,
    spread: float = 1.0,
) -> Any:
    """Draw observations in the types of the environment.

    Numbers follow the statistics by which the policy normalizes them. Without statistics they are
    uniform within their bounds or, if these are too wide to mean anything, normal. In every mask
    each component of an action has a legal choice.

    Args:
        policy: The policy.
        rng: The source of randomness.
        count: Number of observations.
        spread: Multiplies deviations.

    Returns:
        Observations [count, *shape].
    """
    space = policy.env.observation_space
    masks = iter(_random_masks(policy.env.action_space, space, rng, count))
    stats_by_name = dict(_stats_by_name(space, policy.obs_stats))
    parts = []
    for name, leaf, like in leaves(space, policy.env.given_like):
        if is_mask(name):
            values = next(masks)
        else:
            stats = stats_by_name.get(name)
            values = _random_leaf(leaf, like.dtype, stats, rng, count, spread)
        if like.shape != leaf.shape:  # the environment gives channels first
            values = np.moveaxis(values, -1, 1)
        parts.append(values.astype(like.dtype))
    return as_tree(parts, space)


def _stats_by_name(space: Space, stats: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over names and statistics of the leaves of observations, without masks."""
    if stats is None or isinstance(space, Leaf):
        yield name, stats
        return
    for key, part in space.items() if isinstance(space, dict) else enumerate(space):
        part_name = f"{name}/{key}" if name else str(key)
        if not is_mask(part_name):
            yield from _stats_by_name(part, stats[key], part_name)


def _random_masks(
    actions: Space,
    space: Space,
    rng: np.random.Generator,
    count: int,
) -> list[np.ndarray]:
    """Draw the leaves [count, n] of masks, in order; none if observations have no mask."""
    sizes = [leaf.shape[0] for name, leaf in leaves(space) if is_mask(name)]
    if not sizes:
        return []
    parts = []
    for choices in choices_of(actions):
        legal = rng.random((count, choices)) < 0.5
        legal[np.arange(count), rng.integers(choices, size=count)] = True
        parts.append(legal)
    return np.split(np.concatenate(parts, axis=1), np.cumsum(sizes)[:-1], axis=1)


def _random_leaf(
    leaf: Any,
    dtype: Any,
    stats: Any,
    rng: np.random.Generator,
    count: int,
    spread: float,
) -> np.ndarray:
    """Draw values [count, *shape] for a leaf of observations, before they get their type."""
    shape = (count, *leaf.shape)
    if not isinstance(leaf, Box):
        return rng.integers(np.reshape(leaf.nvec, leaf.shape), size=shape)
    low = np.asarray(leaf.low, np.float64)
    high = np.asarray(leaf.high, np.float64)
    is_narrow = high - low <= WIDEST
    least = np.where(is_narrow, low, 0.0)
    most = np.where(is_narrow, high, 1.0)
    mean = 0.0 if stats is None else np.asarray(stats.mean)
    std = 1.0 if stats is None else np.asarray(stats.std)
    normal = np.clip(mean + spread * std * rng.normal(size=shape), low, high)
    if dtype.kind == "f":
        uniform = rng.uniform(least, most, shape)
    else:
        normal = np.rint(normal)
        uniform = np.floor(rng.uniform(np.ceil(least), np.floor(most) + 1, shape))
    return np.where(is_narrow & (stats is None), uniform, normal)


# -------------------------------------------------------------------------------------- runtimes


def _exported_inputs(policy: Policy, inputs: Inputs) -> dict[str, Any]:
    """Inputs under the names of `pmaprl.export.inputs_of`."""
    named = {"obs": inputs.obs}
    if policy.has_memory:
        named["memory"] = by_name(jax.tree.map(np.asarray, inputs.memory))
        named["first"] = inputs.first
    if policy.wants_reward:
        named["reward"] = inputs.reward
    return named


def _stablehlo(file: Path) -> Runtime:
    call = jax.export.deserialize(bytearray(file.read_bytes())).call
    return lambda inputs: jax.tree.leaves(call(*inputs.values()))


def _onnx(file: Path) -> Runtime:
    onnxruntime = import_package("onnxruntime", use=" to try an .onnx file")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and need no log
    cpu = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=cpu)
    return lambda inputs: session.run(None, by_name(inputs))


RUNTIMES = {".stablehlo": _stablehlo, ".onnx": _onnx}
NAMES = {".stablehlo": "jax.export", ".onnx": "onnxruntime"}


@contextmanager
def _refusals(suffix: str) -> Iterator[None]:
    """Turn an error of a runtime into a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise _not_written(suffix, f"{NAMES[suffix]} refuses the file ({reason(error)})") from error


def _not_written(suffix: str, why: str) -> UsageError:
    instead = next(other for other in RUNTIMES if other != suffix)
    return UsageError(f"nothing was written, for {why}: try a file that ends in {instead}")


def _cpus() -> list[Any]:
    try:
        return jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS names others only
        return []


# ------------------------------------------------------------------------------------ comparison


def _compare(
    policy: StoredPolicy,
    inputs: Inputs,
    ours: list[np.ndarray],
    theirs: list[np.ndarray],
    suffix: str,
) -> None:
    """Raise UsageError if arrays [B, ...] of policy and file differ by more than rounding."""
    our_shapes = _shapes(ours)
    their_shapes = _shapes(theirs)
    if our_shapes != their_shapes:
        raise _not_written(
            suffix, f"the file gives {their_shapes} where the policy gives {our_shapes}"
        )
    excess = [_excess(x, y) for x, y in zip(ours, theirs, strict=True)]
    if not any(map(np.any, excess)):
        return
    # A difference that a rounded change of the policy's parameters makes too is rounding
    for noisy in _noisy_outputs(policy, inputs):
        allowed = zip(ours, theirs, noisy, strict=True)
        excess = [x & ~_is_near(*arrays) for x, arrays in zip(excess, allowed, strict=True)]
    wrong = np.any([np.any(x.reshape(len(x), -1), axis=1) for x in excess], axis=0)
    if np.any(wrong):
        where = f"{np.count_nonzero(wrong)} of {len(wrong)} random observations"
        raise _not_written(suffix, f"the file acts otherwise than the policy at {where}")


def _shapes(arrays: list[np.ndarray]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)


def _excess(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Mark where whole numbers [B, ...] differ, and others by more than the tolerance."""
    if ours.dtype.kind != "f":
        return ours != theirs
    limit = TOLERANCE * np.max(np.abs(ours), initial=0.0, where=np.isfinite(ours))
    with np.errstate(invalid="ignore"):
        near = np.abs(theirs - ours) <= limit
    return ~(near | (ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))


def _is_near(ours: np.ndarray, theirs: np.ndarray, noisy: np.ndarray) -> np.ndarray:
    """Mark where the file is no further from the policy than one with changed parameters."""
    if ours.dtype.kind != "f":
        return theirs == noisy
    return np.abs(theirs - ours) <= np.abs(noisy - ours)


def _noisy_outputs(policy: StoredPolicy, inputs: Inputs) -> Iterator[list[np.ndarray]]:
    """Outputs of policies whose parameters differ from those of `policy` by rounding."""
    precision = policy.config["args"].get("precision", "float32")
    size = ROUNDING[precision if _cpus() else "bfloat16"]
    rng = np.random.default_rng(0)
    for _ in range(NOISY_POLICIES):
        yield act(policy.with_noise(rng, size), inputs).arrays()
