"""One run: wires its parts together, the loops in `common/pmaprl/training.py` drive it.

A chunk is the updates up to the next time that anything is due; every chunk is one row of metrics.
Long chunks are dispatched in several calls, between which a run can stop.

What a call reports is read only after the next one has been dispatched, and so is the evaluation
after it; what is to be saved is copied on the devices first, and then in the background. So the
devices never wait for the host, except where something decides whether the run goes on: a callback,
--stop-at-return, or other processes.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from pmaprl.cli.checks import LARGEST
from pmaprl.cli.errors import TrainingError
from pmaprl.cli.files import write_json
from pmaprl.device import multihost
from pmaprl.device.outcome import Outcome
from pmaprl.device.programs import Programs, compile_together, set_up_cache
from pmaprl.device.sharding import copied, host_like, place, to_host
from pmaprl.runs import reports, results
from pmaprl.runs.console import Console
from pmaprl.runs.directory import agree_on_directory, check_shared, claim_directory, describe_run
from pmaprl.runs.evaluator import Evaluations
from pmaprl.runs.intervals import intervals_of, next_boundary
from pmaprl.runs.lock import is_ours
from pmaprl.runs.metrics import import_writers
from pmaprl.runs.recorder import Callback, Clock, Recorder
from pmaprl.runs.saving import Saver, load
from pmaprl.runs.signals import Interruption

MOST_UPDATES = 2**30  # of one call
CALL_SECONDS = 2.0  # that the updates of one call may take, as nothing ends a run within a call


class Pace:
    """How many updates one call may have: at most twice as many as a call before that is over.

    Updates may become slower, such as once there is something to learn from.
    """

    def __init__(self, first: int):
        """Begin with a call of so many updates."""
        self.most_updates = first
        self._largest = 0  # call so far
        self._under_way = 0  # updates of the newest call
        self._began = 0.0  # when that was at the earliest

    def note(self, updates: int, now: float) -> None:
        """Note a call that is dispatched `now`, in seconds of training, where the call before it is
        done.
        """
        if self._under_way:
            fitting = int(CALL_SECONDS * self._under_way / max(now - self._began, 1e-9))
            self.most_updates = max(min(fitting, 2 * self._largest, MOST_UPDATES), 1)
        self._under_way = updates
        self._began = now
        self._largest = max(self._largest, updates)


class Due(NamedTuple):
    """An evaluation and a save of the state at one step, which wait until it is known to be
    sound.
    """

    step: int
    evaluate: bool
    save: bool
    played: Any  # what an evaluation on the devices gives, or None
    fetch: Callable[[], Any] | None  # what is saved, on the host
    fetch_learner: Callable[[], Any] | None  # the state without environments, on the host


class Run:
    """See the module's text. Raises UsageError for a run directory or an extra that cannot be
    used.
    """

    def __init__(
        self,
        args: Any,
        script: str,
        env: Any,
        devices: list[jax.Device],
        notes: dict[str, str],
        callback: Callback | None = None,
        cautions: Mapping[str, tuple[float, str]] | None = None,
    ):
        """`env` has a `name` and a `spec`. `notes` are lines for the header, by the word that they
        begin with.

        `cautions` are an algorithm's, see `OnPolicy`.
        """
        import_writers(args)  # which fails before anything is written
        set_up_cache()
        self.args = args
        self.devices = devices
        self.is_game = getattr(env, "is_game", False)
        self.env_name = env.name  # those that are not said yet
        self.cautions = dict(cautions or {})
        self.total = args.num_updates * args.steps_per_update
        self._end = min(self.total, args.stop_after or self.total)  # of this invocation
        self.intervals = intervals_of(args, on_accelerator=devices[0].platform != "cpu")
        self._intervals = {"log": self.intervals.log, "exchange": args.exchange_interval}
        if not args.benchmark:
            self._intervals |= {
                "eval": self.intervals.eval,
                "checkpoint": self.intervals.checkpoint,
            }
        self.config = describe_run(args, script, env, devices)
        (self.path, changes), first = agree_on_directory(args, self.config), multihost.is_first()
        self.dir = self.path if first else None  # where this process writes
        self.console = Console(
            args.quiet or args.benchmark, self.total, args.is_population, speaks=first
        )
        self._interruption = Interruption(self.console)
        self.steps = self.first_step = 0
        # More for `result.json` and --benchmark, of actors once they have ended
        self.figures: dict[str, Any] = {}
        self._header = reports.header(self, env.name, notes, changes)
        self.clock = Clock()
        self.callback = callback if first else None
        self.saver = self.recorder = self.evaluations = None  # until `start`
        self._due: Due | None = None
        self._pace = Pace(first=math.ceil(args.least_log_interval / args.steps_per_update))

    def __enter__(self) -> "Run":
        self._interruption.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.console.stop(self.steps)
        self._interruption.stop()
        if self.evaluations is None:
            return
        if self._due and isinstance(error, Exception):
            with suppress(Exception):  # what was due before; `error` is what gets reported
                self.catch_up()
        self.evaluations.stop()
        with suppress(Exception):
            if error is not None and not multihost.has_lost(error):
                self.saver.checkpoints.let_finish()
        with suppress(Exception):
            self.saver.withdraw()
        with suppress(Exception):
            if isinstance(error, Exception) and self.dir and is_ours(self.dir):
                reason = {"reason": f"{type(error).__name__}: {error}"}
                write_json(self.dir / results.RESULT, reports.result(self, "failed") | reason)
        self.console.attempt("log", self.recorder.close)

    def start(
        self, programs: Programs, members: Any, shapes: Any, example: Any, beside: Any = None
    ) -> tuple[Any, Any]:
        """Make or load the state; returns it with the compiled update (or None, None where nothing
        is left to do).

        `members` are what `init` takes, the state has these `shapes`, and `example` those of what
        `update` takes beside it. A `HostEvaluation`, which plays `beside` the training, takes the
        place of `evaluate`.
        """
        self.console.say(self._header)
        check_shared(self.path)
        start = load(self.args, self.config, host_like(shapes), self.console)
        self.first_step = self.steps = start.step
        # Else nothing is trained, and the flags stay as they are
        if self.dir and self.steps < self.total:
            self.console.say(claim_directory(self.dir, self.config, self.args.overwrite))
        self.saver = Saver(self.path, self.args, start)
        self.recorder = Recorder(self)
        self.evaluations = Evaluations(self, start.newest)
        if start.has_ended and (self.steps >= self._end or self.evaluations.goal_reached):
            return None, None
        self.console.say("compiling ...")
        self.console.show_bar(self.steps)
        self.console.doing("compiling")
        with self.clock.timed("compile"):
            programs = compile_together(programs, members, shapes, example)
            # Other episodes after a resume
            fresh = np.int32((members.seed.astype(np.int64) + self.steps) % LARGEST)
            make = partial(programs.init, members._replace(seed=fresh))
            state = place(start.arrays, make, shapes, self.devices, self.args.sharding)
        self.console.say(f"compiled in {self.clock.seconds['compile']:.1f} s")
        self.evaluations.evaluate = programs.evaluate
        self.evaluations.beside = beside
        self.console.doing("training")
        self.clock.begin()
        return state, programs.update

    @property
    def unfinished(self) -> bool:
        """Whether to run another chunk."""
        return self.steps < self._end and not self.stopping

    @property
    def wants_to_stop(self) -> bool:
        """Whether a signal, the clock (once anything is trained), the callback or a good return
        wants the end, here.
        """
        seconds = self.clock.wall - self.clock.wall_before
        late = 0 < self.args.max_seconds < seconds and self.steps > self.first_step
        return bool(
            self._interruption.here
            or late
            or self.recorder.stop_requested
            or self.evaluations.goal_reached
        )

    @property
    def interrupted(self) -> bool:
        """Whether this process has received a signal to end."""
        return bool(self._interruption.here)

    @property
    def stopping(self) -> bool:
        """Whether that is so in any process, all of which have to ask at the same time."""
        return bool(
            self._interruption.received() or multihost.max_over_processes(self.wants_to_stop)
        )

    def no_more_evaluations(self) -> bool:
        """Whether none is to be played, or waited for, any more; all processes have to ask at the
        same time.
        """
        return bool(self.args.benchmark or self._interruption.received())

    def next_chunk(self) -> np.int32:
        """How many updates to run next: up to the first step at which anything is due."""
        next_due = min(next_boundary(self.steps, interval) for interval in self._intervals.values())
        steps = min(self._end, next_due) - self.steps
        return np.int32(min(math.ceil(steps / self.args.steps_per_update), MOST_UPDATES))

    def next_call(self) -> np.int32:
        """How many updates to run next in one call: the next chunk, or of a long one as many as
        take a few seconds.

        All processes have to ask at the same time.
        """
        most = -multihost.max_over_processes(-self._pace.most_updates)
        return min(self.next_chunk(), np.int32(most))

    def advance(self, state: Any, updates: int, read: Callable[[], Outcome]) -> None:
        """Account for dispatched `updates`: catch up with those before them; evaluate and save when
        due.

        `read` waits for what they report. Raises TrainingError for what was not finite.
        """
        before = self.steps
        self.steps = self.steps + int(updates) * self.args.steps_per_update
        self.evaluations.poll()
        self.catch_up()
        self.recorder.add(before, self.steps, read)
        self._pace.note(int(updates), self.clock.trained)
        self.console.reach(before)
        due = {
            name
            for name, interval in self._intervals.items()
            if self.steps >= next_boundary(before, interval)
        }
        if self.steps >= self._end or (self.args.keep_best and "eval" in due):
            due |= {"eval", "checkpoint"}
        self.recorder.chunk.is_whole = bool(due)
        if due & {"eval", "checkpoint"}:
            self._evaluate_and_save(
                state, evaluate="eval" in due, save="checkpoint" in due, goes_on=self._goes_on
            )
        elif (self.callback and due) or multihost.count() > 1:
            self.recorder.wait()  # processes wait for each other anyway
            self.catch_up()  # the callback may end the run here

    def _evaluate_and_save(
        self, state: Any, evaluate: bool, save: bool, goes_on: bool = False
    ) -> None:
        """Evaluate and save this very state, unless that is done; where training `goes_on`, only
        begin with both.
        """
        evaluate = evaluate and not self.args.benchmark and self.evaluations.is_due(self.steps)
        save = save and self.saver.is_due(self.steps)
        of_learner = state.replace(actors=())
        fetch = fetch_learner = None
        if goes_on:
            fetch = self.saver.copied(state) if save else None
            fetch_learner = copied(of_learner) if evaluate and self.evaluations.beside else None
        is_ahead = (
            goes_on
            and (fetch or not save)
            and (fetch_learner or not (evaluate and self.evaluations.beside))
        )
        if not is_ahead:
            self.recorder.wait()  # raises: what is broken is not even evaluated
            fetch = self._fetched(self.saver.to_host, state) if save else None
            fetch_learner = partial(to_host, of_learner)
        played = (
            self.evaluations.dispatch(state) if evaluate and not self.evaluations.beside else None
        )
        self._due = Due(
            step=self.steps,
            evaluate=evaluate,
            save=save,
            played=played,
            fetch=fetch,
            fetch_learner=fetch_learner,
        )
        if not is_ahead:
            self.catch_up()

    def _fetched(self, to_host: Callable[[Any], Any], state: Any) -> Callable[[], Any]:
        """Copy a state to the host at once, for what is to be given it later."""
        with self.clock.timed("checkpoint"):
            host = to_host(state)
        return lambda: host

    @property
    def _goes_on(self) -> bool:
        """Whether more updates follow, whatever comes of those that are dispatched."""
        may_end = self.callback or self.args.stop_at_return is not None or multihost.count() > 1
        return self.steps < self._end and not may_end and not self._interruption.here

    def catch_up(self) -> None:
        """Write the row of the newest chunk, if it is whole, and before and after it evaluate and
        save what is due.

        To be called as soon as more is dispatched: it waits for that chunk.
        """
        due = self._due
        self._due = None
        if due:
            self.recorder.wait()  # raises: what is broken is neither evaluated nor saved
        if due and due.evaluate:
            self.console.doing("evaluating")
            self.evaluations.begin(
                due.step, due.fetch_learner() if self.evaluations.beside else due.played
            )
        if self.recorder.chunk and self.recorder.chunk.is_whole:
            self.recorder.write()
        if due and due.save:
            self.console.doing("saving")
            with self.clock.timed("checkpoint"):
                self.saver.save(due.step, due.fetch)
        if due:
            self.console.doing("training")

    def save_after_failure(self, state: Any) -> None:
        """Save before the run fails for a reason that does not lie in `state`; warns where that
        fails too.
        """
        self.evaluations.poll()
        self.catch_up()
        self.recorder.write()
        try:
            self.saver.save(self.steps, self._fetched(self.saver.to_host, state))
            self.saver.checkpoints.wait()
        except TrainingError as error:
            self.console.warn(str(error))

    def finish(
        self, state: Any, at_end: dict[str, Callable[[Any, str], str]]
    ) -> reports.TrainResult:
        """Write what remains, say where everything is. Raises KeyboardInterrupt or SystemExit after
        a signal.

        Each of `at_end` gets the learners on the host, [S, ...], and the run's status, and returns
        a line; it may fail.
        """
        if state is not None:
            self.catch_up()
            if self.recorder.chunk:
                self.recorder.chunk.is_whole = True
            self._evaluate_and_save(state, evaluate=not self._interruption.received(), save=True)
            self.console.stop(self.steps)
            # Once all is saved, since an environment on the host may fail
            self.evaluations.finish()
        finished = self.steps >= self.total or self.evaluations.goal_reached
        status = (
            "interrupted"
            if self._interruption.received()
            else "finished"
            if finished
            else "stopped"
        )
        with self.clock.timed("checkpoint"):
            host, sha256 = self.saver.finish(state)
        record = reports.result(self, status, sha256)
        if self.args.benchmark and multihost.is_first():
            print(json.dumps(reports.benchmark_line(self, record)))
        if self.dir:
            if state is not None or status != results.result_at(self.dir, self.steps).get("status"):
                write_json(self.dir / results.RESULT, record)
            if status == "finished":
                (self.dir / "DONE").touch()
            lines = []
            for name, draw in at_end.items():
                # Else a signal has come meanwhile: it waits
                if status == "interrupted" or not self._interruption.here:
                    lines.append(self.console.attempt(name, draw, host.learner, status))
            self.console.say(
                self.console.attempt("summary", reports.footer, self, record, lines) or ""
            )
        self._interruption.go_on()
        evaluation = self.evaluations.newest.evaluation
        return reports.TrainResult(
            params=host.learner.params,
            evaluation=evaluation,
            env_steps=self.steps,
            run_dir=self.path,
            state_sha256=sha256,
            status=status,
        )
