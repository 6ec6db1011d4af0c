"""One run: wires its parts together, the loops in `common/training.py` drive it.

A chunk is the updates up to the next time that anything is due; every chunk is one row of metrics. What a chunk reports
is read only after the next chunk has been dispatched, so that the devices never wait for the host, except where an
evaluation or a checkpoint needs it first.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from common.cli.checks import LARGEST
from common.cli.errors import TrainingError
from common.cli.files import write_json
from common.device import multihost
from common.device.programs import Programs, compile_together, set_up_cache
from common.device.sharding import host_like, place
from common.runs import reports, results
from common.runs.console import Console
from common.runs.directory import agree_on_directory, check_shared, claim_directory, describe_run
from common.runs.evaluator import Evaluations
from common.runs.intervals import intervals_of, next_boundary
from common.runs.lock import is_ours
from common.runs.metrics import import_writers
from common.runs.recorder import Callback, Chunk, Clock, Recorder, Report
from common.runs.saving import Saver, load
from common.runs.signals import Interruption


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
        cautions: Mapping[str, tuple[float, str]] | None = None,
    ):
        """`env` has a `name` and a `spec`. `notes` are lines for the header, by the word that they begin with.

        `cautions` are an algorithm's, see `OnPolicy`.
        """
        import_writers(args)  # which fails before anything is written
        set_up_cache()
        self.args, self.devices, self.is_game = args, devices, getattr(env, "is_game", False)
        self.env_name, self.cautions = env.name, dict(cautions or {})  # those that are not said yet
        self.total = args.num_updates * args.steps_per_update
        self._end = min(self.total, args.stop_after or self.total)  # of this invocation
        self.intervals = intervals_of(args, on_accelerator=devices[0].platform != "cpu")
        self._intervals = {"log": self.intervals.log, "exchange": args.exchange_interval}
        if not args.benchmark:
            self._intervals |= {"eval": self.intervals.eval, "checkpoint": self.intervals.checkpoint}
        self.config = describe_run(args, script, env, devices)
        (self.path, changes), first = agree_on_directory(args, self.config), multihost.is_first()
        self.dir = self.path if first else None  # where this process writes
        self.console = Console(args.quiet or args.benchmark, self.total, args.is_population, speaks=first)
        self._interruption = Interruption(self.console)
        self.steps = self.first_step = 0
        self.figures: dict[str, Any] = {}  # more for `result.json` and --benchmark, of actors once they have ended
        self._header = reports.header(self, env.name, notes, changes)
        self.clock, self.callback = Clock(), callback if first else None
        self.saver = self.recorder = self.evaluations = None  # until `start`

    def __enter__(self) -> "Run":
        self._interruption.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.console.stop(self.steps)
        self._interruption.stop()
        if self.evaluations is None:
            return
        self.evaluations.stop()
        with suppress(Exception):  # `error` is what gets reported
            if error is not None and not multihost.has_lost(error):
                self.saver.checkpoints.let_finish()
        with suppress(Exception):
            self.saver.withdraw()
        with suppress(Exception):
            if isinstance(error, Exception) and self.dir and is_ours(self.dir):
                reason = {"reason": f"{type(error).__name__}: {error}"}
                write_json(self.dir / results.RESULT, reports.result(self, "failed") | reason)
        self.console.attempt("log", self.recorder.close)

    def start(self, programs: Programs, members: Any, shapes: Any, example: Any, beside: Any = None) -> tuple[Any, Any]:
        """Make or load the state; returns it with the compiled update (or None, None where nothing is left to do).

        `members` are what `init` takes, the state has these `shapes`, and `example` those of what `update` takes beside
        it. A `HostEvaluation`, which plays `beside` the training, takes the place of `evaluate`.
        """
        self.console.say(self._header)
        check_shared(self.path)
        start = load(self.args, self.config, host_like(shapes), self.console)
        self.first_step = self.steps = start.step
        if self.dir and self.steps < self.total:  # else nothing is trained, and the flags stay as they are
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
            fresh = np.int32((members.seed.astype(np.int64) + self.steps) % LARGEST)  # other episodes after a resume
            make = partial(programs.init, members._replace(seed=fresh))
            state = place(start.arrays, make, shapes, self.devices, self.args.sharding)
        self.console.say(f"compiled in {self.clock.seconds['compile']:.1f} s")
        self.evaluations.evaluate, self.evaluations.beside = programs.evaluate, beside
        self.console.doing("training")
        self.clock.begin()
        return state, programs.update

    @property
    def unfinished(self) -> bool:
        """Whether to run another chunk."""
        return self.steps < self._end and not self.stopping

    @property
    def leaving(self) -> bool:
        """Whether a signal, the clock (once anything is trained), the callback or a good return wants the end, here."""
        seconds = self.clock.wall - self.clock.wall_before
        late = 0 < self.args.max_seconds < seconds and self.steps > self.first_step
        return bool(self._interruption.here or late or self.recorder.stop_requested or self.evaluations.goal_reached)

    @property
    def stopping(self) -> bool:
        """Whether that is so in any process, all of which have to ask at the same time."""
        return bool(self._interruption.received() or multihost.max_over_processes(self.leaving))

    def no_more_evaluations(self) -> bool:
        """Whether none is to be played, or waited for, any more; all processes have to ask at the same time."""
        return bool(self.args.benchmark or self._interruption.received())

    def next_chunk(self) -> np.int32:
        """How many updates to run next: up to the first step at which anything is due."""
        next_due = min(next_boundary(self.steps, interval) for interval in self._intervals.values())
        steps = min(self._end, next_due) - self.steps
        return np.int32(min(math.ceil(steps / self.args.steps_per_update), 2**30))

    def advance(self, state: Any, updates: int, read: Callable[[], Report]) -> None:
        """Account for a dispatched chunk of `updates`: log the one before it; evaluate and save when due.

        `read` waits for what the chunk reports. Raises TrainingError for what was not finite.
        """
        before, self.steps = self.steps, self.steps + int(updates) * self.args.steps_per_update
        self.evaluations.poll()
        self.recorder.write()
        self.recorder.chunk = Chunk(before, self.steps, cache(read))
        due = {name for name, interval in self._intervals.items() if self.steps >= next_boundary(before, interval)}
        if self.steps >= self._end or (self.args.keep_best and "eval" in due):
            due |= {"eval", "checkpoint"}
        if due & {"eval", "checkpoint"}:
            self._settle(state, evaluate="eval" in due, save="checkpoint" in due)
        elif self.callback or multihost.count() > 1:
            self.recorder.write()  # the callback may end the run here; processes wait for the chunk anyway

    def _settle(self, state: Any, evaluate: bool, save: bool) -> None:
        """Evaluate and save this very state, unless that is done."""
        self.recorder.wait()  # raises: what is broken is neither evaluated nor saved
        if evaluate and not self.args.benchmark:
            self.console.doing("evaluating")
            self.evaluations.begin(self.steps, state)
        self.recorder.write()
        if save:
            self.console.doing("saving")
            with self.clock.timed("checkpoint"):
                self.saver.save(self.steps, state)
        self.console.doing("training")

    def rescue(self, state: Any) -> None:
        """Save before the run fails for a reason that does not lie in `state`; warns where that fails too."""
        self.evaluations.poll()
        self.recorder.write()
        try:
            self.saver.save(self.steps, state)
            self.saver.checkpoints.wait()
        except TrainingError as error:
            self.console.warn(str(error))

    def finish(self, state: Any, at_end: dict[str, Callable[[Any, str], str]]) -> reports.TrainResult:
        """Write what remains, say where everything is. Raises KeyboardInterrupt or SystemExit after a signal.

        Each of `at_end` gets the learners on the host, [S, ...], and the run's status, and returns a line; it may fail.
        """
        if state is not None:
            self._settle(state, evaluate=not self._interruption.received(), save=True)
            self.console.stop(self.steps)
            self.evaluations.finish()  # once all is saved, since an environment on the host may fail
        finished = self.steps >= self.total or self.evaluations.goal_reached
        status = "interrupted" if self._interruption.received() else "finished" if finished else "stopped"
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
                if status == "interrupted" or not self._interruption.here:  # else a signal has come meanwhile: it waits
                    lines.append(self.console.attempt(name, draw, host.learner, status))
            self.console.say(self.console.attempt("summary", reports.footer, self, record, lines) or "")
        self._interruption.go_on()
        evaluation = self.evaluations.newest.evaluation
        return reports.TrainResult(host.learner.params, evaluation, self.steps, self.path, sha256, status)
