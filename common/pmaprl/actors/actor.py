"""One actor: environments on the host, stepped with a policy on a device, one rollout at a time."""

import math
import operator
from collections.abc import Callable
from concurrent.futures import wait
from functools import reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from pmaprl.actors.threads import (
    POLL_INTERVAL,
    ActorFlags,
    Collected,
    HostRollout,
    RolloutStep,
    Slot,
    Worker,
)
from pmaprl.cli.errors import FailedEnvError, TrainingError, UsageError
from pmaprl.cli.host_flags import HostEnvArgs
from pmaprl.device.interface import PolicyInput
from pmaprl.device.statistics import MetricSums, Number, reduction_of
from pmaprl.envs import spaces
from pmaprl.envs.bytes import spec_with_byte_max
from pmaprl.envs.differences import difference
from pmaprl.envs.foreign_code import readable_errors
from pmaprl.envs.host import HostEnvs, HostStep, SteppedEnvs, begins, evaluation_params
from pmaprl.envs.masks import check_legal, check_parts, legal_actions
from pmaprl.envs.numbers import cast, is_numeric
from pmaprl.envs.ranges import fault_in
from pmaprl.envs.registry import make_host
from pmaprl.envs.spaces import Box, Discrete, EnvSpec
from pmaprl.envs.variation import REDUCTIONS
from pmaprl.machine.devices import Device


class Stepper:
    """The N environments of a worker, their episodes, and a check of all that they return.

    Raises FailedEnvError if observations or rewards cannot be used.
    """

    def __init__(self, worker: Worker, envs: SteppedEnvs, longest: float = np.inf):
        """Begin an episode in each environment.

        Args:
            worker: notes its phases for those who watch.
            envs: its environments.
            longest: number of steps after which an episode counts as over.
        """
        self._worker = worker
        self._envs = envs
        self._longest = longest
        count = envs.num_envs
        self._return = np.zeros(count)
        self._length = np.zeros(count, int)
        with worker.doing("reset"):
            obs = envs.reset()
        # Input [N, ...] of the next action, observations in the networks' types
        self.seen: PolicyInput[np.ndarray] = PolicyInput(
            obs=self._checked(obs),
            first=np.ones(count, bool),
            reward=np.zeros(count, np.float32),
        )
        self._check_input(envs.spec, acting=self.seen.first)

    def step(self, action: Any) -> tuple[HostStep, list[tuple[int, float, int]]]:
        """Step all environments.

        Returns:
            The step, and (environment, return, length) of each episode that is over.
        """
        envs = self._envs
        with self._worker.doing("env_step"):
            out = envs.step(action)
        self.seen = PolicyInput(self._checked(out.obs), begins(out), out.reward)
        self._check_finite(out.reward, "reward")
        if out.final_obs is not None:
            out = out._replace(final_obs=self._checked(out.final_obs))
            fault = fault_in(out.final_obs, envs.spec)
            if fault:
                raise FailedEnvError(fault)
        self._check_input(envs.spec, acting=~out.ended | envs.resets_in_step)
        self._return += np.where(out.valid, out.reward, 0.0)
        self._length += out.valid
        over = np.flatnonzero(out.ended | (self._length >= self._longest))
        returns = self._return[over].tolist()
        lengths = self._length[over].tolist()
        episodes = list(zip(over.tolist(), returns, lengths, strict=True))
        self._return[over] = 0
        self._length[over] = 0
        return out, episodes

    def _check_input(self, spec: EnvSpec, acting: np.ndarray) -> None:
        fault = fault_in(self.seen.obs, spec)
        if fault:
            raise FailedEnvError(fault)
        check_legal(self.seen.obs, acting, spec)

    def _checked(self, obs: Any) -> Any:
        return jax.tree.map(self._checked_part, self._envs.spec.obs_like, obs)

    def _checked_part(self, like: Any, obs: np.ndarray) -> np.ndarray:
        name = self._worker.name
        shape = len(self._length), *like.shape
        if not isinstance(obs, np.ndarray):
            kind = type(obs).__name__
            raise FailedEnvError(f"an observation of {name} is a {kind}, not an array of numbers")
        if not is_numeric(obs.dtype) or np.ma.is_masked(obs):
            raise FailedEnvError(
                f"an observation of {name} is of type {obs.dtype}, not an array of numbers"
            )
        if obs.shape != shape:
            raise FailedEnvError(
                f"the observations of {name} have shape {obs.shape} instead of {shape}"
            )
        try:
            obs = cast(obs, like.dtype)
        except OverflowError as error:
            hint = "wrong bounds or a wrong type, if its space says otherwise"
            raise FailedEnvError(f"an observation of {name} has {error}: {hint}") from None
        self._check_finite(obs, "observation")
        return obs

    def _check_finite(self, values: np.ndarray, what: str) -> None:
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            rows = values.reshape(len(values), -1)
            is_finite = np.isfinite(rows).all(axis=1)
            index = np.flatnonzero(~is_finite)[0]
            raise FailedEnvError(
                f"the {what} of environment {index} of {self._worker.name} is not finite"
            )


