"""A run whose learner waits for actors, and whose evaluations go on beside the training."""

import math
import time
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from common.actors.rollouts import COUNTED, POLL
from common.cli.errors import TrainingError
from common.device.sharding import to_host
from common.runs.metrics import jsonable
from common.runs.run import Run, TrainResult


class Reports:
    """The metrics of a chunk's updates, each read when the update after it is under way."""

    def __init__(self):
        self.updates = 0
        self.more: dict[str, Any] = {}  # metrics of the host
        self.broken: dict[str, np.ndarray] = {}  # by metric, the first update in which it was not finite
        self._sums: dict[str, float] = {}
        self._last: dict[str, jax.Array] | None = None

    def add(self, metrics: dict[str, jax.Array]) -> None:
        """Take the metrics of an update that was just dispatched; waits for the one before it."""
        self._read_last()
        self._last = metrics
        self.updates += 1

    def read(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Means over the updates, and what was not finite."""
        self._read_last()
        means = {name: np.float32(total / self.updates) for name, total in self._sums.items()}
        return means | self.more, self.broken

    def _read_last(self) -> None:
        if self._last is None:
            return
        metrics, self._last = jax.device_get(self._last), None
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
            if not math.isfinite(value):
                self.broken.setdefault(name, np.array([self.updates - 1]))


class AsyncRun(Run):
    """See `Run`; chunks may end early, and `evaluate` is an `Evaluator`."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.counters = dict.fromkeys(("restarts", *COUNTED), 0)
        self._evaluation: tuple[int, Any, Future] | None = None  # the step, the state and the result to come

    def advance(self, state: Any, reports: Reports) -> None:
        """Account for the updates that `reports` has."""
        if not reports.updates:
            return
        self._chunk = reports.updates
        self._take_evaluation()
        super().advance(state, reports)
        if reports.broken:
            self._log_pending()

    def log(self) -> None:
        """Write the row of the last chunk, now that the next one is under way."""
        self._log_pending()

    def rescue(self, state: Any) -> None:
        """Save before the run fails for a reason that does not lie in `state`; warns where that fails too."""
        self._take_evaluation()
        if self.checkpoints and self._saved_at != self.steps and self.steps > self.first_step:
            self._log_pending()
            try:
                self._save(state)
                self.checkpoints.wait()
            except TrainingError as error:
                self.console.warn(str(error))

    def _read(self, reports: Reports) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return reports.read()

    def finish(self, state: Any) -> TrainResult:
        """See `Run`."""
        self._take_evaluation()
        return super().finish(state)

    def __exit__(self, *error: Any) -> None:
        if self._evaluate:
            self._evaluate.stop()
        super().__exit__(*error)

    def _settle(self, state: Any, evaluate: bool, save: bool) -> None:
        if self.unfinished:
            super()._settle(state, False, save)
            if evaluate and not self._evaluation and not self.args.benchmark:
                host = to_host(state)
                self._evaluation = self.steps, host, self._evaluate.start(jax.tree.map(lambda x: x[0], host.learner))
            return
        super()._settle(state, False, save)  # first, since an environment may fail
        super()._settle(state, evaluate, False)

    def _episodes(self, state: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """At the end: wait for the evaluation under way, then for that of `state`."""
        stopped = lambda: bool(self._signals.received)  # noqa: E731
        while self._evaluation and not stopped():
            self._take_evaluation()
            time.sleep(POLL / 10)
        if stopped():
            return None
        learner = jax.tree.map(lambda x: x[0], to_host(state).learner)
        episodes = self._evaluate.wait(self._evaluate.start(learner), stopped)
        return episodes and (episodes.ret[None], episodes.length[None])

    def _take_evaluation(self) -> None:
        """Write down the evaluation in the background, where it is done; give it up where it is stuck."""
        if not self._evaluation:
            return
        step, host, future = self._evaluation
        problem = None if future.done() else self._evaluate.problem()
        if problem:
            self.console.warn(f"the evaluation at step {step:,} {problem} and was given up")
        if problem or future.done():
            self._evaluation = None
        if not future.done():
            return
        try:
            episodes = future.result()
        except Exception as error:
            self.console.warn(f"the evaluation at step {step:,} failed: {type(error).__name__}: {error}")
            return
        best = self._note_evaluation(step, episodes.ret[None], episodes.length[None])
        if self._metrics:
            row = {name: jsonable(value) for name, value in self.evaluation.items()}
            self._metrics.write({"env_steps": step} | row)
        if not self.checkpoints:
            return
        returns = self.evaluation["eval/return_mean"]
        if step in self.checkpoints.steps():
            self.checkpoints.add_evaluation(step, returns)
        elif best:
            self.checkpoints.save(step, self._saved_part(host) | self._counters(), returns)
