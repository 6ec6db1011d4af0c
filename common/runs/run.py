"""One run: wires its parts together, the loops in `common/training.py` drive it.

A chunk is the updates up to the next time that anything is due; every chunk is one row of metrics. What a chunk reports
is read only after the next chunk has been dispatched, except where an evaluation or a checkpoint needs it first.
"""

import json
import math
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from common.cli.checks import LARGEST
from common.cli.console import Console, SignalWatch
from common.cli.errors import TrainingError
from common.device import multihost
from common.device.programs import compile_by_call, compile_together, set_up_cache
from common.device.sharding import arrays_of, host_like
from common.runs import reports
from common.runs.directory import agree_on_directory, claim_directory, describe_run, restore
from common.runs.evaluator import DeviceEvaluation, Evaluation, Evaluations, reevaluate_best
from common.runs.loading import load, place
from common.runs.lock import check_shared, is_ours
from common.runs.metrics import check_extras
from common.runs.ranking import summary
from common.runs.recorder import Callback, Chunk, Clock, Recorder, Report
from common.runs.reports import TrainResult
from common.runs.saver import Saver


class Run:
    """See the module's text. Raises UsageError for a run directory or an extra that cannot be used."""

    def __init__(
        self,
        args: Any,
        script: str,
        env: Any,
        devices: list[jax.Device],
        notes: dict[str, str],
        callback: Callback | None = None,
    ):
        """`env` has a `name` and a `spec`. `notes` are lines for the header, by the word that they begin with."""
        check_extras(args.tensorboard, args.wandb)
        set_up_cache()
        self.args, self.devices, self._is_game = args, devices, getattr(env, "is_game", False)
        self.total = args.num_updates * args.steps_per_update
        self.config = describe_run(args, script, env, devices)
        (self.path, changes), first = agree_on_directory(args, self.config), multihost.is_first()
        self.dir = self.path if first else None  # where this process writes
        self.console = Console(args.quiet or args.benchmark, self.total, summary if args.is_population else None, first)
        self.steps = self.first_step = 0
        self.counters: dict[str, int] = {}  # those with which host workers begin
        self.host_workers: HostWorkers = NoHostWorkers()
        self._header = reports.header(args, env.name, devices, notes, self.total, self.dir, changes)
        self._end = min(self.total, args.stop_after or self.total)  # of this invocation
        self._intervals, self._clock, self._callback = Intervals.of(args), Clock(), callback if first else None
        self._saver = self._recorder = self._evaluations = self._where = None  # until `start`
        self._interruption = Interruption(self.console)

    def __enter__(self) -> "Run":
        self._interruption.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.console.stop()
        self._interruption.stop()
        if self._evaluations is None:
            return
        self._evaluations.stop()
        if error is not None and not multihost.has_lost(error):
            with suppress(Exception):  # let the save under way finish; `error` is what gets reported
                self._saver.let_finish()
        with suppress(Exception):
            if self.dir and isinstance(error, Exception):
                if is_ours(self.dir):
                    reports.write_result(self.dir, self._outcome("failed"), reason=f"{type(error).__name__}: {error}")
                elif said := restore(self.dir, self.config):
                    self.console.warn(said)
        self.console.attempt("log", self._recorder.close)

    def start(self, programs: Any, example: Any, evaluation: Evaluation | None = None) -> tuple[Any, Any]:
        """Make or load the state; returns it with the compiled update (or None, None where nothing is left to do).

        `example` has the shapes of what `update` takes beside the state; an `evaluation` takes the place of `evaluate`.
        """
        self.console.say(self._header)
        check_shared(self.path)
        args, members = self.args, arrays_of(self.args.members, len(self.devices), self.args.sharding)
        shapes = jax.eval_shape(programs.init, members)
        self._where = shapes, self.devices, args.sharding
        start = load(args, self.config, host_like(shapes), self.console)
        multihost.check_equal("the newest checkpoint", str(start.step))
        self.first_step, self.steps, self.counters = start.step, start.step, start.counters
        if self.dir and self.steps < self.total:  # else nothing is trained, and the flags stay as they are
            self.console.say(claim_directory(self.dir, self.config, args.overwrite))
        self._saver = Saver(self.path, args, start, lambda: self.host_workers.counters(), self.console.warn)
        showing = self._clock, self.console, self._saver.last_good
        self._recorder = Recorder(self.dir, args, self.config, start.step, *showing, self._callback)
        parts = self._recorder, self._saver, self._clock, self.console.warn
        self._evaluations = Evaluations(start.newest, args, *parts, self._is_game)
        if (self.steps >= self._end or self._evaluations.goal_reached) and self._saver.is_judged(self.steps):
            return None, None
        leaving = self._interruption.ending_at_once(self._leave_untrained, start.host)
        with self._clock.timed("compile"), self.console.task("compiling"), leaving:
            programs = compile_together(programs, members, shapes, example)
            fresh = np.int32((members.seed.astype(np.int64) + self.steps) % LARGEST)  # other episodes after a resume
            state = place(start, lambda: programs.init(members._replace(seed=fresh)), *self._where)
            state = compile_by_call(programs.update, state, example)
        self.console.say(f"compiled in {self._clock.seconds['compile']:.1f} s")
        self._evaluations.use(evaluation or DeviceEvaluation(programs.evaluate, args))
        self.console.start(self.steps)
        self._clock.begin()
        return state, programs.update

    @property
    def unfinished(self) -> bool:
        """Whether to run another chunk."""
        return self.steps < self._end and not self.stopping

    @property
    def leaving(self) -> bool:
        """Whether a signal, the clock (once anything is trained), the callback or a good return wants the end, here."""
        late = 0 < self.args.max_seconds < self._clock.wall and self.steps > self.first_step
        return bool(self._interruption.here or late or self._recorder.told_to_stop or self._evaluations.goal_reached)

    @property
    def stopping(self) -> bool:
        """Whether that is so in any process, all of which have to ask at the same time."""
        return bool(self._interruption.received() or multihost.max_over_processes(self.leaving))

    def next_chunk(self) -> np.int32:
        """How many updates to run next."""
        steps = min(self._end, self._intervals.next_due(self.steps)) - self.steps
        return np.int32(min(math.ceil(steps / self.args.steps_per_update), 2**30))

    def advance(self, state: Any, updates: int, read: Callable[[], Report]) -> None:
        """Account for a dispatched chunk of `updates`: log the one before it; evaluate and save when due.

        `read` waits for what the chunk reports. Raises TrainingError for what was not finite.
        """
        self._saver.check_directory()
        before, self.steps = self.steps, self.steps + int(updates) * self.args.steps_per_update
        self._evaluations.poll()
        self._recorder.write()
        self._recorder.hold(Chunk(before, self.steps, read))
        due, at_end = self._intervals.due(before, self.steps), self.steps >= self._end
        if at_end or due & {"eval", "checkpoint"}:
            self._settle(state, evaluate=at_end or "eval" in due, save=at_end or "checkpoint" in due)
        elif self._callback or multihost.count() > 1:
            self.log()  # the callback may end the run here; processes wait for the chunk anyway

    def log(self) -> None:
        """Write the row of the last chunk. Raises TrainingError where a metric in it was not finite."""
        self._recorder.write()

    def _settle(self, state: Any, evaluate: bool, save: bool) -> None:
        """Evaluate and save this very state, unless that is done; also save it where --keep-best wants it."""
        self._recorder.wait()  # raises: what is broken is neither evaluated nor saved
        if evaluate and not self.args.benchmark:
            self._evaluations.begin(self.steps, state, self._no_more_evaluations)
        self._recorder.write()
        if save or self._saver.wants(self.steps):
            with self._clock.timed("checkpoint"):
                self._saver.save(self.steps, state)

    def rescue(self, state: Any) -> None:
        """Save before the run fails for a reason that does not lie in `state`; warns where that fails too."""
        self._evaluations.poll()
        self._recorder.write()
        try:
            self._saver.save(self.steps, state)
            self._saver.wait()
        except TrainingError as error:
            self.console.warn(str(error))

    def finish(self, state: Any, at_end: dict[str, Callable[[Any, str], str]]) -> TrainResult:
        """Write what remains, say where everything is. Raises KeyboardInterrupt or SystemExit after a signal.

        Each of `at_end` gets the learners on the host, [S, ...], and the run's status, and returns a line; it may fail.
        """
        if state is not None:
            self._settle(state, evaluate=not self._interruption.received(), save=True)
            self.console.stop()
            # Once all is saved, since an environment on the host may fail
            self._evaluations.finish(self.steps, state, self._no_more_evaluations, self.console.task)
        self._clock.end()
        confirmed = []
        if state is not None and not self._no_more_evaluations():
            how = partial(self._saver.with_learner_of, state, self._where), self._no_more_evaluations, self.console.warn
            confirmed = reevaluate_best(self._saver, self._evaluations, *how)
        interrupted = self._interruption.received()
        host = self._saver.newest(state)
        with self._clock.timed("checkpoint"):
            self._saver.close()
        ending = "finished" if self.steps >= self.total or self._evaluations.goal_reached else "stopped"
        status, sha256 = "interrupted" if interrupted else ending, self._saver.sha256(host)
        outcome = self._outcome(status, sha256, confirmed)
        if self.args.benchmark and multihost.is_first():
            print(json.dumps(reports.benchmark_record(self.args, self.config, outcome)))
        if self.dir:
            if state is not None or status != reports.stored_status(self.dir):
                reports.write_result(self.dir, outcome)
            if status == "finished":
                (self.dir / "DONE").touch()
            lines = [
                self.console.attempt(name, draw, host.learner, status)
                for name, draw in at_end.items()
                if interrupted or not self._interruption.here  # else a signal has come meanwhile, which waits
            ]
            lines += self.console.attempt("remarks", self.host_workers.remarks) or []
            about = self.args, self.config, self.dir, self.total, outcome
            self.console.say(self.console.attempt("summary", reports.footer, *about, lines) or "")
        self._interruption.go_on()
        return TrainResult(host.learner.params, outcome.newest.evaluation, self.steps, self.path, sha256, status)

    def _leave_untrained(self, host: Any) -> None:
        """Write and say what an interrupted run does, before there is anything to save that `host` does not have."""
        outcome = self._outcome("interrupted", self._saver.sha256(host) if host else None)
        if self.dir:
            reports.write_result(self.dir, outcome)
            self.console.say(reports.footer(self.args, self.config, self.dir, self.total, outcome, []))
        self._recorder.close()

    def _no_more_evaluations(self) -> bool:
        return bool(self.args.benchmark or self._interruption.received())

    def _outcome(self, status: str, sha256: str | None = None, confirmed: Any = ()) -> reports.Outcome:
        checkpoint = self._saver.checkpoint()
        return reports.Outcome(
            status=status,
            env_steps=self.steps,
            updates=self.steps // self.args.steps_per_update,
            newest=self._evaluations.newest,
            confirmed=list(confirmed),
            lost=self._evaluations.lost(),
            eval_episodes=self.args.eval_episodes,
            wall_seconds=self._clock.wall,
            compile_seconds=self._clock.seconds["compile"],
            steps_per_second=(self.steps - self.first_step) / self._clock.trained,
            state_sha256=sha256,
            checkpoint=str(checkpoint) if checkpoint else None,
            figures=self.host_workers.figures(),
        )


