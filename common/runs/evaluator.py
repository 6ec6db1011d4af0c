"""Evaluations of a run: on the devices at once, on the host beside the training, and again of the best checkpoint."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from common.cli.errors import TrainingError, UsageError
from common.device import agreement, multihost
from common.device.evaluation import OTHER_SEED, SEED, Episodes, Evaluated
from common.runs.ranking import DISTINCT, overall_of
from common.runs.recorder import Clock, Recorder
from common.runs.reports import Score
from common.runs.saver import Saver

POLL_INTERVAL = 0.01  # seconds between two looks at an evaluation that is waited for
MOST_PENDING = 8  # evaluations, each with a learner on the host
MOST_WITH_STATES = 2  # where --keep-best keeps the whole state of each, replay buffer and all


class EvaluationFailed(TrainingError):
    """An evaluation came to nothing; the training is as good as before."""


class Evaluation(Protocol):
    """Greedy episodes with the state of the run at some step; those that go on beside the training in turn."""

    def begin(self, step: int, state: Any, seed: int) -> Evaluated | None:
        """Evaluate `state` in the episodes of `seed`.

        None where that goes on beside the training, whose next update may overwrite `state`.
        """

    def poll(self) -> Evaluated | None:
        """The oldest that goes on beside the training, once it is over. Raises TrainingError where it has failed."""

    def stop(self) -> None:
        """Give up all that is under way."""


class Pending(NamedTuple):
    """An evaluation that is due, and not over."""

    step: int
    moment: dict[str, float]  # when its state was the present one
    counters: dict[str, int]  # those of then


class DeviceEvaluation:
    """Evaluates at once."""

    def __init__(self, evaluate: Callable, args: Any):
        """`evaluate` takes a state and a seed and returns Episodes [D, S, E / D, rounded up]."""
        self._evaluate, self._num_agents, self._num_episodes = evaluate, args.num_agents, args.eval_episodes

    def begin(self, step: int, state: Any, seed: int) -> Evaluated:
        own = agreement.all_or_none(lambda: jax.block_until_ready(self._evaluate(state, np.int32(seed))))
        episodes = jax.device_get(multihost.gathered(own))
        return Evaluated(step, jax.tree.map(self._over_seeds, episodes))

    def poll(self) -> None:
        return None

    def stop(self) -> None:
        pass

    def _over_seeds(self, x: np.ndarray) -> np.ndarray:
        """[D, S, E / D] as [S, E]."""
        return np.moveaxis(x, 0, 1).reshape(self._num_agents, -1)[:, : self._num_episodes]


class Evaluations:
    """Begins evaluations, each step's once, and hands what comes of them to the recorder and the saver.

    Beside the training they may be late, but none is left out: where `MOST_PENDING` are, the training waits.
    """

    def __init__(
        self,
        newest: Score,
        args: Any,
        recorder: Recorder,
        saver: Saver,
        clock: Clock,
        warn: Callable[[str], None],
        is_game: bool = False,
    ):
        """`newest` is the last evaluation before this run, if there was one.

        Of a game, which is won with a return above 0, they say how often.
        """
        self.newest, self._goal, self._is_game = newest, args.stop_at_return, is_game
        self._overall = overall_of(args)
        self.goal_reached = self._reaches_goal(saver.best_return)  # by an evaluation, perhaps not the newest
        self._recorder, self._saver, self._clock, self._warn = recorder, saver, clock, warn
        self._evaluation: Evaluation | None = None
        self._begun = newest.step if newest.evaluation else None  # the step of the last one that has begun
        self._pending: deque[Pending] = deque()  # the oldest first
        self._room = MOST_WITH_STATES if args.keep_best else MOST_PENDING
        self._has_waited, self._left_out = False, 0
        self._best: Score | None = None  # of this invocation

    def use(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def begin(self, step: int, state: Any, stopped: Callable[[], bool]) -> None:
        """Evaluate `state`, unless that is done. Waits while too many are pending, and leaves it out once `stopped`.

        Raises TrainingError as `poll` does.
        """
        if self._begun == step:
            return
        self._begun, pending = step, Pending(step, self._clock.moment(), self._saver.counters())
        while len(self._pending) >= self._room:
            if stopped():
                self._left_out += 1
                return
            if not self._has_waited:
                self._has_waited = True
                self._warn(
                    f"the training waits, as {self._room} evaluations are pending: fewer --eval-episodes or a longer "
                    "--eval-interval make it faster"
                )
            self.poll()
            self._look_later()
        self._pending.append(pending)
        with self._clock.timed("eval"):
            self._note(self._evaluation.begin(step, state, SEED))

    def poll(self) -> None:
        """Take the oldest evaluation if it has come to its end. One that has failed costs a warning.

        Raises TrainingError where a state cannot be saved with its evaluation.
        """
        try:
            self._take()
        except EvaluationFailed as error:
            self._warn(str(error))

    def finish(
        self,
        step: int,
        state: Any,
        stopped: Callable[[], bool],
        task: Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
    ) -> None:
        """Wait for all evaluations, that of the last `state` among them, until `stopped`; `task` shows how far it is.

        Raises TrainingError where the last one fails, or a state cannot be saved.
        """
        if not stopped():
            self.begin(step, state, stopped)
        if not self._pending:
            return
        count = len(self._pending)
        with task(f"waiting for {count} evaluations" if count > 1 else "waiting for the evaluation") as show:
            while self._pending and not stopped():
                if len(self._pending) > 1:
                    self.poll()
                else:
                    self._take()
                show(count - len(self._pending), count)
                self._look_later()

    def in_other_episodes(self, step: int, state: Any, stopped: Callable[[], bool]) -> dict[str, list[float]] | None:
        """The metrics of `state` in episodes that no other evaluation plays; None where it is `stopped` before.

        Raises TrainingError where the evaluation fails.
        """
        with self._clock.timed("eval"):
            evaluated = self._evaluation.begin(step, state, OTHER_SEED)
            while evaluated is None and not stopped():
                time.sleep(POLL_INTERVAL)
                evaluated = self._evaluation.poll()
        return metrics_of(evaluated.episodes, self._is_game) if evaluated else None

    def lost(self) -> Score | None:
        """The best evaluation so far, if there is no checkpoint of its step."""
        return None if self._best is None or self._saver.has(self._best.step) else self._best

    def stop(self) -> None:
        """Give up what is pending, and say so."""
        if count := len(self._pending) + self._left_out:
            self._warn(f"{count} due evaluation{'s were' if count > 1 else ' was'} not played")
        if self._evaluation:
            self._evaluation.stop()

    def _look_later(self) -> None:
        with self._clock.timed("eval"):
            time.sleep(POLL_INTERVAL)

    def _take(self) -> None:
        if not self._pending:
            return
        try:
            evaluated = self._evaluation.poll()
        except TrainingError as error:
            raise EvaluationFailed(f"the evaluation at step {self._pending.popleft().step:,} {error}") from error
        self._note(evaluated)

    def _note(self, evaluated: Evaluated | None) -> None:
        if evaluated:
            pending = self._pending.popleft()
            self.newest = newest = Score(evaluated.step, metrics_of(evaluated.episodes, self._is_game))
            returns = [self._overall(x.evaluation["eval/return_mean"]) for x in (newest, self._best or newest)]
            self.goal_reached |= self._reaches_goal(returns[0])
            self._best = newest if returns[0] >= returns[1] else self._best  # of equal ones the newest
            self._recorder.add_evaluation(*newest, pending.moment)
            self._saver.add_evaluation(evaluated, pending.counters)

    def _reaches_goal(self, mean: float) -> bool:
        return self._goal is not None and mean >= self._goal


def metrics_of(episodes: Episodes, is_game: bool) -> dict[str, list[float]]:
    """The metrics of Episodes [S, E], each with one number per seed."""
    statistics = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    values = {f"return_{name}": function(episodes.ret, axis=1) for name, function in statistics.items()}
    values["length_mean"] = episodes.length.mean(axis=1)
    if is_game:
        values["win_rate"] = np.mean(episodes.ret > 0, axis=1)
    found = {f"eval/{name}": value.astype(float).tolist() for name, value in values.items()}
    return found | {DISTINCT: [float(len(np.unique(fingerprint))) for fingerprint in episodes.fingerprint]}


def reevaluate_best(
    saver: Saver,
    evaluations: Evaluations,
    state_of: Callable[[int], Any],
    stopped: Callable[[], bool],
    warn: Callable[[str], None],
) -> list[Score]:
    """Evaluate once more what `best` chooses, for all agents together first, then for each; stores what comes of it.

    `state_of` loads the state of a step. Empty where there was no choice; without evaluation where the run is `stopped`
    before, or where one fails, which costs a warning: where it fails in one of several processes, it does so in all.
    """
    steps, found = saver.choices(), {}
    for step in steps:
        if stopped():
            break
        try:
            found[step] = evaluations.in_other_episodes(step, state_of(step), stopped)
            if found[step]:
                saver.confirm(step, found[step]["eval/return_mean"])
        except (TrainingError, UsageError, RuntimeError, MemoryError) as error:  # there may be no room for two learners
            if multihost.has_lost(error):
                raise
            warn(f"checkpoint {step}, the best one, could not be evaluated once more: {error}")
    return [Score(step, found.get(step) or {}) for step in steps]
