"""Evaluation in host environments of its own, beside the training."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from pmaprl.actors.actor import Stepper, env_maker
from pmaprl.actors.threads import Stopped, Worker, stop_workers
from pmaprl.cli.errors import TrainingError
from pmaprl.cli.host_flags import HostEnvArgs
from pmaprl.device.agents import Player
from pmaprl.device.contract import AnyAlgorithm, as_recurrent
from pmaprl.device.evaluation import SEED, Episodes
from pmaprl.envs.environment import LONGEST_HORIZON
from pmaprl.envs.foreign_code import reason
from pmaprl.envs.host import HostEnvs, SteppedEnvs, evaluation_params
from pmaprl.machine import multihost

MOST_ENVS = 32  # environments of an evaluation


class _OtherStart(Exception):
    """Error of kept environments that begin differently from new ones with the same seed."""


class HostEvaluation:
    """Plays greedy episodes beside the training, one evaluation after another.

    The first process plays and sends the results to the others.

    Environments are kept from one evaluation to the next if a reset with a seed makes them begin as
    new ones do. State that outlives such a reset without showing in the first observation goes on,
    such as running statistics.
    """

    def __init__(self, args: HostEnvArgs, algorithm: AnyAlgorithm, warn: Callable[[str], None]):
        num_envs = min(args.eval_episodes, MOST_ENVS)
        self._make_envs = env_maker(args, num_envs, evaluation_params(vars(args)))
        self._args = args
        self._algorithm = as_recurrent(algorithm)
        self._act = jax.jit(self._algorithm.act)
        self._warn = warn
        # Workers and learners of the evaluations that are due, the first of them under way; the
        # result of a worker is Episodes [E]
        self._due: deque[tuple[Worker, Any]] = deque()
        self._started: Worker | None = None  # the last one that has begun, which may be at work
        self._idle_envs: HostEnvs | None = None  # environments kept between two evaluations
        self._may_keep = True
        self._starts: dict[int, Any] = {}  # first observations of new environments, by seed

    def begin(self, step: int, state: Any) -> None:
        """Evaluate the learner of a host `state` once the evaluations begun before are over."""
        if not multihost.is_first():
            return
        learner = jax.tree.map(lambda x: x[0], state.learner)
        self._due.append((Worker(f"the evaluation at step {step:,}"), learner))
        if len(self._due) == 1:
            self._start_oldest()

    def stop(self) -> None:
        """End the evaluation under way, and drop those that are due."""
        if self._started:
            self._started.ended = True
            stop_workers([self._started])
        if self._idle_envs:
            closing = Worker("the end of evaluations", envs=self._idle_envs)
            closing.run(closing.close)
            stop_workers([closing])

    def poll(self) -> Episodes | None:
        """Take the result of the oldest evaluation, [1, E]; None while it goes on.

        Raises:
            TrainingError: the evaluation has failed, or is beyond a timeout.
        """
        episodes = multihost.on_first(self._take_oldest)
        if not episodes:
            return episodes
        return Episodes(*(np.asarray(x)[None] for x in episodes))

    def _start_oldest(self) -> None:
        worker, learner = self._due[0]
        self._started = worker
        worker.run(partial(self._play_or_replay, jax.device_put(learner), worker))

    def _take_oldest(self) -> Episodes | None:
        """Result [E] of the oldest evaluation; the next one begins if it is over or given up."""
        worker, _ = self._due[0]
        error = None
        flag = worker.stuck(self._args)
        if worker.result.done():
            error = worker.result.exception()
            failure = f"failed twice: {reason(error)}" if error else ""
        elif flag:
            worker.ended = True
            failure = f"is stuck ({flag}), in {worker.activity.phase} and was given up"
        else:
            return None
        self._due.popleft()
        if self._due:
            self._start_oldest()
        if failure:
            raise TrainingError(failure) from error
        return worker.result.result()

    def _play_or_replay(self, learner: Any, worker: Worker) -> Episodes:
        """Play, and play the same episodes once more if an environment fails.

        This is the thread of an evaluation.
        """
        try:
            return self._play(learner, worker)
        except BaseException as error:  # environments may also call sys.exit
            if worker.ended:
                raise
            self._warn(f"{worker.name} failed and is played once more: {reason(error)}")
        return self._play(learner, worker)

    def _play(self, learner: Any, worker: Worker) -> Episodes:
        """Play one episode in each environment, then further ones with other seeds.

        The seed alone decides how an environment begins, so the result does not depend on earlier
        evaluations.
        """
        parts = []
        player = Player.greedy(self._algorithm, learner, self._act)
        num_episodes = self._args.eval_episodes
        for index in range(0, num_episodes, MOST_ENVS):
            count = min(num_episodes - index, MOST_ENVS)
            seed = SEED + index
            try:
                part = self._play_part(worker, player, count, seed)
            except _OtherStart:
                self._may_keep = False
                part = self._play_part(worker, player, count, seed)
            parts.append(part)
        return Episodes(*np.concatenate(parts, axis=1))

    def _play_part(self, worker: Worker, player: Player, num_episodes: int, seed: int) -> Episodes:
        """Play in the environments that were kept, or in new ones.

        Raises:
            _OtherStart: kept environments begin differently from new ones.
        """

        def check_start(obs: Any) -> None:
            if not reuses:
                self._starts[seed] = obs
                return
            parts = jax.tree.leaves(obs)
            expected = jax.tree.leaves(self._starts[seed])
            if not all(map(np.array_equal, parts, expected)):
                raise _OtherStart

        envs = self._idle_envs
        worker.envs = envs
        self._idle_envs = None
        try:
            is_known = self._may_keep and seed in self._starts
            reuses = envs is not None and is_known and envs.reseed(seed)
            if envs is None or not reuses:
                worker.close()
                with worker.doing("make"):
                    envs = self._make_envs(seed)
                    worker.envs = envs
            episodes = run_host_episodes(
                worker, envs, player, num_episodes, check_start=check_start
            )
            if self._may_keep and not worker.ended:
                self._idle_envs = envs
                worker.envs = None
        finally:
            worker.close()
        return episodes


def run_host_episodes(
    worker: Worker,
    envs: SteppedEnvs,
    player: Player | Callable,
    num_episodes: int,
    key: Any = None,
    check_start: Callable[[Any], None] = lambda obs: None,
) -> Episodes:
    """Play episodes in environments.

    Each environment plays a fixed number of episodes, because the first E to end would be the short
    ones. An episode is cut after `LONGEST_HORIZON` steps.

    Args:
        worker: notes its phases for those who watch, and may be told to end.
        envs: its environments.
        player: a `Player`, or a function as `Player.of` takes it.
        num_episodes: number of episodes E.
        key: key of random actions; None for a player that needs none.
        check_start: called with the first observations.

    Returns:
        The episodes [E], one environment after another.

    Raises:
        Stopped: the worker was told to end.
    """
    player = Player.of(player)
    stepper = Stepper(worker, envs, LONGEST_HORIZON)
    count = envs.num_envs
    check_start(stepper.seen.obs)
    memory = player.initial_memory(count)
    quota = num_episodes // count + (np.arange(count) < num_episodes % count)
    results: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    time = 0
    while quota.any():
        if worker.ended:
            raise Stopped
        with worker.doing("act"):
            keys = None
            if key is not None:
                keys = jax.random.split(jax.random.fold_in(key, time), count)
            action, memory = player.act(stepper.seen, memory, keys)
            action = jax.device_get(action)
        time += 1
        _, episodes = stepper.step(action)
        for index, ret, length in episodes:
            if quota[index]:
                results[index].append((ret, length))
                quota[index] -= 1
    in_order = [episode for episodes in results for episode in episodes]
    return Episodes(*np.array(in_order, float).T)
