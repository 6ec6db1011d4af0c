"""The contract between an algorithm and the driver: derive from `OnPolicy`, `RecurrentOnPolicy` or
`OffPolicy`.

An algorithm is a few pure functions of one agent on one device. The driver calls them, and does the
rest once for all algorithms: keys and counters, schedules, environments, opponents, episodes,
metrics, several seeds, members and devices.

Letters of shapes: T steps of a rollout, N environments of this device, B samples of a batch.
docs/architecture.md has the whole legend.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from jax import Array

from pmaprl.cli.errors import UsageError
from pmaprl.device.interface import (
    GradientContext,
    HParams,
    PolicyInput,
    Rollout,
    Transition,
    UpdateContext,
)
from pmaprl.device.statistics import Reports
from pmaprl.envs.spaces import EnvSpec

ArgsT = TypeVar("ArgsT")
LearnerT = TypeVar("LearnerT")
Metrics = dict[str, Any]
"""Numbers [] of an update, by name."""


@dataclass(frozen=True, eq=False)
class Algorithm(abc.ABC, Generic[ArgsT, LearnerT]):
    """Common part of the contracts `OnPolicy`, `RecurrentOnPolicy` and `OffPolicy`.

    Formulas read their numbers from `hparams`, which has the flags with schedules applied and the
    values of a member. Shapes and branches come from `args`. Networks are made of both once, by
    `functools.cached_property`.

    A learner is a record with at least the fields `params` and `obs_stats`. `act` may read these
    two. `explore` may read every field but those whose names begin with `opt_state`.

    Attributes:
        args: the flags.
        env: the environment's spaces.
    """

    args: ArgsT
    env: EnvSpec

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make an algorithm; raise UsageError if its class lacks a method of its contract."""
        missing = sorted(cls.__abstractmethods__)
        if missing:
            contracts = [base.__name__ for base in cls.__mro__ if base.__module__ == __name__]
            raise UsageError(
                f"{cls.__name__} has no {' and no '.join(missing)}: docs/new-algorithm.md says "
                f"which methods {contracts[0]} needs"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise UsageError for spaces or flags that the algorithm cannot use."""

    @property
    def limits(self) -> Mapping[str, tuple[float, float]]:
        """Lowest and highest value that evolution may give a flag, by flag."""
        return {}

    @property
    def cautions(self) -> Mapping[str, tuple[float, str]]:
        """By metric, the value above which a run warns once, and the warning."""
        return {}

    @abc.abstractmethod
    def init(self, key: Array, hparams: HParams) -> LearnerT:
        """Make the learner before the first update."""


class OnPolicy(Algorithm[ArgsT, LearnerT]):
    """An algorithm that learns from rollouts of its newest policy."""

    @abc.abstractmethod
    def explore(self, learner: LearnerT, obs: Any, noise: Any) -> tuple[Any, Any]:
        """Choose the actions of one environment step.

        Args:
            learner: the learner.
            obs: [N, ...] raw observations.
            noise: [N, ...] random numbers, as `Distribution.sample` takes them.

        Returns:
            Actions [N, ...], and whatever else `update` wants to find in `rollout.extras`.
        """

    @abc.abstractmethod
    def update(
        self, learner: LearnerT, rollout: Rollout, context: UpdateContext
    ) -> tuple[LearnerT, Metrics]:
        """Learn from one rollout [T, N, ...].

        Returns:
            The learner, and metrics []. The driver reduces them over devices by the ends of their
            names, but leaves `_sum` metrics as they are: `adam_step` has summed those of a loss.
        """

    @abc.abstractmethod
    def act(self, learner: LearnerT, obs: Any, key: Array | None = None) -> Any:
        """Choose actions [B, ...] for raw observations [B, ...].

        They are the best known ones without a key, else sampled ones.
        """


class RecurrentOnPolicy(Algorithm[ArgsT, LearnerT]):
    """An algorithm like `OnPolicy` whose policy has a memory."""

    @property
    def wants_reward(self) -> bool:
        """True if actions depend on the last reward."""
        return False

    @abc.abstractmethod
    def initial_memory(self, count: int) -> Any:
        """Memory [count, ...] of `act` where episodes begin."""

    def training_memory(self, count: int) -> Any:
        """Memory [count, ...] of `explore`, which may carry more, such as the critic's."""
        return self.initial_memory(count)

    @abc.abstractmethod
    def explore(
        self, learner: LearnerT, seen: PolicyInput, memory: Any, noise: Any
    ) -> tuple[Any, Any, Any]:
        """Choose the actions of one environment step.

        Args:
            learner: the learner.
            seen: [N, ...] raw observations, and where episodes begin.
            memory: [N, ...] memory before the step, not yet reset where an episode begins.
            noise: [N, ...] random numbers, as `Distribution.sample` takes them.

        Returns:
            Actions [N, ...], whatever else `update` wants to find in `rollout.extras`, and the
            memory after the step.
        """

    @abc.abstractmethod
    def update(
        self, learner: LearnerT, rollout: Rollout, context: UpdateContext
    ) -> tuple[LearnerT, Metrics]:
        """Learn from one rollout [T, N, ...]; `rollout.memory` is the memory before it.

        Returns:
            The learner, and metrics []. The driver reduces them over devices by the ends of their
            names, but leaves `_sum` metrics as they are: `adam_step` has summed those of a loss.
        """

    @abc.abstractmethod
    def act(
        self, learner: LearnerT, seen: PolicyInput, memory: Any, key: Array | None = None
    ) -> tuple[Any, Any]:
        """Choose actions [B, ...] for inputs [B, ...].

        They are the best known ones without a key, else sampled ones.

        Returns:
            Actions, and the memory after the step.
        """


class OffPolicy(Algorithm[ArgsT, LearnerT]):
    """An algorithm that learns from a replay buffer, one gradient update at a time."""

    @abc.abstractmethod
    def explore(self, learner: LearnerT, obs: Any, noise: Any) -> Any:
        """Choose the actions [N, ...] of one environment step, as the buffer keeps them.

        Args:
            learner: the learner.
            obs: [N, ...] raw observations.
            noise: [N, ...] random numbers, as `Distribution.sample` takes them.
        """

    @abc.abstractmethod
    def update(
        self, learner: LearnerT, batch: Transition, context: GradientContext
    ) -> tuple[LearnerT, Reports]:
        """Make one gradient update from a batch [B, ...].

        Returns:
            The learner, and metrics []. The driver reduces them over devices by the ends of their
            names, but leaves `_sum` metrics as they are: `adam_step` has summed those of a loss.
        """

    @abc.abstractmethod
    def act(self, learner: LearnerT, obs: Any, key: Array | None = None) -> Any:
        """Choose actions [B, ...] for raw observations [B, ...].

        They are the best known ones without a key, else sampled ones.
        """

    def observe(self, learner: LearnerT, transitions: Transition, valid: Array | None) -> LearnerT:
        """Update normalizers by transitions [T, N, ...] that were stored.

        Args:
            learner: the learner.
            transitions: the new transitions.
            valid: [T, N] bool, False where a step does not count; None: all count.
        """
        return learner


@dataclass(frozen=True, eq=False)
class AsRecurrent(RecurrentOnPolicy[Any, Any]):
    """Adapter: an algorithm without memory, called like one whose memory is ()."""

    algorithm: OnPolicy | OffPolicy

    def init(self, key: Array, hparams: HParams) -> Any:
        return self.algorithm.init(key, hparams)

    def initial_memory(self, count: int) -> tuple:
        return ()

    def explore(
        self, learner: Any, seen: PolicyInput, memory: Any, noise: Any
    ) -> tuple[Any, Any, Any]:
        assert isinstance(self.algorithm, OnPolicy)
        action, extras = self.algorithm.explore(learner, seen.obs, noise)
        return action, extras, memory

    def update(self, learner: Any, rollout: Rollout, context: UpdateContext) -> tuple[Any, Metrics]:
        assert isinstance(self.algorithm, OnPolicy)
        return self.algorithm.update(learner, rollout, context)

    def act(
        self, learner: Any, seen: PolicyInput, memory: Any, key: Array | None = None
    ) -> tuple[Any, Any]:
        return self.algorithm.act(learner, seen.obs, key), memory


AnyAlgorithm = OnPolicy | RecurrentOnPolicy | OffPolicy


def as_recurrent(algorithm: AnyAlgorithm) -> RecurrentOnPolicy:
    """Adapt any algorithm to the form of a recurrent one.

    Of an `OffPolicy`, only `init` and `act` work.
    """
    if isinstance(algorithm, RecurrentOnPolicy):
        return algorithm
    return AsRecurrent(args=algorithm.args, env=algorithm.env, algorithm=algorithm)
