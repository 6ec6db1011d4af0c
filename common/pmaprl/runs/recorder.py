"""Rows of metrics in `metrics.jsonl` and on the console, one for every chunk of updates."""

import math
from collections.abc import Callable
from contextlib import closing
from functools import cache
from typing import Any

from pmaprl.cli.errors import TrainingError
from pmaprl.device.outcome import Outcome
from pmaprl.envs.bytes import IN_BOUNDS
from pmaprl.envs.ranges import IN_SPACE, OUTSIDE
from pmaprl.runs.lock import is_ours
from pmaprl.runs.metrics import LogWriter, Row, jsonable, read_log
from pmaprl.runs.setup import Setup


class Chunk:
    """Updates of one row, dispatched in one or several calls, and the evaluation of their row."""

    def __init__(self, first_step: int, last_step: int, read: Callable[[], Outcome]):
        """Begin with a dispatched call.

        Args:
            first_step: environment steps before it.
            last_step: environment steps after it.
            read: waits for the call and returns its outcome.
        """
        self.first_step = first_step
        self.last_step = last_step
        self.to_be_written = False  # as soon as its updates are done
        self.evaluation: Row = {}
        self._read = cache(read)  # waits for all its calls

    def add(self, last_step: int, read: Callable[[], Outcome]) -> None:
        """Add a dispatched call up to a step, and wait for the call before it."""
        earlier = self.outcome
        self.last_step = last_step
        self._read = cache(lambda: earlier.followed_by(read()))

    @property
    def outcome(self) -> Outcome:
        """Outcome of all its updates, once they are done."""
        return self._read()

    @property
    def broken(self) -> dict[int, tuple[int, str]]:
        """First number that was not finite, by agent: (index of the update, name of the metric)."""
        first = {}
        for name, indices in self.outcome.broken.items():
            for agent, index in enumerate(indices):
                if index < 0:
                    continue
                fault = int(index), name
                first[agent] = min(fault, first.get(agent, fault))
        return first


