"""One actor: environments on the host, stepped with a policy on a device, one rollout at a time.

Independent of the algorithm: `act` decides what it does with the parameters, and what it notes of its actions.
"""

import operator
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from common.actors.threads import POLL_INTERVAL, Collected, HostRollout, Slot, Worker
from common.cli.errors import FailedEnvError, TrainingError, UsageError
from common.cli.host_flags import HostEnvArgs
from common.device.statistics import Tally, kind_of
from common.envs.host import HostEnvs, HostStep, evaluation_params
from common.envs.masks import check_legal
from common.envs.registry import make_host
from common.envs.spaces import EnvSpec
from common.envs.suite_tools import readable_errors
from common.envs.variation import REDUCTIONS


class Actor(Worker):
    """N environments, stepped one rollout at a time. Used by one thread."""

    def __init__(
        self,
        index: int,
        make_envs: Callable[[int], HostEnvs],
        device: jax.Device,
        act: Callable,
        num_steps: int,
        seed: tuple[int, ...],
        memory: Any = (),
        first: int = 0,
        log_info: tuple[str, ...] = (),
    ):
        """`index` is its place in this process, whose `first` actor has this number among those of all processes.

        `make_envs` takes a seed. `act` takes parameters, memory, key data, a step's number and observations
        [N, ...], and returns actions [N, ...], extras, and the new memory. `log_info` is the flag.
        """
        super().__init__(f"actor {first + index}", ("env_step", "act", "wait_params", "wait_put"))
        self.index, self.device, self._log_info = index, device, log_info
        self.rollouts = self.restarts = 0
        self._make_envs, self._act, self._num_steps, self._first_memory = make_envs, act, num_steps, memory
        self._seed = *seed, first + index

    def start(self) -> None:
        """Make the environments, other ones after every restart, and begin their episodes."""
        seeds = np.random.SeedSequence([*self._seed, self.restarts]).generate_state(2) >> 1
        with self.doing("make"):
            self.envs = self._make_envs(int(seeds[0]))
        with self.doing("reset"):
            obs = self.envs.reset()
        self._obs = self._checked(obs)
        check_legal(self._obs, np.ones(self.envs.num_envs, bool), self.envs.spec)
        self._key = np.asarray(jax.random.key_data(jax.random.key(int(seeds[1]))))
        self._steps = np.uint32(0)
        self._memory = self._first_memory
        self._return = np.zeros(self.envs.num_envs)
        self._length = np.zeros(self.envs.num_envs, int)

    def collect(self, choose: Callable[[Slot | None], Slot]) -> Collected:
        """Step `num_steps` times; `choose` gets the parameters in use and returns those for the next step."""
        memory = jax.tree.map(lambda x: np.asarray(x)[None], self._memory)
        found, slot = Collected(self.index, (), [], []), None
        steps, logged = [], []
        for _ in range(self._num_steps):
            with self.doing("wait_params"):
                slot = choose(slot)
            step, out = self._step(slot)
            self._count_episodes(out, found)
            steps.append(step)
            logged.append(self._logged_numbers(out))
        # Fresh memory for every rollout: the transfer of the last one may still be going on.
        rollout = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
        obs = jax.tree.map(lambda *x: np.stack(x), *(step.obs for step in steps), self._obs)
        self.rollouts += 1
        return found._replace(rollout=rollout._replace(obs=obs, memory=memory), info=reduce(operator.add, logged))

    def _step(self, slot: Slot) -> tuple[HostRollout, HostStep]:
        """One step, [N, ...], and what the environments said."""
        obs = self._obs
        with self.doing("act"):
            action, extras, self._memory = self._act(slot.params, self._memory, self._key, self._steps, obs)
            action, extras = jax.device_get((action, extras))
        self._steps += np.uint32(1)
        with self.doing("env_step"):
            out = self.envs.step(action)
        self._obs = self._checked(out.obs)
        self._check_finite(out.reward, "reward")
        final_obs = self._checked(out.final_obs) if self.envs.resets_in_step else None
        over = (out.terminated | out.truncated) & out.valid
        check_legal(self._obs, ~over | self.envs.resets_in_step, self.envs.spec)
        # A suite that resets in a step of its own shows the end of the episode once more in that
        self._forget(over if self.envs.resets_in_step else ~out.valid)
        version = np.full(len(over), slot.version, np.int32)
        outcome = out.reward, out.terminated, out.truncated, out.valid
        return HostRollout(obs, action, extras, *outcome, version, final_obs, ()), out

    def _forget(self, begins: np.ndarray) -> None:
        """Start the memory of environments anew whose next step is the first of an episode."""

        def forget(memory, first):
            return np.where(begins.reshape(-1, *[1] * (np.ndim(memory) - 1)), first, memory)

        if begins.any():
            self._memory = jax.tree.map(forget, self._memory, self._first_memory)

    def _count_episodes(self, out: HostStep, found: Collected) -> None:
        """Add a step to the episodes under way, and those that it ended to what was `found`."""
        self._return += np.where(out.valid, out.reward, 0.0)
        self._length += out.valid
        over = (out.terminated | out.truncated) & out.valid
        found.returns.extend(self._return[over].tolist())
        found.lengths.extend(self._length[over].tolist())
        self._return[over] = self._length[over] = 0

    def _logged_numbers(self, out: HostStep) -> Tally:
        """What a step has of the metrics of --log-info, those of all environments together."""
        numbers = {}
        for metric in self._log_info:
            entry, _, kind = metric.rpartition("_")
            found = out.numbers(metric)
            numbers[metric] = found if len(found) or kind not in REDUCTIONS else out.numbers(entry)
        functions = {"max": np.max, "min": np.min, "last": np.mean}
        value = {name: functions.get(kind_of(name), np.sum)(x) if len(x) else 0.0 for name, x in numbers.items()}
        return Tally(value, {name: len(x) for name, x in numbers.items()})

    def _checked(self, obs: Any) -> Any:
        """Observations [N, ...] in the networks' types. Raises FailedEnvError where they cannot be used."""
        return jax.tree.map(self._checked_part, self.envs.spec.obs_like, obs)

    def _checked_part(self, like: Any, obs: np.ndarray) -> np.ndarray:
        wanted = self.envs.num_envs, *like.shape
        if obs.shape != wanted:
            raise FailedEnvError(f"the observations of {self.name} have shape {obs.shape} instead of {wanted}")
        obs = obs.astype(like.dtype, copy=False)
        self._check_finite(obs, "observation")
        return obs

    def _check_finite(self, values: np.ndarray, what: str) -> None:
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        raise FailedEnvError(f"the {what} of environment {np.flatnonzero(~finite)[0]} of {self.name} is not finite")


