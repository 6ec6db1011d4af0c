"""Evaluation in host environments of its own, beside the training."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from common.actors.actor import env_maker, eval_params
from common.actors.pool import Restarts
from common.actors.watchdog import POLL_INTERVAL, Limits, Stopped, Worker, stop_workers
from common.cli.errors import TrainingError
from common.cli.host_flags import HostEnvArgs
from common.device import multihost
from common.device.agents import Agent, Player, Seen
from common.device.evaluation import Episodes, Evaluated
from common.device.sharding import to_host
from common.envs.environment import LONGEST_HORIZON
from common.envs.host import HostEnvs
from common.envs.masks import check_legal
from common.envs.suite_tools import reason

MOST_ENVS = 32  # of an evaluation


class UnderWay(NamedTuple):
    """An evaluation that goes on in a thread, or waits there for the one before."""

    step: int
    state: Any  # on the host; None unless --keep-best may want it
    result: Future | None  # Episodes [E]; None in other processes than the first
    worker: Worker


class HostEvaluation:
    """Plays greedy episodes beside the training, evaluations in turn; in the first process, which tells others."""

    def __init__(self, args: HostEnvArgs, agent: Agent, warn: Callable[[str], None]):
        """`agent` acts with a learner."""
        self._make_envs = env_maker(args, min(args.eval_episodes, MOST_ENVS), eval_params(args))
        self._agent, self._num_episodes, self._limits, self._warn = agent, args.eval_episodes, Limits.of(args), warn
        self._kept = (lambda state: to_host(state, args.unsaved)) if args.keep_best else lambda state: None
        self._under_way: deque[UnderWay] = deque()

    def begin(self, step: int, state: Any, seed: int) -> None:
        """Start to evaluate a copy of `state`, in environments of this `seed`, once those begun before are over."""
        learner = jax.tree.map(lambda x: x[0], to_host(state.replace(actors=())).learner)
        kept, worker = self._kept(state), Worker(f"the evaluation at step {step:,}")
        before = self._under_way[-1][-2:] if self._under_way else None
        work = partial(self._attempt, learner, seed, worker, before)
        self._under_way.append(UnderWay(step, kept, worker.run(work) if multihost.is_first() else None, worker))

    def stop(self) -> None:
        """End all evaluations under way; their results do not matter any more."""
        workers = [one.worker for one in self._under_way]
        for worker in workers:
            worker.ended = True
        stop_workers(workers)

    def poll(self) -> Evaluated | None:
        """The oldest one under way, once it is over. Raises TrainingError where it has failed or is beyond a limit."""
        step, state, *_ = self._under_way[0]
        try:
            found = multihost.on_first(self._episodes)
        except TrainingError:
            self._under_way.popleft()
            raise
        if found is None:
            return None
        self._under_way.popleft()
        return Evaluated(step, Episodes(*map(np.asarray, found)), state)

    def _episodes(self) -> Episodes | None:
        """Those of the oldest one under way, [1, E], once they are over. Raises TrainingError as `poll` does."""
        *_, result, worker = self._under_way[0]
        flag = worker.stuck(self._limits)
        if not result.done() and not flag:
            return None
        worker.ended = True
        if not result.done():
            raise TrainingError(f"is stuck ({flag}), in {worker.activity.phase} and was given up")
        return Episodes(*(x[None] for x in result.result()))

    def _attempt(self, learner: Any, seed: int, worker: Worker, before: tuple[Future, Worker] | None) -> Episodes:
        """What the thread does: wait for the evaluation `before`, play, and begin anew where an environment fails.

        The episodes are the same then. Raises TrainingError where they fail in the same way, or too often, and Stopped.
        """
        with worker.doing("wait for another"):
            while before and not (before[0].done() or before[1].ended or worker.ended):
                wait(before[:1], POLL_INTERVAL)
        if worker.ended:
            raise Stopped
        restarts, failures = Restarts(self._limits, self._warn), set()
        while True:
            try:
                return self._play(jax.device_put(learner), seed, worker)
            except BaseException as error:  # environments may also call sys.exit
                failure = f"after {worker.steps} steps: {reason(error)}"
                if failure in failures:
                    raise TrainingError(f"failed twice {failure}") from error
                failures.add(failure)
                if worker.ended or not restarts.wait(worker, error, lambda: worker.ended):
                    raise TrainingError(restarts.given_up(error)) from error

    def _play(self, learner: Any, seed: int, worker: Worker) -> Episodes:
        """One episode in each environment, whose seed alone decides how it begins; then in new ones."""
        worker.steps, parts, player = 0, [], self._agent.player(learner)
        for index in range(0, self._num_episodes, MOST_ENVS):
            try:
                with worker.doing("make"):
                    worker.envs = self._make_envs(seed + index)
                left = min(self._num_episodes - index, MOST_ENVS)
                parts.append(run_host_episodes(worker.envs, player, left, worker))
            finally:
                worker.close()
        return Episodes(*np.concatenate(parts, axis=1))


def run_host_episodes(envs: HostEnvs, player: Player | Callable, num_episodes: int, worker: Worker) -> Episodes:
    """Play `num_episodes` with `player`, of whatever `Player.of` takes, who gets no keys.

    Each environment plays a fixed number of them, or none, which are returned one after another: the first to end would
    be the short ones. An episode is cut after `LONGEST_HORIZON` steps. Raises Stopped once the `worker` has ended.
    """
    player, count = Player.of(player), envs.num_envs
    quota = num_episodes // count + (np.arange(count) < num_episodes % count)
    ret, length = np.zeros((2, count))
    results: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    with worker.doing("reset"):
        seen = Seen(envs.reset(), np.ones(count, bool), np.zeros(count, np.float32))
    memory, acting = player.initial_memory(count), np.ones(count, bool)
    while quota.any():
        if worker.ended:
            raise Stopped
        with worker.doing("act"):
            typed = partial(jax.tree.map, lambda x, like: x.astype(like.dtype, copy=False))
            seen = seen._replace(obs=typed(seen.obs, envs.spec.obs_like))
            check_legal(seen.obs, acting, envs.spec)
            action, memory = player.act(seen, memory, None)
        with worker.doing("step"):
            out = envs.step(jax.device_get(action))
        worker.steps += 1
        # Where a suite resets in a step of its own, the episode begins behind that step
        ended = (out.terminated | out.truncated) & out.valid
        seen = Seen(out.obs, ended | ~out.valid, out.reward.astype(np.float32))
        ret += np.where(out.valid, out.reward, 0.0)
        length += out.valid
        acting = ~ended | envs.resets_in_step
        over = ended | (length >= LONGEST_HORIZON)
        counted = over & (quota > 0)
        for index in np.flatnonzero(counted):
            results[index].append((ret[index], length[index]))
        quota = quota - counted
        ret[over] = length[over] = 0
    return Episodes(*np.array([one for each in results for one in each]).T)
