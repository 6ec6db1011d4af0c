"""Evaluation in host environments of its own, beside the training."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from common.actors.rollouts import POLL
from common.actors.watching import GRACE, THREAD, Limits, Stopped, Worker
from common.cli.errors import TrainingError
from common.device.evaluation import SEED, Episodes
from common.envs.environment import LONGEST_HORIZON
from common.envs.host import HostEnvs


class Evaluator:
    """Plays greedy episodes in a thread of its own, one evaluation at a time."""

    def __init__(self, make_envs: Callable[[int], HostEnvs], act: Callable, num_episodes: int, limits: Limits):
        """`make_envs` takes a seed, `act` a learner and observations [N, ...]."""
        self._make_envs, self._act, self._num_episodes, self._limits = make_envs, act, num_episodes, limits
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None

    def start(self, learner: Any) -> Future:
        """Begin to evaluate `learner`, arrays that nobody changes; the result are Episodes."""
        future: Future = Future()
        self._worker = worker = Worker("the evaluation")

        def work():
            try:
                future.set_result(self._play(jax.device_put(learner), worker))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # environments may also call sys.exit, which must not end who waits
                future.set_exception(RuntimeError(repr(error)))

        self._thread = threading.Thread(target=work, name=THREAD, daemon=True)
        self._thread.start()
        return future

    def wait(self, future: Future, stopped: Callable[[], bool]) -> Episodes | None:
        """What `start` promised, or None once `stopped`. Raises TrainingError where it fails or gets stuck."""
        while not future.done():
            if stopped():
                return None
            problem = self.problem()
            if problem:
                raise TrainingError(f"the evaluation {problem}")
            time.sleep(POLL / 10)
        try:
            return future.result()
        except Exception as error:
            raise TrainingError(f"the evaluation failed: {type(error).__name__}: {error}") from error

    def problem(self) -> str | None:
        """Where the evaluation under way is beyond a limit: that, and what it is doing."""
        flag = self._worker.stuck(self._limits)
        return f"is stuck ({flag}), in {self._worker.phase}" if flag else None

    def stop(self) -> None:
        """End the evaluation under way, if there is one; its result does not matter any more."""
        if self._thread:
            self._worker.ended = True
            self._thread.join(GRACE)

    def _play(self, learner: Any, worker: Worker) -> Episodes:
        envs = None
        try:
            with worker.doing("reset"):
                envs = self._make_envs(SEED)
            return run_host_episodes(envs, lambda obs: self._act(learner, obs), self._num_episodes, worker)
        finally:
            if envs:
                envs.close()


def run_host_episodes(
    envs: HostEnvs, policy: Callable[[np.ndarray], np.ndarray], num_episodes: int, worker: Worker
) -> Episodes:
    """Play `num_episodes` with `policy`: observations [N, ...] to actions [N, ...].

    Each environment plays a fixed number of them: the first to end would be the short ones. An episode is cut after
    `LONGEST_HORIZON` steps. Raises Stopped once the `worker` has ended.
    """
    count, dtype = envs.num_envs, envs.spec.obs_dtype
    quota = num_episodes // count + (np.arange(count) < num_episodes % count)
    ret, length = np.zeros((2, count))
    results: list[tuple[float, float]] = []
    with worker.doing("reset"):
        obs = envs.reset()
    while quota.any():
        if worker.ended:
            raise Stopped
        with worker.doing("act"):
            action = np.asarray(policy(obs.astype(dtype, copy=False)))
        with worker.doing("step"):
            out = envs.step(action)
        obs = out.obs
        ret += out.reward
        length += out.valid
        over = out.terminated | out.truncated | (length >= LONGEST_HORIZON)
        counted = over & (quota > 0)
        results += zip(ret[counted], length[counted], strict=True)
        quota = quota - counted
        ret[over] = length[over] = 0.0
    return Episodes(*np.array(results).T)
