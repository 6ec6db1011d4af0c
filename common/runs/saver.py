"""What a run saves of its state, and what it knows of its checkpoints."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.cli.errors import TrainingError
from common.device import multihost
from common.device.evaluation import Evaluated
from common.device.sharding import TrainState, to_devices, to_host
from common.runs.arrays import COUNTERS, flatten, sha256
from common.runs.checkpoints import CONFIRMED, FOLDER, Checkpoints
from common.runs.loading import Start
from common.runs.lock import is_ours
from common.runs.ranking import best_step, overall_of
from common.runs.reports import has_ended_at


class Saver:
    """Saves states, each once, with the evaluations that belong to them."""

    def __init__(
        self,
        directory: Path | None,
        args: Any,
        start: Start,
        counters: Callable[[], dict[str, int]],
        warn: Callable[[str], None],
    ):
        """Checkpoints go into the run's `directory`, or nowhere, each with the `counters` of the moment.

        All processes save at the same time. What the first finds in the directory the others are told.
        """
        self._directory, self._checkpoints, self._overall = directory, None, overall_of(args)
        if directory:
            self._checkpoints = Checkpoints(
                directory / FOLDER, args.keep_checkpoints, args.keep_best, overall=self._overall
            )
            for damaged in start.damaged:
                warn(self._checkpoints.set_aside(damaged))
        self._unsaved, self._keep_best, self._is_population = args.unsaved, args.keep_best, args.is_population
        self.counters = counters
        self._saved, self._newest = {start.step}, start.host
        # The best evaluation of a checkpoint, or of a state of this invocation; -inf without any
        self.best_return = multihost.on_first(self._checkpoints.best) if self._checkpoints else -np.inf
        self._returns: dict[int, list[float]] = {}  # of the newest evaluation, by its step
        self._best_step: int | None = None

    def add_evaluation(self, evaluated: Evaluated, counters: dict[str, int]) -> None:
        """Store an evaluation with the state that it is of, if that is still there or will be saved.

        A past state that --keep-best wants and that is not there is saved, with the `counters` of its step.
        """
        step, returns = evaluated.step, evaluated.episodes.ret.mean(axis=1).astype(float).tolist()
        self._returns = {step: returns}
        is_best = self._overall(returns) > self.best_return
        if is_best:
            self.best_return, self._best_step = self._overall(returns), step
        if step in self._saved and self._checkpoints and self._checkpoints.add_evaluation(step, returns):
            return
        if is_best and self._keep_best and evaluated.state is not None:
            self._write(step, evaluated.state, counters)

    def choices(self) -> list[int]:
        """Steps of the checkpoints that `best` chooses, for all agents together first, where it has a choice.

        The members of a population are a choice too, for which the newest checkpoint is among them.
        """
        self.wait()
        evaluations = self._checkpoints.agreed_evaluations()
        if not evaluations or len(evaluations) + self._keep_best < 2 and not self._is_population:
            return []
        agents = range(max(map(len, evaluations.values())))
        chosen = [best_step(evaluations, agent, self._overall) for agent in (None, *agents)]
        chosen += [max(evaluations)] * self._is_population
        return [step for step in dict.fromkeys(chosen) if step is not None]

    def confirm(self, step: int, returns: list[float]) -> None:
        """Store a second evaluation of a checkpoint, by which it was not chosen."""
        self._checkpoints.add_evaluation(step, returns, CONFIRMED)

    def with_learner_of(self, state: Any, where: tuple[Any, list[Any], str], step: int) -> Any:
        """`state` with the learner of a checkpoint, in all processes or in none. Raises UsageError as `load`.

        `where` are the state's shapes, devices and sharding.
        """
        _, learner, _ = self._checkpoints.load_learner(self.newest(state).learner, lambda: [step])
        shapes, devices, sharding = where
        alone, like = TrainState(learner, (), ()), TrainState(shapes.learner, (), ())
        return state.replace(learner=multihost.all_or_none(to_devices, alone, like, devices, sharding).learner)

    def wants(self, step: int) -> bool:
        """Whether --keep-best wants the state of this step, which is the present one, saved."""
        return self._keep_best and self._best_step == step

    def save(self, step: int, state: Any) -> None:
        """Start saving, unless that is done. Raises TrainingError where it fails, or the save before did."""
        if step not in self._saved:
            self._write(step, to_host(state, self._unsaved), self.counters())

    def newest(self, state: Any) -> Any:
        """The state on the host: the one that was saved last, or that the run goes on from, else a copy of `state`."""
        return to_host(state, self._unsaved) if self._newest is None else self._newest

    def sha256(self, host: Any) -> str:
        """Checksum of what checkpoints hold of a state; of several processes that of their own checksums."""
        own = sha256(flatten(host, self._unsaved))
        return own if multihost.count() == 1 else hashlib.sha256("".join(multihost.allgather(own)).encode()).hexdigest()

    def checkpoint(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        steps = self._checkpoints.steps() if self._checkpoints else []
        return self._checkpoints.path(steps[-1]) if steps else None

    def is_judged(self, step: int) -> bool:
        """Whether the run has ended at this step before, all evaluations included: nothing cut it short."""
        if not self._checkpoints or step not in self._checkpoints.agreed_evaluations():
            return False
        return multihost.on_first(has_ended_at, self._directory, step)

    def last_good(self) -> str:
        """In words, where a run that broke can go on."""
        with suppress(TrainingError):
            self.wait()
        newest = self.checkpoint()
        return f"the last good checkpoint is at step {newest.name}" if newest else "there is no checkpoint yet"

    def check_directory(self) -> None:
        """Raise TrainingError where the directory of the run is not its own any more."""
        if self._directory and multihost.is_first() and not is_ours(self._directory):
            raise TrainingError(
                f"{self._directory} was deleted or moved while the run went on: nothing more can be saved"
            )

    def wait(self) -> None:
        """Until everything is on disk. Raises TrainingError where that fails."""
        if self._checkpoints:
            self._checkpoints.wait()

    def let_finish(self) -> None:
        """For a process that fails: let the save under way come to its end, whatever the others do."""
        if self._checkpoints:
            self._checkpoints.let_finish()

    def close(self) -> None:
        """Wait, and raise TrainingError as that does, or where what was saved is in a directory that came back."""
        self.wait()
        if self._checkpoints:
            self._checkpoints.close()
        self.check_directory()

    def _write(self, step: int, host: Any, counters: dict[str, int]) -> None:
        if step > max(self._saved):  # not the best one of the past
            self._newest = host
        self._saved.add(step)
        if self._checkpoints:
            arrays = flatten(host, self._unsaved)
            arrays |= {f"{COUNTERS}/{name}": np.int64([count]) for name, count in counters.items()}
            self._checkpoints.save(step, arrays, self._returns.get(step))
