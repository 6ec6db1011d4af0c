"""Runs of a benchmark as jobs, each in a process of its own: what is done is kept, what was cut
short goes on.

A job is a command of the docs. Its run directory is named after what the command means, so that the
same command after a change of defaults or of tuned flags is another job.
"""

import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmaprl.cli.command import parse
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.files import is_run, writing
from pmaprl.cli.run_flags import ONE_TIME, flag_words
from pmaprl.runs.lock import check_free
from pmaprl.runs.metrics import read

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
LOOK_INTERVAL = 5.0  # seconds between two looks at a run that goes on


def imports_of(checkout: Path) -> dict[str, str]:
    """Environment variables of a process that imports the kit, and its benchmarks, from a
    checkout.
    """
    return {"PYTHONPATH": f"{checkout / 'common'}{os.pathsep}{checkout}"}


# Environment variables of a process that compiles all anew
UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes another program, which the kernel asks to save and end when its parent has ended, where
kernels do that.
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of `algorithm`, a file of algos/, with these flags; its directory lies in
    `folder`.
    """

    algorithm: str
    flags: tuple[str, ...]
    folder: Path

    @cached_property
    def args(self) -> Any:
        """The flags as the algorithm takes them, with those that were tuned."""
        return parse(
            importlib.import_module(f"pmaprl.algos.{self.algorithm}").Args, list(self.flags)
        )

    @cached_property
    def run_dir(self) -> Path:
        meant = {
            name: value
            for name, value in dataclasses.asdict(self.args).items()
            if name not in ONE_TIME
        }
        digest = hashlib.sha256(json.dumps(meant, sort_keys=True).encode()).hexdigest()[:8]
        env = self.args.env.replace(":", "-").replace("/", "-")
        return self.folder / f"{env}__{self.algorithm}__{self.args.seed}__{digest}"

    @cached_property
    def command(self) -> str:
        """The command as a person would type it."""
        return shlex.join(["python", f"algos/{self.algorithm}.py", *self.flags])

    @property
    def done(self) -> bool:
        return (self.run_dir / "DONE").exists()

    @property
    def total_steps(self) -> int:
        """Environment steps, of all its seeds."""
        return self.args.total_timesteps * self.args.num_agents

    def steps(self) -> int:
        """Count the steps that are done."""
        rows = [row["env_steps"] for row in read(self.run_dir / "metrics.jsonl")]
        return min(max(rows, default=0), self.args.total_timesteps) * self.args.num_agents

    def words(self) -> list[str]:
        """The command that begins the run, or goes on with it."""
        again = ["--resume", str(self.run_dir), "--env", self.args.env]
        flags = again if is_run(self.run_dir) else [*self.flags, "--run-dir", str(self.run_dir)]
        return [sys.executable, str(ROOT / "algos" / f"{self.algorithm}.py"), *flags]

    def start(self) -> subprocess.Popen:
        """Begin the run, or go on with it; what it says goes into a file beside its directory.

        It compiles anew, for how long that takes is a result too.
        """
        how = {"process_group": 0, "env": os.environ | imports_of(ROOT) | UNCACHED}
        with self.log.open("a") as log:
            return subprocess.Popen(ends_with_us(self.words()), stdout=log, stderr=log, **how)

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.log")


def last_of(said: str) -> str:
    """The last line."""
    return (said.strip().splitlines() or ["it said nothing"])[-1]


def make_folder(folder: Path) -> None:
    """Make it, unless it is there. Raises UsageError where that cannot be."""
    with writing(f"folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def ends_with_us(words: list[str]) -> list[str]:
    """The words of a command that is asked to save and end when this process has ended."""
    return [sys.executable, "-c", ENDS_WITH_PARENT, str(os.getpid()), *words]


def last_line(words: list[str], env: dict[str, str] | None = None) -> Any:
    """The JSON of a command's last line. Raises UsageError where it exits with 2, TrainingError for
    any other code.
    """
    done = subprocess.run(
        ends_with_us(words),
        env=os.environ | imports_of(ROOT) | (env or {}),
        capture_output=True,
        text=True,
    )
    said = last_of(done.stderr).removeprefix("error: ")
    if done.returncode == 2:
        raise UsageError(said)
    if done.returncode:
        raise TrainingError(f"{said[:200]} (exit code {done.returncode})")
    return json.loads(last_of(done.stdout))


def jobs_over(
    seeds: range,
    algorithm: str,
    env: str,
    flags: dict[str, Any],
    folder: Path,
    at_once: int | None = None,
) -> list[Job]:
    """Runs that train these seeds on `env`, so many or all of them in one run where the algorithm
    can.
    """
    args_class = importlib.import_module(f"pmaprl.algos.{algorithm}").Args
    args_class = args_class.at(env) if hasattr(args_class, "at") else args_class
    of_each = [{"seed": seed} for seed in seeds]
    if "num_seeds" in {field.name for field in dataclasses.fields(args_class)}:
        of_each = [
            {"seed": x.start, "num_seeds": len(x)} for x in parts_of(seeds, at_once or len(seeds))
        ]
    return [
        Job(algorithm, tuple(flag_words({"env": env} | flags | some)), folder) for some in of_each
    ]


def parts_of(seeds: range, at_most: int) -> list[range]:
    """The seeds in parts of equal length, but for the last one, which may be shorter."""
    return [seeds[index : index + at_most] for index in range(0, len(seeds), at_most)]


def run(jobs: Iterable[Job], after_each: Callable[[], None] = lambda: None) -> list[Job]:
    """Run the jobs that are not done, one after another; returns those that failed, whose reasons
    are said.

    SIGINT or SIGTERM end the run that goes on, which saves itself, and then this, with
    KeyboardInterrupt or SystemExit. Raises UsageError where their folder cannot be written.
    """
    from rich import progress

    jobs = list(jobs)
    failed = []
    for folder in {job.folder for job in jobs}:
        make_folder(folder)
    counted = "{task.completed:,.0f} / {task.total:,.0f} steps, ETA"
    command = "{task.description}"
    columns = [
        progress.TextColumn(counted),
        progress.TimeRemainingColumn(),
        progress.TextColumn(command),
    ]
    with ExitStack() as stack:
        for number, end in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, lambda *_: sys.exit(143)),
        ):
            stack.callback(signal.signal, number, signal.signal(number, end))
        bar = stack.enter_context(progress.Progress(*columns, speed_estimate_period=600))
        steps = {job: job.total_steps if job.done else job.steps() for job in jobs}
        everything = bar.add_task(
            "all", total=sum(job.total_steps for job in jobs), completed=sum(steps.values())
        )
        for job in (job for job in jobs if not job.done):

            def show(done, job=job):
                bar.update(
                    everything,
                    completed=sum((steps | {job: done}).values()),
                    description=job.command,
                )

            try:
                _watch(job, show)
                steps[job] = job.total_steps
                _say_done(job, bar.console)
            except TrainingError as error:
                failed.append(job)
                bar.console.print(str(error), markup=False, style="red", soft_wrap=True)
            after_each()
        after_each()  # all may have been done before
        bar.update(everything, description="")
    return failed


def _say_done(job: Job, console: "Console") -> None:
    """A line for a log; a terminal has the bar."""
    if not console.is_terminal:
        print(f"done: {job.command}", flush=True)


def _watch(job: Job, show: Callable[[int], None]) -> None:
    """Until the run has ended. Raises TrainingError where it has failed."""
    for attempt in itertools.count():
        try:
            check_free(job.run_dir)  # of a process that was told to end and is saving
            break
        except UsageError as error:
            if attempt == 0:
                print(f"waiting: {error}", flush=True)
            time.sleep(1)
    if job.done:  # by another command, meanwhile
        return
    process = job.start()
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_INTERVAL)
            show(job.steps())
    finally:
        if process.poll() is None:
            print("stopped; the same command goes on from here", file=sys.stderr)
            process.send_signal(signal.SIGTERM)
            process.wait()
    if process.returncode < 0:
        raise TrainingError(
            f"{job.command} was ended by signal {-process.returncode}; the same command goes on"
        )
    if process.returncode or not job.done:
        said = f"{last_of(job.log.read_text())} ({job.log} has the rest)"
        raise TrainingError(f"{job.command} ended with {process.returncode}: {said}")
