"""Rows of metrics, in `metrics.jsonl` and on the console: one for every chunk of updates, see
`run.py`.
"""

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from pmaprl.cli.errors import TrainingError
from pmaprl.device.outcome import Outcome
from pmaprl.envs.bytes import IN_BOUNDS
from pmaprl.envs.ranges import IN_SPACE, OUTSIDE
from pmaprl.runs.metrics import Log, LogWriter, Row, is_number, jsonable, read_log

Callback = Callable[[Row], Any]
"""Called with every row of metrics, once it is written; where it returns True, the run ends."""


class Clock:
    """Runs from its making on; training begins when it is told so, and is interrupted by
    evaluations and saves.
    """

    def __init__(self):
        self.seconds = dict.fromkeys(("compile", "eval", "checkpoint", "host"), 0.0)
        self._made = self._began = time.perf_counter()
        self.wall_before = self.trained_before = 0.0  # seconds of the invocations before
        self._lap = 0.0  # seconds of training at the last one

    def begin(self) -> None:
        self._began = time.perf_counter()

    def go_on(self, log: Log) -> None:
        """After other invocations of the run, which have logged this."""
        if is_number(log.wall_seconds) and is_number(log.trained_seconds):
            self.wall_before = log.wall_seconds
            self.trained_before = log.trained_seconds

    @property
    def wall(self) -> float:
        """Seconds since the clock was made, and those of the invocations before."""
        return self.wall_before + time.perf_counter() - self._made

    @property
    def since_begin(self) -> float:
        """Seconds since training began, with all that interrupts it."""
        return time.perf_counter() - self._began

    @property
    def trained(self) -> float:
        """Seconds of training, without evaluation and saving."""
        return self.since_begin - self.seconds["eval"] - self.seconds["checkpoint"]

    def lap(self) -> float:
        """Seconds of training since the last call, or since it began."""
        before = self._lap
        self._lap = self.trained
        return self._lap - before

    @contextmanager
    def timed(self, name: str):
        """Add the time inside to one of `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began


class Chunk:
    """Updates of one row, dispatched in one call or in several, and more for their row."""

    def __init__(self, first_step: int):
        self.first_step = self.last_step = first_step
        self.is_whole = False  # whether the row is to be written as soon as its updates are done
        self.evaluation: Row = {}
        self._known: Outcome | None = None
        self._newest: Callable[[], Outcome] | None = None  # which waits

    def add(self, last_step: int, read: Callable[[], Outcome]) -> None:
        """Take a call that is dispatched, up to a step; waits for the call before it."""
        _ = self.outcome
        self.last_step = last_step
        self._newest = read

    @property
    def outcome(self) -> Outcome:
        """Numbers of all its updates, once they are done."""
        if self._newest:
            newest = self._newest()
            self._newest = None
            self._known = self._known.followed_by(newest) if self._known else newest
        return self._known

    @property
    def broken(self) -> dict[int, tuple[int, str]]:
        """By agent, update and metric of its first number that was not finite."""
        numbers = self.outcome.broken.items()
        found = [
            (agent, int(index), name)
            for name, x in numbers
            for agent, index in enumerate(x)
            if index >= 0
        ]
        return {agent: tuple(first) for agent, *first in sorted(found, reverse=True)}


class Recorder:
    """Holds back the row of the newest chunk until it is asked to write it."""

    def __init__(self, run: Any):
        """Of a `Run`, whose parts it uses; without a directory the console alone shows rows."""
        self._run = run
        self._args = run.args
        self._clock = run.clock
        self.stop_requested = False  # by the callback
        self._log = (
            LogWriter(run.dir, run.args, run.config, resume_at=run.first_step) if run.dir else None
        )
        if self._log:
            self._clock.go_on(read_log(run.dir, ()))
        self._broken: set[int] = set()  # members of a population that are given up
        self.chunk: Chunk | None = None  # the newest, as long as its row is not written

    def add(self, first_step: int, last_step: int, read: Callable[[], Outcome]) -> None:
        """Note updates that are dispatched; they go into the row that is held back, if there is
        one.

        `read` waits for them. Raises TrainingError where a metric of the updates before them was
        not finite.
        """
        self.wait()
        self.chunk = self.chunk or Chunk(first_step)
        self.chunk.add(last_step, read)

    def wait(self) -> None:
        """Until the newest updates are done. Writes their row already where a number is not finite,
        and raises.
        """
        if self.chunk and self._fails(self.chunk):
            self.write()

    def add_evaluation(
        self, step: int, evaluation: dict[str, list[float]], moment: dict[str, float]
    ) -> None:
        """Into the row of that step, or as a row of its own, of that `moment`, where that is
        written.
        """
        if self.chunk and self.chunk.last_step == step:
            self.chunk.evaluation = evaluation
        else:
            self._emit({"env_steps": step} | evaluation | moment)

    def write(self) -> None:
        """Write the row that is held back, if there is one. Raises TrainingError where a metric was
        not finite.
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
            row = self._emit(row, whole=not fails)
            if fails:  # the error is all that there is to show
                raise self._error(chunk)
            self._run.console.update(chunk.last_step, row)
            self._give_up(chunk)
            self._caution(row)

    def _caution(self, row: Row) -> None:
        """Say, once, what the algorithm has to say of metrics that are above the value that it
        names.
        """
        cautions = self._run.cautions
        for metric, (most, text) in list(cautions.items()):
            value = row.get(metric)
            found = [x for x in (value if isinstance(value, list) else [value]) if x is not None]
            if max(found, default=most) > most:
                del cautions[metric]
                self._run.console.warn(
                    f"by step {row['env_steps']:,} {metric} is {max(found):.2g}: {text}"
                )

    def close(self) -> None:
        if self._log:
            self._log.close()

    def _emit(self, row: dict[str, Any], whole: bool = True) -> Row:
        row = {name: jsonable(value) for name, value in row.items()}
        if self._log:
            self._log.write(row)
        if whole and self._run.callback and self._run.callback(dict(row)):
            self.stop_requested = True
        return row

    def _times(self, chunk: Chunk, seconds: float) -> dict[str, float]:
        clock = self._clock
        done = chunk.last_step - self._run.first_step
        times = {
            "sps": (chunk.last_step - chunk.first_step) / max(seconds, 1e-9),
            "sps_total": chunk.last_step / max(clock.trained_before + clock.trained, 1e-9),
            "sps_wall": done / max(clock.since_begin, 1e-9),
            "update": clock.trained - clock.seconds["host"],
            "wall": clock.wall,
        }
        return {f"time/{name}": value for name, value in (times | clock.seconds).items()}

    def _fails(self, chunk: Chunk) -> bool:
        """Whether the run cannot go on: an agent is broken, or every member of a population is."""
        return len(chunk.broken) >= (self._args.num_agents if self._args.is_population else 1)

    def _error(self, chunk: Chunk) -> TrainingError:
        """What was not finite, of which agent, and since when."""
        (index, name), agent = min((first, agent) for agent, first in chunk.broken.items())
        step = chunk.first_step + (index + 1) * self._args.steps_per_update
        seed = self._args.members.seed[agent]
        advice = "look at the environment's rewards, observations and masks, or take smaller steps"
        if name == IN_BOUNDS:
            advice = (
                "bytes are outside of the bounds of their space: mend those, or say the "
                "largest by --byte-max"
            )
        if name == IN_SPACE:
            advice = f"an observation {OUTSIDE}"
        where = f"{name} is not finite at step {step} (seed {seed})"
        return TrainingError(f"{where}; {self._run.saver.last_good()}; {advice}")

    def _give_up(self, chunk: Chunk) -> None:
        """Say which members have broken in this chunk; the others go on."""
        new = sorted(chunk.broken.keys() - self._broken)
        self._broken = set(chunk.broken)
        if new:
            members = ", ".join(map(str, new[:10])) + (
                f" and {len(new) - 10} more" if len(new) > 10 else ""
            )
            left = self._args.num_agents - len(self._broken)
            metric = chunk.broken[new[0]][1]
            what = f"{metric} of member{'s' * (len(new) > 1)} {members} is not finite"
            self._run.console.warn(f"by step {chunk.last_step:,} {what}; {left} go on")
