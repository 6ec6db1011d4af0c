"""One run: what is due when, progress, signals, failures and the result.

    with Run(args, __file__, env, devices) as run:
        state, update = run.start(algorithm)
        while run.unfinished:
            state, *report = update(state, run.next_chunk())
            run.advance(state, *report)
        return run.finish(state)

A chunk is the updates up to the next boundary of any interval; every chunk is one row of metrics. A chunk's metrics are
read only after the next chunk has been dispatched, except where an evaluation or a checkpoint needs them first.
"""

import math
import signal
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common.runs import checkpoints, report
from common.cli.flags import ONE_TIME, read_config
from common.runs.checkpoints import Checkpoints
from common.device.compilation import compile_together, set_up_cache
from common.cli.console import Console
from common.device.sharding import host_like, to_devices, to_host
from common.cli.errors import TrainingError, UsageError
from common.runs.metrics import Metrics, check_extras, jsonable
from common.drawing.figure import draw_curve
from common.runs.directory import choose_directory, claim_directory, describe_run, differences
from common.cli.signals import SignalWatch


@dataclass
class TrainResult:
    """What `train` returns."""

    params: Any  # host arrays with a leading seed axis
    evaluation: dict[str, Any]  # the last evaluation, such as `eval/return_mean`: one number per seed
    env_steps: int
    run_dir: Path | None
    state_sha256: str
    status: str  # "finished" or "stopped"


def next_boundary(step: int, interval: int) -> float:
    """First multiple of `interval` after `step`; infinite for interval 0."""
    return step + interval - step % interval if interval else math.inf