class Actor(Worker):
    """N environments, stepped one rollout at a time. One thread uses it."""

    def __init__(
        self,
        number: int,
        device: Device,
        args: ActorFlags,
        act: Callable,
        memory: Any,
        version: int,
    ):
        """Prepare an actor, which `start` begins.

        Args:
            number: index of the actor among those of all processes.
            device: acts on this device.
            args: the flags.
            act: takes parameters, memory, key data, the number of a step and a `PolicyInput`
                [N, ...]. It returns actions [N, ...], extras [N, ...] and the new memory.
            memory: the memory of the first step.
            version: version of the first parameters that the actor gets.
        """
        super().__init__(f"actor {number}", ("env_step", "act", "wait_params", "wait_put"))
        self.number = number
        self.device = device
        self._args = args
        self._act = act
        self._first_memory = memory
        self.rollouts = 0
        self.restarts = 0
        self._make_envs = env_maker(args, args.envs_per_actor, args.env_params)
        self._seed = args.seed, version, number

    def start(self) -> None:
        """Make the environments, with new seeds after every restart, and begin their episodes."""
        sequence = np.random.SeedSequence([*self._seed, self.restarts])
        env_seed, act_seed = (sequence.generate_state(2) >> 1).tolist()
        with self.doing("make"):
            envs = self._make_envs(env_seed)
            self.envs = envs
        self._stepper = Stepper(self, envs)
        self._memory = self._first_memory
        key = jax.random.key(act_seed)
        self._key = np.asarray(jax.random.key_data(key))
        self._steps = np.uint32(0)

    def collect(self, choose: Callable[[Slot | None], Slot]) -> Collected:
        """Collect a rollout of `num_steps` steps.

        Args:
            choose: gets the parameters in use, None at first, and returns those for the next step.
        """
        first = self._stepper.seen.first[None]
        memory = jax.tree.map(lambda x: np.asarray(x)[None], self._memory)
        slot = None
        steps = []
        obs = [self._stepper.seen.obs]
        episodes = []
        logged = []
        for _ in range(self._args.num_steps):
            with self.doing("wait_params"):
                slot = choose(slot)
            with self.doing("act"):
                action, extras, self._memory = self._act(
                    slot.params, self._memory, self._key, self._steps, self._stepper.seen
                )
                action, extras = jax.device_get((action, extras))
            self._steps += np.uint32(1)
            out, over = self._stepper.step(action)
            step = RolloutStep(
                action=action,
                extras=extras,
                reward=out.reward,
                terminated=out.terminated,
                truncated=out.truncated,
                valid=out.valid,
                version=np.full(len(out.valid), slot.version, np.int32),
                final_obs=out.final_obs,
            )
            steps.append(step)
            obs.append(self._stepper.seen.obs)
            episodes += [(ret, length) for _, ret, length in over]
            logged.append(self._logged_numbers(out))
        self.rollouts += 1
        # Every rollout gets new arrays, because the transfer of the last one may be under way
        rollout = HostRollout.of(
            _stacked(steps),
            obs=_stacked(obs),
            first=first,
            memory=memory,
        )
        return Collected(
            actor=self.number,
            rollout=rollout,
            episodes=episodes,
            info=reduce(operator.add, logged),
        )

    def _logged_numbers(self, out: HostStep) -> MetricSums:
        """Metrics of --log-info in a step, over all environments."""
        functions = {"max": np.max, "min": np.min, "last": np.mean}
        values: dict[str, Number] = {}
        counts: dict[str, Number] = {}
        for metric in self._args.log_info:
            entry, _, kind = metric.rpartition("_")
            numbers = out.numbers(metric)
            if not len(numbers) and kind in REDUCTIONS:
                numbers = out.numbers(entry)
            name = f"env/{metric}"
            reduction = functions.get(reduction_of(name), np.sum)
            values[name] = reduction(numbers) if len(numbers) else 0.0
            counts[name] = len(numbers)
        return MetricSums(values, counts)


