"""One run, which wires its parts together; the loops in `common/pmaprl/training.py` drive it.

A chunk is the updates up to the next time that anything is due; every chunk is one row of metrics.
Long chunks are dispatched in several calls, between which a run can stop.

The metrics of a call are read only after the next call has been dispatched, and so is the
evaluation after it. A state to save is copied on the devices first, and to the host in the
background. So the devices never wait for the host, unless something decides whether the run goes
on: a callback, --stop-at-return, or other processes.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pmaprl.cli.checks import LARGEST
from pmaprl.cli.errors import TrainingError
from pmaprl.cli.files import finished_text, read_config, write_json
from pmaprl.device.evaluation import SEED
from pmaprl.device.outcome import Outcome
from pmaprl.device.programs import Programs, compile_together
from pmaprl.device.state import copied, host_like, place_on_devices, to_host
from pmaprl.machine import multihost
from pmaprl.runs import reports, results
from pmaprl.runs.directory import check_shared, claim_directory, earlier_flags
from pmaprl.runs.evaluator import Evaluations, HostEvaluator
from pmaprl.runs.intervals import next_boundary
from pmaprl.runs.lock import is_ours
from pmaprl.runs.recorder import Recorder
from pmaprl.runs.saving import Saver, load
from pmaprl.runs.setup import Setup

MOST_UPDATES = 2**30  # most updates of one call
CALL_SECONDS = 2.0  # time of one call's updates; short, because nothing ends a run within a call


class Pace:
    """Limit of the updates of one call, at most twice as many as in an earlier call.

    Updates may become slower, for example when a replay buffer has enough samples to learn from.
    """

    def __init__(self, first: int):
        """Begin with a call of so many updates."""
        self.most_updates = first
        self._largest = 0  # most updates of a call so far
        self._under_way = 0  # updates of the newest call
        self._began = 0.0  # earliest time at which the newest call can have begun

    def note(self, updates: int, now: float) -> None:
        """Note a call that is dispatched after the call before it has ended.

        Args:
            updates: its number of updates.
            now: seconds of training.
        """
        if self._under_way:
            seconds = max(now - self._began, 1e-9)
            fitting = int(CALL_SECONDS * self._under_way / seconds)
            self.most_updates = max(min(fitting, 2 * self._largest, MOST_UPDATES), 1)
        self._under_way = updates
        self._began = now
        self._largest = max(self._largest, updates)


class Waiting(NamedTuple):
    """Evaluation and save of a state, which wait until the state is known to be sound."""

    step: int
    fetch_for_evaluation: Callable[[], Any] | None  # as `Evaluations.begin` takes it; None: not due
    fetch_for_save: Callable[[], Any] | None  # returns the state on the host; None: not due


class Run:
    """A training run: loads, compiles, counts updates; evaluates and saves when that is due."""

    def __init__(
        self,
        setup: Setup,
        programs: Programs,
        shapes: Any,
        host_evaluation: HostEvaluator | None = None,
    ):
        """Load the state from which the run begins, and claim its directory.

        Args:
            setup: what is known of the run.
            programs: its programs, not yet compiled.
            shapes: shapes of the state.
            host_evaluation: a `HostEvaluation`, which replaces the program `evaluate`.

        Raises:
            UsageError: the directory or what is to be loaded cannot be used.
        """
        self.args = setup.args
        self.devices = setup.devices
        self.total = setup.total
        self.config = setup.config
        self.path = setup.path
        self.dir = setup.dir
        self.console = setup.console
        self.clock = setup.clock
        self._end = setup.end
        self._has_changes = setup.has_changes
        self._callback = setup.callback
        self._interruption = setup.interruption
        self._programs = programs  # compiled once `start` returns
        self._shapes = shapes
        self._intervals = {"log": setup.intervals.log, "exchange": self.args.exchange_interval}
        if not self.args.benchmark:
            self._intervals |= {
                "eval": setup.intervals.eval,
                "checkpoint": setup.intervals.checkpoint,
            }
        # Further entries of `result.json` and --benchmark; actors add theirs when they end
        self.extra_results: dict[str, Any] = {}
        self._waiting: Waiting | None = None
        first = math.ceil(self.args.least_log_interval / self.args.steps_per_update)
        self._pace = Pace(first)

        self.console.say(setup.header)
        check_shared(self.path)
        start = load(self.args, self.config, host_like(shapes), self.console)
        self._loaded = start.arrays  # until `start` places them on the devices
        self._has_ended = start.has_ended
        self.first_step = start.step
        self.steps = start.step
        # A run that trains no more keeps its stored flags
        if self.dir and self.steps < self.total:
            if self.args.resume:
                earlier = earlier_flags(read_config(self.dir), self.config["args"], self.steps)
                self.config |= {"earlier_flags": earlier} if earlier else {}
            self.console.say(claim_directory(self.dir, self.config, self.args.overwrite))
        self.saver = Saver(self.path, self.args, start)
        self.recorder = Recorder(setup, self.first_step, self.saver.last_good)
        self.evaluations = Evaluations(
            setup=setup,
            saver=self.saver,
            recorder=self.recorder,
            newest=start.newest,
            host_evaluation=host_evaluation,
        )
        self._interruption.last_words = partial(reports.last_words, self)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.console.stop(self.steps)
        self._interruption.stop()
        if self._waiting and isinstance(error, Exception):
            with suppress(Exception):  # `error` is reported, not a later one
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

    def start(self, members: Any, example: Any) -> tuple[Any, Callable]:
        """Compile the programs, and make the state, or place the loaded one on the devices.

        Args:
            members: argument of `init`.
            example: shape of the second argument of `update`: the number of updates, or a batch of
                rollouts.

        Returns:
            The state, and the compiled update. If nothing is left to do, the state is None, and
            nothing is compiled.
        """
        loaded = self._loaded
        self._loaded = {}  # frees the memory
        if self._has_ended and (self.steps >= self._end or self.evaluations.goal_reached):
            return None, self._programs.update
        self.console.say("compiling ...")
        self.console.show_bar(self.steps)
        self.console.doing("compiling")
        with self.clock.timed("compile"):
            self._programs = compile_together(self._programs, members, self._shapes, example)
            # Resumed runs begin with other episodes
            seeds = np.int32((members.seed.astype(np.int64) + self.steps) % LARGEST)
            make = partial(self._programs.init, members._replace(seed=seeds))
            state = place_on_devices(loaded, make, self._shapes, self.devices, self.args.sharding)
        self.console.say(f"compiled in {self.clock.seconds['compile']:.1f} s")
        self.console.doing("training")
        self.clock.begin()
        return state, self._programs.update

    @property
    def unfinished(self) -> bool:
        """True if another chunk is to run."""
        return self.steps < self._end and not self.stopping

    @property
    def wants_to_stop(self) -> bool:
        """True if this process wants to stop: signal, --max-seconds, callback, --stop-at-return."""
        seconds = self.clock.wall - self.clock.wall_before
        has_trained = self.steps > self.first_step
        is_late = 0 < self.args.max_seconds < seconds and has_trained
        return bool(
            self._interruption.local_signal
            or is_late
            or self.recorder.stop_requested
            or self.evaluations.goal_reached
        )

    @property
    def interrupted(self) -> bool:
        """True if this process has received a signal to end."""
        return bool(self._interruption.local_signal)

    @property
    def stopping(self) -> bool:
        """True if any process wants to stop. All processes have to ask at the same time."""
        return bool(
            self._interruption.signal_of_any_process()
            or multihost.max_over_processes(self.wants_to_stop)
        )

    def next_chunk(self) -> np.int32:
        """Number of updates up to the next step at which anything is due."""
        next_due = min(next_boundary(self.steps, interval) for interval in self._intervals.values())
        steps = min(self._end, next_due) - self.steps
        return np.int32(min(math.ceil(steps / self.args.steps_per_update), MOST_UPDATES))

    def next_call(self) -> np.int32:
        """Number of updates of the next call: a chunk, or a part of it that takes a few seconds.

        All processes have to ask at the same time.
        """
        most = -multihost.max_over_processes(-self._pace.most_updates)
        return min(self.next_chunk(), np.int32(most))

    def advance(self, state: Any, updates: int, read: Callable[[], Outcome]) -> None:
        """Count dispatched updates, catch up with those before them, and evaluate and save if due.

        Args:
            state: the state after the updates.
            updates: their number.
            read: waits for the updates and returns their outcome.

        Raises:
            TrainingError: a metric was not finite, or a save has failed.
        """
        before = self.steps
        self.steps = self.steps + int(updates) * self.args.steps_per_update
        self.evaluations.poll()
        self.catch_up()
        chunk = self.recorder.add(before, self.steps, read)
        self._pace.note(int(updates), self.clock.trained)
        self.console.reach(before)
        due = {
            name
            for name, interval in self._intervals.items()
            if self.steps >= next_boundary(before, interval)
        }
        if self.steps >= self._end or (self.args.keep_best and "eval" in due):
            due |= {"eval", "checkpoint"}
        chunk.to_be_written = bool(due)
        if due & {"eval", "checkpoint"}:
            self._evaluate_and_save(
                state,
                evaluate="eval" in due,
                save="checkpoint" in due,
                goes_on=self._more_updates_follow,
            )
        elif (self._callback and due) or multihost.count() > 1:
            # A callback may end the run, so it gets its row before more is dispatched. Several
            # processes wait for each other anyway
            self.recorder.wait()
            self.catch_up()

    def _evaluate_and_save(
        self, state: Any, evaluate: bool, save: bool, goes_on: bool = False
    ) -> None:
        """Evaluate and save this state, unless that is done.

        Args:
            state: the state at this step.
            evaluate: an evaluation is due.
            save: a checkpoint is due.
            goes_on: more updates follow: only begin to evaluate and save, if copies fit on the
                devices.
        """
        evaluate = evaluate and not self.args.benchmark and self.evaluations.is_due(self.steps)
        save = save and self.saver.is_due(self.steps)
        evaluate_on_host = evaluate and self.evaluations.host_evaluation
        without_envs = state.replace(actors=())
        fetch = None
        fetch_learner = None
        if goes_on and save:
            fetch = self.saver.copied(state)  # None: it does not fit
        if goes_on and evaluate_on_host:
            fetch_learner = copied(without_envs)
        lacks_copy = (save and not fetch) or (evaluate_on_host and not fetch_learner)
        at_once = not goes_on or lacks_copy
        if at_once:
            self.recorder.wait()  # raises an error: a broken state is not even evaluated
            fetch = self._fetch_now(self.saver.to_host, state) if save else None
            fetch_learner = partial(to_host, without_envs)
        if evaluate and not evaluate_on_host:
            fetch_learner = self._begin_to_play(state)
        self._waiting = Waiting(
            step=self.steps,
            fetch_for_evaluation=fetch_learner if evaluate else None,
            fetch_for_save=fetch,
        )
        if at_once:
            self.catch_up()

    def _fetch_now(self, to_host: Callable[[Any], Any], state: Any) -> Callable[[], Any]:
        """Copy a state to the host at once, for a function that returns it later."""
        with self.clock.timed("checkpoint"):
            host = to_host(state)
        return lambda: host

    def _begin_to_play(self, state: Any) -> Callable[[], Any]:
        """Begin to play on the devices, for a function that returns the episodes.

        The next update may take the state as soon as this returns.
        """
        episodes = self._programs.evaluate(state, np.int32(SEED))
        return lambda: episodes

    @property
    def _more_updates_follow(self) -> bool:
        """True if more updates follow, whatever the outcome of the dispatched ones."""
        may_end = self._callback or self.args.stop_at_return is not None or multihost.count() > 1
        return self.steps < self._end and not may_end and not self._interruption.local_signal

    def catch_up(self) -> None:
        """Evaluate, write the row of the newest chunk, and save, as far as each is due.

        Call it as soon as more is dispatched, because it waits for that chunk.
        """
        waiting = self._waiting
        self._waiting = None
        if waiting:
            self.recorder.wait()  # raises an error: a broken state is neither evaluated nor saved
        if waiting and waiting.fetch_for_evaluation:
            self.console.doing("evaluating")
            self.evaluations.begin(waiting.step, waiting.fetch_for_evaluation())
        if self.recorder.chunk and self.recorder.chunk.to_be_written:
            self.recorder.write()
        if waiting and waiting.fetch_for_save:
            self.console.doing("saving")
            with self.clock.timed("checkpoint"):
                self.saver.save(waiting.step, waiting.fetch_for_save)
        if waiting:
            self.console.doing("training")

    def save_after_failure(self, state: Any) -> None:
        """Save a sound state before the run fails for another reason; warn if that fails too."""
        self.evaluations.poll()
        self.catch_up()
        self.recorder.write()
        try:
            self.saver.save(self.steps, self._fetch_now(self.saver.to_host, state))
            self.saver.checkpoints.wait()
        except TrainingError as error:
            self.console.warn(str(error))

    def finish(
        self, state: Any, at_end: dict[str, Callable[[Path, Any, str], str]]
    ) -> results.TrainResult:
        """Evaluate and save the last state, write the result, and show the footer.

        Args:
            state: the last state; None: nothing was trained.
            at_end: functions by name, such as drawing a picture. Each gets the run's directory, the
                learners [S, ...] on the host and the run's status, and returns a line for the
                footer. It may fail.

        Raises:
            KeyboardInterrupt: the run was interrupted by SIGINT.
            SystemExit: the run was interrupted by another signal.
        """
        if state is not None:
            self.catch_up()
            if self.recorder.chunk:
                self.recorder.chunk.to_be_written = True
            self.evaluations.last_step = self.steps
            self._evaluate_and_save(
                state, evaluate=not self._interruption.signal_of_any_process(), save=True
            )
            self.console.stop(self.steps)
            # After the save, because an environment on the host may fail
            self.evaluations.finish()
        status = "stopped"
        if self.steps >= self.total or self.evaluations.goal_reached:
            status = "finished"
        if self._interruption.signal_of_any_process():
            status = "interrupted"
        with self.clock.timed("checkpoint"):
            host, sha256 = self.saver.finish(state)
        record = reports.result(self, status, sha256)
        if self.args.benchmark and multihost.is_first():
            print(json.dumps(reports.benchmark_line(self, record)))
        before = results.result_at(self.dir, self.steps).get("status") if self.dir else None
        is_new = state is not None or status != before
        if self.dir and is_new:
            write_json(self.dir / results.RESULT, record)
        was_done = bool(self.dir and (self.dir / "DONE").exists())
        if self.dir and was_done and not is_new and not self._has_changes:
            goal = self.args.stop_at_return if self.steps < self.total else None
            self.console.say(finished_text(self.dir, goal))
        elif self.dir:
            self._draw_and_summarize(self.dir, host.learner, record, at_end)
        self._interruption.raise_received()
        return results.TrainResult(
            params=host.learner.params,
            evaluation=self.evaluations.newest.evaluation,
            env_steps=self.steps,
            run_dir=self.path,
            state_sha256=sha256,
            status=status,
        )

    def _draw_and_summarize(
        self,
        directory: Path,
        learners: Any,
        record: dict[str, Any],
        at_end: dict[str, Callable[[Path, Any, str], str]],
    ) -> None:
        """Call the functions `at_end`, and show the footer; then a finished run is done.

        A resume makes up for what a signal has skipped.
        """
        status = record["status"]
        lines = []
        for name, draw in at_end.items():
            # A signal that has come meanwhile skips what is left
            if status == "interrupted" or not self._interruption.local_signal:
                lines.append(self.console.attempt(name, draw, directory, learners, status))
        footer = self.console.attempt("summary", reports.footer, self, record, lines)
        self.console.say(footer or "")
        if status == "finished" and len(lines) == len(at_end):
            (directory / "DONE").touch()
