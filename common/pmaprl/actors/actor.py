"""One actor: environments on the host, stepped with a policy on a device, one rollout at a time."""

import math
import operator
from collections.abc import Callable
from concurrent.futures import wait
from functools import reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from pmaprl.actors.threads import POLL_INTERVAL, Collected, HostRollout, Slot, Worker
from pmaprl.cli.errors import FailedEnvError, TrainingError, UsageError
from pmaprl.cli.host_flags import HostEnvArgs
from pmaprl.device.agents import PolicyInput
from pmaprl.device.statistics import MetricSums, reduction_of
from pmaprl.envs import spaces
from pmaprl.envs.bytes import spec_with_byte_max
from pmaprl.envs.host import HostEnvs, HostStep, begins, evaluation_params
from pmaprl.envs.masks import check_legal, check_parts, legal_actions
from pmaprl.envs.numbers import cast, is_numeric
from pmaprl.envs.ranges import fault_in
from pmaprl.envs.registry import make_host
from pmaprl.envs.spaces import Box, Discrete, EnvSpec
from pmaprl.envs.suite_tools import readable_errors
from pmaprl.envs.variation import REDUCTIONS


class Stepper:
    """The N environments of a worker and their episodes; raises FailedEnvError where what they give
    cannot be used.
    """

    def __init__(self, worker: Worker, longest: float = np.inf):
        """Begin an episode in each; one that has `longest` steps counts as over."""
        self._worker = worker
        self._longest = longest
        count = worker.envs.num_envs
        self._return = np.zeros(count)
        self._length = np.zeros(count, int)
        with worker.doing("reset"):
            obs = worker.envs.reset()
        # What to act on, [N, ...], observations in the networks' types
        self.seen = PolicyInput(
            self._checked(obs), np.ones(count, bool), np.zeros(count, np.float32)
        )
        self._check_seen(worker.envs.spec, acting=self.seen.first)

    def step(self, action: Any) -> tuple[HostStep, list[tuple[int, float, int]]]:
        """Act everywhere; with the step, returns (environment, return, length) of each episode that
        is over.
        """
        envs = self._worker.envs
        with self._worker.doing("env_step"):
            out = envs.step(action)
        self.seen = PolicyInput(self._checked(out.obs), begins(out), out.reward)
        self._check_finite(out.reward, "reward")
        if out.final_obs is not None:
            out = out._replace(final_obs=self._checked(out.final_obs))
            if fault := fault_in(out.final_obs, envs.spec):
                raise FailedEnvError(fault)
        self._check_seen(envs.spec, acting=~out.ended | envs.resets_in_step)
        self._return += np.where(out.valid, out.reward, 0.0)
        self._length += out.valid
        over = np.flatnonzero(out.ended | (self._length >= self._longest))
        episodes = list(
            zip(over, self._return[over].tolist(), self._length[over].tolist(), strict=True)
        )
        self._return[over] = self._length[over] = 0
        return out, episodes

    def _check_seen(self, spec: EnvSpec, acting: np.ndarray) -> None:
        if fault := fault_in(self.seen.obs, spec):
            raise FailedEnvError(fault)
        check_legal(self.seen.obs, acting, spec)

    def _checked(self, obs: Any) -> Any:
        return jax.tree.map(self._checked_part, self._worker.envs.spec.obs_like, obs)

    def _checked_part(self, like: Any, obs: np.ndarray) -> np.ndarray:
        wanted = len(self._length), *like.shape
        if not isinstance(obs, np.ndarray) or not is_numeric(obs.dtype) or np.ma.is_masked(obs):
            what = (
                f"of type {obs.dtype}" if isinstance(obs, np.ndarray) else f"a {type(obs).__name__}"
            )
            raise FailedEnvError(
                f"an observation of {self._worker.name} is {what}, not an array of numbers"
            )
        if obs.shape != wanted:
            raise FailedEnvError(
                f"the observations of {self._worker.name} have shape {obs.shape} instead of "
                f"{wanted}"
            )
        try:
            obs = cast(obs, like.dtype)
        except OverflowError as error:
            said = "wrong bounds or a wrong type, if its space says otherwise"
            raise FailedEnvError(
                f"an observation of {self._worker.name} has {error}: {said}"
            ) from None
        self._check_finite(obs, "observation")
        return obs

    def _check_finite(self, values: np.ndarray, what: str) -> None:
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
            which = f"environment {np.flatnonzero(~finite)[0]} of {self._worker.name}"
            raise FailedEnvError(f"the {what} of {which} is not finite")


