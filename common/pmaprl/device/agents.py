"""How a learner acts, with or without a recurrent state: players, and policies from raw
observations to actions.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.errors import UsageError, shortened
from pmaprl.envs import spaces
from pmaprl.envs.masks import completed, policy_spec
from pmaprl.envs.numbers import cast, is_numeric
from pmaprl.envs.ranges import fault_in
from pmaprl.envs.spaces import EnvSpec, batch_shape


class PolicyInput(NamedTuple):
    """What a policy gets to see of N environments before they step, [N, ...]."""

    obs: Any  # raw
    first: jax.Array  # bool: an episode begins here, and what was before does not count
    reward: jax.Array  # of the step before, raw


def with_memory(algorithm: Any) -> Any:
    """The algorithm as a recurrent one, with () as memory where it has none; of an `OffPolicy` only
    `act` is of use.
    """
    if algorithm.initial_memory is not None:
        return algorithm

    def explore(learner, seen, memory, noise):
        return *algorithm.explore(learner, seen.obs, noise), memory

    def act(learner, seen, memory, key=None):
        return algorithm.act(learner, seen.obs, key), memory

    return algorithm._replace(explore=explore, act=act, initial_memory=lambda count: ())


class Player(NamedTuple):
    """Who plays in N environments."""

    initial_memory: Callable  # N -> memory [N, ...]
    act: Callable  # Seen, memory, fresh keys [N] -> actions [N, ...], memory

    @classmethod
    def greedy(cls, algorithm: Any, learner: Any) -> "Player":
        """The best actions of a `learner` of this algorithm."""
        algorithm = with_memory(algorithm)
        return cls(
            algorithm.initial_memory,
            lambda seen, memory, keys: algorithm.act(learner, seen, memory),
        )

    @classmethod
    def of(cls, policy: Any) -> "Player":
        """A player stays as it is, a policy plays greedily, another function takes observations and
        returns actions.
        """
        if isinstance(policy, Player):
            return policy
        if hasattr(policy, "player"):
            return policy.player()
        return cls(lambda count: (), lambda seen, memory, keys: (policy(seen.obs), memory))


# Fields of learners, beside `params`, that acting reads where there are some
ACTING = "obs_stats", "epsilon"


def acting_part(learner: Any) -> tuple[Any, ...]:
    """What acting takes of a learner: parameters, those called `actor` where there are some, and
    the fields ACTING.
    """
    others = (getattr(learner, name) for name in ACTING if hasattr(learner, name))
    return getattr(learner.params, "actor", learner.params), *others


def with_acting_part(learner: Any, part: tuple[Any, ...]) -> Any:
    """`learner` that acts by that `part` of another one."""
    params, *others = part
    params = learner.params._replace(actor=params) if hasattr(learner.params, "actor") else params
    names = (name for name in ACTING if hasattr(learner, name))
    return learner.replace(params=params, **dict(zip(names, others, strict=True)))


def at_start(obs: Any) -> PolicyInput:
    """The first observations [N, ...] of episodes."""
    count = batch_shape(obs)
    return PolicyInput(obs, jnp.ones(count, bool), jnp.zeros(count))


@dataclass(eq=False, repr=False)
class Policy:
    """Actions for observations; also inside `jit` and `vmap`."""

    algorithm: InitVar[Any]
    learner: InitVar[Any]  # the state of one agent of the `algorithm`
    # Of the environment it was trained in; kept without what only critics see, which is not asked
    # for
    env: EnvSpec
    run_dir: Path | None = None
    step: int | None = None
    seed: int | None = None
    # Mean greedy return at this step, None where it was not evaluated
    evaluation: float | None = None
    config: dict[str, Any] | None = None  # the run's config.json
    member: int = 0

    def __post_init__(self, algorithm: Any, learner: Any):
        algorithm = with_memory(algorithm)
        env = self.env
        self.env = policy_spec(self.env)
        self._learner = jax.device_put(learner)
        self._initial_memory = algorithm.initial_memory
        self._memory_like = jax.tree.leaves(jax.eval_shape(lambda: algorithm.initial_memory(1)))
        self.has_memory = bool(self._memory_like)
        self.wants_reward = algorithm.wants_reward

        def apply(learner, seen, memory, key):
            action, memory = algorithm.act(
                learner, seen._replace(obs=completed(seen.obs, env)), memory, key
            )
            return spaces.clip(action, env.action_space, seen.first.shape), memory

        self._apply = apply
        self._jitted = jax.jit(apply)

    @property
    def who(self) -> str:
        """Which agent of its run it is, in words."""
        args = self.config["args"] if self.config else {}
        is_member = args.get("population") or args.get("sweep")
        return f"member {self.member}, with seed {self.seed}" if is_member else f"seed {self.seed}"

    def __call__(
        self,
        obs: Any,
        memory: Any = None,
        first: Any = None,
        *,
        reward: Any = None,
        key: jax.Array | None = None,
    ) -> Any:
        """Actions [..., *action] for raw observations [..., *obs]: sampled with a `key`, without
        one the best known.

        One observation, or any number of batch axes before its own; every new batch size compiles
        once. JAX arrays give JAX arrays, all else gives NumPy's.

        With `memory`, that of all observations in the order of their axes, returns the actions and
        the new memory. `first` [...] says where an episode begins, and `reward` [...], for policies
        trained with --obs-prev-action-reward, what the step before earned. Raises UsageError for
        what is missing or does not fit.
        """
        if key is not None and not (isinstance(key, jax.Array) and _is_key(key)):
            raise UsageError(
                "key must be one of jax.random.key(SEED), or None for the best known action"
            )
        given, batch = self._given(obs)
        seen = PolicyInput(given, *self._of_steps(batch, memory, first, reward))
        seen = jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :]), seen)
        carried = self._carried(memory, batch)
        actions, after = self._jitted(self._learner, seen, carried, key)
        actions = jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), actions)
        ours = any(isinstance(x, jax.Array) for x in jax.tree.leaves(obs))
        if not (ours or isinstance(jax.tree.leaves(actions)[0], jax.core.Tracer)):
            actions = jax.tree.map(lambda x: np.array(x)[()], actions)
        if memory is None:
            return actions
        return actions, jax.tree.map(lambda x, old: x.reshape(np.shape(old)), after, memory)

    def initial_memory(self, n: int) -> Any:
        """The memory [n, ...] of `n` observations whose episodes begin, () of a policy without."""
        return self._initial_memory(n)

    def _given(self, obs: Any) -> tuple[Any, tuple[int, ...]]:
        """Observations in the types that the networks expect, and their batch axes. Raises
        UsageError as above.
        """
        env = self.env
        space = self.env.observation_space
        if any(np.ma.is_masked(x) for x in jax.tree.leaves(obs)):
            raise UsageError("an observation is a masked array, which leaves numbers out: fill it")
        try:
            arrays = spaces.map_leaves(
                lambda _, x: x if isinstance(x, jax.Array) else np.asarray(x), space, obs
            )
            named = list(
                spaces.leaves(space, env.obs_like, env.given_like, env.with_channels_last(arrays))
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(f"observations of {env.name} have the parts of {space}") from error
        typed = []
        batches = set()
        for name, _, like, given, x in named:
            what = f"{name} of {env.name}".removeprefix(" of ")
            axes = x.ndim - len(like.shape)
            if axes < 0 or x.shape[axes:] != like.shape:
                batch = f"({', '.join(map(str, ('...', *given.shape)))})"
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
        is_known = not any(isinstance(x, jax.core.Tracer) for x in typed)
        if is_known and (fault := fault_in(given, env)):
            raise UsageError(fault)
        return given, batches.pop()

    def _of_steps(
        self, batch: tuple[int, ...], memory: Any, first: Any, reward: Any
    ) -> tuple[Any, Any]:
        """Where episodes begin, and rewards, for a batch of this shape. Raises UsageError where one
        is missing.
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
        given = {"first": (first, bool), "reward": (0.0 if reward is None else reward, np.float32)}
        return tuple(_of_batch(name, x, kind, batch) for name, (x, kind) in given.items())

    def _carried(self, memory: Any, batch: tuple[int, ...]) -> Any:
        """Memory [N, ...] of a batch of N, or of one observation without that axis. Raises
        UsageError as above.
        """
        if memory is None:
            return self.initial_memory(0)
        count = math.prod(batch)
        shapes = [np.shape(x) for x in jax.tree.leaves(memory)]
        dtypes = [
            jnp.result_type(x) if hasattr(x, "dtype") else None for x in jax.tree.leaves(memory)
        ]
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
        """Statistics by which it normalises observations, a tree like them; None without."""
        return getattr(self._learner, "obs_stats", None)

    def with_noise(self, rng: np.random.Generator, size: float) -> "Policy":
        """The same policy, each of whose parameters changes by about this share of itself."""

        def changed(x):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return x * (1 + size * rng.normal(size=x.shape)).astype(x.dtype)

        noisy = copy.copy(self)
        noisy._learner = jax.tree.map(changed, self._learner)
        return noisy

    def player(self, stochastic: bool = False) -> Player:
        """Who plays episodes with it, each with actions sampled by its own key where they are
        `stochastic`.
        """

        def greedy(seen, memory, keys):
            return self._apply(self._learner, seen, memory, None)

        def sampled_one(seen, memory, key):
            return self(seen.obs, memory, seen.first, reward=seen.reward, key=key)

        return Player(self.initial_memory, jax.vmap(sampled_one) if stochastic else greedy)

    def __repr__(self) -> str:
        return (
            f"Policy(env={self.env.name!r}, run_dir={str(self.run_dir)!r}, "
            f"step={self.step}, seed={self.seed})"
        )


