"""Evaluations of a run: on the devices between two chunks, on the host beside the training."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pmaprl.cli.errors import TrainingError
from pmaprl.device import multihost
from pmaprl.device.evaluation import SEED, Episodes, fault_of
from pmaprl.runs.checkpoints import overall
from pmaprl.runs.console import brief_returns
from pmaprl.runs.metrics import Row
from pmaprl.runs.results import EvaluationResult

POLL_INTERVAL = 0.01  # seconds between two looks at an evaluation that is waited for
MOST_PENDING = 8  # evaluations, each with a learner on the host


class Evaluations:
    """Begins evaluations, one per step, and passes their results to the recorder and the saver.

    Evaluations beside the training may be late, but none is left out: when `MOST_PENDING` are
    pending, the training waits.
    """

    def __init__(self, run: Any, newest: EvaluationResult):
        """Prepare the evaluations of a run.

        Args:
            run: the `Run`, whose parts they use.
            newest: the last evaluation before it, if there was one.
        """
        self._run = run
        self.newest = newest
        _, best = multihost.on_first(run.saver.checkpoints.best)
        self.goal_reached = self._reaches_goal(best)  # by any evaluation, not only the newest
        self.evaluate: Callable | None = None  # program that plays on the devices
        self.beside: Any = None  # a `HostEvaluation`, which plays beside the training instead
        self._newest_begun = newest.step if newest.evaluation else None
        self._pending: dict[int, Row] = {}  # times of pending evaluations by step, oldest first
        run.saver.checkpoints.under_evaluation = self._pending
        self._has_waited = False

    def is_due(self, step: int) -> bool:
        """True if the state at this step has not been evaluated yet."""
        return self._newest_begun != step

    def dispatch(self, state: Any) -> Any:
        """Begin to play on the devices; the next update may take the state as soon as this returns.

        Returns:
            Episodes on the devices, still under computation.
        """
        return self.evaluate(state, np.int32(SEED))

    def begin(self, step: int, played: Any) -> None:
        """Evaluate the state at this step, unless that is done or the run is to stop.

        Args:
            step: environment steps.
            played: the episodes of `dispatch`; for an evaluation beside the training, the state on
                the host.
        """
        if not self.is_due(step):
            return
        run = self._run
        self._newest_begun = step
        moment = {"time/wall": run.clock.wall, "time/compile": run.clock.seconds["compile"]}
        while len(self._pending) >= MOST_PENDING:
            if run.no_more_evaluations():
                return
            if not self._has_waited:
                self._has_waited = True
                why = f"as {MOST_PENDING} evaluations are pending"
                run.console.warn(
                    f"the training waits, {why}: fewer --eval-episodes or a longer "
                    "--eval-interval help"
                )
            self.poll()
            self._rest()
        self._pending[step] = moment
        with run.clock.timed("eval"):
            if self.beside:
                self.beside.begin(step, played)
            else:  # it belongs to this step's row and checkpoint
                episodes = episodes_of(played, run.args)
                if fault := fault_of(episodes):
                    why = f"{run.env_name} {fault}"
                    run.console.warn(f"the evaluation at step {step:,} does not count: {why}")
                self._end(step, episodes)

    def poll(self, may_fail: bool = True) -> None:
        """Take the result of the oldest evaluation, if it has ended; warn if it has failed."""
        if not self._pending:
            return
        step = next(iter(self._pending))
        try:
            episodes = self.beside.poll()
        except TrainingError as error:
            del self._pending[step]
            failure = f"the evaluation at step {step:,} {error}"
            if not may_fail:
                raise TrainingError(failure) from error
            self._run.console.warn(failure)
            return
        if episodes:
            self._end(step, episodes)

    def _end(self, step: int, episodes: Episodes) -> None:
        run = self._run
        self.newest = EvaluationResult(step, metrics_of(episodes, run.is_game))
        self.goal_reached |= self._reaches_goal(self.newest.returns)
        if step < run.total:  # the end of a run says it with more numbers
            earned = brief_returns(self.newest.returns, run.args.is_population)
            run.console.say(f"greedy   return {earned} at step {step:,}")
        run.recorder.add_evaluation(*self.newest, self._pending[step])
        run.saver.add_evaluation(*self.newest)
        del self._pending[step]  # from now on its checkpoint may be deleted, unless it is the best

    def finish(self) -> None:
        """Wait for all evaluations, unless the run is stopped."""
        count = len(self._pending)
        if count:
            self._run.console.say(f"waiting for {count} evaluation{'s' * (count > 1)} ...")
        while self._pending and not self._run.no_more_evaluations():
            self.poll(may_fail=len(self._pending) > 1)
            self._rest()

    def stop(self) -> None:
        """Give up pending evaluations, with a warning."""
        count = len(self._pending)
        if count:
            warning = f"{count} due evaluation{'s were' if count > 1 else ' was'} not played"
            self._run.console.warn(warning + self._played_later())
        if self.beside:
            self.beside.stop()

    def _played_later(self) -> str:
        """Name the pending evaluations that --resume plays: the last one, and any after a save."""
        saved = self._run.saver.newest_step
        later = sum(step > saved or step == saved == self._run.total for step in self._pending)
        if not later:
            return ""
        if later == len(self._pending):
            return f": --resume plays {'them' if later > 1 else 'it'}"
        return f": --resume plays the last {later if later > 1 else 'one'}"

    def _reaches_goal(self, returns: list[float]) -> bool:
        goal = self._run.args.stop_at_return
        return goal is not None and overall(returns, self._run.args.is_population) >= goal

    def _rest(self) -> None:
        with self._run.clock.timed("eval"):
            time.sleep(POLL_INTERVAL)


def episodes_of(played: Any, args: Any) -> Episodes:
    """Wait for the Episodes [D, S, E / D] of D devices, and join them on the host: [S, E]."""
    local = multihost.all_or_none(lambda: jax.block_until_ready(played))
    episodes = multihost_utils.process_allgather(local, tiled=True)

    def joined(x: np.ndarray) -> np.ndarray:
        # E / D is rounded up, so there may be more episodes than were asked for
        return np.concatenate(x, axis=1)[:, : args.eval_episodes]

    return jax.tree.map(joined, episodes)


def metrics_of(episodes: Episodes, is_game: bool) -> dict[str, list[float]]:
    """Metrics of Episodes [S, E], each with one number per seed."""
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
