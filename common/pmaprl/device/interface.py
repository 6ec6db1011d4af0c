"""What an algorithm is made of (pure functions of one agent on one device), and what the driver
gives it.

The driver does the rest, once for all algorithms: keys and counters, schedules, environments,
opponents, episodes, metrics, several seeds, members and devices.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from pmaprl.device.agents import PolicyInput
from pmaprl.device.devices import size_of
from pmaprl.device.rollout import compute_where
from pmaprl.device.statistics import Episodes, RecentEpisodes

SMALL_FINAL = 1024  # bytes of a final observation, with the memory of the policy


class HParams(SimpleNamespace):
    """The flags of one agent now: schedules are applied, and a member of a population finds its own
    values here.

    These may be traced arrays []: take numbers of formulas from here, and shapes and branches from
    `args`.
    """


class OnPolicy(NamedTuple):
    """An algorithm that learns from rollouts.

    A learner is a record with at least the fields `params` and `obs_stats`, all that `act` may
    read; `explore` may read everything but fields whose names begin with `opt_state`. A policy with
    memory has `initial_memory`; then `explore` and `act` take a `PolicyInput` and its memory in
    place of observations, and return the memory after the step too.
    """

    init: Callable  # key, flags -> learner
    # Learner, observations [N, ...], noise [N, ...] -> actions [N, ...], extras of the rollout
    explore: Callable
    update: Callable  # learner, Rollout, Now -> learner, metrics
    act: Callable  # learner, observations [B, ...], key or None for the best -> actions [B, ...]
    # Number of environments N -> memory [N, ...] that `act` begins with
    initial_memory: Callable | None = None
    # Likewise of `explore`, where that carries more, such as the critic's
    training_memory: Callable | None = None
    wants_reward: bool = False  # whether actions depend on the last reward
    # By flag, what evolution keeps it within here: lowest and highest
    limits: Mapping[str, tuple[float, float]] = {}
    # By metric, above which value a run warns once, and of what
    cautions: Mapping[str, tuple[float, str]] = {}


class OffPolicy(NamedTuple):
    """An algorithm that learns from a replay buffer, one gradient update at a time."""

    init: Callable  # key, flags -> learner
    # Learner, observations [N, ...], noise [N, ...] -> actions as the buffer keeps them
    explore: Callable
    update: Callable  # learner, Transition [B, ...], Now -> learner, metrics
    act: Callable  # learner, observations [B, ...], key or None for the best -> actions [B, ...]
    # What a learner keeps of all that is stored
    observe: Callable = lambda learner, transitions, valid: learner
    initial_memory: None = None
    wants_reward: bool = False
    limits: Mapping[str, tuple[float, float]] = {}  # as above, as is this:
    cautions: Mapping[str, tuple[float, str]] = {}


class UpdateContext(NamedTuple):
    """What an update has besides the learner and its data."""

    hparams: HParams
    updates: jax.Array  # [] updates done before; for `OffPolicy` gradient updates, with this one
    key: jax.Array | None = None  # of this update, the same on every device
    # Epochs, minibatches -> indices [E, M, B] of this device's samples [T * N]
    minibatches: Callable | None = None
    # For `OffPolicy` two for each group of samples, see `noise_like`
    keys: tuple[jax.Array, jax.Array] = ()


class Rollout(NamedTuple):
    """T steps of N environments, [T, N, ...]."""

    seen: PolicyInput  # what the policy saw before each step
    action: jax.Array
    extras: Any  # what `explore` returned beside the actions
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: Any  # true next observations; None where they stand in the step after
    last: PolicyInput  # [N, ...] after the last step
    memory: Any  # [N, ...] carried into the first step, () without
    # Bool: components of actions that the policy chose itself; None is all of them
    own: jax.Array | None = None
    # Bool: False where an environment only reset itself; None is all steps
    valid: jax.Array | None = None
    # Updates behind the policy that acted, where that was not the newest
    version: jax.Array | None = None

    @property
    def obs(self) -> Any:
        """Observations as the environment gave them."""
        return self.seen.obs

    @property
    def next_obs(self) -> Any:
        """The true next observation of every step, also where an episode ended."""
        if self.final_obs is not None:
            return self.final_obs
        return jax.tree.map(
            lambda x, last: jnp.concatenate([x[1:], last[None]]), self.obs, self.last.obs
        )

    def next_values(
        self, value: jax.Array, value_of: Callable, last: Any = None, final: Any = None
    ) -> jax.Array:
        """The value [T, N] of the true next observation of every step, where its episode was not
        terminated.

        `value` [T, N] are those of the steps. `value_of` gives them for what is `last` [N, ...],
        after the rollout, and for what was `final` [T, N, ...] where a time limit struck:
        observations, if nothing else is given. The latter are computed N at a time, and not at all
        while no time limit strikes. On an accelerator those of all steps are one pass, where they
        are small: a loop of unknown length asks the host, and keeps others out of CUDA graphs.
        """
        following = jnp.concatenate(
            [value[1:], value_of(self.last.obs if last is None else last)[None]]
        )
        if self.final_obs is None:  # it stands in the step after
            return following
        struck = self.truncated & ~self.terminated
        final = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), self.final_obs if final is None else final
        )
        if jax.default_backend() != "cpu" and size_of(final) <= SMALL_FINAL * value.size:
            return jnp.where(struck, value_of(final).reshape(value.shape), following)
        values = compute_where(
            following.ravel(),
            struck.ravel(),
            width=value.shape[1],
            compute=lambda index: value_of(jax.tree.map(lambda x: x[index], final)),
        )
        return values.reshape(value.shape)


class Transition(NamedTuple):
    """What a replay buffer keeps of a step."""

    obs: Any
    action: jax.Array  # Box actions within -1 .. 1, flat
    reward: jax.Array
    terminated: jax.Array  # not set by a time limit
    next_obs: Any  # the true next observation, also where a time limit struck
    # Updates behind the policy that acted, where that was not the newest
    version: jax.Array | None = None
    # Whether an episode or rollout begins here, where n-step returns stop before it
    first: jax.Array | None = None
    discount: jax.Array | None = None  # of the value of `next_obs`, in a batch with n-step returns
    # Not kept: the discounted return so far, with --normalize-rewards
    discounted: jax.Array | None = None


class Actors(struct.PyTreeNode):
    """This device's N environments."""

    env_state: Any  # [N, ...]
    seen: PolicyInput  # [N, ...]
    memory: Any  # [N, ...] still of the last episode where a new one begins
    tracker: Episodes  # [N]
    replay: Any = ()  # [N, C, ...]
    discounted: Any = ()  # [N] discounted returns so far, with --normalize-rewards


class RunState(struct.PyTreeNode):
    """What the driver keeps of one agent, the same on every device."""

    key: jax.Array  # root of all randomness; never advanced, only folded
    updates: jax.Array  # [] updates done
    member_values: dict[str, jax.Array]  # [] flags of its own, of a member of a population
    recent: RecentEpisodes | None = None  # None where actors count episodes
    opponent_pool: Any = ()  # past policies [P, ...] of --opponent self
    gradient_updates: jax.Array | None = None  # [] of an `OffPolicy` algorithm
    env_steps: jax.Array | None = None  # [] stored by actors beside the learner
