"""An exported file beside the policy that it was made of, on random observations.

A file that its runtime refuses, or that acts otherwise, is found before anybody relies on it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from pmaprl.cli.errors import UsageError
from pmaprl.device.agents import Policy
from pmaprl.device.sharding import by_name
from pmaprl.envs.masks import is_mask
from pmaprl.envs.spaces import Box, Leaf, Space, as_tree, choices_of, leaves
from pmaprl.envs.suite_tools import import_package, reason

BATCH = 16
SPREADS = 1.0, 3.0, 10.0, 30.0
"""Distances of the observations of each batch, in their usual deviations."""
WIDEST = 1e3  # bounds that are further apart say little of what an environment shows
TOLERANCE = 1e-4  # of numbers, relative to the largest one of an array
NOISY_POLICIES = 32  # whose parameters differ from the policy's by rounding
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-2}  # relative, with which they do

Runtime = Callable[[dict[str, Any]], list[Any]]
"""From the inputs of an exported policy to the leaves of its actions and of its new memory."""


class Checked(NamedTuple):
    """A comparison that found no difference."""

    observations: int
    varied: bool  # not all of them have the same action

    def __str__(self) -> str:
        note = "" if self.varied else ", all of which have the same action"
        return f"it acts as the policy does at {self.observations} random observations{note}"


def check_file(policy: Policy, file: Path, suffix: str) -> Checked:
    """Compare an exported file with the `policy` that it was made of.

    Batches have one observation and several. A policy with memory goes on from its own memory in
    each batch, so that differences do not add up.

    Args:
        policy: The policy.
        file: Where the file is now.
        suffix: Its format, `.stablehlo` or `.onnx`.

    Returns:
        How much was compared.

    Raises:
        UsageError: The runtime refuses the file, or what it gives differs by more than rounding.
    """
    cpus = _cpus()
    place = jax.default_device(cpus[0]) if cpus else nullcontext()
    with place:  # a GPU rounds the factors of products
        with _refusals(suffix):
            run = RUNTIMES[suffix](file)
        rng = np.random.default_rng(0)
        actions = []
        for count, spreads in ((1, SPREADS[:1]), (BATCH, SPREADS)):
            memory = policy.initial_memory(count)
            for spread in spreads:
                inputs = _random_inputs(policy, rng, count, spread, memory)
                ours = act(policy, inputs)
                with _refusals(suffix):
                    theirs = run(_exported_inputs(policy, inputs))
                _compare(policy, inputs, ours.arrays(), list(map(np.asarray, theirs)), suffix)
                actions.append(ours.actions)
                memory = ours.memory
    parts = [np.concatenate(part) for part in zip(*actions, strict=True)]
    return Checked(len(parts[0]), varied=any(np.any(part != part[:1]) for part in parts))


class Inputs(NamedTuple):
    """A batch of B for a policy."""

    obs: Any  # [B, *shape]
    memory: Any  # [B, ...], () without any
    first: np.ndarray  # [B] bool
    reward: np.ndarray  # [B]


class Outputs(NamedTuple):
    """Outcome of a batch of B."""

    actions: list[np.ndarray]  # the leaves of the greedy actions [B, ...]
    memory: Any  # the new one [B, ...], () without any

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
    """A batch of `count` for a policy that has this `memory`."""
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
    """Observations [count, *shape] in the types of the environment.

    Numbers follow the statistics by which the policy normalises them. Without any they are uniform
    within their bounds or, where those are too wide to say anything, normal. `spread` multiplies
    deviations. In every mask each component of an action has a legal choice.
    """
    space = policy.env.observation_space
    masks = iter(_random_masks(policy.env.action_space, space, rng, count))
    known = dict(_stats_by_name(space, policy.obs_stats))
    drawn = []
    for name, leaf, like in leaves(space, policy.env.given_like):
        if is_mask(name):
            values = next(masks)
        else:
            stats = known.get(name)
            values = _random_leaf(leaf, like.dtype, stats, rng, count, spread)
        if like.shape != leaf.shape:  # the environment gives channels first
            values = np.moveaxis(values, -1, 1)
        drawn.append(values.astype(like.dtype))
    return as_tree(drawn, space)


def _stats_by_name(space: Space, stats: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Statistics of the leaves of observations by the names that `leaves` gives; masks have
    none.
    """
    if stats is None or isinstance(space, Leaf):
        yield name, stats
        return
    for key, part in space.items() if isinstance(space, dict) else enumerate(space):
        own = f"{name}/{key}" if name else str(key)
        if not is_mask(own):
            yield from _stats_by_name(part, stats[key], own)


