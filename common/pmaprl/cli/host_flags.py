"""Flags of environments on the host, with actors beside a learner, and the class of flags for --env
and --recipe.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pmaprl.cli.checks import (
    Bounds,
    Count,
    CountOrZero,
    Steps,
    Timeout,
    check_multiple,
    flag_of,
    kinds_of,
)
from pmaprl.cli.device_flags import ReplayArgs, RolloutArgs
from pmaprl.cli.env_flags import steps_on_host
from pmaprl.cli.errors import UsageError
from pmaprl.cli.run_flags import ArgsFactory, RunArgs

Size = Annotated[int, Bounds(at_least=1, at_most=2**20)]


@dataclass(kw_only=True)
class HostEnvArgs(RunArgs):
    """Flags of environments that step on the host, in actor threads beside the learner.

    Of several processes each has as many actors and devices, with these flags; sizes and intervals
    count over all.
    """

    # environment
    env: str = "envpool:CartPole-v1"
    """Environment: envpool:id or gymnasium:id; gymnasium:module:id imports the module that
    registers your own.
    """
    env_params: str = ""
    """Pass these arguments to envpool's or gymnasium's make: a JSON object, such as
    '{"max_episode_steps": 200}'.
    """
    eval_env_params: str = ""
    """Change --env-params for evaluations: a JSON object; Atari is evaluated on whole games and
    unclipped rewards."""
    vectorization: Literal["async", "sync", "vector"] = "async"
    """async: one process per environment; sync: all in one thread; vector: the environment's own
    vectorized version.
    """
    reset_timeout: Timeout = 120.0
    """Seconds that an actor may take to make, to reset for the first time, or to close its
    environments."""
    step_timeout: Timeout = 60.0
    """Seconds that a step of an actor's environments may take, resets included."""

    # actors
    num_steps: Size = 32
    """Steps of every environment per rollout."""
    actor_devices: str = ""
    """Devices of each process that choose actions, as 0 or 0,1 (default: its first)."""
    learner_devices: str = ""
    """Devices of each process that learn, as 1,2,3 (default: every accelerator, or on a CPU the
    first device).
    """
    learner_timeout: Timeout = 300.0
    """Seconds without a rollout after which the run fails."""
    max_restarts: CountOrZero = 10
    """Restarts of failed actors, with new environments, before the run fails."""

    # evaluation and checkpoints
    eval_episodes: Count = 32
    """Episodes per evaluation, in environments of their own beside the training."""

    # One actor on each actor device, from whose rollouts updates learn in turn; `ActorArgs` has
    # flags for it
    actor_threads = 1
    rollouts_per_update = 0
    lockstep = True
    # One agent, alone, and no flag for all devices: see `actor_devices` and `learner_devices`
    num_agents = 1
    is_population = False
    exchange_interval = 0
    num_devices = 0
    lag: ClassVar[int] = 1  # updates that a rollout's policy is behind in a fixed order
    # Whether environments have to reset within the step that ends an episode
    resets_in_step: ClassVar[bool] = False

    @property
    def num_actor_devices(self) -> int:
        return self.processes * max(len(self.actor_indices), 1)

    @property
    def num_actors(self) -> int:
        return self.num_actor_devices * self.actor_threads

    @property
    def batch_rollouts(self) -> int:
        """Rollouts per update."""
        return self.rollouts_per_update or self.num_actors

    @property
    def own_rollouts(self) -> int:
        """Rollouts per update that each process contributes."""
        return self.batch_rollouts // self.processes

    def check_split(self, num_learners: int) -> None:
        """Raise UsageError unless each learner device of a process gets as many whole blocks of
        every rollout.
        """
        # The one that is a flag
        name = "num_envs" if "num_envs" in kinds_of(type(self)) else "envs_per_actor"
        number = getattr(self, name)
        block = self.block * num_learners * (number // self.envs_per_actor)
        check_multiple(
            flag_of(name), number, block, f"minibatches and {num_learners} learner devices"
        )

    def __post_init__(self):
        super().__post_init__()
        self.actor_indices = _indices("--actor-devices", self.actor_devices)
        self.learner_indices = _indices("--learner-devices", self.learner_devices)
        # Of these two a class has one as a flag; the other follows from flags, and always is such a
        # multiple
        check_multiple(
            "--rollouts-per-update",
            self.batch_rollouts,
            self.processes,
            f"{self.processes} processes",
        )
        check_multiple(
            "--num-envs", self.num_envs, self.num_actors, f"{self.num_actors} actor devices"
        )


@dataclass(kw_only=True)
class ActorArgs(HostEnvArgs):
    """Flags of actors that go on while the learner learns."""

    # actors
    envs_per_actor: Size = 16
    """Environments that an actor thread steps together."""
    actor_threads: Annotated[int, Bounds(at_least=1, at_most=1024)] = 2
    """Actor threads per actor device; with two, one acts while the environments of the other
    step.
    """
    rollouts_per_update: CountOrZero = 0
    """Rollouts per update, from the actors that are first, equally many from each process; 0: one
    per actor."""
    lockstep: bool = False
    """Make runs repeatable: actors take turns, each acting with the parameters from before the
    running update.
    """

    # An algorithm with minibatches says `num_minibatches` and `samples_per_env`
    block = RolloutArgs.block

    @property
    def num_envs(self) -> int:
        return self.num_actors * self.envs_per_actor

    @property
    def envs_per_update(self) -> int:
        return self.batch_rollouts * self.envs_per_actor

    def sizes(self, num_devices: int) -> list[str]:
        rollouts = (
            f"{self.batch_rollouts} rollouts of {self.envs_per_actor} envs x {self.num_steps} steps"
        )
        return [
            f"{self.num_actors} actors x {self.envs_per_actor} envs = {self.num_envs} envs",
            f"{rollouts} = {self.steps_per_update:,} per update, {self.num_updates:,} updates",
        ]


@dataclass(kw_only=True)
class HostRolloutArgs(RolloutArgs, HostEnvArgs):
    """An update takes a rollout of all environments with the newest policy, as on the devices."""

    # environment
    num_envs: Size = 8
    """Environments stepped together, over all processes."""

    lag: ClassVar[int] = 0
    resets_in_step: ClassVar[bool] = True

    @property
    def envs_per_actor(self) -> int:
        return self.num_envs // self.num_actors


@dataclass(kw_only=True)
class HostReplayArgs(ReplayArgs, ActorArgs):
    """An update takes some rollouts of actors, and makes the gradient updates that belong to
    them.
    """

    total_timesteps: Steps = 30_000
    num_steps: Size = 8
    envs_per_actor: Size = 4

    def check_split(self, num_learners: int) -> None:
        if self.batch_size // self.replay_partitions % num_learners:
            actors = math.gcd(self.num_actor_devices, self.batch_rollouts)
            shares = (
                f"{num_learners} learner devices, each with a part of what comes from "
                f"{actors} actor devices"
            )
            check_multiple("--batch-size", self.batch_size, num_learners * actors, shares)
        super().check_split(num_learners)

    @property
    def replay_partitions(self) -> int:
        """Parts of an update's rollouts that batches draw from apart; no boundary of processes cuts
        them.
        """
        return math.gcd(self.num_actor_devices, self.batch_rollouts, self.batch_size)

    def sizes(self, num_devices: int) -> list[str]:
        *rollouts, learning = super().sizes(num_devices)
        return [*rollouts, f"up to {learning}"]  # fewer where actors fail


def _indices(flag: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"{flag} takes numbers of devices such as 0 or 0,1, got {text!r}")
    numbers = tuple(map(int, words))
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{flag} {text} names a device twice")
    return numbers


class FlagsByPlace(ArgsFactory):
    """Flags that an algorithm has in both places; an instance also has those of the place of its
    `env`.

    `Args(env="CartPole-v1")` is a `Args.on_device` too, `Args(env="gymnasium:CartPole-v1")` a
    `Args.on_host`. A flag `recipe` names a table of algos/recipes/ with other defaults; one without
    a table changes none.
    """

    on_device: ClassVar[type]
    on_host: ClassVar[type]
    placeless = None  # what a class for a place is made of
    place = None
    recipe: ClassVar[str] = ""  # a flag of those that have several

    def __new__(cls, **flags: Any):
        env = flags.get("env")
        # No text is refused later
        there = cls.at(env if isinstance(env, str) else "", str(flags.get("recipe", "")))
        if cls.place and not issubclass(there, cls):
            what = (
                f"--env {env} steps elsewhere than that"
                if there.recipe == cls.recipe
                else "--recipe is not that"
            )
            raise UsageError(f"{what} of these flags: make them anew from `Args`")
        return object.__new__(there)

    def __reduce__(self):
        blank = functools.partial(
            FlagsByPlace.__new__, self.placeless, env=self.env, recipe=self.recipe
        )
        return blank, (), vars(self)

    @classmethod
    def at(cls, env: str = "", recipe: str = "") -> type:
        """The class for the place of `env`, or of the environment that is the default, with a
        recipe's defaults.
        """
        flags = cls.placeless or cls
        place = cls.place
        if env or not place:
            on_host = steps_on_host(env or getattr(flags, "env", flags.on_device.env))
            place = flags.on_host if on_host else flags.on_device
        return _class_for(flags, place, recipe or cls.recipe)


@functools.cache
def _class_for(flags: type, place: type, recipe: str) -> type:
    names = {
        "placeless": flags,
        "place": place,
        "__doc__": flags.__doc__,
        "__module__": flags.__module__,
    }
    # `make_dataclass` sets another module, from Python 3.12 on
    make = dataclasses.dataclass(kw_only=True)
    if recipe == flags.recipe:
        return make(type(flags.__name__, (flags, place), names))
    plain = _class_for(flags, place, flags.recipe)
    if (entry := plain.entry_in("recipes", recipe, plain.lasting_flags())) is None:
        return plain
    defaults = entry.flags | {"recipe": recipe, "variant": f" ({recipe})"}
    kinds = {
        field.name: field.type for field in dataclasses.fields(plain) if field.name in defaults
    }
    return make(type(flags.__name__, (plain,), names | {"__annotations__": kinds} | defaults))
