"""Evaluations of a run: on the devices at once, on the host beside the training, and again of the best checkpoint."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from common.cli.errors import TrainingError, UsageError
from common.device import multihost
from common.device.evaluation import OTHER_SEED, SEED, Episodes, Evaluated
from common.runs.console import Console
from common.runs.ranking import DISTINCT, overall_of
from common.runs.recorder import Clock, Recorder
from common.runs.reports import Score
from common.runs.saver import Saver

POLL_INTERVAL = 0.01  # seconds between two looks at an evaluation that is waited for
MOST_PENDING = 8  # evaluations, each with a learner on the host
MOST_WITH_STATES = 2  # where --keep-best keeps the whole state of each, replay buffer and all


class DeviceEvaluation:
    """Greedy episodes, played at once. A `HostEvaluation`, which plays beside the training, has the same methods."""

    def __init__(self, evaluate: Callable, args: Any):
        """`evaluate` takes a state and a seed and returns Episodes [D, S, E / D, rounded up]."""
        self._evaluate, self._num_agents, self._num_episodes = evaluate, args.num_agents, args.eval_episodes

    def begin(self, step: int, state: Any, seed: int) -> Evaluated | None:
        """Evaluate `state` in the episodes of `seed`; None where that goes on beside the training.

        Then the next update may overwrite `state`.
        """
        own = multihost.all_or_none(lambda: jax.block_until_ready(self._evaluate(state, np.int32(seed))))
        episodes = jax.device_get(multihost.gathered(own))
        return Evaluated(step, jax.tree.map(self._over_seeds, episodes))

    def poll(self) -> Evaluated | None:
        """The oldest that goes on beside the training, once it is over. Raises TrainingError where it has failed."""

    def stop(self) -> None:
        """Give up all that is under way."""

    def _over_seeds(self, x: np.ndarray) -> np.ndarray:
        """[D, S, E / D] as [S, E]."""
        return np.moveaxis(x, 0, 1).reshape(self._num_agents, -1)[:, : self._num_episodes]


class Pending(NamedTuple):
    """An evaluation that is due, and not over."""

    step: int
    moment: dict[str, float]  # when its state was the present one, for a row of metrics
    counters: dict[str, int]  # those of then


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
        console: Console,
        stopped: Callable[[], bool],
        is_game: bool = False,
    ):
        """`newest` is the last evaluation before this run, if there was one. Once `stopped`, no more are waited for.

        Of a game, which is won with a return above 0, they say how often.
        """
        self.newest, self._goal, self._is_game = newest, args.stop_at_return, is_game
        self._overall = overall_of(args)
        self.goal_reached = self._reaches_goal(saver.best_return)  # by an evaluation, perhaps not the newest
        self._recorder, self._saver, self._clock = recorder, saver, clock
        self._console, self._stopped = console, stopped
        self._evaluation: Any = None  # until `use`
        self._begun = newest.step if newest.evaluation else None  # the step of the last one that has begun
        self._pending: deque[Pending] = deque()  # the oldest first
        self._room = MOST_WITH_STATES if args.keep_best else MOST_PENDING
        self._has_waited = False

    def use(self, evaluation: Any) -> None:
        """Evaluate with that from now on."""
        self._evaluation = evaluation

    def begin(self, step: int, state: Any) -> None:
        """Evaluate `state`, unless that is done. Waits while too many are pending, and leaves it out once stopped.

        Raises TrainingError as `poll` does.
        """
        if self._begun == step:
            return
        moment = {"time/wall": self._clock.wall, "time/compile": self._clock.seconds["compile"]}
        self._begun, pending = step, Pending(step, moment, self._saver.counters())
        while len(self._pending) >= self._room:
            if self._stopped():
                return
            if not self._has_waited:
                self._has_waited = True
                self._console.warn(
                    f"the training waits, as {self._room} evaluations are pending: fewer --eval-episodes or a longer "
                    "--eval-interval make it faster"
                )
            self.poll()
            self._rest()
        self._pending.append(pending)
        with self._clock.timed("eval"):
            self._note(self._evaluation.begin(step, state, SEED))

    def poll(self, may_fail: bool = True) -> None:
        """Take the oldest evaluation if it has come to its end. One that fails costs a warning.

        Raises TrainingError where it may not fail, and where a state cannot be saved with its evaluation.
        """
        if not self._pending:
            return
        try:
            evaluated = self._evaluation.poll()
        except TrainingError as error:
            failure = f"the evaluation at step {self._pending.popleft().step:,} {error}"
            if not may_fail:
                raise TrainingError(failure) from error
            self._console.warn(failure)
        else:
            self._note(evaluated)

    def finish(self, step: int, state: Any) -> None:
        """Wait for all evaluations, that of the last `state` among them, until stopped.

        Raises TrainingError where the last one fails, or a state cannot be saved.
        """
        if not self._stopped():
            self.begin(step, state)
        if not (count := len(self._pending)):
            return
        with self._console.task(f"waiting for {count} evaluation{'s' * (count > 1)}") as show:
            while self._pending and not self._stopped():
                self.poll(may_fail=len(self._pending) > 1)
                show(count - len(self._pending), count)
                self._rest()

    def confirm_best(self, state_of: Callable[[int], Any]) -> list[Score]:
        """Evaluate once more, in episodes that no other evaluation plays, what `best` chooses; stores what comes of it.

        For all agents together first, then for each. `state_of` loads the state of a step. Empty where there was no
        choice; without evaluation where the run is stopped before, or where one fails, which costs a warning: where it
        fails in one of several processes, it does so in all.
        """
        steps, found = self._saver.choices(), {}
        for step in steps:
            if self._stopped():
                break
            try:
                found[step] = self._in_other_episodes(step, state_of(step))
                if found[step]:
                    self._saver.confirm(step, found[step]["eval/return_mean"])
            except (TrainingError, UsageError, RuntimeError, MemoryError) as error:  # perhaps no room for two learners
                if multihost.has_lost(error):
                    raise
                self._console.warn(f"checkpoint {step}, the best one, could not be evaluated once more: {error}")
        return [Score(step, found.get(step) or {}) for step in steps]

    def stop(self) -> None:
        """Give up what is pending, and say so."""
        if count := len(self._pending):
            self._console.warn(f"{count} due evaluation{'s were' if count > 1 else ' was'} not played")
        if self._evaluation:
            self._evaluation.stop()

    def _in_other_episodes(self, step: int, state: Any) -> dict[str, list[float]]:
        """The metrics of `state` in those episodes; none where it is stopped before."""
        with self._clock.timed("eval"):
            evaluated = self._evaluation.begin(step, state, OTHER_SEED)
            while evaluated is None and not self._stopped():
                time.sleep(POLL_INTERVAL)
                evaluated = self._evaluation.poll()
        return metrics_of(evaluated.episodes, self._is_game) if evaluated else {}

    def _rest(self) -> None:
        with self._clock.timed("eval"):
            time.sleep(POLL_INTERVAL)

    def _note(self, evaluated: Evaluated | None) -> None:
        if evaluated:
            pending = self._pending.popleft()
            self.newest = Score(evaluated.step, metrics_of(evaluated.episodes, self._is_game))
            self.goal_reached |= self._reaches_goal(self._overall(self.newest.evaluation["eval/return_mean"]))
            self._recorder.add_evaluation(*self.newest, pending.moment)
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