def _random_masks(
    actions: Space,
    space: Space,
    rng: np.random.Generator,
    count: int,
) -> list[np.ndarray]:
    """The leaves [count, n] of masks, in order; none where observations have no mask."""
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
    """Values [count, *shape] for a leaf of observations, before they get their type."""
    shape = (count, *leaf.shape)
    if not isinstance(leaf, Box):
        return rng.integers(np.reshape(leaf.nvec, leaf.shape), size=shape)
    low, high = (np.asarray(bound, np.float64) for bound in (leaf.low, leaf.high))
    is_narrow = high - low <= WIDEST
    least = np.where(is_narrow, low, 0.0)
    most = np.where(is_narrow, high, 1.0)
    mean, std = (0.0, 1.0) if stats is None else (np.asarray(stats.mean), np.asarray(stats.std))
    normal = np.clip(mean + spread * std * rng.normal(size=shape), low, high)
    if dtype.kind == "f":
        uniform = rng.uniform(least, most, shape)
    else:
        normal = np.rint(normal)
        uniform = np.floor(rng.uniform(np.ceil(least), np.floor(most) + 1, shape))
    return np.where(is_narrow & (stats is None), uniform, normal)


# -------------------------------------------------------------------------------------- runtimes


def _exported_inputs(policy: Policy, inputs: Inputs) -> dict[str, Any]:
    """The same as `pmaprl.export.inputs_of` names them."""
    named = {"obs": inputs.obs}
    if policy.has_memory:
        named |= {"memory": by_name(jax.tree.map(np.asarray, inputs.memory)), "first": inputs.first}
    if policy.wants_reward:
        named["reward"] = inputs.reward
    return named


def _stablehlo(file: Path) -> Runtime:
    call = jax.export.deserialize(bytearray(file.read_bytes())).call
    return lambda inputs: jax.tree.leaves(call(*inputs.values()))


def _onnx(file: Path) -> Runtime:
    onnxruntime = import_package("onnxruntime", use=" to try an .onnx file")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is raised
    cpu = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=cpu)
    return lambda inputs: session.run(None, by_name(inputs))


RUNTIMES = {".stablehlo": _stablehlo, ".onnx": _onnx}
NAMES = {".stablehlo": "jax.export", ".onnx": "onnxruntime"}


@contextmanager
def _refusals(suffix: str) -> Iterator[None]:
    """Turn what a runtime raises into a UsageError."""
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
    policy: Policy,
    inputs: Inputs,
    ours: list[np.ndarray],
    theirs: list[np.ndarray],
    suffix: str,
) -> None:
    """Raise UsageError where arrays [B, ...] of policy and file differ by more than rounding."""
    kinds = [[f"{x.dtype}{list(x.shape)}" for x in arrays] for arrays in (ours, theirs)]
    if kinds[0] != kinds[1]:
        gives, wanted = (", ".join(kind) for kind in reversed(kinds))
        raise _not_written(suffix, f"the file gives {gives} where the policy gives {wanted}")
    excess = [_excess(one, other) for one, other in zip(ours, theirs, strict=True)]
    if not any(map(np.any, excess)):
        return
    # Rounding alone explains what the policy does too after a change of its parameters by rounding
    for noisy in _noisy_outputs(policy, inputs):
        allowed = zip(ours, theirs, noisy, strict=True)
        excess = [x & ~_is_near(*arrays) for x, arrays in zip(excess, allowed, strict=True)]
    wrong = sum(np.any(x.reshape(len(x), -1), axis=1) for x in excess)
    if np.any(wrong):
        where = f"{np.count_nonzero(wrong)} of {len(wrong)} random observations"
        raise _not_written(suffix, f"the file acts otherwise than the policy at {where}")


def _excess(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Tell where arrays [B, ...] differ, other than whole numbers by more than the tolerance."""
    if ours.dtype.kind != "f":
        return ours != theirs
    limit = TOLERANCE * np.max(np.abs(ours), initial=0.0, where=np.isfinite(ours))
    with np.errstate(invalid="ignore"):
        near = np.abs(theirs - ours) <= limit
    return ~(near | (ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))


def _is_near(ours: np.ndarray, theirs: np.ndarray, noisy: np.ndarray) -> np.ndarray:
    """Tell where the file is no further from the policy than one with changed parameters."""
    if ours.dtype.kind != "f":
        return theirs == noisy
    return np.abs(theirs - ours) <= np.abs(noisy - ours)


def _noisy_outputs(policy: Policy, inputs: Inputs) -> Iterator[list[np.ndarray]]:
    """Outputs of policies whose parameters differ from those of `policy` by rounding."""
    precision = (policy.config or {}).get("args", {}).get("precision", "float32")
    size = ROUNDING[precision if _cpus() else "bfloat16"]
    rng = np.random.default_rng(0)
    for _ in range(NOISY_POLICIES):
        yield act(policy.with_noise(rng, size), inputs).arrays()
