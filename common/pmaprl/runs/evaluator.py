"""Evaluations of a run: on the devices between two chunks, on the host beside the training."""

import time
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from pmaprl.cli.errors import TrainingError
from pmaprl.device.evaluation import Episodes, fault_of
from pmaprl.machine import multihost
from pmaprl.runs.checkpoints import overall
from pmaprl.runs.console import brief_returns
from pmaprl.runs.metrics import Row
from pmaprl.runs.recorder import Recorder
from pmaprl.runs.results import EvaluationResult
from pmaprl.runs.saving import Saver
from pmaprl.runs.setup import Setup

POLL_INTERVAL = 0.01  # seconds between two looks at an evaluation that is waited for
MOST_PENDING = 8  # evaluations, each with a learner on the host


class HostEvaluator(Protocol):
    """Player of evaluations beside the training, such as a `HostEvaluation`."""

    def begin(self, step: int, state: Any) -> None: ...

    def poll(self) -> Episodes | None: ...

    def stop(self) -> None: ...


class Evaluations:
    """Begins evaluations, one per step, and passes their results to the recorder and the saver.

    Evaluations beside the training may be late, but none is left out: when `MOST_PENDING` are
    pending, the training waits.
    """

    def __init__(
        self,
        setup: Setup,
        saver: Saver,
        recorder: Recorder,
        newest: EvaluationResult,
        host_evaluation: HostEvaluator | None = None,
    ):
        """Prepare the evaluations of a run.

        Args:
            setup: what is known of the run.
            saver: stores returns with the checkpoints.
            recorder: writes results into rows.
            newest: the last evaluation of earlier invocations, if there was one.
            host_evaluation: plays beside the training. None: the devices play between two chunks.
        """
        self._setup = setup
        self._args = setup.args
        self._clock = setup.clock
        self._console = setup.console
        self._saver = saver
        self._recorder = recorder
        self.newest = newest
        # The step at which the run ends, as far as is known; its footer shows that evaluation
        self.last_step: int = setup.end
        self.host_evaluation = host_evaluation
        _, best = multihost.on_first(saver.checkpoints.best)
        self.goal_reached = self._reaches_goal(best)  # by any evaluation, not only the newest
        self._newest_begun = newest.step if newest.evaluation else None
        self._pending: dict[int, Row] = {}  # times of pending evaluations by step, oldest first
        saver.checkpoints.under_evaluation = self._pending
        self._has_waited = False

    def is_due(self, step: int) -> bool:
        """True if the state at this step has not been evaluated yet."""
        return self._newest_begun != step

    def begin(self, step: int, episodes_or_state: Any) -> None:
        """Evaluate the state at this step, unless that is done or the run is to stop.

        Args:
            step: environment steps.
            episodes_or_state: the episodes, still under computation on the devices; for an
                evaluation beside the training, the state on the host.
        """
        if not self.is_due(step):
            return
        self._newest_begun = step
        moment = {
            "time/wall": self._clock.wall,
            "time/compile": self._clock.seconds["compile"],
        }
        while len(self._pending) >= MOST_PENDING:
            if self._no_more():
                return
            if not self._has_waited:
                self._has_waited = True
                why = f"as {MOST_PENDING} evaluations are pending"
                self._console.warn(
                    f"the training waits, {why}: fewer --eval-episodes or a longer "
                    "--eval-interval help"
                )
            self.poll()
            self._rest()
        self._pending[step] = moment
        with self._clock.timed("eval"):
            if self.host_evaluation:
                self.host_evaluation.begin(step, episodes_or_state)
            else:  # the evaluation belongs to this step's row and checkpoint
                episodes = episodes_of(episodes_or_state, self._args)
                if fault := fault_of(episodes):
                    why = f"{self._setup.env_name} {fault}"
                    self._console.warn(f"the evaluation at step {step:,} does not count: {why}")
                self._end(step, episodes)

    def poll(self, may_fail: bool = True) -> None:
        """Take the result of the oldest evaluation, if it has ended; warn if it has failed."""
        if not self.host_evaluation or not self._pending:
            return
        step = next(iter(self._pending))
        try:
            episodes = self.host_evaluation.poll()
        except TrainingError as error:
            del self._pending[step]
            failure = f"the evaluation at step {step:,} {error}"
            if not may_fail:
                raise TrainingError(failure) from error
            self._console.warn(failure)
            return
        if episodes:
            self._end(step, episodes)

    def _end(self, step: int, episodes: Episodes) -> None:
        self.newest = EvaluationResult(step, metrics_of(episodes, self._setup.is_game))
        self.goal_reached |= self._reaches_goal(self.newest.returns)
        ends_here = self.goal_reached and not self.host_evaluation
        if step < self.last_step and not ends_here:  # the footer says it with more numbers
            earned = brief_returns(self.newest.returns, self._args.is_population)
            self._console.say(f"greedy   return {earned} at step {step:,}")
        self._recorder.add_evaluation(*self.newest, self._pending[step])
        self._saver.add_evaluation(*self.newest)
        del self._pending[step]  # from now on its checkpoint may be deleted, unless it is the best

    def finish(self) -> None:
        """Wait for all evaluations, unless the run is stopped."""
        count = len(self._pending)
        if count:
            self._console.say(f"waiting for {count} evaluation{'s' * (count > 1)} ...")
        while self._pending and not self._no_more():
            self.poll(may_fail=len(self._pending) > 1)
            self._rest()

    def stop(self) -> None:
        """Give up pending evaluations, with a warning."""
        count = len(self._pending)
        if count:
            warning = f"{count} due evaluation{'s were' if count > 1 else ' was'} not played"
            self._console.warn(warning + self._played_later())
        if self.host_evaluation:
            self.host_evaluation.stop()

    def _played_later(self) -> str:
        """Name the pending evaluations that --resume plays: the last one, and any after a save."""
        saved = self._saver.newest_step
        later = sum(step > saved or step == saved == self._setup.total for step in self._pending)
        if not later:
            return ""
        if later == len(self._pending):
            return f": --resume plays {'them' if later > 1 else 'it'}"
        return f": --resume plays the last {later if later > 1 else 'one'}"

    def _reaches_goal(self, returns: list[float]) -> bool:
        goal = self._args.stop_at_return
        return goal is not None and overall(returns, self._args.is_population) >= goal

    def _no_more(self) -> bool:
        """True if no evaluation is to be played or waited for any more.

        All processes have to ask at the same time.
        """
        return bool(self._args.benchmark or self._setup.interruption.signal_of_any_process())

    def _rest(self) -> None:
        with self._clock.timed("eval"):
            time.sleep(POLL_INTERVAL)


def episodes_of(played: Any, args: Any) -> Episodes:
    """Wait for the Episodes [D, S, J / D] of D devices, and join them on the host: [S, J]."""
    local = multihost.all_or_none(lambda: jax.block_until_ready(played))
    episodes = multihost_utils.process_allgather(local, tiled=True)

    def joined(x: np.ndarray) -> np.ndarray:
        # E / D is rounded up, so there may be more episodes than were asked for
        return np.concatenate(x, axis=1)[:, : args.eval_episodes]

    return jax.tree.map(joined, episodes)


def metrics_of(episodes: Episodes, is_game: bool) -> dict[str, list[float]]:
    """Metrics of Episodes [S, J], each with one number per seed."""
    values = {
        "return_mean": episodes.ret.mean(axis=1),
        "return_std": episodes.ret.std(axis=1),
        "return_min": episodes.ret.min(axis=1),
        "return_max": episodes.ret.max(axis=1),
        "length_mean": episodes.length.mean(axis=1),
    }
    if is_game:
        values["win_rate"] = np.mean(episodes.ret > 0, axis=1)
    return {f"eval/{name}": value.astype(float).tolist() for name, value in values.items()}