def _stacked(steps: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.stack(parts), *steps)


class HostEnvKind(NamedTuple):
    """Properties of an environment that are known before any actor has one."""

    name: str
    spec: EnvSpec
    resets_in_step: bool


def inspect_env(args: HostEnvArgs) -> HostEnvKind:
    """Make the environment once to learn its spaces, and once more if evaluations have another one.

    Raises:
        UsageError: the environment cannot be used, or evaluations have other spaces.
        TrainingError: the environment is beyond a timeout.
    """
    kind = _inspect(args, args.env_params)
    params = evaluation_params(vars(args))
    if params == args.env_params:
        return kind
    evaluated = _inspect(args, params)
    found = difference(kind.spec, evaluated.spec, ("in the training", "in evaluations"))
    if found:
        raise UsageError(f"--eval-env-params must keep the spaces of the training: {found}")
    return kind


def env_maker(args: HostEnvArgs, num_envs: int, env_params: str) -> Callable[[int], HostEnvs]:
    """A function of a seed that makes `num_envs` environments."""

    def make(seed: int) -> HostEnvs:
        return make_host(
            args.env,
            num_envs,
            seed,
            env_params,
            vectorization=args.vectorization,
            reset_timeout=args.reset_timeout,
            step_timeout=args.step_timeout,
            resets_in_step=args.resets_in_step,
        )

    return make


def _inspect(args: HostEnvArgs, env_params: str) -> HostEnvKind:
    """Make one environment, step it once and close it, in a thread and within the timeouts."""
    worker = Worker(args.env)
    how = "vector" if args.vectorization == "vector" else "sync"

    def try_out() -> HostEnvKind:
        with worker.doing("make"):
            envs = make_host(
                args.env,
                1,
                args.seed,
                env_params,
                vectorization=how,
                resets_in_step=args.resets_in_step,
            )
        worker.envs = envs
        try:
            _step_once(worker, envs)
        except BaseException:
            worker.close()
            raise
        with worker.doing("close"), readable_errors(f"environment {args.env} cannot be closed"):
            envs.close()
        spec = spec_with_byte_max(envs.spec, args.byte_max)
        return HostEnvKind(args.env, spec, envs.resets_in_step)

    worker.run(try_out)
    while not worker.result.done():
        flag = worker.stuck(args)
        if flag:
            raise TrainingError(
                f"environment {args.env} does not return from {worker.activity.phase} ({flag})"
            )
        wait([worker.result], timeout=POLL_INTERVAL)
    return worker.result.result()


def _step_once(worker: Worker, envs: HostEnvs) -> None:
    """Reset and step the one environment of a worker.

    An environment that fails here is refused at once. Actors would make it anew again and again.

    Raises:
        UsageError: something that the environment returns cannot be used.
    """
    name = envs.spec.name
    check_parts(envs.spec)
    with readable_errors(f"environment {name} cannot be reset"):
        stepper = Stepper(worker, envs)
    with readable_errors(f"environment {name} cannot be stepped"):
        action = _first_action(envs.spec, stepper.seen.obs)
        stepper.step(action)


def _first_action(spec: EnvSpec, obs: Any) -> Any:
    """A legal action [1, ...] as networks give it: first choices, and zeros for a Box."""

    def chosen(leaf, mask):
        if isinstance(leaf, Box):
            return np.zeros((1, math.prod(leaf.shape)), np.float32)
        legal = np.ones((1, sum(leaf.nvec)), bool) if mask is None else mask
        ends = np.cumsum(leaf.nvec)[:-1]
        choices = np.split(legal, ends, axis=-1)
        first = np.stack([choice.argmax(axis=-1) for choice in choices], axis=-1)
        if isinstance(leaf, Discrete):
            first = first[:, 0]
        return first.astype(np.int32)

    space = spec.action_space
    masks = spaces.masks_of_parts(legal_actions(obs, np), space)
    return spaces.map_leaves(chosen, space, spaces.as_tree(masks, space))
