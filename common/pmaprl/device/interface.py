"""Records that an algorithm and the driver hand to each other.

Letters of shapes: T steps of a rollout, N environments of this device, B samples of a batch, A
components of an action, E epochs, M minibatches. docs/architecture.md has the whole legend.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from pmaprl.device.episodes import Episodes, RecentEpisodes
from pmaprl.device.rollout import compute_where
from pmaprl.envs.spaces import batch_shape
from pmaprl.machine.devices import size_of

ArrayT = TypeVar("ArrayT", Array, np.ndarray)  # on the device or on the host

# Most bytes of a final observation, with the policy's memory, for which an accelerator computes the
# values of all steps in one pass
MOST_FINAL_BYTES = 1024


class HParams(SimpleNamespace):
    """Hyperparameters of one agent in this update, by the names of the flags.

    Schedules are applied here, and a member of a population finds its own values. A value may be a
    traced array []. Formulas read their numbers from here; shapes and branches come from `args`.
    """


class PolicyInput(NamedTuple, Generic[ArrayT]):
    """Input of a policy with memory for N environments, before they step.

    Attributes:
        obs: raw observations [N, ...].
        first: bool [N], True where an episode begins. Everything before that does not count.
        reward: raw rewards [N] of the step before.
    """

    obs: Any
    first: ArrayT
    reward: ArrayT

    @classmethod
    def at_start(cls, obs: Any) -> "PolicyInput[Array]":
        """Input where episodes begin, from their first observations [N, ...]."""
        count = batch_shape(obs)
        return PolicyInput(obs=obs, first=jnp.ones(count, bool), reward=jnp.zeros(count))


class UpdateContext(NamedTuple):
    """Arguments of an update from a rollout besides the learner and the rollout.

    Attributes:
        hparams: hyperparameters of this update.
        updates: [] number of updates done before.
        key: random key of this update, the same on every device.
        minibatches: `minibatches(epochs, minibatches)` returns indices [E, M, B] into this
            device's samples, flattened from [T, N] to [T * N].
    """

    hparams: HParams
    updates: Array
    key: Array
    minibatches: Callable[[int, int], Array]


class GradientContext(NamedTuple):
    """Arguments of a gradient update from a replay buffer besides the learner and the batch.

    Attributes:
        hparams: hyperparameters of this update.
        updates: [] number of gradient updates, this one included.
        keys: two arrays of keys [G], a key for each group of the batch; `optim.noise_like` takes
            one of them.
    """

    hparams: HParams
    updates: Array
    keys: tuple[Array, ...] = ()


class Rollout(NamedTuple):
    """T steps of N environments, [T, N, ...].

    Attributes:
        seen: the policy's input before each step.
        action: actions as `explore` returned them.
        extras: the second value that `explore` returned.
        reward: raw rewards.
        terminated: bool, True where the episode ended, but not by a time limit.
        truncated: bool, True where a time limit ended the episode.
        final_obs: true next observations. None if the next step has them.
        last: [N, ...] the policy's input after the last step.
        memory: [N, ...] memory before the first step, () for a policy without.
        acted_by_us: bool, True for the components of actions that the policy chose. None: all.
        valid: bool, False where an environment only reset itself. None: all steps count.
        version: number of updates that the acting policy had learned from. None: the newest policy
            acted.
    """

    seen: PolicyInput
    action: Array
    extras: Any
    reward: Array
    terminated: Array
    truncated: Array
    final_obs: Any
    last: PolicyInput
    memory: Any
    acted_by_us: Array | None = None
    valid: Array | None = None
    version: Array | None = None

    @property
    def obs(self) -> Any:
        """Raw observations [T, N, ...], as the environment gave them."""
        return self.seen.obs

    @property
    def next_obs(self) -> Any:
        """True next observations [T, N, ...], also where an episode ended."""
        if self.final_obs is not None:
            return self.final_obs

        def shifted(x: Array, last: Array) -> Array:
            return jnp.concatenate([x[1:], last[None]])

        return jax.tree.map(shifted, self.obs, self.last.obs)

    def next_values(
        self,
        value: Array,
        value_of: Callable,
        last: Any = None,
        final: Any = None,
    ) -> Array:
        """Values of the true next observations, for the bootstrap of returns.

        The values of final observations are computed N at a time, only where a time limit struck.
        On an accelerator, small final observations of all steps are one pass: a loop of unknown
        length asks the host, and keeps other operations out of CUDA graphs.

        Args:
            value: [T, N] values of the rollout's observations.
            value_of: the value function, from inputs [N, ...] to values [N].
            last: its input [N, ...] after the last step; default: the last observations.
            final: its input [T, N, ...] at final observations; default: `final_obs`.

        Returns:
            [T, N] value of the next observation; at a truncation, value of the final observation.
            The entry at a termination is meaningless: ignore it.
        """
        last_input = self.last.obs if last is None else last
        last_value = value_of(last_input)
        following = jnp.concatenate([value[1:], last_value[None]])
        if self.final_obs is None:  # the next step has the true next observation
            return following
        is_truncated = self.truncated & ~self.terminated
        final_input = self.final_obs if final is None else final
        final_input = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), final_input)
        is_small = size_of(final_input) <= MOST_FINAL_BYTES * value.size
        if is_small and jax.default_backend() != "cpu":
            final_value = value_of(final_input)
            return jnp.where(is_truncated, final_value.reshape(value.shape), following)
        values = compute_where(
            following.ravel(),
            is_truncated.ravel(),
            width=value.shape[1],
            compute=lambda index: value_of(jax.tree.map(lambda x: x[index], final_input)),
        )
        return values.reshape(value.shape)


class Transition(NamedTuple):
    """Steps as a replay buffer keeps them, or a batch of them [B, ...].

    Attributes:
        obs: raw observations.
        action: actions; those of a Box are flat and within -1 .. 1.
        reward: rewards; in a batch with n-step returns the discounted sum of n rewards.
        terminated: bool, False where a time limit ended the episode.
        next_obs: true next observations, also where a time limit struck.
        version: number of updates that the acting policy had learned from. None: the newest policy
            acted.
        first: bool, True where an episode or a rollout begins. n-step returns stop before it.
        discount: factor of the value of `next_obs`, in a batch with n-step returns.
        discounted: discounted return of the episode so far, with --normalize-rewards. Only
            `observe` gets it: the buffer has stored the transition before.
    """

    obs: Any
    action: Array
    reward: Array
    terminated: Array
    next_obs: Any
    version: Array | None = None
    first: Array | None = None
    discount: Array | None = None
    discounted: Array | None = None


class Actors(struct.PyTreeNode):
    """N environments of this device, with everything that belongs to each of them."""

    env_state: Any  # [N, ...]
    seen: PolicyInput  # [N, ...]
    memory: Any  # [N, ...] not yet reset where `seen.first` is True
    tracker: Episodes  # [N] running episodes
    replay: Any = ()  # [N, K, ...] rings of K slots
    discounted: Any = ()  # [N] discounted returns so far, with --normalize-rewards


class RunState(struct.PyTreeNode):
    """The driver's own state of one agent, the same on every device."""

    key: Array  # root of all randomness; never advanced, only folded
    updates: Array  # [] updates done
    member_values: dict[str, Array]  # [] values of the flags that differ between members
    recent: RecentEpisodes | None = None  # None if actors count episodes
    opponent_pool: Any = ()  # [P, ...] past policies, with --opponent self
    gradient_updates: Array | None = None  # [] gradient updates of an `OffPolicy` algorithm
    env_steps: Array | None = None  # [] steps that actors on the host have stored
