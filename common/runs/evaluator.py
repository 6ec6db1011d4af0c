"""Evaluations of a run: on the devices at once, on the host beside the training."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from common.cli.errors import TrainingError
from common.device import multihost
from common.device.evaluation import SEED, Episodes
from common.runs.checkpoints import overall
from common.runs.reports import Score

POLL_INTERVAL = 0.01  # seconds between two looks at an evaluation that is waited for
MOST_PENDING = 8  # evaluations, each with a learner on the host


class DeviceEvaluation:
    """Greedy episodes, played at once. A `HostEvaluation`, which plays beside the training, has the same methods."""

    def __init__(self, evaluate: Callable, args: Any):
        """`evaluate` takes a state and a seed and returns Episodes [D, S, E / D, rounded up]."""
        self._evaluate, self._num_agents, self._num_episodes = evaluate, args.num_agents, args.eval_episodes

    def begin(self, step: int, state: Any) -> Episodes | None:
        """Evaluate `state`; None where that goes on beside the training, whose next update may overwrite it."""
        own = multihost.all_or_none(lambda: jax.block_until_ready(self._evaluate(state, np.int32(SEED))))
        episodes = jax.device_get(multihost.gathered(own))

        def over_seeds(x: np.ndarray) -> np.ndarray:  # [D, S, E / D] as [S, E]
            return np.moveaxis(x, 0, 1).reshape(self._num_agents, -1)[:, : self._num_episodes]

        return jax.tree.map(over_seeds, episodes)

    def poll(self) -> Episodes | None:
        """The oldest that goes on beside the training, once it is over. Raises TrainingError where it has failed."""

    def stop(self) -> None:
        """Give up all that is under way."""


class Pending(NamedTuple):
    """An evaluation that is due, and not over."""

    step: int
    moment: dict[str, float]  # when its state was the present one, for a row of metrics


class Evaluations:
    """Begins evaluations, each step's once, and hands what comes of them to the recorder and the saver.

    Beside the training they may be late, but none is left out: where `MOST_PENDING` are, the training waits.
    """

    def __init__(self, run: Any, newest: Score):
        """Of a `Run`, whose parts they use; `newest` is the last evaluation before it, if there was one."""
        self._run, self.newest = run, newest
        self._goal = math.inf if run.args.stop_at_return is None else run.args.stop_at_return
        best = multihost.on_first(run.saver.checkpoints.best)[1]
        self.goal_reached = best >= self._goal  # by an evaluation, perhaps not the newest
        self.evaluation: Any = None  # a DeviceEvaluation or HostEvaluation, once there is one
        self._begun = newest.step if newest.evaluation else None  # the step of the last one that has begun
        self._pending: deque[Pending] = deque()  # the oldest first
        self._has_waited = False

    def begin(self, step: int, state: Any) -> None:
        """Evaluate `state`, unless that is done. Waits while too many are pending, and leaves it out once stopped."""
        if self._begun == step:
            return
        moment = {"time/wall": self._run.clock.wall, "time/compile": self._run.clock.seconds["compile"]}
        self._begun = step
        while len(self._pending) >= MOST_PENDING:
            if self._run.no_more_evaluations():
                return
            if not self._has_waited:
                self._has_waited = True
                self._run.console.warn(
                    f"the training waits, as {MOST_PENDING} evaluations are pending: fewer --eval-episodes or a longer "
                    "--eval-interval make it faster"
                )
            self.poll()
            self._rest()
        self._pending.append(Pending(step, moment))
        self._run.saver.checkpoints.unjudged.add(step)
        with self._run.clock.timed("eval"):
            self._note(self.evaluation.begin(step, state))

    def poll(self, may_fail: bool = True) -> None:
        """Take the oldest evaluation if it has come to its end. One that fails costs a warning."""
        if not self._pending:
            return
        try:
            episodes = self.evaluation.poll()
        except TrainingError as error:
            failure = f"the evaluation at step {self._pending[0].step:,} {error}"
            self._drop_oldest()
            if not may_fail:
                raise TrainingError(failure) from error
            self._run.console.warn(failure)
        else:
            self._note(episodes)

    def finish(self, step: int, state: Any) -> None:
        """Wait for all evaluations, that of the last `state` among them, until stopped."""
        if not self._run.no_more_evaluations():
            self.begin(step, state)
        if not (count := len(self._pending)):
            return
        self._run.console.say(f"waiting for {count} evaluation{'s' * (count > 1)} ...")
        while self._pending and not self._run.no_more_evaluations():
            self.poll(may_fail=len(self._pending) > 1)
            self._rest()

    def stop(self) -> None:
        """Give up what is pending, and say so."""
        if count := len(self._pending):
            self._run.console.warn(f"{count} due evaluation{'s were' if count > 1 else ' was'} not played")
        if self.evaluation:
            self.evaluation.stop()

    def _rest(self) -> None:
        with self._run.clock.timed("eval"):
            time.sleep(POLL_INTERVAL)

    def _note(self, episodes: Episodes | None) -> None:
        """Take the episodes [S, E] of the oldest that is pending, if it is over."""
        if episodes:
            pending = self._pending[0]
            self.newest = Score(pending.step, metrics_of(episodes, self._run.is_game))
            returns = self.newest.evaluation["eval/return_mean"]
            self.goal_reached |= overall(returns, self._run.args.is_population) >= self._goal
            self._run.recorder.add_evaluation(*self.newest, pending.moment)
            self._run.saver.add_evaluation(*self.newest)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """It is over, and its checkpoint may go, unless that is the best one."""
        self._run.saver.checkpoints.unjudged.discard(self._pending.popleft().step)


def metrics_of(episodes: Episodes, is_game: bool) -> dict[str, list[float]]:
    """The metrics of Episodes [S, E], each with one number per seed."""
    statistics = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    values = {f"return_{name}": function(episodes.ret, axis=1) for name, function in statistics.items()}
    values["length_mean"] = episodes.length.mean(axis=1)
    if is_game:
        values["win_rate"] = np.mean(episodes.ret > 0, axis=1)
    return {f"eval/{name}": value.astype(float).tolist() for name, value in values.items()}
