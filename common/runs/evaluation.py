"""Evaluations of a run: at once on the devices, or beside the training on the host. A run treats both alike."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import numpy as np

from common.device.evaluation import Episodes, Evaluated
from common.runs.clock import Clock
from common.runs.recorder import Recorder
from common.runs.saver import Saver


class Evaluation(Protocol):
    """Greedy episodes with the state of the run at some step."""

    def begin(self, step: int, state: Any) -> None:
        """Start to evaluate `state`, unless another evaluation is under way. The next update may overwrite `state`."""

    def poll(self) -> Evaluated | None:
        """An evaluation that has come to its end since the last call. One that fails costs a warning."""

    def finish(self, step: int, state: Any, stopped: Callable[[], bool]) -> Iterable[Evaluated]:
        """The evaluation that is under way, then that of the last `state`; waits for both until `stopped`.

        Raises TrainingError where the last one fails.
        """

    def stop(self) -> None:
        """Give up what is under way."""


class DeviceEvaluation:
    """Evaluates at once."""

    def __init__(self, evaluate: Callable, args: Any):
        """`evaluate` takes a state and returns Episodes [D, S, E / D, rounded up]."""
        self._evaluate, self._num_seeds, self._num_episodes = evaluate, args.num_seeds, args.eval_episodes
        self._result: Evaluated | None = None

    def begin(self, step: int, state: Any) -> None:
        episodes = jax.device_get(self._evaluate(state))
        self._result = Evaluated(step, jax.tree.map(self._over_seeds, episodes))

    def poll(self) -> Evaluated | None:
        result, self._result = self._result, None
        return result

    def finish(self, step: int, state: Any, stopped: Callable[[], bool]) -> Iterable[Evaluated]:
        return ()

    def stop(self) -> None:
        pass

    def _over_seeds(self, x: np.ndarray) -> np.ndarray:
        """[D, S, E / D] as [S, E]."""
        return np.moveaxis(x, 0, 1).reshape(self._num_seeds, -1)[:, : self._num_episodes]


class Evaluations:
    """Hands what comes of evaluations to the recorder and the saver."""

    def __init__(self, newest: dict[str, list[float]], recorder: Recorder, saver: Saver, clock: Clock):
        """`newest` are the metrics of the last evaluation before this run, if there was one."""
        self.newest, self._step = newest, None
        self._recorder, self._saver, self._clock = recorder, saver, clock
        self._evaluation: Evaluation | None = None

    def use(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def begin(self, step: int, state: Any) -> None:
        if self._step != step:
            with self._clock.timed("eval"):
                self._evaluation.begin(step, state)
            self.poll()

    def poll(self) -> None:
        self._note(self._evaluation.poll())

    def finish(self, step: int, state: Any, stopped: Callable[[], bool]) -> None:
        self.poll()
        if self._step != step:
            with self._clock.timed("eval"):
                for evaluated in self._evaluation.finish(step, state, stopped):
                    self._note(evaluated)

    def stop(self) -> None:
        if self._evaluation:
            self._evaluation.stop()

    def _note(self, evaluated: Evaluated | None) -> None:
        if evaluated:
            self.newest, self._step = metrics_of(evaluated.episodes), evaluated.step
            self._recorder.add_evaluation(evaluated.step, self.newest)
            self._saver.add_evaluation(evaluated)


def metrics_of(episodes: Episodes) -> dict[str, list[float]]:
    """The metrics of Episodes [S, E], each with one number per seed."""
    statistics = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    values = {f"return_{name}": function(episodes.ret, axis=1) for name, function in statistics.items()}
    values["length_mean"] = episodes.length.mean(axis=1)
    return {f"eval/{name}": value.astype(float).tolist() for name, value in values.items()}
