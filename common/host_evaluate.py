"""Evaluation in host environments of its own, beside the training."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from common.envs import LONGEST_HORIZON
from common.errors import TrainingError
from common.evaluate import SEED
from common.host_envs import HostEnvs
from common.rollouts import POLL
from common.watch import Limits, Worker


class HostEpisodes(NamedTuple):
    """Outcome of each evaluation episode."""

    ret: np.ndarray  # [E] sum of raw rewards
    length: np.ndarray  # [E] steps


class Evaluator(Worker):
    """Plays greedy episodes in a thread of its own, one evaluation at a time."""

    def __init__(self, make_envs: Callable[[int], HostEnvs], act: Callable, num_episodes: int, limits: Limits):
        """`make_envs` takes a seed, `act` a learner and observations [N, ...]."""
        super().__init__("the evaluation")
        self._make_envs, self._act, self._num_episodes, self._limits = make_envs, act, num_episodes, limits

    def start(self, learner: Any) -> Future:
        """Begin to evaluate `learner`, arrays that nobody changes; the result are HostEpisodes."""
        future: Future = Future()

        def work():
            try:
                future.set_result(self._evaluate(learner))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def wait(self, future: Future, stopped: Callable[[], bool]) -> HostEpisodes | None:
        """What `start` promised, or None once `stopped`. Raises TrainingError where it fails or gets stuck."""
        while not future.done():
            if stopped():
                return None
            flag = self.beyond_limit()
            if flag:
                raise TrainingError(f"the evaluation is stuck ({flag}); {self}")
            time.sleep(POLL / 10)
        try:
            return future.result()
        except Exception as error:
            raise TrainingError(f"the evaluation failed: {type(error).__name__}: {error}") from error

    def beyond_limit(self) -> str | None:
        """The flag whose limit the evaluation under way is beyond, if any."""
        return self.stuck(self._limits)

    def _evaluate(self, learner: Any) -> HostEpisodes:
        envs = None
        try:
            with self.doing("reset"):
                envs = self._make_envs(SEED)
            return run_host_episodes(envs, lambda obs: self._act(learner, obs), self._num_episodes, self)
        finally:
            if envs:
                envs.close()


def run_host_episodes(
    envs: HostEnvs, policy: Callable[[np.ndarray], np.ndarray], num_episodes: int, worker: Worker
) -> HostEpisodes:
    """Play `num_episodes` with `policy`: observations [N, ...] to actions [N, ...].

    Each environment plays a fixed number of them: the first to end would be the short ones. An episode is cut after
    `LONGEST_HORIZON` steps.
    """
    count, dtype = envs.num_envs, envs.spec.obs_dtype
    quota = num_episodes // count + (np.arange(count) < num_episodes % count)
    ret, length = np.zeros((2, count))
    results: list[tuple[float, float]] = []
    with worker.doing("reset"):
        obs = envs.reset()
    while quota.any():
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
    return HostEpisodes(*np.array(results).T)