class Recorder:
    """Holds back the row of the newest chunk until it is asked to write it."""

    def __init__(self, setup: Setup, first_step: int, last_good: Callable[[], str]):
        """Open the log of a run.

        Args:
            setup: what is known of the run. Without a directory only the console shows rows.
            first_step: environment steps before this invocation.
            last_good: names the checkpoint from which a run that broke can go on.
        """
        self._args = setup.args
        self._clock = setup.clock
        self._console = setup.console
        self._callback = setup.callback
        self._cautions = dict(setup.cautions)  # without those that were shown
        self._first_step = first_step
        self._last_good = last_good
        self.stop_requested = False  # by the callback
        self._log: LogWriter | None = None
        self._dir = setup.dir
        if setup.dir:
            self._log = LogWriter(setup.dir, setup.args, setup.config, resume_at=first_step)
            self._clock.add_earlier(read_log(setup.dir, ()))
        self._broken: set[int] = set()  # members of a population that were given up
        self._elsewhere = 0.0  # seconds of evaluations and saves before the newest row
        self.chunk: Chunk | None = None  # the newest one, until its row is written

    def add(self, first_step: int, last_step: int, read: Callable[[], Outcome]) -> Chunk:
        """Add dispatched updates to the row that is held back, or to a new one.

        Args:
            first_step: environment steps before the updates.
            last_step: environment steps after them.
            read: waits for the updates and returns their outcome.

        Returns:
            The chunk of the row.

        Raises:
            TrainingError: a metric of earlier updates was not finite.
        """
        self.wait()
        if self.chunk is None:
            self.chunk = Chunk(first_step, last_step, read)
        else:
            self.chunk.add(last_step, read)
        return self.chunk

    def wait(self) -> None:
        """Wait until the newest updates are done.

        Raises:
            TrainingError: a metric was not finite; the row is written.
        """
        if self.chunk is None:
            return
        _ = self.chunk.outcome  # waits
        if self._fails(self.chunk):
            self.write()  # writes the row, and raises the error

    def add_evaluation(
        self, step: int, evaluation: dict[str, list[float]], moment: dict[str, float]
    ) -> None:
        """Add an evaluation to its step's row or, if that is already written, as a row of its own.

        Args:
            step: environment steps.
            evaluation: its metrics.
            moment: times of the step, for a row of its own.
        """
        if self.chunk and self.chunk.last_step == step:
            self.chunk.evaluation = evaluation
        else:
            self._emit({"env_steps": step} | evaluation | moment)

    def write(self) -> None:
        """Write the row that is held back, if there is one.

        Raises:
            TrainingError: a metric was not finite.
        """
        if self.chunk is None:
            return
        chunk = self.chunk
        self.chunk = None
        metrics = chunk.outcome.metrics
        seconds = self._clock.lap()
        with self._clock.timed("host"):
            row = {
                "env_steps": chunk.last_step,
                "updates": chunk.last_step // self._args.steps_per_update,
            }
            row |= metrics | chunk.evaluation | self._times(chunk, seconds)
            fails = self._fails(chunk)
            row = self._emit(row, for_callback=not fails)
            if fails:  # the console shows the error instead of the row
                raise self._error(chunk)
            self._console.update(chunk.last_step, row)
            self._give_up(chunk)
            self._caution(row)

    def _caution(self, row: Row) -> None:
        """Warn once of each metric that is above the limit that the algorithm names for it."""
        for metric, (limit, text) in list(self._cautions.items()):
            value = row.get(metric)
            values = value if isinstance(value, list) else [value]
            largest = max([x for x in values if x is not None], default=limit)
            if largest > limit:
                del self._cautions[metric]
                self._console.warn(
                    f"by step {row['env_steps']:,} {metric} is {largest:.2g}: {text}"
                )

    def close(self) -> None:
        if self._log:
            with closing(self._log):
                self._keep_in_place(self._log)

    def _emit(self, row: dict[str, Any], for_callback: bool = True) -> Row:
        row = {name: jsonable(value) for name, value in row.items()}
        if self._log:
            self._keep_in_place(self._log)
            self._log.write(row)
        if for_callback and self._callback and self._callback(dict(row)):
            self.stop_requested = True
        return row

    def _keep_in_place(self, log: LogWriter) -> None:
        """Write the log anew, with a warning, if it was deleted or replaced.

        If the whole directory was, the next save ends the run, see `Saver.save`.
        """
        if log.is_in_place or not (self._dir and is_ours(self._dir)):
            return
        log.write_anew()
        self._console.warn(
            f"{self._dir}/metrics.jsonl was deleted or replaced during the run: it is written "
            "anew, with all rows"
        )

    def _times(self, chunk: Chunk, seconds: float) -> dict[str, float]:
        clock = self._clock
        done = chunk.last_step - self._first_step
        times = {
            "sps": self._speed_of(chunk, seconds),
            "sps_total": chunk.last_step / max(clock.trained_before + clock.trained, 1e-9),
            "sps_wall": done / max(clock.since_begin, 1e-9),
            "update": clock.trained - clock.seconds["host"],
            "wall": clock.wall,
        }
        return {f"time/{name}": value for name, value in (times | clock.seconds).items()}

    def _speed_of(self, chunk: Chunk, seconds: float) -> float:
        """Steps per second of a row; NaN if the host cannot tell.

        Devices go on while the host waits for an evaluation or a save, so that the next updates
        may be done before anybody looks.
        """
        elsewhere = self._clock.seconds["eval"] + self._clock.seconds["checkpoint"]
        has_waited = elsewhere > self._elsewhere
        self._elsewhere = elsewhere
        if has_waited:
            return math.nan
        return (chunk.last_step - chunk.first_step) / max(seconds, 1e-9)

    def _fails(self, chunk: Chunk) -> bool:
        """True if the run cannot go on: a seed is broken, or every member of a population."""
        most = self._args.num_agents if self._args.is_population else 1
        return len(chunk.broken) >= most

    def _error(self, chunk: Chunk) -> TrainingError:
        """Error that names metric, step and seed of the first number that was not finite."""
        (index, name), agent = min((first, agent) for agent, first in chunk.broken.items())
        step = chunk.first_step + (index + 1) * self._args.steps_per_update
        seed = self._args.members.seed[agent]
        advice = "look at the environment's rewards, observations and masks, or take smaller steps"
        if name == IN_BOUNDS:
            advice = (
                "bytes are outside of the bounds of their space: correct the bounds, or name the "
                "largest byte by --byte-max"
            )
        if name == IN_SPACE:
            advice = f"an observation {OUTSIDE}"
        where = f"{name} is not finite at step {step} (seed {seed})"
        return TrainingError(f"{where}; {self._last_good()}; {advice}")

    def _give_up(self, chunk: Chunk) -> None:
        """Warn of members that have broken in this chunk; the others go on."""
        new = sorted(chunk.broken.keys() - self._broken)
        self._broken = set(chunk.broken)
        if not new:
            return
        members = ", ".join(map(str, new[:10]))
        if len(new) > 10:
            members += f" and {len(new) - 10} more"
        rest = self._args.num_agents - len(self._broken)
        _, metric = chunk.broken[new[0]]
        self._console.warn(
            f"by step {chunk.last_step:,} {metric} of member{'s' * (len(new) > 1)} {members} is "
            f"not finite; {rest} go on"
        )
