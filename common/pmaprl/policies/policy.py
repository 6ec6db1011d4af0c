"""A trained policy, as a user calls it: checked raw observations in, actions out."""

import copy
import math
from dataclasses import InitVar, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from pmaprl.cli.errors import UsageError, shortened
from pmaprl.device.agents import Player
from pmaprl.device.contract import as_recurrent
from pmaprl.device.interface import PolicyInput
from pmaprl.device.optim import all_finite
from pmaprl.envs import spaces
from pmaprl.envs.masks import completed, policy_spec
from pmaprl.envs.numbers import cast, is_numeric
from pmaprl.envs.ranges import fault_in
from pmaprl.envs.spaces import EnvSpec


@dataclass(eq=False, repr=False)
class Policy:
    """A trained policy, from raw observations to actions; also inside `jit` and `vmap`.

    Attributes:
        env: the training environment, without `privileged_state`, which only critics see.
    """

    algorithm: InitVar[Any]
    learner: InitVar[Any]  # the state of one agent of the `algorithm`
    env: EnvSpec

    def __post_init__(self, algorithm: Any, learner: Any):
        algorithm = as_recurrent(algorithm)
        env = self.env
        self.env = policy_spec(self.env)
        self._learner = jax.device_put(learner)
        self._initial_memory = algorithm.initial_memory
        self._memory_like = jax.tree.leaves(jax.eval_shape(lambda: algorithm.initial_memory(1)))
        self.has_memory = bool(self._memory_like)
        self.wants_reward = algorithm.wants_reward

        def apply(learner, seen, memory, key):
            seen = seen._replace(obs=completed(seen.obs, env))
            action, memory = algorithm.act(learner, seen, memory, key)
            return spaces.clip(action, env.action_space, seen.first.shape), memory

        self._apply = apply

        def checked(*inputs):
            outputs = apply(*inputs)
            return *outputs, all_finite(outputs)

        self._jitted = jax.jit(checked)

    def __call__(
        self,
        obs: Any,
        memory: Any = None,
        first: Any = None,
        *,
        reward: Any = None,
        key: Array | None = None,
    ) -> Any:
        """Compute actions for raw observations.

        Every new batch size compiles once.

        Args:
            obs: raw observations [..., *obs]: one, or any number of batch axes before its own.
            memory: memory of all observations in the order of their axes, for a policy with memory.
            first: [...] bool, True where an episode begins, for a policy with memory.
            reward: [...] reward of the step before, for a policy trained with
                --obs-prev-action-reward.
            key: random key to sample actions with. None: the best known actions.

        Returns:
            Actions [..., *action]; with `memory` also the memory after the step. JAX arrays give
            JAX arrays, everything else gives NumPy's.

        Raises:
            UsageError: an argument is missing, does not fit, or, as an array of NumPy, is too large
                for the network.
        """
        if key is not None and not (isinstance(key, Array) and _is_key(key)):
            raise UsageError(
                "key must be one of jax.random.key(SEED), or None for the best known action"
            )
        given, batch = self._given(obs)
        seen = PolicyInput(given, *self._of_steps(batch, memory, first, reward))
        seen = jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :]), seen)
        carried = self._carried(memory, batch)
        actions, after, is_finite = self._jitted(self._learner, seen, carried, key)
        ours = any(isinstance(x, Array) for x in jax.tree.leaves(obs))
        # Nobody waits for arrays of JAX, which the caller may hand on
        if not ours and not isinstance(is_finite, Tracer) and not is_finite:
            raise UsageError(
                "the policy computes numbers that are not finite: observations, rewards or the "
                "memory are too large for its network"
            )
        actions = jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), actions)
        if not (ours or isinstance(jax.tree.leaves(actions)[0], Tracer)):
            actions = jax.tree.map(lambda x: np.array(x)[()], actions)
        if memory is None:
            return actions
        return actions, jax.tree.map(lambda x, old: x.reshape(np.shape(old)), after, memory)

    def initial_memory(self, n: int) -> Any:
        """Memory [n, ...] of `n` observations whose episodes begin; () for a policy without."""
        return self._initial_memory(n)

    def _given(self, obs: Any) -> tuple[Any, tuple[int, ...]]:
        """Convert observations to the types that the networks expect.

        Returns:
            Observations, and the shape of their batch axes.

        Raises:
            UsageError: they do not fit the environment.
        """
        env = self.env
        space = self.env.observation_space
        if any(np.ma.is_masked(x) for x in jax.tree.leaves(obs)):
            raise UsageError("an observation is a masked array, which leaves numbers out: fill it")
        try:
            spaces.check_tuples(space, obs)
            arrays = spaces.map_leaves(
                lambda _, x: x if isinstance(x, Array) else np.asarray(x), space, obs
            )
            shown = env.with_channels_last(arrays)
            named = list(spaces.leaves(space, env.obs_like, env.given_like, shown))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(f"observations of {env.name} have the parts of {space}") from error
        typed = []
        batches = set()
        for name, _, like, given, x in named:
            what = f"{name} of {env.name}".removeprefix(" of ")
            axes = x.ndim - len(like.shape)
            if axes < 0 or x.shape[axes:] != like.shape:
                sizes = ["...", *map(str, given.shape)]
                batch = f"({', '.join(sizes)})"
                raise UsageError(
                    f"an observation of {what} has shape {given.shape}, a batch {batch}; got "
                    f"{x.shape}"
                )
            both_integers = x.dtype.kind in "iu" and like.dtype.kind in "iu"
            if not both_integers and not np.can_cast(x.dtype, like.dtype, "same_kind"):
                raise UsageError(f"observations of {what} are {like.dtype}, got {x.dtype}")
            batches.add(x.shape[:axes])
            typed.append(_in_type(x, like.dtype, what))
        if len(batches) > 1:
            raise UsageError(
                f"all parts of observations must be of one batch, got batches of {sorted(batches)}"
            )
        given = jax.tree.unflatten(jax.tree.structure(env.obs_like), typed)
        is_known = not any(isinstance(x, Tracer) for x in typed)
        if is_known and (fault := fault_in(given, env)):
            raise UsageError(fault)
        return given, batches.pop()

    def _of_steps(
        self,
        batch: tuple[int, ...],
        memory: Any,
        first: Any,
        reward: Any,
    ) -> tuple[Any, Any]:
        """Check and broadcast `first` and `reward` to a batch of this shape.

        Raises:
            UsageError: one of them, or the memory, is missing.
        """
        if not self.has_memory:
            return np.zeros(batch, bool), np.zeros(batch, np.float32)
        if memory is None or first is None:
            raise UsageError(
                "this policy has memory: policy(obs, memory, first), at first "
                "policy.initial_memory(n)"
            )
        if reward is None and self.wants_reward:
            raise UsageError(
                "this policy was trained with the last reward: policy(..., reward=reward)"
            )
        reward = 0.0 if reward is None else reward
        return (
            _of_batch("first", first, bool, batch),
            _of_batch("reward", reward, np.float32, batch),
        )

    def _carried(self, memory: Any, batch: tuple[int, ...]) -> Any:
        """Return the memory [N, ...] of a batch; the memory of one observation gets the axis N.

        Raises:
            UsageError: `memory` is no memory of such a batch.
        """
        if memory is None:
            return self.initial_memory(0)
        count = math.prod(batch)
        leaves = jax.tree.leaves(memory)
        shapes = [np.shape(x) for x in leaves]
        dtypes = [jnp.result_type(x) if hasattr(x, "dtype") else None for x in leaves]
        if dtypes != [x.dtype for x in self._memory_like]:
            raise UsageError(
                f"this is no memory of observations: take that of policy.initial_memory({count})"
            )
        if shapes == [(count, *x.shape[1:]) for x in self._memory_like]:
            return memory
        if not batch and shapes == [x.shape[1:] for x in self._memory_like]:
            return jax.tree.map(lambda x: x[None], memory)
        raise UsageError(
            f"this is no memory of {count} observations: take that of "
            f"policy.initial_memory({count})"
        )

    @property
    def obs_stats(self) -> Any:
        """Statistics that normalize observations, a tree like them; None without."""
        normalizer = getattr(self._learner, "obs_stats", None)
        return None if normalizer is None else normalizer.stats

    def with_noise(self, rng: np.random.Generator, size: float) -> "Policy":
        """Copy the policy, with each parameter changed by about this share of itself."""

        def changed(x):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return x * (1 + size * rng.normal(size=x.shape)).astype(x.dtype)

        noisy = copy.copy(self)
        noisy._learner = jax.tree.map(changed, self._learner)
        return noisy

    def player(self, stochastic: bool = False) -> Player:
        """Make a player of episodes from the policy.

        With `stochastic` it samples actions, each by its own key.
        """

        def greedy(seen, memory, keys):
            return self._apply(self._learner, seen, memory, None)

        def sampled_one(seen, memory, key):
            return self(seen.obs, memory, seen.first, reward=seen.reward, key=key)

        return Player(self.initial_memory, jax.vmap(sampled_one) if stochastic else greedy)

    def __repr__(self) -> str:
        return f"Policy(env={self.env.name!r})"