class Actor(Worker):
    """N environments, stepped one rollout at a time. Used by one thread."""

    def __init__(
        self,
        number: int,
        device: jax.Device,
        args: HostEnvArgs,
        act: Callable,
        memory: Any,
        version: int,
    ):
        """`number` is its place among the actors of all processes, `version` that of the first
        parameters it gets.

        `act` takes parameters, memory, key data, a step's number and a `PolicyInput` [N, ...], and
        returns actions [N, ...], extras, and the new memory; the first one is `memory`.
        """
        super().__init__(f"actor {number}", ("env_step", "act", "wait_params", "wait_put"))
        self.number = number
        self.device = device
        self._args = args
        self._act = act
        self._first_memory = memory
        self.rollouts = self.restarts = 0
        self._make_envs = env_maker(args, args.envs_per_actor, args.env_params)
        self._seed = args.seed, version, number

    def start(self) -> None:
        """Make the environments, other ones after every restart, and begin their episodes."""
        seeds = np.random.SeedSequence([*self._seed, self.restarts]).generate_state(2) >> 1
        with self.doing("make"):
            self.envs = self._make_envs(int(seeds[0]))
        self._stepper = Stepper(self)
        self._memory = self._first_memory
        self._key = np.asarray(jax.random.key_data(jax.random.key(int(seeds[1]))))
        self._steps = np.uint32(0)

    def collect(self, choose: Callable[[Slot | None], Slot]) -> Collected:
        """Step `num_steps` times; `choose` gets the parameters in use and returns those for the
        next step.
        """
        first, memory = jax.tree.map(
            lambda x: np.asarray(x)[None], (self._stepper.seen.first, self._memory)
        )
        slot = None
        steps = []
        obs = [self._stepper.seen.obs]
        episodes = []
        logged = []
        for _ in range(self._args.num_steps):
            with self.doing("wait_params"):
                slot = choose(slot)
            with self.doing("act"):
                acting = slot.params, self._memory, self._key, self._steps, self._stepper.seen
                action, extras, self._memory = self._act(*acting)
                action, extras = jax.device_get((action, extras))
            self._steps += np.uint32(1)
            out, over = self._stepper.step(action)
            outcome = out.reward, out.terminated, out.truncated, out.valid
            version = np.full(len(out.valid), slot.version, np.int32)
            steps.append(HostRollout((), action, extras, *outcome, version, out.final_obs, (), ()))
            obs.append(self._stepper.seen.obs)
            episodes += [(ret, length) for _, ret, length in over]
            logged.append(self._logged_numbers(out))
        self.rollouts += 1
        # Arrays of its own for every rollout: the transfer of the last one may still be going on.
        rollout, obs = (jax.tree.map(lambda *x: np.stack(x), *trees) for trees in (steps, obs))
        rollout = rollout._replace(obs=obs, first=first, memory=memory)
        return Collected(
            actor=self.number, rollout=rollout, episodes=episodes, info=reduce(operator.add, logged)
        )

    def _logged_numbers(self, out: HostStep) -> MetricSums:
        """What a step has of the metrics of --log-info, those of all environments together."""
        numbers = {}
        for metric in self._args.log_info:
            entry, _, kind = metric.rpartition("_")
            found = out.numbers(metric)
            numbers[f"env/{metric}"] = (
                found if len(found) or kind not in REDUCTIONS else out.numbers(entry)
            )
        functions = {"max": np.max, "min": np.min, "last": np.mean}
        value = {
            name: functions.get(reduction_of(name), np.sum)(x) if len(x) else 0.0
            for name, x in numbers.items()
        }
        return MetricSums(value, {name: len(x) for name, x in numbers.items()})


class HostEnvKind(NamedTuple):
    """What is known of an environment before any actor has one."""

    name: str
    spec: EnvSpec
    resets_in_step: bool


def inspect_env(args: HostEnvArgs) -> HostEnvKind:
    """Make the environment once to see what it is, and once more where evaluations have another
    one.
    """
    kind = _inspect(args, args.env_params)
    params = evaluation_params(vars(args))
    evaluated = kind if params == args.env_params else _inspect(args, params)
    for what in ("observation", "action"):
        then, now = (str(getattr(x.spec, f"{what}_space")) for x in (evaluated, kind))
        if then != now:
            raise UsageError(
                f"{what}s are {then} in evaluations, with --eval-env-params, and {now} in "
                "the training"
            )
    return kind


def env_maker(args: HostEnvArgs, num_envs: int, env_params: str) -> Callable[[int], HostEnvs]:
    """A function of a seed that makes `num_envs` environments."""
    options = {
        name: getattr(args, name) for name in ("reset_timeout", "step_timeout", "resets_in_step")
    }
    return lambda seed: make_host(
        args.env, num_envs, seed, env_params, vectorization=args.vectorization, **options
    )


def _inspect(args: HostEnvArgs, env_params: str) -> HostEnvKind:
    """Find out what one environment is: make, step once and close it in a thread, within the
    timeouts of each.
    """
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
            _step_once(worker)
        except BaseException:
            worker.close()
            raise
        with worker.doing("close"), readable_errors(f"environment {args.env} cannot be closed"):
            envs.close()
        return HostEnvKind(
            args.env, spec_with_byte_max(envs.spec, args.byte_max), envs.resets_in_step
        )

    worker.run(try_out)
    while not worker.result.done():
        if flag := worker.stuck(args):
            raise TrainingError(
                f"environment {args.env} does not return from {worker.activity.phase} ({flag})"
            )
        wait([worker.result], timeout=POLL_INTERVAL)
    return worker.result.result()


def _step_once(worker: Worker) -> None:
    """Reset and step the one environment of a worker. Raises UsageError where what it gives cannot
    be used.

    Actors would make it anew, in vain, again and again.
    """
    name = worker.envs.spec.name
    check_parts(worker.envs.spec)
    with readable_errors(f"environment {name} cannot be reset"):
        stepper = Stepper(worker)
    with readable_errors(f"environment {name} cannot be stepped"):
        stepper.step(_first_action(worker.envs.spec, stepper.seen.obs))


def _first_action(spec: EnvSpec, obs: Any) -> Any:
    """A legal action [1, ...] as networks give it: of each choice the first one, of a Box zeros, to
    be clipped.
    """

    def chosen(leaf, mask):
        if isinstance(leaf, Box):
            return np.zeros((1, math.prod(leaf.shape)), np.float32)
        legal = np.ones((1, sum(leaf.nvec)), bool) if mask is None else mask
        parts = np.split(legal, np.cumsum(leaf.nvec)[:-1], axis=-1)
        picks = np.stack([part.argmax(axis=-1) for part in parts], axis=-1)
        return (picks[:, 0] if isinstance(leaf, Discrete) else picks).astype(np.int32)

    space = spec.action_space
    masks = spaces.masks_of_parts(legal_actions(obs, np), space)
    return spaces.map_leaves(chosen, space, spaces.as_tree(masks, space))
