"""Evaluation in host environments of its own, beside the training."""

import itertools
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
from pmaprl.device import multihost
from pmaprl.device.agents import Player
from pmaprl.device.evaluation import SEED, Episodes
from pmaprl.envs.environment import LONGEST_HORIZON
from pmaprl.envs.host import HostEnvs, evaluation_params
from pmaprl.envs.suite_tools import reason

MOST_ENVS = 32  # of an evaluation


class _OtherStart(Exception):
    """Environments that were kept and reseeded do not begin as those did that were made with the
    same seed.
    """


class HostEvaluation:
    """Plays greedy episodes beside the training, evaluations in turn; in the first process, which
    tells others.

    Environments are kept from one evaluation to the next where a seed in their reset makes them
    begin as new ones do. State that outlives such a reset and does not show in the first
    observation goes on, such as running statistics.
    """

    def __init__(self, args: HostEnvArgs, algorithm: Any, warn: Callable[[str], None]):
        self._make_envs = env_maker(
            args, min(args.eval_episodes, MOST_ENVS), evaluation_params(vars(args))
        )
        self._args = args
        self._algorithm = algorithm
        self._warn = warn
        # Step and learner; the oldest under way, all in the first process
        self._due: deque[tuple[int, Any]] = deque()
        self._worker: Worker | None = None  # who plays that, with Episodes [E] as result
        self._kept: HostEnvs | None = None  # environments between two evaluations
        self._keeps = True  # whether they may be kept
        # The first observations of environments that were made, by their seed
        self._starts: dict[int, Any] = {}

    def begin(self, step: int, state: Any) -> None:
        """Start to evaluate the learner of `state`, which is on the host, once those begun before
        are over.
        """
        if multihost.is_first():
            self._due.append((step, jax.tree.map(lambda x: x[0], state.learner)))
            if len(self._due) == 1:
                self._start_oldest()

    def stop(self) -> None:
        """End the evaluation under way; neither its result nor those due after it matter any
        more.
        """
        if self._worker:
            self._worker.ended = True
            stop_workers([self._worker])
        if self._kept:
            closing = Worker("the end of evaluations", envs=self._kept)
            closing.run(closing.close)
            stop_workers([closing])

    def poll(self) -> Episodes | None:
        """The oldest one, once it is over. Raises TrainingError where it has failed or is beyond a
        limit.
        """
        episodes = multihost.on_first(self._take_oldest)
        return episodes and Episodes(*(np.asarray(x)[None] for x in episodes))

    def _start_oldest(self) -> None:
        step, learner = self._due[0]
        self._worker = worker = Worker(f"the evaluation at step {step:,}")
        worker.run(partial(self._play_or_replay, jax.device_put(learner), worker))

    def _take_oldest(self) -> Episodes | None:
        """What `poll` returns, [E]; where the oldest one is over, or given up, the next one
        begins.
        """
        worker = self._worker
        error = None
        if worker.result.done():
            error = worker.result.exception()
            failure = error and f"failed twice: {reason(error)}"
        elif flag := worker.stuck(self._args):
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
        """What the thread does: play, and once more where an environment fails; the episodes are
        the same then.
        """
        try:
            return self._play(learner, worker)
        except BaseException as error:  # environments may also call sys.exit
            if worker.ended:
                raise
            self._warn(f"{worker.name} failed and is played once more: {reason(error)}")
        return self._play(learner, worker)

    def _play(self, learner: Any, worker: Worker) -> Episodes:
        """One episode in each environment, whose seed alone decides how it begins; then with other
        seeds.
        """
        parts = []
        player = Player.greedy(self._algorithm, learner)
        num_episodes = self._args.eval_episodes
        for index in range(0, num_episodes, MOST_ENVS):
            play = partial(
                self._play_part, worker, player, min(num_episodes - index, MOST_ENVS), SEED + index
            )
            try:
                parts.append(play())
            except _OtherStart:
                self._keeps = False
                parts.append(play())
        return Episodes(*np.concatenate(parts, axis=1))

    def _play_part(self, worker: Worker, player: Player, num_episodes: int, seed: int) -> Episodes:
        """Episodes in the environments that were kept, or in new ones. Raises _OtherStart where the
        former differ.
        """

        def check_start(obs: Any) -> None:
            if not kept:
                self._starts[seed] = obs
            elif not all(
                map(np.array_equal, jax.tree.leaves(obs), jax.tree.leaves(self._starts[seed]))
            ):
                raise _OtherStart

        worker.envs = self._kept
        self._kept = None
        try:
            kept = worker.envs and self._keeps and seed in self._starts and worker.envs.reseed(seed)
            if not kept:
                worker.close()
                with worker.doing("make"):
                    worker.envs = self._make_envs(seed)
            episodes = run_host_episodes(worker, player, num_episodes, check_start=check_start)
            if self._keeps and not worker.ended:
                self._kept = worker.envs
                worker.envs = None
        finally:
            worker.close()
        return episodes


def run_host_episodes(
    worker: Worker,
    player: Player | Callable,
    num_episodes: int,
    key: Any = None,
    check_start: Callable[[Any], None] = lambda obs: None,
) -> Episodes:
    """Play `num_episodes` in a worker's environments with `player`, of whatever `Player.of` takes,
    and keys of `key`.

    Each environment plays a fixed number of them, or none, which are returned one after another:
    the first to end would be the short ones. An episode is cut after `LONGEST_HORIZON` steps.
    `check_start` gets the first observations. Raises Stopped once the `worker` has ended.
    """
    player = Player.of(player)
    stepper = Stepper(worker, LONGEST_HORIZON)
    count = worker.envs.num_envs
    check_start(stepper.seen.obs)
    memory = player.initial_memory(count)
    quota = num_episodes // count + (np.arange(count) < num_episodes % count)
    results: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    keys = (
        key if key is None else jax.random.split(jax.random.fold_in(key, t), count)
        for t in itertools.count()
    )
    while quota.any():
        if worker.ended:
            raise Stopped
        with worker.doing("act"):
            action, memory = player.act(stepper.seen, memory, next(keys))
            action = jax.device_get(action)
        _, episodes = stepper.step(action)
        for index, *episode in episodes:
            if quota[index]:
                results[index].append(episode)
                quota[index] -= 1
    return Episodes(*np.array([one for each in results for one in each], float).T)