class Run:
    """See the module's text. Raises UsageError for a run directory or an extra that cannot be used."""

    def __init__(
        self, args: Any, script: str, env: Any, devices: list[jax.Device], notes: dict[str, str] | None = None
    ):
        """`notes` are lines for the header, by the word that they begin with."""
        check_extras(args.tensorboard, args.wandb)
        set_up_cache(args.compile_cache)
        self.args, self.env, self.devices, self.notes = args, env, devices, notes or {}
        self.total = args.num_updates * args.steps_per_update
        self.steps = self.first_step = 0
        self.evaluation: dict[str, list[float]] = {}
        self.console = Console(args.quiet or args.benchmark, self.total)
        self.seconds = dict.fromkeys(("compile", "eval", "checkpoint", "host"), 0.0)
        self.counters: dict[str, int] = {}  # of the host, kept in checkpoints beside the state
        self.remarks: list[str] = []  # lines for the footer
        self.measured: dict[str, Any] = {}  # more for result.json and the line of --benchmark
        self._intervals = {
            "log": args.log_interval,
            "eval": 0 if args.benchmark else args.eval_interval,
            "checkpoint": 0 if args.benchmark else args.checkpoint_interval,
        }
        self.checkpoints = self.sha256 = None
        self._pending = self._host = self._transferred = self._best = self._evaluate = None
        self._evaluated_at = self._saved_at = self._trained_until = None
        self._metrics = None
        self._created = self._trained_since = self._row_began = time.perf_counter()
        self.config = describe_run(args, script, env, devices)
        self.dir, self._differences = (None, []) if args.benchmark else choose_directory(args, self.config)
        promise = "interrupted: finishing this chunk and saving; interrupt again to exit at once"
        self._signals = SignalWatch(lambda: self.console.say(promise), self.console.abandon)

    def __enter__(self) -> "Run":
        self._signals.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.console.stop()
        self._signals.stop()
        if self.checkpoints and error is not None:
            with suppress(Exception):  # let the save under way finish; `error` is what gets reported
                self.checkpoints.wait()
        with suppress(Exception) if error is not None else nullcontext():
            if self._metrics and isinstance(error, Exception):
                report.write_result(self, "failed", reason=f"{type(error).__name__}: {error}")
            if self._metrics:
                self._metrics.close()

    def start(self, algorithm: Any, example: Any = np.int32(0)) -> tuple[Any, Any]:  # noqa: B008  (immutable)
        """Make or load the state; returns it with the compiled update (or None, None where nothing is left to do).

        `algorithm` holds the functions `init`, `update` and `evaluate` over all devices, see `pmapped`; `example` has
        the shapes of what `update` takes beside the state.
        """
        args, self._act = self.args, algorithm.act
        seeds = np.arange(args.seed, args.seed + args.num_seeds, dtype=np.int32)
        seeds = np.broadcast_to(seeds, (len(self.devices), args.num_seeds)).copy()  # [D, S]
        report.print_header(self)
        shapes = jax.eval_shape(algorithm.init, seeds)
        like = host_like(shapes)
        self._load(like)
        self._open_files()
        if self._host is not None and self.steps >= self._end:
            return None, None

        self.console.say("compiling ...")
        with self._timed("compile"):
            algorithm = compile_together(algorithm, seeds, shapes, example)
            self._evaluate = algorithm.evaluate
            state = algorithm.init(seeds) if self._host is None else to_devices(self._host, shapes, self.devices)
            if self._transferred:
                arrays = checkpoints.flatten(to_host(state)) | self._transferred
                state = to_devices(checkpoints.unflatten(arrays, like), shapes, self.devices)
            jax.block_until_ready(state)
        self.console.say(f"compiled in {self.seconds['compile']:.1f} s")
        self.console.start(self.steps)
        self._trained_since = self._row_began = time.perf_counter()
        return state, algorithm.update

    @property
    def wall_seconds(self) -> float:
        """Since the run was made."""
        return time.perf_counter() - self._created

    @property
    def trained_seconds(self) -> float:
        """From the first update on, compilation left out."""
        return (self._trained_until or time.perf_counter()) - self._trained_since

    @property
    def unfinished(self) -> bool:
        """Whether to run another chunk."""
        return self.steps < self._end and not self.stopping

    @property
    def stopping(self) -> bool:
        """Whether a signal or the clock asks for the end."""
        out_of_time = self.args.max_seconds and self.wall_seconds > self.args.max_seconds
        return bool(self._signals.received or out_of_time)

    def next_chunk(self) -> np.int32:
        """How many updates to run next: up to the next boundary of any interval."""
        boundary = min(self._end, *(next_boundary(self.steps, interval) for interval in self._intervals.values()))
        self._chunk = math.ceil((boundary - self.steps) / self.args.steps_per_update)
        self._chunk = min(self._chunk, 2**30)  # the count is an int32 on the device
        return np.int32(self._chunk)

    def advance(self, state: Any, *report: Any) -> None:
        """Account for a dispatched chunk: log the one before it; evaluate and save when due.

        `report` is what `update` returns beside the state: metrics, and where each was not finite for the first time.
        """
        before, self.steps = self.steps, self.steps + self._chunk * self.args.steps_per_update
        due = {name for name, interval in self._intervals.items() if self.steps >= next_boundary(before, interval)}
        self._log_pending()
        self._pending = before, self.steps, report
        at_end = self.steps >= self._end
        if at_end or due & {"eval", "checkpoint"}:
            self._settle(state, evaluate=at_end or "eval" in due, save=at_end or "checkpoint" in due)

    def finish(self, state: Any) -> TrainResult:
        """Write what remains, say where everything is. Raises KeyboardInterrupt or SystemExit(143) after a signal."""
        interrupted = self._signals.received
        if self.steps > self.first_step:
            self._settle(state, evaluate=not interrupted, save=not self.args.benchmark)
        self._trained_until = time.perf_counter()
        if self._host is None:
            self._host = to_host(state, self.args.unsaved)
        status = "interrupted" if interrupted else "finished" if self.steps >= self.total else "stopped"
        self.sha256 = checkpoints.sha256(self._saved_part(self._host))
        self.console.stop()
        if self.dir:
            with self._timed("checkpoint"):
                self.checkpoints.wait()
                self.checkpoints.close()
            if self.steps > self.first_step or status != "finished":
                report.write_result(self, status)
            draw_curve(self.dir, f"{self.env.name}, {self.config['algorithm']}")
            if status == "finished":
                (self.dir / "DONE").touch()
            if self.args.gif and not interrupted:
                report.draw_policy(self, self._act, self._host.learner)
        report.print_footer(self, status)
        if interrupted == signal.SIGINT:
            raise KeyboardInterrupt
        if interrupted:
            raise SystemExit(128 + interrupted)
        return TrainResult(self._host.learner.params, self.evaluation, self.steps, self.dir, self.sha256, status)

    # ------------------------------------------------------------------------------------------------- beginning

    @property
    def _end(self) -> int:
        """Environment steps at which this invocation ends."""
        return min(self.total, self.args.stop_after or self.total)

    def _load(self, like: Any) -> None:
        """Read what --resume or --init-from names, before anything is written."""
        args, zeros = self.args, checkpoints.flatten(like)
        counters = self._counters()
        if not args.resume:
            self._transferred = self._load_parameters(args.init_from, zeros)
            return
        for difference in self._differences:
            self.console.say(f"changed  {difference}")
        self.checkpoints = Checkpoints(self.dir / "checkpoints", args.keep_checkpoints, args.keep_best)
        if not self.checkpoints.steps():
            if (self.dir / "DONE").exists():
                raise UsageError(f"{self.dir} has finished, but its checkpoints are gone: nothing is left to resume")
            self.console.warn(f"{self.dir} has no checkpoint yet: starting it from step 0")
            source = self.config["args"]["init_from"]
            self._transferred = self._load_parameters(source, zeros)
            return
        self.steps, arrays, warnings = self.checkpoints.load(zeros | counters, dispensable=args.dispensable)
        self.counters = {name: int(arrays.pop(f"counters/{name}")[0]) for name in self.counters}
        if self.steps > self.total:
            raise UsageError(
                f"--total-timesteps {args.total_timesteps} is less than the {self.steps} steps that {self.dir} has done"
            )
        self.first_step = self.steps
        self._host = checkpoints.unflatten(zeros | arrays, like)
        self.evaluation = report.stored_evaluation(self.dir)
        for warning in warnings:
            self.console.warn(warning)
        self.console.say(f"resumed  {self.dir} at step {self.steps:,}")
        for name in args.dispensable:
            if not any(stored.startswith(name) for stored in arrays):
                self.console.say(f"resumed  without {name}, which is not in the checkpoint: it fills again")

    def _load_parameters(self, source: str, like: checkpoints.Arrays) -> checkpoints.Arrays | None:
        """Parameters and normaliser statistics of another run, if there is one to start from."""
        if not source:
            return None
        stored = read_config(source)["args"]
        groups = "params", "obs_stats", "return_stats"
        others = Checkpoints(Path(source) / "checkpoints", read_only=True)
        try:
            step, arrays, warnings = others.load(checkpoints.select(like, groups), groups)
        except UsageError as error:
            ours = self.config["args"]
            flags = "; ".join(differences(stored, ours, [name for name in ours if name not in (*ONE_TIME, "seed")]))
            raise UsageError(f"{error} ({flags})" if flags else str(error)) from error
        finally:
            others.close()
        for warning in warnings:
            self.console.warn(warning)
        self.console.say(f"started from the parameters of {source} at step {step:,}")
        return arrays

    def _open_files(self) -> None:
        if not self.dir:
            return
        args = self.args
        claim_directory(self.dir, self.config, args.overwrite)
        if not self.checkpoints:
            self.checkpoints = Checkpoints(self.dir / "checkpoints", args.keep_checkpoints, args.keep_best)
        self._best = self.checkpoints.best()
        self._metrics = Metrics(self.dir, self.config, args.tensorboard, args.wandb, resume_at=self.steps)

    # ------------------------------------------------------------------------------------------------ while it runs

    def _log_pending(self) -> None:
        """Read the metrics of the pending chunk, check and write them."""
        if self._pending is None:
            return
        (before, steps, report), self._pending = self._pending, None
        metrics, broken = self._read(*report)
        now = time.perf_counter()
        with self._timed("host"):
            trained = self.trained_seconds
            row = {"env_steps": steps, "updates": steps // self.args.steps_per_update}
            row |= {name: jsonable(value) for name, value in metrics.items()}
            if steps == self.steps:
                row |= self._fresh_evaluation()
            row["time/sps"] = jsonable((steps - before) / max(now - self._row_began, 1e-9))
            row["time/sps_total"] = jsonable((steps - self.first_step) / max(trained, 1e-9))
            others = sum(self.seconds[name] for name in ("eval", "checkpoint", "host"))
            row |= {"time/update": jsonable(trained - others), "time/wall": jsonable(self.wall_seconds)}
            row |= {f"time/{name}": jsonable(value) for name, value in self.seconds.items()}
            self._row_began = now
            if self._metrics:
                self._metrics.write(row)
            self.console.update(steps, row)
        self._raise_if_broken(before, broken)

    def _read(self, *report: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What `advance` was given, on the host."""
        return jax.device_get(report)

    def _raise_if_broken(self, before: int, broken: dict[str, np.ndarray]) -> None:
        """Raise TrainingError where a metric of the chunk that started at step `before` was not finite."""
        first = [(int(index), name, seed) for name, x in broken.items() for seed, index in enumerate(x) if index >= 0]
        if not first:
            return
        index, name, seed = min(first)
        step = before + (index + 1) * self.args.steps_per_update
        if self.checkpoints:
            with suppress(TrainingError):
                self.checkpoints.wait()
        kept = self.checkpoints.steps() if self.checkpoints else []
        saved = f"the last good checkpoint is at step {kept[-1]}" if kept else "there is no checkpoint yet"
        raise TrainingError(
            f"{name} is not finite at step {step} (seed {self.args.seed + seed}); {saved}; "
            "look at the environment's rewards and observations, or take smaller steps"
        )

    def _settle(self, state: Any, evaluate: bool, save: bool) -> None:
        """Evaluate and save this very state, unless that has been done; also save it where --keep-best wants it."""
        if self._pending:
            jax.block_until_ready(self._pending[2])  # so that training counts as training
        logged = not self._pending
        evaluate = evaluate and self._evaluated_at != self.steps and not self.args.benchmark
        best = evaluate and self._evaluate_now(state)
        evaluated = evaluate and self._evaluated_at == self.steps
        self._log_pending()  # raises on a non-finite number, before the state can be saved
        if evaluated and logged and self._metrics:  # the row of this step is written, the evaluation gets its own
            self._metrics.write({"env_steps": self.steps} | self._fresh_evaluation())
        if self._saved_at != self.steps and (best or save):
            self._save(state)
        elif self._saved_at == self.steps and evaluated and self.checkpoints:
            self.checkpoints.add_evaluation(self.steps, self.evaluation["eval/return_mean"])

    def _evaluate_now(self, state: Any) -> bool:
        """Evaluate all seeds; returns whether --keep-best wants this state saved."""
        with self._timed("eval"):
            episodes = self._episodes(state)
        return episodes is not None and self._note_evaluation(self.steps, *episodes)

    def _episodes(self, state: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns and lengths of the episodes of an evaluation, [S, E]; None where it was given up."""
        episodes = jax.device_get(self._evaluate(state))  # [D, S, E / D]
        return tuple(
            np.moveaxis(x, 0, 1).reshape(self.args.num_seeds, -1)[:, : self.args.eval_episodes] for x in episodes
        )

    def _note_evaluation(self, step: int, returns: np.ndarray, lengths: np.ndarray) -> bool:
        """Take over an evaluation of the state at `step`; returns whether --keep-best wants that saved."""
        statistics = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
        values = {f"return_{name}": function(returns, axis=1) for name, function in statistics.items()}
        values["length_mean"] = lengths.mean(axis=1)
        self.evaluation = {f"eval/{name}": value.astype(float).tolist() for name, value in values.items()}
        self._evaluated_at = step
        mean = float(np.mean(self.evaluation["eval/return_mean"]))
        best = self._best is None or mean > self._best
        self._best = mean if best else self._best
        return best and self.args.keep_best

    def _fresh_evaluation(self) -> dict[str, Any]:
        if self._evaluated_at != self.steps:
            return {}
        return {name: jsonable(value) for name, value in self.evaluation.items()}

    def _save(self, state: Any) -> None:
        with self._timed("checkpoint"):
            self._host, self._saved_at = to_host(state, self.args.unsaved), self.steps
            if self.checkpoints:
                returns = self.evaluation["eval/return_mean"] if self._evaluated_at == self.steps else None
                self.checkpoints.save(self.steps, self._saved_part(self._host) | self._counters(), returns)

    def _saved_part(self, host: Any) -> checkpoints.Arrays:
        return checkpoints.without(checkpoints.flatten(host), self.args.unsaved)

    def _counters(self) -> checkpoints.Arrays:
        return {f"counters/{name}": np.int64([count]) for name, count in self.counters.items()}

    @contextmanager
    def _timed(self, name: str):
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began