def _is_key(key: Array) -> bool:
    """True for one random key, typed or as two words of bits."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return key.dtype == jnp.uint32 and key.shape == (2,)


def _of_batch(
    name: str,
    x: Any,
    kind: Any,
    batch: tuple[int, ...],
) -> Array:
    """Check values for each observation of a batch, and convert them.

    Raises:
        UsageError: there is not one value for each, or it is not a number.
    """
    array = x if isinstance(x, Array) else np.asarray(x)
    if not is_numeric(array.dtype) or array.shape not in ((), batch):
        wanted = "true or false" if kind is bool else "a number"
        raise UsageError(
            f"{name} must be {wanted} for each observation, {batch}; got {array.dtype} "
            f"{array.shape}"
        )
    if not isinstance(array, Tracer):
        with np.errstate(over="ignore"):
            values = np.asarray(array, np.float32)
        if kind is bool and not np.all((values == 0) | (values == 1)):
            raise UsageError(f"{name} must be true or false, got {shortened(f'{values.tolist()}')}")
        if not np.all(np.isfinite(values)):
            raise UsageError(
                f"{name} must be finite in float32, got {shortened(f'{values.tolist()}')}"
            )
    return jnp.broadcast_to(jnp.asarray(array, kind), batch)


def _in_type(
    x: Any,
    dtype: np.dtype,
    what: str,
) -> Any:
    """Convert observations of `what` to a type.

    Raises:
        UsageError: the type does not hold one of them, as far as values are known.
    """
    if isinstance(x, Tracer) or np.can_cast(x.dtype, dtype, "safe"):
        return x.astype(dtype)
    try:
        typed = cast(np.asarray(x), dtype)
    except OverflowError as error:
        raise UsageError(f"an observation of {what} has {error}") from None
    return jnp.asarray(typed) if isinstance(x, Array) else typed