class Intervals(NamedTuple):
    """Steps from one time to the next; 0 is never."""

    log: int
    eval: int
    checkpoint: int
    exchange: int = 0

    @classmethod
    def of(cls, args: Any) -> "Intervals":
        """Those of the flags; --benchmark neither evaluates nor saves."""
        saving = (0, 0) if args.benchmark else (args.eval_interval, args.checkpoint_interval)
        return cls(args.log_interval, *saving, args.exchange_interval)

    def next_due(self, step: int) -> float:
        """The first step after `step` at which anything is due; infinite where nothing is."""
        return min(next_boundary(step, interval) for interval in self)

    def due(self, before: int, step: int) -> set[str]:
        """What is due at `step`, and was not `before`."""
        return {name for name, interval in self._asdict().items() if step >= next_boundary(before, interval)}


def next_boundary(step: int, interval: int) -> float:
    """First multiple of `interval` after `step`; infinite for interval 0."""
    return step + interval - step % interval if interval else math.inf


PROMISE = "interrupted: ending once everything is saved; interrupt again to exit at once"


class Interruption:
    """A SignalWatch of a run that may have several processes."""

    def __init__(self, console: Console):
        self._signals = SignalWatch(lambda: console.say(PROMISE), console.abandon)
        self._number = 0
        self.start, self.stop = self._signals.start, self._signals.stop

    @property
    def here(self) -> int:
        """The number of the signal that this process has received, or 0."""
        return self._signals.received or 0

    def received(self) -> int:
        """The number of the signal, or 0. All processes have to ask at the same time."""
        self._number = self._number or multihost.max_over_processes(self.here)
        return self._number

    def ending_at_once(self, farewell: Callable[..., None], *args: Any) -> AbstractContextManager:
        """As `SignalWatch.ending_at_once` for a single process; several end together, at the next chunk."""
        return nullcontext() if multihost.count() > 1 else self._signals.ending_at_once(partial(farewell, *args))

    def go_on(self) -> None:
        """What the signal would have done, also one that has just come: raises KeyboardInterrupt, or SystemExit."""
        number = self._number or self.here
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number:
            raise SystemExit(128 + number)


class HostWorkers(Protocol):
    def counters(self) -> dict[str, int]:
        """Numbers that checkpoints keep beside the state, so that a resumed run counts on."""

    def figures(self) -> dict[str, Any]:
        """More for `result.json`, and for the line of --benchmark."""

    def remarks(self) -> list[str]:
        """More lines for the end of the console's output."""


class NoHostWorkers:
    """Those of a run without any."""

    def counters(self) -> dict[str, int]:
        return {}

    def figures(self) -> dict[str, Any]:
        return {}

    def remarks(self) -> list[str]:
        return []