def _is_key(key: jax.Array) -> bool:
    """Tell one random key, in today's form or as two words of bits, from everything else."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return key.dtype == jnp.uint32 and key.shape == (2,)


def _of_batch(name: str, x: Any, kind: Any, batch: tuple[int, ...]) -> jax.Array:
    """Values of each observation of a batch, in their type. Raises UsageError where they are
    none.
    """
    array = x if isinstance(x, jax.Array) else np.asarray(x)
    if not is_numeric(array.dtype) or array.shape not in ((), batch):
        wanted = "true or false" if kind is bool else "a number"
        raise UsageError(
            f"{name} must be {wanted} for each observation, {batch}; got {array.dtype} "
            f"{array.shape}"
        )
    if not isinstance(array, jax.core.Tracer):
        with np.errstate(over="ignore"):
            values = np.asarray(array, np.float32)
        if kind is bool and not np.all((values == 0) | (values == 1)):
            raise UsageError(f"{name} must be true or false, got {shortened(f'{values.tolist()}')}")
        if not np.all(np.isfinite(values)):
            raise UsageError(
                f"{name} must be finite in float32, got {shortened(f'{values.tolist()}')}"
            )
    return jnp.broadcast_to(jnp.asarray(array, kind), batch)


def _in_type(x: Any, dtype: np.dtype, what: str) -> Any:
    """Observations of `what` in that type. Raises UsageError where it does not hold one of them, as
    far as is known.
    """
    if isinstance(x, jax.core.Tracer) or np.can_cast(x.dtype, dtype, "safe"):
        return x.astype(dtype)
    try:
        typed = cast(np.asarray(x), dtype)
    except OverflowError as error:
        raise UsageError(f"an observation of {what} has {error}") from None
    return jnp.asarray(typed) if isinstance(x, jax.Array) else typed