class HostEnvKind(NamedTuple):
    """What is known of an environment before any actor has one."""

    name: str
    spec: EnvSpec
    resets_in_step: bool


def inspect_env(args: HostEnvArgs) -> HostEnvKind:
    """Make the environment once to see what it is, and once more where evaluations have another one."""
    kind = _inspect(args, args.env_params)
    evaluated = kind if eval_params(args) == args.env_params else _inspect(args, eval_params(args))
    for what in ("observation", "action"):
        then, now = (str(getattr(x.spec, f"{what}_space")) for x in (evaluated, kind))
        if then != now:
            raise UsageError(f"{what}s are {then} in evaluations, with --eval-env-params, and {now} in the training")
    return kind


def eval_params(args: HostEnvArgs) -> str:
    """The parameters of the environments in evaluations, as --env-params are those of the others."""
    return evaluation_params(args.env, args.vectorization, args.env_params, args.eval_env_params)


def env_maker(args: HostEnvArgs, num_envs: int, env_params: str) -> Callable[[int], HostEnvs]:
    """A function of a seed that makes `num_envs` environments."""
    options = {name: getattr(args, name) for name in ("reset_timeout", "step_timeout", "resets_in_step")}
    return lambda seed: make_host(args.env, num_envs, seed, env_params, args.vectorization, **options)


def _inspect(args: HostEnvArgs, env_params: str) -> HostEnvKind:
    """What one environment is, made and closed in a thread, for at most --reset-timeout each."""
    worker = Worker(args.env)
    kind = worker.run(partial(_make_and_close, args, env_params, worker))
    while not kind.done():
        if flag := worker.stuck(args):
            raise TrainingError(f"environment {args.env} does not return from {worker.activity.phase} ({flag})")
        wait([kind], timeout=POLL_INTERVAL)
    return kind.result()


def _make_and_close(args: HostEnvArgs, env_params: str, worker: Worker) -> HostEnvKind:
    vectorization = "vector" if args.vectorization == "vector" else "sync"
    with worker.doing("make"):
        envs = make_host(args.env, 1, args.seed, env_params, vectorization, resets_in_step=args.resets_in_step)
    with worker.doing("close"), readable_errors(f"environment {args.env} cannot be closed"):
        envs.close()
    return HostEnvKind(args.env, envs.spec, envs.resets_in_step)
